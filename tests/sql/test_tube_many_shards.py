"""A tube with many tables: what one more of them costs, by the calls of our functions and the rows that are read."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from replicad.postgres.bridge import Connection, Database
from replicad.postgres.statements import statement

FEW, MANY = 5, 40
# Postgres reads small tables as a whole, though an index leads to the rows.
SETTINGS = "SET track_functions = 'all'; SET enable_seqscan = off; SET plan_cache_mode = force_custom_plan"
CALLS = "SELECT funcname, calls FROM pg_stat_xact_user_functions WHERE schemaname IN ('tube', 'pg_catalog')"
READ = """SELECT relname, seq_tup_read + coalesce(idx_tup_fetch, 0) AS rows FROM pg_stat_xact_all_tables
WHERE relname IN ('pg_trigger', 'pg_type', 'pg_class', 'tube_attachment')"""


class Work(NamedTuple):
    """What a statement has cost Postgres."""

    calls: Counter[str]
    rows: Counter[str]


async def seen(connection: Connection) -> Work:
    """What this session has cost since its counts were stored last."""
    calls = Counter({row["funcname"]: row["calls"] for row in await connection.fetch(CALLS)})
    return Work(calls, Counter({row["relname"]: row["rows"] for row in await connection.fetch(READ)}))


async def work_of(db: Database, query: str, *args: object) -> Work:
    """Run a statement a second time, and roll it back: the first time fills the caches of the session."""
    async with db.connection() as connection:
        await connection.execute(SETTINGS)
        for _ in range(2):
            await connection.execute("BEGIN")
            before = await seen(connection)
            await connection.fetch(query, *args)
            after = await seen(connection)
            await connection.execute("ROLLBACK")
        await connection.execute("RESET ALL")
    return Work(after.calls - before.calls, after.rows - before.rows)


async def shards(db: Database, first: int, last: int) -> None:
    """Make and attach the table `cities` of these shards, each in a schema of its own."""
    for shard in range(first, last + 1):
        await db.execute(
            f"CREATE SCHEMA shard_{shard:04}; CREATE TABLE shard_{shard:04}.cities (id bigint PRIMARY KEY);"
            f"SELECT tube.tube_table_ensure_attached('cities', 'shard_{shard:04}.cities')"
        )


async def of_few_and_many(db: Database, query: str, *args: object) -> tuple[Work, Work]:
    """The work of a statement with few and with many attached tables, and with one that is not attached."""
    await db.execute("SELECT tube.tube_ensure_exists('cities'); CREATE SCHEMA one; CREATE TABLE one.cities (id int)")
    await shards(db, 1, FEW)
    few = await work_of(db, query, *args)
    await shards(db, FEW + 1, MANY)
    return few, await work_of(db, query, *args)


async def test_a_table_is_attached_with_the_same_work_however_many_are_attached(db: Database) -> None:
    attach = "SELECT tube.tube_table_ensure_attached('cities', 'one.cities', 1000, key => '{id}')"
    few, many = await of_few_and_many(db, attach)
    assert many.calls == few.calls
    for catalog in ("pg_trigger", "pg_type"):
        assert many.rows[catalog] - few.rows[catalog] < MANY - FEW, catalog
    for table in ("pg_class", "tube_attachment"):  # one pass each looks for tables that were dropped
        assert many.rows[table] - few.rows[table] < 20 * (MANY - FEW), table


async def test_tables_are_listed_without_a_call_for_each(db: Database) -> None:
    few, many = await of_few_and_many(db, "SELECT * FROM tube.tube_list()")
    assert many.calls == few.calls
    assert many.rows["tube_attachment"] - few.rows["tube_attachment"] < 5 * (MANY - FEW)


async def test_a_look_for_tables_with_the_names_of_attached_ones_reads_the_tables_of_that_name_once(
    db: Database,
) -> None:
    few, many = await of_few_and_many(db, statement("tube_parted", "tube"))
    assert many.rows["pg_class"] - few.rows["pg_class"] < 10 * (MANY - FEW)


async def test_a_piece_of_a_backfill_calls_no_function_for_each_shard(db: Database) -> None:
    await db.execute(
        "CREATE TABLE public.rows AS SELECT n::bigint AS id FROM generate_series(1, 2000) AS n;"
        "SELECT tube.tube_ensure_exists('rows');"
        "SELECT tube.tube_table_ensure_attached('rows', 'public.rows', 0, NULL, 'id::integer')"
    )
    piece = "SELECT * FROM tube.tube_backfill_chunk('1', 'rows', 'public.rows', 'id', 0, $1)"
    few, many = await work_of(db, piece, 10), await work_of(db, piece, 2000)
    assert many.calls == few.calls
