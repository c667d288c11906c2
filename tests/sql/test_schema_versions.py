"""Each release of the schema is kept as a dump; it upgrades to what a fresh installation is, and loses nothing."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import pytest

from replicad.postgres import schema, schema_text
from replicad.postgres.bridge import Database, open_database
from replicad.postgres.schema import Outcome, Part
from replicad.streams.registry import Registry
from tests.conftest import psql
from tests.lengths import first
from tests.roles import ROLES
from tests.schema import catalogue, pin, release

pytestmark = pytest.mark.bare_database

# The dumps of releases. None: the present SQL stands for a release, and `next_version` makes up the version after it.
RELEASES = [*sorted((Path(__file__).parents[1] / "schema").glob("v*.sql")), None]

# Functions of a release that the present version lacks or declares otherwise, each with the reason why no program of
# that release is broken by it: "release: schema.name(types)" -> reason.
CHANGED_FUNCTIONS: dict[str, str] = {
    "v0.1.0: replicad.stream_change_usual(c replicad.stream_changes)": "only functions of the schema called it",
    "v0.1.0: replicad.stream_changes_ensure(stream_number integer)": "only functions of the schema called it",
}

# An installation in use, made by the functions of the release.
IN_USE = """
CREATE TABLE events (id bigserial PRIMARY KEY, writer text, body jsonb);
CREATE TABLE reserved (id bigserial PRIMARY KEY, body jsonb);
SELECT replicad.stream_add('events', 'events', 'id', 'writer', 't.body');
SELECT replicad.stream_add('reserved', 'reserved', 'id', method => 'reservation');
INSERT INTO events (writer, body) SELECT 'w' || g % 3, to_jsonb(g) FROM generate_series(1, 20) g;
SELECT replicad.stream_writers_ensure(s.number, '{w0,w1,w2}') FROM replicad.stream s WHERE s.name = 'events';
SELECT replicad.writer_enable('events', 8);
SELECT replicad.writer_join('events', 'w0', '10 s', NULL);
SELECT replicad.cache_enable('{importer}'), replicad.invalidate_cache('get_user', '["a"]');
SELECT replicad.presence_enable('5 s', NULL, NULL, NULL), replicad.presence_enlist('daemon');
SELECT replicad.federation_source_enlist('events', 's1', '{s1}', '{events}');
CREATE SCHEMA shard_1;
CREATE TABLE shard_1.cities (id bigint PRIMARY KEY, name text);
SELECT tube.tube_ensure_exists('cities', 2);
SELECT tube.tube_table_ensure_attached('cities', 'shard_1.cities');
INSERT INTO shard_1.cities SELECT g, 'x' FROM generate_series(1, 300) g;
SELECT tube.tube_lease_claim('cities', 2, 1, 'holder', '30 s', '{}');
SELECT tube.tube_report_put('cities', 'copy', '{"batch": 1}');
INSERT INTO tube.tube_parked (tube, seq, op, shard, ids, ts, tries, error)
    VALUES ('cities', 1, 'U', 1, '{7}', now(), 5, 'column gone');
