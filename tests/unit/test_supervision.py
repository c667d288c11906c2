"""Tasks that fail are reported and begun again; troubles are logged once, and seen until they are over."""

from __future__ import annotations

from itertools import pairwise

import pytest
import trio
from structlog.testing import capture_logs
from trio.testing import MockClock

from replicad.daemon.troubles import AWAY_GRACE, DATABASE, Restarts, Troubles, keep_running, keep_service
from replicad.errors import DatabaseError, DatabaseUnavailable

STEADY, MAX_PAUSE = Restarts().steady, Restarts().longest


@pytest.mark.parametrize(
    "error", [OSError("disk"), MemoryError(), ValueError("x"), AssertionError(), DatabaseError("no")]
)
async def test_a_task_that_raises_is_begun_again_and_its_trouble_ends_when_it_is_steady(
    error: Exception, autojump_clock: MockClock
) -> None:
    troubles = Troubles()
    runs = 0

    async def job() -> None:
        nonlocal runs
        runs += 1
        if runs <= 3:
            raise error
        await trio.sleep_forever()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(keep_running, job, "service", "x", troubles)
        await trio.sleep(STEADY)
        assert runs == 4
        assert troubles.why("service", "x")
        await trio.sleep(STEADY)
        assert troubles.why("service", "x") is None
        assert sum(troubles.counts.values()) == 3
        nursery.cancel_scope.cancel()


async def test_the_pause_between_two_tries_is_bounded(autojump_clock: MockClock) -> None:
    times: list[float] = []

    async def job() -> None:
        times.append(trio.current_time())
        raise ValueError

    with trio.move_on_after(20 * MAX_PAUSE):
        await keep_running(job, "service", "x", Troubles())
    pauses = [round(b - a, 6) for a, b in pairwise(times)]
    assert pauses == sorted(pauses)
    assert pauses[-1] == pytest.approx(MAX_PAUSE)


async def test_a_service_that_cannot_start_says_so_to_whoever_starts_it(autojump_clock: MockClock) -> None:
    async def run(task_status: trio.TaskStatus[None]) -> None:
        raise DatabaseError("no schema")

    troubles = Troubles()
    with pytest.raises(DatabaseError, match="no schema"):
        await keep_service(run, "x", troubles)
    assert troubles.current() == []


async def test_a_service_that_failed_after_its_start_is_begun_again(autojump_clock: MockClock) -> None:
    began = 0

    async def run(task_status: trio.TaskStatus[None]) -> None:
        nonlocal began
        began += 1
        task_status.started()
        if began == 1:
            raise OSError("gone")
        await trio.sleep_forever()

    troubles = Troubles()
    async with trio.open_nursery() as nursery:
        await nursery.start(keep_service, run, "x", troubles)
        await trio.sleep(1)
        assert began == 2
        assert "OSError: gone" in (troubles.why("service", "x") or "")
        nursery.cancel_scope.cancel()


async def test_cancellation_is_no_trouble(autojump_clock: MockClock) -> None:
    troubles = Troubles()
    with trio.move_on_after(1):
        await keep_running(trio.sleep_forever, "service", "x", troubles)
    assert troubles.current() == []


def test_a_trouble_is_logged_when_it_begins_changes_and_ends_and_not_in_between() -> None:
    troubles = Troubles(lambda: 1.0)
    with capture_logs() as logs:
        for reason in ("a", "a", "b", "b"):
            troubles.begin("stream", "s", "copy", reason, code="database")
        assert troubles.why("stream", "s") == "b"
        troubles.end("stream", "s", "copy")
        troubles.end("stream", "s", "copy")
    assert [entry["event"] for entry in logs] == ["trouble_began", "trouble_changed", "trouble_over"]
    assert troubles.counts["stream", "copy", "database"] == 4


def test_an_outage_is_reported_by_the_poller_alone() -> None:
    now = 0.0
    troubles = Troubles(lambda: now)
    lost = DatabaseUnavailable("connection lost")
    troubles.fail("stream", "s", "copy", lost)
    assert troubles.current() == []
    troubles.begin(DATABASE, DATABASE, "poll", "away", code="database_unavailable")
    now = 10 * AWAY_GRACE
    troubles.fail("stream", "s", "copy", lost)
    assert [trouble.place.kind for trouble in troubles.current()] == [DATABASE]


def test_a_lost_connection_that_the_poller_does_not_explain_is_reported() -> None:
    now = 0.0
    troubles = Troubles(lambda: now)
    lost = DatabaseUnavailable("all connections are busy")
    troubles.fail("stream", "s", "copy", lost)
    now = AWAY_GRACE
    troubles.fail("stream", "s", "copy", lost)
    assert troubles.why("stream", "s") == "all connections are busy"
    troubles.end("stream", "s", "copy")
    troubles.fail("stream", "s", "copy", lost)
    assert troubles.current() == []
