"""Commands on a real Postgres: tubes, streams and SQL scripts, on one database and on several."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import pytest

from replicad.cli import app
from replicad.operations.psql import without_password
from replicad.postgres.embedded import EmbeddedPostgres
from replicad.postgres.failures import parse_target
from replicad.postgres.programs import find_programs
from tests.commands import replicad
from tests.conftest import PATIENCE, install, psql

Run = Callable[..., Any]


@pytest.fixture
def run(run_on_empty: Run, database_url: str) -> Run:
    """`run_on_empty` on a database that has our schema already, as the daemon installs it."""
    return run_on_empty


@pytest.fixture
def run_on_empty(database_url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a command line on the test's database; returns its output, or the JSON objects of `--json`."""
    monkeypatch.setenv("REPLICAD_DATABASE", database_url)

    def run_words(*words: str, status: int = 0) -> Any:
        assert app.run(words) == status, capsys.readouterr().err
        out, err = capsys.readouterr()
        if status:
            assert err.splitlines()[-1].startswith("replicad: ")
            assert "Traceback" not in err
            return err.splitlines()[-1]
        return [json.loads(line) for line in out.splitlines()] if "--json" in words else out

    return run_words


@pytest.fixture
def shards(database_url: str) -> None:
    """Three shard schemas with a table of three rows each, and one table that is no shard's."""
    for number in (1, 2, 7):
        psql(
            database_url,
            f"CREATE SCHEMA shard_{number:04};"
            f"CREATE TABLE shard_{number:04}.cities (id bigint PRIMARY KEY, name text);"
            f"INSERT INTO shard_{number:04}.cities SELECT {number} * 10 + g, 'x' FROM generate_series(1, 3) g",
        )
    psql(database_url, "CREATE TABLE cities (id bigint PRIMARY KEY)")


WRONG = [
    (["tubes", "create", "c", "--partitions", "0"], "a tube has 1 to 32768 partitions"),
    (["tubes", "create", "c d"], "no white space"),
    (["tubes", "create", "c" * 51], "1 to 50 bytes"),
    (["streams", "add", "a b", "--table", "plain", "--id", "id"], "none of them white space"),
    (["streams", "add", "tube:x", "--table", "plain", "--id", "id"], "not beginning with tube:"),
    (["streams", "add", "s", "--table", "plain", "--id", "id", "--max-row", "1"], "between 1024 and 67108864"),
    (["streams", "add", "s", "--table", "plain", "--id", "id", "--max-row", "1XiB"], "--max-row: '1XiB'"),
    (["streams", "add", "s", "--table", "plain", "--id", "id", "--method", "positions_table"], "name it"),
    (["streams", "add", "s", "--table", "plain", "--id", "id", "--positions-table", "plain"], "leave it out"),
    (["streams", "alter", "plain", "--max-row", "1"], "between 1024 and 67108864"),
    (["streams", "list", "--database", "postgresql://me@localhost:65536/x"], "no number from 1 to 65535"),
    (["streams", "list", "--database", "postgresql://me:hun/ter2@localhost/x"], "%2F"),
]


def test_what_no_database_would_take_is_wrong_usage(run: Run, database_url: str) -> None:
    psql(database_url, "CREATE TABLE plain (id bigserial PRIMARY KEY)")
    run("streams", "add", "plain", "--table", "plain", "--id", "id", "--max-row", "1MiB")
    for words, said in WRONG:
        found = run(*words, status=2)
        assert said in found, words
        assert "hun" not in found, words
        [stream] = run("streams", "list", "--json")
        assert (stream["name"], stream["max_row"]) == ("plain", 1 << 20), words
    assert run("tubes", "list", "--json") == []


def test_what_is_no_table_is_called_what_it_is(run: Run, database_url: str) -> None:
    psql(database_url, "CREATE TABLE plain (id bigserial PRIMARY KEY)")
    for relation, said in {
        "plain_id_seq": "is a sequence. register the table whose ids it gives",
        "plain_pkey": "is not a table. register the table that is written to",
    }.items():
        assert said in run("streams", "add", "s", "--table", relation, "--id", "id", status=7)
    with pytest.raises(AssertionError, match=r"SELECT \* FROM tube\.tube_list\(\) shows"):
        psql(database_url, "SELECT tube.tube_find('none')")


