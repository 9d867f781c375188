"""The MPS control daemons: what they are told, how they die and come back. Recording programs stand in for NVIDIA's."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from gpulet.errors import NodeError
from gpulet.node.gpu import Lost
from gpulet.plugin import mps, mps_control, mps_daemon, mps_process
from gpulet.plugin.config import Config, load
from gpulet.plugin.resources import inventory
from gpulet.plugin.sharing import Shared, Sharing
from gpulet.sim import node as simulated
from gpulet.sim.inject import inject
from gpulet.sim.kubelet import Kubelet
from support import plugin_process as plugin
from support.hand_made import facts, gpu, gpu_uuid

GPU = "nvidia.com/gpu"
CONTROL = """#!/bin/sh
# A control daemon is alive while its control file says so; what it is told is kept.
cd "$CUDA_MPS_PIPE_DIRECTORY" || exit 1
if [ "$1" = -d ]; then
    grep -q alive control 2>/dev/null && exit 1
    echo alive > control
    echo "start $(env | grep -vc -e ^PWD= -e ^OLDPWD= -e ^_= -e ^SHLVL=)" >> {log}
    echo up >> "$CUDA_MPS_LOG_DIRECTORY/control.log"
    exit 0
fi
grep -q alive control || {{ echo "Cannot find MPS control daemon process" >&2; exit 1; }}
told=$(cat)
echo "$told" >> {log}
[ "$told" = quit ] && rm control
exit 0
"""
SMI = """#!/bin/sh
echo "smi $*" >> {log}
"""


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder with both programs in PATH; `log` has what they were told."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in ((mps.PROGRAM, CONTROL), ("nvidia-smi", SMI)):
        (programs / name).write_text(text.format(log=tmp_path / "log"))
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    (tmp_path / "log").touch()
    write(tmp_path, 3)
    return tmp_path


def write(folder, replicas):
    sharing = f"sharing: {{mps: {{resources: [{{name: gpu, replicas: {replicas}}}]}}}}" if replicas else ""
    (folder / "c.yaml").write_text(f"flags: {{mpsRoot: {folder / 'mps'}}}\n{sharing}\n")


def words(site):
    return ["--config-file", str(site / "c.yaml")]


def told(site):
    lines = (site / "log").read_text().splitlines()
    return [line for line in lines if line != mps.QUESTION]


def service(site, node):
    return mps_daemon.Service(lambda: load(words(site), {}), lambda config: node)


def test_limits_of_each_replica():
    config = Config(mps=Sharing((Shared(GPU, 3),), True), mps_root="/m")
    (resource,) = inventory(facts(gpu(0), gpu(4, memory=0), gpu(5, memory=(10 << 30) + 1)), config).resources
    assert mps_control.plan(resource).commands == (
        "set_default_device_pinned_mem_limit 0 27306M",
        "set_default_device_pinned_mem_limit 5 3413M",
        "set_default_active_thread_percentage 33",
    )


def test_only_some_gpus_shared():
    sharing = Sharing((Shared(GPU, 4, f"{GPU}.shared", ("1",)),), True)
    resources = inventory(facts(3), Config(mps=sharing, mps_root="/m")).resources
    shared = [resource for resource in resources if mps.shared(resource, Config(mps=sharing, mps_root="/m"))]
    assert [resource.name for resource in shared] == [f"{GPU}.shared"]
    assert mps_control.plan(shared[0]).uuids == (gpu_uuid(1),)
    assert mps_control.plan(shared[0]).commands[-1] == "set_default_active_thread_percentage 25"


def test_only_some_gpus_shared_under_the_same_name():
    sharing = Sharing((Shared(GPU, 4, devices=("1",)),), True)
    (resource,) = inventory(facts(3), Config(mps=sharing, mps_root="/m")).resources
    plan = mps_control.plan(resource)
    assert plan.uuids == (gpu_uuid(1),)
    assert plan.commands == (
        "set_default_device_pinned_mem_limit 1 20480M",
        "set_default_active_thread_percentage 25",
    )


def test_started_told_and_ended(site):
    daemons = service(site, facts(2))
    daemons.follow()
    assert told(site) == [
        f"smi -i {gpu_uuid(0)} -c EXCLUSIVE_PROCESS",
        f"smi -i {gpu_uuid(1)} -c EXCLUSIVE_PROCESS",
        "start 2",  # no variable but the two
        "set_default_device_pinned_mem_limit 0 27306M",
        "set_default_device_pinned_mem_limit 1 27306M",
        "set_default_active_thread_percentage 33",
    ]
    root = site / "mps"
    assert (root / ".ready").exists() and (root / GPU / ".started").exists()
    before = told(site)
    daemons.follow()
    assert told(site) == before
    daemons.stop()
    assert told(site)[len(before)] == "quit"
    assert sorted(told(site)[len(before) + 1 :]) == [f"smi -i {gpu_uuid(n)} -c DEFAULT" for n in (0, 1)]
    assert not (root / ".ready").exists() and not (root / GPU / ".started").exists()
    assert not (root / GPU / "log").exists()


def test_one_that_dies_is_started_again(site, caplog):
    daemons = service(site, facts(1))
    daemons.follow()
    (site / "mps" / GPU / "pipe" / "control").write_text("dead")
    daemons.follow()
    assert [line[:5] for line in told(site)].count("start") == 2
    assert "the MPS daemon of nvidia.com/gpu has died, starting it again" in caplog.text
    assert "Cannot find MPS control daemon process" in caplog.text


def test_one_that_already_runs_is_taken_over(site):
    """After this program was killed: the clients of a running daemon must not lose it."""
    service(site, facts(1)).follow()
    daemons = service(site, facts(1))
    daemons.follow()
    assert [line[:5] for line in told(site)].count("start") == 1
    assert told(site).count("set_default_active_thread_percentage 33") == 2


def test_another_configuration(site):
    daemons = service(site, facts(1))
    daemons.follow()
    write(site, 5)
    daemons.follow()
    assert told(site)[-1] == "set_default_active_thread_percentage 20"
    assert "quit" in told(site)
    write(site, 0)
    daemons.follow()
    assert daemons.controls == {}
    assert told(site)[-1] == f"smi -i {gpu_uuid(0)} -c DEFAULT"


def test_what_cannot_be_started_is_no_readiness(site):
    (site / "bin" / "nvidia-smi").write_text("#!/bin/sh\necho no permission >&2\nexit 4\n")
    daemons = service(site, facts(1))
    with pytest.raises(NodeError, match=r"nvidia-smi -i GPU-.* of nvidia.com/gpu ended with 4: no permission"):
        daemons.follow()
    assert not (site / "mps" / ".ready").exists()
    daemons.stop()


def test_a_program_that_hangs(site, monkeypatch):
    monkeypatch.setattr(mps_process, "TIMEOUT", 0.2)
    (site / "bin" / "nvidia-smi").write_text("#!/bin/sh\nexec sleep 60\n")
    with pytest.raises(NodeError, match="timed out"):
        service(site, facts(1)).follow()


def test_a_dead_daemon_makes_its_devices_unhealthy_until_it_answers(site):
    """C56's other half: what was offered and can't be used any more."""
    service(site, facts(2)).follow()
    control = site / "mps" / GPU / "pipe" / "control"
    with (
        plugin.short_folder() as folder,
        Kubelet(folder) as kubelet,
        plugin.running(folder, lambda: facts(2), *words(site), refresh_every=0.1) as running,
    ):
        kubelet.wait_for(GPU, 6)
        control.write_text("dead")
        assert kubelet.wait_for(GPU, 0).capacity == 6
        assert "waiting for the MPS daemon at" in running.daemon.silent[GPU]
        control.write_text("alive")
        kubelet.wait_for(GPU, 6)
        assert len(kubelet.registrations) == 1


def test_c56_waiting_for_the_mps_daemon_is_said_and_no_crash(site):
    with (
        plugin.short_folder() as folder,
        Kubelet(folder) as kubelet,
        plugin.running(folder, lambda: facts(2), *words(site), "--metrics-address=127.0.0.1:0") as running,
    ):
        plugin.until(lambda: "waiting for the MPS daemon" in plugin.get(running.endpoint.port, "/readyz")[1])
        status, text = plugin.get(running.endpoint.port, "/readyz")
        assert status == 503
        assert f"waiting for the MPS daemon at {site}/mps/nvidia.com/gpu/pipe" in text
        assert kubelet.resources() == {}
        service(site, facts(2)).follow()
        kubelet.wait_for(GPU, 6)


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("cc") is None, reason="a simulated node needs root and cc")
def test_the_program_on_a_simulated_node():
    with plugin.short_folder() as folder:
        node = simulated.create(folder / "node", "t4x1")
        write(folder, 4)
        command = [sys.executable, "-m", "gpulet.plugin.mps_daemon", "--driver-root", str(node.root)]
        process = subprocess.Popen([*command, "--refresh-interval=0.2", *words(folder)])
        try:
            plugin.until((folder / "mps" / ".ready").exists)
            lines = (folder / "mps" / GPU / "log" / "control.log").read_text().splitlines()
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(10) == 0
    assert lines[0] == "start"
    assert lines[1].startswith("set_default_device_pinned_mem_limit 0 ") and lines[1].endswith("M")
    assert lines[2] == "set_default_active_thread_percentage 25"


def test_a_driver_that_hangs_keeps_nobody_from_ending_it(site, caplog, monkeypatch):
    monkeypatch.setattr("gpulet.plugin.aside.PATIENCE", 0.1)
    stop, hung = threading.Event(), threading.Event()
    hung.set()

    def look(config):
        assert hung.wait(30)
        return facts(2)

    keeper = mps_daemon.Service(lambda: load(words(site), {}), look, stop)
    keeper.follow()
    hung.clear()
    threading.Timer(0.5, stop.set).start()
    with pytest.raises(mps_process.Ended, match="ended before"):
        keeper.follow()
    assert caplog.text.count("the driver gave no answer within 0.1 s: waiting for it") == 1
    keeper.stop()
    hung.set()
    assert told(site)[-3] == "quit"
    assert sorted(told(site)[-2:]) == [f"smi -i {gpu_uuid(index)} -c DEFAULT" for index in (0, 1)]


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("cc") is None, reason="a simulated node needs root and cc")
def test_the_program_ends_while_the_library_hangs(tmp_path):
    with plugin.short_folder() as folder:
        node = simulated.create(folder / "node", "t4x1")
        write(folder, 4)
        inject(folder / "node", "nvml init takes 40s")
        command = [sys.executable, "-m", "gpulet.plugin.mps_daemon", "--driver-root", str(node.root)]
        with open(tmp_path / "log", "wb") as log:
            process = subprocess.Popen([*command, *words(folder)], stderr=log)
        maps = Path(f"/proc/{process.pid}/maps")
        plugin.until(lambda: "libnvidia-ml.so" in maps.read_text())  # its handlers stand, and NVML is asked
        process.send_signal(signal.SIGTERM)
        assert process.wait(5) == 0, (tmp_path / "log").read_text()


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("cc") is None, reason="a simulated node needs root and cc")
@pytest.mark.parametrize("way", ["quit", "killed", "the service's end"])
def test_a_control_daemon_that_ends_on_a_simulated_node(tmp_path, way):
    told = []
    write(tmp_path, 4)
    with plugin.short_folder() as folder, Kubelet(folder) as kubelet:
        node = simulated.create(folder / "node", "t4x1")
        more = [f"--driver-root={node.root}", *words(tmp_path)]
        keeper = mps_daemon.Service(lambda: load(more, {}), lambda config: facts(1))
        keeper.follow()
        (control,) = keeper.controls.values()
        with plugin.running(folder, lambda: facts(1), *more, refresh_every=0.1, report=told.append):
            kubelet.wait_for(GPU, 4)
            if way == "quit":
                control._run(mps.PROGRAM, told="quit")
            elif way == "killed":
                os.unlink(os.path.join(control.pipe, "control"))
            else:
                keeper.stop()
            kubelet.wait_for(GPU, 0)
            assert told[-1].kind == "MPSFailed"
            keeper.follow()
            kubelet.wait_for(GPU, 4)
            assert told[-1].kind == "MPSRecovered"


def test_our_own_questions_are_no_news_in_the_log(site, caplog):
    caplog.set_level("INFO")
    keeper = service(site, facts(1))
    keeper.follow()
    (control,) = keeper.controls.values()
    with open(os.path.join(control.log, "control.log"), "a") as stream:
        stream.write(f"{mps.QUESTION}\nsomething else\n")
    keeper.follow()
    assert f"{GPU}: something else" in caplog.text
    assert mps.QUESTION not in caplog.text


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="mounts")
def test_mount_shm(tmp_path):
    try:
        for _ in range(2):
            mps_daemon.mount_shm(str(tmp_path), 65793468)
            found = [
                line.split() for line in Path("/proc/mounts").read_text().splitlines() if f" {tmp_path}/shm " in line
            ]
            (row,) = found
            assert row[0] == "shm" and row[2] == "tmpfs"
            assert {"nosuid", "nodev", "noexec", "relatime", "size=32896736k"} <= set(row[3].split(","))
    finally:
        subprocess.run(["umount", tmp_path / "shm"], check=True)


def test_arguments_of_mount_shm(site):
    done = subprocess.run(
        [sys.executable, "-m", "gpulet.plugin.main", "mps-control-daemon", "mount-shm", "--x"], capture_output=True,
        text=True,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr == "mps-control-daemon: mount-shm takes no arguments: --x\n"


def test_a_lost_gpu_does_not_end_the_others_clients(site):
    node = [facts(2)]
    running = mps_daemon.Service(lambda: load(words(site), {}), lambda config: node[0])
    running.follow()
    begun = told(site)
    node[0] = facts(gpu(0), lost=(Lost(1, "GPU is lost (NVML 15)"),))
    running.follow()
    assert told(site) == begun
    running.stop()


def test_one_resources_trouble_is_not_the_others(site):
    (site / "c.yaml").write_text(
        f"flags: {{mpsRoot: {site / 'mps'}}}\n"
        "resources: {gpus: [{pattern: '*80GB*', name: big}, {pattern: '*', name: small}]}\n"
        "sharing: {mps: {resources: [{name: big, replicas: 2}, {name: small, replicas: 2}]}}\n"
    )
    running = service(site, facts(gpu(0, name="H100 80GB"), gpu(1, name="L4")))
    (site / "mps" / "nvidia.com").mkdir(parents=True)
    (site / "mps" / "nvidia.com" / "big").write_text("in the way")
    with pytest.raises(OSError):
        running.follow()
    assert [name for (name, _), control in running.controls.items() if control.up] == ["nvidia.com/small"]
    assert not (site / "mps" / ".ready").exists()
    running.stop()


def test_a_lost_gpu_does_not_keep_the_daemon_from_being_started_for_the_others(site, caplog):
    node = [facts(3)]
    running = mps_daemon.Service(lambda: load(words(site), {}), lambda config: node[0])
    running.follow()
    node[0] = facts(gpu(0), gpu(2), lost=(Lost(1, "GPU is lost (NVML 15)"),))
    (site / "mps" / GPU / "pipe" / "control").write_text("dead")
    (site / "log").write_text("")
    for _ in range(3):
        running.follow()
    assert told(site) == [
        *(f"smi -i {gpu_uuid(n)} -c EXCLUSIVE_PROCESS" for n in (0, 2)),
        "start 2",
        *(f"set_default_device_pinned_mem_limit {n} 27306M" for n in (0, 2)),
        "set_default_active_thread_percentage 33",
    ]
    assert caplog.text.count(f"without one GPU for now: GPU {gpu_uuid(1)} doesn't answer") == 1
    assert (site / "mps" / ".ready").exists()
    node[0] = facts(3)
    (site / "log").write_text("")
    for _ in range(2):
        running.follow()
    assert told(site) == [
        f"smi -i {gpu_uuid(1)} -c EXCLUSIVE_PROCESS",
        "set_default_device_pinned_mem_limit 1 27306M",
    ]
    running.stop()


def test_a_gpu_whose_mode_cannot_be_set_is_left_for_later(site, caplog):
    refuse = f'case "$*" in *{gpu_uuid(0)}*) echo reset required >&2; exit 15;; esac\n'
    program = site / "bin" / "nvidia-smi"
    well = program.read_text()
    program.write_text(well + refuse)
    running = service(site, facts(2))
    for _ in range(3):
        running.follow()
    assert "set_default_device_pinned_mem_limit 0 27306M" not in told(site)
    assert caplog.text.count("reset required") == 1
    program.write_text(well)
    running.follow()
    assert told(site)[-1] == "set_default_device_pinned_mem_limit 0 27306M"
    program.write_text(well + refuse)
    running.stop()
    assert f"smi -i {gpu_uuid(1)} -c DEFAULT" in told(site)


def hang(site):
    """Let both programs hang from now on: they may have children, and those hold our pipes."""
    for name in (mps.PROGRAM, "nvidia-smi"):
        (site / "bin" / name).write_text(
            f'#!/bin/sh\nsleep 61 & echo $! >> {site}/children\necho "tried $*" >> {site}/log\nwait\n'
        )


def alive(pid):
    """Whether a process runs: one that has ended may wait for its parent for long."""
    try:
        return Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def set_at(event, sign):
    """The thread that sets an event at a sign, or after a while, so that nobody waits for ever."""

    def watch():
        try:
            plugin.until(sign, 20)
        finally:
            event.set()

    thread = threading.Thread(target=watch)
    thread.start()
    return thread


REFUSES = 'case "$told" in set_default_device*) echo invalid command >&2; exit 1;; esac\n[ "$told" = quit ]'


def exclusive(site):
    """The GPUs that aren't everybody's, by what nvidia-smi was told."""
    modes = {line.split()[2]: line.split()[4] for line in told(site) if line.startswith("smi ")}
    return sorted(uuid for uuid, mode in modes.items() if mode != "DEFAULT")


def replace_in(program, old, new):
    text = program.read_text()
    assert old in text
    program.write_text(text.replace(old, new))


@pytest.mark.parametrize("way", ["the program's end", "MPS turned off", "another run"])
def test_what_is_half_started_is_ended_too(site, way):
    replace_in(site / "bin" / mps.PROGRAM, '[ "$told" = quit ]', REFUSES)
    daemons = service(site, facts(2))
    with pytest.raises(NodeError, match="ended with 1: invalid command"):
        daemons.follow()
    assert exclusive(site) == [gpu_uuid(0), gpu_uuid(1)]
    assert not (site / "mps" / GPU / ".started").exists()
    if way == "the program's end":
        daemons.stop()
    else:
        write(site, 0)
        daemons = daemons if way == "MPS turned off" else service(site, facts(2))
        daemons.follow()
        assert daemons.controls == {}
    assert told(site).count("quit") == 1
    assert exclusive(site) == []
    assert sorted(path.name for path in (site / "mps" / GPU).iterdir()) == ["pipe"]


@pytest.mark.parametrize("missing", [mps.PROGRAM, "nvidia-smi"])
def test_no_gpu_is_taken_where_a_program_is_missing(site, monkeypatch, missing):
    (site / "bin" / missing).unlink()
    (site / "bin" / "env").symlink_to(shutil.which("env"))
    monkeypatch.setenv("PATH", str(site / "bin"))
    daemons = service(site, facts(2))
    with pytest.raises(NodeError, match=f"{missing} is neither in"):
        daemons.follow()
    daemons.stop()
    assert told(site) == []


def test_what_a_killed_run_left_is_ended_where_it_is_not_wanted_any_more(site, caplog):
    service(site, facts(2)).follow()
    write(site, 0)
    daemons = service(site, facts(2))
    for _ in range(2):
        daemons.follow()
    assert told(site).count("quit") == 1
    assert exclusive(site) == []
    assert caplog.text.count(f"run left the MPS daemon of {GPU} behind, ending it: {gpu_uuid(0)}, {gpu_uuid(1)}") == 1


def test_gpus_of_a_daemon_that_another_program_left_are_for_people_to_set_back(site, caplog):
    service(site, facts(1)).follow()
    (site / "mps" / GPU / ".held").unlink()
    write(site, 0)
    daemons = service(site, facts(1))
    for _ in range(2):
        daemons.follow()
    assert told(site)[-1] == "quit"
    assert caplog.text.count("which GPUs it had isn't known: set those that are still exclusive back") == 1


def test_only_what_is_ours_in_the_folder_is_ended(site):
    (site / "mps" / "shm").mkdir(parents=True)
    (site / "mps" / "example.com" / "gpu" / "pipe").mkdir(parents=True)
    (site / "mps" / "example.com" / "gpu" / "pipe" / "control").write_text("alive")
    (site / "mps" / GPU / "pipe").mkdir(parents=True)
    write(site, 0)
    service(site, facts(1)).follow()
    assert told(site) == []
    assert mps_daemon.left_behind("") == []


def test_a_killed_run_of_another_plan(site):
    """Its daemon is taken over, GPUs that aren't shared any more are everybody's, and new limits are set before
    anybody counts on them."""
    service(site, facts(2)).follow()
    mark = site / "mps" / GPU / ".started"
    replace_in(site / "c.yaml", "replicas: 3", "replicas: 4, devices: [1]")
    replace_in(
        site / "bin" / mps.PROGRAM, "told=$(cat)", f'told=$(cat)\n[ -e {mark} ] && echo "marked $told" >> {site}/log'
    )
    service(site, facts(2)).follow()
    assert exclusive(site) == [gpu_uuid(1)]
    assert "quit" not in told(site)
    assert [line for line in told(site) if line.startswith("marked set")] == []
    assert mark.read_text().splitlines()[-1] == "set_default_active_thread_percentage 25"


def test_a_killed_run_of_the_same_plan_stays_ready(site):
    service(site, facts(1)).follow()
    mark = site / "mps" / GPU / ".started"
    replace_in(
        site / "bin" / mps.PROGRAM, "told=$(cat)", f'told=$(cat)\n[ -e {mark} ] && echo "marked $told" >> {site}/log'
    )
    service(site, facts(1)).follow()
    assert "marked set_default_active_thread_percentage 33" in told(site)


def test_under_another_name_the_gpus_stay_the_daemons(site):
    service(site, facts(1)).follow()
    replace_in(site / "c.yaml", "replicas: 3", "replicas: 3, rename: gpu.shared")
    daemons = service(site, facts(1))
    for _ in range(2):
        daemons.follow()
    assert exclusive(site) == [gpu_uuid(0)]
    assert told(site).count("quit") == 1
    write(site, 0)
    daemons.follow()
    assert exclusive(site) == []
    assert daemons.controls == {} and mps_daemon.left_behind(str(site / "mps")) == []


def test_a_gpu_that_cannot_be_given_back_is_tried_again_and_told_once(site, caplog):
    service(site, facts(2)).follow()
    program = site / "bin" / "nvidia-smi"
    well = program.read_text()
    program.write_text(f'#!/bin/sh\ncase "$*" in *{gpu_uuid(0)}*) echo busy; exit 15;; esac\n' + well)
    write(site, 0)
    for daemons in (service(site, facts(2)), service(site, facts(2))):  # another run takes it up
        caplog.clear()
        for _ in range(2):
            daemons.follow()
        assert exclusive(site) == [gpu_uuid(0)]
        assert caplog.text.count(f"GPU {gpu_uuid(0)} isn't everybody's again") == 1
    program.write_text(well)
    daemons.follow()
    assert exclusive(site) == []
    assert daemons.controls == {}


def test_every_step_of_the_end_is_tried_in_time_though_each_hangs(site, monkeypatch, caplog):
    monkeypatch.setattr(mps_process, "LAST_TIMEOUT", 0.5)
    stop = threading.Event()
    daemons = mps_daemon.Service(lambda: load(words(site), {}), lambda config: facts(8), stop)
    daemons.follow()
    hang(site)
    stop.set()
    began = time.monotonic()
    daemons.stop()
    assert time.monotonic() - began < 30
    assert sorted(line for line in told(site) if line.startswith("tried")) == [
        "tried ",
        *(f"tried -i {gpu_uuid(n)} -c DEFAULT" for n in range(8)),
    ]
    assert caplog.text.count("timed out after 0.5 seconds") == 9
    children = (site / "children").read_text().split()
    plugin.until(lambda: not any(map(alive, children)))


def test_a_start_that_hangs_is_given_up_for_the_end(site, caplog):
    stop = threading.Event()
    replace_in(site / "bin" / mps.PROGRAM, "    exit 0", "    sleep 60")
    daemons = mps_daemon.Service(lambda: load(words(site), {}), lambda config: facts(1), stop)
    sign = set_at(stop, lambda: "start 2" in told(site))
    began = time.monotonic()
    with pytest.raises(mps_process.Ended):
        daemons.follow()
    daemons.stop()
    sign.join()
    assert time.monotonic() - began < 30
    assert told(site)[-2:] == ["quit", f"smi -i {gpu_uuid(0)} -c DEFAULT"]
    assert caplog.text == ""


def test_a_daemon_that_keeps_its_starters_pipes_is_waited_for_no_longer_than_its_starter(site):
    replace_in(site / "bin" / mps.PROGRAM, "    exit 0", f"    sleep 30 & echo $! >> {site}/children\n    exit 0")
    daemons = service(site, facts(1))
    daemons.follow()
    (child,) = (site / "children").read_text().split()
    assert alive(child)
    os.kill(int(child), signal.SIGKILL)
    daemons.stop()


def test_a_memory_that_is_not_told_ends_nobody(site):
    node = [facts(gpu(0), gpu(1, memory=0))]
    daemons = mps_daemon.Service(lambda: load(words(site), {}), lambda config: node[0])
    daemons.follow()
    assert not any("limit 1 " in line for line in told(site))
    begun = len(told(site))
    for memory, more in ((80 << 30, 2), (0, 0), (80 << 30, 0)):
        node[0] = facts(gpu(0), gpu(1, memory=memory))
        daemons.follow()
        daemons.follow()
        assert len(told(site)) - begun == more
        begun = len(told(site))
    assert told(site)[-1] == "set_default_device_pinned_mem_limit 1 27306M"
    assert (site / "mps" / GPU / ".started").read_text().splitlines() == [
        "set_default_device_pinned_mem_limit 0 27306M",
        "set_default_device_pinned_mem_limit 1 27306M",
        "set_default_active_thread_percentage 33",
    ]


def test_a_limit_that_is_refused_is_told_again(site):
    node = [facts(gpu(0, memory=0))]
    daemons = mps_daemon.Service(lambda: load(words(site), {}), lambda config: node[0])
    daemons.follow()
    node[0] = facts(1)
    program = site / "bin" / mps.PROGRAM
    well = program.read_text()
    replace_in(program, '[ "$told" = quit ]', REFUSES)
    with pytest.raises(NodeError, match="invalid command"):
        daemons.follow()
    program.write_text(well)
    for _ in range(2):
        daemons.follow()
    assert told(site).count("set_default_device_pinned_mem_limit 0 27306M") == 2
    assert "quit" not in told(site)


@pytest.mark.parametrize("another_run", [False, True])
def test_a_gpu_that_moves_to_another_resource_stays_exclusive(site, another_run):
    shared = "{{name: {0}, replicas: 2}}".format
    pattern = "{{pattern: '{0}', name: {1}}}".format
    text = f"flags: {{mpsRoot: {site / 'mps'}}}\nresources: {{gpus: [%s]}}\nsharing: {{mps: {{resources: [%s]}}}}\n"
    (site / "c.yaml").write_text(text % (pattern("*", "gpu"), shared("gpu")))
    node = facts(gpu(0, name="H100"), gpu(1, name="L4"))
    daemons = service(site, node)
    daemons.follow()
    both = (f"{pattern('H*', 'big')}, {pattern('*', 'gpu')}", f"{shared('gpu')}, {shared('big')}")
    (site / "c.yaml").write_text(text % both)
    if another_run:
        daemons = service(site, node)
    for _ in range(2):
        daemons.follow()
    assert exclusive(site) == [gpu_uuid(0), gpu_uuid(1)]
    assert not any(line.endswith("DEFAULT") for line in told(site))
    assert {name: control.held for (name, _), control in daemons.controls.items()} == {
        "nvidia.com/big": (gpu_uuid(0),),
        "nvidia.com/gpu": (gpu_uuid(1),),
    }
    daemons.stop()
    assert exclusive(site) == []


@pytest.mark.parametrize("there", [(), (gpu(1),)])
def test_what_an_earlier_run_left_is_taken_over_though_a_gpu_does_not_answer_at_first(site, there, caplog):
    service(site, facts(2)).follow()
    node = [facts(*there, lost=(Lost(0, "Unknown Error (NVML 999)"),))]
    daemons = mps_daemon.Service(lambda: load(words(site), {}), lambda config: node[0])
    for _ in range(2):
        daemons.follow()
    assert caplog.text.count("leaving it until all its GPUs answer") == (not there)
    node[0] = facts(2)
    for _ in range(2):
        daemons.follow()
    assert "quit" not in told(site) and not any(line.endswith("DEFAULT") for line in told(site))
    assert [line[:5] for line in told(site)].count("start") == 1
    daemons.stop()
    assert "quit" in told(site) and exclusive(site) == []


@pytest.mark.parametrize("way", ["not shared any more", "our end"])
def test_what_an_earlier_run_left_is_ended_though_a_gpu_does_not_answer(site, way):
    service(site, facts(1)).follow()
    daemons = service(site, facts(lost=(Lost(0, "Unknown Error (NVML 999)"),)))
    daemons.follow()
    assert "quit" not in told(site)
    if way == "our end":
        daemons.stop()
    else:
        replace_in(site / "c.yaml", "name: gpu", "name: other")
        daemons.follow()
    assert told(site).count("quit") == 1


def test_a_gpu_that_was_never_taken_is_not_given_back(site):
    """An administrator may have made it exclusive."""
    node = [facts(2)]
    program = site / "bin" / "nvidia-smi"
    program.rename(site / "smi")
    daemons = mps_daemon.Service(lambda: load(words(site), {}), lambda config: node[0])
    with pytest.raises(NodeError, match="nvidia-smi is neither in"):
        daemons.follow()
    (site / "smi").rename(program)
    node[0] = facts(gpu(0), lost=(Lost(1, "GPU is lost (NVML 15)"),))
    daemons.follow()
    daemons.stop()
    assert [line for line in told(site) if gpu_uuid(1) in line] == []
    assert exclusive(site) == []


def test_another_folder_and_a_gpu_that_cannot_be_given_back_at_once(site):
    daemons = service(site, facts(2))
    daemons.follow()
    program = site / "bin" / "nvidia-smi"
    well = program.read_text()
    program.write_text(f'#!/bin/sh\ncase "$*" in *{gpu_uuid(1)}*DEFAULT) echo busy; exit 15;; esac\n' + well)
    replace_in(site / "c.yaml", str(site / "mps"), str(site / "mps2"))
    replace_in(site / "c.yaml", "replicas: 3", "replicas: 3, devices: [0]")
    daemons.follow()
    assert (site / "mps2" / ".ready").exists() and not (site / "mps" / ".ready").exists()
    assert (site / "mps" / GPU / ".held").read_text() == f"{gpu_uuid(1)}\n"
    program.write_text(well)
    daemons.follow()
    assert exclusive(site) == [gpu_uuid(0)]
    assert [root for _, root in daemons.controls] == [str(site / "mps2")]
    assert not (site / "mps" / GPU / ".held").exists()


def test_a_daemon_that_does_not_quit_is_told_again(site):
    daemons = service(site, facts(1))
    daemons.follow()
    program = site / "bin" / mps.PROGRAM
    well = program.read_text()
    replace_in(program, '[ "$told" = quit ]', '[ "$told" = quit ] && exit 7\n[ "$told" = quit ]')
    write(site, 0)
    daemons.follow()
    assert (site / "mps" / GPU / "pipe" / "control").exists()
    program.write_text(well)
    daemons.follow()
    assert told(site).count("quit") == 2
    assert daemons.controls == {} and mps_daemon.left_behind(str(site / "mps")) == []


def test_the_end_during_another_configuration_takes_no_longer_for_more_daemons(site, monkeypatch):
    monkeypatch.setattr(mps_process, "LAST_TIMEOUT", 0.5)
    stop, number = threading.Event(), 6
    patterns = ", ".join(f"{{pattern: 'X{index}', name: r{index}}}" for index in range(number))
    shared = ", ".join(f"{{name: r{index}, replicas: 2}}" for index in range(number))
    (site / "c.yaml").write_text(
        f"flags: {{mpsRoot: {site / 'mps'}}}\nresources: {{gpus: [{patterns}]}}\n"
        f"sharing: {{mps: {{resources: [{shared}]}}}}\n"
    )
    node = facts(*(gpu(index, name=f"X{index}") for index in range(number)))
    daemons = mps_daemon.Service(lambda: load(words(site), {}), lambda config: node, stop)
    daemons.follow()
    hang(site)
    write(site, 0)
    sign = set_at(stop, lambda: told(site).count("tried ") == number)  # all at once
    with pytest.raises(mps_process.Ended):
        daemons.follow()
    daemons.stop()
    sign.join()
    assert sorted(line for line in told(site) if line.startswith("tried")) == [
        *["tried "] * number,
        *(f"tried -i {gpu_uuid(index)} -c DEFAULT" for index in range(number)),
    ]


def test_the_end_during_another_configuration_gives_back_what_that_had_spared(site):
    stop = threading.Event()
    daemons = mps_daemon.Service(lambda: load(words(site), {}), lambda config: facts(1), stop)
    daemons.follow()
    replace_in(site / "bin" / mps.PROGRAM, '[ "$told" = quit ]', f'[ "$told" = quit ] && until [ -e {site}/go ]; do '
               'sleep 0.05; done\n[ "$told" = quit ]')  # fmt: skip
    replace_in(site / "c.yaml", "replicas: 3", "replicas: 3, rename: gpu.shared")
    sign = set_at(stop, lambda: "quit" in told(site))
    with pytest.raises(mps_process.Ended):
        daemons.follow()
    (site / "go").touch()
    daemons.stop()
    sign.join()
    assert exclusive(site) == []
    assert told(site).count("quit") == 1
