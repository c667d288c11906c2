"""What the models of specs/ and the arguments of docs/positions.md assume of Postgres, each on a real server.

No code of replicad runs here. A test fails where its assumption is false; docs/positions.md, "Assumptions", names
the test of each. They run on the embedded PostgreSQL and on each other one that this machine has.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress

import pytest
import trio

from replicad.errors import DatabaseError
from replicad.postgres.bridge import Connection, Database, open_database
from tests.conftest import FAST, PATIENCE, psql, server_folder
from tests.forks.cluster import NamedPostgres
from tests.lengths import first
from tests.other_servers import PROGRAMS

LAST = "SELECT coalesce(pg_sequence_last_value('t_id_seq'), 0)"
HELD = (
    "SELECT pid, virtualtransaction, fastpath FROM pg_locks "
    "WHERE relation = 't'::regclass AND mode = 'RowExclusiveLock' AND granted"
)
WAITS = "SELECT count(*) FROM pg_locks WHERE relation = 't'::regclass AND NOT granted"
ROUNDS = 50  # of two sessions that race

TABLES = {
    "a table": "CREATE TABLE t (id bigserial, body text)",
    "a partitioned table": "CREATE TABLE t (id bigserial, body text) PARTITION BY RANGE (id);"
    "CREATE TABLE t_0 PARTITION OF t DEFAULT",
}
INSERTS = (
    "INSERT INTO t DEFAULT VALUES",
    "INSERT INTO t (body) SELECT 'a' FROM generate_series(1, 3)",
    "WITH new AS (INSERT INTO t (body) VALUES ('a') RETURNING id) SELECT count(*) FROM new",
    "MERGE INTO t USING (SELECT 1 AS one) AS s ON false WHEN NOT MATCHED THEN INSERT (body) VALUES ('a')",
    "EXECUTE one",
    "SELECT put()",
)


@pytest.fixture(
    scope="module", params=first(1, [None, *PROGRAMS]), ids=lambda found: found.parent.name if found else "embedded"
)
def server(request: pytest.FixtureRequest) -> Iterator[NamedPostgres]:
    with server_folder() as folder, NamedPostgres(folder, FAST, request.param) as made:
        yield made


@pytest.fixture
async def db(server: NamedPostgres) -> AsyncIterator[Database]:
    """A pool on a database with a table `t` and nothing else."""
    psql(server.url, "DROP TABLE IF EXISTS t CASCADE", TABLES["a table"])
    async with open_database(server.url, size=6, application_name="test") as opened:
        yield opened


async def until(db: Database, query: str, condition: Callable[[object], bool] = bool) -> None:
    with trio.fail_after(PATIENCE):
        while not condition(await db.fetch_value(query)):
            await trio.sleep(0.002)


def crash(server: NamedPostgres) -> None:
    """An immediate end, which writes nothing more; then a start, which recovers."""
    pid = server.pid()
    assert pid is not None
    os.kill(pid, signal.SIGQUIT)
    deadline = time.monotonic() + PATIENCE
    while server.pid() is not None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    server.ensure_running()


@pytest.mark.parametrize("table", TABLES)
async def test_what_inserts_locks_the_table_before_it_takes_an_id(
    server: NamedPostgres, db: Database, table: str
) -> None:
    """lock_before_id: what waits for the lock has taken no id."""
    psql(server.url, "DROP TABLE t", TABLES[table])
    psql(server.url, "CREATE OR REPLACE FUNCTION put() RETURNS void LANGUAGE sql AS 'INSERT INTO t DEFAULT VALUES'")
    async with db.connection() as owner, db.connection() as writer:
        await writer.execute("PREPARE one AS INSERT INTO t DEFAULT VALUES")
        for _ in range(6):  # the sixth has a plan that is kept
            await writer.execute("EXECUTE one")
        for kind in INSERTS:
            before = await db.fetch_value(LAST)
            await owner.execute("BEGIN; LOCK TABLE t IN SHARE MODE")
            async with trio.open_nursery() as nursery:
                nursery.start_soon(writer.execute, kind)
                await until(db, WAITS)
                assert await db.fetch_value(LAST) == before, kind
                await owner.execute("COMMIT")
            assert await db.fetch_value(LAST) > before, kind


async def test_copy_locks_the_table_before_it_takes_an_id(server: NamedPostgres, db: Database) -> None:
    """lock_before_id, for COPY FROM."""
    async with db.connection() as owner, trio.open_nursery() as nursery:
        await owner.execute("BEGIN; LOCK TABLE t IN SHARE MODE")
        copy = "COPY t (body) FROM PROGRAM 'echo a'"
        nursery.start_soon(lambda: trio.to_thread.run_sync(psql, server.url, copy))
        await until(db, WAITS)
        assert await db.fetch_value(LAST) == 0
        await owner.execute("COMMIT")
    assert await db.fetch_value(LAST) == 1


async def test_nextval_locks_the_sequence_before_it_takes_an_id_until_its_transaction_ends(db: Database) -> None:
    """sequence_is_locked."""
    locks = "SELECT count(*) FROM pg_locks WHERE relation = 't_id_seq'::regclass AND mode = 'RowExclusiveLock' AND {}"
    async with db.connection() as owner, db.connection() as writer:
        await owner.execute("BEGIN; ALTER SEQUENCE t_id_seq MINVALUE 1")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(writer.execute, "BEGIN; SAVEPOINT s; SELECT nextval('t_id_seq')")
            await until(db, locks.format("NOT granted"))
            assert await db.fetch_value("SELECT is_called FROM t_id_seq") is False
            await owner.execute("ROLLBACK")
        for command, held in (("ROLLBACK TO s", 1), ("PREPARE TRANSACTION 'a'", 1), ("ROLLBACK PREPARED 'a'", 0)):
            await writer.execute(command)
            assert await db.fetch_value(locks.format("granted")) == held, command


async def test_locks_are_listed_on_the_fast_path_in_savepoints_and_after_prepare(db: Database) -> None:
    """prepared_are_listed, and that a lock keeps a transaction listed until it ends."""
    async with db.connection() as writer:
        await writer.execute("BEGIN; INSERT INTO t DEFAULT VALUES")
        [row] = await db.fetch(HELD)
        assert row["fastpath"]
        await writer.execute("SAVEPOINT s; INSERT INTO t DEFAULT VALUES; RELEASE s; SAVEPOINT u; ROLLBACK TO u")
        assert [found["virtualtransaction"] for found in await db.fetch(HELD)] == [row["virtualtransaction"]]
        await writer.execute("PREPARE TRANSACTION 'a'")
    [prepared] = await db.fetch(HELD)
    assert prepared["pid"] is None
    await db.execute("COMMIT PREPARED 'a'")
    assert await db.fetch(HELD) == []


async def test_no_list_leaves_out_a_lock_that_moves_from_the_fast_path_to_the_table_of_locks(db: Database) -> None:
    """one_look: a holder is in each list while its transaction is open."""
    async with db.connection() as writer, db.connection() as rival, trio.open_nursery() as nursery:

        async def move() -> None:
            while True:
                with suppress(DatabaseError):
                    await rival.execute("LOCK TABLE t IN SHARE MODE NOWAIT")

        nursery.start_soon(move)
        for _ in range(ROUNDS):
            await writer.execute("BEGIN; INSERT INTO t DEFAULT VALUES")
            assert len(await db.fetch(HELD)) >= 1
            assert len(await db.fetch(HELD)) >= 1
            await writer.execute("ROLLBACK")
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("end", ["COMMIT", "PREPARE TRANSACTION 'a'; COMMIT PREPARED 'a'"])
async def test_a_transaction_is_visible_to_whoever_finds_its_locks_released(db: Database, end: str) -> None:
    """visible_before_unlock: for who waits for the lock, and for who looks at the list."""
    async with db.connection() as writer, db.connection() as waiter, db.connection() as looker:
        for number in range(1, ROUNDS + 1):
            await writer.execute("BEGIN; INSERT INTO t DEFAULT VALUES")
            async with trio.open_nursery() as nursery:

                async def wait(number: int = number) -> None:
                    await waiter.execute("BEGIN; LOCK TABLE t IN SHARE MODE")
                    assert await waiter.fetch_value("SELECT count(*) FROM t") == number
                    await waiter.execute("COMMIT")

                async def look(number: int = number) -> None:
                    while await looker.fetch(HELD):
                        pass
                    assert await looker.fetch_value("SELECT count(*) FROM t") == number

                nursery.start_soon(look)
                if number % 2:
                    nursery.start_soon(wait)
                    await until(db, WAITS)
                for command in end.split("; "):
                    await writer.execute(command)


async def test_an_id_is_taken_for_good_and_at_once_visible_to_all(db: Database) -> None:
    """The sequence only grows: neither a rollback nor a savepoint gives an id back, and other sessions see it."""
    insert = "INSERT INTO t DEFAULT VALUES"
    async with db.connection() as writer:
        for number, commands in enumerate(
            (
                (f"BEGIN; {insert}", "ROLLBACK"),
                (f"BEGIN; {insert}", "COMMIT"),
                (f"BEGIN; SAVEPOINT s; {insert}", "ROLLBACK TO s", "ROLLBACK"),
                (f"BEGIN; {insert}", "PREPARE TRANSACTION 'a'", "ROLLBACK PREPARED 'a'"),
            ),
            1,
        ):
            for command in commands:
                await writer.execute(command)
                assert await db.fetch_value(LAST) == number, command


async def test_no_transaction_has_the_name_of_an_earlier_one(server: NamedPostgres, db: Database) -> None:
    """names_are_used_once: also in a session that has the place of one that ended."""
    names = []
    for turn in range(6):
        async with open_database(server.url, size=1, application_name="test") as short, short.connection() as one:
            for _ in range(5):
                await one.execute("BEGIN; INSERT INTO t DEFAULT VALUES")
                names += [row["virtualtransaction"] for row in await db.fetch(HELD)]
                await one.execute("COMMIT" if turn % 2 else "ROLLBACK")
    assert len(names) == len(set(names)) == 30


async def test_advisory_locks_and_settings_of_a_savepoint_end_with_it(db: Database) -> None:
    """setting_reverts_with_the_lock: both are undone by ROLLBACK TO, and by the end of the transaction."""
    have = (
        "SELECT (SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid())"
        " || ' ' || coalesce(current_setting('my.bound', true), '')"
    )
    take = "SELECT pg_advisory_xact_lock_shared({0}), set_config('my.bound', '{0}', true)"
    async with db.connection() as one:
        await one.execute(f"BEGIN; {take.format(1)}; SAVEPOINT s; {take.format(2)}; SAVEPOINT u; {take.format(3)}")
        assert await one.fetch_value(have) == "3 3"
        await one.execute("RELEASE u")
        assert await one.fetch_value(have) == "3 3"
        await one.execute("ROLLBACK TO s")
        assert await one.fetch_value(have) == "1 1"
        await one.execute("COMMIT")
        assert await one.fetch_value(have) == "0 "


async def test_a_session_that_ends_keeps_no_lock_and_no_open_transaction(db: Database) -> None:
    """A killed session holds nothing back, and nothing of it appears later."""
    async with db.connection() as watcher:
        async with open_database(await _url(watcher), size=1, application_name="ends") as other:
            with suppress(DatabaseError):
                async with other.connection() as one:
                    await one.execute("SELECT pg_advisory_lock_shared(7); BEGIN; INSERT INTO t DEFAULT VALUES")
                    await one.execute("SELECT pg_terminate_backend(pg_backend_pid())")
        ours = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' OR relation = 't'::regclass"
        await until(db, ours, lambda count: count == 0)
        assert await watcher.fetch_value("SELECT count(*) FROM t") == 0


async def test_a_statement_that_waited_for_a_row_sees_it_as_it_is_then(db: Database) -> None:
    """statements_name_the_term: one that names an old term touches nothing once it gets the row."""
    await db.execute("CREATE TABLE IF NOT EXISTS lease (holder text, term bigint); TRUNCATE lease")
    await db.execute("INSERT INTO lease VALUES ('a', 1)")
    async with db.connection() as one, trio.open_nursery() as nursery:
        await one.execute("BEGIN; SELECT FROM lease WHERE term = 1 FOR UPDATE")
        done: list[str] = []

        async def late(command: str) -> None:
            done.append(await db.execute(command))

        nursery.start_soon(late, "DELETE FROM lease WHERE term = 1")
        nursery.start_soon(late, "UPDATE lease SET holder = 'b' WHERE term = 1")
        await until(
            db,
            "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE '%lease%'",
            lambda count: count == 2,
        )
        await one.execute("UPDATE lease SET term = 2; COMMIT")
    assert sorted(done) == ["DELETE 0", "UPDATE 0"]


async def test_what_restarts_a_sequence_gives_it_another_file_and_what_uses_it_does_not(db: Database) -> None:
    """file_is_compared."""
    file = "SELECT pg_relation_filenode('t_id_seq')"
    seen = await db.fetch_value(file)
    for command, changes in (
        ("INSERT INTO t DEFAULT VALUES", False),
        ("SELECT setval('t_id_seq', 1)", False),
        ("TRUNCATE t", False),
        ("VACUUM FULL t", False),
        ("TRUNCATE t RESTART IDENTITY", True),
        ("ALTER SEQUENCE t_id_seq RESTART", True),
    ):
        await db.execute(command)
        now = await db.fetch_value(file)
        assert (now != seen) is changes, command
        seen = now


async def test_a_table_or_a_sequence_that_is_made_again_is_another_one(server: NamedPostgres, db: Database) -> None:
    """restored_tables_are_others: a restored dump makes them again, under the names that they had."""
    oids = "SELECT concat_ws(' ', 't'::regclass::oid, 't_id_seq'::regclass::oid)"
    before = str(await db.fetch_value(oids)).split()
    psql(server.url, "DROP TABLE t", TABLES["a table"])
    assert not {*before} & {*str(await db.fetch_value(oids)).split()}


async def test_after_a_crash_there_is_all_that_was_committed_before_what_is_there(
    server: NamedPostgres, db: Database
) -> None:
    """One history: a note that survives proves the rows that it speaks of, though nobody waited for the disk.

    The same crash shows that PREPARE TRANSACTION and a commit that waits have flushed the sequence before them.
    """
    psql(server.url, "DROP TABLE IF EXISTS note, t2", "CREATE TABLE note (upto bigint)")
    psql(server.url, "CREATE TABLE t2 (id bigserial)", "CHECKPOINT")
    async with db.connection() as writer, db.connection() as noter:
        for session in (writer, noter):
            await session.execute("SET synchronous_commit = off")
        await writer.execute("BEGIN; INSERT INTO t2 SELECT FROM generate_series(1, 500)")
        await writer.execute("PREPARE TRANSACTION 'kept'")
        for _ in range(400):
            upto = await writer.fetch_value("INSERT INTO t DEFAULT VALUES RETURNING id")
            await noter.execute("INSERT INTO note VALUES ($1)", upto)
        await _forget(writer)
        await _forget(noter)
    crash(server)
    rows, noted = psql(server.url, "SELECT max(id) FROM t", "SELECT max(upto) FROM note").splitlines() or ["0", "0"]
    assert int(rows or 0) >= int(noted or 0)
    count = psql(server.url, "SELECT count(*) FROM t")
    assert int(count) == int(rows or 0), "no row is missing among those that are there"
    listed = "SELECT count(*) FROM pg_locks WHERE relation = 't2'::regclass AND pid IS NULL"
    assert psql(server.url, listed) == "1", "a prepared transaction holds its locks after a crash"
    assert int(psql(server.url, "SELECT nextval('t2_id_seq')")) > 500
    psql(server.url, "ROLLBACK PREPARED 'kept'")


async def _forget(connection: Connection) -> None:
    await connection.execute("RESET synchronous_commit")


async def _url(connection: Connection) -> str:
    folder = await connection.fetch_value("SHOW unix_socket_directories")
    return f"postgresql://postgres@/postgres?host={str(folder).strip(chr(34))}&port=5432"
