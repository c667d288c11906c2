"""Sharded writers of a program on asyncio, over its own pools of asyncpg."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from contextlib import suppress
from typing import Any

import asyncpg
import pytest
import trio

from replicad.errors import InstanceTaken, NotOwner, UnknownStream
from replicad.postgres.bridge import Database
from replicad.sharding import ShardedWriter, admin, open_sharded_writer
from replicad.sharding.holdings import Holdings
from replicad.streams.registry import Registry
from tests.conftest import PATIENCE
from tests.loops import run_on

INSERT = "INSERT INTO events (room, body) VALUES ($1, $2)"


async def test_writers_divide_keys_hand_over_and_lose_no_write(database: Database, database_url: str) -> None:
    await database.execute("CREATE TABLE events (id bigserial PRIMARY KEY, room text, body text)")
    await Registry(database).add("events", "public.events", "id", row="body")
    await admin.enable(database, "events", slots=16)

    async def work() -> None:
        async with asyncio.timeout(PATIENCE), asyncpg.create_pool(database_url, min_size=0, max_size=4) as one:
            with pytest.raises(UnknownStream):
                async with open_sharded_writer(one, "nothing", "a"):
                    pass
            async with open_sharded_writer(one, "events", "a", address="a:1", ttl=5) as first:
                async with first.owning("k", wait=PATIENCE) as connection:
                    await connection.execute(INSERT, "k", "first")
                with pytest.raises(ZeroDivisionError):
                    await write_and_fail(first)
                with pytest.raises(asyncpg.PostgresError):
                    await go_on_after_an_error(first)
                waiting = asyncio.ensure_future(hold(first))
                await asyncio.sleep(0.05)
                waiting.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await waiting
                async with asyncpg.create_pool(database_url, min_size=0, max_size=4) as two:
                    with pytest.raises(InstanceTaken):
                        async with open_sharded_writer(two, "events", "a", ttl=5):
                            pass
                    async with open_sharded_writer(two, "events", "b", address="b:1", ttl=5) as second:
                        wrote = {first.instance: 0, second.instance: 0}
                        while min(wrote.values()) == 0:
                            for number in range(16):
                                for writer in (first, second):
                                    try:
                                        async with writer.owning(f"key{number}", wait=1) as connection:
                                            await connection.execute(INSERT, f"key{number}", writer.instance)
                                    except NotOwner:
                                        continue
                                    wrote[writer.instance] += 1
                                    break
                async with first.owning("k", wait=PATIENCE):  # the second has given its slots back
                    pass
        found.append(sum(wrote.values()))

    async def hold(writer: ShardedWriter[Any]) -> None:
        async with writer.owning("k") as connection:
            await connection.execute(INSERT, "k", "cancelled")
            await asyncio.sleep(PATIENCE)

    async def write_and_fail(writer: ShardedWriter[Any]) -> None:
        async with writer.owning("k") as connection:
            await connection.execute(INSERT, "k", "rolled back")
            raise ZeroDivisionError

    async def go_on_after_an_error(writer: ShardedWriter[Any]) -> None:
        """The transaction must not look committed."""
        async with writer.owning("k") as connection:
            await connection.execute(INSERT, "k", "rolled back")
            with suppress(asyncpg.PostgresError):
                await connection.execute("SELECT 1/0")

    found: list[int] = []
    await trio.to_thread.run_sync(run_on, "asyncio", work)
    rows = await database.fetch("SELECT body FROM events")
    bodies = [row["body"] for row in rows]
    assert len(bodies) == 1 + found[0]
    assert not {"rolled back", "cancelled"} & set(bodies)


def test_the_writer_on_asyncio_does_not_replace_the_loops_of_the_program() -> None:
    program = "import sys; from replicad import open_sharded_writer; print('trio_asyncio' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr


async def test_a_writer_whose_task_is_cancelled_while_it_joins_leaves(
    database: Database, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await database.execute("CREATE TABLE events (id bigserial PRIMARY KEY, room text, body text)")
    await Registry(database).add("events", "public.events", "id", row="body")
    await admin.enable(database, "events", slots=16)
    joined = Holdings.joined
    tasks: list[asyncio.Task[None]] = []

    def joined_and_cancelled(holdings: Holdings, *args: Any) -> None:
        tasks[0].cancel()
        joined(holdings, *args)

    monkeypatch.setattr(Holdings, "joined", joined_and_cancelled)

    async def share(pool: Any) -> None:
        async with open_sharded_writer(pool, "events", "a", ttl=600):
            await asyncio.sleep(PATIENCE)

    async def work() -> None:
        async with asyncio.timeout(PATIENCE), asyncpg.create_pool(database_url, min_size=0, max_size=4) as pool:
            tasks.append(asyncio.ensure_future(share(pool)))
            with pytest.raises(asyncio.CancelledError):
                await tasks[0]

    await trio.to_thread.run_sync(run_on, "asyncio", work)
    assert await database.fetch_value("SELECT count(*) FROM replicad.writer_member") == 0
