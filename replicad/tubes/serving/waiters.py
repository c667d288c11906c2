"""The position of each tube, and the requests that wait for pods: they are woken when their partition gets pods.

Each tube is queried in a task of its own with a time limit, so that a locked or broken table does not delay other
tubes. If the query fails, all requests that wait for the tube are woken; each then sends its own query.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import trio

from replicad.daemon.troubles import Troubles
from replicad.errors import TubeError
from replicad.tubes.commands import Part
from replicad.tubes.serving.books import PodStore
from replicad.tubes.serving.pace import Pace


@dataclass(slots=True, eq=False)
class Waiter:
    """A waiting request. `wake` is called when it should look again."""

    tube: str
    part: Part
    wake: Callable[[], None]


class Waiters:
    """The requests that wait for pods, and the positions of all tubes."""

    def __init__(self, pods: PodStore, troubles: Troubles, pace: Pace = Pace()) -> None:
        self._pods = pods
        self._pace = pace
        self._troubles = troubles
        self._positions: dict[str, int] = {}
        self._seen: dict[str, int] = {}  # tube: the position up to which waiting requests have been woken
        self._moved = trio.Event()  # a position has changed since `run` last looked
        self._arrived = trio.Event()  # replaced with each change of a position
        self._waiting: set[Waiter] = set()
        self._looking: set[str] = set()  # tubes for which `_look` runs
        self._failing: set[str] = set()  # tubes whose last query failed

    def note_position(self, tube: str, position: int) -> None:
        """Take a tube's position from the poller."""
        if self._positions.get(tube) != position:
            self._positions[tube] = position
            self._moved.set()
            self._arrived.set()
            self._arrived = trio.Event()

    def forget(self, tube: str) -> None:
        """The tube was dropped or replaced: forget its position."""
        self._positions.pop(tube, None)
        self._seen.pop(tube, None)
        self._failing.discard(tube)
        self._troubles.end("tube", tube, "wake")
        self.wake(tube)

    async def position(self, tube: str) -> int:
        """The tube's position. Waits for the first one; then, without any, it is 0 and no pod is sent."""
        with trio.move_on_after(self._pace.first_reading):
            while tube not in self._positions:
                await self._arrived.wait()
        return self._positions.get(tube, 0)

    @contextmanager
    def waiting(self, waiter: Waiter) -> Iterator[None]:
        """Wake this request during the block."""
        self.add(waiter)
        try:
            yield
        finally:
            self.remove(waiter)

    def add(self, waiter: Waiter) -> None:
        """Wake this request from now on."""
        self._waiting.add(waiter)

    def remove(self, waiter: Waiter) -> None:
        """Wake it no more; safe to repeat."""
        self._waiting.discard(waiter)

    def count(self, tube: str) -> int:
        """How many requests wait for pods of the tube."""
        return sum(waiter.tube == tube for waiter in self._waiting)

    def wake(self, tube: str, but: Container[int] = ()) -> None:
        """Wake all requests that wait for pods of the tube, without those under such numbers of partitions."""
        for waiter in [one for one in self._waiting if one.tube == tube and one.part.partitions not in but]:
            waiter.wake()

    async def run(self) -> None:
        """Wake requests whose partitions got pods, until cancelled."""
        self._looking.clear()  # the tasks of an earlier run have ended with it
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
        """Send one query for all waiting requests; repeat it while the position has changed meanwhile."""
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
        got = {n: {shard % n for shard in shards or ()} for n in {waiter.part.partitions for waiter in waiting}}
        for waiter in waiting:
            if waiter in self._waiting and (shards is None or waiter.part.partition in got[waiter.part.partitions]):
                waiter.wake()

    async def _shards(self, tube: str, after: int, upto: int) -> list[int] | None:
        """The shards that got pods. None if the query failed."""
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
        """Repeat failed queries, to end the trouble when the tube can be read: its position may not change for long."""
        while True:
            await trio.sleep(self._pace.look_again)
            for tube in list(self._failing):
                if tube in self._positions:
                    await self._shards(tube, 0, 0)
                else:
                    self._failing.discard(tube)
