"""What the console is shown with, in its test and in the pictures of docs/metrics.md."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio

from replicad.config.logs import RECENT
from replicad.postgres.bridge import Database
from replicad.streams.registry import Registry
from replicad.tubes.backfill import BackfillIntervals
from replicad.tubes.serving.waiting import TubeIntervals
from tests.daemons import Daemon, Paces

PACES = Paces(tubes=TubeIntervals(backfills=BackfillIntervals(max_backlog=1)))  # backfills wait for workers
HOSTILE = "<img/src=x/onerror=document.title='owned'>"
ERROR = "status 422: <script>document.title='owned'</script> & more"


async def set_up(db: Database, stream: str = "orders", error: str = ERROR) -> None:
    """Streams, tubes with a backlog, a backfill and parked entries, and a daemon that was killed. Call it before the
    daemon starts.
    """
    for table in ("orders", "events"):
        await db.execute(f"CREATE TABLE {table} (id bigserial PRIMARY KEY, body text)")
        await db.execute(f"INSERT INTO {table} (body) SELECT 'x' FROM generate_series(1, 1200)")
    await Registry(db).add(stream, "public.orders", "id")
    await Registry(db).add("events", "public.events", "id")
    await db.execute("CREATE TABLE cities (id bigint PRIMARY KEY)")
    await db.execute("SELECT tube.tube_ensure_exists('cities', partitions => 2)")
    await db.execute("SELECT tube.tube_table_ensure_attached('cities', 'cities', 1)")
    await db.execute(
        "INSERT INTO tube.tube_backfill (tube, tbl, shard, start_seq, order_col, shards, ids, approx_ids)"
        " VALUES ('cities', 'cities'::regclass, 1, '1', 'id', '{1}', 41000, 100000)"
    )
    await db.execute(
        "INSERT INTO tube.cities (op, shard, ids) SELECT 'U', g % 2, ARRAY[g] FROM generate_series(1, 40) AS g"
        " UNION ALL SELECT 'B', 1, ARRAY[g] FROM generate_series(1, 7) AS g"
    )
    await db.execute(
        "INSERT INTO tube.tube_parked (tube, seq, op, shard, ids, ts, tries, error)"
        " SELECT 'cities', g, 'U', 1, ARRAY[2988507 + g], now(), 5, $1 FROM generate_series(1, 3) AS g",
        error,
    )
    await db.execute(
        "SELECT replicad.stream_daemon_beat(gen_random_uuid(), 'db2.example', 4711, '{10.1.0.3:9009}', '0.1.0', 86400,"
        " clock_timestamp() - interval '47 s')"
    )


@asynccontextmanager
async def clients(daemon: Daemon, stream: str = "orders", name: str = "billing-1") -> AsyncIterator[None]:
    """A client that follows a stream, one that works on a partition of the tube, and an event of each level."""
    address = daemon.addresses[0]
    for event in (
        {"event": "trouble_began", "level": "warning", "kind": "tube", "name": "cities", "reason": "the lease expired"},
        {"event": "session_closed", "level": "info", "peer": "10.1.0.7:41822", "reason": "slow_reader"},
    ):
        RECENT.note(None, "", dict(event))
    async with (
        await trio.open_tcp_stream(address.host, address.port) as reader,
        await trio.open_tcp_stream(address.host, address.port) as worker,
    ):
        await reader.send_all(f"NAME {name}\nREPLICATE {stream} NOW\n".encode())
        await worker.send_all(b"NAME worker-1\nCLAIM cities 0/2\n")
        for one, wanted in ((reader, b"POSITION"), (worker, b"\nLEASE")):
            received = b""
            while wanted not in received:
                received += await one.receive_some(1 << 16)
        yield
