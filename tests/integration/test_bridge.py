"""The bridge over a real Postgres: what comes back, what errors say, and what is left after a cancel or a kill."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from functools import partial

import pytest
import trio
import trio_asyncio

from replicad import errors
from replicad.postgres import connection as connection_module
from replicad.postgres.bridge import COPY_CHUNK, Database, open_database, quote_ident, quote_literal
from replicad.postgres.embedded import EmbeddedPostgres
from tests.conftest import PATIENCE, server_folder

pytestmark = pytest.mark.postgres

SLEEPERS = """
    SELECT count(*) FROM pg_stat_activity
    WHERE datname = current_database() AND state = 'active' AND query LIKE '%naptime%' AND pid <> pg_backend_pid()
"""


@asynccontextmanager
async def opened(url: str, **options: object) -> AsyncIterator[Database]:
    settings = {"size": 2, "application_name": "replicad bridge", **options}
    async with open_database(url, **settings) as db:  # type: ignore[arg-type]
        yield db


ADVISORY = """
    SELECT count(*) FROM pg_locks l JOIN pg_database d ON d.oid = l.database
    WHERE datname = current_database() AND locktype = 'advisory'
"""
BLOCKED = """
    SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event = 'ClientWrite'
"""


async def wait_until_nobody_sleeps(db: Database) -> None:
    with trio.fail_after(PATIENCE):
        while await db.fetch_value(SLEEPERS):
            await trio.sleep(0.01)


def at_rest(db: Database) -> bool:
    statistics = db.statistics()
    return statistics.idle == statistics.open and statistics.waiting == 0


# --- statements ------------------------------------------------------------------------------------


ARRAYS = "SELECT $1::bigint[] AS ids, $2::boolean[] AS flags, $3::timestamptz[] AS times"
LOOKED_UP = "SELECT count(*) FROM pg_prepared_statements WHERE statement LIKE '%typeinfo' || '_tree%'"


async def test_only_the_first_connection_asks_postgres_what_its_own_arrays_are(database_url: str) -> None:
    values = [[1, None, 1 << 62], [True, None], []]
    async with opened(database_url) as db, db.connection() as first, db.connection() as second:
        for held in (first, second):
            assert list((await held.fetch(ARRAYS, *values))[0].values()) == values
        assert await second.fetch_value(LOOKED_UP) == 0
    async with opened(database_url) as db:
        assert await db.fetch_value(ARRAYS, *values) == values[0]
        assert await db.fetch_value(LOOKED_UP) == 0


async def test_a_type_of_the_users_is_looked_up_where_it_is(database_url: str, postgres_url: str) -> None:
    """The same oid may be another type in another database, or after a type was made anew."""
    for labels in (["a", "b"], ["c"]):
        async with opened(database_url) as db:
            await db.execute("DROP TYPE IF EXISTS own CASCADE")
            await db.execute(f"CREATE TYPE own AS ENUM ({', '.join(map(quote_literal, labels))})")
            assert await db.fetch_value("SELECT $1::own[]", labels) == labels
            assert await db.fetch_value(LOOKED_UP) == 1


async def test_statements_return_rows_values_and_tags(database: Database) -> None:
    rows = await database.fetch("SELECT i, i * 2 AS twice FROM generate_series(1, $1::int) i", 3)
    assert [(row["i"], row["twice"]) for row in rows] == [(1, 2), (2, 4), (3, 6)]
    assert await database.fetch_row("SELECT 1 WHERE false") is None
    assert await database.fetch_value("SELECT $1::text[]", ["a", "b"]) == ["a", "b"]
    assert await database.execute("CREATE TABLE t (id int); INSERT INTO t VALUES (1), (2)") == "INSERT 0 2"


async def test_sessions_are_named_and_speak_utc_and_read_committed(database_url: str) -> None:
    async with opened(database_url, statement_timeout=7) as db:
        names = ("application_name", "TimeZone", "transaction_isolation", "statement_timeout")
        values = [await db.fetch_value("SELECT current_setting($1)", name) for name in names]
    assert values == ["replicad bridge", "UTC", "read committed", "7s"]


async def test_works_in_tasks_that_were_started_outside_of_its_loop(database_url: str) -> None:
    send, receive = trio.open_memory_channel[Database](0)
    done = trio.Event()

    async def elsewhere() -> None:
        db = await receive.receive()
        assert trio_asyncio.current_loop.get() is None
        assert await db.fetch_value("SELECT sum(x) FROM unnest($1::bigint[]) x", [1, 2]) == 3
        done.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(elsewhere)
        async with opened(database_url) as db:
            await send.send(db)
            await done.wait()


async def test_two_databases_share_a_loop_and_the_outer_one_outlives_the_inner(database_url: str) -> None:
    async with opened(database_url) as outer:
        async with opened(database_url) as inner:
            assert await inner.fetch_value("SELECT 1") == 1
        with pytest.raises(errors.DatabaseUnavailable, match="is closed"):
            await inner.fetch_value("SELECT 1")
        assert await outer.fetch_value("SELECT 1") == 1


# --- COPY ------------------------------------------------------------------------------------------


async def test_copy_out_keeps_every_byte_of_a_line(database: Database) -> None:
    lines = ['{"a":"\\"quoted\\", \\\\ and \\n"}', "tabs\tand, commas; and 'quotes'", "žluťoučký 😀", " spaces "]
    got = bytearray()

    async def sink(chunk: bytes) -> None:
        got.extend(chunk)

    query = "SELECT line FROM unnest($1) WITH ORDINALITY AS l(line, n) ORDER BY n"
    assert await database.copy_out(query, lines, sink=sink) == len(lines)
    assert got.decode() == "".join(line + "\n" for line in lines)


async def test_constants_reach_postgres_as_they_are(database: Database) -> None:
    texts = ["", "O'Reilly \\ $1 \n", "\\"]
    for value in (0, -5, 2**63 - 1, -(2**63), True, False, None, 1.5, *texts, [1, -2], [], texts):
        assert await database.fetch_value(f"SELECT {quote_literal(value)}") == value


async def test_identifiers_with_anything_in_them_are_quoted(database: Database) -> None:
    name = 'A "table".with; everything'
    await database.execute(f"CREATE TABLE {quote_ident(name)} (id int)")
    assert await database.fetch_value("SELECT relname FROM pg_class WHERE relname = $1", name) == name


async def test_copy_out_waits_for_a_slow_sink_and_holds_little_in_the_meantime(database: Database) -> None:
    opened_gate, chunks = trio.Event(), []

    async def sink(chunk: bytes) -> None:
        chunks.append(chunk)
        await opened_gate.wait()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(copy_numbers, database, 2_000_000, sink)
        with trio.fail_after(PATIENCE):
            while await database.fetch_value(BLOCKED) == 0:
                await trio.sleep(0.01)
        assert len(chunks) == 1
        opened_gate.set()
    assert b"".join(chunks).count(b"\n") == 2_000_000
    assert max(map(len, chunks)) < COPY_CHUNK + (1 << 18)  # one read of the driver more


async def copy_numbers(db: Database, count: int, sink: connection_module.Sink) -> None:
    query = "SELECT 'naptime ' || n FROM (SELECT generate_series(1, $1)) AS s(n)"
    assert await db.copy_out(query, count, sink=sink) == count


async def test_copy_whose_sink_fails_is_cancelled_in_postgres_and_raises_what_the_sink_raised(
    database: Database,
) -> None:
    async def sink(chunk: bytes) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await copy_numbers(database, 2_000_000_000, sink)
    await wait_until_nobody_sleeps(database)
    assert at_rest(database)


async def test_copy_that_takes_too_long_is_given_up_and_says_so(database: Database) -> None:
    with pytest.raises(errors.DatabaseUnavailable, match="took longer than"):
        await database.copy_out("SELECT pg_sleep(3600)::text || 'naptime'", sink=ignore, timeout=0.1)
    await wait_until_nobody_sleeps(database)


async def test_error_in_the_middle_of_a_copy_comes_after_the_rows_before_it(database: Database) -> None:
    got = bytearray()

    async def sink(chunk: bytes) -> None:
        got.extend(chunk)

    with pytest.raises(errors.DatabaseError, match="division by zero"):
        await database.copy_out("SELECT (1 / (50000 - n))::text FROM generate_series(1, 60000) n", sink=sink)
    assert at_rest(database)


async def test_copy_in_loads_records_and_text(database: Database) -> None:
    await database.execute('CREATE SCHEMA s; CREATE TABLE s."T" (a bigint, b text)')
    where = {"columns": ["a", "b"], "schema": "s"}
    assert await database.copy_in("T", records=((n, f"x{n}") for n in range(1000)), **where) == 1000  # type: ignore[arg-type]
    assert await database.copy_in("T", source=iter([b"7\tse", b"ven\n8\t\\N\n"]), **where) == 2  # type: ignore[arg-type]
    assert await database.fetch_value('SELECT count(*) FILTER (WHERE b IS NOT NULL) FROM s."T"') == 1001


async def test_copy_in_whose_source_fails_writes_nothing(database: Database) -> None:
    await database.execute("CREATE TABLE t (a bigint)")

    def numbers() -> Iterator[tuple[int]]:
        for n in range(100_000):
            yield (n,)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await database.copy_in("t", columns=["a"], records=numbers())
    assert await database.fetch_value("SELECT count(*) FROM t") == 0
    assert at_rest(database)


# --- transactions and pinned connections -----------------------------------------------------------


async def test_transaction_commits_or_rolls_back_and_nests_as_savepoints(database: Database) -> None:
    await database.execute("CREATE TABLE t (id int)")
    async with database.connection() as connection:
        async with connection.transaction():
            await connection.execute("INSERT INTO t VALUES (1)")
            with suppress(ZeroDivisionError):
                async with connection.transaction():
                    await connection.execute("INSERT INTO t VALUES (2)")
                    raise ZeroDivisionError
            async with connection.transaction():
                await connection.execute("INSERT INTO t VALUES (3)")
        with suppress(errors.DatabaseError):
            async with connection.transaction(isolation="serializable"):
                assert await connection.fetch_value("SHOW transaction_isolation") == "serializable"
                await connection.execute("INSERT INTO t VALUES (4)")
                await connection.execute("SELECT 1 / 0")
    assert [row["id"] for row in await database.fetch("SELECT id FROM t ORDER BY id")] == [1, 3]


async def test_a_transaction_of_a_process_that_is_suspended_holds_no_lock_for_long(database: Database) -> None:
    await database.execute("CREATE TABLE t (id int)")

    async def hold() -> None:
        async with database.connection() as connection, connection.transaction(readonly=True, idle=0.05):
            await connection.execute("LOCK TABLE t IN ACCESS SHARE MODE")
            with trio.fail_after(PATIENCE):
                await database.execute("DROP TABLE t")  # waits until Postgres has ended the other session
            await connection.execute("SELECT 1")

    with pytest.raises(errors.DatabaseUnavailable):
        await hold()
    async with database.connection() as connection, connection.transaction():
        assert await connection.fetch_value("SHOW idle_in_transaction_session_timeout") == "20s"


async def test_transaction_whose_failure_was_swallowed_does_not_look_committed(database: Database) -> None:
    async def swallow() -> None:
        async with database.connection() as connection, connection.transaction():
            with suppress(errors.DatabaseError):
                await connection.execute("SELECT 1 / 0")

    with pytest.raises(errors.DatabaseError, match="rolled the transaction back"):
        await swallow()


async def test_cancelled_transaction_is_rolled_back(database: Database) -> None:
    await database.execute("CREATE TABLE t (id int)")
    async with database.connection() as connection:
        with trio.move_on_after(0.05):
            async with connection.transaction():
                await connection.execute("INSERT INTO t VALUES (1)")
                await connection.execute("SELECT pg_sleep(3600)")
        assert await connection.fetch_value("SELECT count(*) FROM t") == 0
    assert at_rest(database)


async def test_pinned_connection_is_given_back_clean(database_url: str) -> None:
    async with opened(database_url, size=1) as db:
        async with db.connection() as connection:
            await connection.execute(
                "SET application_name = 'other'; SELECT pg_advisory_lock(1); CREATE TEMP TABLE x ()"
            )
            await connection.execute("BEGIN; CREATE TABLE never ()")
        assert await db.fetch_value("SELECT current_setting('application_name')") == "replicad bridge"
        assert await db.fetch_value(ADVISORY) == 0
        assert await db.fetch_value("SELECT to_regclass('never')") is None
        assert db.statistics().connected == 1


# --- cancellation ----------------------------------------------------------------------------------


async def test_cancelled_statement_is_cancelled_in_postgres_and_the_connection_lives_on(database_url: str) -> None:
    async with opened(database_url, size=1) as db:
        for _ in range(3):
            with trio.move_on_after(0.05) as scope:
                await db.fetch_value("SELECT pg_sleep(3600) /* naptime */")
            assert scope.cancelled_caught
        assert await db.fetch_value(SLEEPERS) == 0
        assert (db.statistics().connected, db.statistics().cancelled) == (1, 3)


async def test_statements_that_run_together_return_fail_and_are_cancelled_like_single_ones(database_url: str) -> None:
    async with open_database(database_url, size=1, application_name="x") as db:
        async with db.connection() as connection:

            async def work() -> int:
                one: int = await connection.fetch_value("SELECT 1")
                with pytest.raises(errors.DatabaseError, match="division by zero"):
                    await connection.fetch("SELECT 1 / 0")
                return one + int(await connection.fetch_value("SELECT $1::int", 2))

            async def sleep() -> None:
                await connection.fetch("SELECT 1")
                await connection.fetch("SELECT pg_sleep(3600)")

            async def defect() -> float:
                return 1 / int(await connection.fetch_value("SELECT 0"))

            assert await connection.together(work) == 3
            with pytest.raises(ZeroDivisionError):
                await connection.together(defect)
            with trio.fail_after(PATIENCE), trio.move_on_after(0.2) as scope:
                await connection.together(sleep)
            assert scope.cancelled_caught
        assert await db.fetch_value("SELECT 3") == 3
        assert db.statistics().open == 1


async def test_cancellation_at_any_moment_leaves_a_pool_that_works(database_url: str) -> None:
    async def use(db: Database) -> None:
        async with db.connection() as connection, connection.transaction():
            await connection.fetch("SELECT n FROM generate_series(1, 100) n")
            await connection.copy_out("SELECT n::text FROM generate_series(1, 1000) n", sink=ignore)

    async with opened(database_url, size=2) as db:
        for steps in range(40):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(use, db)
                for _ in range(steps):
                    await trio.lowlevel.checkpoint()
                nursery.cancel_scope.cancel()
            assert await db.fetch_value("SELECT $1::int", steps) == steps
            assert at_rest(db)


async def ignore(chunk: bytes) -> None:
    await trio.lowlevel.checkpoint()


# --- when things break -----------------------------------------------------------------------------


async def test_wait_for_a_connection_is_bounded_and_says_why(database_url: str) -> None:
    async with opened(database_url, size=1, wait_timeout=0.1) as db, db.connection():
        with pytest.raises(errors.DatabaseUnavailable, match=r"all 1 connections .* stayed busy"):
            await db.fetch_value("SELECT 1")


async def test_statement_time_out_is_kept_by_the_server(database_url: str) -> None:
    async with opened(database_url, statement_timeout=0.1) as db:
        with pytest.raises(errors.DatabaseError, match="statement timeout") as caught:
            await db.fetch_value("SELECT pg_sleep(3600)")
        assert caught.value.sqlstate == "57014"
        assert await db.fetch_value("SELECT 1") == 1


async def test_server_that_falls_silent_is_given_up(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_module, "_GRACE", 0.1)
    async with opened(database_url, statement_timeout=0.1) as db:
        pid = await db.fetch_value("SELECT pg_backend_pid()")
        os.kill(pid, signal.SIGSTOP)
        try:
            for work in (db.fetch_value("SELECT 1"), db.copy_out("SELECT 'x'", sink=ignore)):
                with trio.fail_after(PATIENCE), pytest.raises(errors.DatabaseUnavailable, match="stopped answering"):
                    await work
                os.kill(pid, signal.SIGCONT)
                pid = await db.fetch_value("SELECT pg_backend_pid()")
                os.kill(pid, signal.SIGSTOP)
        finally:
            os.kill(pid, signal.SIGCONT)


async def test_killed_connections_are_replaced(database_url: str) -> None:
    async with opened(database_url, size=3) as db:
        async with db.connection() as one, db.connection() as two:
            pids = [await c.fetch_value("SELECT pg_backend_pid()") for c in (one, two)]
            await db.fetch("SELECT pg_terminate_backend(pid, 5000) FROM unnest($1::int[]) pid", pids)
            for connection in (one, two):
                with pytest.raises(errors.DatabaseUnavailable):
                    await connection.fetch_value("SELECT 1")
                assert connection.is_closed
                for use in (connection.fetch, connection.execute, partial(connection.copy_out, sink=ignore)):
                    with pytest.raises(errors.DatabaseUnavailable):
                        await use("SELECT 1")
                with pytest.raises(errors.DatabaseUnavailable):
                    await connection.copy_in("t", columns=["a"], records=[(1,)])
                with pytest.raises(errors.DatabaseUnavailable):
                    async with connection.transaction():
                        pass
        for _ in range(3):
            assert await db.fetch_value("SELECT 1") == 1


async def test_an_error_leaves_open_database_as_it_is(database_url: str) -> None:
    with pytest.raises(ZeroDivisionError):
        async with opened(database_url):
            raise ZeroDivisionError


async def test_error_that_nobody_awaits_does_not_end_the_loop(database_url: str) -> None:
    async with opened(database_url) as db:
        loop = trio_asyncio.current_loop.get()
        loop.call_exception_handler({"message": "stray", "exception": ZeroDivisionError()})
        assert await db.fetch_value("SELECT 1") == 1


async def test_errors_of_our_functions_keep_their_class_sentence_and_remedy(database: Database) -> None:
    classes: dict[str, type[errors.ReplicadError]] = {
        "RT001": errors.UnknownTube,
        "RT002": errors.LeaseLost,
        "RT003": errors.PartitionsChanged,
        "RT004": errors.LeaseHeld,
        "RT005": errors.TubeRefused,
        "RT006": errors.CursorAhead,
        "RT007": errors.DataLoss,
        "RT008": errors.UsageError,
        "RS001": errors.UnknownStream,
        "RS002": errors.StreamRefused,
        "RS003": errors.StreamRefused,
        "RS007": errors.UsageError,
        "53100": errors.DatabaseUnavailable,
        "42501": errors.DatabaseRefused,
        "P0001": errors.DatabaseError,
    }
    for state, kind in classes.items():
        with pytest.raises(kind, match=r"so it is.*do this") as caught:
            await database.execute(f"DO $$ BEGIN RAISE 'so it is' USING ERRCODE = '{state}', HINT = 'do this'; END $$")
        assert type(caught.value) is kind
        assert caught.value.__cause__ is not None


# --- connecting ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tcp_server() -> Iterator[tuple[EmbeddedPostgres, int]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    settings = {"listen_addresses": "127.0.0.1", "port": str(port), "max_connections": "8", "fsync": "off"}
    with server_folder() as folder, EmbeddedPostgres(folder, settings) as server:
        server.run_program("psql", "-d", server.url, "-c", "CREATE ROLE guest LOGIN PASSWORD 'right'")
        yield server, port


async def refusal(url: str, **options: object) -> errors.DatabaseError:
    with trio.fail_after(PATIENCE), pytest.raises(errors.DatabaseError) as caught:
        async with opened(url, **options):
            pass
    return caught.value


async def test_password_works_over_tcp_and_a_wrong_one_is_refused_without_being_told(
    tcp_server: tuple[EmbeddedPostgres, int],
) -> None:
    _, port = tcp_server
    async with opened(f"postgresql://guest:right@127.0.0.1:{port}/postgres") as db:
        assert await db.fetch_value("SELECT current_user") == "guest"
    error = await refusal(f"postgresql://guest:s3cr3t@127.0.0.1:{port}/postgres")
    assert isinstance(error, errors.DatabaseRefused)
    assert 'refused the password of user "guest"' in str(error)
    assert "s3cr3t" not in str(error)


async def test_missing_database_is_refused_by_name(tcp_server: tuple[EmbeddedPostgres, int]) -> None:
    error = await refusal(f"postgresql://guest:right@127.0.0.1:{tcp_server[1]}/nowhere")
    assert isinstance(error, errors.DatabaseRefused)
    assert 'has no database "nowhere"' in str(error)


async def test_full_server_is_unavailable_and_says_what_to_raise(tcp_server: tuple[EmbeddedPostgres, int]) -> None:
    url = f"postgresql://guest:right@127.0.0.1:{tcp_server[1]}/postgres"
    async with opened(url, size=20) as db:
        told: list[str] = []

        async def use() -> None:
            try:
                await db.fetch_value("SELECT pg_sleep(0.5)")
            except errors.DatabaseUnavailable as error:
                told.append(str(error))

        async with trio.open_nursery() as nursery:
            for _ in range(20):
                nursery.start_soon(use)
        assert told
        assert all("raise max_connections" in sentence for sentence in told), told
        assert await db.fetch_value("SELECT 1") == 1


async def test_nobody_listening_is_unavailable(tmp_path: object) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    for url in (f"postgresql://a:b@127.0.0.1:{port}/d", f"postgresql://a@/d?host={tmp_path}"):
        error = await refusal(url)
        assert isinstance(error, errors.DatabaseUnavailable)
        assert "is it running" in str(error)


async def test_server_that_accepts_and_says_nothing_is_unavailable_after_the_time_out() -> None:
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        error = await refusal(f"postgresql://a:b@127.0.0.1:{mute.getsockname()[1]}/d", connect_timeout=0.2)
    assert isinstance(error, errors.DatabaseUnavailable)
    assert "did not answer within 0.2 s" in str(error)


async def test_old_server_is_refused(postgres_url: str) -> None:
    error = await refusal(postgres_url, min_version=990000)
    assert isinstance(error, errors.DatabaseRefused)
    assert "needs version 99 or newer" in str(error)


@pytest.mark.parametrize(
    "url", ["host=x dbname=y password=s3cr3t", "mysql://a:s3cr3t@b/c", "", "postgresql://a:s3cr3t@[::1/d"]
)
async def test_what_is_no_postgres_url_is_wrong_usage(url: str) -> None:
    with pytest.raises(errors.UsageError) as caught:
        async with opened(url):
            pass
    assert "s3cr3t" not in str(caught.value)
