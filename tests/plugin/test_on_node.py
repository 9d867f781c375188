"""The program as users start it, on a simulated node: NVML, the node's faults, CDI specs on disk."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time

import pynvml
import pytest

from gpulet.injection.cdi import Registry
from gpulet.plugin.config import load
from gpulet.plugin.main import ask_nvml
from gpulet.sim import node as simulated
from gpulet.sim.inject import inject
from gpulet.sim.kubelet import Kubelet
from gpulet.sim.pods import ContainerSpec, Pod
from support import plugin_process as plugin
from support.plugin_process import short_folder, until

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="device nodes need root"),
    pytest.mark.skipif(shutil.which("cc") is None, reason="the stand-in library needs a C compiler"),
]
GPU = "nvidia.com/gpu"


class Site:
    """A simulated node, its kubelet, and the plugin as a process."""

    def __init__(self, folder, profile):
        self.folder = folder
        self.node = simulated.create(folder, profile)
        self.uuids = [gpu.uuid for gpu in self.node.gpus]
        self.kubelet = Kubelet(folder / "kubelet")
        self.kubelet.start()
        self.process = None

    def start(self, *words, program=("-m", "gpulet.plugin.entry"), **environ):
        command = [sys.executable, *program, "--driver-root", str(self.node.root)]
        command += ["--kubelet-socket-dir", str(self.folder / "kubelet"), "--cdi-spec-dir", str(self.folder / "cdi")]
        command += ["--refresh-interval=0.3"]
        with open(self.folder / "log", "ab") as log:
            self.process = subprocess.Popen(
                [*command, *words], stdin=subprocess.DEVNULL, stderr=log, env={"PATH": os.environ["PATH"], **environ}
            )

    def log(self) -> str:
        return (self.folder / "log").read_text()

    def end(self):
        if self.process:
            self.process.terminate()
            self.process.wait(10)
        self.kubelet.stop()


@pytest.fixture
def site(request):
    with short_folder() as folder:
        site = Site(folder, getattr(request, "param", "h100x8"))
        try:
            yield site
        finally:
            site.end()


def test_xids_reach_the_kubelet(site):
    site.start()
    site.kubelet.wait_for(GPU, 8)
    time.sleep(0.3)  # the watch begins a moment after the registration
    times = []
    for number in (2, 3, 4):
        began = time.monotonic()
        inject(site.folder, f"gpu {number} xid 79")
        site.kubelet.wait_for(GPU, 9 - number)
        times.append(time.monotonic() - began)
    assert min(times) < 0.1
    assert set(site.kubelet.resources()[GPU].unhealthy) == {site.uuids[number] for number in (2, 3, 4)}
    inject(site.folder, "gpu 5 xid 31")  # an application's fault
    inject(site.folder, "gpu 6 xid 74")
    site.kubelet.wait_for(GPU, 4)
    assert f"XidCriticalError: Xid=79 on Device={site.uuids[2]}; marking device as unhealthy." in site.log()


def test_recovery_on_evidence(site):
    site.start()
    site.kubelet.wait_for(GPU, 8)
    time.sleep(0.3)
    inject(site.folder, "gpu 1 recovery 1")
    inject(site.folder, "gpu 1 xid 95")
    site.kubelet.wait_for(GPU, 7)
    time.sleep(0.8)  # one round of questions sees what the driver asks for
    assert site.kubelet.resources()[GPU].allocatable == 7
    inject(site.folder, "gpu 1 recovery 0")
    site.kubelet.wait_for(GPU, 8)
    assert "GPURecovered" in site.log()


def test_a_gpu_falls_off_the_bus_and_comes_back(site):
    site.start()
    site.kubelet.wait_for(GPU, 8)
    inject(site.folder, "gpu 3 lost")
    assert site.kubelet.wait_for(GPU, 7, 15).unhealthy == (site.uuids[3],)
    site.kubelet.allocate("p", "c", {GPU: 7})
    inject(site.folder, "gpu 3 found")
    site.kubelet.wait_for(GPU, 8, 15)
    assert len(site.kubelet.registrations) == 1


def test_all_health_checks_off(site):
    site.start(DP_DISABLE_HEALTHCHECKS="all")
    site.kubelet.wait_for(GPU, 8)
    time.sleep(0.3)
    inject(site.folder, "gpu 1 xid 79")
    time.sleep(0.5)
    assert site.kubelet.resources()[GPU].allocatable == 8


@pytest.mark.parametrize("identification", ["uuid", "index"])
def test_cdi_specs_name_what_is_answered(site, identification):
    site.start("--device-list-strategy=cdi-annotations,cdi-cri", f"--device-id-strategy={identification}")
    site.kubelet.wait_for(GPU, 8)
    allocation = site.kubelet.allocate("p", "c", {GPU: 2})
    wanted = site.uuids[:2] if identification == "uuid" else ["0", "1"]
    names = tuple(f"k8s.device-plugin.nvidia.com/gpu={name}" for name in wanted)
    assert allocation.cdi_devices == names
    assert list(allocation.annotations.values()) == [",".join(names)]
    assert allocation.envs == {}
    assert os.listdir(site.folder / "cdi") == ["k8s.device-plugin.nvidia.com-gpu.json"]
    injection = Registry([str(site.folder / "cdi")]).resolve(names)
    paths = {device.path for device in injection.devices}
    assert {"/dev/nvidia0", "/dev/nvidia1", "/dev/nvidiactl"} <= paths
    assert "/dev/nvidia2" not in paths
    assert all(device.host_path.startswith(str(site.node.root)) for device in injection.devices)


@pytest.mark.parametrize("site", ["wsl"], indirect=True)
def test_the_cdi_spec_of_wsl(site):
    site.start("--device-list-strategy=cdi-cri")
    site.kubelet.wait_for(GPU, 1)
    (name,) = site.kubelet.allocate("p", "c", {GPU: 1}).cdi_devices
    injection = Registry([str(site.folder / "cdi")]).resolve([name])
    assert [device.path for device in injection.devices] == ["/dev/dxg"]


@pytest.mark.parametrize(("site", "identification", "name"), [("tegra", "uuid", "tegra"), ("tegra", "index", "0")],
                         indirect=["site"])  # fmt: skip
def test_the_cdi_spec_of_a_tegra(site, identification, name):
    site.start("--device-list-strategy=cdi-cri", f"--device-id-strategy={identification}")
    site.kubelet.wait_for(GPU, 1)
    names = site.kubelet.allocate("p", "c", {GPU: 1}).cdi_devices
    assert names == (f"k8s.device-plugin.nvidia.com/gpu={name}",)
    injection = Registry([str(site.folder / "cdi")]).resolve(names)
    assert injection.devices and injection.mounts
    assert all(device.host_path.startswith(str(site.node.root)) for device in injection.devices)


def test_optional_classes(site):
    for name in ("gdrdrv", "nvidia-fs0"):
        os.mknod(site.node.root / "dev" / name, 0o666 | 0o020000, os.makedev(243, 7))
    stale = site.folder / "cdi" / "k8s.device-plugin.nvidia.com-mofed.json"
    stale.parent.mkdir(exist_ok=True)
    stale.write_text("{}")
    site.start("--device-list-strategy=cdi-cri", "--gdrcopy-enabled", "--gds-enabled", "--mofed-enabled")
    site.kubelet.wait_for(GPU, 8)
    allocation = site.kubelet.allocate("p", "c", {GPU: 1})
    optional = ("k8s.device-plugin.nvidia.com/gdrcopy=all", "k8s.device-plugin.nvidia.com/gds=all")
    assert allocation.cdi_devices[1:] == optional
    assert {name: allocation.envs[f"NVIDIA_{name}"] for name in ("GDS", "GDRCOPY", "MOFED")}
    assert not stale.exists()
    paths = {device.path for device in Registry([str(stale.parent)]).resolve(optional).devices}
    assert paths == {"/dev/gdrdrv", "/dev/nvidia-fs0"}


@pytest.mark.parametrize(
    ("disabled", "gone", "left"),
    [("update-ldcache", "--folder", "--link"), ("create-symlinks", "--link", "--folder"), ("all", "hooks", "")],
)
@pytest.mark.parametrize("program", ["gpulet-cdi-hook", "nvidia-cdi-hook"])
def test_hooks_left_out_of_the_specs(site, disabled, gone, left, program):
    site.start("--device-list-strategy=cdi-cri", f"--cdi-disable-hooks={disabled}", f"--nvidia-ctk-path=/x/{program}")
    site.kubelet.wait_for(GPU, 8)
    text = (site.folder / "cdi" / "k8s.device-plugin.nvidia.com-gpu.json").read_text()
    assert json.loads(text)["devices"]
    assert f'"{gone}"' not in text
    assert left in text


SINGLE = [
    "create-symlinks", "enable-cuda-compat", "update-ldcache", "disable-device-node-modification",
    "update-application-profile",
]  # fmt: skip


@pytest.mark.parametrize(
    ("path", "wanted"),
    [
        ("", [["/usr/bin/nvidia-ctk", "nvidia-ctk", "hook", name] for name in SINGLE]),
        ("/opt/toolkit/nvidia-cdi-hook", [["/opt/toolkit/nvidia-cdi-hook", "nvidia-cdi-hook", n] for n in SINGLE]),
        ("/opt/gpulet-cdi-hook", [["/opt/gpulet-cdi-hook", "gpulet-cdi-hook", "prepare"]]),
    ],
)
def test_the_hosts_hook_program_gets_the_hooks_that_it_knows(site, path, wanted):
    """A node whose toolkit stayed NVIDIA's, its engine doing CDI: theirs pass over what they don't know in silence."""
    environ = {"NVIDIA_CDI_HOOK_PATH": path} if path else {}
    site.start("--device-list-strategy=cdi-cri", **environ)
    site.kubelet.wait_for(GPU, 8)
    spec = json.loads((site.folder / "cdi" / "k8s.device-plugin.nvidia.com-gpu.json").read_text())
    hooks = spec["containerEdits"]["hooks"]
    assert [[hook["path"], *hook["args"]][: len(want)] for hook, want in zip(hooks, wanted, strict=True)] == wanted


def test_the_plugin_goes_by_the_name_of_the_hosts_hook_program(site):
    """Its own image may have a link of that name; the host's file may be another."""
    (site.folder / "nvidia-cdi-hook").symlink_to("gpulet-cdi-hook")
    (site.folder / "gpulet-cdi-hook").touch()
    site.start("--device-list-strategy=cdi-cri", f"--nvidia-cdi-hook-path={site.folder}/nvidia-cdi-hook")
    site.kubelet.wait_for(GPU, 8)
    assert "prepare" not in (site.folder / "cdi" / "k8s.device-plugin.nvidia.com-gpu.json").read_text()


