"""One look beneath one root for the driver's files. Folders are listed once instead of asking for each name in each
place. Loaded by the programs in launch/.
"""

from __future__ import annotations

import os

from gpulet.node import driver_table as table
from gpulet.node import elf
from gpulet.node.driver_files import DriverFile
from gpulet.node.paths import below, resolve
from gpulet.node.procfs import read_text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Container, Iterator, Mapping, Sequence


def _listing(root: str, folder: str) -> dict[str, bool]:
    """The folder's names, each with whether it is a symbolic link; empty where there is no such folder."""
    try:
        with os.scandir(below(root, folder)) as entries:
            return {entry.name: entry.is_symlink() for entry in entries}
    except OSError:
        return {}


def cached_folders(root: str, ldcache: str = "") -> list[str]:
    """Folders that the root's loader cache gives for the driver's libraries. ldcache: another one, below the root.

    The paths are searched for as bytes: parsing the cache would take longer than all the rest.
    """
    try:
        with open(below(root, ldcache or "/etc/ld.so.cache"), "rb") as file:
            data = file.read()
    except OSError:
        return []
    folders = []
    for name in (b"/libcuda.so.1\0", b"/libnvidia-ml.so.1\0"):
        at = data.find(name)
        while at >= 0:
            folders.append(data[data.rfind(b"\0", 0, at) + 1 : at].decode("utf-8", "surrogateescape"))
            at = data.find(name, at + 1)
    return [folder for folder in dict.fromkeys(folders) if folder.startswith("/")]


def library_folders(root: str, ldcache: str = "", search: Sequence[str] = ()) -> list[str]:
    """Where the driver's 64-bit libraries may be, below the root: the folders of `search`, which somebody named with or
    without the root before them, then as its loader cache says, then the known folders."""
    base = root.rstrip("/")
    named = (folder[len(base) :] if base and folder.startswith(base + "/") else folder for folder in search)
    machine = os.uname().machine
    triplet, _ = table.TRIPLETS.get(machine, (f"{machine}-linux-gnu", ""))
    known = (pattern.format(triplet=triplet) for pattern in table.FOLDERS_64)
    return list(dict.fromkeys([*named, *cached_folders(root, ldcache), *known]))


