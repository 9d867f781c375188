"""gpulet-container-cli: arguments, text, exit codes and error categories, as NVIDIA's program answered them."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gpulet.launch import argp, cli_report, container_cli
from gpulet.node import ldcache
from gpulet.node.gpu import Gpu, MigDevice, NodeFacts
from support import cli_node
from support.cli_node import BINARIES, CONTROL, FIRMWARE, LIBRARIES, SOCKETS, uuid
from support.namespaced import mounts, namespaced, tree

pytestmark = pytest.mark.root

GPUS = tuple(f"/dev/nvidia{index}" for index in range(8))
CHANNEL = "/dev/nvidia-caps-imex-channels/channel"
FILES = (*BINARIES, *LIBRARIES, *SOCKETS, *FIRMWARE)


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cli_node.lay(tmp_path_factory.mktemp("node") / "root")


@pytest.fixture
def cli(node: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):  # type: ignore[no-untyped-def]
    """Calls the program under its peer's name: (exit code, lines of standard output, standard error)."""
    monkeypatch.setattr(sys, "argv", ["/usr/bin/nvidia-container-cli"])

    def call(text: str, root: str | None = None) -> tuple[int, tuple[str, ...], str]:
        code = container_cli.main([f"--root={root or node}", *text.split()])
        said = capsys.readouterr()
        return code, tuple(said.out.splitlines()), said.err.strip()

    return call


LISTS: dict[str, tuple[str, ...]] = {
    "list": (*CONTROL, *GPUS, *FILES),
    "list --device=0": (*CONTROL, GPUS[0]),
    "list --device=0,1": (*CONTROL, GPUS[0], GPUS[1]),
    "list --device=1,0": (*CONTROL, GPUS[1], GPUS[0]),
    "list --device=0,0": (*CONTROL, GPUS[0]),
    "list --device=all": (*CONTROL, *GPUS),
    "list --device=ALL": (*CONTROL, *GPUS),
    f"list --device={uuid(3)}": (*CONTROL, GPUS[3]),
    f"list --device={uuid(3).lower()}": (*CONTROL, GPUS[3]),
    "list --device=0:3:0": (*CONTROL, GPUS[2]),
    "list --dev 00000000:08:00.0": (*CONTROL, GPUS[7]),
    "list -d 7 -d 2": (*CONTROL, GPUS[7], GPUS[2]),
    "list -d7": (*CONTROL, GPUS[7]),
    "list --device=": CONTROL,
    "list --libraries": LIBRARIES,
    "list --binaries": BINARIES,
    "list --ipcs": SOCKETS,
    "list --firmwares": FIRMWARE,
    "list -lbif": FILES,
    "list -l -b -i -f": FILES,
    "list --libraries --compat32": LIBRARIES,
    "list --ipcs --no-persistenced": SOCKETS[1:],
    "list --ipcs --no-fabricmanager": (SOCKETS[0], SOCKETS[2]),
    "list -f --no-gsp-firmware": (),
    "list --imex-channel=3": (*CONTROL, *GPUS, f"{CHANNEL}3", *FILES),
    "list --imex-channel=0,2047": (*CONTROL, *GPUS, f"{CHANNEL}0", f"{CHANNEL}2047", *FILES),
    "list --imex-channel 3": (f"{CHANNEL}3",),
    "list --mig-config=all": (),
    "list --mig-monitor=all": (),
}


@pytest.mark.parametrize("text", LISTS)
def test_lists(cli, text: str) -> None:  # type: ignore[no-untyped-def]
    assert cli(text) == (0, LISTS[text], "")


