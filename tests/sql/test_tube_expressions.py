"""Predicates and routings: what is refused, and under which settings they run."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
import trio

from replicad.errors import DatabaseError, TubeRefused
from replicad.postgres.bridge import Database
from tests.conftest import PATIENCE
from tests.lengths import crossed

Pod = tuple[str, int, list[int]]
Take = Callable[[str], Awaitable[list[Pod]]]

TABLE = (
    "CREATE SCHEMA sh1; SET search_path = sh1;"
    "CREATE TABLE sh1.t (id bigint PRIMARY KEY, at timestamptz, day text, v integer, body text, length interval,"
    " data bytea, n float8, four integer GENERATED ALWAYS AS (v + 4) STORED);"
    "CREATE FUNCTION sh1.of_row(r sh1.t) RETURNS integer LANGUAGE sql IMMUTABLE AS 'SELECT r.v';"
    "SELECT tube.tube_ensure_exists('a'); RESET search_path;"
)
ROW = (
    "INSERT INTO sh1.t (id, at, day, v, body, length, data, n)"
    " VALUES (1, '2026-01-01 20:00:00+00', '03/04/2026', NULL, 'x', '36:00:00', '\\x41', 0.1)"
)


async def attach(db: Database, predicate: str | None, routing: str | None = None) -> None:
    await db.execute(
        "SELECT tube.tube_table_ensure_attached('a', 'sh1.t', 1, $1, $2, path => '{sh1,pg_catalog}')",
        predicate,
        routing,
    )


EXPRESSIONS = [  # of which some are refused, and the others must not fail or hide any write
    "v",
    "four",
    "tube_row.v",
    "(tube_row).v",
    "length(to_jsonb(tube_row)::text)",
    "sh1.of_row(tube_row)",
    "tableoid::integer",
    "tube_row.tableoid::integer",
    "(ctid::text)::integer",
    "length(xmin::text)",
    "length(cmin::text)",
    "t.v",
    "sh1.t.v",
    "tube_new_rows.v",
    "(SELECT count(*) FROM tube_new_rows)::integer",
    "hashtext(tube_row::text)",
    "v + virtual",
    "virtual",
    "tube_row.virtual",
    "(to_jsonb(tube_row) ->> 'virtual')::integer",
    "(SELECT virtual)",
]


@pytest.mark.parametrize(("expression", "virtual"), crossed(EXPRESSIONS, [False, True]))
async def test_what_is_accepted_sees_every_write_as_a_query_sees_the_row(
    db: Database, take: Take, expression: str, virtual: bool
) -> None:
    if virtual and await db.fetch_value("SELECT current_setting('server_version_num')::integer < 180000"):
        pytest.skip("Postgres has virtual columns since 18")
    await db.execute(TABLE)
    if virtual:
        await db.execute("ALTER TABLE sh1.t ADD virtual integer GENERATED ALWAYS AS (v * 2) VIRTUAL")
    try:
        await attach(db, f"({expression}) > 0", expression)
    except TubeRefused:
        assert await db.fetch("SELECT FROM pg_trigger WHERE tgrelid = 'sh1.t'::regclass") == []
        return
    await db.execute("INSERT INTO sh1.t (id, v) VALUES (7, 3), (8, 5)")
    expected = await db.fetch(
        f"SELECT id, ({expression})::integer AS shard FROM sh1.t AS tube_row WHERE ({expression}) > 0 ORDER BY id"
    )
    assert sorted((shard, i) for _, shard, ids in await take("a") for i in ids) == sorted(
        (row["shard"] & 2147483647, row["id"]) for row in expected
    )
    await db.execute("UPDATE sh1.t SET v = v")
    await db.execute("DELETE FROM sh1.t")
    assert sorted(i for _, _, ids in await take("a") for i in ids) == sorted([row["id"] for row in expected] * 2)


async def test_a_virtual_column_is_refused_as_key_and_in_expressions_with_the_reason(db: Database) -> None:
    if await db.fetch_value("SELECT current_setting('server_version_num')::integer < 180000"):
        pytest.skip("Postgres has virtual columns since 18")
    await db.execute(TABLE + "ALTER TABLE sh1.t ADD virtual integer GENERATED ALWAYS AS (v * 2) VIRTUAL")
    for predicate, routing in (("virtual > 0", None), (None, "virtual")):
        with pytest.raises(TubeRefused, match="virtual generated columns"):
            await attach(db, predicate, routing)
    with pytest.raises(TubeRefused, match="virtual generated column"):
        await db.execute("SELECT tube.tube_table_ensure_attached('a', 'sh1.t', 1, key => '{virtual}')")
    await attach(db, "four > 0", "v")
    with pytest.raises(TubeRefused, match="virtual generated columns"):
        await db.execute("SELECT tube.tube_ensure_exists('a', 1, 'virtual > 0')")


SETTINGS = [
    "SET TimeZone = 'Asia/Tokyo'",
    "SET DateStyle = 'SQL, DMY'",
    "SET IntervalStyle = 'iso_8601'",
    "SET bytea_output = 'escape'",
    "SET transform_null_equals = on",
    "SET extra_float_digits = -15",
    "SET lc_time = 'C'",
    "SET array_nulls = off",
]
DEPENDENT = {
    "extract(day FROM at)::integer": 1,
    "extract(month FROM day::date)::integer": 3,
    "length(length::text)": 8,
    "length(data::text)": 4,
    "CASE WHEN v = NULL THEN 5 ELSE 6 END": 6,
    "length(n::text)": 3,
    "CASE WHEN ('{NULL}'::text[])[1] IS NULL THEN 2 ELSE 3 END": 2,
}


@pytest.mark.parametrize(("setting", "expression"), crossed(SETTINGS, DEPENDENT, turns=2))
async def test_an_expression_gives_the_same_whatever_the_settings_of_the_writer(
    db: Database, take: Take, setting: str, expression: str
) -> None:
    shard = DEPENDENT[expression]
    await db.execute(TABLE)
    await attach(db, f"({expression}) = {shard}", expression)
    for one in (setting, "RESET ALL"):
        async with db.connection() as connection:
            await connection.execute(one)
            await connection.execute(ROW)
            await connection.execute("UPDATE sh1.t SET body = 'y'")
            await connection.execute("SELECT sh1.t_touch('{1}')")
            await connection.execute("SELECT tube.tube_backfill_step3(tube.tube_backfill_step1(), 'a', 'sh1.t', 'id')")
            await connection.execute("DELETE FROM tube.a WHERE ids = '{}'")
            await connection.execute("DELETE FROM sh1.t")
            await connection.execute(ROW)
            await connection.execute("TRUNCATE sh1.t")
            await connection.execute("RESET ALL")
        assert await take("a") == [(op, shard, [1]) for op in "IUTBDID"]


async def test_the_text_of_an_expression_means_the_same_whatever_the_settings(db: Database, take: Take) -> None:
    await db.execute(TABLE)
    async with db.connection() as connection:
        try:
            await connection.execute("SET standard_conforming_strings = off")
        except DatabaseError:
            pytest.skip("this Postgres has one meaning only")
        await connection.execute(
            "SELECT tube.tube_table_ensure_attached('a', 'sh1.t', 1, 'body = $$x$$ OR body = ''\\\\n''')"
        )
        await connection.execute("INSERT INTO sh1.t (id, body) VALUES (1, E'\\n'), (2, E'\\\\n')")
        await connection.execute("RESET ALL")
        await connection.execute("INSERT INTO sh1.t (id, body) VALUES (3, E'\\n'), (4, E'\\\\n')")
    assert [ids for _, _, ids in await take("a")] == [[2], [4]]


async def test_writers_without_expressions_pay_for_no_settings(db: Database) -> None:
    await db.execute(TABLE)
    await db.execute("SELECT tube.tube_table_ensure_attached('a', 'sh1.t', 1)")
    settings = "SELECT proconfig::text FROM pg_proc WHERE proname = 'a_trigger'"
    assert await db.fetch_value(settings) == "{search_path=pg_temp}"


@pytest.mark.parametrize("locked", ["sh1.t", "sh1.other"])
async def test_a_lock_that_is_not_had_in_time_says_nothing_about_the_expression(db: Database, locked: str) -> None:
    await db.execute(TABLE + "CREATE TABLE sh1.other (id bigint)")
    async with db.connection() as holder, db.connection() as connection:
        async with holder.transaction():
            await holder.execute(f"LOCK TABLE {locked} IN ACCESS EXCLUSIVE MODE")
            await connection.execute("SET lock_timeout = '50ms'")
            with trio.fail_after(PATIENCE), pytest.raises(DatabaseError) as failed:
                await connection.execute(
                    "SELECT tube.tube_table_ensure_attached('a', 'sh1.t', 1, 'EXISTS (SELECT FROM sh1.other)')"
                )
            await connection.execute("RESET ALL")
    assert failed.value.sqlstate == "55P03"
    await db.execute("SELECT tube.tube_table_ensure_attached('a', 'sh1.t', 1, 'EXISTS (SELECT FROM sh1.other)')")