class Search:
    """One look beneath one root."""

    def __init__(self, root: str, ldcache: str, search: Sequence[str]) -> None:
        self.root = root
        self.listings: dict[str, dict[str, bool]] = {}
        self.resolved: dict[str, str] = {}
        self.wanted = list(dict.fromkeys(map(self.real, library_folders(root, ldcache, search))))

    def real(self, path: str) -> str:
        """The path with its links followed beneath the root; an absolute link would lead the kernel out of it.

        Remembered for each folder on the way, since most paths share theirs.
        """
        if path not in self.resolved:
            folder, _, name = path.rpartition("/")
            here = f"{self.real(folder) if folder else ''}/{name}"
            try:
                os.readlink(below(self.root, here))
            except OSError:  # no link
                self.resolved[path] = here
            else:
                self.resolved[path] = resolve(self.root, here)
        return self.resolved[path]

    def exists(self, path: str) -> bool:
        """Whether there is something at `path` below the root, be it a link."""
        if self.root == "/":
            return os.path.lexists(path)
        folder, _, name = path.rpartition("/")
        return os.path.lexists(below(self.root, f"{self.real(folder)}/{name}"))

    def names(self, folder: str) -> dict[str, bool]:
        if folder not in self.listings:
            self.listings[folder] = _listing(self.root, folder)
        return self.listings[folder]

    def version(self) -> str:
        """The version that the libraries' file names have, "" where no library is found."""
        for stem in ("libcuda.so.", "libnvidia-ml.so."):
            for folder in self.wanted:
                for name in sorted(self.names(folder), reverse=True):
                    if name.startswith(stem) and name[len(stem) :].count("."):
                        return name[len(stem) :]
        return ""

    def folders(self, candidates: Sequence[str], version: str, bits: int) -> list[str]:
        """Those candidates, resolved and each once, that hold a library of this version and word size."""
        found: list[str] = []
        marks = (f"libcuda.so.{version}", f"libnvidia-ml.so.{version}")
        for candidate in candidates:
            here = next((mark for mark in marks if self.exists(f"{candidate}/{mark}")), "")
            if not here:
                continue
            file = self.real(f"{candidate}/{here}")  # the link may lead elsewhere: NixOS, alternatives
            if elf.bits(below(self.root, file)) in (0, bits):
                found.append(file.rpartition("/")[0])
        return list(dict.fromkeys(found))

    # -- libraries --

    def libraries(self, folders: Sequence[str], version: str, kind: str) -> Iterator[DriverFile]:
        for folder in folders:
            for place in (folder, folder + "/vdpau"):
                names = self.names(place)
                links = self._links(place, names)
                for name in sorted(names):
                    stem = _stem(name, version)
                    if stem and not names[name]:
                        yield self._library(place, name, stem, kind, links.get(name, {}))

    def _links(self, folder: str, names: dict[str, bool]) -> dict[str, dict[str, str]]:
        """File name -> the links in the folder that end at it, each name with the link's text."""
        direct = {}
        for name, is_link in names.items():
            if is_link and ".so" in name:
                try:
                    direct[name] = os.readlink(below(self.root, f"{folder}/{name}"))
                except OSError:
                    continue
        out: dict[str, dict[str, str]] = {}
        for name, text in direct.items():
            end, hops = name, 0
            while end in direct and hops < 8:
                end, hops = direct[end], hops + 1
            out.setdefault(end, {})[name] = text
        return out

    def _library(self, folder: str, name: str, stem: str, kind: str, beside: Mapping[str, str]) -> DriverFile:
        path = f"{folder}/{name}"
        soname = self._soname(path, name, stem, beside)
        links = dict.fromkeys([(name, f"{folder}/{soname}")] if soname and soname != name else [])
        for text, link in table.EXTRA_LINKS.get(stem, ()):
            links[(text.format(file=name), f"{folder}/{link}")] = None
        taken = {link for _text, link in links}
        for other in sorted(beside):
            if f"{folder}/{other}" not in taken:
                links[(beside[other], f"{folder}/{other}")] = None
        capability = table.CAPABILITY_OF_LIBRARY.get(stem, table.EVERYTHING)
        return DriverFile(path, below(self.root, path), kind, capability, soname, tuple(links))

    def _soname(self, path: str, name: str, stem: str, beside: Mapping[str, str]) -> str:
        """From the links beside the file (ldconfig made them), else out of the file itself."""
        versioned = [link for link in beside if link.startswith(stem + ".so.")]
        if versioned:
            return min(versioned, key=lambda link: (len(link), link))
        if stem in table.SONAME_IS_FILE_NAME:
            return name
        return elf.soname(below(self.root, path))

    def of_own_version(self, folders: Sequence[str], present: Container[str]) -> Iterator[DriverFile]:
        """Libraries with a version of their own that a distribution has put apart from the driver's."""
        for folder in folders:
            names = self.names(folder)
            for name in sorted(names):
                stem = name.partition(".so.")[0]
                if stem in table.OWN_VERSION and stem not in present and not names[name]:
                    yield self._library(folder, name, stem, "library", self._links(folder, names).get(name, {}))

    def neutral(self, folders: Sequence[str]) -> Iterator[DriverFile]:
        """The libraries that applications link with instead of a vendor's, of any version."""
        for folder in folders:
            names = self.names(folder)
            links = self._links(folder, names)
            for name in sorted(names):
                stem = name.partition(".so")[0]
                if stem in table.NEUTRAL_LIBRARIES and not names[name]:
                    yield self._library(folder, name, stem, "library", links.get(name, {}))

    # -- everything else --

    def first(self, candidates: Sequence[str]) -> str:
        """The first of the paths that exists, resolved below the root; "" for none."""
        for path in candidates:
            if self.exists(path):
                real = self.real(path)
                if os.path.exists(below(self.root, real)):
                    return real
        return ""

    def binaries(self) -> Iterator[DriverFile]:
        for name, capability in table.BINARIES.items():
            for path in (f"{folder}/{name}" for folder in table.BINARY_FOLDERS):
                if self.exists(path):
                    source = below(self.root, self.real(path))
                    if os.access(source, os.X_OK):
                        yield DriverFile(path, source, "binary", capability)
                        break

    def firmware(self, version: str) -> Iterator[DriverFile]:
        for folder in firmware_folders(version):
            for name in sorted(self.names(self.real(folder))):
                if name.startswith("gsp") and name.endswith(".bin"):
                    path = f"{folder}/{name}"
                    yield DriverFile(path, below(self.root, self.real(path)), "firmware")

    def sockets(self) -> Iterator[DriverFile]:
        for capability, places in table.SOCKETS:
            path = self.first(places)
            if path:
                yield DriverFile(path, below(self.root, path), "socket", capability)

    def configuration(self, elsewhere: Sequence[str]) -> Iterator[DriverFile]:
        """elsewhere: folders of the host to search instead of the root's."""
        for target, capability in table.CONFIGURATION.items():
            base = "/etc" if target.startswith("/etc/") else "/usr/share"
            name = target[len(base) :]
            if elsewhere:
                found = (f"{folder}{name}" for folder in elsewhere if os.path.exists(f"{folder}{name}"))
                yield from (DriverFile(target, path, "config", capability) for path in [*found][:1])
                continue
            places = [folder + name for folder in table.CONFIGURATION_FOLDERS]
            if name.startswith("/vulkan/"):
                places.append(name)  # Container-Optimized OS keeps them right below its driver folder
            path = self.first(places)
            if path:
                yield DriverFile(target, below(self.root, path), "config", capability)

    def xorg(self, folders: Sequence[str], version: str) -> Iterator[DriverFile]:
        places = [f"{folder}/{name}" for folder in folders for name in table.XORG_BESIDE] + list(table.XORG_FOLDERS)
        for pattern, link in table.XORG_MODULES:
            name = pattern.format(version=version)
            path = self.first([f"{place}/{name}" for place in places])
            if path:
                folder = path.rpartition("/")[0]
                links = ((name, f"{folder}/{link}"),) if link else ()
                yield DriverFile(path, below(self.root, path), "xorg", table.GRAPHICS, links=links)


def _stem(name: str, version: str) -> str:
    """The library's name without ".so" and version where it is one of the driver's, else ""."""
    stem, dot_so, suffix = name.partition(".so.")
    if not dot_so or not stem.startswith("lib"):
        return ""
    if suffix == version:
        return stem
    return stem if stem in table.OWN_VERSION else ""


def firmware_folders(version: str) -> list[str]:
    """Where the kernel looks for firmware, in its order (Documentation/driver-api/firmware/fw_search_path.rst)."""
    custom = (read_text("/sys/module/firmware_class/parameters/path") or "").strip()
    release = os.uname().release
    bases = [custom, f"/lib/firmware/updates/{release}", "/lib/firmware/updates", f"/lib/firmware/{release}"]
    return [f"{base}/nvidia/{version}" for base in dict.fromkeys([*bases, "/lib/firmware"]) if base]
