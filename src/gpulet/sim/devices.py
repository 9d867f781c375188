"""Device nodes, and what the kernel module shows in /proc, under a root."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from gpulet.errors import NodeError
from gpulet.sim import files, nvmlfile
from gpulet.sim.description import Description, SimGpu

NVIDIA_MAJOR = 195  # Documentation/admin-guide/devices.txt
CONTROL_MINOR, MODESET_MINOR = 255, 254
DRM_MAJOR, DRM_CARDS, FIRST_RENDER = 226, 64, 128  # the same source: minors below 64 are cards, from 128 render nodes
# the groups video and render, as Debian and Ubuntu have them; dri nodes are theirs and nobody else's
DRM_GROUPS = {"card": 44, "renderD": 105}
DYNAMIC = {
    "discrete": ("nvidia-nvswitch", "nvidia-uvm", "nvidia-caps", "nvidia-caps-imex-channels"),
    "tegra": ("nvgpu",),
    "wsl": (),
}
PARAMS = (
    "ResmanDebugLevel: 4294967295\nModifyDeviceFiles: 1\nDeviceFileUID: 0\nDeviceFileGID: 0\nDeviceFileMode: 438\n"
    "UsePageAttributeTable: 4294967295\nEnableMSI: 1\n"
)


def dynamic_majors(platform: str, proc_devices: str) -> dict[str, int]:
    """Character majors for the drivers that ask the kernel for any: the highest free ones below 512, as it gives
    out once 234 to 254 are taken (Documentation/admin-guide/devices.txt)."""
    used = {
        int(words[0]) for line in proc_devices.splitlines() if len(words := line.split()) == 2 and words[0].isdigit()
    }
    free = (number for number in range(511, 383, -1) if number not in used)
    return dict(zip(DYNAMIC[platform], free, strict=False))


def nodes(description: Description) -> Iterator[tuple[str, int, int]]:
    """The character devices of a node: path below dev/, major, minor."""
    majors = description.majors
    if description.platform == "wsl":
        yield "dxg", 10, 125
        return
    if description.platform == "tegra":
        for minor, name in enumerate(files.TEGRA_DEVICES):
            yield name, majors["nvgpu"], minor
        return
    yield "nvidiactl", NVIDIA_MAJOR, CONTROL_MINOR
    yield "nvidia-modeset", NVIDIA_MAJOR, MODESET_MINOR
    yield "nvidia-uvm", majors["nvidia-uvm"], 0
    yield "nvidia-uvm-tools", majors["nvidia-uvm"], 1
    for gpu in description.gpus:
        yield f"nvidia{gpu.minor}", NVIDIA_MAJOR, gpu.minor
        for name, minor in drm_nodes(gpu):
            yield f"dri/{name}", DRM_MAJOR, minor
    if description.nvswitches:
        yield "nvidia-nvswitchctl", majors["nvidia-nvswitch"], CONTROL_MINOR
    for switch in range(description.nvswitches):
        yield f"nvidia-nvswitch{switch}", majors["nvidia-nvswitch"], switch
    if any(description.mig_profiles(gpu) for gpu in description.gpus):
        for _, minor in cap_files(description):
            yield f"nvidia-caps/nvidia-cap{minor}", majors["nvidia-caps"], minor
    for channel in description.imex:
        yield f"nvidia-caps-imex-channels/channel{channel}", majors["nvidia-caps-imex-channels"], channel


def drm_nodes(gpu: SimGpu) -> tuple[tuple[str, int], tuple[str, int]]:
    """Name and minor of a GPU's two nodes in /dev/dri. On a server card0 is the management controller's display, so
    that no number is the GPU's own (a 64th GPU gets it, as there are no more)."""
    card, render = (gpu.index + 1) % DRM_CARDS, FIRST_RENDER + gpu.index
    return (f"card{card}", card), (f"renderD{render}", render)


def cap_files(description: Description) -> Iterator[tuple[str, int]]:
    """The capability files that are there now, below proc/driver/nvidia/capabilities/, and their nvidia-caps minor."""
    yield "mig/config", nvmlfile.CONFIG_CAP
    yield "mig/monitor", nvmlfile.MONITOR_CAP
    for gpu in description.gpus:
        for gi in sorted({mig.gi for mig in gpu.mig}):
            yield f"gpu{gpu.minor}/mig/gi{gi}/access", nvmlfile.gi_cap(gpu.minor, gi)
        for mig in gpu.mig:
            yield f"gpu{gpu.minor}/mig/gi{mig.gi}/ci{mig.ci}/access", nvmlfile.ci_cap(gpu.minor, mig.gi, mig.ci)


def check_file_system(folder: Path) -> None:
    """NodeError where device nodes below a folder, which need not be there yet, could not be opened."""
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if os.geteuid() == 0 and os.statvfs(there).f_flag & os.ST_NODEV:
        raise NodeError(
            f"{folder} lies on a file system mounted nodev",
            wanted="one on which device nodes can be opened",
            remedy="choose another folder",
        )


def lay_devices(root: Path, description: Description) -> bool:
    """Make the device nodes, and take away those that are no longer wanted. False where only root may: then plain
    files stand in their places."""
    dev = root / "dev"
    wanted = {dev / name: os.makedev(major, minor) for name, major, minor in nodes(description)}
    for path in [*dev.glob("nvidia*"), *dev.glob("nvidia-caps*/*"), *dev.glob("dri/*")]:
        if path not in wanted and not path.is_dir():
            path.unlink()
    _drm_links(dev, description)
    real = os.geteuid() == 0
    for path, number in wanted.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and (not real or path.stat().st_rdev == number):
            continue
        path.unlink(missing_ok=True)
        try:
            if not real:
                raise PermissionError
            os.mknod(path, stat.S_IFCHR | 0o666, number)
        except PermissionError:
            real = False
            path.touch()
        path.chmod(0o666)  # whatever the umask
        group = DRM_GROUPS.get(path.name.rstrip("0123456789"))
        if real and group:
            os.chown(path, 0, group)
            path.chmod(0o660)
    return real


