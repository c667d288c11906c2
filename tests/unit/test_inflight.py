"""What a writer has in flight: its position by the book, and a lock that covers everything that is not complete."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from replicad.streams.inflight import Handover, InFlight, Reservation
from tests.lengths import examples


def test_the_position_follows_the_example_of_the_definition() -> None:
    flight = InFlight(1)
    reserved: dict[int, Reservation] = {}
    seen: list[int] = []
    for action, number in [
        ("reserve", 2), ("reserve", 3), ("complete", 3), ("complete", 2), ("reserve", 4), ("reserve", 5),
        ("reserve", 6), ("complete", 5), ("complete", 4), ("complete", 6),
    ]:  # fmt: skip
        if action == "reserve":
            reserved[number] = flight.reserve([number], number - 1)
        else:
            flight.complete(reserved[number])
        seen.append(flight.position)
    assert seen == [1, 1, 1, 3, 3, 3, 3, 3, 5, 6]


def test_ids_that_go_back_are_refused() -> None:
    flight = InFlight(10)
    flight.reserve([11, 13], 10)
    for ids, bound in (([13], 10), ([12], 10), ([15, 14], 13), ([14], 14)):
        with pytest.raises(ValueError, match="went back"):
            flight.reserve(ids, bound)
    assert flight.maximum == 13


def test_completing_twice_is_a_mistake() -> None:
    flight = InFlight(0)
    reservation = flight.reserve([1], 0)
    assert flight.complete(reservation) == Handover(release=0, take=None)
    with pytest.raises(ValueError, match="complete already"):
        flight.complete(reservation)


class Flights(RuleBasedStateMachine):
    """Random reservations and completions, with a sequence that others use too and a lock that can be lost."""

    def __init__(self) -> None:
        super().__init__()
        self.flight = InFlight(0)
        self.sequence = 0
        self.open: list[Reservation] = []
        self.done: set[int] = {0}
        self.locked: int | None = None  # the bound on which Postgres holds our lock
        self.unprotected: list[Reservation] = []

    @rule(others=st.integers(0, 3), n=st.integers(1, 4))
    def reserve(self, others: int, n: int) -> None:
        self.sequence += others
        bound = self.sequence
        ids = range(bound + 1, bound + n + 1)
        self.sequence += n
        if self.flight.held is None:
            self.locked = bound
        self.open.append(self.flight.reserve(ids, bound))

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def complete(self, data: st.DataObject) -> None:
        reservation = self.open.pop(data.draw(st.integers(0, len(self.open) - 1)))
        move = self.flight.complete(reservation)
        if move is not None:
            assert move.release == self.locked
            assert move.take is None or move.take > move.release
            self.locked = move.take
        self.done.update(reservation.ids)
        self.unprotected = [r for r in self.unprotected if r is not reservation]

    @rule()
    def lose_the_lock(self) -> None:
        self.flight.lost()
        self.locked = None
        self.unprotected = list(self.open)

    @invariant()
    def the_position_is_the_largest_id_below_all_that_is_in_flight(self) -> None:
        lowest = min((r.ids[0] for r in self.open), default=self.sequence + 1)
        assert self.flight.position == max(number for number in self.done if number < lowest)
        assert self.flight.maximum == max([*self.done, *(number for r in self.open for number in r.ids)])

    @invariant()
    def the_lock_covers_everything_that_is_protected_and_nothing_is_locked_for_nothing(self) -> None:
        covered = [r for r in self.open if r not in self.unprotected]
        assert self.flight.held == self.locked
        assert (self.locked is None) == (not covered)
        assert all(self.locked is not None and self.locked < r.ids[0] for r in covered)
        assert len(self.flight) == len(self.open)


Flights.TestCase.settings = settings(max_examples=examples(200), stateful_step_count=30, deadline=None)
test_any_history_keeps_position_and_lock_right = Flights.TestCase