def test_a_tube_is_created_altered_listed_and_dropped(run: Run) -> None:
    run("tubes", "create", "cities", "--partitions", "2", "--predicate", "id > 0")
    run("tubes", "alter", "cities", "--partitions", "4")
    (tube,) = run("tubes", "list", "--json")
    assert (tube["partitions"], tube["predicate"]) == (4, "id > 0")
    run("tubes", "alter", "cities", "--no-predicate")
    assert run("tubes", "list", "--json")[0]["predicate"] is None
    assert "cities" in run("tubes", "list")
    run("tubes", "drop", "cities")
    assert "no tubes" in run("tubes", "list")
    assert "no tube" in run("tubes", "drop", "cities", status=6)
    assert "nothing to change" in run("tubes", "alter", "cities", status=2)


@pytest.mark.usefixtures("shards")
def test_tables_are_attached_by_shards_or_by_name(run: Run, database_url: str) -> None:
    run("tubes", "create", "t", "--partitions", "2")
    run("tubes", "attach", "t", "cities", "--shard", "1-2,7")
    run("tubes", "attach", "t", "public.cities", "--shard", "40", "--predicate", "id % 2 = 0")
    listed = run("tubes", "list", "--json")
    assert {row["tbl"]: row["shard"] for row in listed} == {
        "shard_0001.cities": 1, "shard_0002.cities": 2, "shard_0007.cities": 7, "cities": 40,
    }  # fmt: skip
    psql(database_url, "UPDATE shard_0007.cities SET name = 'y'; INSERT INTO cities VALUES (1), (2)")
    stats = run("tubes", "stats", "t", "--json")
    assert {row["partition"]: row["inc_ids"] for row in stats} == {0: 1, 1: 3}
    assert "2 pods" in run("tubes", "drop", "t", status=2)
    run("tubes", "detach", "t", "cities", "--shard", "all")
    assert [row["tbl"] for row in run("tubes", "list", "--json")] == ["cities"]
    assert "no schema" in run("tubes", "attach", "t", "cities", "--shard", "3-6", status=7)
    assert "name the schema of the table" in run("tubes", "attach", "t", "cities", "--shard", "7", status=7)
    run("tubes", "attach", "t", "cities", "--shard", "3")
    assert [row["shard"] for row in run("tubes", "list", "--json")] == [3], "no schema of shard 3 has the table"
    both = ("--database", database_url, "--database", database_url)
    assert "different shards" in run("tubes", "attach", "t", "public.cities", *both, status=7)
    assert "give the table's name alone" in run("tubes", "attach", "t", "a.cities", "--shard", "all", status=2)
    run("tubes", "drop", "t", "--yes")


@pytest.mark.usefixtures("shards")
def test_backfills_are_scheduled_once_per_shard_and_the_command_says_what_it_did(run: Run) -> None:
    run("tubes", "create", "t")
    run("tubes", "attach", "t", "cities", "--shard", "all")
    assert run("tubes", "backfill", "t", "--shard", "1-2") == "2 shards scheduled\n"
    before = "2 shards scheduled before, where the backfill has not begun"
    assert run("tubes", "backfill", "t") == f"1 shard scheduled; {before}\n"
    assert run("tubes", "backfill", "t", "--shard", "1-2") == f"{before}\n"
    assert "no table with a shard of 77 is attached to t" in run("tubes", "backfill", "t", "--shard", "77", status=2)
    assert sum(row["control_count"] for row in run("tubes", "stats", "--json")) == 3
    assert [row["backfill"] for row in run("tubes", "list", "--json")] == ["scheduled by id"] * 3
    assert run("tubes", "backfill", "t", "--cancel", "--shard", "1-2") == "2 backfills cancelled\n"
    assert Counter(row["backfill"] for row in run("tubes", "list", "--json")) == {None: 2, "scheduled by id": 1}


