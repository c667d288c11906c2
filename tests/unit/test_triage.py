"""The triage of a partition: what is tried next, and what is parked. Calls take no time here; the clock jumps."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from replicad.client.ledger import IdQueue, Ledger, Touch
from replicad.client.triage import DOUBT, Triage, Trial
from replicad.retry import Backoff
from tests.lengths import LONG


class Play:
    """A partition without a daemon: a call takes a time of a clock that jumps, four calls at a time."""

    def __init__(self, ids: list[int], *, bad: Callable[[int], bool], op: str = "T", call: float = 0.01) -> None:
        self.ledger = Ledger()
        self.now = 0.0
        self.done: set[int] = set()
        self.parked: set[int] = set()
        self.calls = 0
        self.call = call
        self.running: list[Trial] = []
        self.bad = bad
        self.chance = random.Random(7)
        self.triage = Triage(
            self.ledger,
            places=4,
            batch_ids=500,
            tries=5,
            backoff=Backoff(0.5, 60.0),
            without_proof=lambda: False,
            chance=self.chance.random,
        )
        for seq, id in enumerate(ids, 1):
            self.ledger.add(seq, 0, op, [id])

    def play(self, until: Callable[[], bool], within: float) -> float:
        """Make calls until the condition holds; the seconds that it took."""
        began, running = self.now, self.running
        while not until():
            assert self.now - began < within, f"{len(self.done)} done, {len(self.parked)} parked, {self.calls} calls"
            while (trial := self.triage.next(self.now)) is not None:
                running.append(trial)
            if running:
                self.now += self.call / len(running)
                self.end(running.pop(0))
            else:
                self.now = max(self.now + 0.001, self.triage.due())
        return self.now - began

    def end(self, trial: Trial) -> None:
        self.calls += 1
        ids = {touch.id for touch in trial.touches}
        if any(map(self.bad, ids)):
            if self.triage.failed(trial, self.now):
                self.parked |= ids
                self.ledger.done(trial.touches)
        else:
            self.triage.succeeded(trial, self.now)
            if not trial.again:
                self.done |= ids
                self.ledger.done(trial.touches)


def negative(id: int) -> bool:
    return id < 0


@pytest.mark.parametrize("share", [10, 50, 90])
def test_good_ids_come_at_a_hundred_in_a_second_beside_any_share_of_poison(share: int) -> None:
    ids = [n if n % 100 >= share else -n for n in range(1, 20_001 if LONG else 5_001)]
    good = sum(id > 0 for id in ids)
    play = Play(ids, bad=negative, call=0.003)
    took = play.play(lambda: len(play.done) == good, within=good / 100 + 5)
    play.play(lambda: len(play.parked) == len(ids) - good, within=120.0 - took)


@pytest.mark.parametrize("many", [6_000, pytest.param(30_000, marks=pytest.mark.long)])
def test_two_hundred_poison_ids_are_parked_in_a_second_beside_good_ids(many: int) -> None:
    """A call takes 3 ms, and there are four at a time. The pauses of one id alone take 7.5 s."""
    ids = [n if n % 10 == 0 else -n for n in range(1, many + 1)]
    play = Play(ids, bad=negative, call=0.003)
    play.play(lambda: len(play.done) == many // 10, within=many / 1000 + 5)
    play.play(lambda: len(play.parked) == many // 10 * 9, within=many / 200)
    assert play.calls < 3 * len(ids)


def test_ids_that_failed_alone_are_tried_again_together_and_parked_only_alone() -> None:
    play = Play([*range(-40, 0), 1], bad=negative)
    failed_in: dict[int, list[int]] = {id: [] for id in range(-40, 0)}
    end = play.end

    def note(trial: Trial) -> None:
        for touch in trial.touches:
            if trial.lane is None and (trial.members or len(trial.touches) == 1) and touch.id < 0:
                failed_in[touch.id].append(len(trial.touches))
        end(trial)

    play.end = note  # type: ignore[method-assign]
    play.play(lambda: len(play.parked) == 40, within=60.0)
    assert all(sizes[-1] == 1 for sizes in failed_in.values())
    assert sum(size > 1 for sizes in failed_in.values() for size in sizes) > 80, "two of the tries of most ids"


def test_good_ids_that_failed_alone_in_an_outage_are_processed_although_they_are_tried_together_with_poison() -> None:
    play = Play(list(range(-100, 100)), bad=lambda id: id < 0 or play.now < 5.0)
    play.play(lambda: len(play.done) == 100, within=60.0)
    play.play(lambda: len(play.parked) == 100, within=120.0)
    assert play.done == set(range(100))


def test_an_id_that_hangs_delays_the_ids_with_which_it_is_tried_together_once() -> None:
    play = Play([-1, -2], bad=negative)
    bad = [Touch(id, 0, "T", (1 - id,)) for id in (-1, -2)]
    members = [Trial([touch], tries=1) for touch in bad]
    play.triage._running[None] += 1
    play.triage.failed(Trial(bad, members=members), 0.0, hung=True)
    again = [play.triage._take_failed(100.0) for _ in bad]
    assert [len(trial.touches) for trial in again] == [1, 1]


def test_the_tries_of_an_id_go_on_under_the_next_lease() -> None:
    play = Play([-1, 1, 2, 3], bad=negative)
    play.triage.failing["0/-1"] = 4
    play.play(lambda: play.parked == {-1}, within=1.0)
    assert play.triage.failing == {"0/-1": 5}


def test_an_id_that_was_processed_has_failed_never() -> None:
    play = Play([1], bad=lambda _: play.now < 0.1)
    play.triage.failing["0/1"] = 2
    play.play(lambda: play.done == {1}, within=60.0)
    assert play.triage.failing == {}


@pytest.mark.parametrize("front", [0, 2000])
@pytest.mark.parametrize("behind", [0, 2000])
def test_good_ids_are_found_between_bursts_of_poison_and_all_poison_is_parked(front: int, behind: int) -> None:
    ids = [*range(-front, 0), *range(100), *range(-front - behind, -front)]
    play = Play(ids, bad=negative)
    play.play(lambda: len(play.done) == 100, within=120.0)
    play.play(lambda: len(play.parked) == front + behind, within=300.0)


def test_in_an_outage_nothing_is_parked_and_the_calls_become_rare() -> None:
    play = Play(list(range(5000)), bad=lambda id: play.now > 0.05 and play.now < 4000)
    play.play(lambda: play.now > 600, within=4000)
    calls = play.calls
    play.play(lambda: play.now > 1800, within=4000)
    assert play.calls - calls < 60, "once in a minute, and the id that was processed before"
    assert not play.parked
    play.play(lambda: len(play.done) == 5000, within=3000)


def test_one_failing_id_is_tried_after_pauses_although_it_is_the_only_one() -> None:
    play = Play([-1], bad=negative)
    play.play(lambda: play.now > 3600, within=4000)
    assert 20 < play.calls < 80
    assert not play.parked


def test_a_place_is_left_for_live_ids_during_a_backfill() -> None:
    play = Play(list(range(10_000)), bad=negative, op="B")
    trials = [play.triage.next(0.0) for _ in range(5)]
    assert [trial and trial.lane for trial in trials] == [IdQueue.BACKFILL] * 3 + [None] * 2
    play.ledger.add(10**6, 0, "U", [10**6])
    live = play.triage.next(0.0)
    assert live is not None
    assert [touch.id for touch in live.touches] == [10**6]


def test_failed_ids_are_tried_again_although_live_ids_never_end() -> None:
    play = Play([-1, 1, 2, 3], bad=negative)
    seq = 10

    def more() -> bool:
        nonlocal seq
        seq += 1
        play.ledger.add(seq, 0, "U", [1000 + seq])
        return play.parked == {-1}

    play.play(more, within=60.0)


def test_no_more_than_a_few_calls_in_a_row_fail_before_calls_become_rare() -> None:
    play = Play(list(range(5000)), bad=lambda _: True)
    play.play(lambda: play.now > 10.0, within=20.0)
    assert DOUBT <= play.calls < 2 * DOUBT
