"""A stream whose copy fails says so to those who follow it, and to those who ask for it; others go on."""

from __future__ import annotations

import pytest

from replicad.postgres.bridge import Database
from replicad.streams.registry import Registry
from tests.daemons import Daemon
from tests.lengths import first

from .conftest import Connect


@pytest.fixture
async def two(database: Database, daemon: Daemon) -> Database:
    """Streams `odd`, whose row expression needs column k, and `calm`."""
    for name, row in (("odd", "json_build_object('k', t.k)"), ("calm", "to_json(t.k)")):
        await database.execute(f"CREATE TABLE {name} (id bigserial PRIMARY KEY, k int)")
        await Registry(database).add(name, f"public.{name}", "id", row=row)
        await daemon.publisher.find(name)
    return database


@pytest.mark.parametrize("request_line", first(1, ["REPLICATE", "REPLICATE odd"]))
async def test_followers_of_a_stream_whose_copy_fails_are_told_and_get_its_rows_afterwards(
    two: Database, netcat: Connect, request_line: str
) -> None:
    async with netcat() as follower, netcat() as other:
        await follower.send(request_line)
        await follower.until("POSITION odd master 0 0")
        await two.execute("ALTER TABLE odd RENAME k TO kk")
        await two.execute("INSERT INTO odd (kk) VALUES (1)")
        await follower.until("ERROR stream_waits: stream odd does not move: .*column t.k does not exist.*")
        await other.send("REPLICATE odd")
        await other.until("ERROR stream_refused: stream odd cannot be served: .*column t.k does not exist.*")
        await other.send("REPLICATE calm")
        await two.execute("INSERT INTO calm (k) VALUES (1)")
        await other.until("RDATA calm master 1 1")
        await two.execute("ALTER TABLE odd RENAME kk TO k")
        await follower.until('RDATA odd master 1 {"k" : 1}')


async def test_a_lock_on_the_registry_is_told_to_those_who_follow(two: Database, netcat: Connect) -> None:
    async with netcat() as follower, two.connection() as locker:
        await follower.send("REPLICATE")
        await follower.until("POSITION odd master 0 0")
        async with locker.transaction():
            await locker.execute("LOCK TABLE replicad.stream")
            await two.execute("INSERT INTO calm (k) VALUES (1)")
            await follower.until("ERROR stream_waits: stream calm does not move: .*lock timeout.*")
        await follower.until("RDATA calm master 1 1")
