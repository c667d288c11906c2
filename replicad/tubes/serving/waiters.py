"""The position of each tube, and the requests that wait for pods: they are woken when their partition gets pods.

Each tube is queried in a task of its own with a time limit, so that a locked or broken table does not delay other
tubes. If the query fails, all requests that wait for the tube are woken; each then sends its own query.

A worker that has just read its partition to the end, and asks for more, sends no query of its own: the next one for all
covers it.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import trio

from replicad.daemon.troubles import Troubles
from replicad.errors import TubeError
from replicad.protocol.tokens import Cursor
from replicad.tubes.commands import Part
from replicad.tubes.serving.books import PodStore
from replicad.tubes.serving.pace import Pace

JUST_NOW = (
    1.0  # seconds since a partition was read to the end; a lease that was lost since then is found out after them
)


@dataclass(slots=True, eq=False)
class Waiter:
    """A waiting request. `wake` is called when it should look again: for a pod above `read_to`, up to which its
    partition was read. None: it looks itself, after it was added.
    """

    tube: str
    part: Part
    wake: Callable[[], None]
    read_to: int | None = None


@dataclass(frozen=True, slots=True)
class _End:
    """A lease has read its partition up to `position`, where its last pods are those of `cursor`."""

    term: int
    cursor: Cursor
    position: int
    until: float


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
        self._behind: set[str] = set()  # tubes with a waiting request that was read less far than `_seen`
        self._ends: dict[str, dict[Part, _End]] = {}  # by tube

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
        self._ends.pop(tube, None)
        self._behind.discard(tube)
        self._failing.discard(tube)
        self._troubles.end("tube", tube, "wake")
        self.wake(tube)

    async def position(self, tube: str) -> int:
        """The tube's position. Waits for the first one; then, without any, it is 0 and no pod is sent."""
        with trio.move_on_after(self._pace.first_reading):
            while tube not in self._positions:
                await self._arrived.wait()
        return self._positions.get(tube, 0)

    def note_end(self, tube: str, part: Part, term: int, cursor: Cursor, position: int) -> None:
        """This lease has read all pods up to the position; the last ones were those of the cursor."""
        until = trio.current_time() + JUST_NOW
        self._ends.setdefault(tube, {})[part] = _End(term, cursor, position, until)

    def take_end(self, tube: str, part: Part, term: int, after: Cursor) -> int | None:
        """The position up to which this lease has just read all that is behind the cursor; None if it has not.

        It is told once: who asks again was woken, so that there may be more.
        """
        end = self._ends.get(tube, {}).pop(part, None)
        if end is None or (end.term, end.cursor) != (term, after) or trio.current_time() >= end.until:
            return None
        return end.position

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
        if waiter.read_to is not None and waiter.read_to < self._seen.get(waiter.tube, waiter.read_to):
            self._behind.add(waiter.tube)
            self._moved.set()

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
                    if tube in self._looking or not self._has_moved(tube, position):
                        continue
                    if tube not in awaited:
                        self._seen[tube] = position
                        continue
                    self._looking.add(tube)
                    nursery.start_soon(self._look, tube)

    def _has_moved(self, tube: str, position: int) -> bool:
        return tube in self._behind or self._seen.get(tube) != position

    async def _look(self, tube: str) -> None:
        """Send one query for all waiting requests; repeat it while the position has changed meanwhile."""
        try:
            while (position := self._positions.get(tube)) is not None and self._has_moved(tube, position):
                before = min(self._seen.get(tube, position), position)
                self._seen[tube] = position
                self._behind.discard(tube)
                await self._wake_partitions(tube, before, position)
        finally:
            self._looking.discard(tube)

    async def _wake_partitions(self, tube: str, before: int, upto: int) -> None:
        """Wake the requests whose partition has pods up to `upto`, above `before` or what was read of it."""
        waiting = {
            waiter: before if waiter.read_to is None else waiter.read_to
            for waiter in self._waiting
            if waiter.tube == tube
        }
        after = min(waiting.values(), default=upto)
        if after >= upto:
            return
        shards = await self._shards(tube, after, upto)
        newest: dict[int, dict[int, int]] = {waiter.part.partitions: {} for waiter in waiting}
        for partitions, of in newest.items():
            for shard, seq in (shards or {}).items():
                of[shard % partitions] = max(seq, of.get(shard % partitions, 0))
        for waiter, since in waiting.items():
            if waiter not in self._waiting:
                continue
            if shards is None or newest[waiter.part.partitions].get(waiter.part.partition, 0) > since:
                waiter.wake()
            elif waiter.read_to is not None:
                waiter.read_to = max(waiter.read_to, upto)

    async def _shards(self, tube: str, after: int, upto: int) -> dict[int, int] | None:
        """The shards that got pods, each with its newest one. None if the query failed."""
        shards: dict[int, int] | None = None
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
            self._forget_ends()
            for tube in list(self._failing):
                if tube in self._positions:
                    await self._shards(tube, 0, 0)
                else:
                    self._failing.discard(tube)

    def _forget_ends(self) -> None:
        now = trio.current_time()
        for tube, ends in list(self._ends.items()):
            self._ends[tube] = {part: end for part, end in ends.items() if now < end.until}
