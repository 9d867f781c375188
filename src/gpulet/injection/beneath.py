"""Reading and changing files beneath a container's root and nowhere else, with a journal that undoes the changes.

The root belongs to an image, so every link in it may lead anywhere and every folder may be swapped while we work.
Hence no path is resolved by the host's rules and none twice: a folder's path becomes a descriptor by one openat2 in
root, and the last name is then used relative to that descriptor and never followed.
"""

from __future__ import annotations

import os
import stat

from gpulet import linux
from gpulet.errors import StepFailed
from gpulet.injection.held import Held, content_of, failed, link_text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Self

ASIDE = ".gpulet-new"  # what is made before it takes its place, where nobody else is at work beneath the root
WAITS, WAIT = 400, 0.005  # for whoever is: an image may hold our lock for ever
ENOENT, EEXIST, EISDIR, ELOOP = 2, 17, 21, 40


class Root(Held):
    """A container's root file system, held by descriptor.

    What is made belongs to the root folder's own owner, which is the container's root where user identities are
    shifted. `done` lists in words what was changed; leaving a `with` block by an error takes all of it back. Such
    blocks on one root wait for each other: what one finds there already, no other will take back.

    `left` lists the paths that were to be written and have a mount over them. What somebody mounted there serves that
    name already, and stays theirs.
    """

    def __init__(self, path: str, fd: int = -1) -> None:
        super().__init__(path, fd)
        own = os.fstat(self.fd)
        self.owner = (own.st_uid, own.st_gid)
        self._ours = self.owner == (os.geteuid(), os.getegid())
        self.done: list[str] = []
        self.left: list[str] = []
        self._folders: dict[str, int] = {"/": self.fd}
        self._spare: list[int] = []  # no longer looked up, yet needed to undo
        self._inverse: list[Callable[[], None]] = []
        self._alone = False

    def __enter__(self) -> Self:
        self._alone = self._lock()
        return self

    def _lock(self) -> bool:
        """Whether no other process of ours is at work beneath this root, for which it waits two seconds at most."""
        from time import sleep

        try:
            fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self.fd)
            self._spare.append(fd)
            for _ in range(WAITS):
                if linux.lock(fd):
                    return True
                sleep(WAIT)
        except OSError:  # a folder that isn't ours to list, a file system without locks
            pass
        return False

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if error is not None:
            self.undo()
        self.close()

    def close(self) -> None:
        """Gives back every descriptor; afterwards nothing can be undone."""
        for fd in (*self._folders.values(), *self._spare):
            os.close(fd)
        self._folders, self._spare, self._inverse = {}, [], []

    def record(self, what: str, inverse: Callable[[], None]) -> None:
        """Notes one change (in words; "" for a by-product) and how it is taken back."""
        if what:
            self.done.append(what)
        self._inverse.append(inverse)

    def undo(self) -> None:
        """Takes every change back, last first, as far as it goes: a failure here must not hide the one before."""
        while self._inverse:
            try:
                self._inverse.pop()()
            except (OSError, StepFailed):
                pass
        self.done.clear()

    def forget(self, path: str) -> None:
        """Looks a folder, and those below, up anew next time: something was mounted over it."""
        for key in [key for key in self._folders if key != "/" and f"{key}/".startswith(f"{path}/")]:
            self._spare.append(self._folders.pop(key))

    # -- changing

    def covered(self, path: str) -> bool:
        """Whether a mount lies over path itself."""
        return _covered(*self.split(path))

    def folder(self, path: str) -> int:
        """The descriptor of a folder, made (0755) with its parents where missing; stays open until close()."""
        key = "/" + "/".join(part for part in path.split("/") if part not in ("", "."))
        if key not in self._folders:
            self._folders[key] = self._open_or_make(key, 0)
        return self._folders[key]

    def _open_or_make(self, path: str, links: int) -> int:
        try:
            return self.open(path, os.O_PATH | os.O_DIRECTORY)
        except OSError as error:
            if error.errno != ENOENT or links > linux.MAX_LINKS:
                raise failed("open folder", path, error) from error
        head, _, name = path.rpartition("/")
        parent = self.folder(head)
        text = link_text(parent, name)
        if text is not None:  # a link to what isn't there, such as /var/run in a bare image: make what it names
            return self._open_or_make(text if text.startswith("/") else f"{head}/{text}", links + 1)
        try:
            return self._make_folder(parent, name)
        except FileExistsError as error:  # another container's runtime, on the same root, was first
            if links > linux.MAX_LINKS:
                raise failed("make folder", path, error) from error
            return self._open_or_make(path, links + 1)
        except OSError as error:
            raise failed("make folder", path, error) from error

    def _make_folder(self, parent: int, name: str) -> int:
        os.mkdir(name, 0o755, dir_fd=parent)
        fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
        self._own(fd, 0o755)
        self.record("", lambda: os.rmdir(name, dir_fd=parent))
        return fd

    def _own(self, fd: int, mode: int) -> None:
        os.fchmod(fd, mode)  # whatever the umask was
        if not self._ours:
            os.fchown(fd, *self.owner)

    def split(self, path: str) -> tuple[int, str]:
        """The descriptor of path's folder, made where missing, and the last name."""
        head, _, name = path.rstrip("/").rpartition("/")
        if name in ("", ".", ".."):
            raise StepFailed("use", path, reason="the path has no last name")
        return self.folder(head), name

    def symlink(self, target: str, path: str, replace_file: bool = True) -> bool:
        """Puts a link with the text target at path, in one moment, in place of a link or file there.

        Answers whether anything changed: not where the same link is there already, nor where a file is and
        replace_file is false, nor where a mount is (see `left`).
        """

        def change(parent: int, name: str) -> Callable[[], None] | None:
            try:
                self._make_link(parent, name, target)
            except FileExistsError:
                return self._replace(parent, name, path, target, replace_file)
            except OSError as error:
                raise failed("write", path, error) from error
            return lambda: os.unlink(name, dir_fd=parent)

        return self._change(path, f"link {path} -> {target}", change)

    def _replace(self, parent: int, name: str, path: str, target: str, replace_file: bool) -> Callable[[], None] | None:
        """Puts a link in place of what is there; answers how to undo that, None where nothing was to be changed."""
        before = self._before(parent, name, path)
        if link_text(parent, name) == target or (before == "file" and not replace_file):
            return None
        restore = self._restorer(parent, name, path, before)
        self._swap_in(parent, name, path, lambda aside: self._make_link(parent, aside, target))
        return restore

    def write(self, path: str, data: bytes, mode: int = 0o644) -> bool:
        """Puts a file at path, in one moment. Answers whether anything changed: not where a mount is (see `left`)."""

        def change(parent: int, name: str) -> Callable[[], None] | None:
            before = self._before(parent, name, path)
            old = _content(parent, name) if before == "file" else b""
            if before == "file" and old == data:
                return None
            restore = self._restorer(parent, name, path, before, old)
            self._swap_in(parent, name, path, lambda aside: self._make_file(parent, aside, data, mode))
            return restore

        return self._change(path, f"write {path}", change)

    def _change(self, path: str, what: str, change: Callable[[int, str], Callable[[], None] | None]) -> bool:
        """Has one thing changed at path's last name, and notes it. change: answers how it is taken back, None where
        nothing was to be changed."""
        parent, name = self.split(path)
        try:
            restore = change(parent, name)
        except StepFailed:
            if not _covered(parent, name):  # asked only now: it hardly ever is
                raise
            self.left.append(path)
            return False
        if restore is None:
            return False
        self.record(what, restore)
        return True

    def keep(self, path: str, what: str) -> None:
        """Notes how to put a file back that another program is about to write; what: the change in words."""
        parent, name = self.split(path)
        self.record(what, self._restorer(parent, name, path, self._before(parent, name, path)))

    def place(self, path: str, directory: bool) -> int:
        """A descriptor of the file or folder that a mount shall cover, made empty where missing. The caller closes it.

        A link is followed in root, as the low-level runtimes do.
        """
        if directory:
            return os.dup(self.folder(path))
        for _ in range(linux.MAX_LINKS):
            parent, name = self.split(path)
            text = link_text(parent, name)
            if text is None:
                return self._open_or_create(parent, name, path)
            path = text if text.startswith("/") else f"{path.rstrip('/').rpartition('/')[0]}/{text}"
        raise StepFailed("open", path, ELOOP, os.strerror(ELOOP))

    def _open_or_create(self, parent: int, name: str, path: str) -> int:
        try:
            fd = os.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o644, dir_fd=parent)
            self._own(fd, 0o644)
            os.close(fd)
            self.record("", lambda: os.unlink(name, dir_fd=parent))
        except FileExistsError:
            pass
        except OSError as error:
            raise failed("make", path, error) from error
        try:
            fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
        except OSError as error:
            raise failed("open", path, error) from error
        kind = os.fstat(fd).st_mode
        if stat.S_ISLNK(kind) or stat.S_ISDIR(kind):
            os.close(fd)
            raise StepFailed("mount on", path, EISDIR, "a folder or link is there", "remove it from the image")
        return fd

    def _swap_in(self, parent: int, name: str, path: str, make: Callable[[str], None]) -> None:
        aside = self._aside(parent)
        try:
            make(aside)
            os.rename(aside, name, src_dir_fd=parent, dst_dir_fd=parent)
        except OSError as error:
            if error.errno != EEXIST:  # then it isn't of our making
                try:
                    os.unlink(aside, dir_fd=parent)
                except OSError:
                    pass
            raise failed("write", path, error) from error

    def _aside(self, parent: int) -> str:
        """A name that is free. Alone beneath the root it is always the same, so that the next run, which does the same
        work, takes away what a killed one left; else it is one that nobody guesses."""
        if self._alone:
            try:
                os.unlink(ASIDE, dir_fd=parent)
            except FileNotFoundError:
                return ASIDE
            except OSError:  # a folder of that name in an image
                pass
            else:
                return ASIDE
        return f".gpulet-{os.urandom(8).hex()}"

    def _make_link(self, parent: int, name: str, target: str) -> None:
        os.symlink(target, name, dir_fd=parent)
        if not self._ours:
            try:
                os.chown(name, *self.owner, dir_fd=parent, follow_symlinks=False)
            except OSError:
                os.unlink(name, dir_fd=parent)
                raise

    def _make_file(self, parent: int, name: str, data: bytes, mode: int) -> None:
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(name, flags, 0o600, dir_fd=parent)
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(fd, rest) :]
            self._own(fd, mode)
        finally:
            os.close(fd)

    def _before(self, parent: int, name: str, path: str) -> str:
        """What is to be replaced at path: a "link", a "file", or "" for nothing."""
        try:
            kind = os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode
        except FileNotFoundError:
            return ""
        except OSError as error:
            raise failed("look at", path, error) from error
        if stat.S_ISLNK(kind):
            return "link"
        if stat.S_ISREG(kind):
            return "file"
        raise StepFailed("write", path, EEXIST, "a folder, device or pipe is there", "remove it from the image")

    def _restorer(self, parent: int, name: str, path: str, before: str, old: bytes | None = None) -> Callable[[], None]:
        """What puts the last name back as it is now. old: a file's content, where it was just read."""
        if before == "link":
            text = os.readlink(name, dir_fd=parent)
            return lambda: self._swap_in(parent, name, path, lambda aside: self._make_link(parent, aside, text))
        if before == "file":
            mode = stat.S_IMODE(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode)
            data = _content(parent, name) if old is None else old
            return lambda: self._swap_in(parent, name, path, lambda aside: self._make_file(parent, aside, data, mode))
        return lambda: os.unlink(name, dir_fd=parent)


def _covered(parent: int, name: str) -> bool:
    """Whether a mount lies over the last name, be it of the same file system."""
    return linux.crosses_mount(parent, name)


def _content(parent: int, name: str) -> bytes:
    fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=parent)
    return content_of(fd)
