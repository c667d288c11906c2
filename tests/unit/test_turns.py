"""Masses of work use the time that is left: floods of lines and of relays beside clients that say little."""

from __future__ import annotations

from typing import cast

import trio
import trio.testing
from trio.testing import MockClock

from replicad.daemon.fairness import PATIENCE, TURN_LINES, YieldQueue
from replicad.daemon.hub import BATCH, SLICE, Announcing
from replicad.daemon.session import Session
from replicad.protocol.connection import CloseReason

from .test_newcomers import Door, Open, door

__all__ = ["door"]


class Ear:
    """Notes what it gets."""

    hears = True

    def __init__(self) -> None:
        self.heard = b""
        self.calls = 0

    def deliver(self, lines: bytes) -> None:
        self.heard += lines
        self.calls += 1


async def test_work_in_masses_waits_while_anything_else_can_run(autojump_clock: MockClock) -> None:
    turns = YieldQueue(1, 1)
    done: list[str] = []

    async def light() -> None:
        for _ in range(20):
            await trio.lowlevel.checkpoint()
        done.append("light")

    async def heavy() -> None:
        await turns.next()
        done.append("heavy")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(heavy)
        nursery.start_soon(light)
    assert done == ["light", "heavy"]
    assert turns.waits == 1


async def test_those_that_wait_for_a_turn_go_on_one_by_one() -> None:
    turns = YieldQueue(1, 1)
    order: list[int] = []

    async def heavy(number: int) -> None:
        for _ in range(3):
            await turns.next()
            order.append(number)

    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            for number in range(4):
                nursery.start_soon(heavy, number)
    assert sorted(order[:4]) == sorted(order[4:8]) == [0, 1, 2, 3]


async def test_a_crowd_that_waits_delays_another_client_by_one_turn() -> None:
    turns = YieldQueue()
    order: list[str] = []

    async def wait(client: str) -> None:
        await turns.next(client)
        order.append(client)

    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            for client in [*["crowd"] * 50, "other"]:
                nursery.start_soon(wait, client)
    assert order.index("other") <= 3


async def test_the_queue_moves_on_though_the_loop_is_never_idle() -> None:
    turns = YieldQueue(1, 1)
    async with trio.open_nursery() as nursery:

        async def spin() -> None:
            while True:
                await trio.lowlevel.checkpoint()

        nursery.start_soon(spin)
        with trio.fail_after(60):
            for _ in range(5):
                await turns.next()
        nursery.cancel_scope.cancel()
    assert PATIENCE < 0.05


async def test_a_polite_client_is_answered_long_before_a_flood_is_handled(
    door: Open, autojump_clock: MockClock
) -> None:
    at: Door = door()
    flood, polite = at.connect(), at.connect()
    for guest in (flood, polite):
        await guest.say(b"NAME x\n")
    lines = 20_000
    async with trio.open_nursery() as nursery:
        nursery.start_soon(flood.stream.send_all, b"REMOTE_SERVER_UP x\n" * lines)
        await trio.lowlevel.checkpoint()
        await polite.stream.send_all(b"REMOTE_SERVER_UP y\n")
        while not polite.commands:
            await trio.lowlevel.checkpoint()
        assert len(flood.commands) <= 4 * TURN_LINES
        while len(flood.commands) < lines:
            await trio.sleep(0.01)
    assert at.hub.statistics().turns >= lines / TURN_LINES - 10


async def test_newcomers_whose_lines_do_not_end_wait_for_a_turn_each(door: Open, autojump_clock: MockClock) -> None:
    at: Door = door()
    crowd = [at.connect() for _ in range(50)]
    for guest in crowd:
        await guest.stream.send_all(b"x" * 5000)
    assert [guest.reason for guest in crowd] == [None] * len(crowd)
    await trio.sleep(1)
    assert {guest.reason for guest in crowd} == {CloseReason.BAD_LINE}
    assert at.hub.statistics().turns >= len(crowd)


def announcing_to(ears: list[Ear], most: int) -> Announcing:
    return Announcing(cast(list[Session], ears), most, YieldQueue(1, 1))


async def test_announcements_go_out_in_slices_and_together(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    ears = [Ear() for _ in range(10 * SLICE)]
    announcing = announcing_to(ears, 1 << 20)
    nursery.start_soon(announcing.run)
    await trio.testing.wait_all_tasks_blocked()
    announcing.put(b"first\n", None)
    while not any(ear.calls for ear in ears):
        await trio.lowlevel.checkpoint()
    assert sum(ear.calls for ear in ears) <= SLICE
    for number in range(100):
        announcing.put(f"{number}\n".encode(), ears[0] if number % 2 else None)
    await trio.sleep(1)
    assert {ear.calls for ear in ears} == {2}
    everything = b"first\n" + b"".join(f"{number}\n".encode() for number in range(100))
    assert {ear.heard for ear in ears[1:]} == {everything}
    assert ears[0].heard == b"first\n" + b"".join(f"{number}\n".encode() for number in range(0, 100, 2))
    assert announcing.announced == 101


async def test_a_sender_waits_for_room_and_what_cannot_wait_is_dropped_and_counted(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    ear = Ear()
    announcing = announcing_to([ear], 2 * BATCH)
    line = b"x" * 999 + b"\n"
    for _ in range(2 * BATCH // len(line) + 5):
        announcing.put(line, None)
    assert announcing.crowded
    assert announcing.dropped == 5
    nursery.start_soon(announcing.run)
    with trio.fail_after(60):
        await announcing.wait_room()
    await trio.sleep(1)
    assert len(ear.heard) == 2 * BATCH // len(line) * len(line)
