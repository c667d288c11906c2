"""Who is held for dead: only whose beat was watched unchanged for the whole time to live."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from replicad.beats import BeatWatch

GAP = 3.0


def watch(looks: list[tuple[float, int]]) -> list[float]:
    """How long the beat that is there has been silent, at each look: a pair of time and beat."""
    made = BeatWatch[int](GAP)
    return [made.observe([beat], now)[beat] for now, beat in looks]


def test_a_beat_is_silent_from_when_it_was_first_seen() -> None:
    assert watch([(100.0 + n, 7) for n in range(5)]) == [0, 1, 2, 3, 4]
    assert watch([(100.0, 7), (101.0, 8), (102.0, 8), (103.0, 9)]) == [0, 0, 1, 0]


def test_one_that_was_away_begins_anew_and_others_do_not_matter_to_it() -> None:
    made = BeatWatch[str](GAP)
    made.observe(["a", "b"], 0)
    assert made.observe(["b"], 1) == {"b": 1}
    assert made.observe(["a", "b"], 2) == {"a": 0, "b": 2}


def test_an_outage_in_which_nobody_could_look_makes_nobody_look_dead() -> None:
    assert watch([(100.0, 7), (101.0, 7), (500.0, 7), (501.0, 7)]) == [0, 1, 1 + GAP, 2 + GAP]


@given(st.lists(st.tuples(st.floats(0, 20), st.integers(0, 2)), min_size=1, max_size=40))
def test_nobody_is_held_for_silent_for_longer_than_it_was(steps: list[tuple[float, int]]) -> None:
    made, now, since, beat = BeatWatch[int](GAP), 0.0, 0.0, -1
    for pause, said in steps:
        now += pause
        if said != beat:
            beat, since, watched = said, now, 0.0
        else:
            watched += min(pause, GAP)
        silent = made.observe([beat], now)[beat]
        assert silent <= now - since + 1e-6
        assert abs(silent - watched) < 1e-6
