"""The short form of `make torture`: one schedule, always the same; and how schedules are made."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.torture import play

from .schedule import KINDS, make_schedule


@pytest.mark.stress
@pytest.mark.parametrize("seed", [327])
async def test_no_client_differs_from_the_tables_whatever_happens(
    postgres_folder: Path, fork_template: Path, seed: int
) -> None:
    assert await play(seed, postgres_folder, fork_template), "see what it printed"


def test_a_seed_makes_the_same_schedule_each_time_and_every_fault_comes_up() -> None:
    rounds = [steps for seed in range(60) for steps in make_schedule(seed)]
    assert rounds == [steps for seed in range(60) for steps in make_schedule(seed)]
    assert {step.what for steps in rounds for step in steps} | {"pause"} == set(KINDS)
