"""The driver's parameters, frozen in a real container: from what the host's /proc says to what a process inside reads.

/proc can't gain a folder without the kernel module, so a tmpfs over /proc/driver stands for it: on the host, in a mount
namespace of the test's own, and in the container by a hook before ours, since a real driver is in every procfs.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from gpulet.sim import node as sim
from gpulet.sim.cgroups import remove_tree
from gpulet.sim.node import SimNode
from support.real_container import SEEN, Bundle, config

pytestmark = [pytest.mark.root, pytest.mark.e2e]
PARAMS = "DeviceFileUID: 0\nDeviceFileGID: 0\nDeviceFileMode: 438\nModifyDeviceFiles: 1\nEnableMSI: 1\n"
# the paths are the test's own, and need no quotes
KERNEL = """\
#!/bin/sh
mount -t tmpfs none $1/proc/driver && mkdir $1/proc/driver/nvidia && cp {params} $1/proc/driver/nvidia/params
echo version > $1/proc/driver/nvidia/version
"""
LIFE = """\
set -e
{before}
{kernel} ""
export GPULET_CONFIG={folder}/config.toml
{program} {flags} create --bundle {bundle} {id}
{low} {flags} start {id}
while {low} {flags} state {id} | grep -q '"status": "\\(created\\|running\\)"'; do sleep 0.02; done
{low} {flags} delete {id}
cat /proc/driver/nvidia/params >&2
"""
# no mount(8) that is root's alone: then a program of ours does its work
ANOTHERS_MOUNT = """\
mount -t tmpfs none /mnt
cp -p /usr/bin/mount /mnt
chown 1 /mnt/mount
mount --bind /mnt/mount /usr/bin/mount"""
INSIDE = """\
cat /proc/driver/nvidia/params /proc/driver/nvidia/version
(echo x > /proc/driver/nvidia/params) 2>/dev/null && echo written
umount /proc/driver/nvidia/params 2>/dev/null && echo uncovered
grep ' /proc/driver/nvidia/params ' /proc/self/mountinfo
"""


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> SimNode:
    return sim.create(tmp_path_factory.mktemp("node") / "n", "h100x8")


@pytest.mark.parametrize("way", ["mount", "hook"])
@pytest.mark.parametrize("low", ["runc", "crun"])
def test_a_container_reads_that_the_driver_makes_no_nodes(tmp_path: Path, node: SimNode, low: str, way: str) -> None:
    if not shutil.which(low):
        pytest.skip(f"{low} is not installed")
    bundle = Bundle(tmp_path)
    (tmp_path / "params").write_text(PARAMS)
    kernel = tmp_path / "kernel"
    kernel.write_text(KERNEL.format(params=tmp_path / "params"))
    kernel.chmod(0o755)
    (tmp_path / "config.toml").write_text(
        f"[nvidia-container-cli]\nroot = '{node.root}'\n[nvidia-container-runtime]\nruntimes = ['{low}']\n"
        f"[gpulet]\nstate-dir = '{tmp_path}/state'\n"
    )
    made = config(["/bin/sh", "-c", INSIDE])
    made["process"]["env"].append("NVIDIA_VISIBLE_DEVICES=2")
    made["linux"]["cgroupsPath"] = f"/{bundle.id}"
    hook = {"path": str(kernel), "args": ["kernel", str(bundle.root)], "env": ["PATH=/usr/sbin:/usr/bin:/sbin:/bin"]}
    made["hooks"] = {"createContainer": [hook]}
    (bundle.bundle / "config.json").write_text(json.dumps(made))
    flags = f"--root {tmp_path}/low" + (" --cgroup-manager=cgroupfs" if low == "crun" else "")
    script = LIFE.format(
        kernel=kernel, folder=tmp_path, bundle=bundle.bundle, id=bundle.id, low=low, flags=flags,
        program=tmp_path / "bin/gpulet-runtime", before=ANOTHERS_MOUNT if way == "hook" else "",
    )  # fmt: skip
    try:
        ran = subprocess.run(
            [*(SEEN["v1"] if low == "crun" else ["unshare", "-m"]), "sh", "-c", script],
            capture_output=True,
            text=True,
            timeout=60,
            stdin=subprocess.DEVNULL,
        )
    finally:
        remove_tree(bundle.id)
    assert ran.returncode == 0, ran.stderr
    *lines, mounted = ran.stdout.splitlines()
    assert lines == [*PARAMS.replace("Files: 1", "Files: 0").splitlines(), "version"]
    assert {"ro", "nosuid", "nodev", "noexec"} <= set(mounted.split()[5].split(","))
    assert "ModifyDeviceFiles: 1" in ran.stderr, "the host's own is as it was"
    hooks = json.loads((bundle.bundle / "config.json").read_text())["hooks"]["createContainer"]
    programs = [Path(one["path"]).name for one in hooks[1:]]
    assert programs == (["mount", "mount"] if way == "mount" else ["gpulet-cdi-hook"])
