"""One of two streams that a client follows is removed: the other goes on, and the removed one can come back."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
import trio

from replicad.client.async_client import open_client
from replicad.client.blocking_client import BlockingClient
from replicad.client.events import Connected, Disconnected, RowBatch, StreamStopped
from replicad.errors import UnknownStream
from replicad.postgres.bridge import Database
from replicad.streams.registry import Registry
from tests.daemons import Daemon

ALSO = (StreamStopped, Connected, Disconnected)
WANTED = {"other": None, "calm": None}
Events = AsyncIterator[Any]


@pytest.fixture
async def two(database: Database, daemon: Daemon) -> Database:
    """The streams `other` and `calm`."""
    for name in WANTED:
        await database.execute(f"CREATE TABLE {name} (id bigserial PRIMARY KEY, n int)")
        await add(database, name)
        await daemon.publisher.find(name)
    return database


async def add(database: Database, name: str) -> None:
    await Registry(database).add(name, f"public.{name}", "id", row="to_json(n)")


@asynccontextmanager
async def trio_events(port: int) -> AsyncIterator[Events]:
    async with open_client("127.0.0.1", port, name="reader") as client, client.follow(WANTED, also=ALSO) as follower:
        yield aiter(follower)


@asynccontextmanager
async def blocking_events(port: int) -> AsyncIterator[Events]:
    with BlockingClient("127.0.0.1", port, name="reader") as client, client.follow(WANTED, also=ALSO) as follower:

        async def read(events: Iterator[Any]) -> Events:
            while (event := await trio.to_thread.run_sync(next, events, None, abandon_on_cancel=True)) is not None:
                yield event

        yield read(follower)


@pytest.mark.parametrize("follow", [trio_events, pytest.param(blocking_events, marks=pytest.mark.long)])
async def test_the_other_stream_goes_on_over_one_connection_and_the_removed_one_comes_back(
    two: Database, daemon: Daemon, follow: Callable[[int], Any]
) -> None:
    connections = losses = 0
    stops: list[StreamStopped] = []

    async def wait_row(events: Events, stream: str, n: int) -> None:
        """Wait for a row that was inserted just now."""
        nonlocal connections, losses
        async for event in events:
            match event:
                case RowBatch() if (event.stream, event.rows[-1]) == (stream, str(n)):
                    return
                case Connected():
                    connections += 1
                case Disconnected():
                    losses += 1
                case StreamStopped():
                    stops.append(event)

    insert = "INSERT INTO {} (n) VALUES ({})"
    with trio.fail_after(60):
        async with follow(daemon.addresses[0].port) as events:
            async for event in events:
                if isinstance(event, Connected):
                    break
            for name in WANTED:
                await two.execute(insert.format(name, 1))
            await wait_row(events, "calm", 1)

            await Registry(two).remove("other")
            n = 1
            while len(stops) < 4:
                n += 1
                await two.execute(insert.format("calm", n))
                await wait_row(events, "calm", n)
            assert {(stop.stream, type(stop.error)) for stop in stops} == {("other", UnknownStream)}
            assert [stop.retry_in for stop in stops] == [0.5, 1.0, 2.0, 4.0]
            assert (losses, connections) == (1, 1), "the daemon ends the connection once, when the stream is removed"

            await add(two, "other")
            await daemon.publisher.find("other")
            await two.execute(insert.format("other", 1000))
            await wait_row(events, "other", 1000)
            assert (losses, connections) == (1, 1)


async def test_tail_says_that_one_stream_stopped_and_that_the_others_go_on(
    two: Database, daemon: Daemon, database_url: str
) -> None:
    server = f"127.0.0.1:{daemon.addresses[0].port}"
    command = [sys.executable, "-u", "-m", "replicad", "tail", "other", "calm", "--server", server]
    received = bytearray()

    async with trio.open_nursery() as nursery:
        with trio.fail_after(60):
            process = await nursery.start(partial(trio.run_process, command, stderr=-1, check=False))

            async def wait_for(words: bytes) -> None:
                while words not in received:
                    more = await process.stderr.receive_some()
                    assert more, received.decode()
                    received.extend(more)

            await wait_for(b"following calm, other")
            await Registry(two).remove("other")
            await wait_for(b"replicad: stream other stopped, the others go on: there is no stream 'other'; ")
            process.terminate()
