"""Looks that many ask for at once: one at a time, and nobody is answered by one that began before they asked."""

from __future__ import annotations

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock

from replicad.daemon.joined import Joined

CALLERS, TURNS = 50, 10


@given(st.lists(st.tuples(st.floats(0, 5), st.floats(0, 5)), min_size=1, max_size=20))
def test_everybody_is_answered_by_a_run_that_began_after_they_asked(calls: list[tuple[float, float]]) -> None:
    runs: list[tuple[float, float]] = []
    running = 0

    async def job() -> None:
        nonlocal running
        began = trio.current_time()
        running += 1
        assert running == 1
        await trio.sleep(1)
        running -= 1
        runs.append((began, trio.current_time()))

    async def call(joined: Joined, at: float, patience: float) -> None:
        await trio.sleep(at)
        asked = trio.current_time()
        with trio.move_on_after(3 + patience) as scope:
            await joined()
        assert not scope.cancelled_caught, "two runs are all that anybody waits for"
        assert any(asked <= began and ended <= trio.current_time() for began, ended in runs)

    async def main() -> None:
        joined = Joined(job)
        async with trio.open_nursery() as nursery:
            for at, patience in calls:
                nursery.start_soon(call, joined, at, patience)

    trio.run(main, clock=MockClock(autojump_threshold=0))
    assert len(runs) <= len(calls)


async def test_who_joined_a_run_that_fails_gets_its_failure_and_the_next_one_runs_it_again(
    autojump_clock: MockClock,
) -> None:
    tries = 0

    async def job() -> None:
        nonlocal tries
        tries += 1
        await trio.sleep(1)
        if tries == 2:
            raise ValueError("no")

    joined = Joined(job)
    failed = 0

    async def call() -> None:
        nonlocal failed
        try:
            await joined()
        except ValueError:
            failed += 1

    async with trio.open_nursery() as nursery:
        nursery.start_soon(joined)
        await trio.sleep(0.5)
        for _ in range(3):
            nursery.start_soon(call)
    assert (tries, failed) == (2, 3)
    await joined()
    assert tries == 3


async def test_a_run_that_is_cancelled_answers_nobody(autojump_clock: MockClock) -> None:
    tries = 0

    async def job() -> None:
        nonlocal tries
        tries += 1
        await trio.sleep(1)

    joined = Joined(job)

    async def give_up() -> None:
        with trio.move_on_after(0.5):
            await joined()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(give_up)
        await trio.sleep(0.1)
        nursery.start_soon(joined)
    assert tries == 2
    with pytest.raises(trio.TooSlowError), trio.fail_after(0.5):
        await joined()


async def test_all_callers_of_a_run_go_on_as_soon_as_it_has_ended() -> None:
    ended = trio.Event()
    joined = Joined(ended.wait)
    served: list[int] = []

    async def call(number: int) -> None:
        await joined()
        served.append(number)

    async with trio.open_nursery() as nursery:
        for number in range(CALLERS):
            nursery.start_soon(call, number)
        await trio.testing.wait_all_tasks_blocked()
        ended.set()
        for _ in range(TURNS):
            await trio.lowlevel.checkpoint()
        assert len(served) == CALLERS
