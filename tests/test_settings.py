"""settings.py: where the file is looked for, what its keys mean, and that compiling it changes nothing."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path

import pytest

from gpulet import codec, settings
from gpulet.errors import ConfigError
from gpulet.settings import KEYS, Settings, load

EVERYTHING = """\
disable-require = true
swarm-resource = "A, B"
# a comment = 1
[nvidia-container-cli]
root = "/run/nvidia/driver"
environment = ["X=1", "Y=2"]
user = ""
visible-devices-envvars = ["CUDA_VISIBLE_DEVICES"]
surprise = 3
[nvidia-container-runtime]
mode = "cdi"
[nvidia-container-runtime.modes.cdi]
spec-dirs = ["/x"]
[gpulet.policy]
grants = "kubelet"
trusted = ["kube-system/*"]
"""


@pytest.fixture(autouse=True)
def an_old_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """What has just changed isn't kept; here it has been a while."""
    monkeypatch.setattr(codec, "_FRESH", -(10**18))


def write(folder: Path, text: str) -> Path:
    path = folder / "config.toml"
    path.write_text(text)
    return path


def test_without_a_file_the_defaults_hold(tmp_path: Path) -> None:
    found = load(environ={"XDG_CONFIG_HOME": str(tmp_path)})
    assert found == Settings()
    assert found.runtimes == ("runc", "crun")
    assert found.policy_grants == "env"
    assert found.where("mode") == "default"


def test_every_key_names_a_field_and_every_field_has_a_key() -> None:
    assert set(KEYS.values()) == set(Settings._fields) - {"source", "lines", "unknown"}


@pytest.mark.parametrize(
    ("path", "environ", "wanted"),
    [
        ("/a", {"GPULET_CONFIG": "/b"}, ("/a", True)),
        (None, {"GPULET_CONFIG": "/b", "NVIDIA_CTK_CONFIG_FILE_PATH": "/c", "XDG_CONFIG_HOME": "/d"}, ("/b", True)),
        (None, {"NVIDIA_CTK_CONFIG_FILE_PATH": "/c", "XDG_CONFIG_HOME": "/d"}, ("/c", True)),
        (None, {"XDG_CONFIG_HOME": "/d"}, ("/d/nvidia-container-runtime/config.toml", False)),
        (None, {"XDG_CONFIG_HOME": ""}, ("/etc/nvidia-container-runtime/config.toml", False)),
    ],
)
def test_the_order_of_places(path: str | None, environ: dict[str, str], wanted: tuple[str, bool]) -> None:
    assert settings.locate(path, environ) == wanted


def test_a_file_asked_for_by_name_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load(str(tmp_path / "none.toml"))


def test_values_places_and_unknown_keys(tmp_path: Path) -> None:
    path = write(tmp_path, EVERYTHING)
    found = load(str(path))
    assert found.disable_require is True
    assert found.swarm_variables() == ("A", "B")
    assert found.cli_environment == ("X=1", "Y=2")
    assert found.cli_user == ""
    assert found.visible_devices_envvars == ("CUDA_VISIBLE_DEVICES",)
    assert found.cdi_spec_dirs == ("/x",)
    assert found.policy_trusted == ("kube-system/*",)
    assert found.unknown == ("nvidia-container-cli.surprise",)
    assert found.where("mode") == f"{path} line 11"
    assert found.where("policy_grants") == f"{path} line 15"
    assert found.where("disable_require") == f"{path} line 1"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('disable-require = "yes"', "line 1: disable-require: 'yes' \\(wanted true or false\\)"),
        ("\n[nvidia-container-runtime]\nruntimes = 'runc'", "line 3: nvidia-container-runtime.runtimes"),
        ("[nvidia-container-cli]\nenvironment = [1]", "wanted a list of text"),
        ("[nvidia-container-cli]\nroot = 1", "wanted text"),
        ("[nvidia-container-runtime]\nmode = 'foo'", "one of auto, cdi"),
        ("[gpulet.policy]\ngrants = 'all'", "one of env, kubelet"),
        ("a = [", "wanted TOML"),
        ("a = " + "[" * 5000, "wanted TOML"),
        ('[nvidia-container-runtime]\nruntimes = ["a\\u0000b"]', "line 2: nvidia-container-runtime.runtimes.*NUL"),
        ('[nvidia-container-runtime]\ndebug = "/a\\u0000b"', "runtime.debug.*NUL"),
        ('[nvidia-container-cli]\nenvironment = ["A=\\u0000"]', "cli.environment.*NUL"),
        ('[gpulet]\nstate-dir = "/a\\u0000b"', "line 2: gpulet.state-dir.*NUL"),
        ("[gpulet]\nstate-dir = 'a/b'", "line 2: gpulet.state-dir: 'a/b' \\(wanted an absolute path\\)"),
        ("[gpulet]\nstate-dir = ''", "wanted an absolute path"),
        ("[nvidia-container-cli]\nldconfig = '/sbin/ldconfig'", "line 2: nvidia-container-cli.ldconfig.*host"),
        ("[nvidia-container-cli]\nldconfig = ''", "ldconfig"),
    ],
)
def test_what_cannot_be_used_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(str(write(tmp_path, text)))


