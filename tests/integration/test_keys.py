"""Tables with keys of all kinds, from their triggers to a worker whose downstream ends up equal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import trio

from replicad.client.worker import Batch, Worker, WorkerSettings
from replicad.postgres.bridge import Database
from tests.conftest import PATIENCE
from tests.daemons import Daemon
from tests.lengths import first

from .conftest import OpenClient

QUICK = WorkerSettings(batch_ids=50, parallelism=3, poll=1.0, lease_ttl=5.0, tries=2, backoff_first=0.01)


@dataclass(frozen=True, slots=True)
class Kind:
    """A table `t` by its columns; SQL on the number n for a new row; and SQL for the key as a worker gets it."""

    columns: str
    row: str
    key: str


KINDS = {
    "smallint": Kind("nr smallint PRIMARY KEY, v integer", "n, n", "nr"),
    "integer": Kind("film_id integer PRIMARY KEY, v integer", "n, n", "film_id"),
    "bigint": Kind('"Film Id" bigint PRIMARY KEY, v integer', "n + 5000000000, n", '"Film Id"'),
    "domain": Kind("id film_id PRIMARY KEY, v integer", "n, n", "id"),
    "uuid": Kind("id uuid PRIMARY KEY, v integer", "md5(n::text)::uuid, n", "id::text"),
    "text": Kind("name text PRIMARY KEY, v integer", r"""E'a \u0001\n"\\, é[]' || n, n""", "name"),
    "bytea": Kind("hash bytea PRIMARY KEY, v integer", "sha256(n::text::bytea), n", "hash::text"),
    "date": Kind("day date PRIMARY KEY, v integer", "'2026-01-01'::date + n, n", "day::text"),
    "numeric": Kind("amount numeric(8, 2) PRIMARY KEY, v integer", "n / 4.0, n", "amount::text"),
    "mail": Kind("mail mail PRIMARY KEY, v integer", "'m@' || n, n", "mail::text"),
    "composite": Kind(
        "tenant text, nr smallint, v integer, PRIMARY KEY (tenant, nr)",
        "'t ' || n % 3, n, n",
        "json_build_array(tenant::text, nr::text)::text",
    ),
}


@pytest.fixture(params=first(3, sorted(KINDS, key=lambda name: name not in ("bigint", "text", "composite"))))
async def kind(request: pytest.FixtureRequest, database: Database, daemon: Daemon) -> Kind:
    """A kind, with its table attached to the tube `queue`."""
    found = KINDS[request.param]
    await database.execute(
        "CREATE DOMAIN film_id AS integer CHECK (VALUE > 0); CREATE DOMAIN mail AS text;"
        f"CREATE TABLE t ({found.columns});"
        f"INSERT INTO t SELECT {found.row} FROM generate_series(1, 40) AS n"
    )
    await database.execute("SELECT tube.tube_ensure_exists('queue', 2)")
    await database.execute("SELECT tube.tube_table_ensure_attached('queue', 't', 0, routing => 'v % 2')")
    return found


@dataclass(slots=True)
class Downstream:
    """The rows by key, with the shard and the seq that they were written for. `poison`: keys that fail."""

    database: Database
    kind: Kind
    rows: dict[Any, tuple[int, int]]
    values: dict[Any, int]
    poison: frozenset[Any] = frozenset()

    async def handle(self, batch: Batch) -> None:
        keys = [touch.id for touch in batch.touches]
        if self.poison & set(keys):
            raise ValueError("cannot be written")
        found = await self.database.fetch(
            f"SELECT {self.kind.key} AS key, v FROM t WHERE {self.kind.key} = ANY($1)", keys
        )
        there = {row["key"]: row["v"] for row in found}
        for touch in batch.touches:
            self.values.pop(touch.id, None)
            self.rows.pop(touch.id, None)
            if touch.id in there:
                self.values[touch.id] = there[touch.id]
                self.rows[touch.id] = (touch.shard, touch.seq)

    async def stale_ids(self, shard: int, before: int, limit: int) -> Sequence[Any]:
        return [key for key, (of, seq) in self.rows.items() if of == shard and seq < before][:limit]


async def until_empty(database: Database) -> None:
    with trio.fail_after(PATIENCE):
        while await database.fetch_value("SELECT count(*) FROM tube.queue"):
            await trio.sleep(0.05)


async def rows(database: Database, kind: Kind) -> dict[Any, int]:
    return {row["key"]: row["v"] for row in await database.fetch(f"SELECT {kind.key} AS key, v FROM t")}


async def test_writes_a_backfill_and_its_garbage_reach_the_downstream(
    database: Database, kind: Kind, open_worker_client: OpenClient
) -> None:
    downstream = Downstream(database, kind, {}, {})
    worker = Worker(open_worker_client, "queue", downstream.handle, stale_ids=downstream.stale_ids, settings=QUICK)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(worker.run)
        await database.execute("SELECT tube.tube_backfill_schedule('queue', NULL, 0, 9)")
        await database.execute(f"INSERT INTO t SELECT {kind.row} FROM generate_series(41, 60) AS n")
        await database.execute("UPDATE t SET v = v + 1 WHERE v < 20")
        await database.execute("DELETE FROM t WHERE v > 50")
        await until_empty(database)
        assert downstream.values == await rows(database, kind)
        assert len(downstream.values) == 50
        await database.execute("SET session_replication_role = replica; DELETE FROM t WHERE v > 30; RESET ALL")
        await database.execute("SELECT tube.tube_backfill_schedule('queue', NULL, 0, 9)")
        await until_empty(database)
        nursery.cancel_scope.cancel()
    assert downstream.values == await rows(database, kind)
    assert len(downstream.values) == 30
    assert worker.statistics.garbage >= 20


async def test_a_poison_key_is_parked_and_comes_back_when_it_is_replayed(
    database: Database, kind: Kind, open_worker_client: OpenClient
) -> None:
    bad = await database.fetch_value(f"SELECT {kind.key} FROM t WHERE v = 7")
    downstream = Downstream(database, kind, {}, {}, frozenset([bad]))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(Worker(open_worker_client, "queue", downstream.handle, settings=QUICK).run)
        await database.execute("UPDATE t SET v = v")
        await until_empty(database)
        assert downstream.values.keys() == (await rows(database, kind)).keys() - {bad}
        downstream.poison = frozenset()
        assert await database.fetch_value("SELECT tube.tube_parked_replay('queue')") == 1
        await until_empty(database)
        nursery.cancel_scope.cancel()
    assert downstream.values == await rows(database, kind)
