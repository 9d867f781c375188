"""Podman with gpulet-runtime as its runtime, and with our CDI specification: real containers on a simulated node."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import gpulet
from gpulet.engines.launchers import PROGRAMS, launcher_text, write_launchers
from gpulet.injection import cdi
from gpulet.node import driver, procfs
from gpulet.sim import node as sim
from gpulet.sim import rootfs
from gpulet.sim.cgroups import remove_tree
from gpulet.sim.node import SimNode
from support.real_container import started_by_others

pytestmark = [
    pytest.mark.root,
    pytest.mark.e2e,
    pytest.mark.skipif(not shutil.which("podman"), reason="podman is not installed"),
]

# A mount namespace of its own: crun wants one cgroup version alone, and podman reads specifications from /etc/cdi.
SCRIPT = """\
set -e
mount --make-rprivate /
if [ {low} = crun ] && mountpoint -q /sys/fs/cgroup/unified; then umount -l /sys/fs/cgroup/unified; fi
mkdir -p {folder}/over
mount -t tmpfs tmpfs {folder}/over
mkdir {folder}/over/upper {folder}/over/work
mount -t overlay overlay -o lowerdir=/etc,upperdir={folder}/over/upper,workdir={folder}/over/work /etc
mkdir -p /etc/cdi
cp {folder}/spec.json /etc/cdi/nvidia.json
{prelude}
exec podman --root {folder}/store --runroot {folder}/run --tmpdir {folder}/tmp --runtime {runtime} \\
    --cgroup-manager=cgroupfs --events-backend=none run --rm --network=none --security-opt seccomp=unconfined \\
    --cgroup-parent=/{group} --ulimit=nofile=1024:1024 --ulimit=nproc=100:100 {options} \\
    --rootfs {folder}/image /usr/bin/gpulet-probe
"""


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> SimNode:
    return sim.create(tmp_path_factory.mktemp("node") / "n", "h100x8")


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder with a short path: podman takes no run root of more than 50 characters."""
    folder = Path(tempfile.mkdtemp(prefix="pod"))
    yield folder
    shutil.rmtree(folder)


# In a user namespace no device node can be made: the low-level runtime binds the host's, which must be in /dev.
HOST_NODES = """
mkdir {folder}/dev
mount -t tmpfs -o mode=755 tmpfs {folder}/dev
cp -a /dev/null /dev/zero /dev/full /dev/random /dev/urandom /dev/tty {root}/dev/nvidia* {root}/dev/dri {folder}/dev/
mkdir {folder}/dev/pts {folder}/dev/shm
mount --rbind /dev/pts {folder}/dev/pts
mount --rbind /dev/shm {folder}/dev/shm
ln -s pts/ptmx {folder}/dev/ptmx
ln -s /proc/self/fd {folder}/dev/fd
mount --move {folder}/dev /dev
chown -R 100000:100000 {folder}/image
chmod 755 {folder}
"""


def isolated(script: str) -> subprocess.CompletedProcess[str]:
    """Runs a script in namespaces of its own: what podman leaves running (its pause process, conmon) ends with it."""
    command = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", script]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def podman(
    folder: Path, node: SimNode, low: str, options: str, *, ours: bool = True, prelude: str = ""
) -> dict[str, Any]:
    """What the probe tells in a container that podman runs."""
    if not shutil.which(low):
        pytest.skip(f"{low} is not installed")
    rootfs.create(folder / "image", "glibc")
    programs = write_launchers(folder / "bin", folder / "workers")
    (folder / "config.toml").write_text(
        f"[nvidia-container-cli]\nroot = '{node.root}'\n"
        f"[nvidia-container-runtime]\nruntimes = ['{low}']\n[gpulet]\nstate-dir = '{folder}/state'\n"
    )
    runtime = folder / "runtime"  # podman hands no environment of ours on
    runtime.write_text(f'#!/bin/sh\nGPULET_CONFIG={folder}/config.toml exec {programs["gpulet-runtime"]} "$@"\n')
    runtime.chmod(0o755)
    facts = procfs.facts(str(node.root))
    files = driver.find(str(node.root), version=facts.driver)
    # without groups, which need CDI 0.7.0: podman 4.3 reads up to 0.5.0
    spec = cdi.make_spec(facts, files, calls=cdi.HookCalls(str(programs["gpulet-cdi-hook"])), gids=False)
    cdi.write_spec(spec, str(folder / "spec.json"))
    called = runtime if ours else shutil.which(low)
    before = prelude.format(folder=folder, root=node.root)
    group = f"gpulet-{folder.name}"
    script = SCRIPT.format(folder=folder, low=low, runtime=called, options=options, prelude=before, group=group)
    try:
        done = isolated(script)
    finally:
        remove_tree(group)
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told


