"""How the runtime's injections came out and how long they took: one line for each in a small file of the state folder,
which the device plugin's metrics read.

    jit-cdi ok 8312                        one injection: mode, result, microseconds
    jit-cdi ok 39120 5 0 0 2 3 0 ...       several: their sum, how many, how many took as long as each of BUCKETS

A file that has grown is folded into sums, which keeps every count, and the file small for ever: each line is appended
in one write, under a lock, so that none goes to a file that has just been replaced. Loaded by the programs in launch/.
"""

from __future__ import annotations

import os
import time

from gpulet import codec

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

NAME = "injections"
MODES = ("auto", "jit-cdi", "cdi", "csv", "legacy")  # "auto": it failed before one was chosen
RESULTS = ("ok", "denied", "refused", "error")  # denied: starts without the GPUs that it asked for
BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)  # seconds, upper ends; what took longer has its own
MOST = 65536  # bytes: some 3,000 injections; as many lines take a millisecond or two to add up
TRIES, PAUSE = 50, 0.001  # to get the lock, which others have for microseconds; seconds between them
PART, LONGEST = 65536, 64  # bytes read at once, and how often

Sums = list[int]  # microseconds, count, then one count for each of BUCKETS and one for what took longer
Tally = dict[tuple[str, str], Sums]  # mode, result


def add(folder: str, mode: str, result: str, seconds: float) -> None:
    """Count one injection. Says nothing where it can't: a container must not wait for a count, nor fail for one."""
    path = f"{folder}/{NAME}"
    line = f"{mode} {result} {seconds * 1e6:.0f}\n".encode()
    try:
        try:
            size = _append(path, line)
        except FileNotFoundError:
            codec.make_folder(folder)
            size = _append(path, line)
        if size > MOST:
            fold(path)
    except OSError:
        pass


def _append(path: str, line: bytes) -> int:
    """The file's size after that. Without the lock in the end, where a stopped process has it: the line may be lost
    then, and the container doesn't wait."""
    for left in reversed(range(TRIES)):
        file = _open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        try:
            if _locked(file, path) or not left:
                os.write(file, line)
                return os.lseek(file, 0, os.SEEK_END)
        finally:
            os.close(file)
        time.sleep(PAUSE)
    return 0


def _locked(file: int, path: str) -> bool:
    """Whether we have the file, until it is closed, and it is still the one at the path."""
    try:
        os.lockf(file, os.F_TLOCK, 0)
        return os.stat(path).st_ino == os.fstat(file).st_ino
    except OSError:
        return False


def read(folder: str) -> Tally:
    """All that was counted since the folder was made; nothing where there is no file. Raises OSError."""
    try:
        file = _open(f"{folder}/{NAME}", os.O_RDONLY)
    except FileNotFoundError:
        return {}
    try:
        return sums(_rest(file))
    finally:
        os.close(file)


def sums(text: bytes) -> Tally:
    """The sums of the lines; a line that isn't of the two forms, or torn, doesn't count."""
    found: Tally = {}
    for mode, result, numbers in _lines(text):
        total = found.setdefault((mode, result), [0] * (len(BUCKETS) + 3))
        for place, number in enumerate(numbers):
            total[place] += number
    return found


def _lines(text: bytes) -> Iterator[tuple[str, str, Sums]]:
    for line in text.decode("ascii", "replace").split("\n")[:-1]:
        mode, _, rest = line.partition(" ")
        result, _, rest = rest.partition(" ")
        words = rest.split(" ")
        if mode not in MODES or result not in RESULTS or not all(w.isdigit() and len(w) < 19 for w in words):
            continue
        numbers = [int(word) for word in words]
        if len(numbers) == 1:
            place = sum(numbers[0] > end * 1e6 for end in BUCKETS)
            numbers += [1, *(int(at == place) for at in range(len(BUCKETS) + 1))]
        if len(numbers) == len(BUCKETS) + 3:
            yield mode, result, numbers


def fold(path: str) -> None:
    """Put the sums in place of the lines. Raises OSError."""
    file = _open(path, os.O_RDWR)
    try:
        if not _locked(file, path) or os.fstat(file).st_size <= MOST:
            return  # another has just folded it, or is about to, or whoever writes next will
        found = sums(_rest(file))
        aside = f"{path}.new"
        try:
            os.unlink(aside)
        except FileNotFoundError:
            pass
        new = _open(aside, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL)
        try:
            lines = [f"{mode} {result} {' '.join(map(str, total))}\n" for (mode, result), total in found.items()]
            os.lockf(new, os.F_TLOCK, 0)  # nobody folds it again before the rest is there
            os.write(new, "".join(lines).encode())
            os.rename(aside, path)
            os.write(new, _rest(file))  # of who wrote without the lock
        finally:
            os.close(new)
    finally:
        os.close(file)


def _open(path: str, flags: int) -> int:
    # a pipe of that name makes nobody wait, and a link leads nowhere
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)


def _rest(file: int) -> bytes:
    """What has not been read yet; not all of an endless file that somebody put here."""
    parts: list[bytes] = []
    while len(parts) < LONGEST and (part := os.read(file, PART)):
        parts.append(part)
    return b"".join(parts)
