"""What writers call to have caches forgotten: the SQL of the part `cache`, by psql and by Python."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import asyncpg
import pytest
import trio

from replicad.caches.writing import (
    blocking_invalidate,
    blocking_invalidate_many,
    invalidate,
    invalidate_many,
)
from replicad.errors import DatabaseError, StreamRefused, UsageError
from replicad.postgres import schema
from replicad.postgres.bridge import Database
from replicad.postgres.schema import script
from tests.conftest import PATIENCE

from .test_tube_install import catalogs

pytestmark = pytest.mark.bare_database

Rows = Callable[[], Awaitable[list[tuple[str, str, Any]]]]


@pytest.fixture
async def db(database: Database) -> Database:
    await schema.install(database, "stream")
    await schema.install(database, "cache")
    await database.fetch_value("SELECT replicad.cache_enable(ARRAY['w1'])")
    return database


@pytest.fixture
def rows(db: Database) -> Rows:
    """Takes the rows out: writer, name, keys."""

    async def take() -> list[tuple[str, str, Any]]:
        found = await db.fetch(
            "WITH gone AS (DELETE FROM replicad.cache_invalidation RETURNING *) SELECT * FROM gone ORDER BY id"
        )
        assert all(row["ts_ms"] > 1_700_000_000_000 for row in found)
        return [(row["instance"], row["cache_func"], row["keys"] and json.loads(row["keys"])) for row in found]

    return take


async def test_an_invalidation_commits_with_its_transaction_and_null_is_the_whole_cache(
    db: Database, rows: Rows
) -> None:
    async with db.connection() as connection:
        await connection.execute("BEGIN")
        await invalidate(connection, "f", ["@bob:example.com", 1, None, True, {"a": [1.5]}])
        await connection.execute("ROLLBACK")
        assert await rows() == []
        await connection.execute("BEGIN")
        await invalidate(connection, "f", ["@bob:example.com", 1, None, True, {"a": [1.5]}])
        await invalidate(connection, "f", [])
        await invalidate(connection, "f", None)
        await invalidate_many(connection, "g", ([n] for n in range(3)))
        await connection.execute("COMMIT")
    await db.execute("SELECT replicad.invalidate_cache('f', 'null')")
    assert await rows() == [
        ("master", "f", ["@bob:example.com", 1, None, True, {"a": [1.5]}]),
        ("master", "f", []),
        ("master", "f", None),
        *[("master", "g", [n]) for n in range(3)],
        ("master", "f", None),
    ]


async def test_what_cannot_be_said_entry_by_entry_is_said_of_the_whole_cache(db: Database, rows: Rows) -> None:
    long = json.dumps(["x" * 70_000])
    assert await db.fetch_value("SELECT replicad.invalidate_cache('f', $1::text::jsonb)", long) == 1
    many = json.dumps([[n] for n in range(10_001)])
    assert await db.fetch_value("SELECT replicad.invalidate_cache_many('g', $1::text::jsonb)", many) == 1
    assert await db.fetch_value("SELECT replicad.invalidate_cache_many('h', $1::text::jsonb)", f"[[1], {long}]") == 1
    assert await rows() == [("master", "f", None), ("master", "g", None), ("master", "h", None)]
    assert await db.fetch_value("SELECT replicad.invalidate_cache_many('f', '[]')") == 0


@pytest.mark.parametrize(
    ("call", "says"),
    [
        ("invalidate_cache('f', '3')", "are number, not an array.*jsonb_build_array"),
        ("invalidate_cache('f', '{}')", "are object, not an array"),
        ("invalidate_cache('', '[]')", "no name of a cache"),
        ("invalidate_cache(NULL)", "no name of a cache"),
        ("invalidate_cache(repeat('x', 201))", "1 to 200 characters"),
        ("invalidate_cache_many('f', '[[1], 2]')", "no array of arrays"),
        ("invalidate_cache_many('f', NULL)", "no array of arrays"),
        ("cache_enable(ARRAY['two words'])", "no name of a writer"),
        ("cache_enable(ARRAY[''])", "no name of a writer"),
        ("cache_enable(array_agg(n::text)) FROM generate_series(1, 101) n", "101 writers are too many"),
    ],
)
async def test_what_makes_no_sense_is_refused_with_the_remedy(db: Database, rows: Rows, call: str, says: str) -> None:
    with pytest.raises(StreamRefused, match=says):
        await db.fetch_value(f"SELECT replicad.{call}")
    assert await rows() == []


async def test_a_session_writes_as_who_its_name_says_and_nobody_can_choose(db: Database, rows: Rows) -> None:
    """The lock-watch takes an open transaction for that of the writer of its application_name."""

    async def write_as(name: str, begin: str = "BEGIN") -> str:
        async with db.connection() as connection:
            await connection.execute(begin)
            await connection.fetch_value("SELECT set_config('application_name', $1, true)", name)
            await invalidate(connection, "f", [])
            called = await connection.fetch_value("SELECT current_setting('application_name')")
            await connection.execute("COMMIT")
        [(writer, _, _)] = await rows()
        return f"{writer}, {called}"

    assert await write_as("w1") == "w1, w1"
    assert await write_as("w2") == "master, w2"
    assert await write_as("") == "master, "
    # A snapshot that is too old to show w2 among the writers: its transaction must not be taken for one of w2's.
    repeatable = "BEGIN ISOLATION LEVEL REPEATABLE READ"
    assert await write_as("w1", repeatable) == "w1, w1"
    assert await write_as("w2", repeatable) == "master, w2 (caches)"
    assert await write_as("master", repeatable) == "master, master"
    assert await write_as("replicad ack") == "master, replicad ack"  # no name is left out by the lock-watch


async def test_a_session_becomes_a_writer_only_when_no_transaction_of_before_is_open(db: Database) -> None:
    """Else it would have written as master what is then held back for the new writer alone."""
    enabled = trio.Event()

    async def enable() -> None:
        await db.fetch_value("SELECT replicad.cache_enable(ARRAY['w2'])")
        enabled.set()

    waiting = (
        "SELECT count(*) FROM pg_locks l JOIN pg_database d ON d.oid = l.database "
        "WHERE NOT l.granted AND d.datname = current_database()"
    )
    async with db.connection() as connection, trio.open_nursery() as nursery:
        await connection.execute("BEGIN")
        await invalidate(connection, "f", [])
        nursery.start_soon(enable)
        with trio.fail_after(PATIENCE):
            while not await db.fetch_value(waiting):
                await trio.sleep(0.01)
        assert not enabled.is_set()
        known = "SELECT count(*) FROM replicad.stream_writer WHERE name = 'w2'"
        assert await db.fetch_value(known) == 0
        await connection.execute("COMMIT")
        with trio.fail_after(PATIENCE):
            await enabled.wait()
        assert await db.fetch_value(known) == 1


async def test_without_the_stream_writers_go_on_and_nothing_is_written(db: Database, rows: Rows) -> None:
    assert await db.fetch_value("SELECT replicad.cache_disable()")
    assert not await db.fetch_value("SELECT replicad.cache_disable()")
    assert await db.fetch_value("SELECT replicad.invalidate_cache('f', '[1]')") == 0
    assert await db.fetch_value("SELECT replicad.invalidate_cache_many('f', '[[1]]')") == 0
    assert await rows() == []
    assert await db.fetch_value("SELECT replicad.cache_enable()")
    assert await db.fetch_value("SELECT replicad.invalidate_cache('f', '[1]')") == 1


async def test_a_role_invalidates_by_a_grant_alone_and_the_refusal_names_it(db: Database, rows: Rows) -> None:
    async with db.connection() as connection:
        await connection.execute("BEGIN")
        await connection.execute(
            "CREATE ROLE somebody_of_caches; SET LOCAL ROLE somebody_of_caches; SET search_path = ''"
        )

        async def refuse(statement: str) -> DatabaseError:
            await connection.execute("SAVEPOINT s")
            with pytest.raises(DatabaseError) as caught:
                await connection.execute(statement)
            assert caught.value.sqlstate == "42501"
            await connection.execute("ROLLBACK TO s")
            return caught.value

        for call in ("invalidate_cache('f')", "invalidate_cache_many('f', '[[1]]')"):
            refused = await refuse(f"SELECT replicad.{call}")
            grant = "GRANT EXECUTE ON FUNCTION replicad.cache_write(text, jsonb) TO somebody_of_caches"
            assert grant in str(refused)
        await refuse("SELECT replicad.cache_write('f', NULL)")
        await connection.execute(f"SAVEPOINT granted; RESET ROLE; {grant}; SET LOCAL ROLE somebody_of_caches")
        assert await connection.fetch_value("SELECT replicad.invalidate_cache('f')") == 1
        assert await connection.fetch_value("SELECT replicad.invalidate_cache_many('f', '[[1], [2]]')") == 2
        for forbidden in (
            "INSERT INTO replicad.cache_invalidation (instance, cache_func) VALUES ('w1', 'f')",
            "SELECT replicad.cache_enable()",
            "SELECT replicad.cache_disable()",
            "SELECT replicad.cache_names()",
        ):
            await refuse(forbidden)
        await connection.execute("ROLLBACK TO granted")
        await connection.execute(
            "RESET ROLE; CREATE FUNCTION public.rename() RETURNS integer SECURITY DEFINER LANGUAGE sql"
            " AS $$ SELECT replicad.invalidate_cache('f') $$; SET LOCAL ROLE somebody_of_caches"
        )
        assert await connection.fetch_value("SELECT public.rename()") == 1  # its owner's right counts
        await connection.execute("ROLLBACK")


async def test_an_upgrade_keeps_what_the_operator_has_granted_and_revoked(database: Database) -> None:
    await schema.install(database, "stream")
    await schema.install(database, "cache")
    role = "caches_" + str(await database.fetch_value("SELECT oid FROM pg_database WHERE datname = current_database()"))
    may = "SELECT has_function_privilege($1, 'replicad.cache_write(text, jsonb)', 'EXECUTE')"
    await database.execute(f"CREATE ROLE {role}")
    try:
        for change, expected in (("SELECT", False), ("GRANT {} TO {}", True), ("REVOKE {} FROM {}", False)):
            await database.execute(change.format("EXECUTE ON FUNCTION replicad.cache_write(text, jsonb)", role))
            await database.execute("UPDATE replicad.cache_version SET digest = 'of another build'")
            assert await schema.install(database, "cache") is schema.Outcome.UPGRADED
            assert await database.fetch_value(may, role) is expected
    finally:
        await database.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")


class Cursor:
    """A DB-API connection and its cursor, that note what they are told."""

    def __init__(self, *, autocommit: bool = False) -> None:
        self.autocommit = autocommit
        self.told: list[str] = []

    def cursor(self) -> Cursor:
        return self

    def execute(self, sql: str) -> None:
        self.told.append(sql)

    def fetchall(self) -> list[Any]:
        return [(1,)]

    def close(self) -> None: ...


async def test_every_driver_says_the_same(db: Database, rows: Rows) -> None:
    connection = Cursor()
    blocking_invalidate(connection, "it's", ["a'b\\"])
    blocking_invalidate(connection, "f", None)
    blocking_invalidate_many(connection, "f", [["ü"], [2]])
    for sql in connection.told:
        await db.execute(sql)
    assert await rows() == [
        ("master", "it's", ["a'b\\"]), ("master", "f", None), ("master", "f", ["ü"]), ("master", "f", [2]),
    ]  # fmt: skip
    with pytest.raises(UsageError, match="begin a transaction"):
        blocking_invalidate(Cursor(autocommit=True), "f", None)
    with pytest.raises(TypeError, match="JSON"):
        blocking_invalidate(connection, "f", [float("nan")])


def test_asyncpg_says_it_in_the_callers_transaction(database_url: str, psql_script: Callable[[str, str], str]) -> None:
    for part in ("stream", "cache"):
        psql_script(database_url, script(part, "replicad", "up"))
    psql_script(database_url, "SELECT replicad.cache_enable()")

    async def write() -> int:
        connection = await asyncpg.connect(database_url)
        with pytest.raises(UsageError, match="begin a transaction"):
            await invalidate(connection, "f", [1])
        async with connection.transaction():
            await invalidate(connection, "f", [1])
            await invalidate_many(connection, "f", [[2], [3]])
        count = await connection.fetchval("SELECT count(*) FROM replicad.cache_invalidation")
        await connection.close()
        return int(count)

    assert asyncio.run(write()) == 3


async def test_the_part_stands_on_streams_and_goes_without_a_trace(
    database: Database, database_url: str, psql_script: Callable[[str, str], str]
) -> None:
    with pytest.raises(DatabaseError, match="no streams"):
        await schema.install(database, "cache")
    await schema.install(database, "stream")
    before = await catalogs(database)
    for _ in range(2):
        psql_script(database_url, script("cache", "replicad", "up"))
    await database.fetch_value("SELECT replicad.cache_enable()")
    with pytest.raises(DatabaseError, match="depend"):
        await schema.uninstall(database, "stream")
    for _ in range(2):
        psql_script(database_url, script("cache", "replicad", "down"))
    assert await catalogs(database) == before
    assert await database.fetch_value("SELECT count(*) FROM replicad.stream") == 0
