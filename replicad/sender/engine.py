"""Delivers to the destinations that are due, with a bounded number of workers. No intake, no SQL, no HTTP.

A destination has no task of its own; ten thousand idle ones cost only entries in a table. Sets of workers serve those
that are due (`lanes`), so destinations that are down, and their time-outs, do not delay the others.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from random import random
from typing import Protocol

import structlog
import trio

from replicad.errors import ReplicadError
from replicad.sender.agenda import Agenda
from replicad.sender.catchup import Latest, stand_in
from replicad.sender.destination import Destination
from replicad.sender.items import Edu, Memory, Page, Pdu, Standing, Transaction, Wanted
from replicad.sender.lanes import Lane, Lanes
from replicad.sender.state_writer import StateWriter
from replicad.sender.store import Entry
from replicad.sender.terms import Terms
from replicad.sender.transport import SendResult, Transport

TURN = 4  # transactions in a row for one destination while others wait
_PAGES = 4  # transactions that are read from the store at once, unless it is for catch-up

log = structlog.get_logger()


class Stored(Protocol):
    """The methods of the store that the engine needs."""

    async def write(self, entries: Sequence[Entry]) -> None:
        """Store the state of destinations."""

    async def page(self, name: str, wanted: Wanted, *, pdus: int, pdu_bytes: int, edus: int) -> Page:
        """What must still be delivered to a destination."""

    async def collapse(self, names: Sequence[str]) -> int:
        """Leave only the latest fact of each room to these destinations."""


@dataclass(frozen=True, slots=True)
class EngineStatistics:
    """A moment of the engine. The last five count since it was made; `memory` in bytes. `parked`: what was refused."""

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
        store: Stored,
        transport: Transport,
        terms: Terms,
        *,
        source: str = "",
        memory: int,
        workers: int,
        probers: int,
        latest: Latest | None = None,
        now: Callable[[], float] = trio.current_time,
        now_ms: Callable[[], int],
        chance: Callable[[], float] = random,
    ) -> None:
        """`source` is the one of the store; `memory` bounds the bodies in all queues (bytes); `now` is monotonic
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
        self._lanes = Lanes(workers, probers)
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

    def meet(self, name: str, standing: Standing) -> None:
        """Add a destination of the store; deliver what is outstanding."""
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

        Not of those that have facts in memory: a transaction of them is stored by the places of its facts.
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

    def _make(self, name: str, standing: Standing | None = None) -> Destination:
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

    async def _work(self, lane: Lane) -> None:
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
            if destination.transaction is not None:  # the trial has ended: what was refused first waits again
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
            except ReplicadError as error:  # without the latest facts the destination gets those that were meant for it
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
