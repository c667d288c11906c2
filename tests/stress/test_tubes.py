"""The short form of `python -m tests.tubes_torture`: a few seeds, and how schedules are made."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tubes_torture import WEIGHTS, make_schedule, play, read_step


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(1, 6))
def test_downstream_becomes_equal_and_no_id_is_at_two_workers_whatever_happens(tmp_path: Path, seed: int) -> None:
    assert play(seed, tmp_path) == []


def test_a_seed_makes_the_same_schedule_each_time_and_every_fault_comes_up() -> None:
    schedules = [make_schedule(seed) for seed in range(60)]
    assert schedules == [make_schedule(seed) for seed in range(60)]
    assert {step.what for steps in schedules for step in steps} == WEIGHTS.keys()


def test_a_schedule_of_chosen_faults_has_no_others_and_its_steps_can_be_typed() -> None:
    steps = [step for seed in range(20) for step in make_schedule(seed, ["clock", "kill"])]
    assert {step.what for step in steps} == {"clock", "kill"}
    assert [read_step(f"{step.what}/{step.whom}/{step.seconds:g}") for step in steps] == steps
    with pytest.raises(ValueError, match="no fault 'clocks'"):
        read_step("clocks//1")
