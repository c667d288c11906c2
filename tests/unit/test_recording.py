"""Recordings of polls, and their checker: it finds nothing in true ones, and what is untrue in others."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replicad.positions.lockwatch import Hold, LockWatch
from tests import recording
from tests.lengths import examples
from tests.recording import PollRecord, Recorder
from tests.unit.test_lockwatch import Poller, Violation, World, run


def recorded_by(recorder: Recorder, *, mistaken: Callable[[LockWatch], None] = lambda watch: None) -> type[Poller]:
    """A poller of the simulation that records all it reads, and may make a mistake in what it publishes."""

    class Recorded(Poller):
        def __init__(self, world: World, between: Callable[[], None], *, published: int | None = 0) -> None:
            super().__init__(world, between, published=published)
            recorder.begin("s", "watch", published, {})

        def feed(self, last_value: int, wal: int, holders: list[Hold]) -> None:
            super().feed(last_value, wal, holders)
            self.seen = PollRecord(last_value, wal, tuple(holders))

        def flush(self) -> None:
            flushed, before = self.world.flushed, self.watch.waits_for_flush
            super().flush()
            if before and self.world.flushed != flushed and not self.watch.waits_for_flush:
                flushed = recording.ALL
            mistaken(self.watch)
            recorder.poll(
                "s",
                self.seen,
                flushed,
                writers=("A", "B"),
                position=self.watch.position,
                per_writer=self.watch.per_writer,
            )

        def reconnect(self) -> None:
            super().reconnect()
            recorder.begin("s", "connection", self.watch.position, self.watch.per_writer)

    return Recorded


def problems_of(path: Path) -> list[str]:
    with path.open() as lines:
        return list(recording.check(lines))


@settings(max_examples=examples(150), deadline=None)
@given(st.integers(0, 2**32), st.booleans())
def test_nothing_is_found_in_what_the_lock_watch_publishes(
    tmp_path_factory: pytest.TempPathFactory, seed: int, reserving: bool
) -> None:
    path = tmp_path_factory.mktemp("recording") / "polls"
    with Recorder(path) as recorder:
        run(seed, recorded_by(recorder), reserving=reserving, start=10)
    assert problems_of(path) == []


def one_too_far(watch: LockWatch) -> None:
    if watch.position is not None and watch.lowest is not None:
        watch.position += 1


def unflushed(watch: LockWatch) -> None:
    watch.all_flushed()


def one_back(watch: LockWatch) -> None:
    if watch.position:
        watch.position -= 1


def one_writer_too_far(watch: LockWatch) -> None:
    if "A" in watch.per_writer and watch.lowest is not None and watch.last_value is not None:
        watch.per_writer["A"] = watch.last_value + 1


@pytest.mark.parametrize("mistake", [one_too_far, unflushed, one_back, one_writer_too_far])
def test_what_was_not_safe_is_found(mistake: Callable[[LockWatch], None], tmp_path: Path) -> None:
    for seed in range(100):
        path = tmp_path / str(seed)
        with Recorder(path) as recorder:
            with suppress(Violation):
                run(seed, recorded_by(recorder, mistaken=mistake), start=10)
        if problems_of(path):
            return
    pytest.fail("the checker has found no mistake")


def test_a_line_that_is_none_of_a_recording_is_named() -> None:
    assert list(recording.check(["nonsense\n"])) == ["line 1 is not of a recording"]
