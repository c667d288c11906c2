"""`serve --wait-for-database`: waits for a Postgres that does not answer, and for nothing else."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
import structlog
import trio

from replicad.cli import app
from replicad.daemon import daemon
from replicad.errors import DatabaseRefused, DatabaseUnavailable, ReplicadError

Starts = Callable[..., list[float]]


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> Starts:
    """Have Postgres answer after `after` seconds, with `then` if that is given; returns the times of the tries."""

    def make(after: float, then: ReplicadError | None = None) -> list[float]:
        tries: list[float] = []

        @asynccontextmanager
        async def open_database(*_: Any, **__: Any) -> AsyncIterator[None]:
            tries.append(trio.current_time())
            if trio.current_time() < tries[0] + after:
                raise DatabaseUnavailable("no Postgres answers")
            if then is not None:
                raise then
            yield

        monkeypatch.setattr(daemon, "open_database", open_database)
        return tries

    return make


async def test_it_waits_until_postgres_answers_and_says_so_now_and_then(
    starts: Starts, autojump_clock: trio.testing.MockClock
) -> None:
    tries = starts(after=25)
    with structlog.testing.capture_logs() as events:
        await daemon.Patience(60).wait_for_database("postgresql://x")
    assert 25 <= trio.current_time() - tries[0] <= 27
    assert max(b - a for a, b in itertools.pairwise(tries)) <= 2, "it is noticed soon"
    assert [one["event"] for one in events] == ["waiting_for_database"] * 3
    assert next(one["left_s"] for one in events) == 60


async def test_it_ends_in_time_with_the_reason(starts: Starts, autojump_clock: trio.testing.MockClock) -> None:
    tries = starts(after=1000)
    with pytest.raises(DatabaseUnavailable, match=r"no Postgres answers \(waited 60 s: --wait-for-database\)"):
        await daemon.Patience(60).wait_for_database("postgresql://x")
    assert trio.current_time() - tries[0] <= 60


async def test_a_refusal_ends_it_at_once(starts: Starts, autojump_clock: trio.testing.MockClock) -> None:
    tries = starts(after=3, then=DatabaseRefused("wrong password"))
    with pytest.raises(DatabaseRefused, match="wrong password"):
        await daemon.Patience(60).wait_for_database("postgresql://x")
    assert trio.current_time() - tries[0] < 6


async def test_a_signal_ends_the_wait(starts: Starts, autojump_clock: trio.testing.MockClock) -> None:
    starts(after=1000)
    stop = trio.Event()
    began = trio.current_time()
    async with trio.open_nursery() as nursery:

        @nursery.start_soon
        async def ring() -> None:
            await trio.sleep(7)
            stop.set()

        assert not await daemon._unless(stop, partial(daemon.Patience(3600).wait_for_database, "postgresql://x"))
    assert trio.current_time() - began == pytest.approx(7)


def test_serve_has_the_setting_and_the_exit_status(capfd: pytest.CaptureFixture[str]) -> None:
    words = ["--database", "postgresql://u@127.0.0.1:1/x", "--wait-for-database", "300ms", "--listen", "127.0.0.1:0"]
    assert app.run(["serve", *words]) == 4
    assert "(waited 0.3 s: --wait-for-database)" in capfd.readouterr().err.splitlines()[-1]
