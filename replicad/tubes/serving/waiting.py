"""The requests that wait: for a partition (CLAIM), for pods (PODS), and for a READY.

A CLAIM that waits costs no query. The service reads all leases every second anyway; the first reading that shows the
partition free wakes the claim. A RELEASE through this daemon wakes it at once.

A PODS that waits is woken when its partition gets pods. Each tube is queried in a task of its own with a time limit, so
a locked or broken table does not delay other tubes. If the query fails, all requests that wait for the tube are woken,
and each of them sends its own query. A worker that has just read its partition to the end and asks for more sends no
query of its own: the next query of the tube covers it.

A request with `ready=1` leaves an entry and no task. There is one entry for each client and partition; the next request
about the partition replaces it. The entry ends when READY was sent, when its time is over, or with the connection.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import gcd

import trio

from replicad.daemon.session import Session
from replicad.daemon.troubles import Restarts, Troubles
from replicad.errors import LeaseHeld, TubeError
from replicad.protocol.tokens import Cursor
from replicad.tubes import backfill, bulk
from replicad.tubes.commands import Part, Ready
from replicad.tubes.leases import LeaseHolder, LeaseView, without_tags
from replicad.tubes.pods import PodBook


@dataclass(frozen=True, slots=True)
class TubeIntervals:
    """Intervals and limits of waits of the service of tubes, in seconds."""

    look: float = 1.0  # between two looks at all leases and all tubes; leases live for several of them
    first_reading: float = 2.0  # to wait for the first position of a tube; only an open transaction takes longer
    waking: float = 1.0  # that the query for new pods may take; then all requests that wait for the tube are woken
    look_again: float = 1.0  # before a query for new pods that failed is repeated
    backfills: backfill.BackfillIntervals = backfill.BackfillIntervals()
    blocks: bulk.Sizes = bulk.Sizes()
    restarts: Restarts = Restarts()


@dataclass(slots=True, eq=False)
class ClaimWaiter:
    """A claim that waits. `wake` is called when the claim should be tried again.

    `part` None: no claim, but a worker that waits until a lease of the tube is over.
    """

    tube: str
    part: Part | None
    holder: LeaseHolder
    wake: Callable[[], None]


class ClaimWaiters:
    """The leases of all tubes at the last look, and the claims that wait."""

    def __init__(self) -> None:
        self._leases: dict[str, dict[int, dict[int, LeaseView]]] = {}  # by tube, partitions, partition; none expired
        self._expired: dict[str, list[int]] = {}  # tube: beats of expired leases
        self._waiting: set[ClaimWaiter] = set()

    def note(self, leases: Iterable[LeaseView]) -> None:
        """Store the leases of one reading, and wake the claims whose partition is free."""
        before, self._leases, self._expired = self._leases, {}, {}
        for lease in leases:
            if lease.expired:
                self._expired.setdefault(lease.tube, []).append(lease.beat)
            else:
                self._leases.setdefault(lease.tube, {}).setdefault(lease.partitions, {})[lease.partition] = lease
        over = {tube for tube, parted in before.items() if self._is_one_over(tube, parted)}
        self._wake(one for one in self._waiting if one.part is not None or one.tube in over)

    def _is_one_over(self, tube: str, before: Mapping[int, Mapping[int, LeaseView]]) -> bool:
        present = self._leases.get(tube, {})
        return any(leases.keys() - present.get(partitions, {}).keys() for partitions, leases in before.items())

    def forget(self) -> None:
        """The leases cannot be read: wake all claims, whose own statements then show the error."""
        self.note(())

    def released(self, tube: str, part: Part) -> None:
        """A lease was released through this daemon."""
        was_seen = self._leases.get(tube, {}).get(part.partitions, {}).pop(part.partition, None) is not None
        self._wake(one for one in self._waiting if one.tube == tube and (was_seen or one.part is None))

    def wake(self, tube: str, but: Container[int] = ()) -> None:
        """Wake all claims of a tube, except the claims for a number of partitions in `but`."""
        for claimant in [one for one in self._waiting if one.tube == tube]:
            if claimant.part is None or claimant.part.partitions not in but:
                claimant.wake()

    def expired(self, tube: str) -> list[int]:
        """The beats of the tube's expired leases."""
        return self._expired.get(tube, [])

    def taken(self, tube: str, part: Part, holder: LeaseHolder) -> LeaseHeld | None:
        """The refusal of a claim, as Postgres would give it; None if the partition was free at the last look."""
        for partitions, leases in self._leases.get(tube, {}).items():
            step = gcd(partitions, part.partitions)
            for partition in range(part.partition % step, partitions, step):
                lease = leases.get(partition)
                same = Part(partition, partitions) == part
                if lease is not None and not (same and lease.holder in (holder.stored, holder.name)):
                    return LeaseHeld(
                        f"partition {partition}/{partitions} of tube {tube!r} is held by {without_tags(lease.holder)}. "
                        "wait until it is released, or until its time to live has passed without a sign of life."
                    )
        return None

    @contextmanager
    def waiting(self, claimant: ClaimWaiter) -> Iterator[None]:
        """Wake this claim during the block."""
        self.add(claimant)
        try:
            yield
        finally:
            self.remove(claimant)

    def add(self, claimant: ClaimWaiter) -> None:
        """Wake this claim from now on."""
        self._waiting.add(claimant)

    def remove(self, claimant: ClaimWaiter) -> None:
        """Wake this claim no more; safe to repeat."""
        self._waiting.discard(claimant)

    def _wake(self, claimants: Iterable[ClaimWaiter]) -> None:
        free = [one for one in claimants if one.part is None or self.taken(one.tube, one.part, one.holder) is None]
        for claimant in free:
            claimant.wake()


