"""Backfills that cannot run are refused, and those that should not run any more are replaced or cancelled."""

from __future__ import annotations

import pytest

from replicad.errors import TubeRefused
from replicad.postgres.bridge import Database

SCHEDULE = "SELECT tube.tube_backfill_schedule('a', $1, 0, 9)"
STATE = "SELECT tbl, order_col, state, ids FROM tube.tube_backfills('a')"
CHUNK = "SELECT * FROM tube.tube_backfill_chunk($1, 'a', 'sh1.t', $2, NULL, 10)"


@pytest.fixture
async def filled(db: Database) -> Database:
    """A tube `a` and the table sh1.t attached to it, with 100 rows."""
    await db.execute(
        "CREATE SCHEMA sh1; CREATE TABLE sh1.t (id bigint PRIMARY KEY, v integer, p point, j json);"
        "INSERT INTO sh1.t SELECT i, i % 7 FROM generate_series(1, 100) i;"
        "SELECT tube.tube_ensure_exists('a'), tube.tube_table_ensure_attached('a', 'sh1.t')"
    )
    return db


async def states(db: Database) -> list[tuple[str, str, str, int]]:
    return [tuple(row) for row in await db.fetch(STATE)]  # type: ignore[misc]


async def begin(db: Database, order: str) -> str:
    step1: str = await db.fetch_value("SELECT tube.tube_backfill_step1()")
    await db.execute("SELECT tube.tube_backfill_step2()")
    await db.execute(CHUNK, step1, order)
    return step1


@pytest.mark.parametrize("column", ["p", "j"])
async def test_a_column_without_an_order_is_refused_when_the_backfill_is_scheduled(
    filled: Database, column: str
) -> None:
    with pytest.raises(TubeRefused, match=f"cannot be ordered by column {column}: its type (point|json) has no order"):
        await filled.execute(SCHEDULE, column)
    assert await states(filled) == []


async def test_a_backfill_in_another_order_replaces_the_scheduled_one_and_the_one_that_has_begun(
    filled: Database,
) -> None:
    assert await filled.fetch_value(SCHEDULE, "id") == 1
    assert await filled.fetch_value(SCHEDULE, "id") == 0
    assert await filled.fetch_value(SCHEDULE, "v") == 1
    assert await states(filled) == [("sh1.t", "v", "scheduled", 0)]
    await filled.execute("DELETE FROM tube.a")
    await begin(filled, "v")
    assert await states(filled) == [("sh1.t", "v", "running", 10)]
    assert await filled.fetch_value(SCHEDULE, "v") == 0
    assert await filled.fetch_value(SCHEDULE, "id") == 1
    assert await states(filled) == [("sh1.t", "id", "scheduled", 0)]
    types = "SELECT array_agg(payload ->> 'type' ORDER BY seq) FROM tube.a WHERE payload IS NOT NULL"
    assert await filled.fetch_value(types) == ["backfill_schedule"]


async def test_backfills_are_cancelled_without_a_mark_of_their_end(filled: Database) -> None:
    cancel = "SELECT tube.tube_backfill_cancel('a', 0, $1)"
    assert await filled.fetch_value(cancel, 9) == 0
    await filled.execute(SCHEDULE, "id")
    assert await filled.fetch_value(cancel, 0) == 0  # the shard is 1
    assert await filled.fetch_value(cancel, 9) == 1
    await begin(filled, "id")
    assert await filled.fetch_value(cancel, 9) == 1
    assert await states(filled) == []
    assert await filled.fetch_value("SELECT count(*) FROM tube.a WHERE payload IS NOT NULL") == 0
    assert await filled.fetch_value("SELECT count(*) FROM tube.a") == 1
    assert await filled.fetch_value(SCHEDULE, "id") == 1


async def test_a_renamed_table_is_found_and_a_detached_one_has_no_backfill(filled: Database) -> None:
    await filled.execute(SCHEDULE, "id")
    await filled.execute("ALTER TABLE sh1.t RENAME TO renamed")
    assert await states(filled) == [("sh1.renamed", "id", "scheduled", 0)]
    await filled.execute("SELECT tube.tube_table_ensure_detached('a', 'sh1.renamed')")
    assert await states(filled) == []
