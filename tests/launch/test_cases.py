"""Cases that people met with NVIDIA's stack, by the number under which we keep them: the ones of the hook and the CLI.

C28 is in commands/test_system.py; C42 to C44 and C53 with real containers in test_container_cli_e2e.py; the race of
C40 in injection/test_live_race.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer.testing

from gpulet import settings as settings_file
from gpulet.commands import explain
from gpulet.engines.launchers import launcher_text
from gpulet.errors import ConfigError, RequestError, RequirementNotMet
from gpulet.injection import build, rootfs
from gpulet.injection.cdi_spec import make_spec
from gpulet.injection.model import RootfsWork
from gpulet.launch import container_cli
from gpulet.node import driver, procfs
from gpulet.node.gpu import Gpu, NodeFacts
from gpulet.request import requirements
from gpulet.request.model import Request
from gpulet.request.requirements import Subject
from gpulet.settings import Settings
from gpulet.sim import node as sim
from support.containers import config
from support.machine import Machine
from support.made_elf import library
from support.namespaced import mounts, namespaced, tree

V = "NVIDIA_VISIBLE_DEVICES"
NOTE = {"Format": 1, "CUDA Version": "12.9", "Driver": [535, 550, 570], "Device": [1, 2, 7, 14]}


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def state(machine: Machine) -> str:
    return json.dumps({"ociVersion": "1.0.2", "id": "x", "pid": 123, "bundle": str(machine.bundle)})


@pytest.mark.parametrize("mode", ["cdi", "jit-cdi"])
def test_c27_gpus_flag_while_the_mode_is_cdi(machine: Machine, mode: str) -> None:
    machine.configure(runtime=f"mode = '{mode}'")
    machine.make(config(f"{V}=all"))
    before = tree(machine.bundle)
    done = machine.run("gpulet-hook", "prestart", stdin=state(machine))
    assert done.returncode != 0
    assert "--runtime=nvidia" in done.stderr
    assert "--device nvidia.com/gpu=" in done.stderr
    assert machine.called("cli") is None
    assert tree(machine.bundle) == before


class TestC37:
    BRANDS = "cuda>=12.8 brand=tesla,driver>=535,driver<536 brand=nvidia,driver>=535,driver<536"
    HOST = Subject(cuda="12.2", driver="535.129.03", arch="8.0")

    @pytest.mark.parametrize(("brand", "holds"), [("GeForce", False), ("Tesla", True), ("Nvidia", True)])
    def test_c37_alternatives_and_terms(self, brand: str, holds: bool) -> None:
        assert requirements.evaluate(self.BRANDS, self.HOST.replace(brand=brand))[0] is holds

    def test_c37_the_message_has_what_was_needed_and_what_is_here(self) -> None:
        with pytest.raises(RequirementNotMet, match=r"unsatisfied condition: cuda>=11\.8: this node has cuda=11\.4"):
            requirements.check(["cuda>=11.8"], [Subject(cuda="11.4", driver="470.57.02")])

    def test_c37_every_variable_must_hold(self) -> None:
        with pytest.raises(RequirementNotMet, match="driver<500"):
            requirements.check(["cuda>=11.8", "driver<500"], [self.HOST])

    @pytest.mark.parametrize("token", ["cuda>>12", "gpu>=1", "cuda>=x"])
    def test_c37_a_malformed_expression_names_the_token(self, token: str) -> None:
        with pytest.raises(RequestError, match=f"invalid expression: {token}"):
            requirements.check([f"cuda>=99 {token}"], [self.HOST])

    def test_c37_switched_off(self, machine: Machine) -> None:
        machine.configure(runtime="mode = 'legacy'")
        machine.make(config(f"{V}=all", "NVIDIA_REQUIRE_CUDA=cuda>=99", "NVIDIA_DISABLE_REQUIRE=true"))
        assert machine.run("gpulet-hook", "prestart", stdin=state(machine)).returncode == 0
        assert not [argument for argument in machine.called("cli") or () if argument.startswith("--require")]

    def test_c37_each_clause_is_explained(self, machine: Machine) -> None:
        command = ["require", "cuda>=99 driver>=560,driver<570", "--config", str(machine.config_file)]
        done = typer.testing.CliRunner().invoke(explain.app, command)
        assert done.exit_code == 1
        lines = [line.split() for line in done.stdout.splitlines()[1:]]
        assert [(line[0], line[-2], line[-1]) for line in lines] == [
            ("cuda>=99", "12.8", "no"),
            ("driver>=560", "570.86.15", "yes"),
            ("driver<570", "570.86.15", "no"),
        ]

    @pytest.mark.root
    def test_c37_brand_and_architecture_are_asked_of_nvml(self, tmp_path: Path) -> None:
        node = sim.create(tmp_path / "n", "t4x1")
        (tmp_path / "config.toml").write_text(f"[nvidia-container-cli]\nroot = '{node.root}'\n")
        (tmp_path / "env").write_text("PATH=/bin\nNVIDIA_REQUIRE_ARCH=brand=geforce arch>=7.5,brand=tesla\n")
        command = ["require", "--image-env", str(tmp_path / "env"), "--json", "--config", str(tmp_path / "config.toml")]
        done = typer.testing.CliRunner().invoke(explain.app, command)
        assert done.exit_code == 0, done.output
        (judged,) = json.loads(done.stdout)["expressions"]
        told = [(clause["here"], clause["holds"]) for clause in judged["clauses"]]
        assert told == [("Tesla", False), ("7.5", True), ("Tesla", True)]


class TestC38:
    COMPAT = "usr/local/cuda/compat/libcuda.so.575.57.08"

    @pytest.mark.parametrize("note", [None, NOTE])
    @pytest.mark.parametrize(("driver_version", "first"), [("535.129.03", True), ("580.65.06", False)])
    def test_c38_the_images_libraries_come_first_on_an_older_driver(
        self, tmp_path: Path, note: dict[str, object] | None, driver_version: str, first: bool
    ) -> None:
        """The image has no loader cache at all, as distroless ones."""
        file = tmp_path / self.COMPAT
        file.parent.mkdir(parents=True)
        file.write_bytes(library("libcuda.so.1", note=note))
        before = mounts()
        rootfs.prepare(str(tmp_path), RootfsWork(host_driver=driver_version))
        written = tmp_path / "etc/ld.so.conf.d/00-compat-gpulet.conf"
        assert written.exists() is first
        assert not first or written.read_text() == "/usr/local/cuda/compat\n"
        assert not first or (tmp_path / "etc/ld.so.cache").exists()
        assert mounts() == before

    @pytest.mark.parametrize(
        ("gpu", "used"),
        [
            (Gpu(0, 0, "GPU-a", "0000:19:00.0", name="NVIDIA GeForce RTX 4090"), False),
            (Gpu(0, 0, "GPU-a", "0000:19:00.0", name="NVIDIA TITAN V"), False),
            (Gpu(0, 0, "GPU-a", "0000:19:00.0", name="", brand="GeForceRTX"), False),
            (Gpu(0, 0, "GPU-a", "0000:19:00.0", name="Tesla T4"), True),
        ],
    )
    def test_c38_never_on_a_consumer_gpu(self, gpu: Gpu, used: bool) -> None:
        files = driver.DriverFiles("/", "570.86.15", ())
        facts = NodeFacts((gpu,), "procfs", driver="570.86.15")
        assert bool(build.common(facts, files).rootfs.host_driver) is used
        other = Gpu(1, 1, "GPU-b", "0000:3b:00.0", name="NVIDIA H100")
        both = facts.replace(gpus=(gpu, other))
        assert build.common(both, files).rootfs.host_driver == "570.86.15"  # for the one that can
        for ids, wanted in ((("0",), used), (("1",), True), (("all",), used)):
            request = Request("environment", ids, capabilities=("compute",))
            assert bool(build.build(both, files, request).rootfs.host_driver) is wanted


@pytest.mark.root
class TestC40:
    """Links of the image that lead out: all is done beneath the root, nothing is touched outside."""

    @pytest.fixture
    def outside(self, tmp_path: Path) -> Path:
        folder = tmp_path / "outside"
        folder.mkdir()
        (folder / "secret").write_text("secret")
        return folder

    @pytest.fixture
    def image(self, tmp_path: Path, outside: Path) -> Path:
        root = tmp_path / "image"
        for name in ("etc", "dev", "proc", "usr/bin", "usr/lib", "usr/local/cuda/compat"):
            (root / name).mkdir(parents=True)
        (root / "etc/debian_version").write_text("12\n")
        up = "../" * 12
        (root / "usr/lib/x86_64-linux-gnu").symlink_to(f"{up}{outside}".replace("//", "/"))
        (root / "usr/local/cuda/compat/libcuda.so.999.1").symlink_to("/proc/self/root/etc/shadow")
        (root / "lib").symlink_to(outside)
        (root / "etc/ld.so.cache").symlink_to(outside / "secret")
        (root / "etc/ld.so.conf.d").symlink_to(f"{up}{outside}".replace("//", "/"))
        return root

    def test_c40_nothing_outside_is_touched(
        self, tmp_path: Path, image: Path, outside: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        node = sim.create(tmp_path / "n", "t4x1")
        before, held = tree(outside), mounts()
        with namespaced(image) as pid:
            arguments = ["configure", "--no-cgroups", "--device=all", "--compute", "--utility", f"--pid={pid}"]
            code = container_cli.main([f"--root={node.root}", *arguments, str(image)])
            assert (code, capsys.readouterr().err) == (0, "")
            beneath = [point for point in mounts(pid) if point not in held]
            assert len(beneath) > 10
            assert all(point.startswith(str(image)) for point in beneath)
        assert tree(outside) == before
        assert mounts() == held
        assert (image / "etc/ld.so.cache").is_file()
        assert not (image / "etc/ld.so.cache").is_symlink()
        conf = list((image / str(outside)[1:]).glob("*compat*"))
        assert not conf  # a link is not the image's own libcuda


class TestC41:
    EVIL = "import os\nos.write(2, b'evil')\nos._exit(66)\n"

    def hostile(self, folder: Path) -> dict[str, str]:
        """A folder full of modules that would be loaded by name, and an environment that points there."""
        for name in ("os", "codecs", "gpulet", "sitecustomize", "usercustomize", "struct", "_json"):
            (folder / f"{name}.py").write_text(self.EVIL)
        (folder / "start").write_text(self.EVIL)
        names = ("PYTHONPATH", "PYTHONHOME", "PYTHONUSERBASE", "LD_LIBRARY_PATH")
        return {**dict.fromkeys(names, str(folder)), "PYTHONSTARTUP": f"{folder}/start", "BASH_ENV": f"{folder}/start"}

    @pytest.mark.parametrize("module", ["hook", "container_cli", "cdi_hook", "runtime"])
    def test_c41_programs_dont_believe_the_containers_environment(self, tmp_path: Path, module: str) -> None:
        rootfs_folder = tmp_path / "rootfs"
        rootfs_folder.mkdir()
        env = self.hostile(rootfs_folder)
        program = tmp_path / "program"
        program.write_text(launcher_text(f"gpulet.launch.{module}", sys.executable))
        program.chmod(0o755)
        done = subprocess.run(
            [str(program), "--version"], env=env, cwd=rootfs_folder, capture_output=True, text=True, timeout=30
        )
        assert done.returncode != 66
        assert "evil" not in done.stderr
        assert "Fatal Python error" not in done.stderr

    def test_c41_hooks_of_specifications_bring_an_environment(self, machine: Machine) -> None:
        """An engine gives a hook without one the container's own."""
        facts, files = procfs.facts(str(machine.root)), driver.find(str(machine.root))
        spec = make_spec(facts, files)
        edits = [spec["containerEdits"], *(device["containerEdits"] for device in spec["devices"])]
        hooks = [hook for edit in edits for hook in edit.get("hooks") or ()]
        assert hooks
        assert all(hook["env"] for hook in hooks)


