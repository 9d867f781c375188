"""The thread that waits for NVML's events and asks each GPU how it is; what it learns goes to `tell`.

NVML's wait can't be interrupted, so it is short; everything that blocks happens here. Nothing is decided here but what
isn't about a GPU at all: an answer that is about the question, and an NVML that must be started anew.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from typing import Any, Protocol

from gpulet.errors import NodeError, NvmlError
from gpulet.node.nvml import Event as NvmlEvent
from gpulet.node.nvml_errors import ABOUT_THE_QUESTION, GPU_IS_LOST, NO_PERMISSION, NOT_SUPPORTED, code_in
from gpulet.plugin.health import Answer, Event, NvmlState, XidSeen

log = logging.getLogger(__name__)

XID = 8  # nvmlEventTypeXidCriticalError
WAIT_MS = 200
ASK_EVERY = 5.0  # seconds between questions to each GPU
RETRY = 2.0  # seconds before NVML is tried again
NEVER = float("-inf")
ANEW_EVERY = 60.0  # seconds between two times that NVML is started anew before anything is made of its failure

_NO_PERMISSION = "; a GPU in MIG mode needs a privileged container or NVIDIA_MIG_MONITOR_DEVICES=all to be asked"


class Session(Protocol):
    """What is needed of node.nvml.Session."""

    def watch(self, uuids: Sequence[str], mask: int = XID) -> dict[str, str]: ...
    def wait(self, timeout_ms: int) -> NvmlEvent | None: ...
    def state(self, uuid: str) -> str: ...
    def recovery(self, uuid: str) -> int: ...
    def close(self) -> None: ...


class CountedSession:
    """A session whose every call goes through `count(name, call, *arguments)`."""

    def __init__(self, session: Session, count: Callable[..., Any]) -> None:
        self._session, self._count = session, count

    def watch(self, uuids: Sequence[str], mask: int = XID) -> dict[str, str]:
        refused: dict[str, str] = self._count("watch", self._session.watch, uuids, mask)
        return refused

    def wait(self, timeout_ms: int) -> NvmlEvent | None:
        event: NvmlEvent | None = self._count("wait", self._session.wait, timeout_ms)
        return event

    def state(self, uuid: str) -> str:
        return str(self._count("state", self._session.state, uuid))

    def recovery(self, uuid: str) -> int:
        return int(self._count("recovery", self._session.recovery, uuid))

    def close(self) -> None:
        self._session.close()


class Monitor:
    """Watches these GPUs until stopped. open: starts an NVML session; tell: called from this thread."""

    def __init__(
        self,
        open: Callable[[], Session],
        uuids: Sequence[str],
        tell: Callable[[Event], None],
        ask_every: float = ASK_EVERY,
    ) -> None:
        self.uuids = tuple(uuids)
        self._open, self._tell, self._ask_every = open, tell, ask_every
        self._unwatched: dict[str, str] = {}
        self._asked = self._searched = NEVER  # when all were asked, and when for one that ended the wait of all
        self._told: set[tuple[str, str, str]] = set()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="health", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def stop(self) -> None:
        """End; returns after the wait that is going on, WAIT_MS at most."""
        self._stopping.set()
        self._thread.join(5)

    def _run(self) -> None:
        anew = NEVER
        while not self._stopping.is_set():
            opened = False
            try:
                with closing(self._open()) as session:
                    opened = True
                    self._watch(session)
            except Exception as error:  # the thread must live: without it nothing would ever be unhealthy
                now = time.monotonic()
                self._asked = self._searched = NEVER  # whether it works again, the next answers tell
                if opened and isinstance(error, NvmlError) and now - anew >= ANEW_EVERY:
                    anew = now  # the library or the driver may have been replaced: whether NVML starts is what counts
                    log.warning("%s: starting NVML anew", error)
                    continue
                strange = not isinstance(error, NodeError)
                if strange:
                    log.exception("health checks failed, trying again")
                self._tell(NvmlState(f"{type(error).__name__}: {error}" if strange else str(error)))
                self._stopping.wait(RETRY)

    def _watch(self, session: Session) -> None:
        self._unwatched = self._register(session, self.uuids)
        while not self._stopping.is_set():
            try:
                event = session.wait(WAIT_MS)
            except NvmlError as error:
                if error.code != GPU_IS_LOST:  # that is of one GPU, though the wait was for all
                    raise
                if self._due(self._searched):
                    self._searched = time.monotonic()
                    log.warning("%s: asking which, and watching the others anew", error)
                    self._ask(session)
                self._stopping.wait(WAIT_MS / 1000)
                return
            if event is not None and event.kind & XID:
                self._tell(XidSeen(event.uuid, event.data, event.gi, event.ci))
            if self._due(self._asked):
                self._ask(session)

    def _due(self, before: float) -> bool:
        return time.monotonic() - before >= self._ask_every

    def _ask(self, session: Session) -> None:
        """Ask each GPU how it is, and tell it at once: the next one may hang. That NVML works is told when all were
        asked, since its wait alone says nothing of the GPUs."""
        self._asked = time.monotonic()
        if self._unwatched:
            self._unwatched = self._register(session, tuple(self._unwatched))
        aside = {}
        for uuid in self.uuids:
            reason = session.state(uuid)
            if code_in(reason) in ABOUT_THE_QUESTION:
                aside[uuid], reason = reason, ""
            silence = reason or self._unwatched.get(uuid, "")
            self._tell(Answer(uuid, silence, -1 if silence else session.recovery(uuid)))
        self._set_aside("doesn't tell its memory, by which we see that it answers", aside)
        self._tell(NvmlState())

    def _register(self, session: Session, uuids: Sequence[str]) -> dict[str, str]:
        """Have their events delivered. Gives those whose Xids we would miss, and why, "" where that says nothing of
        the GPU: the others count as silent until it works. One that is too old for events is never asked again."""
        refused = session.watch(uuids)
        aside = {uuid: reason for uuid, reason in refused.items() if code_in(reason) in ABOUT_THE_QUESTION}
        self._set_aside("has no health events", aside)
        return {
            uuid: "" if uuid in aside else f"it takes no registration for health events: {reason}"
            for uuid, reason in refused.items()
            if code_in(reason) != NOT_SUPPORTED
        }

    def _set_aside(self, what: str, aside: Mapping[str, str]) -> None:
        """Tell the reasons by UUID that are about the question and so of no GPU, each once."""
        new: dict[str, list[str]] = {}
        for uuid, reason in aside.items():
            if (what, reason, uuid) not in self._told:
                self._told.add((what, reason, uuid))
                new.setdefault(reason, []).append(uuid)
        for reason, uuids in new.items():
            more = f" (and {len(uuids) - 1} more)" if len(uuids) > 1 else ""
            remedy = _NO_PERMISSION if code_in(reason) == NO_PERMISSION else ""
            log.warning("GPU %s%s %s: %s; it counts as healthy%s", uuids[0], more, what, reason, remedy)
