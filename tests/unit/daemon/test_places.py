"""Places that are given in turn by client."""

from __future__ import annotations

import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from replicad.daemon.fairness import Asker, Places


async def test_who_asks_often_waits_behind_the_one_request_of_another(autojump_clock: MockClock) -> None:
    places, order = Places(1), list[str]()

    async def work(client: str) -> None:
        async with places.place(Asker(client)):
            order.append(client)
            await trio.sleep(1)

    async with trio.open_nursery() as nursery:
        for client in ("a", "a", "a", "a", "b", "c", "b"):
            nursery.start_soon(work, client)
            await wait_all_tasks_blocked()
        assert places.waiting == 6
    assert order == ["a", "a", "b", "c", "a", "b", "a"]
    assert places.waiting == 0


async def test_many_clients_of_one_crowd_delay_another_client_by_one_place_and_take_turns_among_themselves(
    autojump_clock: MockClock,
) -> None:
    places, order = Places(1), list[str]()

    async def work(crowd: str, client: str) -> None:
        async with places.place(Asker(crowd, client)):
            order.append(crowd + client)
            await trio.sleep(1)

    async with trio.open_nursery() as nursery:
        for crowd, client in ("a1", "a1", "a1", "a2", "a3", "b1", "a2"):
            nursery.start_soon(work, crowd, client)
            await wait_all_tasks_blocked()
    assert order == ["a1", "a1", "b1", "a2", "a3", "a1", "a2"]


async def test_a_place_is_not_lost_when_the_one_who_waits_for_it_leaves(autojump_clock: MockClock) -> None:
    places = Places(1)
    async with trio.open_nursery() as nursery:
        for leave_after in (0.5, 1.0, 1.5):  # while it waits, in the moment in which it gets the place, and holding it

            async def wait(seconds: float) -> None:
                with trio.move_on_after(seconds):
                    async with places.place(Asker("b")):
                        await trio.sleep_forever()

            nursery.start_soon(wait, leave_after)
        async with places.place(Asker("a")):
            await wait_all_tasks_blocked()
            await trio.sleep(1)
    with trio.fail_after(1):
        async with places.place(Asker("c")):
            assert places.waiting == 0
