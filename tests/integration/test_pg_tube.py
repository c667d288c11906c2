"""From pg-tube to replicad beside programs that write: no touch is missed, whether triggers or programs make it.

pg_tube.sql has the functions of pg-tube that users and the commands call, written anew for these tests. With
REPLICAD_PG_TUBE=FOLDER, a clone of pg-tube, the tests run on its own SQL too.
"""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest

from replicad.cli import app
from replicad.errors import SchemaCollision
from replicad.postgres import schema
from replicad.postgres.bridge import Database
from replicad.postgres.programs import find_programs
from tests.conftest import PATIENCE, install, psql

CLONE = os.environ.get("REPLICAD_PG_TUBE")
PG_TUBE = Path(__file__).parent / "pg_tube.sql"
TABLES = """
CREATE SCHEMA shard_0001; CREATE TABLE shard_0001.cities (id bigint PRIMARY KEY, size integer NOT NULL);
CREATE TABLE shard_0001.towns (id bigint PRIMARY KEY, size integer NOT NULL);
SELECT old.tube_ensure_exists('search', 2, 'size > 0'); SELECT old.tube_ensure_exists('cache', 1, '');
SELECT old.tube_table_ensure_attached('search', 'shard_0001.cities', 1);
SELECT old.tube_table_ensure_attached('cache', 'shard_0001.cities', 1);
SELECT old.tube_table_ensure_attached('cache', 'shard_0001.towns', 2);
"""
IDS = "SELECT DISTINCT unnest(ids) FROM {}"


