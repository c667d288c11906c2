"""Each release of the schema is kept as a dump; it upgrades to what a fresh installation is, and loses nothing."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import pytest

from replicad.postgres import schema, schema_text
from replicad.postgres.bridge import Database, open_database
from replicad.postgres.schema import Outcome, Part
from tests.conftest import psql
from tests.roles import ROLES
from tests.schema import catalogue, pin

pytestmark = pytest.mark.bare_database

RELEASES = sorted((Path(__file__).parents[1] / "schema").glob("v*.sql"))

# Functions of a release that the present version lacks or declares otherwise, each with the reason why no program of
# that release is broken by it: "release: schema.name(types)" -> reason.
_ONLY_SQL = "only other functions of the part call it"
CHANGED_FUNCTIONS: dict[str, str] = {
    "v1: tube.tube_trigger_ensure(tube text, predicate text, routing text, path name[])": _ONLY_SQL,
    "v1: tube.tube_backfill_shards(source text, path text)": _ONLY_SQL,
    "v1: tube.tube_count(t tube.tube_registry, partition integer, backfill boolean, exact integer, OUT pods bigint, "
    "OUT ids bigint, OUT min_seq bigint, OUT max_seq bigint, OUT min_ts timestamp with time zone, "
    "OUT max_ts timestamp with time zone, OUT estimated boolean)": _ONLY_SQL,
    "v1: tube.tube_count_control(tube text, partitions integer, partition integer)": _ONLY_SQL,
}

# An installation in use, made by the functions of version 1.
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
SELECT replicad.federation_enlist('s1', '{s1}', '{events}');
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


def restore(release: Path, database_url: str, psql_script: Callable[[str, str], str]) -> None:
    psql_script(database_url, release.read_text(encoding="utf-8"))


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
    path = "tube/012_tube_lease.sql"
    texts = dict(schema_text.load(schema_text.PACKAGE))
    monkeypatch.setattr(schema_text, "load", lambda root: texts | {path: texts[path].replace("bigint", "integer", 1)})
    (complaint,) = pin.complaints(pins)
    version = schema.PARTS["tube"].version
    assert f"set its version to {version + 1} in part.toml" in complaint
    assert f"upgrade/{version + 1}.sql" in complaint

    step = "stream/upgrade/2.sql"
    monkeypatch.setitem(schema.PARTS, "stream", replace(schema.PARTS["stream"], version=3))
    monkeypatch.setattr(schema_text, "load", lambda root: texts | {step: texts[step] + "-- changed"})
    assert any("upgrade/2.sql of the part stream has changed" in complaint for complaint in pin.complaints(pins))


def test_the_names_of_every_released_version_are_known_to_the_installer() -> None:
    for part, versions in pin.read().items():
        known = schema_text.released(part)  # type: ignore[arg-type]
        assert {int(version) for version, one in versions.items() if one["released"]} == set(known)


@pytest.mark.parametrize("release", RELEASES, ids=lambda path: path.stem)
async def test_an_upgraded_release_has_the_catalogue_of_a_fresh_installation(
    database: Database, other: Database, database_url: str, release: Path, psql_script: Callable[[str, str], str]
) -> None:
    restore(release, database_url, psql_script)
    outcomes = await install_all(database)
    assert outcomes["stream"] is Outcome.UPGRADED
    await install_all(other)
    assert await catalogue.lines(database) == await catalogue.lines(other)
    assert set((await install_all(database)).values()) == {Outcome.UNCHANGED}


@pytest.mark.parametrize("release", RELEASES, ids=lambda path: path.stem)
async def test_upgrading_a_release_in_use_keeps_every_row(
    database: Database, database_url: str, release: Path, psql_script: Callable[[str, str], str]
) -> None:
    restore(release, database_url, psql_script)
    psql_script(database_url, IN_USE)
    before = await rows(database)
    filled = {"stream", "stream_writer", "writer_slot", "writer_member", "cache_invalidation", "presence_setting",
        "federation_sender", "tube_lease", "tube_parked", "tube_report", "cities"}  # fmt: skip
    assert {name.rpartition(".")[2] for name, found in before.items() if found} >= filled
    await install_all(database)
    after = await rows(database)
    for table, found in before.items():
        kept = [{key: row[key] for key in one} for row, one in zip(after[table], found, strict=True)]
        assert kept == found, table


@pytest.mark.parametrize("release", RELEASES, ids=lambda path: path.stem)
async def test_every_function_of_a_release_keeps_its_arguments_and_result_after_an_upgrade(
    database: Database, database_url: str, release: Path, psql_script: Callable[[str, str], str]
) -> None:
    """Programs of that release run beside an upgraded installation. What has to change gets a new name."""
    restore(release, database_url, psql_script)
    before = await catalogue.functions(database)
    await install_all(database)
    after = await catalogue.functions(database)
    broken = [
        f"{release.stem}: {name}"
        for name, (result, _) in before.items()
        if name not in after or after[name][0] != result
    ]
    assert [name for name in broken if name not in CHANGED_FUNCTIONS] == [], (
        "programs of that release call these functions: keep them as they were, and add a function under a new name "
        "for what is different; or list them in CHANGED_FUNCTIONS with the reason why nothing breaks"
    )
    assert set(CHANGED_FUNCTIONS) <= set(broken), "an entry of CHANGED_FUNCTIONS has no reason to be there any more"


@pytest.mark.parametrize("release", RELEASES, ids=lambda path: path.stem)
async def test_arguments_keep_their_names_and_defaults(
    database: Database, database_url: str, release: Path, psql_script: Callable[[str, str], str]
) -> None:
    """Programs leave arguments out, and name them."""
    restore(release, database_url, psql_script)
    before = await catalogue.functions(database)
    await install_all(database)
    after = await catalogue.functions(database)
    assert {name: after[name][1] for name in before if name in after} == {
        name: arguments for name, (_, arguments) in before.items() if name in after
    }
