"""CUDA forward compatibility: whether the libcuda that an image brings shall come before the driver's.

An image's CUDA may be newer than the node's driver. NVIDIA's forward-compatibility package puts a newer libcuda in
/usr/local/cuda/compat; it runs on some older kernel drivers only, and says in a note on which. We only decide and
order folders in the loader's configuration: nothing of the image is mounted or executed.
"""

from __future__ import annotations

import os

from gpulet.node.elf import Elf, Malformed

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from gpulet.injection.beneath import Root

SECTION = ".note.cuda.fwd_compatibility"
OWNER = "NVIDIA Corporation"


class Choice:
    """The decision: `folder` is the image's folder to put first, "" for none; `reason` says why, for people."""

    def __init__(self, folder: str, reason: str) -> None:
        self.folder = folder
        self.reason = reason


def choose(root: Root, folder: str, host_driver: str = "", host_cuda: str = "") -> Choice:
    """Weighs the image's compatibility libraries in `folder` against the node's driver (or, on Tegra, its CUDA)."""
    if not (host_driver or host_cuda):
        return Choice("", "the node's versions are not known")
    found = []
    for name in root.names(folder):
        version = name.removeprefix("libcuda.so.")
        if version != name and "." in version:
            fd = root.open_file(f"{folder}/{name}", follow=False)
            if fd is not None:
                found.append((fd, version))
    try:
        if not found:
            return Choice("", "the image has no forward-compatibility libcuda")
        if len(found) > 1:
            return Choice("", f"the image has {len(found)} of them: {', '.join(version for _, version in found)}")
        fd, version = found[0]
        good, reason = decide(note(fd), version, host_driver, host_cuda)
        return Choice(folder if good else "", reason)
    except Malformed as error:
        return Choice("", f"the image's libcuda can't be read: {error}")
    finally:
        for fd, _ in found:
            os.close(fd)


def note(fd: int) -> dict[str, Any] | None:
    """What the library says of itself: {"CUDA Version": "13.0", "Driver": [535, ...], "Device": [...]}, or None.

    Raises Malformed where it says something that can't be read.
    """
    found = Elf(fd).note(SECTION)
    if found is None or found[0] != OWNER:
        return None
    from gpulet import codec

    try:
        content = codec.loads(found[1].rstrip(b"\0"))
    except (ValueError, RecursionError):
        raise Malformed("its compatibility note is not JSON") from None
    if not isinstance(content, dict):
        raise Malformed("its compatibility note is not an object")
    return content


def decide(header: dict[str, Any] | None, version: str, host_driver: str, host_cuda: str) -> tuple[bool, str]:
    """Whether the image's driver version is to be used on this host, and the reason."""
    ours, theirs = numbers(host_driver), numbers(version)
    if header is None:
        if host_cuda:
            return False, "it doesn't say which CUDA it needs, and this node is known by its CUDA alone"
        if not ours or not theirs:
            return False, f"versions {host_driver!r} and {version!r} can't be compared"
        return ours[0] < theirs[0], f"the image has {version}, the node {host_driver}; a newer branch is used"
    if ours and theirs:
        branches = header.get("Driver")
        if not isinstance(branches, list) or ours[0] not in branches:
            return False, f"the image's {version} doesn't run on driver branch {ours[0]}"
        return theirs > ours, f"the image has {version}, the node {host_driver}; the newer one is used"
    cuda = header.get("CUDA Version")
    needed, have = numbers(cuda if isinstance(cuda, str) else ""), numbers(host_cuda)
    if not needed or not have:
        return False, f"versions {cuda!r} and {host_cuda!r} can't be compared"
    return needed > have, f"the image brings CUDA {cuda}, the node {host_cuda}; the newer one is used"


def numbers(version: str) -> tuple[int, ...]:
    """A version of digits and dots as numbers without trailing zeros, () where it is none: "570.86.0" is (570, 86)."""
    parts = version.split(".")
    if not all(part.isascii() and part.isdigit() and len(part) < 10 for part in parts):
        return ()
    values = [int(part) for part in parts]
    while len(values) > 1 and not values[-1]:
        values.pop()
    return tuple(values)
