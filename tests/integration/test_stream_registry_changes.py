"""Tables are referred to by oid, and the registry is looked at whole: renamed, replaced and restored tables."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio

from replicad.postgres.bridge import Database
from replicad.postgres.programs import find_programs
from replicad.protocol.tokens import Vector
from replicad.streams.registry import Registry
from tests.daemons import Daemon

from .conftest import Connect, Netcat

HANG = 60.0


async def wait_for(condition: Callable[[], Any]) -> Any:
    with trio.fail_after(HANG):
        while not (found := condition()):
            await trio.sleep(0.02)
    return found


async def subscribe(nc: Netcat, token: str = "NOW") -> None:
    await nc.expect("SERVER .*")
    await nc.send(f"REPLICATE events {token}")
    await nc.until("POSITION events master .*")


async def insert(database: Database, table: str, body: str) -> int:
    token = await database.fetch_value(f"INSERT INTO {table} (body) VALUES ('{body}') RETURNING id")
    return int(token)


@pytest.mark.parametrize(
    ("change", "table"),
    [
        ("ALTER TABLE events RENAME TO renamed", "renamed"),
        ("CREATE SCHEMA elsewhere; ALTER TABLE events SET SCHEMA elsewhere", "elsewhere.events"),
        ("ALTER SEQUENCE events_id_seq RENAME TO other_seq", "events"),
    ],
)
async def test_a_table_that_is_renamed_goes_on_without_loss_or_repeat_on_the_same_connection(
    events: Database, daemon: Daemon, netcat: Connect, change: str, table: str
) -> None:
    async with netcat() as nc:
        await subscribe(nc)
        first = await insert(events, "events", "1")
        await nc.expect_exactly(f"RDATA events master {first} 1")
        feed = daemon.publisher.served["events"]
        await events.execute(change)
        tokens = [await insert(events, table, "2") for _ in range(5)]
        await wait_for(lambda: feed.stream.table in (f"public.{table}", table))
        tokens += [await insert(events, table, "2") for _ in range(5)]
        got: list[str] = []
        while len(got) < len(tokens):
            line = await nc.line()
            assert not line.startswith("ERROR"), line
            got += [line] if line.startswith("RDATA") else []
        assert got == [f"RDATA events master {token} 2" for token in tokens]
        assert daemon.publisher.served["events"] is feed


async def test_a_table_that_takes_the_place_of_another_never_has_its_rows_sent(
    events: Database, daemon: Daemon, netcat: Connect
) -> None:
    async with netcat() as nc:
        await subscribe(nc)
        await insert(events, "events", "1")
        await nc.until("RDATA events master 1 1")
        feed = daemon.publisher.served["events"]
        await events.execute(
            "BEGIN; ALTER TABLE events RENAME TO kept;"
            "CREATE TABLE events (id bigint PRIMARY KEY DEFAULT nextval('events_id_seq'), body jsonb);"
            "INSERT INTO events VALUES (2, '666'), (3, '666'); COMMIT"
        )
        await events.execute("INSERT INTO events (id, body) VALUES (4, '666'), (5, '666')")
        await insert(events, "kept", "2")
        lines = await nc.until("ERROR .* is no longer served: .*")
        assert feed.sent_upto == 1, "ids above may be rows of either table"
    assert all("public.events is another table now" in line for line in lines if line.startswith("ERROR"))
    assert not [line for line in lines if line.startswith("RDATA")]


async def test_a_row_expression_that_is_changed_is_used_from_the_next_look_on(
    events: Database, daemon: Daemon, netcat: Connect
) -> None:
    async with netcat() as nc:
        await subscribe(nc)
        feed = daemon.publisher.served["events"]
        await events.execute("UPDATE replicad.stream SET row_sql = 'jsonb_build_array(t.body)' WHERE name = 'events'")
        await wait_for(lambda: feed.stream.row == "jsonb_build_array(t.body)")
        token = await insert(events, "events", "1")
        await nc.expect_exactly(f"RDATA events master {token} [1]")


async def test_a_stream_that_gets_another_instance_column_ends_and_begins_anew(
    events: Database, daemon: Daemon, netcat: Connect
) -> None:
    async with netcat() as nc:
        await subscribe(nc)
        feed = daemon.publisher.served["events"]
        await events.execute("UPDATE replicad.stream SET instance_column = 'instance_name' WHERE name = 'events'")
        await nc.until("ERROR stream_refused: .*was replaced.*instance_column.*served again.*")
    await wait_for(lambda: daemon.publisher.served.get("events") not in (None, feed))


def dump_and_restore(url: str, folder: Path, between: Callable[[], None]) -> None:
    file = folder / "dump.sql"
    programs = find_programs()
    subprocess.run([programs / "pg_dump", "--clean", "--if-exists", "-d", url, "-f", file], check=True, timeout=60)
    between()
    done = subprocess.run(
        [programs / "psql", "-Xq", "-d", url, "-f", file], capture_output=True, text=True, timeout=60, check=True
    )
    assert "ERROR" not in done.stderr, done.stderr


async def test_a_dump_that_is_restored_over_the_live_database_begins_a_generation(
    events: Database, database_url: str, daemon: Daemon, netcat: Connect, tmp_path: Path
) -> None:
    from tests.conftest import psql

    await events.execute("INSERT INTO events (body) SELECT '1' FROM generate_series(1, 100)")
    async with netcat() as nc, netcat() as later:
        await subscribe(nc)
        with trio.fail_after(HANG):
            while (await Registry(events).published()).get("events") is None:
                await trio.sleep(0.05)
            while (await Registry(events).published())["events"].position < 100:
                await trio.sleep(0.05)
        before = daemon.publisher.served["events"].stream

        def more() -> None:
            psql(database_url, "INSERT INTO events (body) SELECT '2' FROM generate_series(1, 50)")

        await trio.to_thread.run_sync(dump_and_restore, database_url, tmp_path, more)
        # Between two statements of the restore the stream may be missing; then readers are sent away.
        await nc.until("(ERROR stream_refused: .*|POSITION events master 150 100)")
        oid = await events.fetch_value("SELECT 'events'::regclass::oid::bigint")
        await wait_for(lambda: (f := daemon.publisher.served.get("events")) is not None and f.stream.table_oid == oid)
        feed = daemon.publisher.served["events"]
        assert feed.stream.epoch != before.epoch, "tokens of before may mean other rows"
        assert feed.lineage.shared(before.epoch) == Vector(100), "what was noted when the dump was made"
        await later.expect("SERVER .*")
        await later.send(f"REPLICATE events {before.epoch}!150")
        await later.expect(f"ERROR bad_token: .* resume from {feed.stream.epoch}!100")
        await later.send(f"REPLICATE events {feed.stream.epoch}!100")
        token = await insert(events, "events", "3")
        assert token == 101
        await later.until("RDATA events master 101 3")
    # A look in the middle of the restore may have found no table; the next one ends that trouble.
    await wait_for(lambda: not [one for one in daemon.troubles.current() if one.place.kind == "stream"])


async def test_the_registry_is_looked_at_before_anything_is_read_from_a_new_connection(
    events: Database, daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[str] = []
    publisher = daemon.publisher
    serving = publisher._streams["events"]
    look, reading = publisher._look_once, serving._on_reading

    async def look_and_note() -> None:
        await look()
        looked.append("look")

    def read_and_note(name: str, what: Any) -> None:
        looked.append("reading")
        reading(name, what)

    monkeypatch.setattr(publisher._look, "_job", look_and_note)
    monkeypatch.setitem(publisher._context.poller._listeners, "events", read_and_note)
    connection = publisher._context.poller._horizon._connection
    assert connection is not None
    pid = connection.key_pid  # the poller is using the connection
    looked.clear()
    await events.execute(f"SELECT pg_terminate_backend({pid})")
    with trio.fail_after(HANG):
        while publisher._context.poller._horizon._connection in (None, connection):
            await trio.sleep(0.001)
    assert "look" in looked
