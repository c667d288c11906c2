"""Delivers to the destinations that are due, with a bounded number of workers. No intake, no SQL, no HTTP.

A destination has no task of its own; ten thousand idle ones cost only entries in a table. Sets of workers serve the
destinations that are due (`DestinationQueues`), so the time-outs of destinations that are down do not delay the
others.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import random

import structlog
import trio

from replicad.errors import ReplicadError, RouteFailed
from replicad.postgres.bridge import Database
from replicad.sender.destination import Destination
from replicad.sender.items import DestinationState, Edu, Memory, OutstandingPage, Pdu, Transaction
from replicad.sender.settings import Terms
from replicad.sender.store import Entry, SenderStore
from replicad.sender.transport import HttpTransport, SendResult

_SLACK = 64  # stale entries that do not cause a rebuild


class Agenda:
    """At most one time per name; memory in proportion to the names, however often they are put."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, str]] = []
        self._current: dict[str, tuple[float, int]] = {}
        self._count = 0

    def __len__(self) -> int:
        return len(self._current)

    def put(self, name: str, at: float) -> None:
        """Make `name` due at `at`. An earlier entry of it is replaced."""
        if name in self._current and self._current[name][0] == at:
            return
        self._count += 1
        self._current[name] = (at, self._count)
        heapq.heappush(self._heap, (at, self._count, name))
        if len(self._heap) > 2 * len(self._current) + _SLACK:
            self._heap = [(when, count, known) for known, (when, count) in self._current.items()]
            heapq.heapify(self._heap)

    def drop(self, name: str) -> None:
        """Remove `name`."""
        self._current.pop(name, None)

    def pop_due(self, now: float) -> list[str]:
        """Take out all that are due at `now`, the earliest first, in the order of `put` where times are equal."""
        due = []
        while self._heap and self._heap[0][0] <= now:
            at, count, name = heapq.heappop(self._heap)
            if self._current.get(name) == (at, count):
                del self._current[name]
                due.append(name)
        return due

    def next_time(self) -> float | None:
        """The time at which the next destination is due, or None."""
        while self._heap and self._current.get(self._heap[0][2]) != self._heap[0][:2]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None


AWAY_SHARE = 4  # a quarter of the probes


class DestinationQueue:
    """A queue of destinations that are due, each once. Workers wait for them."""

    def __init__(self) -> None:
        self.due: OrderedDict[str, Destination] = OrderedDict()
        self._idle = trio.lowlevel.ParkingLot()
        self._closed = False

    def put(self, destination: Destination) -> None:
        """Queue a destination that is not queued."""
        self.due[destination.name] = destination
        self._idle.unpark()

    async def take(self) -> Destination | None:
        """Wait for the next one. None after `close`."""
        while not self.due and not self._closed:
            await self._idle.park()
        return None if self._closed else self.due.popitem(last=False)[1]

    def close(self) -> None:
        """Give out nothing more."""
        self._closed = True
        self._idle.unpark_all()


