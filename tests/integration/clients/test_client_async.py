"""What only the async client has, on both loops: cancellation, tasks, the block in which it lives."""

from __future__ import annotations

import asyncio
import random
import socket
import time
from collections.abc import Callable

import anyio
import pytest

from replicad.client.async_client import open_client
from replicad.client.events import Connected, Disconnected, RowBatch
from replicad.errors import ConnectionLost, UnknownTube
from replicad.retry import Backoff
from replicad.tubes.commands import Part
from tests import vocabulary as c
from tests.conftest import PATIENCE
from tests.loops import on_both_loops, run_on

from .fake import FakeDaemon
from .world import World

HALF = Part(0, 2)


@on_both_loops
async def test_a_cancelled_request_costs_the_connection_and_the_next_one_gets_its_own_answer(
    fake: FakeDaemon,
) -> None:
    async with open_client("127.0.0.1", fake.port, name="a test") as client:
        term = (await client.claim("cities", HALF)).term
        with anyio.move_on_after(0.1) as scope:
            await client.plan("cities", HALF, term, wait=60.0)
        assert scope.cancelled_caught
        assert await client.tube("cities") == 2
        assert fake.connections == 2


@on_both_loops
async def test_cancelled_waiting_for_rows_loses_none(fake: FakeDaemon, world: World) -> None:
    chance = random.Random(1)
    taken: list[str] = []
    cancelled = 0
    async with open_client("127.0.0.1", fake.port, name="a test") as client:
        also = (Connected,)
        async with client.follow({"events": "EARLIEST"}, also=also) as follower, anyio.create_task_group() as tasks:
            await anext(follower)  # connecting begins anew when it is cancelled: it needs as long as it needs
            tasks.start_soon(anyio.to_thread.run_sync, write, world)
            while len(taken) < 300:
                with anyio.move_on_after(chance.choice([0, 0.0005, 0.002, 0.01])) as scope:
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
            anyio.from_thread.run(anyio.sleep, 0.002)


@on_both_loops
async def test_what_is_raised_in_the_block_comes_out_as_it_is(fake: FakeDaemon) -> None:
    with pytest.raises(UnknownTube):
        async with open_client("127.0.0.1", fake.port, name="a test") as client:
            await client.tube("nowhere")
    with pytest.raises(ZeroDivisionError):
        async with open_client("127.0.0.1", fake.port, name="a test"):
            raise ZeroDivisionError


@on_both_loops
async def test_the_end_of_the_block_closes_every_connection(fake: FakeDaemon) -> None:
    async with open_client("127.0.0.1", fake.port, name="a test") as client:
        await client.tube("cities")
        follower = client.follow({"events": None}, also=(Connected,))
        await anext(follower)
        assert len(fake.sessions) == 2
    with anyio.fail_after(PATIENCE):
        while fake.sessions:
            await anyio.sleep(0.01)
    with anyio.move_on_after(0.2) as scope:
        async with open_client("127.0.0.1", fake.port, name="a test") as client:
            await client.tube("cities")
            await anyio.sleep_forever()
    assert scope.cancelled_caught


@on_both_loops
async def test_a_loss_while_idle_is_noticed_at_once(fake: FakeDaemon) -> None:
    async with open_client("127.0.0.1", fake.port, name="a test") as client:
        await client.tube("cities")
        await anyio.to_thread.run_sync(fake.stop)
        with pytest.raises(ConnectionLost, match="Connection refused"):
            await client.tube("cities")
        await anyio.to_thread.run_sync(fake.start)
        assert await client.tube("cities") == 2


@on_both_loops
async def test_tasks_take_turns(fake: FakeDaemon, world: World) -> None:
    async with open_client("127.0.0.1", fake.port, name="a test") as client:
        terms = {part: (await client.claim("cities", part)).term for part in (HALF, Part(1, 2))}
        for number in range(100):
            world.touch("cities", number, shard=number % 2)

        async def work(part: Part) -> None:
            batch = await client.pods("cities", part, terms[part])
            for pod in batch:
                assert await client.ack("cities", part, terms[part], [pod.seq]) == 1

        async with anyio.create_task_group() as tasks:
            for part in terms:
                tasks.start_soon(work, part)
        assert fake.connections == 1
        await client.send(c.Doorbell())
    assert world.tubes["cities"].pods == {}


