"""The installer: taken names, several daemons at once, interruptions, newer versions, other builds, and few rights."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import pytest
import trio
from structlog.testing import capture_logs

from replicad.config.settings import DatabaseSettings
from replicad.daemon.daemon import install_all
from replicad.errors import DatabaseRefused, ReplicadError, SchemaCollision, SchemaMissing, SchemaTooNew
from replicad.postgres import schema, schema_text
from replicad.postgres.bridge import Database, open_database
from replicad.postgres.schema import Outcome, Part
from tests.conftest import psql
from tests.schema import catalogue

pytestmark = pytest.mark.bare_database

OBJECTS = (
    "SELECT (SELECT count(*) FROM pg_class) + (SELECT count(*) FROM pg_proc) + (SELECT count(*) FROM pg_type) "
    "+ (SELECT count(*) FROM pg_namespace)"
)


async def count(db: Database) -> int:
    found: int = await db.fetch_value(OBJECTS)
    return found


# --- names that are taken ---


@pytest.mark.parametrize(
    ("part", "made", "named"),
    [
        ("tube", "CREATE TABLE tube.tube_lease (mine text)", "table tube_lease"),
        ("tube", "CREATE VIEW tube.tube_registry AS SELECT 1 AS mine", "view tube_registry"),
        ("tube", "CREATE SEQUENCE tube.tube_seq", "sequence tube_seq"),
        ("tube", "CREATE FUNCTION tube.tube_list(x text) RETURNS text LANGUAGE sql RETURN x",
            "function tube_list(x text)"),
        ("tube", "CREATE TYPE tube.tube_lease AS ENUM ('mine')", "type tube_lease"),
        ("tube", "CREATE TYPE tube.tube_lease AS (mine text)", "type tube_lease"),
        ("tube", "CREATE TABLE tube.t (id int); CREATE INDEX tube_parked_tube ON tube.t (id)",
            "index tube_parked_tube"),
        ("tube", "CREATE TABLE tube.tube_version (version text)", "table tube_version"),
        ("stream", "CREATE TABLE replicad.stream (mine text)", "table stream"),
        ("presence", "CREATE TABLE replicad.presence_seen (mine text)", "table presence_seen"),
        ("cache", "CREATE FUNCTION replicad.invalidate_cache(x xml) RETURNS int LANGUAGE sql RETURN 1",
            "function invalidate_cache(x xml)"),
        ("federation", "CREATE MATERIALIZED VIEW replicad.federation_fact AS SELECT 1 AS a",
            "materialized view federation_fact"),
    ],
)  # fmt: skip
async def test_objects_of_the_user_with_our_names_are_refused_by_name_and_stay(
    database: Database, database_url: str, psql_script: Callable[[str, str], str], part: Part, made: str, named: str
) -> None:
    folder = schema.PARTS[part].schema
    if part in ("presence", "cache", "federation"):
        await schema.install(database, "stream")
    else:
        await database.execute(f"CREATE SCHEMA {folder}")
    await database.execute(made)
    before, catalog = await count(database), await catalogue.lines(database)
    with pytest.raises(SchemaCollision) as caught:
        await schema.install(database, part)
    for words in (f"schema {folder} ", f": {named}. ", "-schema NAME", "nothing was changed"):
        assert words in str(caught.value)
    assert (await count(database), await catalogue.lines(database)) == (before, catalog)
    with pytest.raises(AssertionError, match="have names that its"):
        psql_script(database_url, schema.script(part, folder, "up"))
    with pytest.raises(SchemaMissing):
        await schema.require(database, part)
    assert not await schema.uninstall(database, part)
    assert await count(database) == before
    if part == "tube":
        assert await schema.install(database, part, "elsewhere") is Outcome.INSTALLED


async def test_all_names_that_are_taken_are_listed(database: Database) -> None:
    await database.execute(
        "CREATE SCHEMA tube; CREATE TABLE tube.tube_lease (x int); CREATE TABLE tube.tube_ack (x int);"
        "CREATE FUNCTION tube.tube_ack() RETURNS int LANGUAGE sql RETURN 1; CREATE TABLE tube.cities (x int)"
    )
    with pytest.raises(SchemaCollision, match=r"needs: function tube_ack\(\), table tube_lease\. "):
        await schema.install(database, "tube")


async def test_an_upgrade_does_not_take_over_what_the_user_has_called_like_an_object_that_is_new(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    await schema.install(database, "tube")
    version = schema.PARTS["tube"].version
    texts = dict(schema_text.load(schema_text.PACKAGE))
    texts["tube/new.sql"] = "CREATE TABLE IF NOT EXISTS tube_new (id int);"
    released = {version: schema_text.created("tube")}
    monkeypatch.setattr(schema_text, "load", lambda root: texts)
    monkeypatch.setattr(schema_text, "released", lambda part: released)
    monkeypatch.setitem(schema.PARTS, "tube", replace(schema.PARTS["tube"], version=version + 1))
    await database.execute("CREATE TABLE tube.tube_new (mine text)")
    with pytest.raises(SchemaCollision, match="needs: table tube_new"):
        await schema.install(database, "tube")
    assert (await schema.read_installed(database, "tube")).version == version  # type: ignore[union-attr]
    await database.execute("DROP TABLE tube.tube_new")
    assert await schema.install(database, "tube") is Outcome.UPGRADED
    assert await schema.install(database, "tube") is Outcome.UNCHANGED


# --- versions and builds ---


async def test_a_newer_schema_is_never_touched_and_used_only_where_it_serves_this_version(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = schema.PARTS["stream"].version
    monkeypatch.setitem(schema.PARTS, "stream", replace(schema.PARTS["stream"], version=version + 1))
    monkeypatch.setitem(schema.PARTS, "stream", replace(schema.PARTS["stream"], serves=version))
    await schema.install(database, "stream")
    assert (await schema.require(database, "stream")).serves == version
    monkeypatch.setitem(schema.PARTS, "stream", replace(schema.PARTS["stream"], version=version))
    before = await database.fetch("SELECT oid, xmin::text FROM pg_proc ORDER BY oid")
    assert await schema.install(database, "stream") is Outcome.NEWER
    assert await schema.upgrade(database, "stream") is Outcome.NEWER
    told = schema.remark(await schema.require(database, "stream"), "stream")
    assert f"version {version + 1} of the stream part, which is newer than version {version} of this program" in str(
        told
    )
    with pytest.raises(SchemaTooNew):
        await schema.uninstall(database, "stream")
    with pytest.raises(SchemaTooNew, match=f"newer than the {version}"):
        await database.execute(schema.script("stream", "replicad", "up"))

    await database.execute("UPDATE replicad.stream_version SET serves = version")
    for refused in (schema.install, schema.upgrade, schema.require):
        with pytest.raises(SchemaTooNew, match=f"holds version {version + 1} .* knows {version}: use the newer"):
            await refused(database, "stream")
    assert await database.fetch("SELECT oid, xmin::text FROM pg_proc ORDER BY oid") == before


async def test_two_builds_of_one_version_do_not_replace_each_other_for_ever(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(name: str) -> None:
        texts = real | {"tube/names.sql": real["tube/names.sql"] + f"-- build {name}\n"}
        monkeypatch.setattr(schema_text, "load", lambda root: texts)

    real = dict(schema_text.load(schema_text.PACKAGE))
    outcomes = []
    for name in "abcabcabc":
        build(name)
        outcomes.append(await schema.install(database, "tube"))
    assert outcomes == [Outcome.INSTALLED, *[Outcome.UPGRADED] * 2, *[Outcome.OTHER_BUILD] * 2, Outcome.UNCHANGED,
        *[Outcome.OTHER_BUILD] * 2, Outcome.UNCHANGED]  # fmt: skip
    build("a")
    remark = schema.remark(await schema.require(database, "tube"), "tube")
    assert "another build of version" in str(remark)
    assert "replicad sql up tube" in str(remark)
    await database.execute(schema.script("tube", "tube", "up"))
    assert await schema.install(database, "tube") is Outcome.UNCHANGED
    build("c")
    assert await schema.install(database, "tube") is Outcome.OTHER_BUILD


async def test_a_daemon_on_a_newer_schema_that_serves_it_says_so_and_goes_on(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    await install_all(database, DatabaseSettings())
    for part in schema.PARTS:
        table = f"{schema.PARTS[part].schema}.{part}_version"
        if await schema.read_installed(database, part) is not None:
            await database.execute(f"UPDATE {table} SET version = version + 1, serves = version")
    with capture_logs() as logs:
        await install_all(database, DatabaseSettings())
    assert [(event["event"], event["part"], event["log_level"]) for event in logs] == [
        ("schema_newer", part, "warning") for part in ("stream", "tube", "federation")
    ]
    assert "is newer than version" in logs[0]["reason"]


# --- several at once, and interruptions ---


async def test_daemons_that_start_at_once_install_once(database: Database) -> None:
    outcomes: list[Outcome] = []

    async def start() -> None:
        outcomes.append(await schema.install(database, "stream"))
        outcomes.append(await schema.install(database, "tube"))

    async with trio.open_nursery() as nursery:
        for _ in range(4):
            nursery.start_soon(start)
    assert outcomes.count(Outcome.INSTALLED) == 2
    assert outcomes.count(Outcome.UNCHANGED) == 6


async def test_a_daemon_that_waited_for_a_newer_one_to_install_leaves_it_alone(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = schema.PARTS["tube"].version
    outcomes: list[Outcome] = []

    async def start() -> None:
        outcomes.append(await schema.install(database, "tube"))

    async with database.connection() as connection, trio.open_nursery() as nursery:
        async with connection.transaction():
            await connection.execute("SELECT pg_advisory_xact_lock(hashtext('replicad schema'), hashtext('tube'))")
            nursery.start_soon(start)  # finds nothing installed, and waits
            while not await database.fetch_value("SELECT count(*) FROM pg_locks WHERE NOT granted"):
                await trio.sleep(0.01)
            monkeypatch.setitem(schema.PARTS, "tube", replace(schema.PARTS["tube"], version=version + 1))
            await connection.execute(schema.script("tube", "tube", "up").removesuffix("COMMIT;\n"))
            monkeypatch.setitem(schema.PARTS, "tube", replace(schema.PARTS["tube"], version=version))
    assert outcomes == [Outcome.NEWER]


async def test_an_interrupted_installation_has_not_happened(database: Database) -> None:
    before = await count(database)
    with trio.move_on_after(0) as scope:
        async with database.connection() as busy:
            await busy.execute("SELECT pg_advisory_lock(hashtext('replicad schema'), hashtext('tube'))")
            async with trio.open_nursery() as nursery:
                scope.deadline = float("inf")
                nursery.start_soon(schema.install, database, "tube")
                while not await database.fetch_value("SELECT count(*) FROM pg_locks WHERE NOT granted"):
                    await trio.sleep(0.01)
                nursery.cancel_scope.cancel()
    assert await count(database) == before

    texts = schema_text.up(replace(schema.PARTS["tube"], version=1), "tube")
    texts = texts.replace("UPDATE tube_version", "SELECT 1 / 0; UPDATE tube_version")
    async with database.connection() as connection:
        with pytest.raises(ReplicadError, match="division by zero"):
            await connection.execute(f"BEGIN;\n{texts}COMMIT;")
    assert await count(database) == before
    assert await schema.install(database, "tube") is Outcome.INSTALLED


async def test_a_table_that_stays_locked_is_a_sentence_and_nothing_is_changed(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = schema.PARTS["stream"].version
    real = schema_text.up

    def up(*args: Any) -> str:
        return real(*args).replace("lock_timeout = '20s'", "lock_timeout = '50ms'")

    monkeypatch.setattr(schema_text, "up", up)
    await schema.install(database, "stream")
    texts = dict(schema_text.load(schema_text.PACKAGE))
    texts[f"stream/upgrade/{version + 1}.sql"] = "ALTER TABLE stream ADD COLUMN made_up text;"
    monkeypatch.setattr(schema_text, "load", lambda root: texts)
    monkeypatch.setattr(schema_text, "released", lambda part: {version: schema_text.created(part)})
    monkeypatch.setitem(schema.PARTS, "stream", replace(schema.PARTS["stream"], version=version + 1))
    async with database.connection() as holder:
        async with holder.transaction():
            await holder.execute("SELECT * FROM replicad.stream")
            with pytest.raises(
                ReplicadError, match=f"upgraded from version {version} .* nothing was changed: a table stayed"
            ):
                await schema.install(database, "stream")
    assert (await schema.read_installed(database, "stream")).version == version  # type: ignore[union-attr]


# --- few rights ---


@pytest.fixture
async def least(database: Database, database_url: str, postgres_url: str) -> AsyncIterator[Database]:
    """Streams and tubes installed by their owner, and a pool of a role that may use them and create nothing."""
    role = "least_" + urlsplit(database_url).path.lstrip("/")
    await schema.install(database, "stream")
    await schema.install(database, "tube")
    await database.execute(
        f"CREATE ROLE {role} LOGIN PASSWORD 'x';"
        + "".join(
            f"GRANT USAGE ON SCHEMA {folder} TO {role};"
            f"GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA {folder} TO {role};"
            f"GRANT USAGE, SELECT ON ALL SEQUENCES IN SCHEMA {folder} TO {role};"
            f"GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA {folder} TO {role};"
            for folder in ("replicad", "tube")
        )
    )
    parts = urlsplit(database_url)
    host = parts.netloc.rpartition("@")[2]
    url = urlunsplit(parts._replace(netloc=f"{role}:x@{host}"))
    async with open_database(url, size=2, application_name="replicad test") as db:
        yield db
    psql(database_url, f"DROP OWNED BY {role}; DROP ROLE {role}")


async def test_a_role_that_may_create_nothing_can_serve_what_is_installed(least: Database) -> None:
    assert not await least.fetch_value("SELECT has_database_privilege(current_database(), 'CREATE')")
    assert await schema.install(least, "stream") is Outcome.UNCHANGED
    await install_all(least, DatabaseSettings())  # what senders need is missing; that is logged
    with pytest.raises(SchemaMissing, match="federation part"):
        await schema.require(least, "federation")


async def test_another_build_of_the_same_version_is_served_by_a_role_that_may_not_replace_it(
    least: Database, database: Database
) -> None:
    await database.execute("UPDATE tube.tube_version SET digest = 'other'")
    assert await schema.install(least, "tube") is Outcome.OTHER_BUILD
    assert (await schema.read_installed(database, "tube")).digest == "other"  # type: ignore[union-attr]


async def test_a_role_that_may_not_install_or_upgrade_is_told_who_has_to_run_what(
    least: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = r"could not be installed in schema \"elsewhere\".* run `replicad sql up tube --schema elsewhere"
    with pytest.raises(DatabaseRefused, match=told):
        await schema.install(least, "tube", "elsewhere")
    monkeypatch.setitem(schema.PARTS, "tube", replace(schema.PARTS["tube"], version=schema.PARTS["tube"].version + 1))
    with pytest.raises(DatabaseRefused, match=r"could not be upgraded from version .* have its owner"):
        await schema.install(least, "tube")


async def test_a_role_that_may_not_even_look_is_told_what_to_grant(least: Database, database: Database) -> None:
    role = await least.fetch_value("SELECT current_user")
    for revoke in (f"SELECT ON tube.tube_version FROM {role}", f"USAGE ON SCHEMA tube FROM {role}"):
        await database.execute(f"REVOKE {revoke}")
        with pytest.raises(DatabaseRefused, match="GRANT USAGE ON SCHEMA"):
            await schema.require(least, "tube")


def test_the_sql_is_read_from_disk_once(monkeypatch: pytest.MonkeyPatch) -> None:
    schema.script("tube", "tube", "up")

    def refuse(*args: object, **named: object) -> str:
        raise AssertionError("a file is read")

    monkeypatch.setattr("pathlib.Path.read_text", refuse)
    monkeypatch.setattr("pathlib.Path.open", refuse)
    for part in schema.PARTS:
        schema.script(part, None, "up")
        schema.script(part, "elsewhere", "down")