EARLY_AFTER = 0.02  # seconds without a move of a position before pods above it are read: most transactions are shorter
EARLY_FIRST = 0.004  # seconds between two looks for pods above a position that is held back; each takes 0.3 ms
EARLY_GROWTH = 1.2  # of that pause while no seq is given out
EARLY_LONGEST = 0.02
JUST_NOW = 1.0  # seconds since a partition was read to the end; the loss of a lease is noticed at the latest after them


@dataclass(slots=True, eq=False)
class PodWaiter:
    """A waiting request. `wake` is called when the request should be tried again.

    `read_to`: the position up to which its partition was read; a pod above it wakes the request. None: the request
    sends its own query after it was added. `early`: a pod above the tube's position wakes it too, if it has none of
    these seqs.
    """

    tube: str
    part: Part
    wake: Callable[[], None]
    read_to: int | None = None
    early: frozenset[int] | None = None


@dataclass(frozen=True, slots=True)
class _End:
    """A lease has read its partition up to `position`; its last pods are the pods of `cursor`."""

    term: int
    cursor: Cursor
    position: int
    until: float


class PodWaiters:
    """The requests that wait for pods, and the positions of all tubes."""

    def __init__(self, pods: PodBook, troubles: Troubles, pace: TubeIntervals = TubeIntervals()) -> None:
        self._pods = pods
        self._pace = pace
        self._troubles = troubles
        self._positions: dict[str, int] = {}
        self._seen: dict[str, int] = {}  # tube: the position up to which waiting requests have been woken
        self._moved = trio.Event()  # a position has changed since `run` last looked
        self._arrived = trio.Event()  # replaced with each change of a position
        self._waiting: set[PodWaiter] = set()
        self._looking: set[str] = set()  # tubes for which `_look` runs
        self._failing: set[str] = set()  # tubes whose last query failed
        self._behind: set[str] = set()  # tubes with a waiting request that was read less far than `_seen`
        self._last_values: dict[str, int] = {}  # the last seqs of tubes whose position is held back below it
        self._stood_at: dict[str, float] = {}  # when the position of a tube moved last
        self._looking_early: set[str] = set()  # tubes for which `_look_early` runs
        self._ends: dict[str, dict[Part, _End]] = {}  # by tube
        self._paused: set[str] = set()  # tubes whose pods no reader gets now

    def pause(self, tube: str, *, paused: bool) -> None:
        """Wake no request for pods of the tube while it is paused; wake all at the end of the pause. Safe to repeat."""
        if paused:
            self._paused.add(tube)
        elif tube in self._paused:
            self._paused.remove(tube)
            self._moved.set()
            self.wake(tube)

    def is_paused(self, tube: str) -> bool:
        """Whether no reader gets pods of the tube now."""
        return tube in self._paused

    def note_position(self, tube: str, position: int, last_value: int | None = None) -> None:
        """Take a tube's position from the poller, and the last seq that was given out."""
        if last_value is None or last_value <= position:
            self._last_values.pop(tube, None)
        elif self._last_values.get(tube) != last_value:
            self._last_values[tube] = last_value
            self._moved.set()
        if self._positions.get(tube) != position:
            self._positions[tube] = position
            self._stood_at[tube] = trio.current_time()
            self._moved.set()
            self._arrived.set()
            self._arrived = trio.Event()

    def is_held(self, tube: str) -> bool:
        """Whether more than a short transaction holds the position back, so that pods above it are worth a read."""
        return tube in self._last_values and trio.current_time() >= self._stood_at.get(tube, 0.0) + EARLY_AFTER

    def note_unknown(self, tube: str, last_value: int | None) -> None:
        """There is no position, because transactions from before the first poll are open: only early pods are sent."""
        if not self._positions.get(tube) and last_value is not None:
            self.note_position(tube, 0, last_value)

    def forget(self, tube: str) -> None:
        """The tube was dropped or replaced: forget its position."""
        self._positions.pop(tube, None)
        self._seen.pop(tube, None)
        self._ends.pop(tube, None)
        self._last_values.pop(tube, None)
        self._behind.discard(tube)
        self._failing.discard(tube)
        self._troubles.end("tube", tube, "wake")
        self.wake(tube)

    def known_position(self, tube: str) -> int | None:
        """The tube's position; None before the first reading."""
        return self._positions.get(tube)

    async def position(self, tube: str) -> int:
        """The tube's position. Waits for the first one; then, without any, it is 0 and no pod is sent."""
        known = self._positions.get(tube)  # nearly always: each read asks two or three times
        if known is not None:
            return known
        with trio.move_on_after(self._pace.first_reading):
            while tube not in self._positions:
                await self._arrived.wait()
        return self._positions.get(tube, 0)

    def note_end(self, tube: str, part: Part, term: int, cursor: Cursor, position: int) -> None:
        """This lease has read all pods up to the position; its last pods are the cursor's."""
        until = trio.current_time() + JUST_NOW
        self._ends.setdefault(tube, {})[part] = _End(term, cursor, position, until)

    def take_end(self, tube: str, part: Part, term: int, after: Cursor) -> int | None:
        """The position up to which this lease has just read all pods behind the cursor; None if it has not.

        Returns the position once. A second call means that the worker was woken and new pods may exist.
        """
        end = self._ends.get(tube, {}).pop(part, None)
        if end is None or (end.term, end.cursor) != (term, after) or trio.current_time() >= end.until:
            return None
        return end.position

    @contextmanager
    def waiting(self, waiter: PodWaiter) -> Iterator[None]:
        """Wake this request during the block."""
        self.add(waiter)
        try:
            yield
        finally:
            self.remove(waiter)

    def add(self, waiter: PodWaiter) -> None:
        """Wake this request from now on."""
        self._waiting.add(waiter)
        if waiter.early is not None and waiter.tube in self._last_values and waiter.tube not in self._looking_early:
            self._moved.set()
        if waiter.read_to is not None and waiter.read_to < self._seen.get(waiter.tube, waiter.read_to):
            self._behind.add(waiter.tube)
            self._moved.set()

    def remove(self, waiter: PodWaiter) -> None:
        """Wake this request no more; safe to repeat."""
        self._waiting.discard(waiter)

    def count(self, tube: str) -> int:
        """How many requests wait for pods of the tube."""
        return sum(waiter.tube == tube for waiter in self._waiting)

    def wake(self, tube: str, but: Container[int] = ()) -> None:
        """Wake all requests that wait for pods of the tube, except requests for a number of partitions in `but`."""
        for waiter in [one for one in self._waiting if one.tube == tube and one.part.partitions not in but]:
            waiter.wake()

    async def run(self) -> None:
        """Wake requests whose partitions got pods, until cancelled."""
        self._looking_early.clear()
        self._looking.clear()  # the tasks of an earlier run have ended with it
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._look_again)
            while True:
                await self._moved.wait()
                self._moved = trio.Event()
                awaited = {waiter.tube for waiter in self._waiting}
                for tube in {waiter.tube for waiter in self._waiting if waiter.early is not None}:
                    if tube in self._last_values and tube not in self._looking_early | self._paused:
                        self._looking_early.add(tube)
                        nursery.start_soon(self._look_early, tube)
                for tube, position in self._positions.items():
                    if tube in self._looking or tube in self._paused or not self._has_moved(tube, position):
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

    async def _look_early(self, tube: str) -> None:
        """Look for pods above the position while it is held back and requests wait for them.

        A transaction that commits above the position changes neither the position nor the sequence, so the looks are
        repeated: every EARLY_FIRST seconds while new seqs are given out, then more rarely.
        """
        pause, before = EARLY_FIRST, None
        try:
            while (
                tube in self._last_values
                and tube not in self._paused
                and any(one.tube == tube and one.early is not None for one in self._waiting)
            ):
                last_value = self._last_values[tube]
                pause = EARLY_FIRST if last_value != before else min(pause * EARLY_GROWTH, EARLY_LONGEST)
                before = last_value
                if self.is_held(tube):
                    await self._wake_early(tube)
                await trio.sleep(pause)
        finally:
            self._looking_early.discard(tube)

    async def _wake_early(self, tube: str) -> None:
        """Wake the requests whose partition has pods above the position that they do not have."""
        position = self._positions.get(tube)
        if position is None:
            return
        found: list[tuple[int, int]] = []
        with self._troubles.contain("tube", tube, "wake"), trio.move_on_after(self._pace.waking):
            found = await self._pods.seqs_above(tube, position)
        for waiter in [one for one in self._waiting if one.tube == tube and one.early is not None]:
            part, has = waiter.part, waiter.early or ()
            if any(shard % part.partitions == part.partition and seq not in has for seq, shard in found):
                waiter.wake()

    async def _wake_partitions(self, tube: str, before: int, upto: int) -> None:
        """Wake the requests whose partition has pods up to `upto`, and above `before` or the request's `read_to`."""
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


