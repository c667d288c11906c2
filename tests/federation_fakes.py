"""A store in memory and a transport that does what it is told, for tests of the federation sender.

The store passes the tests that the one in Postgres passes (tests/integration/test_sender_store.py).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import trio

from replicad.sender.items import START, DestinationState, Edu, Order, OutstandingPage, Pdu, Transaction, WantedItems
from replicad.sender.store import Entry, FactBatch, Recorded
from replicad.sender.transport import SendResult


@dataclass
class Shelf:
    """What is kept of one destination. It survives a kill of the sender."""

    facts: dict[Order, Pdu] = field(default_factory=dict)
    edus: dict[int, Edu] = field(default_factory=dict)
    entry: Entry | None = None
    parked: list[tuple[str, str]] = field(default_factory=list)  # bodies and reasons
    written_at: float = 0.0

    def page(self, wanted: WantedItems, *, pdus: int, pdu_bytes: int, edus: int) -> OutstandingPage:
        if wanted.collapse:
            self.collapse()
        if wanted.transaction and self.entry is not None and self.entry.transaction is not None:
            return OutstandingPage(transaction=self.entry.transaction)
        facts: list[Pdu] = []
        if wanted.pdus:
            room = pdu_bytes
            for order in [order for order in sorted(self.facts) if order > wanted.after][:pdus]:
                if room <= 0:
                    break
                known = self.facts[order]
                facts.append(Pdu(order, known.room, known.body))
                room -= len(known.body.encode())
        updates = sorted(self.edus)[:edus] if wanted.edus else []
        return OutstandingPage(
            pdus=tuple(facts),
            edus=tuple(Edu(self.edus[number].body, None, number) for number in updates),
            more_pdus=wanted.pdus and sum(order > wanted.after for order in self.facts) > len(facts),
            more_edus=wanted.edus and len(self.edus) > len(updates),
        )

    def collapse(self) -> int:
        made = self.entry.transaction if self.entry is not None else None
        upto = made.upto if made is not None else START
        last = {pdu.room: order for order, pdu in sorted(self.facts.items())}
        gone = [
            order
            for order, pdu in self.facts.items()
            if order > upto and pdu.room is not None and order != last[pdu.room]
        ]
        for order in gone:
            del self.facts[order]
        return len(gone)

    def write(self, entry: Entry, now: float) -> None:
        self.entry, self.written_at = entry, now
        for aside in entry.parked:
            for order in sorted(order for order in self.facts if order <= aside.upto):
                self.parked.append((self.facts.pop(order).body, aside.reason))
            self.parked += [
                (self.edus.pop(number).body, aside.reason) for number in aside.numbers if number in self.edus
            ]
        self.facts = {order: pdu for order, pdu in self.facts.items() if order > entry.success}
        for number in entry.done_edus:
            self.edus.pop(number, None)

    def add_fact(self, pdu: Pdu) -> None:
        known = self.entry or Entry("", START, 0)
        made = known.transaction
        if pdu.order > max(known.success, made.upto if made is not None else START):
            self.facts.setdefault(pdu.order, pdu)

    def add_edu(self, number: int, edu: Edu) -> None:
        for old in [old for old, known in self.edus.items() if edu.key is not None and known.key == edu.key]:
            del self.edus[old]
        self.edus[number] = Edu(edu.body, edu.key, number)

    def standing(self, now: float) -> DestinationState:
        entry = self.entry or Entry("", START, 0)
        retry_in = None if entry.retry_in is None else max(0.0, entry.retry_in - (now - self.written_at))
        outstanding = bool(self.facts or self.edus or entry.transaction)
        return DestinationState(entry.success, entry.serial, entry.failures, retry_in, entry.catching_up, outstanding)


class MemoryStore:
    """As `replicad.sender.store.SenderStore`, with time by trio's clock."""

    def __init__(self) -> None:
        self.shelves: defaultdict[str, Shelf] = defaultdict(Shelf)
        self.upto: dict[str, Recorded] = {}
        self.writes = 0
        self._edus = 0

    async def recorded(self) -> dict[str, Recorded]:
        return dict(self.upto)

    async def standings(self, mine: Callable[[str], bool]) -> AsyncIterator[tuple[str, DestinationState]]:
        for name in sorted(self.shelves):
            if mine(name):
                yield name, self.shelves[name].standing(trio.current_time())

    async def record(self, stream: str, upto: int, recording: FactBatch) -> int:
        await trio.lowlevel.checkpoint()
        for number, name in zip(recording.numbers, recording.names, strict=True):
            self.shelves[name].add_fact(recording.pdus[number - 1])
        self.upto[stream] = Recorded(upto, everywhere=upto)
        return upto

    async def record_edus(self, stream: str, upto: int, edus: Sequence[tuple[str, Edu]]) -> int:
        await trio.lowlevel.checkpoint()
        for name, edu in edus:
            self._edus += 1
            self.shelves[name].add_edu(self._edus, edu)
        self.upto[stream] = Recorded(upto, everywhere=upto)
        return upto

    async def write(self, entries: Sequence[Entry]) -> None:
        await trio.lowlevel.checkpoint()
        self.writes += 1
        for entry in entries:
            self.shelves[entry.name].write(entry, trio.current_time())

    async def collapse(self, names: Sequence[str]) -> int:
        await trio.lowlevel.checkpoint()
        return sum(self.shelves[name].collapse() for name in names)

    async def page(self, name: str, wanted: WantedItems, *, pdus: int, pdu_bytes: int, edus: int) -> OutstandingPage:
        await trio.lowlevel.checkpoint()
        return self.shelves[name].page(wanted, pdus=pdus, pdu_bytes=pdu_bytes, edus=edus)


Answer = Callable[[str, Transaction], Awaitable[SendResult]]


class ScriptedTransport:
    """Hands every request to `answer`, and remembers what was taken: by destination, by id, in order."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.taken: defaultdict[str, dict[str, Transaction]] = defaultdict(dict)
        self.facts: Counter[str] = Counter()  # taken, by destination
        self.in_flight: set[str] = set()
        self.attempts: defaultdict[str, list[float]] = defaultdict(list)

    def objection(self, destination: str) -> str | None:
        return None

    async def send(self, destination: str, transaction: Transaction) -> SendResult:
        assert destination not in self.in_flight, "two requests at the same time"
        self.in_flight.add(destination)
        self.attempts[destination].append(trio.current_time())
        try:
            outcome = await self.answer(destination, transaction)
        finally:
            self.in_flight.discard(destination)
        if outcome.delivered:
            if transaction.id not in self.taken[destination]:
                self.facts[destination] += len(transaction.pdus)
            before = self.taken[destination].setdefault(transaction.id, transaction)
            assert before == transaction, "one id, two contents"
        return outcome

    def bodies(self, destination: str) -> list[str]:
        """The facts that a destination has taken, in order."""
        return [body for made in self.taken[destination].values() for body in made.pdus]
