"""A worker as a process of its own, for the checker: it copies rows into `down.rows` and reports ids that another has.

Arguments: the source, the downstream, the worker's name, the tube, a seed, the number of the kind of keys, and the
addresses of the daemons (host:port).

An id is locked in Postgres while it is processed. A lock that another worker has is a violation, unless that worker did
not run for a while since it began, because it was suspended or the machine is busy: a lease ends for a worker that
cannot renew it, and what it writes afterwards is refused by its term. So each worker records when it did not run.
"""

from __future__ import annotations

import random
import sys
import zlib
from contextlib import AbstractAsyncContextManager, AsyncExitStack, suppress
from dataclasses import replace
from typing import Any

import trio

from replicad.client.async_client import AsyncClient, open_client
from replicad.client.worker import Batch, Worker, WorkerSettings
from replicad.errors import DatabaseError
from replicad.postgres.bridge import Database, open_database
from replicad.protocol.connection import Timing
from tests.tubes.world import KEYS, WANTED

URL, DOWN, NAME, TUBE, SEED, KIND = sys.argv[1:7]
ADDRESSES = [address.rpartition(":") for address in sys.argv[7:]]
KEY = KEYS[int(KIND)]
KEY_OF: Any = int if KEY.type in ("bigint", "integer") else str
SETTINGS = WorkerSettings(
    batch_ids=20, parallelism=3, memory=50_000, lease_ttl=3.0, poll=2.0, tries=4, backoff_first=0.05, backoff_cap=1.0,
    garbage_settle=0.2,
)  # fmt: skip
TIMING = Timing(ping_interval=0.5, peer_timeout=2.0, line_timeout=10.0)

BEGIN = "SELECT down.begun($1)"
TAKE = "SELECT id FROM unnest($1::text[]) AS id WHERE NOT pg_try_advisory_lock(77, hashtext(id))"
CONFLICT = "SELECT down.conflict($1, $2)"
STOOD_STILL = "INSERT INTO down.pause VALUES ($1, clock_timestamp() - $2 * interval '1 s', clock_timestamp())"
LATE = 0.5  # seconds that the worker did not run, from which it is recorded
READ = f"""SELECT {KEY.column}::text AS id, value FROM source, setting
WHERE {KEY.column} = ANY ($1::text[]::{KEY.type}[]) AND {WANTED}"""
WRITE = """
INSERT INTO down.rows AS r (id, value, seq, term)
SELECT id, value, seq, $4 FROM unnest($1::text[], $2::integer[], $3::bigint[]) AS g (id, value, seq)
ON CONFLICT (id) DO UPDATE SET value = excluded.value, seq = excluded.seq, term = excluded.term
WHERE r.term <= excluded.term"""
STALE = "SELECT id FROM down.rows WHERE down.shard(id) = $1 AND seq < $2 AND value IS NOT NULL ORDER BY id LIMIT $3"
POISON = "SELECT coalesce(max(share), 0) FROM down.poison"

chance = random.Random(SEED)
busy: set[str] = set()


def connect() -> AbstractAsyncContextManager[AsyncClient]:
    """A client of any of the daemons."""
    host, _, port = chance.choice(ADDRESSES)
    return open_client(host, int(port), name=NAME, answer_timeout=5.0, connect_timeout=2.0, timing=TIMING)


async def enter_pool(stack: AsyncExitStack, url: str) -> Database:
    """A pool of connections, as soon as the server answers: it may be away when this process begins."""
    while True:
        pool = open_database(url, size=SETTINGS.parallelism + 2, application_name=NAME)
        try:
            return await stack.enter_async_context(pool)
        except DatabaseError:
            await trio.sleep(0.1)


async def main() -> None:
    async with AsyncExitStack() as stack:
        db, source = await enter_pool(stack, DOWN), await enter_pool(stack, URL)

        async def handle(batch: Batch) -> None:
            await copy(source, db, batch)

        async def stale_ids(shard: int, before: int, limit: int) -> list[Any]:
            return [KEY_OF(row["id"]) for row in await db.fetch(STALE, shard, before, limit)]

        async def watch() -> None:
            while True:
                before = trio.current_time()
                await trio.sleep(0.1)
                while (passed := trio.current_time() - before) > LATE:
                    with suppress(DatabaseError):  # no place was free in the pool for long; then it is noted later
                        await db.execute(STOOD_STILL, NAME, passed)
                        break

        settings = replace(SETTINGS, batch_ids=chance.choice([1, 5, 20]))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch)
            await Worker(connect, TUBE, handle, stale_ids=stale_ids, settings=settings).run()


async def copy(source: Database, db: Database, batch: Batch) -> None:
    """Copy the rows of a batch; a row that is gone leaves a NULL, so that an older term cannot write it again."""
    ids = [str(touch.id) for touch in batch.touches]
    async with db.connection() as connection:
        if busy & set(ids) or len(set(ids)) < len(ids):
            await connection.execute("INSERT INTO down.violation VALUES ($1)", f"{NAME} has an id twice: {ids}")
        busy.update(ids)
        try:
            await connection.execute(BEGIN, NAME)
            for row in await connection.fetch(TAKE, ids):
                await connection.execute(CONFLICT, NAME, row["id"])
            share = await connection.fetch_value(POISON)
            if bad := [id for id in ids if zlib.crc32(id.encode()) % 100 < share]:
                raise ValueError(f"{len(bad)} of {len(ids)} ids are poison")
            values = {row["id"]: row["value"] for row in await source.fetch(READ, ids)}
            await trio.sleep(chance.choice([0.0, 0.02, 0.1, 0.3]))
            seqs = [touch.seq for touch in batch.touches]
            await connection.execute(WRITE, ids, [values.get(id) for id in ids], seqs, batch.term)
        finally:
            busy.difference_update(ids)


if __name__ == "__main__":
    trio.run(main)
