"""One heap for the deadlines of all sessions: nothing is late, little is early, and the task seldom wakes."""

from __future__ import annotations

import pytest
import trio

from replicad.daemon.deadlines import EARLY, Deadlines


class Member:
    """Wants to be called every `interval` seconds."""

    def __init__(self, deadlines: Deadlines, first: float, interval: float) -> None:
        self.deadlines = deadlines
        self.interval = interval
        self.due = first
        self.calls: list[tuple[float, float]] = []  # when it was called, and when it was due
        deadlines.set(self, first)

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


async def test_a_member_alone_is_called_exactly_at_its_deadline(nursery: trio.Nursery, autojump_clock: object) -> None:
    deadlines = Deadlines()
    nursery.start_soon(deadlines.run)
    await trio.sleep(1)
    member = Member(deadlines, trio.current_time() + 5, 5.0)
    await trio.sleep(16)
    assert [now - due for now, due in member.calls] == pytest.approx([0, 0, 0])


async def test_a_deadline_may_come_sooner_and_not_later_than_it_was_set(
    nursery: trio.Nursery, autojump_clock: object
) -> None:
    deadlines = Deadlines()
    nursery.start_soon(deadlines.run)
    now = trio.current_time()
    member = Member(deadlines, now + 100, 1000.0)
    await trio.sleep(1)
    deadlines.set(member, now + 10)
    deadlines.set(member, now + 50)
    await trio.sleep(200)
    assert [round(at - now, 6) for at, _ in member.calls] == [10]


async def test_a_member_that_was_forgotten_is_not_called(nursery: trio.Nursery, autojump_clock: object) -> None:
    deadlines = Deadlines()
    nursery.start_soon(deadlines.run)
    members = [Member(deadlines, trio.current_time() + 5, 5.0) for _ in range(2)]
    deadlines.forget(members[0])
    deadlines.forget(members[0])
    await trio.sleep(7)
    assert [len(member.calls) for member in members] == [0, 1]
    assert len(deadlines) == 1


async def test_a_ping_is_rendered_once_for_all_that_are_sent_together(autojump_clock: object) -> None:
    deadlines = Deadlines()
    first = deadlines.ping(trio.current_time())
    assert deadlines.ping(trio.current_time() + EARLY / 2) is first
    assert first.startswith(b"PING ")
    assert first.endswith(b"\n")
    assert deadlines.ping(trio.current_time() + EARLY) is not first
