"""The short form of `make torture`: one schedule, always the same; and how schedules are made."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.shrinking import Enough, shrink
from tests.torture import play

from .schedule import KINDS, Step, make_schedule, playable, written


@pytest.mark.long
@pytest.mark.stress
@pytest.mark.parametrize("seed", [327])
async def test_no_client_differs_from_the_tables_whatever_happens(
    postgres_folder: Path, fork_template: Path, seed: int
) -> None:
    assert await play(seed, postgres_folder, fork_template, make_schedule(seed)), "see what it printed"


def test_a_seed_makes_the_same_schedule_each_time_and_every_fault_comes_up() -> None:
    rounds = [steps for seed in range(60) for steps in make_schedule(seed)]
    assert rounds == [steps for seed in range(60) for steps in make_schedule(seed)]
    assert {step.what for steps in rounds for step in steps} | {"pause"} == set(KINDS)


def test_each_schedule_is_playable_and_can_be_written_down() -> None:
    for seed in range(60):
        rounds = make_schedule(seed)
        assert playable(rounds)
        again = written(json.dumps([[step.plain() for step in steps] for steps in rounds]))
        assert [[(one.what, one.args) for one in steps] for steps in again] == [
            [(one.what, one.args) for one in steps] for steps in rounds
        ]


@pytest.mark.parametrize(
    "text",
    ["[", "[1]", '[[["no such fault",[],0]]]', '[[["promote",["primary_ends"],0]]]', '[[["restore",["many"],0]]]'],
)
def test_a_schedule_that_cannot_be_played_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"step|fault"):
        written(text)


async def test_the_shortest_schedule_that_fails_is_found_with_what_it_needs() -> None:
    """A failure that needs a promotion and a kill is shrunk to these two and the standby."""
    kinds = ["ddl", "swap"] * 10 + ["standby", "crash", "kill", "ddl", "promote"] + ["ddl", "restart"] * 10
    steps = [Step(what, (0,)) for what in kinds]
    tried = 0

    async def fails(shorter: Sequence[Step]) -> bool:
        nonlocal tried
        tried += 1
        return {"kill", "promote"} <= {step.what for step in shorter}

    found = await shrink(steps, fails, lambda shorter: playable([list(shorter)]))
    assert sorted(step.what for step in found) == ["kill", "promote", "standby"]
    assert tried < 100


async def test_shrinking_ends_when_no_more_tries_are_wanted() -> None:
    async def fails(shorter: Sequence[int]) -> bool:
        raise Enough

    assert await shrink([1, 2, 3], fails, lambda _: True) == [1, 2, 3]