@on_both_loops
async def test_closing_ends_a_long_poll_of_another_task_at_once(fake: FakeDaemon) -> None:
    async with open_client("127.0.0.1", fake.port, name="a test") as client:
        term = (await client.claim("cities", HALF)).term

        async def close_once_it_polls() -> None:
            while not any(isinstance(command, c.Pods) for command in fake.received):
                await anyio.sleep(0.005)
            client.close()
            client.close()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(close_once_it_polls)
            with pytest.raises(ConnectionLost, match="was closed"):
                await client.plan("cities", HALF, term, wait=600.0)
        with pytest.raises(ConnectionLost, match="this client was closed"):
            await client.tube("cities")


@on_both_loops
async def test_closing_ends_the_iteration_of_another_task_wherever_it_waits(fake: FakeDaemon) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        for port, moment in ((fake.port, Connected), (silent.getsockname()[1], None), (1, Disconnected)):
            for close_client in (False, True):
                async with open_client("127.0.0.1", port, name="a test", connect_timeout=600.0) as client:
                    follower = client.follow(
                        {"events": None}, also=(Connected, Disconnected), first_patience=None, backoff=Backoff(600, 600)
                    )
                    waits = anyio.Event()
                    async with anyio.create_task_group() as tasks:
                        tasks.start_soon(end_by, (client if close_client else follower).close, waits)
                        with anyio.fail_after(PATIENCE):
                            if moment is None:
                                waits.set()
                            async for event in follower:
                                assert moment is not None
                                assert isinstance(event, moment)
                                waits.set()
                        assert await follower.together() == []


async def end_by(close: Callable[[], None], waits: anyio.Event) -> None:
    await waits.wait()
    await anyio.wait_all_tasks_blocked()
    close()


@on_both_loops
async def test_closing_a_client_that_connects_ends_its_request(fake: FakeDaemon) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        async with open_client("127.0.0.1", port, name="a test", connect_timeout=600.0) as client:
            waits = anyio.Event()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(end_by, client.close, waits)
                waits.set()
                with anyio.fail_after(PATIENCE), pytest.raises(ConnectionLost, match="this client was closed"):
                    await client.tube("cities")


def test_native_cancellations_of_asyncio_lose_no_row(fake: FakeDaemon, world: World) -> None:
    async def follow() -> None:
        chance = random.Random(2)
        taken: list[str] = []
        cancelled = 0
        async with asyncio.timeout(PATIENCE), open_client("127.0.0.1", fake.port, name="a test") as client:
            async with client.follow({"events": "EARLIEST"}, also=(Connected,)) as follower:
                await anext(follower)
                writing = asyncio.create_task(asyncio.to_thread(write_slowly, world))
                while len(taken) < 300:
                    waiting = asyncio.ensure_future(follower.together())
                    for _ in range(chance.choice([0, 1, 2, 3, 5, 20])):
                        await asyncio.sleep(0)
                    waiting.cancel()
                    try:
                        taken += [row for event in await waiting for row in event.rows]
                    except asyncio.CancelledError:
                        cancelled += 1
                await writing
        assert taken == [f"[{number}]" for number in range(300)]
        assert cancelled > 10

    run_on("asyncio", follow)
    assert fake.connections == 1


def write_slowly(world: World) -> None:
    for number in range(300):
        world.commit("events", "w1", f"[{number}]")
        if number % 3 == 0:
            time.sleep(0.002)


def test_the_end_of_a_native_timeout_leaves_the_client_usable(fake: FakeDaemon) -> None:
    async def ask() -> None:
        async with open_client("127.0.0.1", fake.port, name="a test") as client:
            term = (await client.claim("cities", HALF)).term
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await client.plan("cities", HALF, term, wait=60.0)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(client.plan("cities", HALF, term, wait=60.0), 0.1)
            assert await client.tube("cities") == 2
        assert len(asyncio.all_tasks()) == 1, "nothing is left behind"

    run_on("asyncio", ask)
    assert fake.connections == 3


def test_a_native_cancellation_of_the_block_comes_out_as_it_is_and_closes_everything(fake: FakeDaemon) -> None:
    async def live(ready: asyncio.Event) -> None:
        async with open_client("127.0.0.1", fake.port, name="a test") as client:
            await client.tube("cities")
            async for event in client.follow({"events": None}, also=(Connected,)):
                assert isinstance(event, Connected)
                ready.set()

    async def end() -> None:
        ready = asyncio.Event()
        task = asyncio.create_task(live(ready))
        await ready.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len(asyncio.all_tasks()) == 1, "nothing is left behind"

    run_on("asyncio", end)