def test_device_nodes_with_their_control_nodes(site):
    site.start("--pass-device-specs")
    site.kubelet.wait_for(GPU, 8)
    devices = site.kubelet.allocate("p", "c", {GPU: 1}).devices
    control = ["/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/nvidia-modeset"]
    assert [device.container_path for device in devices] == [*control, "/dev/nvidia0"]
    assert {device.host_path for device in devices} == {f"{site.node.root}{one.container_path}" for one in devices}
    assert {device.permissions for device in devices} == {"rw"}


def test_mig_devices_appear_while_it_runs(site):
    site.start("--mig-strategy=mixed")
    site.kubelet.wait_for(GPU, 8)
    inject(site.folder, "mig gpu0 1g.10gb x7")
    site.kubelet.wait_for("nvidia.com/mig-1g.10gb", 7, 20)
    site.kubelet.wait_for(GPU, 7)
    allocation = site.kubelet.allocate("p", "c", {"nvidia.com/mig-1g.10gb": 2})
    assert all(name.startswith("MIG-") for name in allocation.envs["NVIDIA_VISIBLE_DEVICES"].split(","))


@pytest.mark.parametrize(
    ("site", "words", "wanted"),
    [
        ("wsl", [], "all"),
        ("wsl", ["--device-id-strategy=index"], "all"),
        ("tegra", [], "tegra"),
        ("tegra", ["--device-id-strategy=index"], "0"),
    ],
    indirect=["site"],
)
def test_nodes_whose_gpus_are_one_device(site, words, wanted):
    site.start("--pass-device-specs", *words)
    site.kubelet.wait_for(GPU, 1)
    allocation = site.kubelet.allocate("p", "c", {GPU: 1})
    assert allocation.envs == {"NVIDIA_VISIBLE_DEVICES": wanted}
    assert [one.container_path for one in allocation.devices] == (["/dev/dxg"] if wanted == "all" else [])


