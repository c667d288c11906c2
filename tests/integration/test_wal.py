"""The replication connection that rings the bell: soon, for every commit, and without a price for the server."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from replicad.positions import bell as bells
from replicad.positions.bell import ANY, Bell
from replicad.postgres import wal as wals
from replicad.postgres.bridge import Database, open_database
from replicad.postgres.embedded import EmbeddedPostgres
from replicad.postgres.schema_text import Roles, script
from replicad.postgres.wal import WalListener
from tests.conftest import PATIENCE, psql, server_folder
from tests.lengths import first
from tests.roles import as_role

LOOKS = "SELECT count(*) FROM pg_stat_replication WHERE application_name = 'replicad bell'"


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedPostgres]:
    """A server of this module alone: other tests write no WAL here."""
    with server_folder() as folder, EmbeddedPostgres(folder, {"fsync": "off", "autovacuum": "off"}) as opened:
        psql(
            opened.url,
            "CREATE TABLE t (id bigserial PRIMARY KEY)",
            "INSERT INTO t DEFAULT VALUES",
            "CREATE ROLE plain LOGIN",
            "CREATE ROLE hears LOGIN REPLICATION",
        )
        yield opened


@asynccontextmanager
async def listening(url: str) -> AsyncIterator[WalListener]:
    """A listener that is connected."""
    async with database(url) as db, trio.open_nursery() as nursery:
        listener = WalListener(url, db)
        nursery.start_soon(listener.run)
        with trio.fail_after(PATIENCE):
            while not listener.hears:
                assert listener.why is None
                await trio.sleep(0.01)
        yield listener
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def database(url: str) -> AsyncIterator[Database]:
    async with open_database(url, size=3, application_name="replicad test") as opened:
        yield opened


async def last(db: Database) -> dict[int, int | None]:
    """The values that a poll would read."""
    row = await db.fetch_row("SELECT 't_id_seq'::regclass::oid, pg_sequence_last_value('t_id_seq')")
    assert row is not None
    return {row[0]: row[1]}


async def test_each_commit_rings_before_a_look_would_find_it(
    server: EmbeddedPostgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bells, "_SELDOM", 3600.0)  # seconds until the second look
    monkeypatch.setattr(bells, "SECONDS", PATIENCE)
    url = as_role(server.url, "hears")
    async with listening(url) as listener, database(server.url) as db, Bell(db, 0.004, listener).waiting() as wait:
        for _ in range(50):
            since = trio.current_time()
            values = await last(db)
            async with trio.open_nursery() as nursery:
                rung: list[int | None] = []

                async def ring(rung: list[int | None] = rung, values: object = values, since: float = since) -> None:
                    rung.append(await wait(values, since))  # type: ignore[arg-type]

                nursery.start_soon(ring)
                await db.execute("INSERT INTO t DEFAULT VALUES")
            assert rung == [ANY]


async def test_wal_that_came_while_the_poll_ran_rings_at_once(server: EmbeddedPostgres) -> None:
    async with (
        listening(server.url) as listener,
        database(server.url) as db,
        Bell(db, 3600.0, listener).waiting() as wait,
    ):
        since = trio.current_time()
        values = await last(db)
        await db.execute("INSERT INTO t DEFAULT VALUES")
        with trio.fail_after(PATIENCE):
            while listener.heard_at < since:
                await trio.sleep(0.001)
        assert await wait(values, since) == ANY


async def test_a_commit_whose_wal_is_not_flushed_is_found_by_a_look_and_then_looks_are_frequent(
    server: EmbeddedPostgres,
) -> None:
    async with database(server.url) as db:
        await db.execute("ALTER SYSTEM SET wal_writer_delay = '10s'")
        await db.execute("SELECT pg_reload_conf()")
        try:
            async with listening(server.url) as listener:
                bell = Bell(db, 0.004, listener)
                async with bell.waiting() as wait:
                    assert not bell.looks_often()
                    values, found = await last(db), None
                    [sequence] = values
                    async with db.connection() as writer:
                        await writer.execute("SET synchronous_commit = off")
                        await writer.execute("INSERT INTO t DEFAULT VALUES")
                    with trio.fail_after(PATIENCE):
                        while found is None:
                            found = await wait(values, trio.current_time())
                    assert found == sequence
                    with trio.fail_after(PATIENCE):
                        while not bell.looks_often():
                            await trio.sleep(0.01)
        finally:
            await db.execute("ALTER SYSTEM RESET wal_writer_delay")
            await db.execute("SELECT pg_reload_conf()")


async def test_writes_of_others_do_not_ring_for_long(server: EmbeddedPostgres) -> None:
    async with listening(server.url) as listener, database(server.url) as db:
        bell = Bell(db, 0.004, listener)
        async with bell.waiting() as wait:
            values, rings = await last(db), 0
            with trio.fail_after(PATIENCE):
                while bell.hears():
                    await db.execute("SELECT pg_logical_emit_message(true, 'others', 'write')")
                    rings += await wait(values, trio.current_time() - 1) == ANY
            assert rings <= bells._IDLE_RINGS + 1, "the first may have been for a row"


async def test_it_keeps_nothing_back_and_never_counts_as_a_synchronous_standby(server: EmbeddedPostgres) -> None:
    async with listening(server.url), database(server.url) as db:
        await db.execute("ALTER SYSTEM SET synchronous_standby_names = '*'")
        await db.execute("SELECT pg_reload_conf()")
        try:
            async with db.connection() as writer:
                await writer.execute("SET synchronous_commit = local")
                for _ in range(20):
                    await writer.execute("INSERT INTO t DEFAULT VALUES")
            with trio.fail_after(PATIENCE):
                while True:  # until an answer of ours came
                    row = await db.fetch_row(
                        "SELECT sync_state, flush_lsn, replay_lsn, backend_xmin, write_lsn FROM pg_stat_replication"
                    )
                    assert row is not None
                    if row["write_lsn"] is not None:
                        break
                    await trio.sleep(0.05)
            assert (row["sync_state"], row["flush_lsn"], row["replay_lsn"], row["backend_xmin"]) == (
                "async",
                *[None] * 3,
            )
            assert await db.fetch_value("SELECT count(*) FROM pg_replication_slots") == 0
            async with db.connection() as writer:
                with trio.move_on_after(0.5) as waited:
                    await writer.execute("INSERT INTO t DEFAULT VALUES")
            assert waited.cancelled_caught, "no commit is confirmed by the listener"
        finally:
            await db.execute("ALTER SYSTEM RESET synchronous_standby_names")
            await db.execute("SELECT pg_reload_conf()")


@pytest.mark.parametrize("suspended", first(1, [True, False]))
def test_a_shutdown_does_not_wait_for_a_listener_even_if_it_is_suspended(
    postgres_folder: Path, suspended: bool
) -> None:
    program = """