TRY_LIST = "Try `nvidia-container-cli list --help' or `nvidia-container-cli list --usage'\nfor more information."
USAGE = (
    "Usage: nvidia-container-cli [OPTION...] COMMAND [ARG...]\n"
    "Try `nvidia-container-cli --help' or `nvidia-container-cli --usage' for more\ninformation."
)
FAILURES = {
    "list --device=none": "nvidia-container-cli: device error: none: unknown device",
    "list --device=void": "nvidia-container-cli: device error: void: unknown device",
    "list --mig-config=0": "nvidia-container-cli: mig-config error: 0: only 'all' devices are currently supported",
    "list --mig-monitor=0,1": "nvidia-container-cli: mig-monitor error: 0: only 'all' devices are currently supported",
    "list --bad": f"nvidia-container-cli list: unrecognized option '--bad'\n{TRY_LIST}",
    "list --no": "nvidia-container-cli list: option '--no' is ambiguous; possibilities: "
    f"'--no-persistenced' '--no-fabricmanager' '--no-gsp-firmware'\n{TRY_LIST}",
    "list -z": f"nvidia-container-cli list: invalid option -- 'z'\n{TRY_LIST}",
    "list -d": f"nvidia-container-cli list: option requires an argument -- 'd'\n{TRY_LIST}",
    "list --device": f"nvidia-container-cli list: option '--device' requires an argument\n{TRY_LIST}",
    "list --ipcs=x": f"nvidia-container-cli list: option '--ipcs' doesn't allow an argument\n{TRY_LIST}",
    "info extra": "nvidia-container-cli info: Too many arguments\n" + TRY_LIST.replace(" list ", " info "),
    "info --bad": "nvidia-container-cli info: unrecognized option '--bad'\n" + TRY_LIST.replace(" list ", " info "),
    "list extra": f"nvidia-container-cli list: Too many arguments\n{TRY_LIST}",
    "bogus": USAGE,
    "": USAGE,
    "configure": "Usage: nvidia-container-cli configure [OPTION...] ROOTFS\n"
    "Try `nvidia-container-cli configure --help' or `nvidia-container-cli configure\n--usage' for more information.",
    "configure relative": "nvidia-container-cli: input error: invalid rootfs directory",
    "configure /": "nvidia-container-cli: input error: invalid rootfs directory",
    "configure /x/../.": "nvidia-container-cli: input error: invalid rootfs directory",
    "configure --pid=abc /x": "nvidia-container-cli: input error: parse pid failed: invalid argument",
    "configure --pid=99999999999 /x": "nvidia-container-cli: input error: parse pid failed: "
    "numerical result out of range",
    "configure --pid=4194304 /x": "nvidia-container-cli: container error: open failed: /proc/4194304/root/: "
    "no such file or directory",
    "configure --imex-channel=abc /x": "nvidia-container-cli: error parsing IMEX info: "
    "unsupported IMEX channel value: abc",
    "configure --loader-cache=x /x --pid=1": "nvidia-container-cli: input error: invalid loader-cache: x "
    "(one of native, ldconfig)",
    "configure --imex-channel=1048576 /x": "nvidia-container-cli: error parsing IMEX info: "
    "unsupported IMEX channel value: 1048576",
    "-unobody:nosuchgroup list": "nvidia-container-cli: input error: parse user/group failed: "
    "no such file or directory",
    "--ldcache= list": "nvidia-container-cli: initialization error: invalid argument",
}


@pytest.mark.parametrize("text", FAILURES)
def test_failures(cli, text: str) -> None:  # type: ignore[no-untyped-def]
    assert cli(text) == (1, (), FAILURES[text])


@pytest.mark.parametrize("name", ["9", "GPU-4d4f434b", "-1", "0x1", "GPU-ffffffff-0000-0000-0000-000000000000"])
def test_an_unknown_device_is_named_and_the_known_ones_shown(cli, name: str) -> None:  # type: ignore[no-untyped-def]
    code, out, err = cli(f"list --device=0,{name}")
    assert (code, out) == (1, ())
    assert err.startswith(f"nvidia-container-cli: device error: {name}: unknown device (one of 0 ({uuid(0)})")


