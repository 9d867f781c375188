"""Steps that may block for as long as they like: in threads that nobody has to wait for, neither the loop nor its end.

asyncio.to_thread's threads are joined when the loop ends, so one call of NVML that hangs would keep the process, and
its sockets, for ever.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import ParamSpec, TypeVar

from gpulet.errors import NvmlError
from gpulet.node.gpu import NodeFacts
from gpulet.plugin.config import Config

P = ParamSpec("P")
T = TypeVar("T")

PATIENCE = 15.0  # seconds; the driver of a node whose GPUs aren't kept initialised takes several for its first answer
TIMEOUT = 10  # NVML_ERROR_TIMEOUT


def begin(step: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> Future[T]:
    """The promise of the step's result or exception."""
    promise: Future[T] = Future()
    promise.set_running_or_notify_cancel()  # from here on it can't be cancelled under the thread

    def run() -> None:
        try:
            promise.set_result(step(*arguments, **options))
        except BaseException as error:
            promise.set_exception(error)

    threading.Thread(target=run, name="aside", daemon=True).start()
    return promise


async def aside(step: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
    """The step's result or exception. Cancelled, it leaves the step to itself."""
    return await asyncio.wrap_future(begin(step, *arguments, **options))


class Unanswered(NvmlError):
    """The node has been asked and hasn't answered yet."""

    def __init__(self) -> None:
        super().__init__(f"the driver gave no answer within {PATIENCE:g} s", code=TIMEOUT)


class Asking:
    """Asks the node, one question at a time: a second one behind a first that hangs would hang too."""

    def __init__(self, look: Callable[[Config], NodeFacts]) -> None:
        self.overdue = False
        self._look = look
        self._asked: Config | None = None
        self._answer: asyncio.Task[NodeFacts] | None = None

    async def __call__(self, config: Config) -> NodeFacts:
        """The facts. Raises NodeError; Unanswered after PATIENCE, and then at once until the answer has come."""
        while True:
            if self._answer is None:
                self._asked, self._answer = config, asyncio.create_task(aside(self._look, config))
            await asyncio.wait([self._answer], timeout=0 if self.overdue else PATIENCE)
            if not self._answer.done():
                self.overdue = True
                raise Unanswered
            answer, self._answer, self.overdue = self._answer, None, False
            if self._asked == config:
                return answer.result()
            answer.exception()  # of another question: nobody wants it any more