@pytest.mark.parametrize(("discovery", "source"), [("auto", "tegra"), ("nvml", "nvml")])
def test_a_tegra_that_has_nvml_is_one(site, discovery, source, monkeypatch):
    monkeypatch.setattr(pynvml, "nvmlDeviceGetName", lambda handle: "Orin (nvgpu)")
    config = load([f"--driver-root={site.node.root}", f"--device-discovery-strategy={discovery}"], {})
    assert ask_nvml(config).source == source


def test_a_filter(site):
    site.start(f"--device-filter=index=1,index=2,uuid={site.uuids[5]},!index=2")
    assert set(site.kubelet.wait_for(GPU, 2).healthy) == {site.uuids[1], site.uuids[5]}


def test_no_driver(site):
    shutil.rmtree(site.node.root / "usr")
    site.start()
    assert site.process.wait(10) == 1
    last = site.log().splitlines()[-1]
    assert last.startswith("gpulet-device-plugin: ")
    before = site.log().count("NVML library not found")
    site.start("--fail-on-init-error=false")
    until(lambda: "waiting for it" in site.log())
    time.sleep(0.5)
    assert site.process.poll() is None
    assert site.log().count("NVML library not found") == before + 1  # however often it looks


def test_signals(site):
    site.start()
    site.kubelet.wait_for(GPU, 8)
    site.process.send_signal(1)
    time.sleep(0.3)
    assert site.process.poll() is None
    site.process.send_signal(2)
    assert site.process.wait(10) == 0
    assert "nvidia-gpu.sock" not in os.listdir(site.folder / "kubelet")


