"""A destination against a model of its store and of the server at the other end, with kills at any moment."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from replicad.errors import LocalProtocolError
from replicad.retry import Backoff
from replicad.sender.destination import Destination, Phase
from replicad.sender.items import DestinationState, Edu, Memory, Order, OutstandingPage, Pdu, Transaction, WantedItems
from replicad.sender.settings import Terms
from replicad.sender.store import Entry
from tests.lengths import examples

from ..federation_fakes import Shelf

BACKOFF = Backoff(first=1.0, cap=20.0, jitter=0.5)
ROUNDING = 1e-6  # a pause is the difference of two times
TERMS = Terms(pdus=3, edus=2, transaction_bytes=60, queue_pdus=4, queue_edus=2, catch_up_after=3.0, backoff=BACKOFF)
MEMORY = 5000


class DestinationModel(RuleBasedStateMachine):
    """Rules do what the world may do at any time; the checks are what must hold whatever it did."""

    @initialize(supersede=st.booleans())
    def begin_life(self, supersede: bool) -> None:
        self.terms = replace(TERMS, supersede=supersede)
        self.now = 1000.0
        self.shelf = Shelf()
        self.memory = Memory(MEMORY)
        self.destination = Destination("a.example", self.terms, self.memory, self.now)
        self.token = 0
        self.sent_facts: dict[str, tuple[Order, str | None]] = {}  # all that ever were, by body
        self.durable: dict[str, str | None] = {}  # all updates that may not be dropped: body to key
        self.taken: dict[str, Transaction] = {}  # by the server at the other end, by id, in order
        self.ever_caught_up = False
        self.recorded: list[Pdu] = []  # the store has them, the destination was not told yet
        self.wanted: WantedItems | None = None
        self.page: OutstandingPage | None = None

    # --- what comes in ---

    @rule(room=st.sampled_from(["r1", "r2", None]), gap=st.integers(1, 3), parts=st.integers(1, 3))
    def fact(self, room: str | None, gap: int, parts: int) -> None:
        self.token += gap
        for part in range(parts):
            pdu = Pdu(Order(self.token, part), room, f'"f{self.token}.{part}"')
            self.sent_facts[pdu.body] = (pdu.order, room)
            self.shelf.facts[pdu.order] = pdu
            self.recorded.append(pdu)

    @rule()
    def facts_are_accepted(self) -> None:
        """The store has had them for a while: it may have been read since."""
        for pdu in self.recorded:
            self.destination.enqueue(pdu, self.now)
            assert not self.destination.enqueue(pdu, self.now), "queued twice"
        self.recorded.clear()

    @rule(key=st.sampled_from(["k", None]))
    def durable_edu(self, key: str | None) -> None:
        body = f'"d{len(self.durable)}"'
        self.durable[body] = key
        self.shelf.add_edu(len(self.durable), Edu(body, key))
        self.destination.expect_edus(self.now)

    @rule(key=st.sampled_from(["typing", "receipt", None]), size=st.integers(1, 80))
    def droppable_edu(self, key: str | None, size: int) -> None:
        self.destination.enqueue_edu(Edu('"' + "e" * size + '"', key))

    @rule(seconds=st.sampled_from([0.5, 3.0, 25.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def wake(self) -> None:
        self.destination.wake(self.now)

    # --- the visit of a worker, step by step ---

    @precondition(lambda self: self.due() and self.destination.wants)
    @rule()
    def load_begins(self) -> None:
        self.wanted = self.destination.load()
        self.page = None

    @precondition(lambda self: self.destination.phase is Phase.LOADING and self.page is None)
    @rule()
    def store_is_read(self) -> None:
        assert self.wanted is not None
        assert self.terms.supersede or not self.wanted.collapse
        self.page = self.shelf.page(
            self.wanted,
            pdus=self.terms.pdus,
            pdu_bytes=self.terms.transaction_bytes,
            edus=self.destination.edus_to_read,
        )

    @precondition(lambda self: self.destination.phase is Phase.LOADING and self.page is not None)
    @rule()
    def load_ends(self) -> None:
        assert self.wanted is not None
        assert self.page is not None
        self.destination.loaded(self.page, self.wanted)

    @precondition(lambda self: self.due() and not self.destination.wants)
    @rule()
    def begin(self) -> None:
        before = self.destination.serial
        if not self.destination.begin(int(self.now * 1000)):
            return
        made = self.destination.transaction
        assert made is not None
        with pytest.raises(LocalProtocolError):
            self.destination.begin(0)  # never two in flight
        self.check_limits(made)
        if not self.destination.written:
            repeated = self.shelf.entry is not None and self.shelf.entry.transaction == made
            assert repeated or made.serial == before + 1
            self.write()
            self.destination.written = True
        assert self.shelf.entry is not None
        assert self.shelf.entry.transaction == made, "what is sent is not what was written down"

    @precondition(lambda self: self.destination.phase is Phase.SENDING)
    @rule()
    def answer_is_good(self) -> None:
        self.server_takes()
        done = self.destination.succeeded()
        self.write(done=done)

    @precondition(lambda self: self.destination.phase is Phase.SENDING)
    @rule(
        taken=st.booleans(),
        refused=st.booleans(),
        chance=st.floats(0, 1, exclude_max=True),
        at_least=st.sampled_from([0.0, 7.0, 500.0]),
    )
    def answer_is_bad(self, taken: bool, refused: bool, chance: float, at_least: float) -> None:
        if taken and not refused:
            self.server_takes()  # and the answer was lost
        sent = self.destination.transaction
        reason = "400" if refused else None
        repeated = self.destination.failed(self.now, chance, at_least=at_least, refused=reason)
        self.write(kept=sent if repeated else None)
        assert sent is not None
        kept = sent.pdus or sent.edu_numbers  # else it has only what may be dropped
        assert repeated or refused or not kept, "a transaction whose outcome is unknown is repeated as it is"
        if self.destination.retry_at is None:
            assert sent is not None
            assert len(sent.pdus) + len(sent.edus) > 1, "split where there is nothing to split"
            assert sent.id not in self.taken, "split after it may have been taken"
            return
        pause = self.destination.retry_at - self.now
        interval = BACKOFF.whole(self.destination.failures - 1)
        assert interval * (1 - BACKOFF.jitter) - ROUNDING <= pause <= BACKOFF.cap + ROUNDING
        assert min(at_least, BACKOFF.cap) - ROUNDING <= pause
        assert pause <= max(interval, min(at_least, BACKOFF.cap)) + ROUNDING
        assert self.destination.due(self.now) in (self.destination.retry_at, self.now if self.destination.aside else 0)
        assert self.destination.catching_up or interval <= self.terms.catch_up_after

    @rule(
        ends=st.lists(st.sampled_from(["good", "lost", "failed", "refused"]), min_size=1, max_size=5),
        meanwhile=st.sampled_from(["", "recorded", "accepted", "edu"]),
        wait=st.booleans(),
    )
    def visits(self, ends: list[str], meanwhile: str, wait: bool) -> None:
        """Whole visits at once, so that long stories are told in few steps."""
        for end in ends:
            if wait and self.destination.retry_at is not None:
                self.now = max(self.now, self.destination.retry_at)
            if not self.due():
                return
            if self.destination.wants:
                self.load_begins()
                if meanwhile == "recorded":
                    self.fact("r1", 1, 1)
                self.store_is_read()
                if meanwhile == "accepted":
                    self.fact("r2", 1, 1)
                    self.facts_are_accepted()
                elif meanwhile == "edu":
                    self.durable_edu(None)
                self.load_ends()
            while self.destination.wants:
                self.load_begins()
                self.store_is_read()
                self.load_ends()
            self.begin()
            if self.destination.phase is Phase.SENDING and end == "good":
                self.answer_is_good()
            elif self.destination.phase is Phase.SENDING:
                self.answer_is_bad(end == "lost", end == "refused", 0.5, 0.0)

    @rule(taken=st.booleans())
    def killed(self, taken: bool) -> None:
        if taken and self.destination.phase is Phase.SENDING:
            self.server_takes()
        self.memory = Memory(MEMORY)
        self.recorded.clear()
        standing = self.shelf.standing(self.now)
        self.destination = Destination("a.example", self.terms, self.memory, self.now, standing)

    # --- what must hold ---

    def due(self) -> bool:
        due = self.destination.due(self.now)
        return due is not None and due <= self.now

    def write(self, *, kept: Transaction | None = None, done: Transaction | None = None) -> None:
        d = self.destination
        entry = Entry(
            d.name,
            d.success,
            d.serial,
            d.transaction or kept or d.refused,
            d.failures,
            None if d.retry_at is None else d.retry_at - self.now,
            d.catching_up,
            done_edus=done.edu_numbers if done else (),
            parked=done.aside if done else (),
        )
        self.shelf.write(entry, self.now)

    def server_takes(self) -> None:
        made = self.destination.transaction
        assert made is not None
        content = replace(made, refused=None)  # that is for the sender alone
        if made.id in self.taken:
            assert self.taken[made.id] == content, "one id, two contents"
        self.taken[made.id] = content

    def check_limits(self, made: Transaction) -> None:
        assert made.pdus or made.edus
        assert len(made.pdus) <= self.terms.pdus
        assert len(made.edus) <= self.terms.edus
        bodies = [*made.pdus, *made.edus]
        assert len(bodies) == 1 or sum(map(len, bodies)) <= self.terms.transaction_bytes

    @invariant()
    def facts_come_once_and_in_order(self) -> None:
        if not hasattr(self, "taken"):
            return
        bodies = [body for made in self.taken.values() for body in made.pdus]
        orders = [self.sent_facts[body][0] for body in bodies]
        assert orders == sorted(set(orders)), "out of order, or twice under two ids"

    @invariant()
    def memory_is_bounded_and_given_back(self) -> None:
        if not hasattr(self, "memory"):
            return
        d = self.destination
        assert self.memory.held >= 0
        if d.phase is Phase.RESTING and d.retry_at is not None and d.retry_at > self.now and not d.aside:
            queued = sum(edu.size for edu in d._edus.values())
            assert self.memory.held == queued, "a destination that backs off holds facts in memory"
        assert len(d._pdus) <= max(self.terms.queue_pdus, self.terms.pdus)
        assert len(d._edus) <= self.terms.queue_edus

    def teardown(self) -> None:
        if not hasattr(self, "destination"):
            return
        if self.destination.phase is Phase.SENDING:
            self.answer_is_good()
        elif self.destination.phase is Phase.LOADING:
            self.killed(False)
        self.facts_are_accepted()
        for _ in range(2000):
            self.now += 100
            if not self.destination.has_work:
                break
            if self.destination.wants:
                self.load_begins()
                self.store_is_read()
                self.load_ends()
            else:
                self.begin()
                if self.destination.phase is Phase.SENDING:
                    self.answer_is_good()
        assert not self.destination.has_work
        assert not self.destination.catching_up
        assert not self.shelf.standing(self.now).outstanding
        assert self.memory.held == 0
        parked = [body for body, _ in self.shelf.parked]
        assert len(set(parked)) == len(parked)
        got = {body for made in self.taken.values() for body in made.pdus} | set(parked)
        last = {room: order for order, room in self.sent_facts.values() if room is not None}
        for body, (order, room) in self.sent_facts.items():
            if body not in got:
                superseded = self.terms.supersede and room is not None and order < last[room]
                assert superseded, f"{body} is lost"
        got_edus = {body for made in self.taken.values() for body in made.edus} | set(parked)
        newest = {key: body for body, key in self.durable.items() if key is not None}
        for body, key in self.durable.items():
            assert body in got_edus or (key is not None and newest[key] != body), f"{body} is lost"


DestinationModel.TestCase.settings = settings(max_examples=examples(120), stateful_step_count=40, deadline=None)
TestDestinationModel = DestinationModel.TestCase


def deliver(destination: Destination) -> Transaction:
    """One good visit of a destination that needs nothing from the store."""
    assert destination.begin(0)
    return destination.succeeded()


def test_a_keyed_update_takes_the_place_of_the_one_before_and_keeps_its_turn() -> None:
    memory = Memory(10_000)
    destination = Destination("a.example", Terms(), memory, 0.0)
    for key, body in (("t1", '"on"'), ("t2", '"on"'), (None, '"x"'), (None, '"x"'), ("t1", '"off"')):
        destination.enqueue_edu(Edu(body, key))
    assert deliver(destination).edus == ('"off"', '"on"', '"x"', '"x"')
    assert memory.held == 0


def test_only_droppable_updates_are_dropped_and_the_oldest_first() -> None:
    terms = Terms(queue_edus=2, edus=10)
    destination = Destination("a.example", terms, Memory(10_000), 0.0)
    destination.expect_edus(0.0)
    for number in range(4):
        destination.enqueue_edu(Edu(f'"{number}"'))
    wanted = destination.load()
    destination.loaded(OutstandingPage(edus=(Edu('"kept"', number=7),)), wanted)
    assert deliver(destination).edus == ('"kept"', '"2"', '"3"')
    assert destination.dropped == 2


def test_a_full_memory_sends_facts_to_the_store_and_not_away() -> None:
    memory = Memory(1)
    destination = Destination("a.example", Terms(), memory, 0.0)
    destination.enqueue(Pdu(Order(1, 0), None, '"1"'), 0.0)
    destination.enqueue(Pdu(Order(2, 0), None, '"2"'), 0.0)
    assert deliver(destination).pdus == ('"1"',)
    assert destination.wants is not None
    assert destination.wants.pdus


def test_one_body_counts_once_however_many_hold_it() -> None:
    memory = Memory(1 << 20)
    many = [Destination(f"{number}.example", Terms(), memory, 0.0) for number in range(1000)]
    pdu = Pdu(Order(1, 0), None, '"' + "x" * 1000 + '"')
    for destination in many:
        destination.enqueue(pdu, 0.0)
    assert memory.held == pdu.size
    for destination in many:
        deliver(destination)
    assert memory.held == 0


def test_facts_that_stand_in_for_one_are_not_parted() -> None:
    destination = Destination("a.example", Terms(pdus=3), Memory(10_000), 0.0, DestinationState(outstanding=True))
    wanted = destination.load()
    stand_ins = [Pdu(Order(2, 0), "r2", f'"end{n}"', substituted=True) for n in range(2)]
    own = [Pdu(Order(1, 0), "r1", '"1"'), *stand_ins, Pdu(Order(3, 0), "r3", '"3"')]
    destination.loaded(OutstandingPage(pdus=tuple(own)), wanted)
    first = deliver(destination)
    assert (first.pdus, first.upto, first.substituted) == (('"1"', '"end0"', '"end1"'), Order(2, 0), True)
    assert (deliver(destination).pdus, destination.success) == (('"3"',), Order(3, 0))


def test_equal_content_twice_is_two_transactions() -> None:
    destination = Destination("a.example", Terms(), Memory(10_000), 0.0)
    ids = set()
    for _ in range(3):
        destination.enqueue_edu(Edu('"typing"', "k"))
        ids.add(deliver(destination).id)
    assert len(ids) == 3


def test_waking_while_a_probe_is_under_way_makes_its_failure_count_as_the_first() -> None:
    known = DestinationState(failures=9, retry_in=9, outstanding=True)
    destination = Destination("a.example", Terms(backoff=BACKOFF), Memory(10_000), 0.0, known)
    assert destination.due(0.0) == 9.0
    wanted = destination.load()
    destination.loaded(OutstandingPage(pdus=(Pdu(Order(1, 0), None, "1"),)), wanted)
    destination.begin(0)
    destination.wake(5.0)
    destination.failed(6.0, 1.0)
    assert (destination.failures, destination.retry_at) == (1, 7.0)


def test_what_is_in_a_transaction_that_is_repeated_is_not_taken_in_again() -> None:
    """After a restart the stream may be read again from further back."""
    standing = DestinationState(success=Order(1, 0), serial=1, outstanding=True)
    destination = Destination("a.example", Terms(), Memory(10_000), 0.0, standing)
    made = Transaction("id", 1, 1, Order(5, 0), ('"5"',), ())
    destination.loaded(OutstandingPage(transaction=made), destination.load())
    assert not destination.enqueue(Pdu(Order(4, 0), None, '"4"'), 0.0)
    assert deliver(destination) == made
    assert not destination.enqueue(Pdu(Order(5, 0), None, '"5"'), 0.0)
    assert destination.enqueue(Pdu(Order(6, 0), None, '"6"'), 0.0)


def test_a_clock_of_postgres_that_was_set_back_makes_no_pause_longer_than_the_longest() -> None:
    terms = Terms(backoff=Backoff(first=1.0, cap=20.0))
    standing = DestinationState(failures=3, retry_in=86400.0 * 365, outstanding=True)
    assert Destination("a.example", terms, Memory(10_000), 100.0, standing).retry_at == 120.0
