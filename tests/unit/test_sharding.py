"""Who should have which slot, who is alive, and what a writer may believe: no Postgres, no clock."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from replicad.sharding.holdings import DRAIN, POSTPONE, TRUST, Holdings, Slot, View, WriterMember, moves, plan, slot_of

NAMES = "abcdefg"


def view_of(owners: list[str | None], members: dict[str, bool]) -> View:
    """Members (leaving or not) whose terms are below those of their slots."""
    return View(
        {name: WriterMember(name, term=1, leaving=leaving) for name, leaving in members.items()},
        tuple(Slot(number, owner, 100 + number) for number, owner in enumerate(owners)),
    )


views = st.builds(
    view_of,
    st.lists(st.sampled_from([None, *NAMES]), min_size=1, max_size=40),
    st.dictionaries(st.sampled_from(NAMES), st.booleans()),
)


def counts(view: View) -> dict[str, int]:
    found = {name: 0 for name, member in view.members.items() if not member.leaving}
    for slot in view.slots:
        holder = view.holder(slot)
        if holder is not None and not holder.leaving:
            found[holder.instance] += 1
    return found


@given(views)
def test_after_the_moves_shares_are_even_and_nothing_is_left_over(view: View) -> None:
    planned = moves(view)
    if not counts(view):
        assert not planned
        return
    moved = View(view.members, tuple(replace(s, owner=planned.get(s.number, s.owner)) for s in view.slots))
    shares = counts(moved)
    assert sum(shares.values()) == len(view.slots)
    assert max(shares.values()) - min(shares.values()) <= 1


@given(views)
def test_no_slot_moves_that_need_not(view: View) -> None:
    before = counts(view)
    if not before:
        return
    share, remainder = divmod(len(view.slots), len(before))
    most = sorted(before.values(), reverse=True)
    kept = sum(min(count, share + (place < remainder)) for place, count in enumerate(most))
    assert len(moves(view)) == len(view.slots) - kept


@given(views, st.randoms())
def test_every_step_that_is_done_leaves_one_less_to_do_whoever_does_it_first(view: View, random: object) -> None:
    while planned := moves(view):
        number = random.choice(sorted(planned))  # type: ignore[attr-defined]
        slots = tuple(replace(s, owner=planned[number]) if s.number == number else s for s in view.slots)
        view = replace(view, slots=slots)
        assert len(moves(view)) == len(planned) - 1


@given(views)
def test_what_all_do_together_is_all_that_there_is_to_do(view: View) -> None:
    planned = moves(view)
    parts = [plan(view, name) for name in view.members]
    taken = {slot.number: name for name, part in zip(view.members, parts, strict=True) for slot in part.take}
    given_away = {slot.number: receiver for part in parts for slot, receiver in part.give}
    assert taken | given_away == planned
    assert not taken.keys() & given_away.keys()


class Sharing(RuleBasedStateMachine):
    """Writers that come, go and die, and act on views as old as they like; Postgres is one dict of terms."""

    @initialize(slots=st.integers(1, 24))
    def begin(self, slots: int) -> None:
        self.term = 1000
        self.members: dict[str, WriterMember] = {}
        self.slots = [Slot(number, None, number) for number in range(slots)]
        self.seen: dict[str, View] = {}

    def next_term(self) -> int:
        self.term += 1
        return self.term

    @rule(name=st.sampled_from(NAMES))
    def join(self, name: str) -> None:
        self.members[name] = WriterMember(name, self.next_term())
        self.look(name)

    @rule(name=st.sampled_from(NAMES))
    def die(self, name: str) -> None:
        self.members.pop(name, None)

    @rule(name=st.sampled_from(NAMES))
    def look(self, name: str) -> None:
        self.seen[name] = View(dict(self.members), tuple(self.slots))

    @rule(name=st.sampled_from(NAMES), share=st.integers(1, 24))
    def act(self, name: str, share: int) -> None:
        """Do a part of the plan, under the rules of writer_take and writer_give."""
        if name not in self.members or name not in self.seen:
            return
        now = View(dict(self.members), tuple(self.slots))
        todo = plan(self.seen[name], name)
        for slot in todo.take[:share]:
            if self.slots[slot.number] == slot and now.holder(slot) is None:
                self.slots[slot.number] = Slot(slot.number, name, self.next_term())
        for slot, receiver in todo.give[:share]:
            if self.slots[slot.number] == slot and receiver in self.members:
                self.slots[slot.number] = Slot(slot.number, receiver, self.next_term())

    @invariant()
    def two_rounds_in_which_all_look_make_it_even(self) -> None:
        if not getattr(self, "members", None):
            return
        before = list(self.slots), self.term, dict(self.seen)
        for _ in range(2):
            for name in sorted(self.members):
                self.look(name)
            for name in sorted(self.members):
                self.act(name, 24)
        shares = counts(View(self.members, tuple(self.slots)))
        assert sum(shares.values()) == len(self.slots)
        assert max(shares.values()) - min(shares.values()) <= 1
        self.slots, self.term, self.seen = before


TestSharing = Sharing.TestCase


def test_a_slot_of_an_older_membership_is_nobodys() -> None:
    old = View({"a": WriterMember("a", term=50)}, (Slot(0, "a", 40),))
    assert old.holder(old.slots[0]) is None
    assert plan(old, "a").take == (Slot(0, "a", 40),)


def test_slots_of_keys_are_spread_and_never_change() -> None:
    assert [slot_of(key, 256) for key in ("", "a", "!room:example.org", "жду")] == [66, 18, 30, 175]
    used = {slot_of(f"!room{number}:example.org", 64) for number in range(1000)}
    assert len(used) == 64


@pytest.fixture
def holdings() -> Holdings:
    """Writer a, a member under term 1, with slot 0 of one, believed from second 100 on; time to live 10 seconds."""
    made = Holdings("events", "a", 10.0)
    made.joined(1, 100.0)
    made.saw(View({"a": WriterMember("a", 1)}, (Slot(0, "a", 5),), 6))
    return made


def test_a_writer_stops_believing_before_the_others_may_take_over(holdings: Holdings) -> None:
    assert holdings.begin("k", 100.0 + 10.0 * TRUST - 0.01) is not None
    assert holdings.begin("k", 100.0 + 10.0 * TRUST) is None
    holdings.alive(108.0)
    assert holdings.begin("k", 110.0) is not None


def test_a_slot_is_given_away_when_the_writes_in_flight_are_through_and_none_begins(holdings: Holdings) -> None:
    first, second = holdings.begin("k", 101.0), holdings.begin("k", 101.0)
    assert first is not None
    assert second is not None
    members = {"a": WriterMember("a", 1, leaving=True), "b": WriterMember("b", 3, address="b:1")}
    holdings.saw(View(members, (Slot(0, "a", 5),), 7))
    assert holdings.drained(101.0) == []
    assert holdings.begin("k", 101.0) is None
    assert not holdings.end(first)
    assert holdings.end(second), "the keeper is to be called"
    assert holdings.drained(101.0) == [(Slot(0, "a", 5), "b")]
    holdings.moved([Slot(0, "b", 9)], "given")
    refusal = holdings.refusal("k")
    assert (refusal.owner, refusal.address) == ("b", "b:1")
    assert not holdings.is_moving("k")


def test_a_write_that_never_ends_does_not_keep_the_others_out(holdings: Holdings) -> None:
    assert holdings.begin("k", 101.0) is not None
    holdings.saw(View({"a": WriterMember("a", 1, leaving=True), "b": WriterMember("b", 3)}, (Slot(0, "a", 5),), 7))
    assert holdings.drained(101.0) == []
    holdings.alive(110.0)
    holdings.drained(101.1 + DRAIN)
    assert holdings.statistics().postponed == 1
    assert holdings.begin("k", 101.1 + DRAIN) is not None
    holdings.drained(101.2 + DRAIN + POSTPONE)
    assert holdings.begin("k", 101.2 + DRAIN + POSTPONE) is None


def test_what_the_fence_refused_is_not_tried_again_under_that_term(holdings: Holdings) -> None:
    slot = holdings.begin("k", 101.0)
    assert slot is not None
    holdings.doubt(slot)
    assert holdings.begin("k", 101.0) is None
    holdings.saw(View({"a": WriterMember("a", 1)}, (Slot(0, "a", 8),), 9))
    assert holdings.begin("k", 101.0) == Slot(0, "a", 8)


def test_a_writer_that_was_expelled_believes_nothing(holdings: Holdings) -> None:
    holdings.saw(View({"b": WriterMember("b", 7)}, (Slot(0, "a", 5),), 8))
    assert holdings.term is None
    assert holdings.begin("k", 101.0) is None
    assert holdings.is_moving("k")