PREFORK = """
{folder}/bin/gpulet-prefork --workers 2 2>{folder}/said &
for second in 1 2 3 4 5 6 7 8 9; do
  [ "$(ls {folder}/workers/*/*/answer 2>/dev/null | wc -l)" = 2 ] && break
  sleep 1
done
ls {folder}/workers/* >{folder}/before
"""


@pytest.mark.parametrize("low", ["runc", "crun"])
def test_podman_and_prefork(short: Path, node: SimNode, low: str) -> None:
    seen = podman(short, node, low, "-e NVIDIA_VISIBLE_DEVICES=2,5", prelude=PREFORK)
    assert [gpu["uuid"] for gpu in seen["nvml"]] == [node.gpus[2].uuid, node.gpus[5].uuid]
    assert (short / "said").read_text() == ""
    assert set((short / "before").read_text().split()) != {path.name for path in short.glob("workers/*/*")}


@pytest.mark.parametrize("low", ["runc", "crun"])
@pytest.mark.parametrize(
    ("options", "ours"),
    [
        ("-e NVIDIA_VISIBLE_DEVICES=2,5", True),
        ("--device nvidia.com/gpu=2 --device nvidia.com/gpu=5", True),
        ("--device nvidia.com/gpu=2 --device nvidia.com/gpu=5", False),
    ],
    ids=["runtime", "cdi-and-runtime", "cdi-alone"],
)
def test_podman(short: Path, node: SimNode, low: str, options: str, ours: bool) -> None:
    seen = podman(short, node, low, options, ours=ours)
    assert [gpu["uuid"] for gpu in seen["nvml"]] == [node.gpus[2].uuid, node.gpus[5].uuid]
    assert seen["opened"] == [node.gpus[2].minor, node.gpus[5].minor]
    assert node.gpus[0].minor in seen["denied"]


@pytest.mark.parametrize(
    ("low", "options", "ours"),
    [
        ("runc", "-e NVIDIA_VISIBLE_DEVICES=3", True),
        ("crun", "-e NVIDIA_VISIBLE_DEVICES=3", True),
        ("runc", "--device nvidia.com/gpu=3", False),  # crun starts no hook there: it would go to the bundle first
    ],
    ids=["runtime-runc", "runtime-crun", "cdi-alone-runc"],
)
def test_a_user_namespace(short: Path, node: SimNode, low: str, options: str, ours: bool) -> None:
    """podman's bundle is root's own: what runs in the container's user namespace can't read it."""
    if not ours:
        short.chmod(0o755)
        started_by_others(write_launchers(short / "bin")["gpulet-cdi-hook"])
    options = f"--uidmap 0:100000:65536 --gidmap 0:100000:65536 {options}"
    seen = podman(short, node, low, options, ours=ours, prelude=HOST_NODES)
    assert [gpu["uuid"] for gpu in seen["nvml"]] == [node.gpus[3].uuid]
    assert seen["opened"] == [node.gpus[3].minor]


