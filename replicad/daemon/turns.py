"""How much of one client's input is handled before others get their turn.

A session that has handled its budget waits in a queue with all others that have. Each turn of the event loop lets one
of them go on. So however many clients send as fast as they can, a turn has one budget of their work, and a client that
sends one line now and then waits for no more than that.
"""

from __future__ import annotations

import trio


class Turns:
    """The budget of a turn, and the queue of those that have used theirs up."""

    def __init__(self, lines: int, size: int) -> None:
        """`lines` and `size` (bytes) are handled in one turn."""
        self.lines = lines
        self.size = size
        self.waits = 0  # times that a session had to wait, since the start
        self._queue = trio.Lock()

    async def next(self) -> None:
        """Wait for the next turn."""
        self.waits += 1
        async with self._queue:  # one of them in each turn: the next one is woken when this one has come out
            pass