def test_a_node_that_is_a_container_has_the_gpus_that_it_was_given(cli, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    root = cli_node.lay(tmp_path / "root")
    for index in (0, 1, 2, 3, 4, 6):
        (root / GPUS[index][1:]).unlink()
    for ids, nodes in {"all": (5, 7), "0": (5,), "1": (7,), uuid(7): (7,), "0:6:0": (5,)}.items():
        assert cli(f"list --device={ids}", root=str(root)) == (0, (*CONTROL, *(GPUS[i] for i in nodes)), ""), ids
    for name in ("2", uuid(0), "0:1:0"):
        known = f"0 ({uuid(5)}), 1 ({uuid(7)})"
        message = f"nvidia-container-cli: device error: {name}: unknown device (one of {known})"
        assert cli(f"list --device={name}", root=str(root)) == (1, (), message)


def test_a_bad_loader_cache(cli, node: Path) -> None:  # type: ignore[no-untyped-def]
    code, _, err = cli("--ldcache=/nope list -l")
    message = f"detection error: open failed: {node}/nope: no such file or directory"
    assert (code, err) == (1, f"nvidia-container-cli: {message}")


def test_a_root_without_a_driver(cli, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    code, out, err = cli("list -l", root=str(tmp_path))
    assert (code, out) == (1, ())
    assert err.startswith("nvidia-container-cli: initialization error: no NVIDIA kernel module")


@pytest.mark.parametrize("text", ["--help", "-?", "list --help", "configure --help", "info --usage", "--version"])
def test_words_go_to_standard_output(cli, text: str) -> None:  # type: ignore[no-untyped-def]
    code, out, err = cli(text)
    assert (code, err) == (0, "")
    assert out


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Such a tree with an NVML that answers."""
    root = cli_node.lay(tmp_path_factory.mktemp("asked") / "root")
    cli_node.lay_nvml(root)
    return str(root)


class TestInfoByNvml:
    """To the byte what NVIDIA's program printed on such a tree."""

    def test_text(self, cli, asked: str) -> None:  # type: ignore[no-untyped-def]
        block = (
            "\nDevice Index:   {0}\nDevice Minor:   {0}\nModel:          Mock NVIDIA A100-SXM4-40GB\n"
            "Brand:          Nvidia\nGPU UUID:       {1}\nBus Location:   00000000:0{2}:00.0\nArchitecture:   8.0"
        )
        head = f"NVRM version:   {cli_node.VERSION}\nCUDA version:   12.4\n"
        text = head + "\n".join(block.format(index, uuid(index), index + 1) for index in range(8))
        assert cli("info", root=asked) == (0, tuple(text.split("\n")), "")

    def test_nvml_lies_where_the_named_loader_cache_says(self, cli, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
        root = cli_node.lay(tmp_path / "root")
        cli_node.lay_nvml(root)
        (root / cli_node.FOLDER[1:]).rename(root / "lib/apart")
        entry = ldcache.Entry("libnvidia-ml.so.1", "/lib/apart/libnvidia-ml.so.1")
        (root / "other.cache").write_bytes(ldcache.write(ldcache.Cache((entry,))))
        code, lines, _err = cli("--ldcache=/other.cache info --csv", root=str(root))
        assert code == 0 and len(lines) == 4 + 8

    def test_csv(self, cli, asked: str) -> None:  # type: ignore[no-untyped-def]
        rows = (f"{i},{i},Mock NVIDIA A100-SXM4-40GB,Nvidia,{uuid(i)},00000000:0{i + 1}:00.0,8.0" for i in range(8))
        names = "Device Index,Device Minor,Model,Brand,GPU UUID,Bus Location,Architecture"
        head = ("NVRM version,CUDA version", f"{cli_node.VERSION},12.4", "", names)
        assert cli("info --csv", root=asked) == (0, (*head, *rows), "")

    @pytest.mark.parametrize("name", ["0:0", "MIG-aaaaaaaa-bbbb-cccc-dddd-eeeeeeeeeeee"])
    def test_a_slice_that_isnt_there(self, cli, asked: str, name: str) -> None:  # type: ignore[no-untyped-def]
        code, out, err = cli(f"list --device={name}", root=asked)
        assert (code, out) == (1, ())
        assert f"device error: {name}: unknown device" in err

    def test_nodes_that_its_user_cant_open_are_no_reason_to_give_no_gpu(self, cli, asked: str) -> None:  # type: ignore[no-untyped-def]
        nodes = [Path(asked, path[1:]) for path in GPUS]
        for path in nodes:
            path.chmod(0o600)
        try:
            code, out, err = cli("list --device=0:0", root=asked)
            assert (code, out) == (1, ())
            assert "NVML shows no GPU to user 65534, group 65534; correct --user" in err
            assert "device error: 0:0" in cli("--user=0:0 list --device=0:0", root=asked)[2]
        finally:
            for path in nodes:
                path.chmod(0o666)


class TestInfo:
    FACTS = NodeFacts(
        (
            Gpu(0, 1, "GPU-a", "0000:1b:00.0", name="Big, one", brand="Tesla", arch="9.0"),
            Gpu(1, 0, "GPU-b", "00000001:3b:00.0", name="Other"),
        ),
        "nvml",
        driver="570.86.15",
        cuda="12.8",
    )

    @pytest.fixture(autouse=True)
    def known(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(cli_report, "node_facts", lambda *_, **__: self.FACTS)

    def test_text(self, cli) -> None:  # type: ignore[no-untyped-def]
        _, out, _ = cli("info")
        assert out[:10] == (
            "NVRM version:   570.86.15",
            "CUDA version:   12.8",
            "",
            "Device Index:   0",
            "Device Minor:   1",
            "Model:          Big, one",
            "Brand:          Tesla",
            "GPU UUID:       GPU-a",
            "Bus Location:   00000000:1b:00.0",
            "Architecture:   9.0",
        )
        assert out[14] == "Brand:          Unknown"

    def test_csv(self, cli) -> None:  # type: ignore[no-untyped-def]
        _, out, _ = cli("info --csv")
        assert out == (
            "NVRM version,CUDA version",
            "570.86.15,12.8",
            "",
            "Device Index,Device Minor,Model,Brand,GPU UUID,Bus Location,Architecture",
            "0,1,Big, one,Tesla,GPU-a,00000000:1b:00.0,9.0",
            "1,0,Other,Unknown,GPU-b,00000001:3b:00.0,",
        )


class TestMig:
    MIG = MigDevice("MIG-x", 0, 0, 1, 9, 0, gi_minor=12, ci_minor=13)
    GPU = Gpu(0, 0, "GPU-a", "0000:1b:00.0", mig_capable=True, mig_enabled=True, mig=(MIG,))
    OTHER = Gpu(1, 1, "GPU-b", "0000:1c:00.0")
    FACTS = NodeFacts((GPU, OTHER), "nvml", driver="1.2", majors=(("nvidia-caps", 234),), mig_minors=(1, 2))

    @pytest.fixture(autouse=True)
    def known(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(cli_report, "node_facts", lambda *_, **__: self.FACTS)

    def test_a_slice_brings_its_parent_and_its_own_two_nodes(self, cli) -> None:  # type: ignore[no-untyped-def]
        proc = "/proc/driver/nvidia/capabilities/gpu0/mig/gi9"
        caps = "/dev/nvidia-caps/nvidia-cap"
        expected = ("/dev/nvidiactl", GPUS[0], f"{proc}/access", f"{proc}/ci0/access", f"{caps}12", f"{caps}13")
        for name in ("MIG-x", "mig-X", "0:1"):
            assert cli(f"list --device={name}") == (0, expected, "")

    def test_management_shows_instances_to_come(self, cli, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
        capabilities, caps = "/proc/driver/nvidia/capabilities", "/dev/nvidia-caps"
        (tmp_path / f"{capabilities[1:]}/gpu0").mkdir(parents=True)
        minors = tmp_path / "proc/driver/nvidia-caps/mig-minors"
        minors.parent.mkdir()
        minors.write_text("config 1\nmonitor 2\ngpu0/gi0/access 3\ngpu0/gi0/ci0/access 4\ngpu1/gi0/access 93\n")
        nodes = (f"{caps}/nvidia-cap1", f"{capabilities}/gpu0", caps, f"{caps}/nvidia-cap3", f"{caps}/nvidia-cap4")
        expected = ("/dev/nvidiactl", GPUS[0], GPUS[1], f"{capabilities}/mig/config", *nodes)
        assert cli("list --device=all --mig-config=all", root=str(tmp_path)) == (0, expected, "")

    def test_management_beside_chosen_slices(self, cli) -> None:  # type: ignore[no-untyped-def]
        code, _, err = cli("list --device=MIG-x --mig-config=all")
        assert code == 1
        assert "mig-config error: cannot enable mig-config with specific MIG devices selected" in err


@pytest.fixture
def image(tmp_path: Path) -> Path:
    root = tmp_path / "image"
    for name in ("etc", "dev", "proc", "usr/lib", "usr/bin", "usr/lib64"):
        (root / name).mkdir(parents=True)
    return root


class TestConfigure:
    def test_a_containers_own_layout(self, cli, image: Path) -> None:  # type: ignore[no-untyped-def]
        with namespaced(image) as pid:
            code, _, err = cli(f"configure --no-cgroups --device=2 --utility --pid={pid} {image}")
            assert (code, err) == (0, "")
            there = mounts(pid)
            assert f"{image}/usr/lib64/libnvidia-ml.so.{cli_node.VERSION}" in there
            assert f"{image}/usr/lib64/libcuda.so.{cli_node.VERSION}" not in there
            assert f"{image}/dev/nvidia2" in there
            assert f"{image}/dev/nvidia0" not in there
            assert f"{image}/run/nvidia-persistenced/socket" in there

    def test_list_is_what_configure_mounts(self, cli, image: Path) -> None:  # type: ignore[no-untyped-def]
        everything = "--compute --utility --video --graphics --display --ngx --compat32"
        (image / "etc/debian_version").write_text("12\n")
        with namespaced(image) as pid:
            before = set(mounts(pid))
            code, _, err = cli(f"configure --no-cgroups --device=all {everything} --pid={pid} {image}")
            assert (code, err) == (0, "")
            there = {point.removeprefix(str(image)) for point in set(mounts(pid)) - before}
        assert there - {"/etc/nvidia/nvidia-application-profiles-rc.d"} == set(cli("list")[1])

    def test_drops(self, cli, image: Path) -> None:  # type: ignore[no-untyped-def]
        drops = "--no-persistenced --no-fabricmanager --no-gsp-firmware"
        with namespaced(image) as pid:
            cli(f"configure --no-cgroups --utility {drops} --pid={pid} {image}")
            assert not [point for point in mounts(pid) if "socket" in point or "firmware" in point]

    def test_dry_run_does_nothing(self, cli, image: Path) -> None:  # type: ignore[no-untyped-def]
        with namespaced(image) as pid:
            before = mounts(pid)
            code, out, _ = cli(f"configure --dry-run=json --device=0 --utility --pid={pid} {image}")
            told = cli(f"configure --dry-run --device=0 --utility --pid={pid} {image}")
            assert mounts(pid) == before
            assert cli(f"configure --dry-run=x --device=0 --pid={pid} {image}")[0] == 1
        plan = json.loads(out[0])
        assert code == told[0] == 0
        words = [line.split()[:2] for line in told[1]]
        assert [path for kind, path in words if kind == "device"] == ["/dev/nvidiactl", "/dev/nvidia0"]
        assert [path for kind, path in words if kind == "mount"] == [mount["path"] for mount in plan["mounts"]]
        assert [line for line in told[1] if line.startswith("allow")] == ["allow   c 195:255 rw", "allow   c 195:0 rw"]
        assert [node["path"] for node in plan["devices"]] == ["/dev/nvidiactl", "/dev/nvidia0"]

    @pytest.mark.parametrize(
        ("expression", "message"),
        [("cuda>=99", "unsatisfied condition: cuda>=99"), ("driver<471", "unsatisfied condition: driver<471")],
    )
    def test_requirements(self, cli, image: Path, expression: str, message: str) -> None:  # type: ignore[no-untyped-def]
        with namespaced(image) as pid:
            before = mounts(pid)
            code, _, err = cli(f"configure --require={expression} --device=0 --utility --pid={pid} {image}")
            assert mounts(pid) == before
        assert code == 1
        assert err.startswith(f"nvidia-container-cli: requirement error: {message}")

    def test_ldconfig_where_asked_for(self, cli, image: Path, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
        program = self.program(tmp_path, 0)
        log = tmp_path / "log"
        options = f"--loader-cache=ldconfig --ldconfig=@{program}.real --utility --no-cgroups"  # C45: there is no .real
        with namespaced(image) as pid:
            assert cli(f"--debug={log} configure {options} --pid={pid} {image}")[::2] == (0, "")
        assert (image / "etc/ld.so.cache").read_text() == "-f /etc/ld.so.conf -C /etc/ld.so.cache /usr/lib64 "
        assert f"run {program}\n" in log.read_text()

    def test_a_failing_ldconfig_takes_everything_back(self, cli, image: Path, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
        program = self.program(tmp_path, 3)
        (image / "etc/ld.so.cache").write_text("the image's")
        before = tree(image)
        with namespaced(image) as pid:
            mounted = mounts(pid)
            options = f"--loader-cache=ldconfig --ldconfig=@{program} --utility --no-cgroups"
            code, _, err = cli(f"configure {options} --pid={pid} {image}")
            assert mounts(pid) == mounted
        name = f"nvidia-container-cli: ldcache error: process {program}"
        assert (code, err) == (1, f"{name}: failed with error code 3 (no luck)")
        assert tree(image) == before

    @pytest.mark.parametrize("program", ["", "--ldconfig=/sbin/nope"])
    def test_an_image_without_ldconfig_gets_its_cache_all_the_same(self, cli, image: Path, program: str) -> None:  # type: ignore[no-untyped-def]
        with namespaced(image) as pid:
            code, _, _ = cli(f"configure --loader-cache=ldconfig {program} --utility --no-cgroups --pid={pid} {image}")
        assert code == 0
        assert (image / "etc/ld.so.cache").exists()

    def test_a_host_ldconfig_that_isnt_there(self, cli, image: Path) -> None:  # type: ignore[no-untyped-def]
        with namespaced(image) as pid:
            code, _, err = cli(f"configure --loader-cache=ldconfig --ldconfig=@/nope --pid={pid} {image}")
        message = "ldcache error: open failed: /nope: no such file or directory"
        assert (code, err) == (1, f"nvidia-container-cli: {message}")

    @staticmethod
    def program(folder: Path, code: int) -> Path:
        """A host's ldconfig that writes its arguments where the cache should be, says something and ends."""
        source, path = folder / "ldconfig.c", folder / "ldconfig"
        source.write_text(
            "#include <stdio.h>\n"
            "int main(int argc, char **argv) {\n"
            '    FILE *cache = fopen("/etc/ld.so.cache", "w");\n'
            '    for (int i = 1; i < argc; i++) fprintf(cache, "%s ", argv[i]);\n'
            f'    return fclose(cache), puts("no luck"), {code};\n'
            "}\n"
        )
        if not shutil.which("cc"):
            pytest.skip("no C compiler")
        subprocess.run(["cc", "-static", "-o", str(path), str(source)], check=True)
        return path

    def test_the_log_of_debug(self, cli, image: Path, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
        log = tmp_path / "log"
        with namespaced(image) as pid:
            assert cli(f"--debug={log} configure --no-cgroups --device=0 --pid={pid} {image}")[0] == 0
        lines = log.read_text().splitlines()
        assert lines[1].startswith("-- WARNING, ")
        assert any(line.startswith("I") and line.endswith("mount device /dev/nvidia0") for line in lines)


def test_parsing_stops_at_the_command() -> None:
    options = [argp.Option("root", "r", argp.REQUIRED)]
    assert argp.parse("p", ["-r", "/x", "list", "-r"], options, in_order=True) == ([("root", "/x")], ["list", "-r"])
    assert argp.parse("p", ["a", "--root=/y", "--", "-r"], options) == ([("root", "/y")], ["a", "-r"])
    assert argp.parse("p", ["-r/z"], options) == ([("root", "/z")], [])


def test_an_optional_argument_must_be_attached() -> None:
    options = [argp.Option("user", "u", argp.OPTIONAL)]
    assert argp.parse("p", ["-u", "1"], options) == ([("user", None)], ["1"])
    assert argp.parse("p", ["-u1:2", "--user=3"], options) == ([("user", "1:2"), ("user", "3")], [])