@pytest.mark.parametrize("running", [True, False])
def test_a_library_that_hangs_keeps_nobody_from_ending_it(site, running):
    if not running:
        inject(site.folder, "nvml init takes 40s")
    site.start()
    if running:
        site.kubelet.wait_for(GPU, 8)
        inject(site.folder, "nvml init takes 40s")
    else:
        until(lambda: "Running with config" in site.log())
    time.sleep(1)
    began = time.monotonic()
    site.process.terminate()
    assert site.process.wait(10) == 0
    assert time.monotonic() - began < 3
    assert "nvidia-gpu.sock" not in os.listdir(site.folder / "kubelet")


EARLY = """
import os, signal, sys
from gpulet.plugin import entry
entry.heed()
os.kill(os.getpid(), signal.SIGHUP)
assert not {"asyncio", "grpc"} & set(sys.modules)
sys.exit(entry.main())
"""


def test_a_reload_asked_for_while_it_starts_is_done_once_it_runs(site):
    (site.folder / "c.yaml").write_text("")
    site.start("--config-file", str(site.folder / "c.yaml"), program=("-c", EARLY))
    site.kubelet.wait_for(GPU, 8)
    until(lambda: "configuration read again: nothing has changed" in site.log())


def test_log_lines_in_json(site):
    site.start("--log-format=json")
    site.kubelet.wait_for(GPU, 8)
    until(lambda: "Registered device plugin" in site.log())
    lines = [json.loads(line) for line in site.log().splitlines()]
    assert lines[0]["message"].startswith("Running with config:")
    assert {"time", "level", "message"} <= set(lines[-1])


@pytest.mark.parametrize(
    ("words", "environ"),
    [
        (["--log-format=json", "--nope"], {}),
        (["-log-format", "json", "--mig-strategy=wrong"], {}),
        (["--mig-strategy=wrong"], {"LOG_FORMAT": "json"}),
        (["mps-control-daemon", "--mig-strategy=wrong"], {"LOG_FORMAT": "json"}),
        (["config-manager"], {"LOG_FORMAT": "json"}),
        (["--log-format=json"], {"MIG_STRATEGY": "wrong"}),
    ],
)
def test_settings_that_cannot_be_read_are_told_in_the_wanted_form(words, environ):
    command = [sys.executable, "-m", "gpulet.plugin.entry", *words]
    done = subprocess.run(command, capture_output=True, text=True, env={"PATH": os.environ["PATH"], **environ})
    assert done.returncode in (1, 2)
    (line,) = done.stderr.splitlines()
    assert json.loads(line)["level"] == "critical"


