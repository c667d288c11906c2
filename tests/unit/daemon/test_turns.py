"""Places that are given in turn by client."""

from __future__ import annotations

import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from replicad.daemon.turns import Turns


async def test_who_asks_often_waits_behind_the_one_request_of_another(autojump_clock: MockClock) -> None:
    turns, order = Turns(1), list[str]()

    async def work(client: str) -> None:
        async with turns.turn(client):
            order.append(client)
            await trio.sleep(1)

    async with trio.open_nursery() as nursery:
        for client in ("a", "a", "a", "a", "b", "c", "b"):
            nursery.start_soon(work, client)
            await wait_all_tasks_blocked()
        assert turns.waiting == 6
    assert order == ["a", "a", "b", "c", "a", "b", "a"]
    assert turns.waiting == 0


async def test_a_place_is_not_lost_when_the_one_who_waits_for_it_leaves(autojump_clock: MockClock) -> None:
    turns = Turns(1)
    async with trio.open_nursery() as nursery:
        for leave_after in (0.5, 1.0, 1.5):  # while it waits, in the moment in which it gets the place, and holding it

            async def wait(seconds: float) -> None:
                with trio.move_on_after(seconds):
                    async with turns.turn("b"):
                        await trio.sleep_forever()

            nursery.start_soon(wait, leave_after)
        async with turns.turn("a"):
            await wait_all_tasks_blocked()
            await trio.sleep(1)
    with trio.fail_after(1):
        async with turns.turn("c"):
            assert turns.waiting == 0
