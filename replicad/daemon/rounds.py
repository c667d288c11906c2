"""Large sends in rounds: so many of them in each turn of the event loop, however many clients could be sent something.

A send of a quarter of a megabyte takes the kernel some 60 to 100 microseconds. Five hundred clients that catch up at
the same time would make each turn last 20 ms, and every other client would wait for several such turns. So a task that
wants to send much waits here for its place in a round.

Most places go to the clients with the most rows to go. So clients that began a little later reach the others, and rows
that were read for one client serve all. One place in four goes to the client that has waited longest, so that each gets
its place.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import count

import trio

SENDS = 4  # of answers and old rows in a round: a quarter of a millisecond, with no loss of speed
NEW_SENDS = 16  # of new rows: with fewer, fan-out to 200 clients is some per cent slower
MUCH = 32 << 10  # bytes from which a send waits for a place; a smaller one takes about as long as waiting does
IN_ORDER = 4  # one place in so many goes to the client that has waited longest
_SPARE = 64  # entries of tasks that wait no longer, before they are removed


class Rounds(trio.abc.Instrument):
    """The places of the present round, and the tasks that wait for one. Without `run`, no task has to wait."""

    def __init__(self, sends: int) -> None:
        """`sends`: places in a round."""
        self.sends = sends
        self.waits = 0  # times that a task had to wait, since the start
        self._taken = 0  # places of this round
        self._given = 0  # places, since the start
        self._numbers = count()
        self._waiting: dict[int, trio.lowlevel.Task] = {}  # by number, in the order in which they came
        self._order: deque[int] = deque()  # these numbers; and some of tasks that wait no longer, as in the next one
        self._by_way: list[tuple[float, int]] = []  # a heap: minus the ids to go, and the number
        self._runs = False
        self._some = trio.Event()

    def before_io_wait(self, timeout: float) -> None:  # noqa: ARG002 - what trio calls it with
        """A turn of the event loop ends, and with it the round."""
        self._taken = 0

    async def next(self, to_go: float = 0.0) -> None:
        """Wait for a place; other tasks run before it returns.

        `to_go`: the number of ids that the client has before it. The client with the most comes first.
        """
        if not self._runs or (self._taken < self.sends and not self._waiting):
            self._taken += 1
            await trio.lowlevel.checkpoint()
            return
        self.waits += 1
        number = next(self._numbers)
        self._waiting[number] = trio.lowlevel.current_task()
        self._order.append(number)
        heappush(self._by_way, (-to_go, number))
        self._some.set()

        def abort(_: object) -> trio.lowlevel.Abort:
            del self._waiting[number]
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(abort)

    async def run(self) -> None:
        """Give places until cancelled. After it no task has to wait."""
        trio.lowlevel.add_instrument(self)
        self._runs = True
        try:
            while True:
                await self._some.wait()
                while self._waiting:
                    self._give(self.sends - self._taken)
                    await trio.lowlevel.checkpoint()
                self._some = trio.Event()
        finally:
            self._runs = False
            trio.lowlevel.remove_instrument(self)
            waiting, self._waiting = self._waiting, {}
            for task in waiting.values():
                trio.lowlevel.reschedule(task)

    def _give(self, places: int) -> None:
        for _ in range(min(places, len(self._waiting))):
            self._given += 1
            number = self._farthest() if self._given % IN_ORDER else self._longest()
            self._taken += 1
            trio.lowlevel.reschedule(self._waiting.pop(number))
        if len(self._order) > 2 * len(self._waiting) + _SPARE:
            self._order = deque(self._waiting)
        if len(self._by_way) > 2 * len(self._waiting) + _SPARE:
            self._by_way = [entry for entry in self._by_way if entry[1] in self._waiting]
            heapify(self._by_way)

    def _longest(self) -> int:
        """The client that has waited longest. There must be a waiting client; so in the next method."""
        while (number := self._order.popleft()) not in self._waiting:
            pass
        return number

    def _farthest(self) -> int:
        """The client with the most to go."""
        while (number := heappop(self._by_way)[1]) not in self._waiting:
            pass
        return number


@dataclass(frozen=True, slots=True)
class SendRounds:
    """The rounds of a daemon: for answers and old rows, and for new rows. The ones never wait for the others."""

    old: Rounds = field(default_factory=lambda: Rounds(SENDS))
    new: Rounds = field(default_factory=lambda: Rounds(NEW_SENDS))

    @property
    def waits(self) -> int:
        """Times that a send had to wait, since the start."""
        return self.old.waits + self.new.waits
