"""What only the trio client has: cancellation, tasks, the block in which it lives."""

from __future__ import annotations

import random

import pytest
import trio

from replicad.client.events import Connected, RowBatch
from replicad.client.trio_client import open_client
from replicad.errors import ConnectionLost, UnknownTube
from replicad.tubes.commands import Part
from tests import vocabulary as c
from tests.conftest import PATIENCE

from .fake import FakeDaemon
from .world import World

HALF = Part(0, 2)


async def test_a_cancelled_request_costs_the_connection_and_the_next_one_gets_its_own_answer(
    fake: FakeDaemon,
) -> None:
    async with open_client("127.0.0.1", fake.port, name="a test") as client:
        term = (await client.claim("cities", HALF)).term
        with trio.move_on_after(0.1) as scope:
            await client.plan("cities", HALF, term, wait=60.0)
        assert scope.cancelled_caught
        assert await client.tube("cities") == 2
        assert fake.connections == 2


async def test_cancelled_waiting_for_rows_loses_none(fake: FakeDaemon, world: World) -> None:
    chance = random.Random(1)
    taken: list[str] = []
    cancelled = 0
    async with open_client("127.0.0.1", fake.port, name="a test") as client:
        also = (Connected,)
        async with client.follow({"events": "EARLIEST"}, also=also) as follower, trio.open_nursery() as nursery:
            await anext(follower)  # connecting begins anew when it is cancelled: it needs as long as it needs
            nursery.start_soon(trio.to_thread.run_sync, write, world)
            while len(taken) < 300:
                with trio.move_on_after(chance.choice([0, 0.0005, 0.002, 0.01])) as scope:
                    event = await anext(follower)
                    assert isinstance(event, RowBatch)
                    taken += event.rows
                cancelled += scope.cancelled_caught
    assert taken == [f"[{number}]" for number in range(300)]
    assert cancelled > 10
    assert fake.connections == 1


def write(world: World) -> None:
    for number in range(300):
        world.commit("events", "w1", f"[{number}]")
        if number % 3 == 0:
            trio.from_thread.run(trio.sleep, 0.002)


async def test_what_is_raised_in_the_block_comes_out_as_it_is(fake: FakeDaemon) -> None:
    with pytest.raises(UnknownTube):
        async with open_client("127.0.0.1", fake.port, name="a test") as client:
            await client.tube("nowhere")
    with pytest.raises(ZeroDivisionError):
        async with open_client("127.0.0.1", fake.port, name="a test"):
            raise ZeroDivisionError


async def test_the_end_of_the_block_closes_every_connection(fake: FakeDaemon) -> None:
    async with open_client("127.0.0.1", fake.port, name="a test") as client:
        await client.tube("cities")
        follower = client.follow({"events": None}, also=(Connected,))
        await anext(follower)
        assert len(fake.sessions) == 2
    with trio.fail_after(PATIENCE):
        while fake.sessions:
            await trio.sleep(0.01)
    with trio.move_on_after(0.2) as scope:
        async with open_client("127.0.0.1", fake.port, name="a test") as client:
            await client.tube("cities")
            await trio.sleep_forever()
    assert scope.cancelled_caught


async def test_a_loss_while_idle_is_noticed_at_once(fake: FakeDaemon) -> None:
    async with open_client("127.0.0.1", fake.port, name="a test") as client:
        await client.tube("cities")
        await trio.to_thread.run_sync(fake.stop)
        with pytest.raises(ConnectionLost, match="Connection refused"):
            await client.tube("cities")
        await trio.to_thread.run_sync(fake.start)
        assert await client.tube("cities") == 2


async def test_tasks_take_turns(fake: FakeDaemon, world: World) -> None:
    async with open_client("127.0.0.1", fake.port, name="a test") as client:
        terms = {part: (await client.claim("cities", part)).term for part in (HALF, Part(1, 2))}
        for number in range(100):
            world.touch("cities", number, shard=number % 2)

        async def work(part: Part) -> None:
            batch = await client.pods("cities", part, terms[part])
            for pod in batch:
                assert await client.ack("cities", part, terms[part], [pod.seq]) == 1

        async with trio.open_nursery() as nursery:
            for part in terms:
                nursery.start_soon(work, part)
        assert fake.connections == 1
        await client.send(c.Doorbell())
    assert world.tubes["cities"].pods == {}


async def test_closing_ends_a_long_poll_of_another_task_at_once(fake: FakeDaemon) -> None:
    async with open_client("127.0.0.1", fake.port, name="a test") as client:
        term = (await client.claim("cities", HALF)).term

        async def close_once_it_polls() -> None:
            while not any(isinstance(command, c.Pods) for command in fake.received):
                await trio.sleep(0.005)
            client.close()
            client.close()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(close_once_it_polls)
            with pytest.raises(ConnectionLost, match="was closed"):
                await client.plan("cities", HALF, term, wait=600.0)
        with pytest.raises(ConnectionLost, match="this client was closed"):
            await client.tube("cities")
