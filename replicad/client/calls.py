"""Calls of the user's functions, each with a time limit, also for a function that cannot be cancelled.

A thread cannot be cancelled: `to_thread.run_sync` of trio and of anyio returns when its thread does. So a call is a
task of its own. A call that does not return within GRACE after it was cancelled is *lost*: it has failed, and its
caller goes on, though the thread may still do something. At most MOST_LOST calls are lost at a time, because each keeps
a thread; then callers wait.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio
from anyio.abc import TaskGroup

from replicad.eventlog import get_logger
from replicad.loops import calling

GRACE = 2.0  # seconds for a cancelled call to return
MOST_LOST = 20  # half of the threads that trio and anyio have by default

log = get_logger(__name__)


class CallTimeout(TimeoutError):
    """A call took longer than its time limit. `lost`: it has not returned."""

    def __init__(self, limit: float, *, lost: bool) -> None:
        self.lost = lost
        super().__init__(
            f"the call was cancelled because it took longer than {limit:g} s (call_timeout)"
            + (", and it has not returned: it may run in a thread, which cannot be cancelled" if lost else "")
        )


class Calls:
    """The calls of one worker."""

    def __init__(self) -> None:
        self._tasks: TaskGroup | None = None
        self._lost = 0

    def begin(self, tasks: TaskGroup) -> None:
        """The tasks of calls live among these from now on; their end waits for lost calls."""
        self._tasks = tasks

    async def call(self, function: Callable[[], Awaitable[None]], limit: float) -> Exception | None:
        """Call the function; returns the error if it failed. A cancelled caller waits for the call to return."""
        assert self._tasks is not None
        call = _Call(function)
        self._tasks.start_soon(call.run)
        try:
            with anyio.move_on_after(limit):
                await call.ended.wait()
        except anyio.get_cancelled_exc_class():
            call.scope.cancel()
            with anyio.move_on_after(GRACE, shield=True):
                await call.ended.wait()
            raise
        if call.ended.is_set():
            return call.error
        call.scope.cancel()
        with anyio.move_on_after(GRACE):
            await call.ended.wait()
        if not call.ended.is_set() and self._lost >= MOST_LOST:
            log.error("calls_do_not_return", lost=self._lost, remedy="give the downstream's client a time limit")
            await call.ended.wait()
        if call.ended.is_set():
            return call.error if call.returned else CallTimeout(limit, lost=False)
        self._lost += 1
        call.at_end = self._end_lost
        return CallTimeout(limit, lost=True)

    def _end_lost(self) -> None:
        self._lost -= 1


class _Call:
    """One call. `returned`: it has returned or raised by itself, not because it was cancelled."""

    def __init__(self, function: Callable[[], Awaitable[None]]) -> None:
        self._function = function
        self.scope = anyio.CancelScope()
        self.ended = anyio.Event()
        self.error: Exception | None = None
        self.returned = False
        self.at_end: Callable[[], None] | None = None

    async def run(self) -> None:
        """Call the function."""
        try:
            with self.scope:
                try:
                    with calling():
                        await self._function()
                except Exception as error:  # noqa: BLE001 - of the user; the ids are tried again
                    self.error = error
                self.returned = True
        finally:
            self.ended.set()
            if self.at_end is not None:
                self.at_end()
