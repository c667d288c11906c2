"""The end of a program by SIGTERM, as systemd and `docker stop` send it: leases and slots are given back first.

Python's default for SIGTERM ends the process at once, without any `finally`. A worker's lease then stays until its time
to live has passed. Where nobody handles SIGTERM, the parts of a program that hold something end in order, and then the
signal does what it does by default. A program that handles SIGTERM itself is left alone: it cancels the parts.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio

from replicad.loops import open_plain_tasks

LONGEST = 5.0  # seconds for all parts to end; `docker stop` waits for 10, systemd for 90


class _Ends:
    """The parts of this process that end in order, each by its scope."""

    def __init__(self) -> None:
        self.scopes: set[anyio.CancelScope] = set()
        self.left = anyio.Event()

    def leave(self, scope: anyio.CancelScope) -> None:
        """The part has ended."""
        self.scopes.discard(scope)
        if not self.scopes:
            self.left.set()


_present: _Ends | None = None


@asynccontextmanager
async def ended_in_order() -> AsyncIterator[None]:
    """The block is cancelled by SIGTERM if nobody else handles it.

    When all such blocks have ended, the process ends.

    Blocks of one event loop in the main thread. Elsewhere the signal does what it did before.
    """
    global _present  # noqa: PLW0603 - signals are one thing for the whole process
    if threading.current_thread() is not threading.main_thread():  # a scope belongs to the thread of its loop
        yield
        return
    if _present is not None:
        with anyio.CancelScope() as scope:
            ends = _present
            ends.scopes.add(scope)
            try:
                yield
            finally:
                ends.leave(scope)
        return
    if signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return
    ends = _present = _Ends()
    try:
        async with open_plain_tasks() as tasks:
            with anyio.CancelScope() as scope:
                ends.scopes.add(scope)
                tasks.start_soon(_wait_for_signal, ends)
                try:
                    yield
                finally:
                    ends.leave(scope)
            if scope.cancel_called:  # the signal came: the watching task ends the process
                await anyio.sleep_forever()
            tasks.cancel_scope.cancel()
    finally:
        _present = None


async def _wait_for_signal(ends: _Ends) -> None:
    with anyio.open_signal_receiver(signal.SIGTERM) as signals:
        async for _ in signals:
            break
        for scope in list(ends.scopes):
            scope.cancel()
        with anyio.move_on_after(LONGEST, shield=True):
            if ends.scopes:
                await ends.left.wait()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.raise_signal(signal.SIGTERM)
