"""What makes the dynamic loader inside a container find the driver's libraries: glibc's cache and its configuration,
musl's path file. Beneath the container's root, and nothing of it is executed.
"""

from __future__ import annotations

import os
import stat

from gpulet import linux
from gpulet.injection.beneath import Root
from gpulet.injection.held import failed, link_text
from gpulet.node import ldcache

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from gpulet.injection.model import Mount, RootfsWork

CACHE = "/etc/ld.so.cache"
CONF = "/etc/ld.so.conf"
CONF_FOLDER = "/etc/ld.so.conf.d"
# Stable names, so that a restarted container doesn't pile files up; ldconfig reads them in this order.
COMPAT = f"{CONF_FOLDER}/00-compat-gpulet.conf"
OURS = f"{CONF_FOLDER}/00-gpulet.conf"
INCLUDE = f"include {CONF_FOLDER}/*.conf"
MUSL_FOLDERS = ("/lib", "/usr/local/lib", "/usr/lib")  # what musl searches where it has no path file
MOST_LIBRARIES = 4096
MOST_CONF = 1 << 20  # characters of the loader's configuration, and MOST_FILES of it: the rest of a hostile image's
MOST_FILES = 64  # isn't read


class Library:
    """One library as the loader shall find it: its folder and file name in the container, soname, cache flags."""

    def __init__(self, folder: str, name: str, soname: str, flags: int) -> None:
        self.folder = folder
        self.name = name
        self.soname = soname or name
        self.flags = flags


def compat_folder(root: Root, work: RootfsWork) -> str:
    """The image's folder with forward-compatibility libraries where they shall come first, "" else."""
    if not root.exists(work.compat_folder):
        return ""
    from gpulet.injection import compat  # most images have no such folder, and loading this takes time

    return compat.choose(root, work.compat_folder, work.host_driver, work.host_cuda).folder


def update(
    root: Root,
    work: RootfsWork,
    first: str,
    libraries: Sequence[Library],
    ldconfig: Callable[[Sequence[str]], bool] | None,
) -> None:
    """Makes a container's loader find the libraries: links by soname, the cache, what a later ldconfig is to know.

    first: the folder that goes before all others, "" for none; ldconfig: see rootfs.carry_out.
    """
    folders = work.folders
    libraries = libraries or [item for folder in folders for item in _lying_in(root, folder)]
    linked = {link.path for link in work.links}
    for item in libraries:
        path = f"{item.folder}/{item.soname}"
        if item.soname != item.name and path not in linked:  # as ldconfig does; and as it, leave a real file alone
            root.symlink(item.name, path, replace_file=False)
    musl = [name for name in root.names("/lib") if name.startswith("ld-musl-") and name.endswith(".so.1")]
    for name in musl:
        _write_musl_path(root, name.removesuffix(".so.1"), folders)
    if musl and not root.exists(CACHE):
        return  # musl has no cache
    _write_conf(root, folders, first)
    # Nobody's program can write where a mount lies; our way leaves it, and says so.
    if ldconfig is None or root.covered(CACHE) or not ldconfig([first, *folders] if first else folders):
        root.write(CACHE, _merged(root, _entries(root, work, first, libraries, linked=True)))


def cache_without_links(root: Root, work: RootfsWork, libraries: Sequence[Library]) -> bytes:
    """The loader's cache for a root in which no link can be made: each name leads to the library's own file."""
    return _merged(root, _entries(root, work, compat_folder(root, work), libraries, linked=False))


def _entries(
    root: Root, work: RootfsWork, first: str, libraries: Sequence[Library], *, linked: bool
) -> list[ldcache.Entry]:
    """What the cache is to say: what lies in the folder `first`; each library by its soname; each link in a library
    folder that leads to one of them, by the link's own name, such as libcuda.so.

    linked: those links are there, and names lead to them, as ldconfig has it; else to the library's own file.
    """
    above = _lying_in(root, first) if first else ()
    files = {f"{item.folder}/{item.soname}": item for item in libraries}
    files |= {f"{item.folder}/{item.name}": item for item in libraries}
    paths: dict[tuple[str, int], str] = {}  # of one name and kind the first counts
    for item in libraries:
        paths.setdefault((item.soname, item.flags), f"{item.folder}/{item.soname if linked else item.name}")
    ends = {link.path: link.leads_to() for link in work.links}
    for path in ends:
        folder, _, name = path.rpartition("/")
        end, hops = path, 0
        while end in ends and end not in files and hops < linux.MAX_LINKS:
            end, hops = ends[end], hops + 1
        if end in files and folder in work.folders:
            item = files[end]
            paths.setdefault((name, item.flags), path if linked else f"{item.folder}/{item.name}")
    found = [ldcache.Entry(item.soname, f"{item.folder}/{item.name}", item.flags) for item in above]
    return found + [ldcache.Entry(name, path, flags) for (name, flags), path in paths.items()]


def libraries_of(mounts: Iterable[Mount]) -> list[Library]:
    """The libraries among mounts, read where their sources are: in the host. Raises StepFailed."""
    from gpulet.node.elf import Elf, Malformed

    found = []
    for mount in mounts:
        if mount.kind not in ("library", "library32"):
            continue
        folder, _, name = mount.path.rpartition("/")
        try:
            fd = _open_regular(mount.source)
        except OSError as error:
            raise failed("read library", mount.source, error) from error
        if fd is None:
            continue
        try:
            library = Elf(fd)
            if library.cache_flags:
                found.append(Library(folder, name, library.soname(), library.cache_flags))
        except Malformed:
            continue  # it is mounted all the same; a loader could do nothing with it
        finally:
            os.close(fd)
    return found


