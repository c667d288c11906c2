"""Runs the callbacks of the driver's loop in few turns of trio.

trio_asyncio gives each callback of asyncio a turn of trio of its own, in which the kernel is asked for events. One
answer of Postgres is three to five callbacks. Here queued callbacks run one after the other, as in asyncio itself, and
callbacks that follow from an answer run in the task that has read it. A short statement then takes half to two thirds
of the processor time (measured), and the poller sends hundreds a second.

It replaces private parts of trio_asyncio's loop. A version that lacks any of these parts is left unchanged.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import trio

MOST = 64  # callbacks in one turn; then other tasks of trio run
_REPLACED = ("_q_send", "_q_recv", "_main_loop_one", "_add_reader", "_check_callback", "synchronize")


def hasten(loop: Any) -> None:
    """Let this loop, which was opened just now, run its callbacks in few turns."""
    if not all(hasattr(loop, name) for name in _REPLACED):
        return
    loop.call_soon(_nothing)  # the main loop waits in the queue that is replaced
    queue = _CallbackQueue()
    loop._q_send = loop._q_recv = queue
    loop._check_callback = _nothing  # looks for mistakes of programmers; asyncio's own loop does so in debug mode only
    loop._main_loop_one = partial(_run_some, queue, loop._main_loop_one)
    loop._add_reader = partial(_add_reader, queue, loop._add_reader)
    loop.synchronize = partial(_synchronize, queue, loop.synchronize)


class _CallbackQueue:
    """The queue of work, both ends of it: callbacks, timers, and trio functions that are to be started."""

    def __init__(self) -> None:
        self.held = False  # a task runs the callbacks that come now itself
        self._handles: deque[asyncio.Handle] = deque()
        self._arrived = trio.Event()

    def send_nowait(self, handle: asyncio.Handle) -> None:
        self._handles.append(handle)
        if not self.held:
            self._arrived.set()

    async def receive(self) -> asyncio.Handle:
        if self._handles:
            await trio.lowlevel.checkpoint()  # other tasks run between two of our turns
        while not self._handles:
            self._arrived = trio.Event()
            await self._arrived.wait()
        return self._handles.popleft()

    def receive_nowait(self) -> asyncio.Handle:
        if not self._handles:
            raise trio.WouldBlock
        return self._handles.popleft()

    def run_nowait(self) -> None:
        """Run the callbacks that come first. The main loop is woken for the rest, which need not be callbacks."""
        for _ in range(MOST):
            if not self._handles or type(self._handles[0]) is not asyncio.Handle:
                break
            handle = self._handles.popleft()
            if not handle.cancelled():
                handle._run()
        if self._handles:
            self._arrived.set()

    @property
    def empty(self) -> bool:
        return not self._handles


async def _run_some(queue: _CallbackQueue, run_one: Callable[[bool], Any], no_wait: bool = False) -> None:
    """In place of the method that waits for one callback and runs it: run those, too, that are queued then."""
    await run_one(no_wait)
    if not no_wait:
        queue.run_nowait()


def _add_reader(
    queue: _CallbackQueue, add: Callable[..., Any], fd: int, callback: Callable[..., None], *args: object
) -> Any:
    """In place of the method that calls `callback` when there is something to read. `synchronize` is called next."""

    def read() -> None:
        queue.held = True
        try:
            callback(*args)
        finally:
            queue.held = False

    return add(fd, read)


async def _synchronize(queue: _CallbackQueue, synchronize: Callable[[], Any]) -> None:
    """In place of the method that waits until all that is queued by now was run."""
    queue.run_nowait()
    if not queue.empty:
        await synchronize()


def _nothing(*_: object) -> None:
    pass