@pytest.mark.parametrize("words", [["--version"], ["--help"]])
def test_what_only_prints(words):
    done = subprocess.run([sys.executable, "-m", "gpulet.plugin.entry", *words], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip()


def test_a_wrong_command_line():
    done = subprocess.run([sys.executable, "-m", "gpulet.plugin.entry", "--nope"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (2, "gpulet-device-plugin: unknown argument: --nope; see --help\n")


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def test_metrics_of_a_node(site):
    """Everything that an operator asks about, from the GPUs' health to who has them."""
    port = free_port()
    site.kubelet.stop()
    site.kubelet = Kubelet(site.folder / "kubelet", site.folder / "pod-resources" / "kubelet.sock")
    site.kubelet.start()
    (site.folder / "c.yaml").write_text("sharing: {timeSlicing: {resources: [{name: gpu, replicas: 2}]}}")
    (site.folder / "chosen.yaml").symlink_to("c.yaml")
    words = [f"--metrics-address=127.0.0.1:{port}", "--device-list-strategy=cdi-cri"]
    site.start(*words, "--config-file", str(site.folder / "chosen.yaml"))
    site.kubelet.wait_for(GPU, 16)
    container = ContainerSpec("main", limits={GPU: 1})
    site.kubelet.admit(Pod("trainer", (container,), namespace="team", uid="u-1"))

    def missing(*wanted):
        lines = plugin.get(port, "/metrics")[1].splitlines()
        return [one for one in wanted if not any(re.fullmatch(one, line) for line in lines)]

    held = r'gpu_allocation_info\{{container="main",mig="",namespace="{}",pod="{}",replica="0",uuid="{}"\}} 1.0'
    uuid, driver = site.uuids[0], re.escape(site.node.description.driver)
    plugin.until(lambda: not missing(r'dp_nvml_calls_total\{fn="wait",rc="0"\} [1-9].*'))
    assert not missing(
        held.format("team", "trainer", uuid),
        rf'gpu_health\{{pci=".+",reason="",serial=".+",uuid="{uuid}",xid=""\}} 1.0',
        rf'driver_info\{{cuda=".+",lib_version="{driver}",module_version="{driver}"\}} 1.0',
        r"driver_mismatch 0.0",
        rf'cdi_spec_info\{{driver="{driver}",file="k8s.device-plugin.nvidia.com-gpu.json",fingerprint=".{{8}}"\}} 1.0',
        r'cdi_spec_stale\{file="k8s.device-plugin.nvidia.com-gpu.json"\} 0.0',
        r"cdi_spec_errors 0.0",
        r'dp_config_info\{hash=".{8}",key="c.yaml"\} 1.0',
        r"dp_kubelet_restarts_seen_total 0.0",
        r'dp_nvml_calls_total\{fn="init",rc="0"\} 1.0',
        r"dp_last_health_check_timestamp_seconds 1.*",
        r"gpu_expected 8.0",
        r"gpu_enumerated 8.0",
    )
    inject(site.folder, "gpu 1 recovery 2")
    inject(site.folder, "gpu 1 xid 79")
    inject(site.folder, "gpu 2 lost")
    (site.folder / "cdi" / "broken.json").write_text("{")
    site.kubelet.wait_for(GPU, 12)
    plugin.until(
        lambda: (
            not missing(
                rf'gpu_health\{{.*reason="Xid 79 .*",serial=".+",uuid="{site.uuids[1]}",xid="79"\}} 0.0',
                rf'gpu_recovery_action\{{uuid="{site.uuids[1]}"\}} 2.0',
                rf'gpu_xid_total\{{action="reboot",class="bus",uuid="{site.uuids[1]}",xid="79"\}} 1.0',
                r"gpu_enumerated 7.0",
                r"cdi_spec_errors 1.0",
                r'dp_nvml_calls_total\{fn="state",rc="15"\} .*',
            )
        )
    )
    site.kubelet.restart()
    site.kubelet.wait_for(GPU, 12)
    plugin.until(lambda: not missing(r"dp_kubelet_restarts_seen_total 1.0"))
    site.kubelet.stop()  # its API is gone, its checkpoint is not
    plugin.until(lambda: not missing(held.format("", "u-1", uuid)))