def _open_regular(path: str) -> int | None:
    """A descriptor to read a file of the host, None where it is another kind of thing. Raises OSError.

    What an engine has mounted among the libraries may be a Pod's own volume, and so a pipe, at which an open would wait
    for ever, or a device node, which shouldn't be opened at all: hence it is looked at by a descriptor that opens none.
    """
    seen = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(seen).st_mode):
            return None
        return os.open(f"/proc/self/fd/{seen}", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(seen)


def _mounted_in(root: Root, folder: str) -> set[str]:
    """The names in a folder that mounts cover, as this process sees them: an image's own hundreds are in its cache."""
    if not root.exists(folder):
        return set()
    try:
        real = os.readlink(f"/proc/self/fd/{root.folder(folder)}")
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
            points = [line.split(" ", 5)[4] for line in file]
    except OSError:
        return set()
    return {point[len(real) + 1 :] for point in points if point.rpartition("/")[0] == real}


def _lying_in(root: Root, folder: str) -> Iterator[Library]:
    """What ldconfig would take from a folder: of the files with one soname, the one with the highest name; and the
    links for the linker, libfoo.so, that lead to one."""
    from gpulet.node.elf import Elf, Malformed

    best: dict[tuple[str, int], str] = {}
    mounted = _mounted_in(root, folder)
    names = root.names(folder)[:MOST_LIBRARIES]
    for name in names:
        if mounted and name not in mounted:
            continue
        if not (name.startswith("lib") and (name.endswith(".so") or ".so." in name)):
            continue
        fd = root.open_file(f"{folder}/{name}", follow=False)
        if fd is None:
            continue
        try:
            library = Elf(fd)
            key = (library.soname() or name, library.cache_flags)
        except Malformed:
            continue
        finally:
            os.close(fd)
        if key[1] and (key not in best or ldcache.name_key(name) > ldcache.name_key(best[key])):
            best[key] = name
    folder = folder.rstrip("/")
    files = {soname: (soname, flags) for soname, flags in best} | {name: key for key, name in best.items()}
    for (soname, flags), name in best.items():
        yield Library(folder, name, soname, flags)
    for name in names if files else ():
        if name.endswith(".so") and name not in files:
            text = link_text(root.folder(folder), name) or ""
            soname, flags = files.get(text.removeprefix(f"{folder}/"), ("", 0))
            if soname.startswith(name):  # ldconfig takes others for one more file of that soname
                yield Library(folder, name, name, flags)


def _merged(root: Root, entries: list[ldcache.Entry]) -> bytes:
    from gpulet.errors import NodeError

    try:
        return ldcache.merge(root.read(CACHE), entries)
    except NodeError:  # the image's cache is damaged or of a foreign format: its loader can't use it either
        return ldcache.merge(None, entries)


def _write_conf(root: Root, folders: Sequence[str], first: str) -> None:
    """Tells a later ldconfig of the folders it wouldn't look at. The others stay out, since being listed here would
    move them before the image's own.
    """
    text = root.read(CONF)
    if text is None:
        text = f"{INCLUDE}\n".encode()
        root.write(CONF, text)
    listed = _searched(root, text)
    missing = [folder for folder in folders if folder not in listed]
    for path, lines in ((COMPAT, [first] if first else []), (OURS, missing)):
        if lines or (root.exists(path) and (path == COMPAT or folders)):
            root.write(path, "".join(f"{line}\n" for line in lines).encode())


def _searched(root: Root, conf: bytes) -> set[str]:
    """The folders that ldconfig looks at by itself: the system's, and those that the configuration names. conf: what
    stands in its first file."""
    machine = os.uname().machine
    found = {"/lib", "/usr/lib"}
    if root.exists("/etc/debian_version"):
        found |= {f"/lib/{machine}-linux-gnu", f"/usr/lib/{machine}-linux-gnu"}
    else:
        found |= {"/lib64", "/usr/lib64"}
    todo, files, includes, left = [CONF], 0, 0, MOST_CONF
    while todo and files < MOST_FILES and left > 0:
        path, files = todo.pop(), files + 1
        if path in (COMPAT, OURS):
            continue
        data = conf if files == 1 else root.read(path) or b""
        text = data[:left].decode("utf-8", "surrogateescape")
        left -= len(text)
        for line in text.splitlines():
            word, _, rest = line.partition("#")[0].strip().partition(" ")
            if word == "include" and includes < MOST_FILES:
                includes += 1
                todo += _glob(root, rest.strip())
            elif word.startswith("/"):
                found.add(word.rstrip("/"))
    return found


def _glob(root: Root, pattern: str) -> list[str]:
    """The files that an include line means; one star in the last name is all that is seen in practice."""
    folder, _, last = pattern.rpartition("/")
    folder = folder or "/etc"  # relative ones count from the configuration's own folder
    before, star, after = last.partition("*")
    if not star:
        return [pattern]
    names = [name for name in root.names(folder) if name.startswith(before) and name.endswith(after)]
    return [f"{folder}/{name}" for name in names if not name.startswith(".")]


def _write_musl_path(root: Root, loader: str, folders: Sequence[str]) -> None:
    """musl reads its search path from /etc/ld-musl-ARCH.path, separated by newlines or colons."""
    path = f"/etc/{loader}.path"
    before = root.read(path)
    text = "".join(f"{folder}\n" for folder in MUSL_FOLDERS)
    text = text if before is None else before.decode("utf-8", "surrogateescape")
    there = text.replace(":", "\n").split("\n")
    missing = [folder for folder in folders if folder not in there]
    if missing:
        text = text if text.endswith("\n") or not text else text + "\n"
        text += "".join(f"{folder}\n" for folder in missing)
        root.write(path, text.encode("utf-8", "surrogateescape"))