import trio
from replicad.postgres.bridge import open_database
from replicad.postgres.wal import WalListener
async def main(url):
    async with open_database(url, size=1, application_name="listener") as db, trio.open_nursery() as nursery:
        listener = WalListener(url, db)
        nursery.start_soon(listener.run)
        while not listener.hears:
            await trio.sleep(0.01)
        print("hears", flush=True)
import sys; trio.run(main, sys.argv[1])
"""
    with EmbeddedPostgres(postgres_folder, {"fsync": "off", "wal_sender_timeout": "1h"}) as server:
        one = subprocess.Popen([sys.executable, "-c", program, server.url], stdout=subprocess.PIPE, text=True)
        try:
            assert one.stdout is not None
            assert "hears" in one.stdout.readline()
            if suspended:
                one.send_signal(signal.SIGSTOP)
            psql(server.url, "CREATE TABLE t (id int)", "INSERT INTO t VALUES (1)")
            server.run_program("pg_ctl", "-D", str(server.data), "-m", "fast", "-w", "-t", str(int(PATIENCE)), "stop")
        finally:
            one.kill()
            one.wait()


async def test_much_wal_ends_the_connection_until_nothing_moves(
    server: EmbeddedPostgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wals, "REST", 0.05)
    async with listening(server.url) as listener, database(server.url) as db:
        await db.execute("SELECT pg_logical_emit_message(false, 'much', repeat('x', 3000000), true)") if int(
            await db.fetch_value("SHOW server_version_num")
        ) >= 170000 else await db.execute("SELECT pg_logical_emit_message(true, 'much', repeat('x', 3000000))")
        with trio.fail_after(PATIENCE):
            while listener.hears:
                await trio.sleep(0.01)
            while await db.fetch_value(LOOKS):
                await trio.sleep(0.01)
            await trio.sleep(0.2)
            assert not listener.hears
            while not listener.hears:
                listener.want()
                await trio.sleep(0.01)


async def test_a_listener_comes_back_after_its_connection_was_ended(server: EmbeddedPostgres) -> None:
    async with listening(server.url) as listener, database(server.url) as db:
        await db.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_replication")
        with trio.fail_after(PATIENCE):
            while listener.hears:
                await trio.sleep(0.001)
            while not listener.hears:
                assert listener.why is None or "ended" in listener.why
                listener.want()
                await trio.sleep(0.01)


@pytest.mark.parametrize(
    ("case", "remedy"),
    [
        ("no attribute", "replicad sql roles --replication"),
        ("no extra", "pip install 'replicad[bell]'"),
        ("no server", "No such file or directory"),
        ("no address", "libpq does not take the address"),
    ],
)
async def test_without_it_the_reason_and_the_remedy_are_told(
    server: EmbeddedPostgres, monkeypatch: pytest.MonkeyPatch, case: str, remedy: str
) -> None:
    url = server.url
    if case == "no attribute":
        url = as_role(url, "plain")
    elif case == "no extra":
        monkeypatch.setitem(sys.modules, "psycopg", None)
    elif case == "no server":
        url = "postgresql://plain:secretword@/postgres?host=/nowhere"
    else:
        url += "&statement_cache=7"
    asked = as_role(server.url, "plain") if case == "no attribute" else server.url
    async with database(asked) as db, trio.open_nursery() as nursery:
        listener = WalListener(url, db)
        nursery.start_soon(listener.run)
        with trio.fail_after(PATIENCE):
            while listener.why is None:
                await trio.sleep(0.01)
        nursery.cancel_scope.cancel()
    assert remedy in listener.why
    assert "secretword" not in listener.why
    assert ".s.PGSQL" not in listener.why, "operators of other teams see the reason over HTTP"
    assert not listener.hears


async def test_the_script_for_roles_gives_the_attribute_only_when_asked(server: EmbeddedPostgres) -> None:
    psql(server.url, script(Roles("granted")))
    assert psql(server.url, "SELECT rolreplication FROM pg_roles WHERE rolname = 'granted'").strip() == "f"
    for _ in range(2):
        psql(server.url, script(Roles("granted", replication=True)))
    async with listening(as_role(server.url, "granted")) as listener:
        assert listener.hears
