"""`apply`, `plan` and `export` on a real Postgres: what was applied is exported, a second time nothing changes."""

from __future__ import annotations

import json
import re
import subprocess
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import trio
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from replicad import features
from replicad.cli import app
from replicad.config.settings import DatabaseSettings
from replicad.postgres.bridge import open_database
from replicad.postgres.programs import find_programs
from replicad.terminal.desired import (
    Action,
    Difference,
    TargetDatabase,
    compare,
    make,
    present_objects,
    read_tables,
    render,
)
from tests.conftest import psql
from tests.lengths import LONG

Run = Callable[..., Any]
SECTIONS = features.sections()

TABLES = """
CREATE TABLE events (id bigserial PRIMARY KEY, writer text, n int);
CREATE TABLE "My Facts" (id bigint PRIMARY KEY DEFAULT nextval('events_id_seq'), n int);
CREATE TABLE bare (id bigint PRIMARY KEY); CREATE SEQUENCE bare_ids;
CREATE SCHEMA shard_0001; CREATE TABLE shard_0001.cities (id bigint PRIMARY KEY, region int);
CREATE SCHEMA shard_0002; CREATE TABLE shard_0002.cities (id bigint PRIMARY KEY, region int);
DO $$ BEGIN CREATE ROLE desired_app; EXCEPTION WHEN duplicate_object THEN NULL; END $$;
"""

FILE = """
[streams.events]
table = "events"
id = "id"
instance_column = "writer"
max_row = "1MiB"

[tubes.cities]
partitions = 2
[tubes.cities.tables.cities]
shards = "all"
backfill = "id"
[tubes.cities.tables.events]
shard = 7
predicate = "n > 0"

[presence]
grace = "1m"

[caches]
roles = ["desired_app"]
writers = ["slow"]

[sharding.events]
slots = 16
"""

EXPORTED = """
[streams.events]
table = "public.events"
id = "id"
instance_column = "writer"
max_row = 1048576

[tubes.cities]
partitions = 2

[tubes.cities.tables."public.events"]
shard = 7
predicate = "n > 0"

[tubes.cities.tables."shard_0001.cities"]
shard = 1

[tubes.cities.tables."shard_0002.cities"]
shard = 2

[presence]
grace = 60

[caches]
writers = ["slow"]
roles = ["desired_app"]

[sharding.events]
slots = 16
"""