"""


@pytest.fixture
async def other(database: Database, postgres_url: str, database_url: str) -> AsyncIterator[Database]:
    """A second empty database. Opened after the first, as fixtures share a context, and so the driver's loop."""
    parts = urlsplit(database_url)
    name = f"{parts.path.lstrip('/')}_other"
    psql(postgres_url, f"CREATE DATABASE {name}")
    url = urlunsplit(parts._replace(path=f"/{name}"))
    psql(url, ROLES)
    async with open_database(url, size=2, application_name="test") as db:
        yield db
    psql(postgres_url, f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture(params=first(len(RELEASES) - 1, RELEASES), ids=lambda path: "present" if path is None else path.stem)
async def before(
    request: pytest.FixtureRequest, database: Database, database_url: str, monkeypatch: pytest.MonkeyPatch,
    psql_script: Callable[[str, str], str],
) -> str:  # fmt: skip
    """`database` with what a release installs, and its name; the programs that run now are of a later version."""
    if request.param is not None:
        psql_script(database_url, request.param.read_text(encoding="utf-8"))
        return str(request.param.stem)
    await install_all(database)
    text = release.dump(database_url)
    await database.execute("DROP SCHEMA replicad CASCADE; DROP SCHEMA tube CASCADE")
    psql_script(database_url, text)
    assert set((await install_all(database)).values()) == {Outcome.UNCHANGED}, "the dump has all that is installed"
    next_version(monkeypatch)
    return "present"


def next_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on the programs have a further version of each part: a column, a table and a function are new."""
    texts = dict(schema_text.load(schema_text.PACKAGE))
    path = "stream/tables.sql"
    head, _, rest = texts[path].partition("\n);")
    comment = head.rindex("  --")
    texts[path] = f"{head[:comment]},{head[comment:]}\n    made_up integer NOT NULL DEFAULT 7\n);{rest}"
    for part, declared in schema.PARTS.items():
        later = declared.version + 1
        names = {
            **json.loads(texts.get(f"{part}/released.json", "{}")),
            f"{declared.version}": asdict(schema_text.created(part)),
        }
        texts[f"{part}/released.json"] = json.dumps(names)
        texts[f"{part}/made_up.sql"] = f"CREATE TABLE IF NOT EXISTS {part}_made_up (id bigint PRIMARY KEY);"
        texts[f"{part}/made_up_count.sql"] = (
            f"CREATE OR REPLACE FUNCTION {part}_made_up_count() RETURNS bigint\n"
            f"LANGUAGE sql AS 'SELECT count(*) FROM {part}_made_up';"
        )
        monkeypatch.setitem(schema.PARTS, part, replace(declared, version=later))
    step = f"stream/upgrade/{schema.PARTS['stream'].version}.sql"
    texts[step] = "ALTER TABLE stream ADD COLUMN made_up integer NOT NULL DEFAULT 7;"
    monkeypatch.setattr(schema_text, "load", lambda root: texts)


async def install_all(db: Database) -> dict[Part, Outcome]:
    return {part: await schema.install(db, part) for part in schema.PARTS}


async def rows(db: Database) -> dict[str, list[Any]]:
    """All rows of all tables in our schemas and the user's, by table, each as an object."""
    tables = await db.fetch(
        "SELECT c.oid::regclass::text AS name FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace "
        "WHERE n.nspname IN ('replicad', 'tube', 'public', 'shard_1') AND c.relkind = 'r' AND c.relname !~ '_version$'"
    )
    return {
        row["name"]: [
            json.loads(one[0]) for one in await db.fetch(f"SELECT to_jsonb(t)::text FROM {row['name']} t ORDER BY 1")
        ]
        for row in tables
    }


def test_the_sql_of_each_version_is_pinned_and_cannot_change_without_a_new_one() -> None:
    assert pin.complaints(pin.read()) == []


def test_a_changed_file_of_a_released_version_is_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    pins = pin.read()
    for versions in pins.values():
        for known in versions.values():
            known["released"] = True
    path = "tube/tables.sql"
    texts = dict(schema_text.load(schema_text.PACKAGE))
    monkeypatch.setattr(schema_text, "load", lambda root: texts | {path: texts[path].replace("bigint", "integer", 1)})
    (complaint,) = pin.complaints(pins)
    version = schema.PARTS["tube"].version
    assert f"set its version to {version + 1} in part.toml" in complaint
    assert f"upgrade/{version + 1}.sql" in complaint

    path, released = "stream/upgrade/2.sql", texts | {"stream/upgrade/2.sql": "SELECT 1;"}
    monkeypatch.setattr(schema_text, "load", lambda root: released)
    step = schema_text.upgrade_digests("stream")[2]
    pins["stream"]["2"] = pin.Pin(digest="of version 2", step=step, released=True)
    monkeypatch.setitem(schema.PARTS, "stream", replace(schema.PARTS["stream"], version=3))
    assert not any(path in complaint for complaint in pin.complaints(pins))
    monkeypatch.setattr(schema_text, "load", lambda root: released | {path: "SELECT 2;"})
    assert any(f"{path.removeprefix('stream/')} of the part stream has changed" in one for one in pin.complaints(pins))


def test_the_names_of_every_released_version_are_known_to_the_installer() -> None:
    for part, versions in pin.read().items():
        known = schema_text.released(part)  # type: ignore[arg-type]
        assert {int(version) for version, one in versions.items() if one["released"]} == set(known)


async def test_an_upgraded_release_has_the_catalogue_of_a_fresh_installation(
    before: str, database: Database, other: Database
) -> None:
    installed = await database.fetch_value("SELECT version FROM replicad.stream_version")
    outcomes = await install_all(database)
    same = installed == schema.PARTS["stream"].version  # right after a release its version is the present one
    assert outcomes["stream"] is (Outcome.UNCHANGED if same else Outcome.UPGRADED)
    assert before != "present" or not same
    await install_all(other)
    assert await catalogue.lines(database) == await catalogue.lines(other)
    assert set((await install_all(database)).values()) == {Outcome.UNCHANGED}


async def test_upgrading_a_release_in_use_keeps_every_row(
    before: str, database: Database, database_url: str, psql_script: Callable[[str, str], str]
) -> None:
    psql_script(database_url, IN_USE)
    kept = await rows(database)
    filled = {"stream", "stream_writer", "writer_slot", "writer_member", "cache_invalidation", "presence_setting",
        "federation_sender", "tube_lease", "tube_parked", "tube_report", "cities"}  # fmt: skip
    assert {name.rpartition(".")[2] for name, found in kept.items() if found} >= filled
    await install_all(database)
    after = await rows(database)
    assert {table: len(after[table]) for table in kept} == {table: len(found) for table, found in kept.items()}
    for table, found in kept.items():
        assert [{key: row[key] for key in one} for row, one in zip(after[table], found, strict=True)] == found, table


async def test_the_trigger_functions_of_a_release_record_until_the_next_look_makes_them_anew(
    before: str, database: Database
) -> None:
    await database.execute(
        "CREATE TABLE goods (id integer PRIMARY KEY, n integer); SET search_path = replicad;"
        "SELECT stream_add_changes('goods', 'public.goods'); RESET search_path; INSERT INTO goods VALUES (1, 1)"
    )
    await install_all(database)
    await database.execute("UPDATE goods SET n = 2; BEGIN; UPDATE goods SET n = 3; UPDATE goods SET id = 2; COMMIT")
    registry = Registry(database)
    assert await registry.look_after_changes() == []
    body = "SELECT prosrc = replicad.stream_change_body(1, 1) FROM pg_proc WHERE proname = 'change_1'"
    async with database.connection() as connection:
        await connection.execute("SET search_path = replicad")
        assert await connection.fetch_value(body)
        await connection.execute("RESET search_path")
    await database.execute("UPDATE goods SET n = 4; DELETE FROM goods")
    ops = await database.fetch("SELECT op::text FROM replicad.change_1 WHERE op <> 's' ORDER BY id")
    assert "".join(row["op"] for row in ops) in ("iuudiud", "iuuidud")


async def test_every_function_of_a_release_keeps_its_arguments_and_result_after_an_upgrade(
    before: str, database: Database
) -> None:
    """Programs of that release run beside an upgraded installation. What has to change gets a new name."""
    old = await catalogue.functions(database)
    await install_all(database)
    new = await catalogue.functions(database)
    broken = [f"{before}: {name}" for name, (result, _) in old.items() if name not in new or new[name][0] != result]
    assert [name for name in broken if name not in CHANGED_FUNCTIONS] == [], (
        "programs of that release call these functions: keep them as they were, and add a function under a new name "
        "for what is different; or list them in CHANGED_FUNCTIONS with the reason why nothing breaks"
    )
    listed = {name for name in CHANGED_FUNCTIONS if name.startswith(f"{before}: ")}
    assert listed <= set(broken), "an entry of CHANGED_FUNCTIONS has no reason to be there any more"


async def test_arguments_keep_their_names_and_defaults(before: str, database: Database) -> None:
    """Programs leave arguments out, and name them."""
    old = await catalogue.functions(database)
    await install_all(database)
    new = await catalogue.functions(database)
    assert {name: new[name][1] for name in old if name in new} == {
        name: arguments for name, (_, arguments) in old.items() if name in new
    }