NOBODY = 12345  # a user without a name, subordinate ids or rights
ROOTLESS = """\
set -e
mount --make-rprivate /
if mountpoint -q /sys/fs/cgroup/unified; then umount -l /sys/fs/cgroup/unified; fi
{prelude}
cd {folder}/home
exec setpriv --reuid {user} --regid {user} --clear-groups \\
    env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME={folder}/home XDG_RUNTIME_DIR={folder}/home \\
    CONTAINERS_CONF={folder}/containers.conf \\
    podman --root {folder}/home/store --runroot {folder}/home/run --tmpdir {folder}/home/tmp --runtime gpulet \\
    --events-backend=none run --rm --cgroups=disabled --network=none --security-opt seccomp=unconfined --ulimit=host \\
    {options} --rootfs {folder}/image /usr/bin/gpulet-probe
"""


def interpreter() -> str:
    """A Python that any user may run; the tests' own may lie in a home folder."""
    for path in (sys.executable, "/usr/bin/python3"):
        check = "import sys; sys.exit(sys.version_info[:2] < (3, 11))"
        user = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
        command = [*user, "sh", "-c", 'exec "$0" -IS -c "$1"', path, check]  # setpriv's own exec may still do more
        if subprocess.run(command, capture_output=True, check=False).returncode == 0:
            return path
    pytest.skip("no Python of 3.11 or later that an unprivileged user may run")


@pytest.mark.skipif(not shutil.which("setpriv") or not shutil.which("crun"), reason="needs setpriv and crun")
@pytest.mark.parametrize("capabilities", ["compute,utility", "all"])
def test_rootless(short: Path, node: SimNode, capabilities: str) -> None:
    """An unprivileged user's podman, with that user's rights alone: no state folder, no cgroup, no device made."""
    python = interpreter()
    short.chmod(0o755)
    rootfs.create(short / "image", "glibc")
    write_launchers(short / "bin")
    # the checkout may lie in a folder of root's own: the user runs a copy
    source = Path(gpulet.__file__).parent
    shutil.copytree(source, short / "lib" / "gpulet", ignore=shutil.ignore_patterns("__pycache__"))
    for program, (module, _peer) in PROGRAMS.items():
        text = launcher_text(module, python).replace(repr(str(source.parent)), repr(str(short / "lib")))
        (short / "bin" / program).write_text(text)
    (short / "config.toml").write_text(
        f"[nvidia-container-cli]\nroot = '{node.root}'\n[nvidia-container-runtime]\nruntimes = ['crun']\n"
        f"debug = '{short}/home/log'\n[gpulet]\nstate-dir = '{short}/not-yours'\n"
    )
    runtime = short / "runtime"
    runtime.write_text(f'#!/bin/sh\nGPULET_CONFIG={short}/config.toml exec {short}/bin/gpulet-runtime "$@"\n')
    runtime.chmod(0o755)
    (short / "containers.conf").write_text(
        f"[engine]\nruntime_supports_nocgroup = ['gpulet']\nruntime_supports_json = ['gpulet']\n"
        f"[engine.runtimes]\ngpulet = ['{runtime}']\n"
    )
    for folder in (node.root.parent, *node.root.parent.parents[:3]):
        folder.chmod(folder.stat().st_mode | 0o055)
    (short / "home").mkdir()
    subprocess.run(["chown", "-R", f"{NOBODY}:{NOBODY}", str(short / "home"), str(short / "image")], check=True)
    options = f"-e NVIDIA_VISIBLE_DEVICES=2,5 -e NVIDIA_DRIVER_CAPABILITIES={capabilities}"
    before = HOST_NODES.format(folder=short, root=node.root).replace("chown -R 100000:100000", ": ")
    script = ROOTLESS.format(folder=short, prelude=before, options=options, user=NOBODY)
    done = isolated(script)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    assert [gpu["uuid"] for gpu in seen["nvml"]] == [node.gpus[2].uuid, node.gpus[5].uuid]
    assert f"/dev/nvidia{node.gpus[0].minor}" not in seen["devices"]
    assert "GPUs for a container" in (short / "home/log").read_text()
    assert not (short / "not-yours").exists()
