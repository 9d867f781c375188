"""call.py: the sub-command and the bundle among the arguments as engines write them."""

from __future__ import annotations

import pytest

from gpulet.errors import UsageError
from gpulet.launch.call import Call, read


@pytest.mark.parametrize(
    ("line", "command", "bundle"),
    [
        ("--root /r --log /l --log-format json create --bundle /b --pid-file /p x", "create", "/b"),
        ("--root=/r --systemd-cgroup create --bundle=/b x", "create", "/b"),
        ("create -b /b x", "create", "/b"),
        ("create -bundle /b x", "create", "/b"),
        ("create --b=/b x", "create", "/b"),
        ("create x", "create", None),
        ("create --bundle /a --bundle /b x", "create", "/b"),
        ("--bundle /b create x", "create", "/b"),
        ("--bundle create state x", "state", "create"),
        ("delete create", "delete", None),  # a container of that name: the peer looks for its bundle and fails
        ("delete --force create", "delete", None),
        ("exec x create --bundle /b", "exec", "/b"),
        ("--root create state x", "state", None),
        ("--unknown value create --bundle /b x", "create", "/b"),
        ("--cgroup-manager systemd create --bundle /b x", "create", "/b"),
        ("create --pid-file --bundle x", "create", None),
        ("run --bundle /b x", "run", "/b"),
        ("--version", "", None),
        ("", "", None),
    ],
)
def test_command_and_bundle(line: str, command: str, bundle: str | None) -> None:
    seen = read(line.split())
    assert (seen.command, seen.bundle) == (command, bundle)


@pytest.mark.parametrize("line", ["create --bundle", "create x -b", "create --bundle= x"])
def test_a_bundle_flag_without_a_value(line: str) -> None:
    with pytest.raises(UsageError, match="bundle option requires an argument"):
        read(line.split())


def test_log_and_debug() -> None:
    seen = read(["--debug", "--log", "/l", "--log-format=json", "create", "-b", "/b", "x"])
    assert seen == Call("create", "/b", "/l", "json", debug=True)
    assert seen.config_path() == "/b/config.json"
    assert read(["create", "x"]).config_path() == "config.json"


def test_version_is_asked_for_only_without_a_command() -> None:
    assert read(["--version"]).version
    assert read(["-version"]).version
    assert not read(["create", "--version"]).version