def _drm_links(dev: Path, description: Description) -> None:
    """dri/by-path, as udev makes it: links that name a GPU's nodes by its PCI address."""
    folder = dev / "dri/by-path"
    shutil.rmtree(folder, ignore_errors=True)
    if description.platform != "discrete" or not description.gpus:
        return
    folder.mkdir(parents=True)
    for gpu in description.gpus:
        for kind, (name, _) in zip(("card", "render"), drm_nodes(gpu), strict=True):
            (folder / f"pci-{gpu.proc_name}-{kind}").symlink_to(f"../{name}")


def lay_proc(root: Path, description: Description) -> None:
    """Write what the kernel module shows: proc/driver/nvidia, proc/driver/nvidia-caps, proc/devices."""
    proc = root / "proc"
    shutil.rmtree(proc / "driver", ignore_errors=True)
    (proc / "driver").mkdir(parents=True)
    (proc / "devices").write_text(_proc_devices(description))
    if description.platform != "discrete":
        return
    nvidia = proc / "driver/nvidia"
    nvidia.mkdir()
    (nvidia / "version").write_text(
        f"NVRM version: NVIDIA UNIX {os.uname().machine} Kernel Module  {description.driver}"
        "  Thu Jan 23 10:00:00 UTC 2025\nGCC version:  gcc version 12.2.0 (Debian 12.2.0-14)\n"
    )
    (nvidia / "params").write_text(PARAMS)
    (nvidia / "registry").write_text('Binary: ""\n')
    for gpu in description.gpus:
        folder = nvidia / "gpus" / gpu.proc_name
        folder.mkdir(parents=True)
        (folder / "information").write_text(_information(gpu))
        (folder / "registry").write_text('Binary: ""\n')
        if description.mig_profiles(gpu):
            (nvidia / f"capabilities/gpu{gpu.minor}/mig").mkdir(parents=True)
    if any(description.mig_profiles(gpu) for gpu in description.gpus):
        for name, minor in cap_files(description):
            path = nvidia / "capabilities" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"DeviceFileMinor: {minor}\nDeviceFileMode: 438\nDeviceFileModify: 1\n")
        (proc / "driver/nvidia-caps").mkdir()
        (proc / "driver/nvidia-caps/mig-minors").write_text("".join(_mig_minors(description)))


def lay_sys(root: Path, description: Description) -> None:
    """Write what the kernel's PCI code shows of the GPUs: sys/bus/pci/devices/<address>, with its drm/ and driver."""
    folder = root / "sys/bus/pci/devices"
    shutil.rmtree(folder, ignore_errors=True)
    if description.platform != "discrete":
        return
    for gpu in description.gpus:
        device = folder / gpu.proc_name
        device.mkdir(parents=True)
        facts = {
            "vendor": "0x10de",
            "device": f"0x{gpu.pci[0][:4]}",
            "subsystem_vendor": "0x10de",
            "subsystem_device": f"0x{gpu.pci[1][:4]}",
            "class": "0x030200",  # a 3D controller
            "numa_node": str(gpu.numa),
        }
        for name, text in facts.items():
            (device / name).write_text(f"{text}\n")
        for name, _ in drm_nodes(gpu):
            (device / "drm" / name).mkdir(parents=True)
        (device / "driver").symlink_to("../../drivers/nvidia")
    (folder.parent / "drivers/nvidia").mkdir(parents=True, exist_ok=True)


def _information(gpu: SimGpu) -> str:
    lines = (
        f"Model: \t\t {gpu.name}",
        f"IRQ:   \t\t {64 + gpu.index}",
        f"GPU UUID: \t {gpu.uuid}",
        "Video BIOS: \t 96.00.74.00.01",
        "Bus Type: \t PCIe",
        "DMA Size: \t 52 bits",
        "DMA Mask: \t 0xfffffffffffff",
        f"Bus Location: \t {gpu.proc_name}",
        f"Device Minor: \t {gpu.minor}",
        "GPU Excluded:\t No",
    )
    return "\n".join(lines) + "\n"


def _mig_minors(description: Description) -> Iterator[str]:
    """All capabilities there can be, for the GPUs that can do MIG: the file doesn't change with the MIG layout."""
    yield f"config {nvmlfile.CONFIG_CAP}\n"
    yield f"monitor {nvmlfile.MONITOR_CAP}\n"
    for gpu in description.gpus:
        if not description.mig_profiles(gpu):
            continue
        for gi in range(nvmlfile.GIS):
            yield f"gpu{gpu.minor}/gi{gi}/access {nvmlfile.gi_cap(gpu.minor, gi)}\n"
            for ci in range(nvmlfile.CIS):
                yield f"gpu{gpu.minor}/gi{gi}/ci{ci}/access {nvmlfile.ci_cap(gpu.minor, gi, ci)}\n"


def _proc_devices(description: Description) -> str:
    rows = [(1, "mem"), (5, "/dev/tty"), (10, "misc"), (136, "pts")]
    if description.platform == "discrete":
        rows += [(NVIDIA_MAJOR, name) for name in ("nvidia", "nvidia-modeset", "nvidiactl")]
    rows += [(major, name) for name, major in description.majors.items()]
    characters = "".join(f"{major:3d} {name}\n" for major, name in sorted(rows))
    return f"Character devices:\n{characters}\nBlock devices:\n  7 loop\n259 blkext\n"
