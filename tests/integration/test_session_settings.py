"""Settings of a role or a database do not end our sessions, nor change what our statements mean."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import pytest
import trio

from replicad.errors import DatabaseError
from replicad.postgres.bridge import open_database
from tests.conftest import PATIENCE, psql
from tests.daemons import Daemon
from tests.roles import DAEMON, as_daemon

from .conftest import netcat_to

# As they are set by a role, and as our sessions have them.
SETTINGS = {
    "idle_session_timeout": ("50ms", "0"),
    "idle_in_transaction_session_timeout": ("50ms", "0"),
    "transaction_timeout": ("20s", "0"),
    "statement_timeout": ("20s", "1min"),
    "lock_timeout": ("1s", "0"),
    "default_transaction_isolation": ("serializable", "read committed"),
    "default_transaction_deferrable": ("on", "off"),
    "exit_on_error": ("on", "off"),
    "array_nulls": ("off", "on"),
    "standard_conforming_strings": ("off", "on"),
    "transform_null_equals": ("on", "off"),
    "jit": ("on", "off"),
    "TimeZone": ("Asia/Tokyo", "UTC"),
}


@pytest.fixture
def hostile_url(database_url: str) -> str:
    """A database whose role of daemons has all of these settings that the server knows."""
    known = psql(database_url, "SELECT name FROM pg_settings").splitlines()
    name = psql(database_url, "SELECT current_database()")
    psql(
        database_url,
        *(
            f"ALTER ROLE {DAEMON} IN DATABASE {name} SET {setting} = '{theirs}'"
            for setting, (theirs, _) in SETTINGS.items()
            if setting in known
        ),
    )
    return as_daemon(database_url)


async def test_sessions_of_a_pool_have_their_own_settings_again_after_each_use(hostile_url: str) -> None:
    async with open_database(hostile_url, size=1, application_name="replicad test") as db:
        for _ in range(2):  # the connection is reset between its two uses
            async with db.connection() as connection:
                found = {
                    name: await connection.fetch_value("SELECT current_setting($1, true)", name) for name in SETTINGS
                }
                known = {name: value for name, value in found.items() if value is not None}
                assert known == {name: SETTINGS[name][1] for name in known}
                await connection.execute("SET lock_timeout = '1ms'")


async def test_a_session_that_listens_or_waits_in_a_transaction_outlives_the_time_outs_of_its_role(
    hostile_url: str,
) -> None:
    async with open_database(hostile_url, size=2, application_name="replicad test") as db:
        async with db.listen("test") as notices, db.connection() as connection, connection.transaction():
            pid = await connection.fetch_value("SELECT pg_backend_pid()")
            await trio.sleep(0.2)  # the time-outs pass
            assert await connection.fetch_value("SELECT pg_backend_pid()") == pid
            await connection.execute("NOTIFY test, 'heard'")
        async with db.listen("test"):
            pass
        assert notices is not None
        assert db.statistics().lost == 0


async def test_an_error_does_not_end_a_session_whose_role_wants_that(hostile_url: str) -> None:
    async with open_database(hostile_url, size=1, application_name="replicad test") as db:
        connected = db.statistics().connected
        with pytest.raises(DatabaseError):
            await db.execute("SELECT 1 / 0")
        assert await db.fetch_value("SELECT $1::int[] = ARRAY[1, NULL]::int[]", [1, None])
        assert db.statistics().connected == connected


async def test_a_daemon_serves_and_relays_with_the_settings_of_its_role(
    hostile_url: str, database_url: str, start_daemon: Callable[..., AbstractAsyncContextManager[Daemon]]
) -> None:
    psql(
        database_url,
        "CREATE TABLE events (id bigserial PRIMARY KEY, body text)",
        "SELECT replicad.stream_add('events', 'public.events', 'id')",
    )
    async with start_daemon() as one, start_daemon() as other:
        async with netcat_to(one) as sender, netcat_to(other) as hearer:
            await hearer.send("REPLICATE")
            await hearer.until("POSITION events .*")
            for number in range(3):
                await trio.sleep(0.1)  # what is idle is idle for longer than its role may be
                await sender.send(f"REMOTE_SERVER_UP s{number}")
                psql(database_url, "INSERT INTO events (body) VALUES ('new')")
                with trio.fail_after(PATIENCE):
                    lines = [await hearer.line() for _ in range(2)]
                    while not (
                        any(line.startswith("RDATA") for line in lines) and f"REMOTE_SERVER_UP s{number}" in lines
                    ):
                        lines.append(await hearer.line())
