"""How much of one client's input is handled before others get their turn.

A task with more work than the budget of a turn waits in a queue with all other such tasks. The next task of the queue
continues when the event loop has nothing else to do, and at the latest after `patience`. So work in masses uses the
remaining time. An answer that takes twenty steps between the event loop and Postgres is delayed by one budget now and
then, and not by one in each step. Waiting tasks may take turns by address: a crowd from one address then delays
another address by one turn.
"""

from __future__ import annotations

from collections.abc import Hashable

import trio

from replicad.daemon.fairness import Asker, Places

try:  # what `trio.testing` exports; importing that one imports pytest too, where it is installed
    from trio._core import wait_all_tasks_blocked  # type: ignore[attr-defined]
except ImportError:
    from trio.testing import wait_all_tasks_blocked

TURN_LINES = 16  # a quarter of a millisecond
TURN_BYTES = 8 << 10  # splitting so much into lines takes less than a millisecond, even if they are blank
PATIENCE = 0.005  # seconds; so the queue moves on even if the event loop is never idle


class YieldQueue:
    """The budget of a turn, and the queue of tasks that have used theirs up."""

    def __init__(self, lines: int = 1, size: int = 1, patience: float = PATIENCE) -> None:
        """`lines` and `size` (bytes) are handled in one turn."""
        self.lines = lines
        self.size = size
        self.waits = 0  # times that somebody had to wait, since the start
        self._patience = patience
        self._queue = Places(1)

    async def next(self, crowd: Hashable = None) -> None:
        """Wait for the next turn. `crowd`: each of them gets a turn before any gets another."""
        self.waits += 1
        async with self._queue.place(Asker(crowd)):
            with trio.move_on_after(self._patience):
                await wait_all_tasks_blocked()
