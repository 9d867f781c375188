"""The errors that gpulet raises on purpose. Anything else that escapes is a bug.

    GpuletError                  one line for people; exit code 1
    |-- UsageError               the command line was wrong; exit code 2
    |-- ConfigError              config.toml, the plugin's YAML or a flag has a value that can't be used
    |-- NodeError                a fact about this node could not be had
    |   |-- DriverNotFound       no driver library or version where we looked
    |   |-- NvmlError            NVML answered with an error that concerns the node, not one device
    |   `-- UnknownDevice        an id that names no GPU, MIG device or IMEX channel here
    |-- RequestError             what a container asks for can't be read or may not be given
    |   |-- RequirementNotMet    NVIDIA_REQUIRE_* does not hold on this node
    |   `-- Refused              the policy says no
    |-- InjectionError           the injection could not be worked out or carried out
    |   |-- BundleError          config.json or the container's state can't be read or written
    |   |-- CdiError             a CDI specification or name can't be used
    |   `-- StepFailed           a system call failed: names the step, the object and the errno
    `-- EngineError              a container engine's or low-level runtime's part failed

Each error answers four questions in one line: which thing, what was seen there, what was wanted, what to do.
Loaded by the programs in launch/, so it imports nothing.
"""

from __future__ import annotations

_HEAD, _TAIL = 600, 200  # characters: a whole path nearly always, a few hundred times less than a variable may have


def cut(text: str) -> str:
    """A text that somebody else wrote, at a length that a line of a log can bear: the middle of a longer one is told
    by its length."""
    left_out = len(text) - _HEAD - _TAIL
    return text if left_out <= 0 else f"{text[:_HEAD]}...({left_out} characters)...{text[-_TAIL:]}"


def visible(text: str) -> str:
    """A text that somebody else wrote, as a terminal may show it: what a container or a file says must neither end our
    line nor command the terminal, so what has no shape of its own is written as an escape, such as \\x1b."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


class GpuletError(Exception):
    """An expected failure.

    what: the thing concerned, in words; seen: the value found there; wanted: what would have been right;
    remedy: what the reader can do about it. `str()` gives them as one line.
    """

    exit_code = 1

    def __init__(self, what: str, *, seen: object = None, wanted: str = "", remedy: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.seen = seen
        self.wanted = wanted
        self.remedy = remedy

    def __str__(self) -> str:
        line = cut(self.what)
        if self.seen is not None:
            line += f": {cut(str(self.seen))}"
        if self.wanted:
            line += f" (wanted {self.wanted})"
        if self.remedy:
            line += f"; {self.remedy}"
        return visible(" ".join(line.split()))


class UsageError(GpuletError):
    """The command line was wrong."""

    exit_code = 2


class ConfigError(GpuletError):
    """A configuration value can't be used."""


class NodeError(GpuletError):
    """A fact about this node could not be had."""


class DriverNotFound(NodeError):
    """No driver library or version where we looked."""


class NvmlError(NodeError):
    """NVML answered with an error that concerns the whole node. `code` is the NVML return value."""

    def __init__(self, what: str, *, code: int = 0, seen: object = None, wanted: str = "", remedy: str = "") -> None:
        super().__init__(what, seen=seen, wanted=wanted, remedy=remedy)
        self.code = code


class UnknownDevice(NodeError):
    """An id that names nothing on this node."""


class RequestError(GpuletError):
    """What a container asks for can't be read or may not be given."""


class RequirementNotMet(RequestError):
    """A NVIDIA_REQUIRE_* expression does not hold here."""


class Refused(RequestError):
    """The policy says no."""


class InjectionError(GpuletError):
    """The injection could not be worked out or carried out."""


class BundleError(InjectionError):
    """config.json or the container's state can't be read or written."""


class CdiError(InjectionError):
    """A CDI specification or name can't be used."""


class StepFailed(InjectionError):
    """A system call failed while an injection was carried out.

    step: the step's name; target: the object it concerned; errno: the kernel's answer (0 where none).
    """

    def __init__(self, step: str, target: str, errno: int = 0, reason: str = "", remedy: str = "") -> None:
        super().__init__(f"{step} {target}".rstrip(), seen=reason or None, remedy=remedy)
        self.step = step
        self.target = target
        self.errno = errno
        self.reason = reason


class EngineError(GpuletError):
    """A container engine's or low-level runtime's part failed."""
