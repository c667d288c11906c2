"""Who waits for pods of which partition, and how far each tube may be read: waiting requests are woken when pods come.

Each tube is looked at in a task of its own, for a bounded time, so that one whose table is locked or broken keeps no
other waiting. Where it cannot be told which partitions got pods, all that wait for the tube are woken: they ask
Postgres themselves, and get its answer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import trio

from replicad.daemon.troubles import Troubles
from replicad.errors import TubeError
from replicad.tubes.commands import Part
from replicad.tubes.serving.pace import Pace


class Arrivals(Protocol):
    """Where it is learnt which partitions got pods: `PodBook`."""

    async def shards_between(self, tube: str, after: int, upto: int) -> list[int]: ...


@dataclass(slots=True, eq=False)
class Waiter:
    """A request that waits. `event` is set when it should look again; who waits again puts a new one in its place."""

    tube: str
    part: Part
    event: trio.Event


class Waiters:
    """The requests that wait for pods, and the positions of all tubes."""

    def __init__(self, pods: Arrivals, troubles: Troubles, pace: Pace = Pace()) -> None:
        self._pods = pods
        self._pace = pace
        self._troubles = troubles
        self._positions: dict[str, int] = {}
        self._seen: dict[str, int] = {}  # positions up to which those who wait have been woken
        self._moved = trio.Event()  # since the last look
        self._arrived = trio.Event()
        self._waiting: set[Waiter] = set()
        self._looking: set[str] = set()  # tubes that a task looks at
        self._failing: set[str] = set()  # tubes where the last look failed

    def note_position(self, tube: str, position: int) -> None:
        """A tube's position, as the poller learnt it."""
        if self._positions.get(tube) != position:
            self._positions[tube] = position
            self._moved.set()
            self._arrived.set()
            self._arrived = trio.Event()

    def forget(self, tube: str) -> None:
        """The tube is gone, or is another one of that name: nothing is known of its position."""
        self._positions.pop(tube, None)
        self._seen.pop(tube, None)
        self._failing.discard(tube)
        self._troubles.end("tube", tube, "wake")
        self.wake(tube)

    async def position(self, tube: str) -> int:
        """The tube's position, waited for where the daemon or the tube is new; nothing is handed out without one."""
        with trio.move_on_after(self._pace.first_reading):
            while tube not in self._positions:
                await self._arrived.wait()
        return self._positions.get(tube, 0)

    @contextmanager
    def waiting(self, tube: str, part: Part) -> Iterator[Waiter]:
        """A waiter that is woken during the block."""
        waiter = Waiter(tube, part, trio.Event())
        self._waiting.add(waiter)
        try:
            yield waiter
        finally:
            self._waiting.discard(waiter)

    def wake(self, tube: str) -> None:
        """Have all that wait for pods of the tube look again."""
        for waiter in self._waiting:
            if waiter.tube == tube:
                waiter.event.set()

    async def run(self) -> None:
        """Wake whose partitions got pods, until cancelled."""
        self._looking.clear()  # what an earlier run began has ended with it
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._look_again)
            while True:
                await self._moved.wait()
                self._moved = trio.Event()
                awaited = {waiter.tube for waiter in self._waiting}
                for tube, position in self._positions.items():
                    if tube in self._looking or self._seen.get(tube) == position:
                        continue
                    if tube not in awaited:
                        self._seen[tube] = position
                        continue
                    self._looking.add(tube)
                    nursery.start_soon(self._look, tube)

    async def _look(self, tube: str) -> None:
        """One query, however many wait; again while the position moves meanwhile."""
        try:
            while (position := self._positions.get(tube)) is not None and position != self._seen.get(tube):
                before = self._seen.get(tube, position)
                self._seen[tube] = position
                if position != before:
                    await self._wake_partitions(tube, min(before, position), position)
        finally:
            self._looking.discard(tube)

    async def _wake_partitions(self, tube: str, after: int, upto: int) -> None:
        waiting = [waiter for waiter in self._waiting if waiter.tube == tube]
        shards = await self._shards(tube, after, upto)
        for waiter in waiting:
            part = waiter.part
            if shards is None or any(shard % part.partitions == part.partition for shard in shards):
                waiter.event.set()

    async def _shards(self, tube: str, after: int, upto: int) -> list[int] | None:
        """The shards that got pods, None where that cannot be told."""
        shards: list[int] | None = None
        with self._troubles.contain("tube", tube, "wake"):
            with trio.move_on_after(self._pace.waking):
                shards = await self._pods.shards_between(tube, after, upto)
            if shards is None:
                raise TubeError(
                    f"the table of tube {tube} did not answer within {self._pace.waking:g} s: is it locked?"
                )
        if shards is None:
            self._failing.add(tube)
        else:
            self._failing.discard(tube)
        return shards

    async def _look_again(self) -> None:
        """At tubes where it failed: nothing may move there for long, and the trouble is over when they can be read."""
        while True:
            await trio.sleep(self._pace.look_again)
            for tube in list(self._failing):
                if tube in self._positions:
                    await self._shards(tube, 0, 0)
                else:
                    self._failing.discard(tube)