@pytest.fixture
def run(database_url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a command line on the test's database; returns its output and messages."""
    monkeypatch.setenv("REPLICAD_DATABASE", database_url)
    psql(database_url, TABLES)

    def run_words(*words: str, status: int = 0) -> str:
        got = app.run(words)
        out, err = capsys.readouterr()
        assert got == status, out + err
        return out + err

    return run_words


KEYS = """
[tubes.numbers.tables.film]
shard = 0
[tubes.codes.tables.film]
shard = 1
[tubes.texts.tables.film]
shard = 1
[tubes.texts.tables.docs]
shard = 2
[tubes.texts.tables.casts]
shard = 3
key = ["film", "actor"]
[tubes.wide]
keys = "text"
"""


def test_keys_of_tables_and_tubes_are_planned_applied_and_exported(run: Run, database_url: str, tmp_path: Path) -> None:
    psql(
        database_url,
        "CREATE TABLE film (film_id integer PRIMARY KEY, code integer UNIQUE); CREATE TABLE docs (id uuid PRIMARY KEY);"
        "CREATE TABLE casts (actor text, film integer, PRIMARY KEY (actor, film))",
    )
    file = tmp_path / "replicad.toml"
    file.write_text(KEYS)
    assert 'tables.public.casts: shard = 3, key = ["film", "actor"]' in run("plan", str(file), status=2)
    run("apply", str(file))
    assert run("plan", str(file)) == "the database is as the file says\n"
    kinds = psql(database_url, "SELECT DISTINCT tube, keys FROM tube.tube_list() ORDER BY 1").split()
    assert kinds == ["codes|bigint", "numbers|bigint", "texts|text", "wide|text"]
    exported = run("export")
    assert 'key = ["film", "actor"]' in exported
    assert exported.count("key = ") == 1
    assert exported.count('keys = "text"') == 1, "of the tube whose tables do not say it"
    file.write_text(KEYS.replace('key = ["film", "actor"]\n', ""))
    assert 'tables.public.casts: key: ["film", "actor"] -> ' in run("plan", str(file), status=2)
    run("apply", str(file))
    assert run("plan", str(file)) == "the database is as the file says\n"
    assert psql(database_url, "SELECT key FROM tube.tube_list('casts')").strip() == "{actor,film}"
    file.write_text(KEYS + '[tubes.numbers]\nkeys = "text"\n')
    assert "the ids of a tube keep their kind" in run("plan", str(file), status=2)


def test_a_file_is_planned_applied_and_exported(run: Run, database_url: str, tmp_path: Path) -> None:
    file = tmp_path / "replicad.toml"
    file.write_text(FILE)
    planned = run("plan", str(file), status=2)
    assert '+ stream events\n    table = "public.events"\n    id = "id"\n' in planned
    assert '    tables.shard_0002.cities: shard = 2, backfill = "id"\n' in planned
    assert psql(database_url, "SELECT count(*) FROM replicad.stream") == "0", "nothing was changed"
    assert run("apply", str(file)).count("+ ") == 5
    assert psql(database_url, "SELECT count(*) FROM tube.cities WHERE payload ->> 'order_col' = 'id'") == "2"
    assert run("plan", str(file)) == "the database is as the file says\n"
    before = psql(database_url, "SELECT oid, xmin FROM pg_class ORDER BY 1; SELECT count(*) FROM tube.cities")
    assert run("apply", str(file)) == "nothing to do: the database is as the file says\n"
    assert before == psql(database_url, "SELECT oid, xmin FROM pg_class ORDER BY 1; SELECT count(*) FROM tube.cities")
    exported = run("export")
    assert exported.strip() == EXPORTED.strip()
    file.write_text(exported)
    assert run("plan", str(file), "--strict") == "the database is as the file says\n"


def test_what_differs_is_shown_and_changed_and_what_cannot_be_is_refused_as_a_whole(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "replicad.toml"
    file.write_text(FILE)
    run("apply", str(file))
    file.write_text(
        FILE.replace("1MiB", "2MiB").replace("partitions = 2", "partitions = 4").replace("n > 0", "n > 1")
        .replace('writers = ["slow"]', 'writers = ["other"]').replace('grace = "1m"', 'grace = "2m"')
    )  # fmt: skip
    shown = run("plan", str(file), status=2)
    assert "~ stream events: max_row: 1048576 -> 2097152\n" in shown
    assert '~ tube cities\n    partitions: 2 -> 4\n    tables.public.events: predicate: "n > 0" -> "n > 1"\n' in shown
    assert "~ presence: grace: 60 -> 120\n" in shown
    assert "~ caches: writers: also other\n" in shown
    assert "? caches: writers: slow is not in the file; " in shown
    rows = [json.loads(line) for line in run("plan", str(file), "--json", status=2).splitlines()]
    assert {row["action"] for row in rows} == {"change", "extra"}
    run("apply", str(file))
    run("plan", str(file))
    assert "slow is not in the file" in run("plan", str(file), "--strict", status=2)
    file.write_text(
        "[streams.events]\ntable = 'bare'\nid = 'id'\n[streams.new]\ntable = 'nowhere'\nid = 'id'\n[tubes]\n"
    )
    told = run("apply", str(file), status=7)
    assert '    table: "public.events" -> "public.bare"; only a new stream can have another one: ' in told
    assert "! stream new: there is no table or sequence nowhere in this database" in told
    assert "? tube cities: is not in the file; to drop it: replicad tubes drop cities\n" in told
    assert "nothing was changed" in told
    file.write_text("[streams.x]\ntabel = 'bare'\n")
    told = run("plan", str(file), status=2)
    assert "replicad: " in told
    assert "streams.x.tabel is not known; did you mean table?" in told


@contextmanager
def open_transaction(url: str, statement: str) -> Iterator[None]:
    """A transaction of another session that has run the statement."""
    command = [find_programs() / "psql", "--no-psqlrc", "-qtAX", "-d", url]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as session:
        assert session.stdin is not None
        assert session.stdout is not None
        session.stdin.write(f"BEGIN; {statement}; SELECT 'begun';\n")
        session.stdin.flush()
        assert session.stdout.readline() == "begun\n"
        yield
        session.stdin.close()


def test_plan_tries_whether_a_new_table_can_be_a_stream_and_leaves_nothing_behind(
    run: Run, database_url: str, tmp_path: Path
) -> None:
    psql(
        database_url, "CREATE VIEW seen AS SELECT * FROM events; CREATE UNLOGGED TABLE fast (id bigserial PRIMARY KEY)"
    )
    file = tmp_path / "replicad.toml"
    ways = {
        "bare": "no sequence feeds column id of public.bare. run: ALTER TABLE public.bare ALTER COLUMN id ADD ",
        "seen": "public.seen is a view. register the table that is written to",
        "fast": "public.fast is unlogged: a crash empties it. run: ALTER TABLE public.fast SET LOGGED",
    }
    good = "[streams.good]\ntable = 'events'\nid = 'id'\nmethod = 'reservation'\n"
    file.write_text(good + "".join(f"[streams.{name}]\ntable = '{name}'\nid = 'id'\n" for name in ways))
    count = "SELECT count(*) FROM replicad.stream; SELECT count(*) FROM pg_proc; SELECT count(*) FROM pg_trigger"
    before = psql(database_url, count)
    planned = run("plan", str(file), status=2)
    for name, why in ways.items():
        (line,) = [one for one in planned.splitlines() if one.startswith(f"! stream {name}: ")]
        assert why in line
        added = run("streams", "add", name, "--table", name, "--id", "id", status=7)
        assert line.partition(": ")[2] in added, "it is the check of `streams add`"
    assert "+ stream good\n" in planned
    assert "not tried" not in planned
    assert "nothing was changed" in run("apply", str(file), status=7)
    assert psql(database_url, count) == before
    file.write_text(good)
    with open_transaction(database_url, "LOCK TABLE events IN ROW EXCLUSIVE MODE"):  # as a writer has
        planned = run("plan", str(file), status=2)
    assert "+ stream good\n" in planned
    assert "    it was not tried whether it can be made: " in planned
    psql(database_url, f"ALTER DATABASE {urlsplit(database_url).path[1:]} SET default_transaction_read_only = on")
    planned = run("plan", str(file), status=2)
    assert re.search(r"    it was not tried whether it can be made: .*(read-only|only read)", planned), planned
    assert psql(database_url, count) == before


def test_plan_tries_everything_that_apply_would_do_and_leaves_nothing_behind(
    run: Run, database_url: str, tmp_path: Path
) -> None:
    """Attachments, backfills, roles and sharing: what fails at `apply` alone is a `!` with the same words in `plan`."""
    psql(database_url, "CREATE TABLE keyless (n int); CREATE VIEW seen AS SELECT * FROM events")
    file = tmp_path / "replicad.toml"
    file.write_text("[tubes.old.tables.events]\nshard = 7\n")
    run("apply", str(file))
    catalogue = ("pg_class", "pg_proc", "pg_trigger", "pg_depend", "replicad.stream", "tube.tube_registry", "tube.old")
    count = (
        "; ".join(f"SELECT count(*) FROM {name}" for name in catalogue) + "; SELECT proacl FROM pg_proc ORDER BY oid"
    )
    before = psql(database_url, count)

    new = "[tubes.t]\n[tubes.t.tables."
    wrong = {
        f"{new}keyless]\nshard = 1\n": ("tube t", "id"),
        f"{new}seen]\nshard = 1\n": ("tube t", "ordinary"),
        f"{new}events]\nshard = 1\npredicate = 'nosuch > 0'\n": ("tube t", "nosuch"),
        f"{new}events]\nshard = 1\nrouting = 'writer'\n": ("tube t", "writer"),
        f"{new}events]\nshard = 1\nbackfill = 'nosuch'\n": ("tube t", "nosuch"),
        "[tubes.'no name']\n": ("tube no name", "no name"),
        "[tubes.old]\npredicate = 'nosuch > 0'\n[tubes.old.tables.events]\nshard = 7\n": ("tube old", "nosuch"),
        "[tubes.old.tables.events]\nshard = 7\n[tubes.old.tables.bare]\nshard = 1\nbackfill = 'x'\n": ("tube old", "x"),
        "[caches]\nroles = ['desired_nobody']\n": ("caches", "desired_nobody"),
        "[sharding.nothing]\n": ("sharding of stream nothing", "nothing"),
        "[streams.seen]\ntable = 'seen'\nid = 'id'\n[sharding.seen]\n": ("sharding of stream seen", "stream seen"),
    }  # fmt: skip
    for text, (label, word) in wrong.items():
        file.write_text(text)
        planned = run("plan", str(file), status=2)
        (line,) = [one for one in planned.splitlines() if one.startswith(f"! {label}: ")]
        assert word in line, line
        assert "not tried" not in planned
        assert "nothing was changed" in run("apply", str(file), status=7)
    assert psql(database_url, count) == before

    tables = {"events": 7, "keyless": 1, "seen": 1, "bare": 1}
    file.write_text("".join(f"[tubes.old.tables.{name}]\nshard = {shard}\n" for name, shard in tables.items()))
    planned = run("plan", str(file), status=2)
    for table in ("keyless", "seen"):
        asked = run("tubes", "attach", "old", table, "--shard", "1", status=7).removeprefix("replicad: ").strip()
        assert asked in planned, "every table is tried, and the words are those of `tubes attach`"
    assert "bare" not in planned

    file.write_text(FILE)
    with open_transaction(database_url, "INSERT INTO shard_0001.cities VALUES (1)"):
        planned = run("plan", str(file), status=2)
    assert planned.count("it was not tried whether it can be made: ") == 1, "one table of a tube was locked"
    assert planned.count("+ ") == 5, "also the sharing of a stream that the file makes"
    assert psql(database_url, count) == before


# --- any file ---

NAMES = st.sampled_from(["a", "b.c", 'quote"d', "münze", "x" * 40])
TUBE_NAMES = st.sampled_from(["a", "b-c", 'quote"d', "münze", "x" * 40])
MAYBE_N = st.sampled_from([None, "id > 0", "id % 2 = 0"])


def table_of(**keys: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """A table in which keys whose value is None are missing."""
    return st.fixed_dictionaries(keys).map(lambda found: {k: v for k, v in found.items() if v is not None})


STREAM = st.one_of(
    table_of(
        table=st.sampled_from(["events", "public.events"]), id=st.just("id"),
        instance_column=st.sampled_from([None, "writer"]), row=st.sampled_from([None, "to_json(t.n)"]),
        method=st.sampled_from([None, "lock_watch", "reservation"]),
        max_row=st.sampled_from([None, 4096, "1MiB", 67108864]), sequence=st.sampled_from([None, "events_id_seq"]),
    ),
    table_of(table=st.just('public."My Facts"'), id=st.just("id")),
    table_of(table=st.just("bare"), id=st.just("id"), sequence=st.just("bare_ids")),
)  # fmt: skip
ATTACHED = st.fixed_dictionaries(
    {},
    optional={
        "events": table_of(shard=st.integers(0, 9), predicate=MAYBE_N, backfill=st.sampled_from([None, "id"])),
        "shard_0001.cities": table_of(routing=st.sampled_from([None, "region"]), predicate=MAYBE_N),
        '"shard_0002"."cities"': table_of(shard=st.sampled_from([None, 5])),
    },
)
FILES = st.fixed_dictionaries(
    {},
    optional={
        "streams": st.dictionaries(NAMES, STREAM, max_size=3),
        "tubes": st.dictionaries(
            TUBE_NAMES, table_of(partitions=st.sampled_from([None, 3]), predicate=MAYBE_N, tables=ATTACHED), max_size=2
        ),
        "presence": table_of(grace=st.sampled_from([None, 5, "7m"]), ip_retention=st.sampled_from([None, "9d"])),
        "caches": table_of(
            writers=st.sampled_from([None, [], ["w1", "w2"]]),
            roles=st.sampled_from([None, ["PUBLIC"], ["desired_app"]]),
        ),
    },
)


@st.composite
def files(draw: st.DrawFn) -> dict[str, dict[str, Any]]:
    """A file; some of its streams may share their keys."""
    found: dict[str, dict[str, Any]] = draw(FILES)
    if found.get("streams") and draw(st.booleans()):
        found["sharding"] = {name: draw(table_of(slots=st.sampled_from([None, 8]))) for name in found["streams"]}
    return found


CLEAN = """
SELECT replicad.stream_remove(name) FROM replicad.stream;
SELECT tube.tube_ensure_absent(tube) FROM tube.tube_registry;
"""


@given(files())
@settings(
    max_examples=60 if LONG else 10,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    phases=(Phase.explicit, Phase.reuse, Phase.generate),  # each example takes a second, and tells what failed
)
def test_the_export_of_what_apply_made_is_the_file(database_url: str, found: dict[str, dict[str, Any]]) -> None:
    """In normal form. And a second time there is nothing to do, in one that reads the export too."""
    wanted, faults = read_tables(found, SECTIONS, "f")
    assert faults == []

    async def walk() -> None:
        async with open_database(database_url, size=2, application_name="test") as db:
            place = TargetDatabase(db, DatabaseSettings())
            differences = await compare(place, SECTIONS, wanted)
            assert {one.action for one in differences} <= {Action.MAKE}, [one.lines for one in differences]
            made: list[Difference] = []
            await make(place, differences, made.append)
            assert len(made) == len(differences)
            assert await compare(place, SECTIONS, wanted) == []
            objects = await present_objects(place, SECTIONS)
            for one in made:
                assert one.wanted is not None
                described = objects[one.section.name][one.name]
                assert without_instructions(one.wanted, one.section.keys) == described
            assert sum(len(kept) for kept in objects.values()) == len(made)
            text = render(objects, SECTIONS)
            again, faults = read_tables(tomllib.loads(text), SECTIONS, "f")
            assert faults == []
            assert await compare(place, SECTIONS, again) == []

    def without_instructions(values: Any, keys: Any) -> dict[str, Any]:
        return {
            key.name: (
                {name: without_instructions(inside, key.inner) for name, inside in values[key.name].items()}
                if key.inner
                else values[key.name]
            )
            for key in keys
            if not key.once
        }

    psql(database_url, TABLES if psql(database_url, "SELECT to_regclass('bare')") == "" else "SELECT 1")
    try:
        trio.run(walk)
    finally:
        psql(database_url, CLEAN)
        assert app.run(["presence", "disable", "--yes", "--database", database_url]) == 0
        assert app.run(["caches", "disable", "--database", database_url]) == 0
        if psql(database_url, "SELECT to_regprocedure('replicad.cache_write(text, jsonb)')"):
            psql(database_url, "REVOKE EXECUTE ON FUNCTION replicad.cache_write FROM PUBLIC, desired_app")
