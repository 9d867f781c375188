"""Xids: the driver's numbers for what went wrong on a GPU, and what each means for who runs there.

Numbers and meanings follow NVIDIA's public Xid catalogue, in short words of our own. `action` is the least that makes
the GPU usable again: "none", "restart-app", "reset" (the GPU), "reboot" (the node) or "replace" (call the vendor).
`scope` is what is concerned: "process", "gpu", "link" or "node". `recovery` is the evidence that it is over.
"""

from __future__ import annotations

from dataclasses import dataclass

RESET_SEEN = "the recovery action is none again, or a new boot"


@dataclass(frozen=True, slots=True)
class Xid:
    """One row. kind: "application", "driver", "memory", "bus", "link", "firmware" or "thermal"."""

    number: int
    meaning: str
    kind: str
    action: str
    scope: str

    @property
    def recovery(self) -> str:
        """What shows that the GPU is well again."""
        return {"none": "nothing to recover from", "restart-app": "the process has ended"}.get(self.action, RESET_SEEN)


CATALOGUE = {
    row.number: row
    for row in (
        Xid(8, "GPU stopped processing", "driver", "reset", "gpu"),
        Xid(13, "graphics engine exception: bad access or instruction", "application", "restart-app", "process"),
        Xid(31, "MMU fault: access to an unmapped address", "application", "restart-app", "process"),
        Xid(32, "invalid or corrupted push buffer", "driver", "restart-app", "process"),
        Xid(38, "driver firmware error", "firmware", "reset", "gpu"),
        Xid(43, "a channel was reset after its application's fault", "application", "restart-app", "process"),
        Xid(44, "graphics engine fault while switching contexts", "driver", "reset", "gpu"),
        Xid(45, "channels removed because their application ended or another error did it", "application", "none",
            "process"),
        Xid(46, "GPU stopped processing", "driver", "reset", "gpu"),
        Xid(48, "double-bit ECC error in memory", "memory", "reset", "gpu"),
        Xid(54, "auxiliary power is not connected", "bus", "replace", "gpu"),
        Xid(56, "display engine error", "driver", "reset", "gpu"),
        Xid(57, "error while programming the video memory interface", "memory", "reset", "gpu"),
        Xid(58, "video memory clock unstable", "memory", "reset", "gpu"),
        Xid(61, "microcontroller breakpoint", "firmware", "reset", "gpu"),
        Xid(62, "microcontroller halted", "firmware", "reset", "gpu"),
        Xid(63, "memory row or page taken out of use", "memory", "none", "gpu"),
        Xid(64, "memory row or page could not be taken out of use", "memory", "reset", "gpu"),
        Xid(65, "video processor exception", "driver", "reset", "gpu"),
        Xid(66, "illegal access by the driver", "driver", "restart-app", "process"),
        Xid(68, "video decoder exception", "application", "restart-app", "process"),
        Xid(69, "graphics engine class error", "application", "restart-app", "process"),
        Xid(74, "NVLink error", "link", "reset", "link"),
        Xid(79, "GPU has fallen off the bus", "bus", "reboot", "gpu"),
        Xid(92, "many single-bit ECC errors", "memory", "none", "gpu"),
        Xid(94, "contained memory error: only its process is lost", "memory", "restart-app", "process"),
        Xid(95, "uncontained memory error", "memory", "reset", "gpu"),
        Xid(109, "context switch timed out", "driver", "reset", "gpu"),
        Xid(110, "security fault", "firmware", "reset", "gpu"),
        Xid(119, "GSP firmware did not answer in time", "firmware", "reset", "gpu"),
        Xid(120, "GSP firmware error", "firmware", "reset", "gpu"),
        Xid(121, "chip-to-chip link error", "link", "none", "link"),
        Xid(122, "reading the power controller's flash failed", "firmware", "reset", "gpu"),
        Xid(123, "writing the power controller's flash failed", "firmware", "reset", "gpu"),
        Xid(136, "a link failed its training", "link", "reset", "link"),
        Xid(137, "NVLink access to a peer's memory refused", "application", "restart-app", "process"),
        Xid(140, "unrecovered ECC error", "memory", "reset", "gpu"),
        Xid(143, "GPU could not be initialised", "firmware", "reset", "gpu"),
        Xid(154, "the recovery action of the GPU has changed", "driver", "none", "gpu"),
        Xid(155, "NVLink went down where only software could have done it", "link", "none", "link"),
        Xid(156, "resource taken out of use", "memory", "none", "gpu"),
        Xid(157, "resource could not be taken out of use", "memory", "reset", "gpu"),
        Xid(158, "GPU fatal timeout", "driver", "reset", "gpu"),
    )
}  # fmt: skip

# What the peer passes over unless told otherwise: errors that it takes for the application's.
IGNORED_BY_DEFAULT = frozenset({13, 31, 43, 45, 68, 109})


def describe(number: int) -> str:
    """ "Xid 79 (GPU has fallen off the bus; action: reboot)"."""
    row = CATALOGUE.get(number)
    return f"Xid {number} ({row.meaning}; action: {row.action})" if row else f"Xid {number}"
