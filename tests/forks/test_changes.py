"""A standby that lags is promoted while a table is written: readers of its changes go back, and end equal to it."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import trio

from replicad.client.async_client import open_client
from replicad.client.events import PositionMoved
from replicad.config.settings import Address, ServerSettings
from replicad.postgres.bridge import open_database
from replicad.streams.serving.intervals import StreamIntervals
from tests.changes_checker import FORMS, STREAM, VALUES, Reader, World
from tests.conftest import PATIENCE
from tests.daemons import Paces, open_daemon
from tests.lengths import LONG

from .cluster import Cluster
from .world import blocking


async def follow(reader: Reader, port: int) -> None:
    """Read for ever; the client connects again by itself."""
    part = None if reader.value is None else ("n", reader.value)
    async with (
        open_client("127.0.0.1", port, name=reader.name) as client,
        client.follow({STREAM: "EARLIEST"}, where=part, also=(PositionMoved,), first_patience=None) as follower,
    ):
        async for event in follower:
            reader.take(event)


async def until_all_are_past(readers: list[Reader], position: int) -> None:
    with trio.fail_after(3 * PATIENCE):
        while not all(reader.position >= position for reader in readers):
            await trio.sleep(0.05)


@pytest.mark.parametrize("seed", range(60))
async def test_readers_go_back_to_the_fork_and_end_equal_to_the_table(
    postgres_folder: Path, fork_template: Path, seed: int
) -> None:
    chance = random.Random(seed)
    form = FORMS[seed % len(FORMS)]
    readers = [Reader("all", kept=[])]
    if "n" in form.recorded.filters:
        readers += [Reader(f"n{value}", value, kept=[]) for value in VALUES]
    cluster = Cluster(postgres_folder, fork_template)

    async def promote() -> None:
        """After a while, and when readers have what the standby will never get."""
        standby = await blocking(cluster.make_standby)
        await trio.sleep(chance.uniform(0, 1))
        await blocking(cluster.cut, standby)
        await until_all_are_past(readers, await world.taken() + 40)  # a standby may be 32 ahead
        await blocking(cluster.end, await blocking(cluster.promote, standby))

    settings = ServerSettings(listen=Address("127.0.0.1", 0), server_name="forks")
    paces = Paces(streams=StreamIntervals(changes=0.05, filtered=0.1))
    try:
        async with open_database(cluster.url, size=16, application_name="test") as database:
            world = World(seed, database, promote)
            await world.begin()
            async with open_daemon(settings, cluster.url, paces=paces) as daemon, trio.open_nursery() as nursery:
                with trio.fail_after(3 * PATIENCE):
                    while STREAM not in daemon.publisher.served:
                        await trio.sleep(0.05)
                for reader in readers:
                    nursery.start_soon(follow, reader, daemon.addresses[0].port)
                assert await world.play(transactions=40 if LONG else 10) is None
                # until then they are past it, by changes that the standby never got
                with trio.move_on_after(3 * PATIENCE):
                    while not all(reader.returns for reader in readers):
                        await trio.sleep(0.05)
                assert all(reader.returns for reader in readers), [
                    (one.name, one.returns, one.position) for one in readers
                ]
                await until_all_are_past(readers, await world.last_id())
                nursery.cancel_scope.cancel()
            assert [why for reader in readers if (why := await reader.difference(world))] == []
    finally:
        cluster.close()
