"""Installing, upgrading and removing the SQL of the parts: by psql and by Python, into any schema, without a trace."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from replicad.errors import DatabaseError, SchemaMissing, SchemaTooNew
from replicad.postgres import schema, schema_text
from replicad.postgres.bridge import Database
from replicad.postgres.schema import Outcome, script
from tests.schema import page

pytestmark = pytest.mark.bare_database

CATALOGS = """
    SELECT 'class ' || c.oid::regclass || ' ' || c.relkind::text || ' ' || coalesce(c.reloptions::text, '') AS line
        FROM pg_class c WHERE c.oid >= 16384 AND c.relnamespace <> 'pg_toast'::regnamespace
    UNION ALL SELECT 'column ' || a.attrelid::regclass || ' ' || a.attnum || ' ' || a.attname || ' '
            || format_type(a.atttypid, a.atttypmod) || ' ' || a.attstorage::text || ' ' || a.attnotnull || ' '
            || coalesce(pg_get_expr(d.adbin, d.adrelid), '')
        FROM pg_attribute a LEFT JOIN pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
        WHERE a.attrelid >= 16384 AND a.attnum > 0 AND a.attrelid::regclass::text !~ '^pg_toast'
    UNION ALL SELECT 'index ' || pg_get_indexdef(i.indexrelid) FROM pg_index i WHERE i.indexrelid >= 16384
        AND i.indrelid::regclass::text !~ '^pg_toast'
    UNION ALL SELECT 'constraint ' || n.conrelid::regclass || ' ' || n.conname || ' ' || pg_get_constraintdef(n.oid)
        FROM pg_constraint n WHERE n.oid >= 16384 AND n.conrelid <> 0
    UNION ALL SELECT 'function ' || pg_get_functiondef(p.oid) || coalesce(p.proacl::text, '')
        FROM pg_proc p WHERE p.oid >= 16384
    UNION ALL SELECT 'trigger ' || pg_get_triggerdef(g.oid) FROM pg_trigger g WHERE g.oid >= 16384
    UNION ALL SELECT 'type ' || t.oid::regtype || t.typtype::text FROM pg_type t WHERE t.oid >= 16384
    UNION ALL SELECT 'schema ' || n.nspname || coalesce(n.nspacl::text, '') FROM pg_namespace n WHERE n.oid >= 16384
    UNION ALL SELECT 'comment ' || d.description FROM pg_description d WHERE d.objoid >= 16384
    ORDER BY 1
"""

TABLES = """
    CREATE SCHEMA sh1;
    CREATE TABLE sh1.users (id bigint PRIMARY KEY, region integer);
    CREATE TABLE sh1."Odd.Table" (id integer PRIMARY KEY, region integer) PARTITION BY RANGE (id);
    CREATE TABLE sh1.low PARTITION OF sh1."Odd.Table" FOR VALUES FROM (0) TO (1000);
"""

USE = """
    SELECT {0}.tube_ensure_exists('a', 3), {0}.tube_ensure_exists('It''s"B".x', 1, 'region > 0');
    SELECT {0}.tube_table_ensure_attached('a', 'sh1.users'),
        {0}.tube_table_ensure_attached('a', 'sh1."Odd.Table"', predicate => 'region = 1', routing => 'region'),
        {0}.tube_table_ensure_attached('It''s"B".x', 'sh1.users', 7);
    INSERT INTO sh1.users SELECT i, i FROM generate_series(1, 300) i;
