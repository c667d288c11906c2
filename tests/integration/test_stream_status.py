"""`streams list` shows what was published and what is wrong, quickly, whatever state any one stream is in."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import pytest
import trio

from replicad.errors import DatabaseError
from replicad.postgres import schema
from replicad.postgres.bridge import Database, open_database
from replicad.postgres.embedded import EmbeddedPostgres
from replicad.postgres.programs import find_programs
from replicad.streams import status
from replicad.streams.registry import Registry, row_source
from replicad.streams.serving.served_stream import ServedStream
from tests.commands import replicad
from tests.conftest import PATIENCE, psql
from tests.daemons import Daemon

from .conftest import Connect

HANG = 60.0


@pytest.fixture
async def db(database: Database) -> Database:
    await schema.install(database, "stream", "replicad")
    return database


def command(url: str, *words: str) -> subprocess.CompletedProcess[str]:
    return replicad(*words, "--database", url)


@pytest.mark.parametrize("kind", ["serial", "bigserial"])
async def test_ids_of_any_size_are_listed(db: Database, kind: str) -> None:
    await db.execute(f"CREATE TABLE small (id {kind} PRIMARY KEY)")
    stream = (await Registry(db).add("small", "small", "id")).stream
    await db.execute("INSERT INTO small SELECT FROM generate_series(1, 3)")
    assert (await status.show(db, "small")).lag_rows == 3
    await Registry(db).publish(stream, 2, {"master": 2})
    [found] = (await status.overview(db)).streams
    assert (found.position, found.lag_rows) == (2, 1)
    source = row_source(stream)
    assert await source.last_tokens(db, 0, (1 << 63) - 1) == {"master": 3}


async def test_rows_with_ids_above_the_sequence_are_said_to_wait_and_why(
    db: Database, daemon: Daemon, netcat: Connect
) -> None:
    await db.execute("CREATE TABLE small (id bigserial PRIMARY KEY)")
    await Registry(db).add("small", "small", "id")
    await daemon.publisher.find("small")
    await db.execute("INSERT INTO small DEFAULT VALUES")
    async with netcat() as nc:
        await nc.send("REPLICATE small EARLIEST")
        await nc.until("RDATA small master 1 .*")
        with trio.fail_after(PATIENCE):
            while (await status.show(db, "small")).lag_rows:  # until the daemon has noted what it published
                await trio.sleep(0.1)
        await db.execute("INSERT INTO small VALUES (1000)")
        found = await status.show(db, "small")
        assert (found.state, found.lag_rows) == ("ids_ahead", 1)
        assert "ids up to 1000, and its sequence stands at 1" in str(found.problem)
        remedy = re.search("SELECT setval.*", str(found.problem))
        assert remedy is not None
        await db.fetch_value(remedy[0])
        await nc.until("RDATA small master 1000 .*")
    with trio.fail_after(PATIENCE):
        while (await status.show(db, "small")).state != "ok":
            await trio.sleep(0.1)


async def test_locked_tables_make_no_list_hang_and_their_holder_is_named(
    db: Database, database_url: str, daemon: Daemon, netcat: Connect
) -> None:
    names = [f"t{n}" for n in range(12)]
    for name in names:
        await db.execute(f"CREATE TABLE {name} (id bigserial PRIMARY KEY)")
        await Registry(db).add(name, name, "id")
    for name in names:
        await daemon.publisher.find(name)
    async with open_database(database_url, size=1, application_name="the culprit") as other:
        async with other.connection() as culprit, culprit.transaction():
            for name in names[1:]:
                await culprit.execute(f"LOCK TABLE {name}")
            with trio.fail_after(PATIENCE):
                found = {one.stream.name: one for one in (await status.overview(db)).streams}
            assert found["t0"].state == "ok"
            for name in names[1:]:
                assert (found[name].state, found[name].lag_rows) == ("locked", None)
                holder = found[name].held_by
                assert holder is not None
                assert (holder.application_name, holder.query) == ("the culprit", "LOCK TABLE t11")
            with trio.fail_after(PATIENCE):
                assert (await status.show(db, "t3")).state == "locked"
            await db.execute("INSERT INTO t0 DEFAULT VALUES")
            async with netcat() as nc:
                await nc.expect("SERVER .*")
                await nc.send("REPLICATE t1 EARLIEST")
                await nc.expect("ERROR stream_refused: .*locked.*")
                await nc.send("REPLICATE t0 EARLIEST")
                await nc.until("RDATA t0 master 1 .*")
                # what looks at all streams goes on: one more is served
                await db.execute("CREATE TABLE late (id bigserial PRIMARY KEY)")
                await Registry(db).add("late", "late", "id")
                await nc.send("REPLICATE late")
                await nc.until("POSITION late master 0 0")
        listed = await trio.to_thread.run_sync(command, database_url, "streams", "list", "--json")
        rows = [json.loads(line) for line in listed.stdout.splitlines()]
        assert {row["name"]: row["state"] for row in rows} == dict.fromkeys([*names, "late"], "ok")


@pytest.mark.long
async def test_copies_that_wait_for_locked_tables_keep_nothing_else_waiting(
    db: Database, database_url: str, daemon: Daemon, netcat: Connect
) -> None:
    """The lock comes between a commit and the copy of its row, for more tables than there are connections."""
    names = [f"t{n}" for n in range(10)]
    for name in [*names, "free"]:
        await db.execute(f"CREATE TABLE {name} (id bigserial PRIMARY KEY)")
        await Registry(db).add(name, name, "id")
    for name in [*names, "free"]:
        await daemon.publisher.find(name)
    async with (
        open_database(database_url, size=11, application_name="lockers") as others,
        trio.open_nursery() as nursery,
        netcat() as nc,
    ):
        locked: list[str] = []
        done = trio.Event()

        async def lock(name: str) -> None:
            async with others.connection() as connection, connection.transaction():
                await connection.execute(f"LOCK TABLE {name}")
                locked.append(name)
                await done.wait()

        async with others.connection() as writer:
            async with writer.transaction():
                for name in names:
                    await writer.execute(f"INSERT INTO {name} DEFAULT VALUES")
                for name in names:
                    nursery.start_soon(lock, name)
                with trio.fail_after(HANG):
                    while await db.fetch_value("SELECT count(*) FROM pg_locks WHERE NOT granted") < len(names):
                        await trio.sleep(0.05)
        await nc.expect("SERVER .*")
        await nc.send("REPLICATE free EARLIEST", "REPLICATE t0")
        await nc.until("POSITION t0 .*")
        with trio.fail_after(HANG):
            while len(locked) < len(names):
                await trio.sleep(0.05)
        for token in range(1, 6):
            await db.execute("INSERT INTO free DEFAULT VALUES")
            await nc.until(f"RDATA free master {token} .*")
            await trio.sleep(0.5)
        await db.execute("CREATE TABLE late (id bigserial PRIMARY KEY)")
        await Registry(db).add("late", "late", "id")
        await nc.send("REPLICATE late")
        await nc.until("POSITION late master 0 0")
        done.set()
        await nc.until("RDATA t0 master 1 .*")


async def test_a_frozen_stream_shows_what_was_published_and_a_lag_and_the_reason(
    db: Database, database_url: str, daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    await db.execute("CREATE TABLE events (id bigserial PRIMARY KEY)")
    await Registry(db).add("events", "events", "id")
    await daemon.publisher.find("events")
    await db.execute("INSERT INTO events DEFAULT VALUES")
    with trio.fail_after(HANG):
        while (await status.show(db, "events")).position != 1:
            await trio.sleep(0.1)

    async def failing(self: ServedStream) -> None:
        raise DatabaseError("the disk of the server is full")

    monkeypatch.setattr(ServedStream, "_follow", failing)
    await db.execute("INSERT INTO events DEFAULT VALUES")
    with trio.fail_after(HANG):
        while (found := await status.show(db, "events")).state == "ok":
            await trio.sleep(0.1)
    assert (found.position, found.lag_rows, found.state) == (1, 1, "database")
    assert "the disk of the server" in (found.problem or "")
    assert found.lag_seconds > 0
    shown = await trio.to_thread.run_sync(command, database_url, "streams", "list")
    assert "database" in shown.stdout
    assert "the disk of the server" in shown.stdout
    monkeypatch.undo()
    with trio.fail_after(HANG):
        while (found := await status.show(db, "events")).state != "ok" or found.lag_rows:
            await trio.sleep(0.1)


async def test_a_role_that_may_not_read_the_troubles_sees_everything_else_and_a_note(
    db: Database, database_url: str, postgres_url: str
) -> None:
    await db.execute("CREATE TABLE events (id bigserial PRIMARY KEY)")
    await Registry(db).add("events", "events", "id")
    role = f"looker_{abs(hash(database_url)) % 10**9}"
    psql(database_url, f"CREATE ROLE {role} LOGIN; GRANT SELECT ON events, events_id_seq TO {role}")
    try:
        parts = urlsplit(database_url)
        url = urlunsplit(parts._replace(netloc=f"{role}@{parts.netloc.rpartition('@')[2]}"))
        async with open_database(url, size=2, application_name="looker") as looker:
            seen = await status.overview(looker)
        assert [one.state for one in seen.streams] == ["ok"]
        assert any("the troubles that daemons report" in note for note in seen.notes)
        assert any("no daemon is connected" in note for note in seen.notes)
    finally:
        psql(database_url, f"DROP OWNED BY {role}")
        psql(postgres_url, f"DROP ROLE {role}")


async def test_add_says_whether_a_daemon_is_there(db: Database, database_url: str, daemon: Daemon) -> None:
    await db.execute("CREATE TABLE a (id bigserial PRIMARY KEY)")
    words = ("streams", "add", "a", "--table", "a", "--id", "id")
    added = await trio.to_thread.run_sync(command, database_url, *words)
    served, note = added.stdout.splitlines()
    assert served == "stream a registered; the daemons that are running serve it within 1 s"
    assert note.startswith("note: each row is sent once, after its INSERT.")


async def test_on_a_standby_the_list_says_so_for_every_stream(postgres_folder: Path) -> None:
    primary = postgres_folder / "primary"
    with EmbeddedPostgres(primary) as server:
        async with open_database(server.url, size=2, application_name="test") as database:
            await schema.install(database, "stream", "replicad")
            await database.execute("CREATE TABLE events (id bigserial PRIMARY KEY)")
            await Registry(database).add("events", "events", "id")
        copy = postgres_folder / "standby"
        copy.mkdir()
        await trio.run_process(
            [str(find_programs() / "pg_basebackup"), "-D", str(copy / "data"), "-d", server.url, "-R", "-c", "fast"]
        )
        for lock in (copy / "data").glob(".s.PGSQL*"):
            lock.unlink()
        if os.getuid() == 0:
            owner = primary.joinpath("data").stat()
            for path in [copy, *copy.rglob("*")]:
                os.chown(path, owner.st_uid, owner.st_gid)
        try:
            with EmbeddedPostgres(copy) as standby:
                listed = await trio.to_thread.run_sync(command, standby.url, "streams", "list", "--json")
                assert listed.returncode == 0, listed.stderr
                [row] = [json.loads(line) for line in listed.stdout.splitlines()]
                assert row["state"] == "standby"
                assert "standby" in row["problem"]
                served: Any = await trio.to_thread.run_sync(command, standby.url, "serve", "--listen", "127.0.0.1:0")
                assert served.returncode == 5
                assert "standby" in served.stderr.splitlines()[-1]
                assert "Traceback" not in served.stderr
        finally:
            shutil.rmtree(copy, ignore_errors=True)