class TestC45:
    @pytest.mark.parametrize("real", [True, False])
    def test_c45_the_program_beside_the_script_or_the_plain_one(self, tmp_path: Path, real: bool) -> None:
        (tmp_path / "ldconfig").touch()
        if real:
            (tmp_path / "ldconfig.real").touch()
        for asked in (f"@{tmp_path}/ldconfig", f"@{tmp_path}/ldconfig.real"):
            wanted = f"@{tmp_path}/ldconfig" + (".real" if real else "")
            assert Settings(cli_ldconfig=asked).ldconfig() == wanted

    @pytest.mark.parametrize("value", ["/sbin/ldconfig", "", "ldconfig"])
    def test_c45_a_containers_program_is_refused_unless_allowed(self, tmp_path: Path, value: str) -> None:
        path = tmp_path / "config.toml"
        path.write_text(f"[nvidia-container-cli]\nldconfig = '{value}'\n")
        with pytest.raises(ConfigError, match=r"config\.toml line 2: nvidia-container-cli\.ldconfig"):
            settings_file.load(str(path))
        path.write_text(path.read_text() + "[features]\nallow-ldconfig-from-container = true\n")
        assert settings_file.load(str(path)).ldconfig() == value

    def test_c45_a_host_program_that_isnt_there_is_named(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], machine: Machine
    ) -> None:
        (tmp_path / "image/usr/lib").mkdir(parents=True)
        arguments = ["--loader-cache=ldconfig", "--ldconfig=@/sbin/nope.real", "--no-cgroups", f"--pid={os.getpid()}"]
        code = container_cli.main([f"--root={machine.root}", "configure", *arguments, str(tmp_path / "image")])
        assert code == 1
        assert "ldcache error: open failed: /sbin/nope.real: no such file" in capsys.readouterr().err