def test_a_backfill_that_would_read_a_large_table_again_and_again_names_the_index_that_it_needs(
    run: Run, database_url: str
) -> None:
    psql(
        database_url,
        'CREATE TABLE big (id bigint PRIMARY KEY, "a b" text); CREATE TABLE parts (LIKE big) PARTITION BY LIST (id)',
    )
    psql(database_url, "CREATE TABLE parts_1 PARTITION OF parts DEFAULT; CREATE TABLE small (LIKE big)")
    run("tubes", "create", "t")
    for shard, table in enumerate(("small", "parts", "big")):
        run("tubes", "attach", "t", table, "--shard", str(shard))
    psql(database_url, "UPDATE pg_class SET reltuples = 5e6 WHERE relname IN ('big', 'parts_1')")
    index = 'CREATE INDEX CONCURRENTLY ON big ("a b", "id")'
    backfill = ("tubes", "backfill", "t", "--order-by", "a b")
    refused = run(*backfill, "--shard", "2", status=2)
    assert index in refused
    assert "about 5,000,000 ids" in refused
    assert "--without-index" in refused
    assert 'CREATE INDEX ON parts ("a b", "id"). To schedule' in run(*backfill, status=2)
    assert not any(row["backfill"] for row in run("tubes", "list", "--json")), "nothing was scheduled"
    assert "3 shards scheduled" in run(*backfill, "--without-index")
    listed = {row["tbl"]: row["backfill"] for row in run("tubes", "list", "--json")}
    assert index in listed["big"]
    assert listed["small"] == "scheduled by a b"
    run("tubes", "backfill", "t", "--cancel")
    psql(database_url, "UPDATE pg_class SET reltuples = 500000 WHERE relname IN ('big', 'parts_1')")
    assert "3 shards scheduled" in run(*backfill), "a few times over is only announced"
    run("tubes", "backfill", "t", "--cancel")
    psql(database_url, "CREATE INDEX ON big (\"a b\"); UPDATE pg_class SET reltuples = 5e6 WHERE relname = 'big'")
    assert run(*backfill, "--shard", "2") == "1 shard scheduled\n"


def test_a_table_is_attached_by_its_primary_key_or_by_a_named_one(run: Run, database_url: str) -> None:
    psql(database_url, "CREATE TABLE film (film_id integer PRIMARY KEY, code smallint UNIQUE, title text)")
    run("tubes", "create", "films")
    run("tubes", "attach", "films", "film", "--shard", "1")
    assert [row["key"] for row in run("tubes", "list", "--json")] == [["film_id"]]
    assert "film_id" in run("tubes", "list")
    psql(database_url, "INSERT INTO film VALUES (7, 70)")
    run("tubes", "attach", "films", "film", "--shard", "1", "--key", "code")
    psql(database_url, "UPDATE film SET title = 'x'")
    assert psql(database_url, "SELECT ids FROM tube.films ORDER BY seq").split() == ["{7}", "{70}"]
    assert "1 shard scheduled" in run("tubes", "backfill", "films")
    assert [row["backfill"] for row in run("tubes", "list", "--json")] == ["scheduled by code"]
    assert "no column called nope" in run("tubes", "attach", "films", "film", "--key", "nope", status=7)
    psql(database_url, "DROP TRIGGER film_films_after_update_trigger ON film")
    (state,) = [row["state"] for row in run("tubes", "list", "--json")]
    assert "tubes attach films public.film --shard 1 --key code," in state


