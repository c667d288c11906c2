"""Who is held for dead: only whose beat was watched unchanged for the whole time to live."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from replicad.protocol.commands import Part
from replicad.tubes.leases import LONGEST_GAP, LeaseRow, LeaseWatch

TTL = 5.0


def row(beat: int) -> LeaseRow:
    return LeaseRow("t", Part(0, 1), "me", 1, beat, TTL)


def watch(looks: list[tuple[float, int]]) -> list[bool]:
    """Whether the lease was expired at each look, a pair of time and beat."""
    made = LeaseWatch()
    return [made.observe([row(beat)], now)[0].expired for now, beat in looks]


def test_a_beat_that_stays_the_same_for_the_whole_time_to_live_is_expired() -> None:
    assert watch([(100.0 + n, 7) for n in range(7)]) == [False] * 5 + [True] * 2


def test_a_beat_that_changes_is_alive_and_one_that_was_away_begins_anew() -> None:
    assert not any(watch([(100.0 + n, n // 4) for n in range(30)]))
    made = LeaseWatch()
    for now in range(5):
        made.observe([row(7)], now)
    made.observe([], 5)
    assert made.observe([row(7)], 6)[0].silent == 0


def test_an_outage_in_which_nobody_could_look_makes_nobody_look_dead() -> None:
    assert watch([(100.0, 7), (101.0, 7), (500.0, 7)]) == [False, False, False]


@given(st.lists(st.tuples(st.floats(0, 20), st.integers(0, 2)), min_size=1, max_size=40))
def test_nobody_is_held_for_silent_for_longer_than_it_was(steps: list[tuple[float, int]]) -> None:
    made, now, since, beat = LeaseWatch(), 0.0, 0.0, -1
    for pause, said in steps:
        now += pause
        if said != beat:
            beat, since, seen = said, now, 0.0
        else:
            seen += min(pause, LONGEST_GAP)
        [view] = made.observe([row(beat)], now)
        assert view.silent <= now - since + 1e-6
        assert abs(view.silent - seen) < 1e-6