@pytest.mark.root
class TestC49:
    FOLDER = "/dev/nvidia-caps-imex-channels"

    @pytest.fixture(scope="class")
    @classmethod
    def node(cls, tmp_path_factory: pytest.TempPathFactory) -> sim.SimNode:
        return sim.create(tmp_path_factory.mktemp("node") / "n", "gb200x4")

    @pytest.fixture
    def image(self, tmp_path: Path) -> Path:
        for name in ("etc", "dev", "proc", "usr/lib", "usr/bin"):
            (tmp_path / "image" / name).mkdir(parents=True)
        return tmp_path / "image"

    def test_c49_channels_that_are_there(self, node: sim.SimNode, image: Path) -> None:
        major = dict(procfs.facts(str(node.root)).majors)["nvidia-caps-imex-channels"]
        with namespaced(image) as pid:
            arguments = ["configure", "--no-cgroups", "--imex-channel=0,3", f"--pid={pid}", str(image)]
            assert container_cli.main([f"--root={node.root}", *arguments]) == 0
            folder = Path(f"/proc/{pid}/root{image}{self.FOLDER}")
            found = {path.name: path.stat().st_rdev for path in folder.iterdir()}
        assert found == {"channel0": os.makedev(major, 0), "channel3": os.makedev(major, 3)}

    @pytest.mark.parametrize("channel", ["bogus", "-1", "1048576", "0,x"])
    def test_c49_what_is_no_channel(
        self, node: sim.SimNode, image: Path, capsys: pytest.CaptureFixture[str], channel: str
    ) -> None:
        arguments = ["configure", "--no-cgroups", f"--imex-channel={channel}", f"--pid={os.getpid()}", str(image)]
        assert container_cli.main([f"--root={node.root}", *arguments]) == 1
        assert "error parsing IMEX info: unsupported IMEX channel value: " in capsys.readouterr().err

    def test_c49_a_channel_without_a_node(
        self, node: sim.SimNode, image: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        before = tree(image)
        with namespaced(image) as pid:
            arguments = ["configure", "--no-cgroups", "--imex-channel=2048", f"--pid={pid}", str(image)]
            assert container_cli.main([f"--root={node.root}", *arguments]) == 1
        assert "2048" in capsys.readouterr().err
        assert tree(image) == before

    def test_c49_requests_are_ignored_where_configured(self, machine: Machine) -> None:
        env = (f"{V}=0", "NVIDIA_IMEX_CHANNELS=0,1")
        for rest, wanted in (("", True), ("[features]\nignore-imex-channel-requests = true\n", False)):
            machine.configure(runtime="mode = 'legacy'", rest=rest)
            machine.make(config(*env))
            assert machine.run("gpulet-hook", "prestart", stdin=state(machine)).returncode == 0
            assert ("--imex-channel=0,1" in (machine.called("cli") or ())) is wanted