@pytest.fixture(params=["written anew", *(["its own SQL"] if CLONE else [])])
def old(request: pytest.FixtureRequest, database_url: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A database with pg-tube in the schema `old`, with its tubes `search` and `cache`, and our empty schema `tube`."""
    install(database_url)
    if request.param == "written anew":
        psql(database_url, PG_TUBE.read_text())
    else:
        psql(database_url, "CREATE SCHEMA old")
        assert CLONE is not None
        subprocess.run(
            [find_programs() / "psql", "-qX", "-v", "ON_ERROR_STOP=1", "-d", database_url, "-f", "sql/pg-tube-up.sql"],
            cwd=Path(CLONE), env=os.environ | {"PGOPTIONS": "-c search_path=old"}, check=True, capture_output=True,
        )  # fmt: skip
    psql(database_url, TABLES)
    monkeypatch.setenv("REPLICAD_DATABASE", database_url)
    return database_url


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs `replicad tubes pg-tube`, and returns what it prints."""

    def run(*words: str, status: int = 0) -> str:
        assert app.run(["tubes", "pg-tube", *words, "--pg-schema", "old"]) == status
        out, err = capsys.readouterr()
        return out if status == 0 else err

    return run


@contextmanager
def writer(url: str, first: int) -> Iterator[set[int]]:
    """A program that writes and touches by hand without a pause; yields the ids so far. It must not fail."""
    ids: set[int] = set()
    ends = threading.Event()
    failures: list[Exception] = []

    def run() -> None:
        with psycopg.connect(url) as connection:
            number = first
            while not ends.is_set():
                number += 2
                try:
                    with connection.transaction():
                        connection.execute("INSERT INTO shard_0001.cities VALUES (%s, 1)", [number])
                        connection.execute("SELECT shard_0001.cities_touch(ARRAY[%s::bigint])", [number + 1])
                except Exception as error:  # noqa: BLE001 - the test fails with it
                    failures.append(error)
                    return
                ids.update((number, number + 1))

    thread = threading.Thread(target=run)
    thread.start()
    try:
        while len(ids) < 20 and not failures:
            ends.wait(0.01)
        yield ids
        reached = len(ids) + 20
        while len(ids) < reached and not failures:
            ends.wait(0.01)
    finally:
        ends.set()
        thread.join(PATIENCE)
    assert failures == []


def values(url: str, query: str) -> set[Any]:
    with psycopg.connect(url) as connection:
        return {row[0] for row in connection.execute(query)}


def test_no_touch_is_missed_on_the_way_beside_a_program_that_writes(old: str, command: Callable[..., str]) -> None:
    psql(old, "INSERT INTO shard_0001.cities SELECT n, n % 2 FROM generate_series(1, 600) n")  # waits there
    psql(old, "INSERT INTO shard_0001.towns VALUES (5, 0)")
    assert "replicad tubes pg-tube mirror search" in command("check")
    with writer(old, 1000) as ids:
        assert "pods that waited there were copied" in command("mirror")
        assert "stop its workers there, start workers here" in command("check")
        assert "complete" in command("check", "search")
    for tube in ("search", "cache"):
        assert values(old, IDS.format(f"tube.{tube}")) == values(old, IDS.format(f"old.{tube}")), "both record the same"
        assert ids <= values(old, IDS.format(f"tube.{tube}"))
    with writer(old, 1_000_000) as ids:
        assert "shard_0001.cities is attached here" in command("move")
    for tube in ("search", "cache"):
        assert ids <= values(old, IDS.format(f"tube.{tube}"))
    psql(old, "DELETE FROM old.search; DELETE FROM old.cache; UPDATE shard_0001.cities SET size = 7 WHERE id <= 3")
    assert values(old, IDS.format("old.search")) == set()
    assert values(old, "SELECT shard FROM tube.tube_attachment ORDER BY 1") == {1, 2}
    assert command("check").count("mirror --end") == 2


def test_what_pg_tube_does_after_a_move_takes_nothing_from_the_tubes_here(
    old: str, command: Callable[..., str]
) -> None:
    command("mirror")
    command("move")
    detach = "SELECT old.tube_table_ensure_detached(NULL, 'shard_0001.cities')"
    psql(old, f"{detach}; DELETE FROM tube.search; SELECT shard_0001.cities_touch('{{7}}')")
    assert values(old, IDS.format("tube.search")) == {7}
    psql(old, "SELECT old.search_touch(1, '{8}', 'T')")  # by a program that has not changed yet
    command("mirror", "--end")
    psql(old, "SELECT old.search_touch(1, '{9}', 'T')")
    psql(old, "DROP SCHEMA old CASCADE; INSERT INTO shard_0001.cities VALUES (10, 1)")
    assert values(old, IDS.format("tube.search")) == {7, 8, 10}


def test_a_mirror_splits_long_pods_begins_above_the_seqs_there_and_leaves_out_backfills(
    old: str, command: Callable[..., str]
) -> None:
    command("mirror", "search")
    psql(old, "SELECT old.search_touch(1, ARRAY(SELECT generate_series(1, 900)::bigint), 'U', NULL, 900)")
    psql(old, 'SELECT old.search_touch(1, \'{}\', \'B\', \'{"type": "backfill_start", "start_seq": "1"}\')')
    psql(old, "SELECT old.search_touch(1, '{}', 'T', '{\"type\": \"mine\"}')")
    assert values(old, "SELECT cardinality(ids) FROM tube.search") == {250, 150, 0}
    assert values(old, "SELECT payload ->> 'type' FROM tube.search WHERE ids = '{}'") == {"mine"}
    (lowest,), (highest,) = (
        values(old, "SELECT min(seq) FROM tube.search"),
        values(old, "SELECT max(seq) FROM old.search"),
    )
    assert lowest > highest + 10**8


def test_a_table_is_refused_with_the_next_step_until_its_touches_are_here(
    old: str, command: Callable[..., str]
) -> None:
    assert "run: replicad tubes pg-tube mirror" in command("move", status=7)
    assert app.run(["tubes", "create", "search", "--partitions", "3"]) == 0
    assert app.run(["tubes", "attach", "search", "shard_0001.cities"]) == 7
    assert "partitions 3 here, 2 there" in command("check")
    assert "has no tube nosuch; it has: cache, search" in command("check", "nosuch", status=7)
    assert app.run(["tubes", "pg-tube", "check", "--pg-schema", "public"]) == 7


def test_an_empty_predicate_is_none_as_for_the_client_of_pg_tube(old: str) -> None:
    psql(old, "SELECT tube.tube_ensure_exists('plain', 1, '')")
    assert values(old, "SELECT predicate FROM tube.tube_list() WHERE tube = 'plain'") == {None}


def test_dropping_a_tube_ends_its_mirror_and_writers_go_on(old: str, command: Callable[..., str]) -> None:
    command("mirror")
    psql(old, "SELECT tube.tube_ensure_absent('search'); INSERT INTO shard_0001.cities VALUES (1, 1)")
    assert values(old, IDS.format("old.search")) == {1}


async def test_the_schema_of_pg_tube_is_refused_with_the_option_for_another_one(
    database: Database, database_url: str
) -> None:
    psql(database_url, "DROP SCHEMA tube CASCADE", PG_TUBE.read_text().replace("old", "tube"))
    with pytest.raises(SchemaCollision, match="--tube-schema"):
        await schema.install(database, "tube")
