"""Kubernetes Events about the node, so that `kubectl describe node` says which GPU failed and what to do; and about a
Pod whose container lost its GPU.

A thread of its own talks to the API server: nothing waits for it, and what it can't deliver is dropped aloud.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time

from gpulet.plugin.apiserver import ApiError, ApiServer
from gpulet.plugin.health import Notice

log = logging.getLogger(__name__)

COMPONENT = "gpulet-device-plugin"
NAMESPACE = "default"  # where Events about objects without a namespace, as nodes are, have their place
NORMAL = ("Recovered", "ReRegistered")  # ends of kinds that are no warnings
WAITING = 256  # Notices that wait at most; a storm of them tells nobody more
REMEMBERED = 64
TRIES, RETRY = 3, 1.0  # attempts for one Event, seconds between them where the server names none
LONGEST = 60.0  # seconds that it may name


def event(node: str, notice: Notice, name: str, now: float) -> dict[str, object]:
    """The Event (core/v1) of a notice, about its Pod or the node. now: seconds since the epoch."""
    moment = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(now))
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": name, "namespace": _namespace(notice)},
        "involvedObject": _about(node, notice),
        "reason": notice.kind,
        "message": notice.text[:1024],  # the API's limit
        "type": "Normal" if notice.kind.endswith(NORMAL) else "Warning",
        "source": {"component": COMPONENT, "host": node},
        "reportingComponent": COMPONENT,
        "reportingInstance": node,
        "firstTimestamp": moment,
        "lastTimestamp": moment,
        "count": 1,
    }


def _namespace(notice: Notice) -> str:
    return notice.pod[0] if notice.pod else NAMESPACE  # the API wants an Event beside what it is about


def _about(node: str, notice: Notice) -> dict[str, str]:
    if notice.pod:
        namespace, name, uid = notice.pod
        return {"apiVersion": "v1", "kind": "Pod", "namespace": namespace, "name": name, "uid": uid}
    # the uid that the kubelet gives in its own Events about a node is the node's name
    return {"apiVersion": "v1", "kind": "Node", "name": node, "uid": node}


class Events:
    """Reports notices as Events of a node until stopped."""

    def __init__(self, api: ApiServer, node: str) -> None:
        self._api, self._node = api, node
        self._notices: queue.Queue[Notice | None] = queue.Queue(WAITING)
        self._known: dict[Notice, tuple[str, int]] = {}  # what was said before: its Event's name and count
        self._numbers = itertools.count()
        self._thread = threading.Thread(target=self._run, name="events", daemon=True)

    def start(self) -> None:
        """Begin to report."""
        self._thread.start()

    def tell(self, notice: Notice) -> None:
        """Report this soon."""
        try:
            self._notices.put_nowait(notice)
        except queue.Full:
            log.warning("too many Events waiting: dropped %s %s", notice.kind, notice.text)

    def stop(self) -> None:
        """End, after what waits has been tried for a second."""
        try:
            self._notices.put_nowait(None)
        except queue.Full:
            pass
        self._thread.join(1)

    def _run(self) -> None:
        while (notice := self._notices.get()) is not None:
            for left in reversed(range(TRIES)):
                try:
                    self._report(notice)
                    break
                except ApiError as error:
                    log.warning("Event %s: %s", notice.kind, error)
                    if not left or not error.passes:
                        break
                    time.sleep(min(error.pause or RETRY, LONGEST))
                except Exception:  # the thread must live: without it nothing more would be reported
                    log.exception("Event %s can't be reported", notice.kind)
                    break

    def _report(self, notice: Notice) -> None:
        """A new Event, or one more of the same; an Event lives an hour, then it has to be made anew."""
        now = time.time()
        place = f"/api/v1/namespaces/{_namespace(notice)}/events"
        name, count = self._known.pop(notice, ("", 0))
        if name:
            moment = event(self._node, notice, name, now)["lastTimestamp"]
            change = {"count": count + 1, "lastTimestamp": moment}
            try:
                self._api.send("PATCH", f"{place}/{name}", change, "application/merge-patch+json")
                self._known[notice] = name, count + 1
                return
            except ApiError as error:
                if error.code != 404:
                    raise
        name = f"{self._node}.{time.time_ns():x}{next(self._numbers)}"
        self._api.send("POST", place, event(self._node, notice, name, now))
        self._known[notice] = name, 1
        while len(self._known) > REMEMBERED:
            del self._known[next(iter(self._known))]
