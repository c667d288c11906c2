"""Retention keeps the table of changes small at a steady rate, while another session holds a snapshot.

The suite writes for some seconds and closes partitions by ids that are taken. The long form (`make stress
PYTEST_ARGS="-k stays_flat"` with REPLICAD_STRESS_SECONDS=3600) writes 1,000 changes a second for an hour.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import psycopg
import pytest
import trio

from replicad.postgres.bridge import Database
from replicad.streams.registry import RecordedChanges, Registry
from replicad.streams.serving.intervals import StreamIntervals
from tests.daemons import Paces
from tests.lengths import LONG

Start = Callable[..., AbstractAsyncContextManager[Any]]
SECONDS = float(os.environ.get("REPLICAD_STRESS_SECONDS") or 3)
pytestmark = [pytest.mark.stress, pytest.mark.timeout(SECONDS + 300)]
KEPT = 20_000 if LONG else 400  # changes
# Fifty rows, and their next version a turn later: rows of which the snapshot keeps many versions are slow to find.
WRITE = """
WITH made AS (INSERT INTO t SELECT n FROM generate_series($1::integer, $1::integer + 49) n)
UPDATE t SET n = n + 1 WHERE id >= $1::integer - 50 AND id < $1::integer"""
SIZE = "SELECT sum(pg_total_relation_size(part)) FROM replicad.stream_change_parts(1)"
TRIMMED = "SELECT trimmed_upto > 0 FROM replicad.stream"
PARTS = "SELECT count(*) FROM replicad.stream_change_parts(1)"


@pytest.fixture
async def recorded(database: Database) -> Registry:
    """A table of 1,000 rows with a stream of changes that keeps KEPT of them."""
    await database.execute("CREATE TABLE t (id integer PRIMARY KEY, n integer DEFAULT 0) WITH (fillfactor = 20)")
    await database.execute("INSERT INTO t SELECT generate_series(1, 1000)")
    registry = Registry(database)
    await registry.add_changes("t", "public.t", RecordedChanges())
    await registry.set_keep("t", keep_for=None, keep_rows=KEPT)
    return registry


async def test_the_table_of_changes_stays_flat_beside_a_snapshot_that_is_held(
    recorded: Registry, database: Database, database_url: str, start_daemon: Start
) -> None:
    paces = Paces() if LONG else Paces(streams=StreamIntervals(changes=0.05, keep=0.05))
    sizes: list[int] = []
    with psycopg.connect(database_url) as holder:
        holder.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        holder.execute("SELECT count(*) FROM t")
        async with start_daemon(paces=paces):
            began, turn = trio.current_time(), 0
            while trio.current_time() < began + SECONDS or not await database.fetch_value(TRIMMED):
                turn += 1
                due = began + turn / 10
                await database.execute(WRITE, 1000 + 50 * turn)
                if not LONG and turn % 3 == 0:
                    await database.execute(
                        "SELECT count(nextval('replicad.change_1_id_seq')) FROM generate_series(1, 100000)"
                    )
                sizes.append(int(await database.fetch_value(SIZE)))
                await trio.sleep_until(due)
            parts = await database.fetch_value(PARTS)
    assert len(sizes) > 9
    print(f"{len(sizes) / 10:.0f} s, bytes: {sizes[:: max(1, len(sizes) // 20)]}; {parts} partitions")
    half = len(sizes) // 2
    assert max(sizes[half:]) <= 2 * max(sizes[:half]), sizes[:: max(1, len(sizes) // 50)]
    assert parts <= 3 + 10, "closed partitions are dropped"
    assert await database.fetch_value("SELECT count(*) FROM replicad.change_1") < KEPT + (200_000 if LONG else 2_000)
    assert await database.fetch_value(TRIMMED)
