"""Any table with a sequence-fed id becomes a stream with one call; what cannot is refused with a remedy that works."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trio

from replicad.errors import (
    DatabaseError,
    DatabaseRefused,
    SchemaMissing,
    StreamRefused,
    UnknownStream,
    UsageError,
)
from replicad.positions.horizon import LockSource
from replicad.postgres import schema
from replicad.postgres.bridge import Database, open_database
from replicad.protocol.tokens import Vector
from replicad.streams import status
from replicad.streams.registry import Method, Registry, horizon_source, row_source
from replicad.terminal.failures import as_commands
from tests.commands import replicad_async
from tests.roles import DAEMON, as_daemon

EVENTS = "CREATE TABLE events (id bigserial PRIMARY KEY, instance_name text, body jsonb)"


@pytest.fixture
async def db(database: Database) -> Database:
    await schema.install(database, "stream", "replicad")
    return database


async def test_one_call_makes_a_table_a_stream_that_every_daemon_sees(db: Database) -> None:
    await db.execute(EVENTS)
    await db.execute("INSERT INTO events (instance_name) VALUES ('b'), ('a'), ('b'), (NULL)")
    added = await Registry(db).add(
        "events", "events", "id", instance_column="instance_name", row="jsonb_build_array(t.id, body)"
    )
    stream = added.stream
    assert stream == (await Registry(db).load_streams())["events"]
    assert (stream.table, stream.sequence) == ("public.events", "public.events_id_seq")
    assert (stream.method, stream.row_type, stream.unique_ids) == (Method.LOCK_WATCH, "jsonb", True)
    assert stream.writers == {"a": 1, "b": 2, "master": 3}
    assert (stream.fault, stream.trimmed_upto) == (None, None)
    assert added.notes == ("rows without instance_name are sent as those of master",)
    assert horizon_source(stream) == LockSource(
        stream.table_oid, stream.sequence_oid, identity=stream.identity, has_sequence=True
    )
    assert Vector.parse(f"{stream.epoch}!5").epoch == stream.epoch

    await Registry(db).remove("events")
    assert await Registry(db).load_streams() == {}
    assert await db.fetch_value("SELECT count(*) FROM events") == 4
    with pytest.raises(UnknownStream, match="events"):
        await Registry(db).load_stream("events")
    again = (await Registry(db).add("events", "public.events", "id")).stream
    assert again.epoch != stream.epoch, "tokens of the stream that was removed must not pass for this one's"
    assert again.writers == {"master": 1}


REFUSALS: list[tuple[str, dict[str, str | None], str, str]] = [
    # set up, arguments, the reason, the remedy; a remedy `run: ...` is run, and must mend it
    ("", {"table": "nowhere"}, "no table or sequence nowhere", "public.events"),
    ("", {"table": "a.b.c.d.e"}, "no table or sequence a.b.c.d.e", "with its schema"),
    ("", {"id_column": "nope"}, "has no column nope", "its columns: id, instance_name, body"),
    ("", {"instance_column": "who"}, "has no column who", "its columns: id"),
    ("", {"id_column": "instance_name"}, "is of type text", "bigint"),
    ("", {"name": "two words"}, "no name for a stream", "white space"),
    ("", {"name": "no\u00a0break"}, "no name for a stream", "white space"),
    ("", {"name": "zero\u200bwidth"}, "no name for a stream", "unprintable"),
    ("", {"name": "x" * 201}, "no name for a stream", "1 to 200"),
    ("", {"name": ""}, "no name for a stream", "1 to 200"),
    ("", {"name": "tube:x"}, "no name for a stream", "tube:"),
    ("", {"name": "taken"}, "a stream taken already", r"run: SELECT replicad\.stream_remove\('taken'\)"),
    ("", {"method": "hope"}, "no method 'hope'", "lock_watch, reservation, positions_table"),
    ("", {"method": "positions_table"}, "needs the table", "stream_name, instance_name and stream_id"),
    ("", {"method": "positions_table", "positions_table": "events"}, "no column stream_name", "its columns"),
    ("", {"positions_table": "events"}, "goes with the method positions_table", "leave it out"),
    ("", {"sequence": "events_pkey"}, "events_pkey is not a sequence", "name the sequence"),
    ("", {"row": "body -> 'a' ->"}, "expression fails: syntax error", "one SQL expression"),
    ("", {"row": "jsonb_build_array(t.nope)"}, "expression fails: column t.nope does not exist", "called t"),
    ("", {"row": "jsonb_agg(body)"}, "expression fails: .*GROUP BY", "one SQL expression"),
    ("", {"row": "jsonb_array_elements('[1, 2]')"}, "expression fails: set-returning", "one SQL expression"),
    ("", {"row": "body), (body"}, "expression fails", "one SQL expression"),
    ("", {"row": "t.id"}, "yields bigint, not JSON", r"wrap it: to_jsonb\(t.id\)"),
    ("INSERT INTO events VALUES (DEFAULT, 'not JSON')", {"row": "instance_name"}, "invalid input syntax", "JSON"),
    ("INSERT INTO events DEFAULT VALUES", {"row": "to_jsonb(1 / (t.id - t.id))"}, "division by zero", "JSON"),
    ("ALTER SEQUENCE events_id_seq CACHE 20", {}, "CACHE 20: sessions keep ids", "run: "),
    ("ALTER SEQUENCE events_id_seq CYCLE", {}, "starts again at its end", "run: "),
    ("ALTER SEQUENCE events_id_seq INCREMENT -1 MINVALUE -9 START -1 RESTART", {}, "counts downwards", "upwards"),
    ("ALTER SEQUENCE events_id_seq MINVALUE -9", {"method": "reservation"}, "below 1", "run: "),
    ("ALTER TABLE events DROP CONSTRAINT events_pkey", {}, "no index on id", "run: CREATE INDEX CONCURRENTLY"),
    ("ALTER TABLE events ALTER id DROP DEFAULT; DROP SEQUENCE events_id_seq", {}, "no sequence feeds", "run: "),
    ("ALTER TABLE events SET UNLOGGED; ALTER SEQUENCE events_id_seq SET LOGGED", {}, "unlogged", "run: "),
    ("ALTER SEQUENCE events_id_seq SET UNLOGGED", {}, "not logged", "run: "),
    ("CREATE TEMP TABLE gone AS SELECT", {"table": "pg_temp.gone"}, "no table|temporary", "with its schema|permanent"),
    ("CREATE VIEW seen AS SELECT * FROM events", {"table": "seen"}, "is a view", "written to"),
    (
        "CREATE FOREIGN DATA WRAPPER w; CREATE SERVER s FOREIGN DATA WRAPPER w;"
        "CREATE FOREIGN TABLE far (id bigint) SERVER s",
        {"table": "far"}, "is a foreign table", "where it lives",
    ),
    (
        "CREATE TABLE parted (id bigserial) PARTITION BY RANGE (id);"
        "CREATE TABLE parted_1 PARTITION OF parted FOR VALUES FROM (0) TO (1000)",
        {"table": "parted"}, "parted_1 has no index on id", r"run: CREATE INDEX ON \w+\.parted",
    ),
]  # fmt: skip

NEVER = "no name for|no method|needs the table|goes with the method"  # reasons that do not depend on the database


async def test_what_cannot_be_a_stream_is_refused_with_the_reason_and_a_remedy_that_mends_it(db: Database) -> None:
    mended = 0
    for setup, changes, reason, remedy in REFUSALS:
        arguments: dict[str, str | None] = {"name": "new", "table": "events", "id_column": "id", **changes}
        name, table, id_column = (str(arguments.pop(key)) for key in ("name", "table", "id_column"))
        await db.execute("DROP SCHEMA public CASCADE; CREATE SCHEMA public")
        await db.execute("DROP SERVER IF EXISTS s CASCADE; DROP FOREIGN DATA WRAPPER IF EXISTS w")
        await db.execute("DELETE FROM replicad.stream")
        await db.execute(EVENTS)
        await db.execute("CREATE TABLE taken (id bigserial PRIMARY KEY)")
        await Registry(db).add("taken", "taken", "id")
        if setup:
            await db.execute(setup)
        with pytest.raises(UsageError if re.search(NEVER, reason) else StreamRefused) as refused:
            await Registry(db).add(name, table, id_column, **arguments)  # type: ignore[arg-type]
        text = str(refused.value)
        assert re.search(reason, text), f"{reason} is not in: {text}"
        assert re.search(remedy, text), f"{remedy} is not in: {text}"
        assert list(await Registry(db).load_streams()) == ["taken"], "nothing is left of a refused stream"
        run = re.search(r"run: (.*?)(, or .*)?\.$", text)
        if run is not None:
            await db.execute(run[1])
            await Registry(db).add(name, table, id_column, **arguments)  # type: ignore[arg-type]
            mended += 1
    assert mended == sum("run: " in remedy for _, _, _, remedy in REFUSALS) >= 9


async def test_tables_of_every_shape_that_can_be_a_stream_are_taken(db: Database) -> None:
    await db.execute(
        """
        CREATE SCHEMA "Odd. One";
        CREATE TABLE "Odd. One"."My ""Events"" too" ("The Id" bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, t text);
        CREATE TABLE small (id serial PRIMARY KEY);
        CREATE TABLE parted (id bigserial, at date) PARTITION BY RANGE (at);
        CREATE TABLE parted_1 PARTITION OF parted FOR VALUES FROM ('2020-01-01') TO ('2030-01-01');
        CREATE INDEX ON parted (id);
        CREATE TABLE parent (id bigserial PRIMARY KEY);
        CREATE TABLE heir (PRIMARY KEY (id)) INHERITS (parent);
        CREATE SEQUENCE shared;
        CREATE TABLE one (id bigint DEFAULT nextval('shared') NOT NULL UNIQUE);
        CREATE TABLE two (id bigint DEFAULT nextval('shared') NOT NULL, also bigint DEFAULT nextval('shared'));
        CREATE INDEX ON two (id);
        CREATE TABLE given (id bigint PRIMARY KEY, body varchar(99));
        """
    )
    quoted = '"Odd. One"."My ""Events"" too"'
    odd = (await Registry(db).add("odd", quoted, "The Id", row="to_jsonb(t.*) -- all of it")).stream
    assert odd.unique_ids
    assert odd.sequence == '"Odd. One"."My ""Events"" too_The Id_seq"'
    assert (await Registry(db).add("small", "small", "id")).stream.unique_ids
    assert not (await Registry(db).add("parted", "parted", "id")).stream.unique_ids
    assert not (await Registry(db).add("parent", "parent", "id")).stream.unique_ids, "a heir may repeat an id"
    one = await Registry(db).add("one", "one", "id")
    assert re.search("also feeds public.two.also, public.two.id", one.notes[0])
    assert (await Registry(db).add("two", "two", "id")).stream.sequence_oid == one.stream.sequence_oid
    given = await Registry(db).add("given", "given", "id", sequence="shared", row="body")
    assert len(given.notes) == 3
    assert given.stream.row_type == "text"
    assert [s.number for s in (await Registry(db).load_streams()).values()] == [7, 1, 5, 4, 3, 2, 6]


async def test_to_add_a_stream_again_just_so_changes_nothing_and_otherwise_is_refused(db: Database) -> None:
    await db.execute(EVENTS)
    first = await Registry(db).add("again", "events", "id", row="body", max_row=5000)
    assert first.new
    second = await Registry(db).add("again", "public.events", "id", row="body", max_row=5000)
    assert not second.new
    assert second.stream == first.stream
    assert not (await Registry(db).add("again", "events", "id", row="body", max_row=5000, sequence="events_id_seq")).new
    await db.execute("CREATE TABLE others (LIKE events INCLUDING ALL); CREATE SEQUENCE other")
    different = [
        {"row": None},
        {"max_row": 6000},
        {"table": "others"},
        {"sequence": "other"},
        {"method": "reservation"},
    ]
    for one in different:
        arguments: dict[str, Any] = {"table": "events", "row": "body", "max_row": 5000, **one}
        table = arguments.pop("table")
        with pytest.raises(StreamRefused, match="there is a stream again already"):
            await Registry(db).add("again", table, "id", **arguments)


async def test_a_psql_user_adds_streams_with_the_same_refusals(db: Database) -> None:
    await db.execute(EVENTS)
    await db.execute("SELECT replicad.stream_add('events', 'events', 'id')")
    with pytest.raises(StreamRefused, match=r"a stream events already.*stream_remove\('events'\)"):
        await db.execute("SELECT replicad.stream_add('events', 'public.events', 'id', method => 'reservation')")
    await db.execute("SELECT replicad.stream_remove('events')")
    with pytest.raises(UnknownStream, match="streams: none yet"):
        await db.execute("SELECT replicad.stream_remove('events')")


async def test_a_stream_whose_table_or_sequence_changed_says_why_it_cannot_be_served(db: Database) -> None:
    await db.execute(EVENTS)
    stream = (await Registry(db).add("events", "events", "id", instance_column="instance_name")).stream
    for change, fault in (
        ("ALTER SEQUENCE events_id_seq CACHE 5", "CACHE 5.*ALTER SEQUENCE public.events_id_seq CACHE 1"),
        (
            "ALTER TABLE events DROP instance_name",
            "no column instance_name any more; rename it back, or run: replicad streams remove events --yes",
        ),
        ("DROP TABLE events", "dropped; run: replicad streams remove events --yes"),
    ):
        await db.execute(change)
        stream = await Registry(db).load_stream("events")
        assert stream.fault is not None
        assert re.search(fault, stream.fault), stream.fault
        with pytest.raises(StreamRefused, match="cannot be served"):
            row_source(stream)
        assert (await status.show(db, "events")).problem == as_commands(stream.fault)
    await Registry(db).remove("events")
    with pytest.raises(SchemaMissing, match="elsewhere"):
        await Registry(db, "elsewhere").load_streams()


async def test_numbers_of_writers_are_stable_and_given_once_whoever_asks(db: Database) -> None:
    await db.execute(EVENTS)
    stream = (await Registry(db).add("events", "events", "id")).stream
    seen: list[dict[str, int]] = []

    async def ask(names: list[str]) -> None:
        seen.append(await Registry(db).ensure_writers(stream, names))

    async with trio.open_nursery() as nursery:
        for first in range(12):
            nursery.start_soon(ask, [f"w {number % 12}" for number in range(first, first + 4)])
    numbers: dict[str, int] = {}
    for found in seen:
        for name, number in found.items():
            assert numbers.setdefault(name, number) == number
    assert sorted(numbers.values()) == list(range(2, 14))
    assert "w_3" in numbers, "names stand as on the wire"
    assert (await Registry(db).load_stream("events")).writers == {"master": 1, **numbers}


async def test_what_was_published_grows_and_a_fork_lowers_it_once_for_all_daemons(db: Database) -> None:
    await db.execute(EVENTS)
    stream = (await Registry(db).add("events", "events", "id")).stream
    assert await Registry(db).published() == {}
    assert await Registry(db).publish(stream, 50, {"master": 60, "not numbered yet": 70})
    assert await Registry(db).publish(stream, 40, {"master": 61})
    kept = (await Registry(db).published())["events"]
    assert (kept.position, kept.per_writer) == (50, {"master": 61})

    after = await Registry(db).fork(stream, "restored")
    other = await Registry(db).fork(stream, "ids_went_back")
    assert after.epoch == other.epoch != stream.epoch
    kept = (await Registry(db).published())["events"]
    assert (kept.position, kept.per_writer) == (50, {"master": 61})
    assert not await Registry(db).publish(stream, 55, {}), "a daemon that has not seen the fork"
    later = await Registry(db).fork(after, "ids_went_back")
    assert later.epoch not in {after.epoch, stream.epoch}
    kept = (await Registry(db).published())["events"]
    assert (kept.position, kept.per_writer) == (0, {"master": 0})
    assert not await Registry(db).publish(after, 55, {}), "a daemon that has not seen the second fork"
    assert await Registry(db).publish(later, 8, {"master": 8})
    assert (await Registry(db).published())["events"].per_writer == {"master": 8}
    lineage = (await Registry(db).lineages())["events"]
    assert [one.reason for one in lineage.generations] == ["added", "restored", "ids_went_back"]
    assert lineage.shared_between(stream.epoch, after.epoch) == Vector(50, {stream.writers["master"]: 61})
    assert (lineage.shared(stream.epoch), lineage.shared(after.epoch)) == (Vector(0), Vector(0))
    assert (lineage.shared("beef"), lineage.floor) == (None, Vector(0))
    await Registry(db).remove("events")
    assert not await Registry(db).publish(later, 9, {})
    with pytest.raises(UnknownStream):
        await Registry(db).fork(later, "ids_went_back")


ANOTHER_TABLE = (
    "CREATE TABLE other (id bigserial PRIMARY KEY, body jsonb);"
    "UPDATE replicad.stream SET relation = 'other', sequence = 'other_id_seq'"
)
ANOTHER_SERVER = "UPDATE replicad.stream_generation SET incarnation = 'another/' || incarnation"
RESTARTED = "TRUNCATE events RESTART IDENTITY; INSERT INTO events SELECT FROM generate_series(1, 50)"


@pytest.mark.parametrize(
    ("change", "reason", "shared"),
    [
        (ANOTHER_SERVER, "other_server", Vector(7, {1: 9})),
        (ANOTHER_TABLE, "restored", Vector(7, {1: 9})),
        (RESTARTED, "sequence_restarted", Vector(0)),
    ],
)
async def test_a_generation_that_is_not_valid_any_more_is_followed_by_one_that_says_what_is_shared(
    change: str, reason: str, shared: Vector, db: Database
) -> None:
    await db.execute(EVENTS)
    stream = (await Registry(db).add("events", "events", "id")).stream
    assert await Registry(db).publish(stream, 7, {"master": 9})
    assert await Registry(db).continue_streams() == 0
    await db.execute(change)
    assert not (await Registry(db).load_stream("events")).continues
    assert not await Registry(db).publish(stream, 8, {"master": 8}), "it may be of another history"
    assert await Registry(db).continue_streams() == 1
    assert await Registry(db).continue_streams() == 0
    again = await Registry(db).load_stream("events")
    assert (again.continues, again.noted) == (True, shared.minimum)
    lineage = (await Registry(db).lineages())["events"]
    assert (lineage.present.reason, lineage.shared(stream.epoch)) == (reason, shared)
    assert await Registry(db).publish(again, 8, {"master": 8})


ASKED = ("same", "sequence_changed", 20)
ALTERED = [
    "ALTER SEQUENCE events_id_seq AS bigint",
    "ALTER SEQUENCE events_id_seq MAXVALUE 2000000000 INCREMENT BY 2",
    "ALTER SEQUENCE events_id_seq OWNED BY NONE; ALTER SEQUENCE events_id_seq AS bigint",
    "ALTER SEQUENCE events_id_seq CACHE 1; INSERT INTO events SELECT FROM generate_series(1, 9)",
]
BEGUN_AGAIN = [
    "ALTER SEQUENCE events_id_seq RESTART 5; INSERT INTO events DEFAULT VALUES; SELECT setval('events_id_seq', 60)",
    RESTARTED,
]


@pytest.mark.parametrize(("how", "shared"), [*((how, 20) for how in ALTERED), (BEGUN_AGAIN[0], 4), (BEGUN_AGAIN[1], 0)])
async def test_a_sequence_that_was_altered_shares_the_rows_that_were_not_written_since(
    db: Database, how: str, shared: int
) -> None:
    await db.execute(EVENTS)
    stream = (await Registry(db).add("events", "events", "id")).stream
    await db.execute("INSERT INTO events SELECT FROM generate_series(1, 20); DELETE FROM events WHERE id = 5")
    assert await Registry(db).publish(stream, 20, {})
    await db.execute(how)
    await Registry(db).continue_streams()
    again = await Registry(db).load_stream("events")
    assert again.continues
    lineage = (await Registry(db).lineages())["events"]
    assert lineage.present.reason == ("sequence_changed" if shared else "sequence_restarted")
    assert lineage.shared(stream.epoch) == Vector(shared)


REWRITTEN = "ALTER TABLE events ALTER COLUMN id TYPE bigint"
UNLOGGED = "ALTER TABLE events SET UNLOGGED; ALTER TABLE events SET LOGGED"
TWENTY = "INSERT INTO events SELECT FROM generate_series(1, 20)"
RELOADED = f"{REWRITTEN}; TRUNCATE events RESTART IDENTITY; {TWENTY}"


@pytest.mark.parametrize(
    ("how", "says", "reason", "shared"),
    [
        (REWRITTEN, *ASKED),
        (f"{REWRITTEN}; INSERT INTO events DEFAULT VALUES; UPDATE events SET body = 'x'", *ASKED),
        ("ALTER TABLE events ALTER COLUMN body TYPE int USING 1; ALTER SEQUENCE events_id_seq CACHE 1", *ASKED),
        (UNLOGGED, *ASKED),
        (f"{UNLOGGED}; TRUNCATE events RESTART IDENTITY; {TWENTY}", "restarted", "ids_went_back", 0),
        (RELOADED, "restarted", "ids_went_back", 0),
    ],
)
async def test_a_stream_whose_table_and_sequence_were_written_anew_asks_whether_ids_are_the_same(
    db: Database, database_url: str, how: str, says: str, reason: str, shared: int
) -> None:
    await db.execute("CREATE TABLE events (id int GENERATED ALWAYS AS IDENTITY PRIMARY KEY, body text)")
    stream = (await Registry(db).add("events", "events", "id")).stream
    await db.execute("INSERT INTO events SELECT FROM generate_series(1, 20)")
    assert await Registry(db).publish(stream, 20, {})
    await db.execute(how)
    assert await Registry(db).continue_streams() == 0
    await Registry(db).fork(stream, "sequence_changed")
    found = await Registry(db).load_stream("events")
    assert found.epoch == stream.epoch
    assert "nothing shows whether the rows up to 20" in str(found.fault)
    words = re.search(rf"run: replicad (streams alter events --sequence-changed {says})", str(found.fault))
    assert words is not None
    done = await replicad_async(*words[1].split(), "--database", database_url)
    assert done.returncode == 0, done.stderr
    again = await Registry(db).load_stream("events")
    assert (again.fault, again.continues) == (None, True)
    lineage = (await Registry(db).lineages())["events"]
    assert (lineage.present.reason, lineage.shared(stream.epoch)) == (reason, Vector(shared))


@pytest.mark.parametrize(
    "how",
    [
        "TRUNCATE events RESTART IDENTITY",
        RESTARTED,
        f"{REWRITTEN}; TRUNCATE events RESTART IDENTITY",
        f"{REWRITTEN}; TRUNCATE events RESTART IDENTITY; INSERT INTO events SELECT FROM generate_series(1, 19)",
        f"{REWRITTEN}; DELETE FROM events; TRUNCATE events",
        f"{UNLOGGED}; TRUNCATE events RESTART IDENTITY",
    ],
)
async def test_ids_that_certainly_begin_again_need_no_question(db: Database, how: str) -> None:
    await db.execute("CREATE TABLE events (id int GENERATED ALWAYS AS IDENTITY PRIMARY KEY, body text)")
    stream = (await Registry(db).add("events", "events", "id")).stream
    await db.execute("INSERT INTO events SELECT FROM generate_series(1, 20)")
    assert await Registry(db).publish(stream, 20, {})
    await db.execute(how)
    assert await Registry(db).continue_streams() == 1
    lineage = (await Registry(db).lineages())["events"]
    assert (lineage.present.reason, lineage.shared(stream.epoch)) == ("sequence_restarted", Vector(0))


async def test_a_table_that_is_unlogged_for_a_while_stops_its_stream_and_takes_no_reader_back(db: Database) -> None:
    await db.execute(EVENTS)
    stream = (await Registry(db).add("events", "events", "id")).stream
    await db.execute("INSERT INTO events SELECT FROM generate_series(1, 20)")
    assert await Registry(db).publish(stream, 20, {})
    await db.execute("ALTER TABLE events SET UNLOGGED")
    assert await Registry(db).continue_streams() == 0
    assert "is not logged" in str((await Registry(db).load_stream("events")).fault)
    await db.execute("INSERT INTO events DEFAULT VALUES")
    await db.execute("ALTER TABLE events SET LOGGED")
    assert await Registry(db).continue_streams() == 0
    assert "as by ALTER COLUMN id TYPE or SET LOGGED" in str((await Registry(db).load_stream("events")).fault)
    await db.execute("SELECT replicad.stream_sequence_changed('events', 'same')")
    again = await Registry(db).load_stream("events")
    assert (again.fault, again.continues) == (None, True)
    assert (await Registry(db).lineages())["events"].shared(stream.epoch) == Vector(20)


async def test_a_sequence_that_may_not_be_read_is_no_change_of_history_and_holds_no_other_stream_back(
    db: Database, database_url: str
) -> None:
    for name in ("events", "others"):
        await db.execute(EVENTS.replace("events", name))
        await Registry(db).add(name, name, "id")
        await db.execute(f"INSERT INTO {name} SELECT FROM generate_series(1, 20)")
        await Registry(db).publish(await Registry(db).load_stream(name), 20, {})
        await db.execute(f"ALTER SEQUENCE {name}_id_seq MAXVALUE 2000000000")
    before = await Registry(db).load_stream("events")
    await db.execute(f"REVOKE ALL ON SEQUENCE events_id_seq FROM {DAEMON}")
    async with open_database(as_daemon(database_url), size=1, application_name="daemon") as daemon:
        assert await Registry(daemon).continue_streams() == 1, "the other one goes on"
        with pytest.raises(StreamRefused, match="GRANT SELECT ON SEQUENCE"):
            await Registry(daemon).fork(before, "sequence_changed")
        found = await Registry(daemon).load_stream("events")
        assert (found.epoch, found.continues) == (before.epoch, False)
        assert "GRANT SELECT ON SEQUENCE" in str(found.denied)
        await db.execute(f"GRANT SELECT ON SEQUENCE events_id_seq TO {DAEMON}")
        assert await Registry(daemon).continue_streams() == 1
    assert (await Registry(db).lineages())["events"].shared(before.epoch) == Vector(20)


@pytest.mark.parametrize(
    "drop",
    [
        "DROP TABLE gone",
        "ALTER TABLE gone ALTER id DROP DEFAULT; DROP SEQUENCE gone_id_seq",
        "DROP TABLE gone; CREATE TABLE gone (id bigserial PRIMARY KEY)",
        "DROP TABLE positions",
    ],
)
@pytest.mark.parametrize("reason", ["restarted", "ids_went_back"])
async def test_a_dropped_relation_keeps_no_other_stream_from_going_on_after_a_restart_of_the_server(
    db: Database, drop: str, reason: str
) -> None:
    await db.execute(
        "CREATE TABLE gone (id bigserial PRIMARY KEY); CREATE TABLE left_alone (id bigserial PRIMARY KEY);"
        "CREATE TABLE published (id bigserial PRIMARY KEY, writer text);"
        "CREATE TABLE positions (stream_name text, instance_name text, stream_id bigint)"
    )
    await Registry(db).add("gone", "gone", "id")
    await Registry(db).add("left_alone", "left_alone", "id")
    await Registry(db).add(
        "published",
        "published",
        "id",
        instance_column="writer",
        method=Method.POSITIONS_TABLE,
        positions_table="positions",
    )
    for stream in (await Registry(db).load_streams()).values():
        await Registry(db).publish(stream, 1, {})
    await db.execute(drop)
    # The server was restarted: what stands in the place of its start time is another one.
    await db.execute(
        "UPDATE replicad.stream_generation SET incarnation = array_to_string("
        "(string_to_array(incarnation, '/'))[1:3] || ARRAY['0', '0'], '/')"
    )
    await Registry(db).continue_streams()
    found = await Registry(db).load_streams()
    assert (found["left_alone"].continues, found["left_alone"].fault) == (True, None)
    unfit = found["published" if "positions" in drop else "gone"]
    assert unfit.fault is not None
    with suppress(StreamRefused):
        await Registry(db).fork(unfit, reason)


@pytest.mark.parametrize(("open_one", "shared"), [(False, 17), (True, 0)])
async def test_a_sequence_that_a_framework_has_set_to_its_last_row_shares_the_rows_up_to_it(
    db: Database, open_one: bool, shared: int
) -> None:
    """Unless a transaction may still have a row below."""
    await db.execute(EVENTS)
    stream = (await Registry(db).add("events", "events", "id")).stream
    await db.execute("INSERT INTO events SELECT FROM generate_series(1, 20); DELETE FROM events WHERE id > 17")
    assert await Registry(db).publish(stream, 20, {})
    await db.execute("SELECT setval('events_id_seq', max(id)) FROM events")
    async with db.connection() as writer:
        await writer.execute("BEGIN")
        if open_one:
            await writer.execute("INSERT INTO events (id) VALUES (19)")
        await Registry(db).fork(stream, "ids_went_back")
        await writer.execute("COMMIT")
    assert (await Registry(db).lineages())["events"].shared(stream.epoch) == Vector(shared)


@pytest.mark.parametrize("kind", ["integer GENERATED ALWAYS AS IDENTITY", "serial"])
async def test_a_live_stream_goes_from_integer_to_bigint_as_the_page_says(db: Database, kind: str) -> None:
    page = (Path(__file__).parents[2] / "docs" / "doctor.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```sql\n(BEGIN;.*?)```", page[page.index("## From integer to bigint") :], re.DOTALL)
    await db.execute(f"CREATE TABLE notes (id {kind} PRIMARY KEY, body text)")
    stream = (await Registry(db).add("notes", "notes", "id")).stream
    await db.execute("INSERT INTO notes (body) SELECT 'x' FROM generate_series(1, 20)")
    assert await Registry(db).publish(stream, 20, {})
    await db.execute(blocks["serial" in kind])
    assert await Registry(db).continue_streams() == 0, "the generation began with the change"
    again = await Registry(db).load_stream("notes")
    assert again.continues
    lineage = (await Registry(db).lineages())["notes"]
    assert lineage.present.reason == "sequence_changed"
    assert lineage.shared(stream.epoch) == Vector(20)
    assert await Registry(db).publish(again, 21, {})
    with pytest.raises(UsageError, match="is not what can have happened"):
        await db.execute("SELECT replicad.stream_sequence_changed('notes', 'who knows')")


async def test_status_tells_who_holds_a_stream_back_and_how_much_waits(db: Database, database_url: str) -> None:
    await db.execute(EVENTS)
    stream = (await Registry(db).add("events", "events", "id")).stream
    await db.execute("INSERT INTO events (body) SELECT '{}' FROM generate_series(1, 5)")
    await Registry(db).publish(stream, 5, {"master": 5})
    [calm] = (await status.overview(db)).streams
    assert (calm.position, calm.last_value, calm.lag_rows, calm.held_by) == (5, 5, 0, None)
    async with open_database(database_url, size=1, application_name="the culprit") as other:
        async with other.connection() as culprit, culprit.transaction():
            await culprit.execute("INSERT INTO events DEFAULT VALUES")
            await db.execute("INSERT INTO events (body) SELECT '{}' FROM generate_series(1, 3)")
            held = await status.show(db, "events")
            assert (held.position, held.last_value, held.lag_rows) == (5, 9, 3)
            assert held.held_by is not None
            assert (held.held_by.application_name, held.held_by.query) == (
                "the culprit", "INSERT INTO events DEFAULT VALUES",
            )  # fmt: skip
            assert 0 < held.lag_seconds < 60
    unsent = await status.show(db, "events")
    assert (unsent.position, unsent.horizon, unsent.lag_rows, unsent.state) == (5, 9, 4, "no_daemon")
    await Registry(db).publish(stream, 9, {"master": 9})
    sent = await status.show(db, "events")
    assert (sent.lag_rows, sent.lag_seconds, sent.state) == (0, 0, "ok")


async def test_writers_that_publish_their_positions_themselves_are_believed(db: Database) -> None:
    await db.execute(EVENTS)
    await db.execute(
        "CREATE TABLE stream_positions (stream_name text, instance_name text, stream_id bigint);"
        "INSERT INTO stream_positions VALUES ('events', 'a', 7), ('events', 'b', 4), ('other', 'a', 1)"
    )
    await db.execute("INSERT INTO events (instance_name) SELECT 'a' FROM generate_series(1, 9)")
    stream = (
        await Registry(db).add(
            "events", "events", "id", instance_column="instance_name",
            method="positions_table", positions_table="stream_positions",
        )
    ).stream  # fmt: skip
    assert stream.positions_table == "public.stream_positions"
    found = await status.show(db, "events")
    assert (found.position, found.horizon, found.lag_rows) == (None, 4, 9)
    assert found.held_by is not None
    assert found.held_by.application_name == "b"
    await db.execute("DROP TABLE stream_positions")
    assert "table of positions was dropped" in str((await Registry(db).load_stream("events")).fault)


async def test_an_application_role_reserves_and_inserts_but_administers_nothing(
    db: Database, database_url: str
) -> None:
    role = f"app_{abs(hash(database_url)) % 10**9}"
    await db.execute("CREATE TABLE facts (id bigint GENERATED BY DEFAULT AS IDENTITY PRIMARY KEY, body text)")
    await db.execute("CREATE TABLE hidden (id bigserial PRIMARY KEY)")
    await Registry(db).add("facts", "facts", "id", method=Method.RESERVATION)
    await db.execute(f"CREATE ROLE {role}; GRANT INSERT ON facts TO {role}")
    try:
        async with open_database(database_url, size=1, application_name="app") as app:
            await app.execute(f"SET ROLE {role}; SET search_path = pg_temp")
            with pytest.raises((DatabaseRefused, StreamRefused), match="sequence"):
                await app.execute("INSERT INTO public.facts VALUES (replicad.stream_next('facts'))")
            await db.execute(f"GRANT USAGE ON SEQUENCE facts_id_seq TO {role}")
            await app.execute("INSERT INTO public.facts VALUES (replicad.stream_next('facts'))")
            await app.execute("INSERT INTO public.facts SELECT unnest(replicad.stream_next_mult('facts', 2))")
            with pytest.raises(StreamRefused, match="id 4 of stream facts is not reserved"):
                await app.execute("INSERT INTO public.facts DEFAULT VALUES")
            for administration in (
                "SELECT replicad.stream_add('x', 'public.hidden', 'id')",
                "SELECT replicad.stream_remove('facts')",
                "SELECT replicad.stream_note(1, 'x', 9, '{}', '{}')",
                "SELECT replicad.stream_fork(1, 'x', 'ids_went_back')",
                "INSERT INTO replicad.stream_writer VALUES (1, 5, 'x')",
            ):
                with pytest.raises(DatabaseRefused, match="permission denied"):
                    await app.execute(administration)
    finally:
        await db.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")
    assert await db.fetch_value("SELECT count(*) FROM facts") == 3


@pytest.mark.bare_database
async def test_upgrading_keeps_streams_and_renews_their_guards_and_removing_leaves_no_trace(db: Database) -> None:
    await db.execute("CREATE TABLE facts (id bigserial PRIMARY KEY)")
    stream = (await Registry(db).add("facts", "facts", "id", method=Method.RESERVATION)).stream
    await Registry(db).publish(stream, 3, {"master": 3})
    await db.execute(
        "CREATE OR REPLACE FUNCTION replicad.stream_guard_1() RETURNS trigger"
        " LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'"
    )
    await db.execute("UPDATE replicad.stream_version SET digest = 'of another build'")
    assert await schema.install(db, "stream", "replicad") is schema.Outcome.UPGRADED
    assert await Registry(db).load_stream("facts") == replace(stream, noted=3)
    assert (await Registry(db).published())["facts"].per_writer == {"master": 3}
    with pytest.raises(StreamRefused, match="not reserved"):
        await db.execute("INSERT INTO facts DEFAULT VALUES")

    assert await schema.uninstall(db, "stream", "replicad")
    await db.execute("INSERT INTO facts DEFAULT VALUES")
    assert await db.fetch("SELECT tgname FROM pg_trigger WHERE NOT tgisinternal") == []
    assert await db.fetch("SELECT proname FROM pg_proc WHERE proname ~ '^stream_'") == []
    assert await db.fetch_value("SELECT to_regnamespace('replicad')") is None


async def test_removing_a_reserved_stream_takes_its_guard_away(db: Database) -> None:
    await db.execute(
        "CREATE TABLE facts (id bigserial PRIMARY KEY) PARTITION BY RANGE (id);"
        "CREATE TABLE facts_1 PARTITION OF facts FOR VALUES FROM (0) TO (100);"
        "CREATE TABLE parent (id bigserial PRIMARY KEY); CREATE TABLE heir (PRIMARY KEY (id)) INHERITS (parent)"
    )
    for table in ("facts", "parent"):
        await Registry(db).add(table, table, "id", method=Method.RESERVATION)
    for table in ("facts", "facts_1", "parent", "heir"):
        with pytest.raises(StreamRefused, match="not reserved"):
            await db.execute(f"INSERT INTO {table} VALUES (5)")
    for table in ("facts", "parent"):
        await Registry(db).remove(table)
    for table in ("facts", "parent", "heir"):
        await db.execute(f"INSERT INTO {table} VALUES (5)")
    assert await db.fetch("SELECT proname FROM pg_proc WHERE proname ~ '^stream_guard_[0-9]'") == []


async def test_streams_live_in_any_schema(database: Database) -> None:
    await schema.install(database, "stream", 'Odd "One"')
    await database.execute(EVENTS)
    stream = (await Registry(database, 'Odd "One"').add("events", "events", "id")).stream
    assert await Registry(database, 'Odd "One"').publish(stream, 0, {})
    rows: list[bytes] = []

    async def keep(chunk: object) -> None:
        rows.append(chunk.data)  # type: ignore[attr-defined]

    await database.execute("INSERT INTO events (body) VALUES ('[]')")
    source = row_source(replace(stream, row="t.body", row_type="text"), schema='Odd "One"')
    await source.copy_range(database, 0, 1, keep)
    assert rows == [b"RDATA events master 1 []\n"]
    with pytest.raises(DatabaseError):
        await database.execute("SELECT 'public'::regnamespace, stream_find('events')")