_Place = tuple[str, Part | None]  # a tube and a partition; None: any lease of the tube


@dataclass(frozen=True, slots=True)
class _Entry:
    until: float  # READY is sent up to then
    end: Callable[[], None]


class Readiness:
    """The clients that want READY."""

    def __init__(self, waiters: PodWaiters, claim_waiters: ClaimWaiters) -> None:
        self._waiters = waiters
        self._claim_waiters = claim_waiters
        self._wanted: dict[int, dict[_Place, _Entry]] = {}  # by the number of the client's connection

    def want_pods(
        self,
        peer: Session,
        tube: str,
        part: Part,
        until: float,
        read_to: int | None,
        *,
        early: frozenset[int] | None = None,
    ) -> None:
        """Send READY when the partition gets pods. `read_to`, `early`: as in `PodWaiter`."""
        waiter = PodWaiter(tube, part, partial(self._send, peer, tube, part), read_to, early)
        self._waiters.add(waiter)
        self._put(peer, (tube, part), _Entry(until, partial(self._waiters.remove, waiter)))

    def want_lease(self, peer: Session, tube: str, part: Part, holder: LeaseHolder, until: float) -> None:
        """Send READY when the partition is free for this holder."""
        claimant = ClaimWaiter(tube, part, holder, partial(self._send, peer, tube, part))
        self._claim_waiters.add(claimant)
        self._put(peer, (tube, part), _Entry(until, partial(self._claim_waiters.remove, claimant)))

    def want_share(self, peer: Session, tube: str, holder: LeaseHolder, until: float) -> None:
        """Send READY for the whole tube when a lease of it is over."""
        claimant = ClaimWaiter(tube, None, holder, partial(self._send, peer, tube, None))
        self._claim_waiters.add(claimant)
        self._put(peer, (tube, None), _Entry(until, partial(self._claim_waiters.remove, claimant)))

    def drop(self, peer: Session, tube: str, part: Part | None) -> None:
        """Send no READY for this partition; safe to repeat."""
        entry = self._wanted.get(peer.number, {}).pop((tube, part), None)
        if entry is not None:
            entry.end()

    def drop_late(self) -> None:
        """End the entries whose time is over. Call it regularly."""
        now = trio.current_time()
        for wanted in self._wanted.values():
            for place in [place for place, entry in wanted.items() if entry.until < now]:
                wanted.pop(place).end()

    def _put(self, peer: Session, place: _Place, entry: _Entry) -> None:
        self.drop(peer, *place)
        if peer.number not in self._wanted:
            self._wanted[peer.number] = {}
            peer.at_end(partial(self._drop_all, peer.number))
        self._wanted[peer.number][place] = entry

    def _drop_all(self, number: int) -> None:
        for entry in self._wanted.pop(number, {}).values():
            entry.end()

    def _send(self, peer: Session, tube: str, part: Part | None) -> None:
        self.drop(peer, tube, part)
        if peer.access.may("work", tube):  # the right may have been withdrawn meanwhile
            peer.post(Ready(tube, part or Part(0, 1)))
