"""What can't be written into a container's root file system is laid in the state folder and mounted: the cheap way
before the last one, a hook.

    links in the container's /dev, which is a file system of its own   a folder of links, mounted where they belong
    the loader's cache, where the root is read-only on disk            a file, mounted over the image's
    the driver's parameters, without the making of device nodes        a file, which the host's mount(8) puts in place

What is laid is named by its content, so that containers share it and doing it twice changes nothing. Loaded by the
programs in launch/.
"""

from __future__ import annotations

import os

from gpulet import codec
from gpulet.injection.model import Hook, Mount, RootfsWork
from gpulet.value import Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

OPTIONS = ("ro", "nosuid", "nodev", "noexec", "rbind", "rprivate")
MOUNT_PROGRAMS = ("/usr/bin/mount", "/bin/mount")


class Laid(Value):
    """A file (links: ()) or a folder of links (name, text) at a path of the host."""

    path: str
    data: bytes = b""
    links: tuple[tuple[str, str], ...] = ()


def lay(things: Sequence[Laid]) -> None:
    """Puts things where they aren't yet. Raises OSError where that can't be, or something else lies there."""
    for thing in things:
        if not lies(thing, wanted=True):
            aside = f"{thing.path}.{os.getpid()}"
            codec.make_folder(os.path.dirname(thing.path))
            if thing.links:
                _make_folder(thing, aside)
            else:
                _make_file(thing, aside)
            if not lies(thing, wanted=True):
                raise OSError(17, "something else lies there", thing.path)  # EEXIST
            from gpulet.launch.sweep import sweep_sometimes

            sweep_sometimes(os.path.dirname(thing.path))


def lies(thing: Laid, *, wanted: bool = False) -> bool:
    """Whether the very thing is there, and of root's or our own making. wanted: its time then says that somebody wants
    it."""
    try:
        if os.lstat(thing.path).st_uid not in (0, os.geteuid()):
            return False
        try:
            if wanted:
                os.utime(thing.path)
        except PermissionError:  # root's, in whose folder we sweep nothing either
            pass
        if thing.links:
            return tuple(sorted((n, os.readlink(f"{thing.path}/{n}")) for n in os.listdir(thing.path))) == thing.links
        return codec.read_file(thing.path) == thing.data
    except OSError:
        return False


def _make_folder(thing: Laid, aside: str) -> None:
    os.mkdir(aside, 0o755)
    os.chmod(aside, 0o755)  # whatever the umask was
    for name, text in thing.links:
        os.symlink(text, f"{aside}/{name}")
    try:
        os.rename(aside, thing.path)
    except OSError:  # another container's runtime was first
        for name, _text in thing.links:
            os.unlink(f"{aside}/{name}")
        os.rmdir(aside)


def _make_file(thing: Laid, aside: str) -> None:
    with open(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o444), "wb") as file:
        file.write(thing.data)
        os.fchmod(file.fileno(), 0o444)
    os.rename(aside, thing.path)


def named(folder: str, kind: str, data: bytes) -> str:
    """A path in the state folder for content. By a hash for which nobody finds two contents: images have a hand in the
    content, and a file of that name is replaced, which another container may be about to mount."""
    try:
        from _blake2 import blake2b  # what `hashlib` is made of; that takes milliseconds
    except ImportError:
        from hashlib import blake2b
    return f"{folder}/{kind}/{blake2b(data, digest_size=16).hexdigest()}"


# -- links in /dev


def device_links(
    config: dict[str, Any], work: RootfsWork, folder: str
) -> tuple[RootfsWork, tuple[Laid, ...], tuple[Mount, ...]]:
    """The work without the links that go into folders of a /dev that is yet to be mounted; what is to be laid in the
    state folder for them, and the mounts. A folder that holds something else too is left in the work."""
    folders: dict[str, list[tuple[str, str]]] = {}
    for link in work.links:
        place, _, name = link.path.rpartition("/")
        if place.startswith("/dev/"):
            folders.setdefault(place, []).append((name, link.target))
    mounts, laid = [], []
    for place, links in folders.items() if folders and _dev_is_new(config) else ():
        links = sorted(links)
        path = named(folder, "links", repr(links).encode())
        if not _taken(config, place, path):
            laid.append(Laid(path, links=tuple(links)))
            mounts.append(Mount(path, place, OPTIONS, why="links beside device nodes"))
    places = {mount.path for mount in mounts}
    rest = tuple(link for link in work.links if link.path.rpartition("/")[0] not in places)
    return (work.replace(links=rest) if places else work), tuple(laid), tuple(mounts)


def _dev_is_new(config: dict[str, Any]) -> bool:
    """Whether /dev is a fresh file system, not the host's. With labels on mounts (SELinux) containers may be kept from
    reading our folder."""
    kinds = [mount.get("type") for mount in config.get("mounts") or () if mount.get("destination") == "/dev"]
    return kinds == ["tmpfs"] and not (config.get("linux") or {}).get("mountLabel")


def _taken(config: dict[str, Any], place: str, ours: str) -> bool:
    """ours: the source of our own mount, which an earlier run may have put in."""
    there = [str(mount.get("destination")) for mount in config.get("mounts") or () if mount.get("source") != ours]
    there += [str(node.get("path")) for node in (config.get("linux") or {}).get("devices") or ()]
    return any(f"{path}/".startswith(f"{place}/") for path in there)


# -- the driver's parameters


def freeze(root: str, source: str, program: str, path: str) -> tuple[Hook, ...]:
    """Hooks that bind a file of the host over `path` in the container's /proc and make that read-only.

    `path` needs no care: the low-level runtimes mount /proc on a folder that is none of the image's links, and refuse
    other mounts there. Two calls, since old versions of mount(8) bind read-only in one without a word and writable.
    """
    target = root + path
    env = ("PATH=/usr/sbin:/usr/bin:/sbin:/bin",)
    kept = "ro,nosuid,nodev,noexec"
    calls = (("mount", "-n", "--bind", source, target), ("mount", "-n", "-o", f"remount,bind,{kept}", target))
    return tuple(Hook("createContainer", program, call, env) for call in calls)


def mount_program() -> str:
    """The host's own mount(8), "" where there is none that root alone can have put there, or it is busybox's."""
    for path in MOUNT_PROGRAMS:
        try:
            info = os.stat(path)
        except OSError:
            continue
        own = info.st_uid == 0 and not info.st_mode & 0o022 and info.st_mode & 0o111
        return path if own and os.path.realpath(path).endswith("/mount") else ""
    return ""
