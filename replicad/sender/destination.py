"""One destination as a state machine: its queue, the next request, and when to send it. No I/O, no clock, no random.

The store (Postgres) has every fact, and every update that may not be dropped, until the destination has accepted it.
The queue in memory is a copy of the beginning. When the queue is full it is not lengthened: `behind` is set, and the
rest is read from the store when the queue is empty. After a failure the queue is dropped, so a destination that is down
takes no memory. Above an hour of back-off (`Terms.catch_up_after`) the destination is `catching_up`: of each room only
the latest fact is left, and droppable updates are dropped (docs/sender.md, Outages).

There is one transaction at a time. It is stored before it is sent, so that it can be repeated unchanged. The caller
reads the items that `wants` names, calls `begin`, sends the transaction, and calls `succeeded` or `failed`.
"""

from __future__ import annotations

import enum
import sys
from collections import deque
from dataclasses import dataclass, replace

from replicad.errors import LocalProtocolError
from replicad.sender.items import (
    START,
    Aside,
    DestinationState,
    Edu,
    Memory,
    Order,
    OutstandingPage,
    Pdu,
    Transaction,
    WantedItems,
    make_transaction,
)
from replicad.sender.settings import Terms


@dataclass(slots=True)
class SuspectItems:
    """The items of a transaction that was refused: facts up to `upto` and stored updates up to `number`.

    They are sent `most` at a time; updates and facts apart.
    """

    upto: Order
    number: int
    most: int

    @classmethod
    def of(cls, refused: Transaction, units: int) -> SuspectItems:
        """The suspects of a transaction with so many facts and updates; they are halved."""
        return cls(refused.upto, max(refused.edu_numbers, default=0), max(1, units // 2))

    def take(self, pdus: deque[Pdu], edus: deque[Edu], room: int) -> tuple[list[Pdu], list[Edu]]:
        """Take the next suspects out of the queues; nothing if there are none left."""
        found = take_edus(edus, self.most, room, upto=self.number)
        return ([], found) if found else (take_pdus(pdus, self.most, room, upto=self.upto), [])


def take_pdus(queue: deque[Pdu], most: int, room: int, upto: Order | None = None) -> list[Pdu]:
    """The oldest facts that fit, `most` at most. Facts that replace one fact count as one and stay together."""
    taken: list[Pdu] = []
    while queue and most > 0 and (upto is None or queue[0].order <= upto):
        order, count, size = queue[0].order, 0, 0
        for pdu in queue:
            if pdu.order != order:
                break
            count, size = count + 1, size + len(pdu.body)
        if taken and (count > most or size > room):
            break
        for _ in range(count):
            taken.append(queue.popleft())
        most -= count if upto is None else 1
        room -= size
    return taken


def take_edus(queue: deque[Edu], most: int, room: int, upto: int) -> list[Edu]:
    """The oldest stored updates that fit, `most` at most, with numbers up to `upto`."""
    taken: list[Edu] = []
    while queue and len(taken) < most and (queue[0].number or 0) <= upto:
        if taken and len(queue[0].body) > room:
            break
        room -= len(queue[0].body)
        taken.append(queue.popleft())
    return taken


def take_one(pdus: deque[Pdu], edus: deque[Edu], *, updates_first: bool) -> tuple[list[Pdu], list[Edu]]:
    """The oldest fact, or the oldest stored update: whichever is to come first, if there is one."""
    if edus and (updates_first or not pdus):
        return [], [edus.popleft()]
    return take_pdus(pdus, 1, 0, upto=Order(sys.maxsize, 0)), []


def take_updates(stored: deque[Edu], droppable: dict[object, Edu], most: int, room: int, *, alone: bool) -> list[Edu]:
    """The oldest updates that fit, `most` at most; updates that may not be dropped come first.

    `alone`: there is nothing else in the transaction, so that the first may be larger than `room`.
    """
    taken: list[Edu] = []
    while len(taken) < most and (stored or droppable):
        edu = stored[0] if stored else next(iter(droppable.values()))
        if len(edu.body) > room and (taken or not alone):
            break
        room -= len(edu.body)
        taken.append(edu)
        if stored:
            stored.popleft()
        else:
            droppable.pop(next(iter(droppable)))
    return taken


MOST_ASIDE = 50  # items in a row that are tried before the destination is taken to refuse everything


class Phase(enum.Enum):
    """The step that is under way."""

    RESTING = "resting"
    LOADING = "loading"
    SENDING = "sending"


class Destination:
    """See the module. Times are seconds of one monotonic clock."""

    __slots__ = (
        "_durable",
        "_edus",
        "_held",
        "_idle",
        "_memory",
        "_missed_edus",
        "_missed_pdus",
        "_pdus",
        "_source",
        "_stale",
        "_suspects",
        "_terms",
        "_units",
        "_unread",
        "_unsure",
        "_woken",
        "aside",
        "behind",
        "catching_up",
        "dropped",
        "edus_behind",
        "failures",
        "name",
        "newest",
        "phase",
        "proven",
        "refused",
        "retry_at",
        "serial",
        "success",
        "transaction",
        "written",
    )

    def __init__(
        self,
        name: str,
        terms: Terms,
        memory: Memory,
        now: float,
        standing: DestinationState | None = None,
        *,
        source: str = "",
    ) -> None:
        known = standing or DestinationState()  # `source` is the sender's source; ids are made of it
        self.name = name
        self.success = known.success  # the destination has all facts up to here
        self.serial = known.serial
        self.failures = known.failures  # in a row
        # The clock of Postgres may have been set back; and whether something new has come since is not stored.
        self.retry_at = None if known.retry_in is None else now + min(terms.longest, known.retry_in)
        self.proven = known.failures == 0 and known.serial > 0  # it accepted the last request
        self.catching_up = known.catching_up and known.outstanding  # else catch-up is complete
        self.behind = known.outstanding  # the store has facts beyond the queue
        self.edus_behind = known.outstanding  # the store has updates beyond the queue
        self.phase = Phase.RESTING
        self.transaction: Transaction | None = None  # to be sent, or being sent
        self.written = False  # the store has it
        self.dropped = 0  # droppable updates that were dropped
        self._source = source
        self._terms = terms
        self._memory = memory
        self.newest = known.success  # the highest fact that the store was given for it
        self._unread = known.outstanding  # the store may have a transaction that must be repeated
        self._stale = self.catching_up  # the store must collapse the rooms
        self._missed_pdus = False  # a fact came while the store was being read
        self._missed_edus = False
        self._woken = False
        self._idle = True  # nothing that must be delivered has come since the last try
        self._pdus: deque[Pdu] = deque()
        self._durable: deque[Edu] = deque()
        self._edus: dict[object, Edu] = {}  # droppable updates, by key; one without a key under itself
        self._held: list[Pdu | Edu] = []  # the facts and updates in the transaction
        self._units = 1  # of these, the items that may be sent apart
        self._suspects: SuspectItems | None = None  # some of them are refused
        self._unsure = False  # the transaction was sent before, and may have been accepted
        self.aside: tuple[Aside, ...] = ()  # each is refused; others are on trial
        self.refused: Transaction | None = None  # the transaction to repeat if the trial ends and no other was accepted

    def enqueue(self, pdu: Pdu, now: float) -> bool:
        """Queue a fact that was stored just now. False if the destination has had it already."""
        if pdu.order <= self.newest:
            return False
        self.newest = pdu.order
        self._expect(now)
        failing = self.retry_at is not None
        if self.behind:
            self._missed_pdus = True
        elif failing or len(self._pdus) >= self._terms.queue_pdus or self._memory.full:
            self.behind = True
        else:
            self._memory.hold(pdu)
            self._pdus.append(pdu)
        return True

    def expect_edus(self, now: float, *, pdus: bool = False) -> None:
        """Note that updates for it were stored, and facts that were not enqueued."""
        self._expect(now)
        self.edus_behind = self._missed_edus = True
        self.behind, self._missed_pdus = self.behind or pdus, self._missed_pdus or pdus

    def enqueue_edu(self, edu: Edu) -> None:
        """Queue an update that may be dropped. One with the same key takes the other's place in the queue."""
        key: object = edu if edu.key is None else edu.key
        old = self._edus.get(key)
        if old is not None:
            self._memory.let_go(old)
        elif self.catching_up or self._memory.full:
            self.dropped += 1
            return
        elif len(self._edus) >= self._terms.queue_edus:
            self._memory.let_go(self._edus.pop(next(iter(self._edus))))
            self.dropped += 1
        self._memory.hold(edu)
        self._edus[key] = edu

    @property
    def has_work(self) -> bool:
        """True when there is something to send, or something in the store to look at."""
        return bool(
            self.transaction
            or self._pdus
            or self._edus
            or self._durable
            or self.behind
            or self.edus_behind
            or self._unread
            or self.aside
        )

    @property
    def holds_facts(self) -> bool:
        """Whether it has stored facts in memory, or may have in a moment: their rows in the store must stay."""
        return self.phase is not Phase.RESTING or bool(self.transaction or self._pdus or self.aside)

    @property
    def away(self) -> bool:
        """Whether it is not expected to answer. While items are on trial it does."""
        return not self.aside and self._terms.away(self.failures)

    def due(self, now: float) -> float | None:
        """When to visit it: `now`, or the end of its back-off. None while it is visited or has nothing to do."""
        if self.phase is not Phase.RESTING or not self.has_work:
            return None
        return now if self.retry_at is None or self.aside else max(now, self.retry_at)

    def wake(self, now: float) -> None:
        """The destination is reported to be up: end its back-off; the next one begins with the shortest pause."""
        self._woken = self.phase is not Phase.RESTING
        self.failures = 0
        if self.retry_at is not None:
            self.retry_at = now

    # --- the store is read ---

    @property
    def wants(self) -> WantedItems | None:
        """What must be read from the store before `begin`, or None."""
        if self.transaction is not None:
            return None
        pdus = self.behind and not self._pdus
        edus = self.edus_behind and not self._durable
        if not (pdus or edus or self._unread):
            return None
        after = max((aside.upto for aside in self.aside), default=START)
        collapse = pdus and self._stale and self._terms.supersede
        return WantedItems(pdus, edus, self._unread and not self.aside, collapse, after)

    @property
    def edus_to_read(self) -> int:
        """The updates of a transaction, and the updates that are set aside."""
        return self._terms.edus + sum(len(aside.numbers) for aside in self.aside)

    def load(self) -> WantedItems:
        """The store will be read now; pass the result to `loaded`."""
        wanted = self.wants
        self._require(Phase.RESTING)
        if wanted is None:
            raise LocalProtocolError(f"{self.name} has nothing to load")
        self.phase = Phase.LOADING
        self._missed_pdus = self._missed_edus = False
        return wanted

    def loaded(self, page: OutstandingPage, wanted: WantedItems) -> None:
        """The store was read, at a time after `load` was called."""
        self._require(Phase.LOADING)
        self.phase = Phase.RESTING
        self._unread = False
        if wanted.collapse:
            self._stale = False
        if page.transaction is not None:
            self.transaction, self.written = page.transaction, True
            self.aside, self.refused = page.transaction.aside, page.transaction.refused
            self._units, self._unsure = 1, True  # it may have been accepted: it is not split
            self.newest = max(self.newest, page.transaction.upto)  # it is not recorded again
            self.serial = max(self.serial, page.transaction.serial)
            return
        if wanted.pdus:
            self.behind = page.more_pdus or self._missed_pdus
            for pdu in page.pdus:
                self._memory.hold(pdu)
                self._pdus.append(pdu)
                self.newest = max(self.newest, pdu.order)
        if wanted.edus:
            self.edus_behind = page.more_edus or self._missed_edus
            aside = {number for aside in self.aside for number in aside.numbers}
            for edu in (edu for edu in page.edus if edu.number not in aside):
                self._memory.hold(edu)
                self._durable.append(edu)
        self._settle_catch_up()

    # --- one transaction ---

    def begin(self, ts: int) -> bool:
        """Make `transaction` the one to send; False if there is nothing to send. Ignores back-off.

        If it is not `written`, the caller stores it and sets `written` before it sends. `ts`: ms since 1970.
        """
        self._require(Phase.RESTING)
        if self.transaction is None:
            self.transaction, self.written = self._make(ts), False
            self._unsure = False
        if self.transaction is None and self.aside:
            self._end_trial()
            return False
        if self.transaction is None:
            return False
        self.phase = Phase.SENDING
        self.retry_at = None
        self._woken = False
        self._idle = True
        return True

    def succeeded(self) -> Transaction:
        """The destination has accepted the transaction; returns it. What it has in `aside` is to be parked."""
        done = self._finish()
        self.aside, self.refused = (), None
        self.success = max(self.success, done.upto)
        self.failures = 0
        self.proven = True
        self._settle_catch_up()
        return done

    def failed(self, now: float, chance: float, *, at_least: float = 0.0, refused: str | None = None) -> bool:
        """The transaction failed, or its outcome is unknown. The queue is dropped, and the store is read again. True if
        this very transaction is to be repeated after the back-off.

        `chance` is as for `Backoff.delay`; `at_least` is the pause that the destination asked for (s); `refused` is why
        it accepts no such request. Then a new transaction is split at once, until a single item is refused; that is
        tried again. When the back-off has reached catch-up, it is set aside, and the next item is tried, and so on. If
        an item is accepted, the items before it are parked; if none is, the destination refuses everything, and the
        first item is repeated. But if an item may have been accepted before, the last such item is repeated: earlier
        items are not sent after it, and it is never sent under another id.
        """
        units, on_trial = self._units, bool(self.aside)
        lost = self._finish()
        self._reread()
        if refused is not None and units > 1 and (lost.pdus or lost.edu_numbers):
            self._suspects = SuspectItems.of(lost, units)
            return False
        if not (on_trial and (self.catching_up or self._terms.away(self.failures))):  # else it does answer
            self.failures = 1 if self._woken else self.failures + 1
        idle = self._idle and not on_trial
        self.retry_at = now + self._terms.pause(self.failures, chance, at_least=at_least, idle=idle)
        self.proven = False
        if self._terms.catches_up(self.failures):
            self.catching_up = True
            self.dropped += len(self._edus)
            self._release(list(self._edus.values()))
            self._edus.clear()
        self._stale = self.catching_up
        away = self.catching_up or self._terms.away(self.failures)
        if away and not lost.pdus and not lost.edu_numbers:  # it would be tried for ever because of droppable updates
            self.dropped += len(lost.edus)
            return False
        if refused is None or not away:
            self.aside, self.refused = (), None  # the store has them, with the transaction
            return True
        if self.refused is None or self._unsure:
            self.refused = replace(lost, refused=None)
        self.aside = (*lost.aside, Aside(lost.upto, lost.edu_numbers, refused))
        if len(self.aside) >= MOST_ASIDE:
            self._end_trial()
        return False

    # --- inside ---

    def _expect(self, now: float) -> None:
        """Something has come that must be delivered: the destination is wanted."""
        self._idle = False
        if self.retry_at is not None:
            self.retry_at = min(self.retry_at, now + self._terms.longest)

    def _require(self, phase: Phase) -> None:
        if self.phase is not phase:
            raise LocalProtocolError(f"{self.name} is {self.phase.value}, not {phase.value}")

    def _finish(self) -> Transaction:
        self._require(Phase.SENDING)
        assert self.transaction is not None
        self.phase = Phase.RESTING
        done, self.transaction = self.transaction, None
        self._release(self._held)
        return done

    def _settle_catch_up(self) -> None:
        """Catch-up ends when the store has nothing more that is not in the queue (docs/sender.md, Outages)."""
        if self.catching_up and not (self.behind or self._pdus or self._unread or self.transaction):
            self.catching_up = False

    def _release(self, items: list[Pdu | Edu] | deque[Pdu] | deque[Edu]) -> None:
        for item in items:
            self._memory.let_go(item)
        items.clear()

    def _reread(self) -> None:
        self._release(self._pdus)
        self._release(self._durable)
        self.behind = self.edus_behind = self._unread = True

    def _end_trial(self) -> None:
        """Nothing was accepted: `refused` is repeated after the back-off, and only what it has aside may be parked."""
        self.transaction, self.written = self.refused, False
        self.aside, self.refused, self._units = (), None, 1
        self._reread()

    def _make(self, ts: int) -> Transaction | None:
        room = self._terms.transaction_bytes
        if self.aside:  # one item: an item is parked if it is refused while another is accepted
            pdus, edus = take_one(self._pdus, self._durable, updates_first=bool(self.aside[-1].numbers))
            self._units = 1
        else:
            pdus, edus = self._suspects.take(self._pdus, self._durable, room) if self._suspects else ([], [])
            self._units = len({pdu.order for pdu in pdus}) + len(edus)
        if not pdus and not edus and not self.aside:
            self._suspects = None
            pdus = take_pdus(self._pdus, self._terms.pdus, room)
            room -= sum(len(pdu.body) for pdu in pdus)
            edus = take_updates(self._durable, self._edus, self._terms.edus, room, alone=not pdus)
            self._units = len(pdus) + len(edus)
        if not pdus and not edus:
            return None
        self._held = [*pdus, *edus]
        self.serial += 1
        made = make_transaction(
            self.name,
            source=self._source,
            serial=self.serial,
            ts=ts,
            upto=max([self.success, *(pdu.order for pdu in pdus), *(aside.upto for aside in self.aside)]),
            pdus=[pdu.body for pdu in pdus],
            edus=[edu.body for edu in edus],
            edu_numbers=[edu.number for edu in edus if edu.number is not None],
            substituted=any(pdu.substituted for pdu in pdus),
        )
        return replace(made, aside=self.aside, refused=self.refused)
