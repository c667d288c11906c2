"""A worker as a process of its own, for the checker: it copies rows into `down.rows` and reports ids that another has.

Arguments: the database, the worker's name, the tube, a seed, and the addresses of the daemons (host:port).

An id is locked in Postgres while it is processed. A lock that another worker has is a violation, unless that worker did
not run for a while since it began, because it was suspended or the machine is busy: a lease ends for a worker that
cannot renew it, and what it writes afterwards is refused by its term. So each worker records when it did not run.
"""

from __future__ import annotations

import random
import sys
from contextlib import AbstractAsyncContextManager
from dataclasses import replace

import trio

from replicad.client.trio_client import TrioClient, open_client
from replicad.client.worker import Batch, Worker, WorkerSettings
from replicad.postgres.bridge import Database, open_database
from replicad.protocol.connection import Timing

URL, NAME, TUBE, SEED = sys.argv[1:5]
ADDRESSES = [address.rpartition(":") for address in sys.argv[5:]]
SETTINGS = WorkerSettings(
    batch_ids=20, parallelism=3, memory=50_000, lease_ttl=3.0, poll=2.0, tries=0, backoff_first=0.05, backoff_cap=1.0,
    garbage_settle=0.2,
)  # fmt: skip
TIMING = Timing(ping_interval=0.5, peer_timeout=2.0, line_timeout=10.0)

BEGIN = "SELECT down.begun($1)"
TAKE = "SELECT id FROM unnest($1::bigint[]) AS id WHERE NOT pg_try_advisory_lock(77, id::integer)"
CONFLICT = "SELECT down.conflict($1, $2)"
STOOD_STILL = "INSERT INTO down.pause VALUES ($1, clock_timestamp() - $2 * interval '1 s', clock_timestamp())"
LATE = 0.5  # seconds that the worker did not run, from which it is recorded
READ = "SELECT id, value FROM source WHERE id = ANY ($1::bigint[])"
WRITE = """
INSERT INTO down.rows AS r (id, value, seq, term)
SELECT id, value, seq, $4 FROM unnest($1::bigint[], $2::integer[], $3::bigint[]) AS g (id, value, seq)
ON CONFLICT (id) DO UPDATE SET value = excluded.value, seq = excluded.seq, term = excluded.term
WHERE r.term <= excluded.term"""
STALE = "SELECT id FROM down.rows WHERE id % 8 = $1 AND seq < $2 AND value IS NOT NULL ORDER BY id LIMIT $3"

chance = random.Random(SEED)
busy: set[int] = set()


def connect() -> AbstractAsyncContextManager[TrioClient]:
    """A client of any of the daemons."""
    host, _, port = chance.choice(ADDRESSES)
    return open_client(host, int(port), name=NAME, answer_timeout=5.0, connect_timeout=2.0, timing=TIMING)


async def main() -> None:
    async with open_database(URL, size=SETTINGS.parallelism + 1, application_name=NAME) as db:

        async def handle(batch: Batch) -> None:
            await copy(db, batch)

        async def stale_ids(shard: int, before: int, limit: int) -> list[int]:
            return [row["id"] for row in await db.fetch(STALE, shard, before, limit)]

        async def watch() -> None:
            while True:
                before = trio.current_time()
                await trio.sleep(0.1)
                if (passed := trio.current_time() - before) > LATE:
                    await db.execute(STOOD_STILL, NAME, passed)

        settings = replace(SETTINGS, batch_ids=chance.choice([1, 5, 20]))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch)
            await Worker(connect, TUBE, handle, stale_ids=stale_ids, settings=settings).run()


async def copy(db: Database, batch: Batch) -> None:
    """Copy the rows of a batch; a row that is gone leaves a NULL, so that an older term cannot write it again."""
    ids = [touch.id for touch in batch.touches]
    async with db.connection() as connection:
        if busy & set(ids) or len(set(ids)) < len(ids):
            await connection.execute("INSERT INTO down.violation VALUES ($1)", f"{NAME} has an id twice: {ids}")
        busy.update(ids)
        try:
            await connection.execute(BEGIN, NAME)
            for row in await connection.fetch(TAKE, ids):
                await connection.execute(CONFLICT, NAME, row["id"])
            values = {row["id"]: row["value"] for row in await connection.fetch(READ, ids)}
            await trio.sleep(chance.choice([0.0, 0.02, 0.1, 0.3]))
            seqs = [touch.seq for touch in batch.touches]
            await connection.execute(WRITE, ids, [values.get(id) for id in ids], seqs, batch.term)
        finally:
            busy.difference_update(ids)


if __name__ == "__main__":
    trio.run(main)
