"""One wheel for the deadlines of all sessions: nothing is late, little is early, and the task seldom wakes."""

from __future__ import annotations

import weakref
from typing import cast

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from replicad.daemon.hub import EARLY, EMPTY, Deadlines
from replicad.daemon.session import Session


class Scheduled:
    """Has deadlines, as a session."""

    def __init__(self, deadlines: Deadlines) -> None:
        self.deadlines = deadlines

    def set(self, deadline: float) -> None:
        self.deadlines.set(cast(Session, self), deadline)

    def forget(self) -> None:
        self.deadlines.forget(cast(Session, self))


class Member(Scheduled):
    """Wants to be called every `interval` seconds."""

    def __init__(self, deadlines: Deadlines, first: float, interval: float) -> None:
        super().__init__(deadlines)
        self.interval = interval
        self.due = first
        self.calls: list[tuple[float, float]] = []  # when it was called, and when it was due
        self.set(first)

    def mind(self, now: float) -> float:
        self.calls.append((now, self.due))
        self.due = now + self.interval
        return self.due


async def test_ten_thousand_members_are_called_in_time_by_a_task_that_seldom_wakes(
    nursery: trio.Nursery, autojump_clock: object
) -> None:
    deadlines = Deadlines()
    began = trio.current_time()
    members = [Member(deadlines, began + 5 + n / 2000, 5.0) for n in range(10_000)]
    nursery.start_soon(deadlines.run)
    await trio.sleep(20)
    calls = [call for member in members for call in member.calls]
    assert len(calls) >= 20_000
    assert min(now - due for now, due in calls) >= -EARLY - 1e-6
    assert max(now - due for now, due in calls) <= 1e-6
    assert len({now for now, _ in calls}) <= 15 / EARLY + 1


async def test_a_member_alone_is_called_once_for_each_deadline(nursery: trio.Nursery, autojump_clock: object) -> None:
    deadlines = Deadlines()
    nursery.start_soon(deadlines.run)
    await trio.sleep(1)
    member = Member(deadlines, trio.current_time() + 5, 5.0)
    await trio.sleep(15.5)
    assert [now - due for now, due in member.calls] == pytest.approx([0, 0, 0], abs=EARLY + 1e-6)


async def test_a_deadline_may_come_sooner_and_not_later_than_it_was_set(
    nursery: trio.Nursery, autojump_clock: object
) -> None:
    deadlines = Deadlines()
    nursery.start_soon(deadlines.run)
    now = trio.current_time()
    member = Member(deadlines, now + 100, 1000.0)
    await trio.sleep(1)
    member.set(now + 10)
    member.set(now + 50)
    await trio.sleep(200)
    assert [at - now for at, _ in member.calls] == pytest.approx([10], abs=EARLY + 1e-6)


async def test_a_member_that_was_forgotten_is_not_called(nursery: trio.Nursery, autojump_clock: object) -> None:
    deadlines = Deadlines()
    nursery.start_soon(deadlines.run)
    members = [Member(deadlines, trio.current_time() + 5, 5.0) for _ in range(2)]
    members[0].forget()
    members[0].forget()
    await trio.sleep(7)
    assert [len(member.calls) for member in members] == [0, 1]
    assert len(deadlines) == 1


async def test_members_that_are_gone_leave_nothing_behind(autojump_clock: object) -> None:
    deadlines = Deadlines()
    now = trio.current_time()
    stays = Member(deadlines, now + 60, 5.0)
    crowd = [Member(deadlines, now + 10 + n / 10, 5.0) for n in range(1000)]
    assert deadlines.remembered > 500
    for member in crowd:
        member.forget()
    assert len(deadlines) == 1
    assert deadlines.remembered <= EMPTY + 2
    gone = weakref.ref(crowd.pop())
    del crowd, member
    assert gone() is None
    assert not stays.calls


async def test_an_infinite_deadline_is_none(nursery: trio.Nursery, autojump_clock: object) -> None:
    deadlines = Deadlines()
    nursery.start_soon(deadlines.run)
    once = Member(deadlines, trio.current_time() + 5, float("inf"))
    never = Member(deadlines, float("inf"), 5.0)
    await trio.sleep(20)
    assert (len(once.calls), len(never.calls), len(deadlines)) == (1, 0, 0)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(("set", "forget", "wait")), st.integers(0, 4), st.floats(0, 3, allow_nan=False, width=32)
        ),
        max_size=60,
    )
)
def test_whoever_has_a_deadline_is_called_at_it_whatever_was_set_and_forgotten(
    steps: list[tuple[str, int, float]],
) -> None:
    deadlines = Deadlines()

    class Once(Scheduled):
        def __init__(self) -> None:
            super().__init__(deadlines)
            self.due = float("inf")

        def mind(self, now: float) -> float:
            assert now >= self.due - EARLY - 1e-6, "called without reason"
            if now >= self.due:
                self.due = float("inf")
            return self.due

    async def play() -> None:
        members = [Once() for _ in range(5)]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(deadlines.run)
            for what, n, seconds in steps:
                now = trio.current_time()
                if what == "wait":
                    await trio.sleep(seconds)
                elif what == "forget":
                    members[n].forget()
                    members[n].due = float("inf")
                else:
                    members[n].due = min(members[n].due, now + seconds)
                    members[n].set(now + seconds)
                late = [trio.current_time() - member.due for member in members]
                assert max(late) <= EARLY / 2 + 1e-6
                assert len(deadlines) == sum(member.due < float("inf") for member in members)
            nursery.cancel_scope.cancel()

    trio.run(play, clock=trio.testing.MockClock(autojump_threshold=0))


async def test_a_ping_is_rendered_once_for_all_that_are_sent_together(autojump_clock: object) -> None:
    deadlines = Deadlines()
    first = deadlines.ping(trio.current_time())
    assert deadlines.ping(trio.current_time() + EARLY / 2) is first
    assert first.startswith(b"PING ")
    assert first.endswith(b"\n")
    assert deadlines.ping(trio.current_time() + EARLY) is not first