class DestinationQueues:
    """All queues; a destination is in one at most. `crews`: each queue with the number of its workers."""

    def __init__(self, workers: int, probers: int) -> None:
        """`probers`: workers for destinations that are not proven, 2 at least."""
        self._proven, self._probing, self._away = DestinationQueue(), DestinationQueue(), DestinationQueue()
        away = max(1, probers // AWAY_SHARE)
        self.crews = ((self._proven, workers), (self._probing, max(1, probers - away)), (self._away, away))

    def __len__(self) -> int:
        return sum(len(lane.due) for lane, _ in self.crews)

    def __contains__(self, destination: Destination) -> bool:
        name = destination.name
        return name in self._proven.due or name in self._probing.due or name in self._away.due

    def put(self, destination: Destination) -> None:
        """Queue a destination that is not queued, in the lane where it belongs now."""
        lane = self._proven if destination.proven else self._away if destination.away else self._probing
        lane.put(destination)

    def remove(self, destination: Destination) -> None:
        """Take a destination out of its queue, if it is queued."""
        for lane, _ in self.crews:
            lane.due.pop(destination.name, None)

    def close(self) -> None:
        """Give out nothing more."""
        for lane, _ in self.crews:
            lane.close()


MOST = 1000  # entries in a statement, so that the cost of a commit is small


@dataclass(slots=True)
class _FactBatch:
    entries: dict[str, Entry] = field(default_factory=dict)
    written: trio.Event = field(default_factory=trio.Event)


class StateWriter:
    """Stores the state of destinations, many in one statement. Entries posted meanwhile go into the next statement.

    A thousand destinations then cost a few commits and not a thousand. Of each destination the last entry counts.
    `run` writes. If it raises, calls of `write` that wait never return."""

    def __init__(self, store: SenderStore) -> None:
        self._store = store
        self._next = _FactBatch()
        self._running: _FactBatch | None = None
        self._work = trio.Event()

    def post(self, entry: Entry) -> None:
        """Write an entry soon. It replaces one for the same destination that still waits."""
        before = self._next.entries.get(entry.name)
        if before is not None:
            entry = replace(entry, done_edus=before.done_edus + entry.done_edus, parked=before.parked + entry.parked)
        self._next.entries[entry.name] = entry
        self._work.set()

    async def write(self, entry: Entry) -> None:
        """Write an entry; returns when it is stored."""
        self.post(entry)
        await self._next.written.wait()

    async def settle(self, name: str) -> None:
        """Wait until no entry of a destination waits to be written."""
        for batch in (self._running, self._next):
            if batch is not None and name in batch.entries:
                await batch.written.wait()

    async def drain(self) -> None:
        """Wait until no entry waits to be written."""
        while self.waiting:
            await (self._running or self._next).written.wait()

    @property
    def waiting(self) -> int:
        """Entries that are not written yet."""
        return len(self._next.entries) + (len(self._running.entries) if self._running else 0)

    async def run(self) -> None:
        """Write until cancelled."""
        while True:
            await self._work.wait()
            self._work = trio.Event()
            await self.flush()

    async def flush(self) -> None:
        """Write all entries now. Only for `run`, and after `run` has ended."""
        self._running, self._next = self._next, _FactBatch()
        entries = list(self._running.entries.values())
        for start in range(0, len(entries), MOST):
            await self._store.write(entries[start : start + MOST])
        self._running.written.set()
        self._running = None


class SqlLatest:
    """The application's knowledge of its rooms.

    `sql`: a query of `$1` destination and `$2` rooms (text[]) that returns `room` and `pdu` (json).
    """

    def __init__(self, db: Database, sql: str) -> None:
        self._db = db
        self._sql = sql

    async def latest(self, destination: str, rooms: Sequence[str]) -> Mapping[str, Sequence[str]]:
        """The latest facts (JSON text, oldest first) of the rooms whose facts the destination may have.

        Rooms are left out if the destination may not have them, or if that is unknown (rooms of partial state).
        Raises RouteFailed if the query returns something else.
        """
        found: dict[str, list[str]] = {}
        for row in await self._db.fetch(self._sql, destination, list(rooms)):
            if not isinstance(row["pdu"], str):
                raise RouteFailed(f"--latest-sql returned {type(row['pdu']).__name__} as pdu of room {row['room']!r}")
            found.setdefault(row["room"], []).append(row["pdu"])
        return found


async def stand_in(page: OutstandingPage, destination: str, source: SqlLatest, most: int) -> OutstandingPage:
    """The page, with the facts of a room replaced by its latest ones, if there are any; at most `most` of a room."""
    rooms = list(dict.fromkeys(pdu.room for pdu in page.pdus if pdu.room is not None))
    found = await source.latest(destination, rooms) if rooms else {}
    pdus: list[Pdu] = []
    for pdu in page.pdus:
        bodies = found.get(pdu.room) if pdu.room is not None else None
        if bodies:
            pdus.extend(Pdu(pdu.order, pdu.room, body, substituted=True) for body in bodies[-most:])
        else:
            pdus.append(pdu)
    return replace(page, pdus=tuple(pdus))


TURN = 4  # transactions in a row for one destination while others wait
_PAGES = 4  # transactions that are read from the store at once, unless it is for catch-up

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class EngineStatistics:
    """A moment of the engine. The last five count since its creation; `memory` in bytes. `parked`: refused items."""

    destinations: int
    waiting: int
    in_flight: int
    backing_off: int
    catching_up: int
    memory: int
    transactions: int
    facts: int
    failures: int
    dropped_updates: int
    parked: int


class Engine:
    """See the module. All methods are called in one trio thread; `run` does the work."""

    def __init__(
        self,
        store: SenderStore,
        transport: HttpTransport,
        terms: Terms,
        *,
        source: str = "",
        memory: int,
        workers: int,
        probers: int,
        latest: SqlLatest | None = None,
        now: Callable[[], float] = trio.current_time,
        now_ms: Callable[[], int],
        chance: Callable[[], float] = random,
    ) -> None:
        """`source` is the store's source; `memory` bounds the bodies in all queues (bytes); `now` is monotonic
        (seconds), `now_ms` the wall clock.
        """
        self.states = StateWriter(store)
        self._store = store
        self._transport = transport
        self._terms = terms
        self._source = source
        self._memory = Memory(memory)
        self._latest = latest
        self._now = now
        self._now_ms = now_ms
        self._chance = chance
        self._destinations: dict[str, Destination] = {}
        self._lanes = DestinationQueues(workers, probers)
        self._agenda = Agenda()
        self._collapsing: set[str] = set()  # these are not visited
        self._sooner = trio.Event()
        self._in_flight = 0
        self._closed = False
        self._counts: Counter[str] = Counter()

    # --- facts and updates ---

    def __contains__(self, name: str) -> bool:
        return name in self._destinations

    def __iter__(self) -> Iterator[str]:
        return iter(self._destinations)

    def meet(self, name: str, standing: DestinationState) -> None:
        """Add a destination of the store; deliver its outstanding items."""
        self._arrange(self._make(name, standing))

    def has_had(self, name: str, pdu: Pdu) -> bool:
        """Whether a fact was already recorded for a destination, or accepted by it."""
        known = self._destinations.get(name)
        return known is not None and pdu.order <= known.newest

    def accept(self, facts: Iterable[tuple[Pdu, Iterable[str]]]) -> None:
        """Deliver facts to destinations, in order. They are stored already."""
        now = self._now()
        new: dict[str, Destination] = {}
        for pdu, names in facts:
            for name in names:
                destination = self._known(name)
                if destination.enqueue(pdu, now):
                    new[name] = destination
        for destination in new.values():
            self._arrange(destination)

    def accept_edu(self, edu: Edu, names: Iterable[str]) -> None:
        """Deliver an update that may be dropped."""
        for name in names:
            destination = self._known(name)
            destination.enqueue_edu(edu)
            self._arrange(destination)

    def expect_edus(self, names: Iterable[str], *, pdus: bool = False) -> None:
        """Deliver updates that were stored, and facts that were stored but not given to `accept`."""
        for name in names:
            destination = self._known(name)
            destination.expect_edus(self._now(), pdus=pdus)
            self._arrange(destination)

    def wake(self, name: str) -> None:
        """A destination is reported to be up again: end its back-off."""
        destination = self._destinations.get(name)
        if destination is not None:
            destination.wake(self._now())
            self._lanes.remove(destination)  # it may belong into another one now
            self._arrange(destination)

    # --- work ---

    async def run(self) -> None:
        """Deliver until `close`; raises what the store raises."""
        async with trio.open_nursery() as services:
            services.start_soon(self.states.run)
            services.start_soon(self._watch_clock)
            async with trio.open_nursery() as workers:
                for lane, count in self._lanes.crews:
                    for _ in range(count):
                        workers.start_soon(self._work, lane)
            await self.states.drain()
            services.cancel_scope.cancel()

    def close(self) -> None:
        """Begin no new request. `run` returns when the requests under way have ended and their results are stored."""
        self._closed = True
        self._lanes.close()

    async def collapse(self) -> None:
        """Remove from the store what destinations in catch-up no longer need. Call it now and then.

        Not the facts of destinations with facts in memory: their transactions are stored by the places of the facts.
        """
        known = self._destinations.values()
        names = {one.name for one in known if one.catching_up and not one.holds_facts}
        if self._terms.supersede and names:
            self._collapsing = names
            try:
                await self._store.collapse(list(names))
            finally:
                self._collapsing = set()
                for name in names:
                    self._arrange(self._destinations[name])

    def statistics(self) -> EngineStatistics:
        """A frozen copy of the counters; takes time in proportion to the destinations."""
        known = self._destinations.values()
        return EngineStatistics(
            destinations=len(known),
            waiting=len(self._lanes),
            in_flight=self._in_flight,
            backing_off=sum(destination.retry_at is not None for destination in known),
            catching_up=sum(destination.catching_up for destination in known),
            memory=self._memory.held,
            transactions=self._counts["transactions"],
            facts=self._counts["facts"],
            failures=self._counts["failures"],
            dropped_updates=sum(destination.dropped for destination in known),
            parked=self._counts["parked"],
        )

    def _known(self, name: str) -> Destination:
        found = self._destinations.get(name)
        if found is None:
            found = self._make(name)
        return found

    def _make(self, name: str, standing: DestinationState | None = None) -> Destination:
        made = Destination(name, self._terms, self._memory, self._now(), standing, source=self._source)
        self._destinations[name] = made
        return made

    def _arrange(self, destination: Destination) -> None:
        """Enter it in the agenda for the time at which it is due."""
        if destination in self._lanes or destination.name in self._collapsing:
            return
        now = self._now()
        due = destination.due(now)
        if due is None:
            return
        if due > now:
            self._agenda.put(destination.name, due)
            if due == self._agenda.next_time():
                self._sooner.set()
        else:
            self._agenda.drop(destination.name)
            self._lanes.put(destination)

    async def _watch_clock(self) -> None:
        while True:
            for name in self._agenda.pop_due(self._now()):
                self._arrange(self._destinations[name])
            due = self._agenda.next_time()
            self._sooner = trio.Event()
            with trio.CancelScope() as scope:
                if due is not None:
                    scope.deadline = trio.current_time() + max(0.0, due - self._now())
                await self._sooner.wait()

    async def _work(self, lane: DestinationQueue) -> None:
        while (destination := await lane.take()) is not None:
            if destination.name in self._collapsing:
                continue
            for _ in range(TURN):
                if not await self._visit(destination) or self._closed:
                    break
            self._arrange(destination)

    async def _visit(self, destination: Destination) -> bool:
        """Send it one transaction. True if it was accepted and there may be another one at once."""
        while destination.wants is not None:
            await self._load(destination)
        if not destination.begin(self._now_ms()):
            if (
                destination.transaction is not None
            ):  # the trial has ended: the transaction that was refused first waits again
                self.states.post(self._entry(destination))
            return False
        transaction = destination.transaction
        assert transaction is not None
        if not destination.written:
            await self.states.write(self._entry(destination))
            destination.written = True
        self._in_flight += 1
        try:
            outcome = await self._transport.send(destination.name, transaction)
        finally:
            self._in_flight -= 1
        if outcome.delivered:
            self._counts["transactions"] += 1
            self._counts["facts"] += len(transaction.pdus)
            destination.succeeded()
            self.states.post(self._entry(destination, done=transaction))
            if transaction.aside:
                self._counts["parked"] += len(transaction.aside)
                reasons = [aside.reason for aside in transaction.aside]
                log.error("parked", destination=destination.name, items=len(reasons), reason=reasons[0])
        else:
            self._fail(destination, transaction, outcome)
        return outcome.delivered

    def _fail(self, destination: Destination, transaction: Transaction, outcome: SendResult) -> None:
        self._counts["failures"] += 1
        was_catching_up = destination.catching_up
        now = self._now()
        at_least = math.inf if outcome.forbidden else outcome.retry_after  # the longest pause: it needs the operator
        refused = outcome.reason if outcome.refused else None
        repeated = destination.failed(now, self._chance(), at_least=at_least, refused=refused)
        self.states.post(self._entry(destination, kept=transaction if repeated else None, error=outcome.reason))
        due = destination.due(now)
        fields = {
            "destination": destination.name,
            "transaction": transaction.id,
            "reason": outcome.reason,
            "failures": destination.failures,
            "retry_in": round((now if due is None else due) - now, 3),
        }
        if outcome.forbidden:
            log.warning("destination_forbidden", **fields)
        elif destination.catching_up and not was_catching_up:
            log.warning("catch_up_begins", **fields)
        elif refused is not None and (destination.aside or destination.retry_at is None):
            log.info("transaction_refused", facts=len(transaction.pdus), updates=len(transaction.edus), **fields)
        elif destination.failures == 1:
            log.info("delivery_failed", **fields)
        else:
            log.debug("delivery_failed", **fields)

    async def _load(self, destination: Destination) -> None:
        catching_up = destination.catching_up
        wanted = destination.load()
        await self.states.settle(destination.name)
        terms = self._terms
        pages = 1 if catching_up else _PAGES
        page = await self._store.page(
            destination.name,
            wanted,
            pdus=pages * terms.pdus,
            pdu_bytes=pages * terms.transaction_bytes,
            edus=destination.edus_to_read,
        )
        if catching_up and terms.supersede and self._latest is not None and page.pdus:
            try:
                page = await stand_in(page, destination.name, self._latest, terms.pdus)
            except (
                ReplicadError
            ) as error:  # without the latest facts the destination gets the facts that were meant for it
                log.warning("latest_facts_unknown", destination=destination.name, error=str(error))
        destination.loaded(page, wanted)

    def _entry(
        self,
        destination: Destination,
        *,
        done: Transaction | None = None,
        kept: Transaction | None = None,
        error: str | None = None,
    ) -> Entry:
        """Its state for the store. `kept`: a transaction to be repeated that is no longer in memory."""
        retry_at = destination.retry_at
        return Entry(
            name=destination.name,
            success=destination.success,
            serial=destination.serial,
            transaction=destination.transaction or kept or destination.refused,
            failures=destination.failures,
            retry_in=None if retry_at is None else max(0.0, retry_at - self._now()),
            catching_up=destination.catching_up,
            error=error,
            done_edus=done.edu_numbers if done is not None else (),
            parked=done.aside if done is not None else (),
        )
