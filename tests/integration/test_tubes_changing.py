"""Commands that change tubes while programs write: nobody waits for long behind them, and nobody is ended by them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
import trio

from replicad.errors import TubeRefused
from replicad.postgres import schema
from replicad.postgres.bridge import Database
from replicad.postgres.statements import call_value
from replicad.tubes.cli import changing
from tests.commands import replicad
from tests.conftest import PATIENCE

WAITING = (
    "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND application_name = 'replicad command'"
)


@pytest.fixture
async def tables(database: Database) -> Database:
    """A tube `a` with the tables t1 and t2."""
    await schema.install(database, "tube")
    await database.execute(
        "CREATE TABLE t1 (id bigint); CREATE TABLE t2 (id bigint); CREATE TABLE t3 (id bigint);"
        "SELECT tube.tube_ensure_exists('a'), tube.tube_table_ensure_attached('a', 't1', 0),"
        " tube.tube_table_ensure_attached('a', 't2', 0)"
    )
    return database


def run_cli(url: str, *words: str) -> str:
    """What a command prints, reports included."""
    done = replicad(*words, "--database", url)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


async def until(look: Callable[[], Awaitable[object]]) -> None:
    with trio.fail_after(PATIENCE):
        while not await look():
            await trio.sleep(0.02)


async def test_dropping_a_tube_ends_no_transaction_that_writes_to_several_of_its_tables(
    tables: Database, database_url: str
) -> None:
    async with tables.connection() as user, trio.open_nursery() as nursery:
        await user.execute("BEGIN; INSERT INTO t2 VALUES (1)")
        nursery.start_soon(trio.to_thread.run_sync, run_cli, database_url, "tubes", "drop", "a", "--yes")
        await until(lambda: tables.fetch_value(WAITING))
        await trio.sleep(1.5)  # longer than deadlock_timeout: later it is the user who would be ended
        await user.execute("INSERT INTO t1 VALUES (1)")
        await trio.sleep(1.5)
        await user.execute("INSERT INTO t2 VALUES (2); COMMIT")
    assert await tables.fetch_value("SELECT count(*) FROM tube.tube_registry") == 0
    assert await tables.fetch_value("SELECT count(*) FROM t1") == 1


async def test_attaching_behind_a_long_transaction_lets_writers_pass_and_names_it(
    tables: Database, database_url: str
) -> None:
    output: list[str] = []

    def attach() -> None:
        output.append(run_cli(database_url, "tubes", "attach", "a", "t3", "--shard", "0"))

    async with tables.connection() as long, tables.connection() as writer, trio.open_nursery() as nursery:
        await long.execute("BEGIN; INSERT INTO t3 VALUES (1)")
        nursery.start_soon(trio.to_thread.run_sync, attach)
        await until(lambda: tables.fetch_value(WAITING))
        await writer.execute("SET statement_timeout = '900ms'")
        for number in range(5):  # each within 0.9 s
            await writer.execute("INSERT INTO t3 VALUES ($1)", number)
            await trio.sleep(0.1)
        pid = await long.fetch_value("SELECT pg_backend_pid()")
        await long.execute("COMMIT")
    assert "t3 attached to a" in output[0]
    assert f"attach t3: waiting for pid {pid} (replicad test, user " in output[0]


async def test_a_change_gives_up_and_says_because_of_whom(tables: Database) -> None:
    async with tables.connection() as long:
        await long.execute("BEGIN; INSERT INTO t3 VALUES (1)")
        pid = await long.fetch_value("SELECT pg_backend_pid()")
        with pytest.raises(
            TubeRefused, match=f"a change: no lock within 1 s, because of pid {pid}.*pg_terminate_backend"
        ):
            await changing.change_with_locks(
                tables,
                lambda connection: call_value(connection, "tube", "tube_table_ensure_attached", "a", "t3", 0),
                what="a change",
                patience=1.0,
                report=lambda _: None,
            )
        await long.execute("ROLLBACK")
