"""The simulation in its short form: a seed replays, all clients agree with the tables, and a defect is found."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterable
from unittest.mock import patch

import pytest

from replicad.positions.lockwatch import Hold, LockWatch
from replicad.positions.watched import SequenceValue, Watched
from replicad.streams.serving.lane import Lane
from tests.conftest import PATIENCE

from .clients import Violation
from .world import Plan, simulate

SHORT = Plan(hours=0.002, calm=1.0, burst=3.0)


def test_a_seed_replays_byte_for_byte_in_another_process_and_another_seed_does_not() -> None:
    words = [sys.executable, "-m", "tests.simulation", "--hours", "0.002", "--calm", "1", "--burst", "3", "--seed"]
    runs = [subprocess.Popen([*words, seed], stdout=subprocess.PIPE, text=True) for seed in ("5", "5", "6")]
    said = [run.communicate(timeout=2 * PATIENCE)[0] for run in runs]
    assert [run.returncode for run in runs] == [0, 0, 0], said
    hashes = [one.rpartition("; ")[2].strip() for one in said]
    assert len(hashes[0]) == 64
    assert hashes[0] == hashes[1]
    assert hashes[0] != hashes[2]


def test_all_clients_have_the_rows_of_the_tables_whatever_happens() -> None:
    result = simulate(SHORT)
    assert result.quiet > 0
    assert result.commits > 20
    assert result.lines > 100


def _all_given_out(_: Watched, value: SequenceValue) -> int:
    return value.last_value


def _not_listed(
    self: LockWatch, last_value: int, inserted: int, holds: Iterable[Hold], writers: Iterable[str] = ()
) -> None:
    _feed(self, last_value, inserted, [], tuple(writers))


async def _nothing_announced(self: Lane, epoch: str, shared: Callable[[str], int]) -> None:
    self._forked = None
    self.epoch = epoch


_feed = LockWatch.feed


@pytest.mark.parametrize(
    ("owner", "name", "wrong", "faults"),
    [
        (Watched, "given_out", _all_given_out, ("switchover",)),
        (LockWatch, "feed", _not_listed, ("cut",)),
        (Lane, "_announce_fork", _nothing_announced, ("crash",)),
    ],
    ids=["a value that nobody has got counts", "holders of locks do not count", "a fork is not sent"],
)
def test_a_daemon_with_a_defect_is_found(owner: type, name: str, wrong: object, faults: tuple[str, ...]) -> None:
    def five_seeds() -> None:
        for seed in range(1, 6):
            simulate(Plan(seed=seed, hours=0.01, calm=1.0, faults=faults))

    with patch.object(owner, name, wrong), pytest.raises(Violation):
        five_seeds()