def test_a_tube_of_texts_takes_any_keys_from_the_command_line(
    run: Run, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    psql(
        database_url,
        "CREATE TABLE casts (actor text, film integer, PRIMARY KEY (actor, film));"
        "CREATE TABLE docs (id uuid PRIMARY KEY); CREATE TABLE film (film_id integer PRIMARY KEY)",
    )
    run("tubes", "create", "all", "--keys", "text")
    for shard, table in enumerate(("film", "docs", "casts")):
        run("tubes", "attach", "all", table, "--shard", str(shard))
    assert [row["key"] for row in run("tubes", "list", "--json")] == [["film_id"], ["id"], ["actor", "film"]]
    run("tubes", "attach", "all", "casts", "--shard", "2", "--key", "film,actor")
    psql(database_url, "INSERT INTO casts VALUES ('a b', 1)")
    assert run("tubes", "touch", "all", "--shard", "2", "one, two", '["1", "x"]') == "2 ids in 1 pods\n"
    monkeypatch.setattr("sys.stdin", io.StringIO("a,b\nc d\n"))
    assert run("tubes", "touch", "all", "--shard", "2", "-") == "2 ids in 1 pods\n"
    pods = psql(database_url, 'SELECT to_json(ids) FROM tube."all" ORDER BY seq')
    assert [json.loads(line) for line in pods.splitlines()] == [
        ['["1", "a b"]'], ["one, two", '["1", "x"]'], ["a,b", "c d"]]  # fmt: skip
    psql(
        database_url,
        "SELECT tube.tube_park('all', 1, 0, (tube.tube_lease_claim('all', 1, 0, 'w', '1 h', '{}')).term,"
        " (SELECT min(seq) + 1 FROM tube.\"all\"), '{\"one, two\"}', 3, 'no')",
    )
    assert [row["ids"] for row in run("tubes", "parked", "list", "all", "--json")] == [["one, two"]]
    assert "one, two" in run("tubes", "parked", "list", "all")
    assert run("tubes", "parked", "replay", "all", "--all") == "1 put back\n"
    assert psql(database_url, 'SELECT ids[1] FROM tube."all" ORDER BY seq DESC LIMIT 1').strip() == "one, two"
    run("tubes", "create", "numbers")
    run("tubes", "attach", "numbers", "film", "--shard", "0")
    assert "'x' is not an id" in run("tubes", "touch", "numbers", "--shard", "0", "x", status=2)
    assert "--keys text" in run("tubes", "attach", "numbers", "docs", "--shard", "1", status=7)


def test_ids_are_touched_from_arguments_stdin_and_queries(
    run: Run, database_url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run("tubes", "create", "My-Tube")
    assert run("tubes", "touch", "My-Tube", "--shard", "3", "1,2", "3", "--op", "u") == "3 ids in 1 pods\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO("4\n5\n"))
    assert run("tubes", "touch", "My-Tube", "--shard", "3", "-") == "2 ids in 1 pods\n"
    assert run("tubes", "touch", "My-Tube", "--shard", "3", "--payload", '{"a":1}') == "0 ids in 1 pods\n"
    query = "SELECT g AS id, g AS row_number FROM generate_series(1, 1000) g"
    assert run("tubes", "insert", "My-Tube", query, "--shard", "3") == "1,000 ids\n"
    assert psql(database_url, "SELECT string_agg(op || cardinality(ids), ',' ORDER BY seq) FROM tube.\"My-Tube\"") == (
        "U3,T2,T0,B250,B250,B250,B250"
    )
    assert "not JSON" in run("tubes", "touch", "My-Tube", "--shard", "3", "--payload", "{", status=2)
    query = query.replace("1000", "250000")
    assert app.run(["tubes", "insert", "My-Tube", query, "--shard", "3"]) == 0
    out, err = capsys.readouterr()
    assert (out, err) == ("250,000 ids\n", "100000 ids\n200000 ids\n")
    assert "'x'" in run("tubes", "touch", "My-Tube", "--shard", "3", "x", status=2)
    assert "nothing to touch" in run("tubes", "touch", "My-Tube", "--shard", "3", status=2)
    assert "there is no tube" in run("tubes", "touch", "other", "--shard", "3", "1", status=6)


def test_attaching_two_tables_with_one_shard_is_warned_of(
    run: Run, database_url: str, shards: None, capsys: pytest.CaptureFixture[str]
) -> None:
    psql(database_url, "CREATE TABLE shard_0002.people (id bigint PRIMARY KEY)")
    run("tubes", "create", "t")
    for words in (("cities", "--shard", "all"), ("shard_0002.people", "--shard", "102")):
        assert app.run(["tubes", "attach", "t", *words]) == 0
        assert capsys.readouterr().err == ""
    run("tubes", "detach", "t", "shard_0002.people")
    assert app.run(["tubes", "attach", "t", "shard_0002.people", "--shard", "2"]) == 0
    assert "shard 2 of t has the tables shard_0002.cities, shard_0002.people: an id may" in capsys.readouterr().err


def test_a_shard_is_purged_only_when_its_table_is_gone(run: Run, database_url: str, shards: None) -> None:
    run("tubes", "create", "t")
    run("tubes", "attach", "t", "cities", "--shard", "all")
    assert "is attached to t with shard 2" in run("tubes", "purge", "t", "--shard", "2", status=7)
    psql(database_url, "INSERT INTO shard_0002.cities VALUES (99); DROP SCHEMA shard_0002 CASCADE")
    assert run("tubes", "purge", "t", "--shard", "2") == "shard 2 of t will be purged downstream\n"
    waiting = "SELECT op, shard, ids, payload ->> 'type', payload ->> 'purge', seq > (payload ->> 'start_seq')::bigint"
    touched = "(payload ->> 'start_seq')::bigint > lag(seq) OVER (ORDER BY seq)"
    assert psql(database_url, f"SELECT * FROM ({waiting}, {touched} FROM tube.t) x ORDER BY 1").splitlines() == [
        "B|2|{}|backfill_end|true|t|t", "I|2|{99}||||",
    ]  # fmt: skip
    assert "there is no tube" in run("tubes", "purge", "u", "--shard", "2", status=6)


def test_what_is_parked_is_listed_replayed_and_dropped(run: Run, database_url: str) -> None:
    run("tubes", "create", "t")
    run("tubes", "touch", "t", "--shard", "3", "1,2,3")
    assert "nothing is parked" in run("tubes", "parked", "list", "t")
    psql(
        database_url,
        "SET search_path = tube; INSERT INTO tube_parked (tube, seq, op, shard, ids, ts, tries, error) "
        "SELECT 't', g, 'U', 3, ARRAY[g], now(), 5, 'column gone' FROM generate_series(1, 3) g",
    )
    parked = run("tubes", "parked", "list", "t", "--json")
    assert [(row["ids"], row["tries"], row["error"]) for row in parked] == [([n], 5, "column gone") for n in (1, 2, 3)]
    assert "column gone" in run("tubes", "parked", "list", "t")
    run("tubes", "parked", "replay", "t", str(parked[0]["parked"]))
    assert len(run("tubes", "parked", "list", "t", "--json")) == 2
    run("tubes", "parked", "drop", "t", "--all")
    assert run("tubes", "parked", "list", "t", "--json") == []
    assert run("tubes", "stats", "--json")[0]["inc_ids"] == 4
    assert "--all" in run("tubes", "parked", "drop", "t", status=2)


def test_one_command_manages_the_tubes_of_several_databases(run: Run, database_url: str, postgres_url: str) -> None:
    parts = urlsplit(database_url)
    name = f"{parts.path.lstrip('/')}_other"
    other = urlunsplit(parts._replace(path=f"/{name}"))
    psql(postgres_url, f"CREATE DATABASE {name}")
    try:
        install(other, "tube")
        both = ("--database", database_url, "--database", other)
        run("tubes", "create", "t", *both)
        rows = run("tubes", "list", "--json", *both)
        assert [row["tube"] for row in rows] == ["t", "t"]
        assert len({row["island"] for row in rows}) == 2
        assert "island" in run("tubes", "stats", *both)
        run("tubes", "drop", "t", "--database", other)
        assert [row["tube"] for row in run("tubes", "list", "--json", *both)] == ["t"]
        assert "one database" in run("tubes", "touch", "t", "--shard", "1", "1", *both, status=2)
    finally:
        psql(postgres_url, f"DROP DATABASE {name} WITH (FORCE)")


@pytest.mark.usefixtures("shards")
def test_a_command_that_fails_says_what_it_has_changed_before_and_on_which_databases(
    run: Run, database_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = urlsplit(database_url)
    here, away, later = parts, parts._replace(path="/away"), parts._replace(path="/later")
    several = [word for one in (here, away, later) for word in ("--database", urlunsplit(one))]
    assert app.run(["tubes", "create", "t", *several]) == 5
    said = capsys.readouterr().err
    names = [str(parse_target(urlunsplit(one))) for one in (here, away, later)]
    assert f"done on {names[0]}; failed on {names[1]}; not begun on {names[2]}" in said
    assert [row["tube"] for row in run("tubes", "list", "--json")] == ["t"], "as it says"
    psql(database_url, "CREATE TABLE keyless (n integer)")
    assert app.run(["tubes", "attach", "t", "shard_0001.cities", "keyless", "shard_0002.cities"]) == 7
    said = capsys.readouterr().err
    assert "changed before the failure: attach shard_0001.cities" in said
    assert [row["tbl"] for row in run("tubes", "list", "--json")] == ["shard_0001.cities"], "as it says"


def test_a_table_becomes_a_stream_and_a_table_again(run: Run, database_url: str) -> None:
    psql(database_url, "CREATE TABLE events (id bigserial PRIMARY KEY, writer text, data text)")
    run("streams", "add", "events", "--table", "public.events", "--id", "id", "--instance-column", "writer")
    psql(database_url, "INSERT INTO events (writer, data) SELECT 'w' || g % 2, 'x' FROM generate_series(1, 10) g")
    (row,) = run("streams", "list", "--json")
    assert (row["name"], row["position"], row["horizon"], row["lag_rows"]) == ("events", None, 10, 10)
    assert (row["state"], "start `replicad serve`" in row["problem"]) == ("no_daemon", True)
    assert "events" in run("streams", "list")
    assert "public.events" in run("streams", "show", "events")
    assert "(added), shared up to 0" in run("streams", "show", "events")
    (shown,) = run("streams", "show", "events", "--json")
    psql(database_url, "ALTER SEQUENCE events_id_seq RESTART WITH 11; SELECT replicad.stream_continue()")
    (later,) = run("streams", "show", "events", "--json")
    assert [one["reason"] for one in later["generations"]] == ["sequence_restarted", "added"]
    assert later["generations"][1:] == shown["generations"]
    asked = run("streams", "remove", "events", status=2)
    assert "would be unregistered" in asked
    assert "add --yes" in asked
    assert "events" in run("streams", "list")
    run("streams", "remove", "events", "--yes")
    assert "no streams" in run("streams", "list")
    assert psql(database_url, "SELECT count(*) FROM events") == "10"


def test_streams_that_cannot_be_are_refused_with_the_remedy(run: Run, database_url: str) -> None:
    psql(
        database_url,
        "CREATE SEQUENCE s CACHE 10; CREATE TABLE c (id bigint PRIMARY KEY DEFAULT nextval('s'), plain bigint UNIQUE)",
    )
    assert "public.nothing" in run("streams", "add", "x", "--table", "public.nothing", "--id", "id", status=7)
    assert "ALTER SEQUENCE" in run("streams", "add", "x", "--table", "public.c", "--id", "id", status=7)
    assert "plain" in run("streams", "add", "x", "--table", "public.c", "--id", "plain", status=7)
    assert "no stream 'x'" in run("streams", "show", "x", status=6)
    assert "one of them" in run("streams", "trim", "x", status=2)
    assert "--older-than" in run("streams", "trim", "x", "--older-than", "often", status=2)


def test_a_holder_of_a_position_is_named_in_the_list(run: Run, database_url: str) -> None:
    psql(database_url, "CREATE TABLE events (id bigserial PRIMARY KEY)")
    run("streams", "add", "events", "--table", "public.events", "--id", "id")
    command = [find_programs() / "psql", "-XqtA", "-d", database_url]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdin is not None
        assert writer.stdout is not None
        writer.stdin.write(
            "SET application_name = 'slow app'; BEGIN; INSERT INTO events DEFAULT VALUES RETURNING id;\n"
        )
        writer.stdin.flush()
        assert writer.stdout.readline() == "1\n"
        (row,) = run("streams", "list", "--json")
        assert "slow app" in row["held_back_by"]
        assert "INSERT INTO events" in row["held_back_by"]
        writer.stdin.write("COMMIT;\n")
        writer.stdin.close()
        assert writer.wait(PATIENCE) == 0
    assert run("streams", "list", "--json")[0]["held_back_by"] is None


@pytest.mark.bare_database
@pytest.mark.parametrize("where", [[], ["--schema", "elsewhere"]])
def test_the_scripts_install_and_remove_without_a_trace_by_plain_psql(
    run_on_empty: Run, database_url: str, where: list[str], tmp_path: Path
) -> None:
    objects = (
        "SELECT (SELECT count(*) FROM pg_class WHERE relnamespace NOT IN (SELECT oid FROM pg_namespace WHERE nspname ~ "
        "'^(pg_|information_schema)')) + (SELECT count(*) FROM pg_proc WHERE pronamespace NOT IN (SELECT oid FROM "
        "pg_namespace WHERE nspname ~ '^(pg_|information_schema)')) + (SELECT count(*) FROM pg_namespace)"
    )
    before = int(psql(database_url, objects))
    up, down = tmp_path / "up.sql", tmp_path / "down.sql"
    up.write_text(run_on_empty("sql", "up", *where))
    down.write_text(run_on_empty("sql", "down", *where))
    psql(database_url, f"\\i {up}")
    installed = int(psql(database_url, objects))
    psql(database_url, f"\\i {up}")
    assert int(psql(database_url, objects)) == installed > before
    psql(database_url, f"\\i {down}")
    assert int(psql(database_url, objects)) == before
    psql(database_url, f"\\i {down}")


def test_a_database_that_cannot_be_reached_is_one_sentence(run: Run) -> None:
    assert app.run(["status", "--database", "postgresql://u@127.0.0.1:1/x"]) == 4
    line = run("tubes", "list", "--database", "postgresql://u:hunter2@127.0.0.1:1/x", status=4)
    assert "127.0.0.1:1" in line
    assert "hunter2" not in line


def test_top_shows_who_has_what_and_marks_what_is_wrong(run: Run, shards: None, database_url: str) -> None:
    run("tubes", "create", "cities", "--partitions", "2")
    run("tubes", "attach", "cities", "cities", "--shard", "all")
    psql(database_url, "INSERT INTO shard_0002.cities SELECT g, 'x' FROM generate_series(100, 102) g")
    waiting, idle = run("top", "--json")
    assert (waiting["partition"], waiting["pods"], waiting["ids"]) == (0, 1, 3)
    assert (waiting["holder"], waiting["state"], waiting["wrong"]) == (None, "no reader", True)
    assert (idle["pods"], idle["state"], idle["wrong"]) == (0, "ok", False)
    psql(database_url, "SELECT tube.tube_lease_claim('cities', 1, 0, 'alice', '30 s', '{}')")
    assert [row["holder"] for row in run("top", "--json")] == ["alice", "alice"]
    assert run("top", "--json", "--warn", "0")[0]["state"] == "late"
    assert "alice" in run("top", "--once")
    counts = '{"batch": 7, "written": 1234, "lag": 0.5, "note": null}'
    psql(database_url, f"SELECT tube.tube_report_put('cities', 'copy', '{counts}')")
    assert run("top", "--json")[1]["report"]["batch"] == 7
    assert re.search(r"cities: copy reported \d+ s ago: lag 0\.50, batch 7, written 1,234\n", run("top", "--once"))


def test_top_goes_on_with_the_islands_that_answer(run: Run, database_url: str) -> None:
    run("tubes", "create", "cities")
    there, gone = run("top", "--json", "--database", database_url, "--database", database_url.replace("?", "_gone?"))
    assert (there["tube"], there["wrong"]) == ("cities", False)
    assert gone["wrong"]
    assert "_gone" in gone["state"]


# --- which database? ---


def without_database(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command in a folder, with no database named."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("REPLICAD_")}
    return replicad(*words, cwd=folder, env=environment)


@pytest.mark.parametrize(
    "words",
    [
        "streams list", "streams add s --table t --id id", "tubes list", "tubes create t", "top --once",
        "caches enable", "presence enable", "psql -c SELECT", "sharding list",
    ],
)  # fmt: skip
def test_no_command_starts_a_postgres_of_its_own(words: str, tmp_path: Path) -> None:
    done = without_database(*words.split(), folder=tmp_path)
    assert done.returncode == 3, done.stderr
    assert "no database is named, and no `replicad serve` runs one in" in done.stderr
    assert "--database" in done.stderr
    assert not list(tmp_path.iterdir()), "nothing is made"


def test_commands_find_the_embedded_postgres_that_runs_and_say_so(postgres_folder: Path) -> None:
    with EmbeddedPostgres(postgres_folder / ".replicad/postgres", {"fsync": "off"}) as server:
        install(server.url)
        done = without_database("tubes", "create", "t", folder=postgres_folder)
        assert (done.returncode, done.stdout) == (0, "tube t: 1 partition\n")
        assert done.stderr == "replicad: working on the embedded Postgres in .replicad/postgres\n"
        done = without_database("psql", "-tAc", "SELECT tube FROM tube.tube_registry", folder=postgres_folder)
        assert (done.returncode, done.stdout) == (0, "t\n")
        assert without_database("psql", "-c", "SELECT nonsense", folder=postgres_folder).returncode == 1
    assert "no `replicad serve` runs one" in without_database("tubes", "list", folder=postgres_folder).stderr


# --- said twice ---


def test_what_is_said_twice_is_done_and_what_does_not_exist_is_not_found(run: Run, database_url: str) -> None:
    """Each of the first lines twice: the second time there is nothing to do. Then what names nothing ends with 6."""
    psql(database_url, "CREATE TABLE t (id bigserial PRIMARY KEY, n int); CREATE ROLE said_twice")
    try:
        for words in (
            "streams add s --table public.t --id id",
            "streams skip s 7 --yes",
            "streams skip s 7 --undo",
            "streams alter s --max-row 100000",
            "streams acks s --forget nobody",
            "tubes create q --partitions 2",
            "tubes attach q public.t --shard 0",
            "tubes backfill q",
            "tubes backfill q --cancel",
            "tubes detach q public.t",
            "sharding enable s",
            "sharding disable s",
            "caches enable",
            "caches grant said_twice",
            "caches revoke said_twice",
            "caches disable",
            "presence enable --grace 1m",
            "presence disable --yes",
        ):
            run(*words.split())
            run(*words.split())
        run("streams", "remove", "s", "--yes")
        run("tubes", "drop", "q")
        for words in (
            "streams remove s", "streams show s", "streams skip s 7 --undo", "streams acks s", "streams trim s --acked",
            "streams writers s", "streams alter s --max-row 100000", "tubes drop q", "tubes detach q public.t",
            "tubes attach q public.t --shard 0", "tubes backfill q", "tubes parked list q", "tubes parked drop q --all",
            "tubes stats q",
            "tubes touch q --shard 0 1",
            "sharding enable s", "sharding disable s", "sharding show s",
        ):  # fmt: skip
            run(*words.split(), status=6)
    finally:
        psql(database_url, "DROP OWNED BY said_twice; DROP ROLE said_twice")


def test_a_value_that_postgres_cannot_take_is_wrong_usage(run: Run, database_url: str) -> None:
    psql(database_url, "CREATE TABLE t (id bigserial PRIMARY KEY)")
    run("streams", "add", "s", "--table", "public.t", "--id", "id")
    run("tubes", "create", "q")
    run("caches", "enable")
    huge, bytes_ = str(1 << 70), os.fsdecode(b"x\xff")
    for words in (
        ("streams", "skip", "s", huge, "--yes"),
        ("streams", "skip", "s", "1", "--yes", "--reason", bytes_),
        ("tubes", "create", "r", "--partitions", huge),
        ("tubes", "touch", "q", "--shard", str(1 << 40), "1"),
        ("tubes", "touch", "q", "--shard", "0", "--payload", "NaN", "1"),
        ("caches", "invalidate", "x", "1e999"),
        ("caches", "grant", ""),
        ("caches", "revoke", ""),
        ("streams", "skip", "s", "--list", "--undo"),
        ("streams", "skip", "s", "7", "--yes", "--json"),
    ):
        told = run(*words, status=2)
        assert "unexpected" not in told
        assert "query argument" not in told


@pytest.mark.parametrize("words", ["status", "top --once", "doctor"])
def test_a_look_that_fails_ends_with_the_status_of_its_failure(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    status = app.run((*words.split(), "--database", "postgresql://replicad@127.0.0.1:1/app"))
    assert status == (2 if words == "doctor" else 4)
    assert "no Postgres answers at 127.0.0.1:1" in capsys.readouterr().out


@pytest.mark.bare_database
def test_disabling_what_was_never_installed_is_done(run: Run, database_url: str) -> None:
    install(database_url)
    assert "there was no stream caches" in run("caches", "disable")
    assert "presence was not enabled" in run("presence", "disable", "--yes")


def test_the_command_line_names_commands_and_not_sql(run: Run, database_url: str) -> None:
    psql(database_url, "CREATE TABLE t (id bigserial PRIMARY KEY, n int); CREATE TABLE u (id bigserial PRIMARY KEY)")
    run("streams", "add", "s", "--table", "public.t", "--id", "id")
    run("streams", "add", "presence", "--table", "public.u", "--id", "id")
    run("tubes", "create", "q")
    run("sharding", "enable", "presence")
    told = [
        run("streams", "add", "s", "--table", "public.u", "--id", "id", status=7),
        run("presence", "enable", status=7),
        run("sharding", "show", "s", status=7),
        run("tubes", "attach", "q", "public.nothing", status=7),
        run("streams", "add", "x", "--table", "nothing", "--id", "id", status=7),
    ]
    psql(database_url, "DROP TABLE t")
    told.append(run("streams", "list"))
    for text, remedy in zip(
        told,
        (
            "replicad streams remove s", "replicad streams remove presence", "replicad sharding enable s",
            "there is no table public.nothing", "there is no table or sequence nothing", "replicad streams remove s",
        ),
        strict=True,
    ):  # fmt: skip
        assert remedy in text
        assert not re.search(r"SELECT|\b(stream|tube|writer|presence|cache)_\w+\(", text), text


def test_psql_gets_a_password_where_no_other_account_sees_it() -> None:
    assert without_password("postgresql://me:s%40cret@db1:5432/app?sslmode=require") == (
        "postgresql://me@db1:5432/app?sslmode=require",
        "s@cret",
    )
    assert without_password("postgresql://me@/app?host=/run") == ("postgresql://me@/app?host=/run", None)


@pytest.mark.parametrize(("named", "waits"), [({}, "10"), ({"PGCONNECT_TIMEOUT": "3"}, "3")])
def test_psql_waits_ten_seconds_for_a_server_or_as_long_as_the_variable_says(
    tmp_path: Path, named: dict[str, str], waits: str
) -> None:
    """libpq alone waits without an end for a host that accepts connections and does not answer."""
    program = tmp_path / "psql"
    program.write_text('#!/bin/sh\necho "$PGCONNECT_TIMEOUT $PGPASSWORD"\n')
    program.chmod(0o700)
    kept = {name: value for name, value in os.environ.items() if name != "PGCONNECT_TIMEOUT"}
    done = subprocess.run(
        [sys.executable, "-m", "replicad", "psql", "--database", "postgresql://me:secret@127.0.0.1:1/app"],
        env={**kept, **named, "PATH": f"{tmp_path}:{kept['PATH']}"},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.stdout == f"{waits} secret\n", done.stderr
