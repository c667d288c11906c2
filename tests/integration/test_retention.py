"""Daemons remove old rows by the rules of a stream: never what a sender still needs, and never in silence."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import timedelta

import pytest
import trio

from replicad.config.settings import Address, ServerSettings
from replicad.errors import StreamRefused
from replicad.postgres.bridge import Database
from replicad.streams.registry import Registry
from replicad.streams.serving.intervals import StreamIntervals
from tests.commands import replicad_async
from tests.conftest import PATIENCE, psql
from tests.daemons import Daemon, Paces, open_daemon
from tests.roles import DAEMON

from .conftest import netcat_to

OWNER = "retention_owner"


@pytest.fixture
async def daemon(database_url: str, database: Database) -> AsyncIterator[Daemon]:
    psql(database_url, f"CREATE ROLE {OWNER}", f"GRANT {OWNER} TO {DAEMON}", f"CREATE SCHEMA app AUTHORIZATION {OWNER}")
    try:
        settings = ServerSettings(listen=Address("127.0.0.1", 0), server_name="example.com")
        async with open_daemon(settings, database_url, paces=Paces(streams=StreamIntervals(keep=0.05))) as opened:
            yield opened
    finally:
        psql(database_url, f"DROP OWNED BY {OWNER} CASCADE; DROP ROLE {OWNER}")


async def make(db: Database, rows: int = 50, table: str = "CREATE TABLE app.events (id bigserial PRIMARY KEY)") -> None:
    await db.execute(f"SET ROLE {OWNER}; {table}; INSERT INTO app.events SELECT FROM generate_series(1, {rows})")
    await db.execute("RESET ROLE")
    await Registry(db).add("events", "app.events", "id")


async def ids(db: Database, wanted: list[int], table: str = "app.events") -> None:
    with trio.fail_after(PATIENCE):
        while (found := await db.fetch_value(f"SELECT array_agg(id ORDER BY id) FROM {table}")) != wanted:
            assert set(wanted) <= set(found or ()), found
            await trio.sleep(0.02)


async def test_the_newest_rows_stay_and_an_older_token_is_refused(
    daemon: Daemon, database: Database, database_url: str
) -> None:
    await make(database)
    done = await replicad_async("streams", "alter", "events", "--keep-rows", "10", "--database", database_url)
    assert done.stdout == "stream events: daemons keep 10 rows\n", done.stderr
    await ids(database, list(range(41, 51)))
    async with netcat_to(daemon) as nc:
        await nc.expect("SERVER .*")
        await nc.send("REPLICATE events 5")
        await nc.expect("ERROR token_expired: .*")
    assert "10 rows" in (await replicad_async("streams", "list", "--database", database_url)).stdout
    await database.execute(f"SET ROLE {OWNER}; INSERT INTO app.events DEFAULT VALUES; RESET ROLE")
    await ids(database, list(range(42, 52)))
    assert daemon.troubles.why("stream", "events") is None
    done = await replicad_async("streams", "alter", "events", "--keep", "forever", "--database", database_url)
    assert done.stdout == "stream events: daemons remove no rows\n", done.stderr


async def test_no_row_goes_that_a_known_sender_has_not_acknowledged(daemon: Daemon, database: Database) -> None:
    await make(database)
    await database.execute(
        "INSERT INTO replicad.stream_ack SELECT number, 'slow', 20, replicad.stream_epoch(s), now() "
        "FROM replicad.stream s"
    )
    await Registry(database).set_keep("events", keep_for=None, keep_rows=1)
    await ids(database, list(range(21, 51)))
    await trio.sleep(0.3)  # several rounds
    await ids(database, list(range(21, 51)))


async def test_young_rows_stay_and_both_rules_must_let_a_row_go(daemon: Daemon, database: Database) -> None:
    await make(database)
    await Registry(database).set_keep("events", keep_for=timedelta(days=7), keep_rows=5)
    with trio.fail_after(PATIENCE):
        while not await database.fetch_value("SELECT count(*) FROM replicad.stream_position WHERE position = 50"):
            await trio.sleep(0.02)
    await database.execute(
        "INSERT INTO replicad.stream_mark SELECT number, now() - interval '8 days', 30, true FROM replicad.stream"
    )
    await ids(database, list(range(31, 51)))


async def test_whole_partitions_are_dropped(daemon: Daemon, database: Database) -> None:
    table = "CREATE TABLE app.events (id bigserial PRIMARY KEY) PARTITION BY RANGE (id)" + "".join(
        f"; CREATE TABLE app.events_{n} PARTITION OF app.events FOR VALUES FROM ({n * 10}) TO ({n * 10 + 10})"
        for n in range(6)
    )
    await make(database, 50, table)
    await Registry(database).set_keep("events", keep_for=None, keep_rows=25)
    await ids(database, list(range(26, 51)))
    left = "SELECT array_agg(inhrelid::regclass::text ORDER BY 1) FROM pg_inherits WHERE inhparent = $1::text::regclass"
    assert await database.fetch_value(left, "app.events") == [f"app.events_{n}" for n in range(2, 6)]
    assert daemon.troubles.why("stream", "events") is None


async def test_the_daemons_role_may_own_the_table_and_give_it_away(
    daemon: Daemon, database: Database, database_url: str
) -> None:
    psql(database_url, f"GRANT CREATE ON SCHEMA public TO {DAEMON}")
    await database.execute(f"SET ROLE {DAEMON}; CREATE TABLE events (id bigserial PRIMARY KEY)")
    await database.execute("INSERT INTO events SELECT FROM generate_series(1, 50)")
    await Registry(database).add("events", "public.events", "id")
    await Registry(database).set_keep("events", keep_for=None, keep_rows=10)
    await database.execute("RESET ROLE")
    await ids(database, list(range(41, 51)), "public.events")
    psql(database_url, f"ALTER TABLE events OWNER TO {OWNER}")
    psql(database_url, "INSERT INTO events DEFAULT VALUES")
    await ids(database, list(range(42, 52)), "public.events")
    assert daemon.troubles.why("stream", "events") is None


async def test_code_of_the_tables_owner_is_never_run_by_a_daemon(daemon: Daemon, database: Database) -> None:
    await make(database)
    await database.execute("CREATE FUNCTION app.f() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NULL; END $$")
    trigger = (
        "CREATE CONSTRAINT TRIGGER late AFTER DELETE ON app.events DEFERRABLE INITIALLY DEFERRED"
        " FOR EACH ROW EXECUTE FUNCTION app.f()"
    )
    await database.execute(trigger)
    with pytest.raises(StreamRefused, match="runs code that belongs to its owner: trigger late"):
        await Registry(database).set_keep("events", keep_for=None, keep_rows=1)
    await database.execute("DROP TRIGGER late ON app.events")
    await Registry(database).set_keep("events", keep_for=None, keep_rows=40)
    await ids(database, list(range(11, 51)))
    await database.execute(trigger)
    await database.execute("INSERT INTO app.events DEFAULT VALUES")
    with trio.fail_after(PATIENCE):
        while "trigger late" not in (daemon.troubles.why("stream", "events") or ""):
            await trio.sleep(0.02)
    assert await database.fetch_value("SELECT count(*) FROM app.events") == 41


async def test_old_changes_of_a_stream_of_changes_go_too(daemon: Daemon, database: Database, database_url: str) -> None:
    """Its table belongs to the role of the daemon, so that role itself removes the rows."""
    await database.execute(f"SET ROLE {OWNER}; CREATE TABLE app.orders (id uuid PRIMARY KEY, note text); RESET ROLE")
    options = ("--table", "app.orders", "--changes", "--keep-rows", "10", "--database", database_url)
    done = await replicad_async("streams", "add", "orders", *options)
    assert done.returncode == 0, done.stderr
    await database.execute("INSERT INTO app.orders SELECT gen_random_uuid() FROM generate_series(1, 50)")
    await database.execute("UPDATE app.orders SET note = 'x'")
    name = await database.fetch_value("SELECT relation::regclass::text FROM replicad.stream WHERE name = 'orders'")
    with trio.fail_after(PATIENCE):
        while await database.fetch_value(f"SELECT count(*) FROM {name}") != 10:
            await trio.sleep(0.02)
    assert await database.fetch_value(f"SELECT count(*) FROM {name} WHERE op = 'u'") == 10
    assert daemon.troubles.why("stream", "orders") is None