"""


async def catalogs(db: Database) -> list[str]:
    return [row["line"] for row in await db.fetch(CATALOGS)]


@pytest.mark.parametrize("folder", ["tube", 'It\'s "Odd".x', None])
async def test_uninstalling_leaves_no_trace_of_tubes_triggers_and_functions(
    database: Database, database_url: str, psql_script: Callable[[str, str], str], folder: str | None
) -> None:
    await database.execute(TABLES)
    before = await catalogs(database)
    psql_script(database_url, script("tube", folder, "up"))
    quoted = "public" if folder is None else '"' + folder.replace('"', '""') + '"'
    await database.execute(USE.format(quoted))
    assert await database.fetch_value(f"SELECT count(*) FROM {quoted}.a") == 2
    psql_script(database_url, script("tube", folder, "down"))
    psql_script(database_url, script("tube", folder, "down"))
    assert await catalogs(database) == before


async def test_installing_again_changes_nothing_and_keeps_everything(
    database: Database, database_url: str, psql_script: Callable[[str, str], str]
) -> None:
    await database.execute(TABLES)
    assert await schema.install(database, "tube") is Outcome.INSTALLED
    assert await schema.install(database, "tube") is Outcome.UNCHANGED
    await database.execute(USE.format("tube"))
    before, pods = await catalogs(database), await database.fetch("SELECT * FROM tube.a ORDER BY seq")
    psql_script(database_url, script("tube", "tube", "up"))
    assert await catalogs(database) == before
    assert await database.fetch("SELECT * FROM tube.a ORDER BY seq") == pods
    await database.execute("DELETE FROM sh1.users")
    assert await database.fetch_value("SELECT count(*) FROM tube.a WHERE op = 'D'") == 2


async def test_upgrading_makes_functions_triggers_and_indexes_anew_as_a_fresh_installation_has_them(
    database: Database,
) -> None:
    await database.execute(TABLES)
    await schema.install(database, "tube")
    await database.execute(USE.format("tube"))
    fresh = await catalogs(database)
    await database.execute(
        "CREATE OR REPLACE FUNCTION tube.a_trigger() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END';"
        "CREATE OR REPLACE FUNCTION sh1.users_touch(ids bigint[], op character = 'T', payload jsonb = NULL,"
        " chunk_size integer = 250) RETURNS bigint LANGUAGE sql AS $$ -- replicad: touches the tubes of schema tube\n"
        " SELECT 0::bigint $$;"
        "CREATE FUNCTION tube.tube_stats(text, text = NULL) RETURNS text LANGUAGE sql AS 'SELECT 1::text';"
        "ALTER INDEX tube.a_pods_3 RENAME TO a_pods_33;"
        "DROP TRIGGER users_a_after_insert_trigger ON sh1.users;"
        "UPDATE tube.tube_version SET digest = 'of another build'"
    )
    assert await catalogs(database) != fresh
    assert await schema.upgrade(database, "tube") is Outcome.UPGRADED
    assert await catalogs(database) == fresh


async def test_an_older_version_is_brought_up_step_by_step_to_what_a_fresh_installation_is(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = tmp_path / "tubes/sql"
    (part / "upgrade").mkdir(parents=True)
    (tmp_path / "postgres").mkdir()
    (tmp_path / "postgres/sql").symlink_to(schema_text.PACKAGE / "postgres/sql")
    declared = (schema_text.PACKAGE / "tubes/sql/part.toml").read_text(encoding="utf-8")
    declared, _, _ = declared.partition("files = ")
    (part / "part.toml").write_text(f'{declared}files = ["thing.sql"]\n', encoding="utf-8")
    monkeypatch.setattr(schema_text, "PACKAGE", tmp_path)
    monkeypatch.setattr(schema_text, "load", schema_text.load.__wrapped__)
    monkeypatch.setitem(schema.PARTS, "tube", replace(schema.PARTS["tube"], version=1))
    (part / "thing.sql").write_text(
        "CREATE TABLE IF NOT EXISTS thing (old integer);\n"
        "CREATE FUNCTION f(x integer) RETURNS integer LANGUAGE sql AS 'SELECT 1';"
    )
    await schema.install(database, "tube", "one")
    await database.execute("INSERT INTO one.thing VALUES (7)")

    (part / "thing.sql").write_text(
        "CREATE TABLE IF NOT EXISTS thing (value text);\n"
        "CREATE OR REPLACE FUNCTION f(y integer) RETURNS integer LANGUAGE sql AS 'SELECT 2';"
    )
    (part / "upgrade" / "2.sql").write_text("ALTER TABLE thing RENAME old TO value; DROP FUNCTION f(integer);")
    (part / "upgrade" / "10.sql").write_text("ALTER TABLE thing ALTER value TYPE text;")
    monkeypatch.setitem(schema.PARTS, "tube", replace(schema.PARTS["tube"], version=10))
    assert await schema.install(database, "tube", "one") is Outcome.UPGRADED
    assert await schema.install(database, "tube", "two") is Outcome.INSTALLED
    assert await database.fetch_value("SELECT value FROM one.thing") == "7"
    lines = await catalogs(database)
    one, two = (
        sorted(
            line.replace(f"{name}.", "").replace(f"'{name}'", "") for line in lines if re.search(rf"\b{name}\.", line)
        )
        for name in ("one", "two")
    )
    assert one == two

    monkeypatch.setitem(schema.PARTS, "tube", replace(schema.PARTS["tube"], version=9))
    monkeypatch.setitem(schema.PARTS, "tube", replace(schema.PARTS["tube"], serves=9))
    await database.execute("UPDATE one.tube_version SET serves = 10")
    for refused in (schema.install, schema.upgrade, schema.require, schema.uninstall):
        with pytest.raises(SchemaTooNew, match="version 10"):
            await refused(database, "tube", "one")
    with pytest.raises(DatabaseError, match="newer than the 9"):
        await database.execute(schema.script("tube", "one", "up"))


async def test_what_is_missing_or_depends_on_us_is_said_in_a_sentence(database: Database) -> None:
    with pytest.raises(SchemaMissing, match="not installed"):
        await schema.require(database, "tube")
    with pytest.raises(SchemaMissing, match="not installed"):
        await schema.upgrade(database, "tube")
    assert not await schema.uninstall(database, "tube")
    await schema.install(database, "tube")
    await schema.require(database, "tube")
    await database.execute("CREATE VIEW mine AS SELECT * FROM tube.tube_registry")
    with pytest.raises(DatabaseError, match="mine"):
        await schema.uninstall(database, "tube")
    await database.execute("DROP VIEW mine")
    assert await schema.uninstall(database, "tube")
    assert await database.fetch_value("SELECT to_regnamespace('tube')") is None


async def test_a_schema_of_the_users_own_stays_when_the_part_goes(database: Database) -> None:
    await database.execute("CREATE SCHEMA mine; CREATE TABLE mine.t (id bigint)")
    await schema.install(database, "tube", "mine")
    await schema.uninstall(database, "tube", "mine")
    assert await database.fetch_value("SELECT count(*) FROM mine.t") == 0


async def test_every_public_function_is_described_and_every_function_pins_its_search_path(db: Database) -> None:
    described = await db.fetch(
        "SELECT p.proname::text AS name FROM pg_proc p WHERE p.pronamespace = 'tube'::regnamespace "
        "AND obj_description(p.oid, 'pg_proc') IS NOT NULL"
    )
    assert sorted(row["name"] for row in described) == sorted(page.public("tube"))
    bare = await db.fetch(
        "SELECT p.oid::regprocedure AS name FROM pg_proc p WHERE p.pronamespace = 'tube'::regnamespace "
        "AND NOT coalesce(array_to_string(p.proconfig, ' '), '') ~ 'search_path' "
        "AND p.proname <> 'tube_on_disk'"  # which names everything in full
    )
    assert bare == []
    assert (
        await db.fetch_value(
            "SELECT count(*) FROM pg_class c WHERE c.relnamespace = 'tube'::regnamespace AND c.relkind IN ('r', 'S')"
            " AND obj_description(c.oid, 'pg_class') IS NULL AND c.relname !~ '_parked_seq$'"
        )
        == 0
    )


async def test_functions_work_whatever_the_callers_search_path_is(db: Database) -> None:
    await db.execute("CREATE SCHEMA sh1; CREATE TABLE sh1.t (id bigint); CREATE SCHEMA evil")
    await db.execute("CREATE FUNCTION evil.tube_refuse(text, text, text) RETURNS void LANGUAGE sql AS 'SELECT 1 / 0'")
    async with db.connection() as connection:
        await connection.execute("SET search_path = evil, pg_catalog")
        await connection.execute("SELECT tube.tube_ensure_exists('x'), tube.tube_table_ensure_attached('x', 'sh1.t')")
        await connection.execute("CREATE TEMP TABLE x (seq bigint, op text, shard int, ids bigint[])")
        await connection.execute("INSERT INTO sh1.t VALUES (1), (NULL)")
        await connection.execute("SELECT sh1.t_touch('{2}'), tube.x_touch(1, '{3}', 'T')")
        assert await connection.fetch_value("SELECT count(*) FROM pg_temp.x") == 0
    assert [row["ids"] for row in await db.fetch("SELECT ids FROM tube.x ORDER BY seq")] == [[1], [2], [3]]


async def test_tables_in_the_schema_of_the_tubes_can_be_attached_and_stay_when_the_tubes_go(
    database: Database, database_url: str, psql_script: Callable[[str, str], str]
) -> None:
    psql_script(database_url, "CREATE TABLE cities (id bigint PRIMARY KEY, v integer)")
    psql_script(database_url, script("tube", None, "up"))
    psql_script(
        database_url,
        "SELECT tube_ensure_exists('a', 2, 'v > 0');"
        "SELECT tube_table_ensure_attached('a', 'cities', 1, 'v < 9', 'v % 4');"
        "INSERT INTO cities VALUES (1, 1), (2, 99); SELECT cities_touch('{1}'); UPDATE cities SET v = 3 WHERE id = 1;"
        "SELECT tube_backfill_schedule('a', 'id', 0, 9); TRUNCATE cities",
    )
    rows = await database.fetch("SELECT op, shard, ids FROM public.a WHERE ids <> '{}' ORDER BY seq")
    assert [tuple(row) for row in rows] == [("I", 1, [1]), ("T", 1, [1]), ("U", 1, [1]), ("U", 3, [1]), ("D", 3, [1])]
    psql_script(database_url, script("tube", None, "up"))
    psql_script(database_url, script("tube", None, "down"))
    psql_script(database_url, "INSERT INTO cities VALUES (5, 1)")
    assert await database.fetch_value("SELECT count(*) FROM pg_proc WHERE oid >= 16384") == 0
    assert (
        await database.fetch_value("SELECT count(*) FROM pg_trigger WHERE NOT tgisinternal AND tgname <> 'on_disk'")
        == 0
    )
