"""Followers over Redis while everything fails at random: each row comes once, and in the order of its writer.

Takes REPLICAD_STRESS_SECONDS (2 in the suite; `make stress` gives it minutes).
"""

from __future__ import annotations

import os
import random
import signal
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trio

from replicad.client.async_client import open_client
from replicad.client.events import Reset, RowBatch
from replicad.config.settings import Address, ServerSettings
from replicad.postgres.bridge import Database
from replicad.redis import following
from replicad.redis.link import open_redis, parse_redis
from replicad.redis.service import RedisIntervals
from replicad.streams.registry import Registry
from tests.conftest import PATIENCE
from tests.daemons import Daemon, Paces, open_daemon
from tests.redis_servers import PROGRAM, WHY_NOT, RealRedis, real_redis

SECONDS = float(os.environ.get("REPLICAD_STRESS_SECONDS", "2"))
SERVER = "example.org"
QUICK = RedisIntervals(
    ttl=0.6, look=0.05, renew=0.1, sync=0.1, snapshot=0.05, give_up=0.4, retry=0.02, longest_retry=0.1, answer=0.3,
    silence=0.5, waiting_bytes=20_000,
)  # fmt: skip
WRITERS = ("alice", "bob", "carol")


@pytest.mark.stress
@pytest.mark.skipif(PROGRAM is None, reason=WHY_NOT)
async def test_every_row_comes_once_while_redis_and_daemons_fail(
    database: Database, database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "SILENCE", 0.6)
    chance = random.Random(SECONDS)
    await database.execute("CREATE TABLE facts (id bigserial, who text, n int)")
    await database.execute("CREATE INDEX ON facts (id)")
    await Registry(database).add("facts", "public.facts", "id", instance_column="who", row="to_json(t.n)")
    with real_redis(tmp_path) as redis:
        settings = ServerSettings(listen=Address("127.0.0.1", 0), server_name=SERVER, redis=redis.url)
        async with AsyncExitStack() as stack:
            daemons = [
                await stack.enter_async_context(open_daemon(settings, database_url, paces=Paces(redis=QUICK)))
                for _ in range(2)
            ]
            got: list[list[RowBatch]] = []
            nursery = await stack.enter_async_context(trio.open_nursery())
            for daemon in daemons:
                client = await stack.enter_async_context(
                    open_client(redis.url, name="f", server_name=SERVER, daemon=str(daemon.addresses[0]))
                )
                follower = await stack.enter_async_context(client.follow({"facts": "EARLIEST"}, patience=None))
                got.append([])
                nursery.start_soon(_collect, follower, got[-1])
            failing = trio.CancelScope()
            nursery.start_soon(_fail, failing, redis, daemons, chance)
            with trio.move_on_after(SECONDS):
                while True:
                    await _write(database, chance)
                    await trio.sleep(chance.random() / 50)
            failing.cancel()
            rows = await database.fetch("SELECT id, who, array_agg(n ORDER BY n) n FROM facts GROUP BY 1, 2 ORDER BY 1")
            expected = {who: [(row["id"], row["n"]) for row in rows if row["who"] == who] for who in WRITERS}
            with trio.fail_after(PATIENCE):
                while any(len(one) < len(rows) for one in got):
                    await trio.sleep(0.02)
            for one in got:
                for who in WRITERS:
                    assert [(b.token, sorted(map(int, b.rows))) for b in one if b.instance == who] == expected[who]
            assert sum(daemon.redis.turns.lines for daemon in daemons if daemon.redis) > len(rows)
            nursery.cancel_scope.cancel()


async def _collect(follower: Any, into: list[RowBatch]) -> None:
    async for event in follower:
        assert not isinstance(event, Reset)
        into.append(event)


async def _write(database: Database, chance: random.Random) -> None:
    """One id with some rows, which belong together; sometimes more than Redis is sent in one step."""
    rows = chance.choice((1, 1, 3, 900))
    await database.execute(
        f"WITH one AS (SELECT nextval('facts_id_seq') AS id) INSERT INTO facts (id, who, n) "
        f"SELECT id, '{chance.choice(WRITERS)}', n FROM one, generate_series(1, {rows}) n"
    )


async def _fail(scope: trio.CancelScope, redis: RealRedis, daemons: list[Daemon], chance: random.Random) -> None:
    """Break something every now and then; at the end everything works again."""
    with scope:
        while True:
            await trio.sleep(chance.random() / 2)
            match chance.choice(("pubsub", "normal", "restart", "stop", "role")):
                case "restart":
                    redis.stop()
                    await trio.sleep(chance.random() / 2)
                    with trio.CancelScope(shield=True):
                        await trio.to_thread.run_sync(redis.start)
                case "stop":
                    os.kill(redis.pid, signal.SIGSTOP)
                    try:
                        await trio.sleep(chance.random())
                    finally:
                        os.kill(redis.pid, signal.SIGCONT)
                case "role":
                    for daemon in daemons:
                        assert daemon.redis is not None
                        if daemon.redis.turns.publisher is not None:
                            daemon.redis.turns.publisher._pace = replace(QUICK, waiting_bytes=1)
                            daemon.redis.turns.publisher._works_at = float("-inf")
                            daemon.redis.turns.publisher.connected = False
                case kind:
                    link = await open_redis(parse_redis(redis.url), name="killer")
                    await link.call("CLIENT", "KILL", "TYPE", kind, "SKIPME", "yes")
                    await link.aclose()