def test_what_is_no_file_is_named_and_nobody_waits(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", Path("/dev/zero")):
        failed: list[ConfigError] = []

        def attempt(path: Path = path, failed: list[ConfigError] = failed) -> None:
            with pytest.raises(ConfigError, match=f"{path}: not a regular file") as caught:
                load(str(path))
            failed.append(caught.value)

        one = threading.Thread(target=attempt, daemon=True)
        one.start()
        one.join(10)
        assert failed


def test_one_byte_order_mark_is_passed_over(tmp_path: Path) -> None:
    """As Notepad writes it, on WSL."""
    plain = load(str(write(tmp_path, EVERYTHING)))
    assert load(str(write(tmp_path, "\ufeff" + EVERYTHING))) == plain
    with pytest.raises(ConfigError, match="line 1"):
        load(str(write(tmp_path, "\ufeff\ufeff" + EVERYTHING)))


def test_a_containers_ldconfig_only_where_allowed(tmp_path: Path) -> None:
    text = "[nvidia-container-cli]\nldconfig = '/sbin/ldconfig'\n[features]\nallow-ldconfig-from-container = true\n"
    assert load(str(write(tmp_path, text))).ldconfig() == "/sbin/ldconfig"


def test_ldconfig_is_the_real_one_where_there_is_one(tmp_path: Path) -> None:
    plain = tmp_path / "ldconfig"
    assert Settings(cli_ldconfig=f"@{plain}.real").ldconfig() == f"@{plain}"
    Path(f"{plain}.real").touch()
    assert Settings(cli_ldconfig=f"@{plain}").ldconfig() == f"@{plain}.real"


def test_compiled_is_the_same_and_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, EVERYTHING)
    first = load(str(path))
    assert (tmp_path / ".config.toml.gpulet").exists()
    monkeypatch.setattr(settings, "_read_toml", lambda path: pytest.fail("read again"))
    assert load(str(path)) == first


def test_a_change_is_seen_and_a_fresh_file_is_not_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, "disable-require = true")
    assert load(str(path)).disable_require is True
    monkeypatch.undo()
    path.write_text("swarm-resource = 'A12'")  # as long as the first
    assert load(str(path)).swarm_resource == "A12"
    path.write_text("swarm-resource = 'B12'")  # perhaps within the same tick of the file system's clock
    assert load(str(path)).swarm_resource == "B12"


def test_a_change_of_the_same_size_is_seen_whatever_the_time_says(tmp_path: Path) -> None:
    path = write(tmp_path, "swarm-resource = 'A12'")
    before = path.stat()
    assert load(str(path)).swarm_resource == "A12"
    time.sleep(0.02)
    path.write_text("swarm-resource = 'B12'")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert load(str(path)).swarm_resource == "B12"


@pytest.mark.parametrize(
    ("part", "odd"),
    [
        ("fields", {"of_another_version": 1}),
        ("fields", {"runtimes": 3}),
        ("fields", {"source": "/x"}),
        ("fields", []),
        ("lines", 1),
        ("unknown", None),
    ],
)
def test_what_was_kept_in_another_form_does_not_count(tmp_path: Path, part: str, odd: object) -> None:
    path = write(tmp_path, "disable-require = true")
    load(str(path))
    kept = tmp_path / ".config.toml.gpulet"
    content = json.loads(kept.read_text())
    content["value"][part] = odd
    kept.write_text(json.dumps(content))
    found = load(str(path))
    assert (found.disable_require, found.source) == (True, str(path))


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b'{"key": []}', b"\xff"])
def test_a_broken_compiled_file_is_passed_over(tmp_path: Path, content: bytes) -> None:
    path = write(tmp_path, "disable-require = true")
    (tmp_path / ".config.toml.gpulet").write_bytes(content)
    assert load(str(path)).disable_require is True


def test_what_somebody_else_wrote_is_not_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, "disable-require = true")
    load(str(path))
    kept = tmp_path / ".config.toml.gpulet"
    kept.write_bytes(kept.read_bytes().replace(b"true", b"false"))
    assert load(str(path)).disable_require is False
    if os.geteuid() == 0:
        os.chown(kept, 1234, 1234)
        assert load(str(path)).disable_require is True


def test_a_folder_that_cannot_be_written_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, "disable-require = true")

    def refuse(old: str, new: str) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(os, "rename", refuse)
    assert load(str(path)).disable_require is True
    assert sorted(item.name for item in tmp_path.iterdir()) == ["config.toml"]
