"""What needs a session of Postgres for itself does not run behind a pooler, which shares sessions among its clients."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import trio
from adbc_driver_postgresql import dbapi

from replicad.errors import DatabaseRefused, StreamRefused
from replicad.postgres.bridge import open_database
from replicad.sharding.blocking_writer import BlockingShardedWriter
from replicad.streams.blocking_writer import BlockingWriter, next_id
from tests.conftest import PATIENCE, install, psql
from tests.poolers import PROGRAM, WHY_NOT, pgbouncer

needs_pgbouncer = pytest.mark.skipif(PROGRAM is None, reason=WHY_NOT)


@needs_pgbouncer
@pytest.mark.parametrize("mode", ["transaction", "session", "statement"])
async def test_a_pool_refuses_sessions_of_a_pooler(database_url: str, mode: str) -> None:
    with pgbouncer(database_url, mode) as url, pytest.raises(DatabaseRefused, match="Connect to Postgres itself"):
        async with open_database(url, size=1, application_name="replicad test"):
            pass


@needs_pgbouncer
async def test_a_pooler_that_refuses_our_settings_is_named_too(database_url: str) -> None:
    with (
        pgbouncer(database_url, "session", ignored="extra_float_digits") as url,
        pytest.raises(DatabaseRefused, match="Connect to Postgres itself"),
    ):
        async with open_database(url, size=1, application_name="replicad test"):
            pass


@pytest.fixture
def facts_url(database_url: str) -> str:
    """A database with a stream whose ids are reserved."""
    psql(
        database_url,
        "CREATE TABLE facts (id bigserial PRIMARY KEY)",
        "SELECT replicad.stream_add('facts', 'public.facts', 'id', method => 'reservation')",
    )
    return database_url


@needs_pgbouncer
async def test_a_writer_refuses_a_session_that_changes_under_it(facts_url: str) -> None:
    def program(url: str) -> None:
        with BlockingWriter(dbapi.connect(url), "facts") as writer, dbapi.connect(url) as other:
            with writer.get_next(), other.cursor() as cursor:
                cursor.execute("SELECT 1")  # keeps the session that was the writer's, in its transaction
                with pytest.raises(StreamRefused, match="connect it to Postgres itself"), writer.get_next():
                    pass

    with pgbouncer(facts_url, "transaction") as url:
        await trio.to_thread.run_sync(program, url)


async def test_a_writer_refuses_a_session_whose_process_is_not_the_one_that_its_driver_was_told(facts_url: str) -> None:
    class Told:
        """A connection of a driver that shows the process."""

        def __init__(self, connection: Any, pid: int) -> None:
            self.info = SimpleNamespace(backend_pid=pid)
            self.cursor, self.commit, self.close = connection.cursor, connection.commit, connection.close

    def program() -> None:
        connection = dbapi.connect(facts_url)
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_backend_pid()")
            ((pid,),) = cursor.fetchall()
        with BlockingWriter(Told(connection, pid), "facts") as writer, writer.get_next() as number:
            assert number == 1
        with pytest.raises(StreamRefused, match="connect it to Postgres itself"):
            BlockingWriter(Told(dbapi.connect(facts_url), 99_999_999), "facts")

    await trio.to_thread.run_sync(program)


@needs_pgbouncer
async def test_what_needs_one_transaction_only_works_behind_a_pooler(facts_url: str) -> None:
    install(facts_url, "sharding")
    psql(facts_url, "SELECT replicad.writer_enable('facts', 8)")

    def program(url: str) -> None:
        with (
            BlockingShardedWriter(lambda: dbapi.connect(url), "facts", "one") as writer,
            dbapi.connect(url) as connection,
        ):
            for _ in range(20):
                with writer.owning(connection, "key", wait=PATIENCE), connection.cursor() as cursor:
                    cursor.execute(f"INSERT INTO facts VALUES ({next_id(connection, 'facts')})")

    with pgbouncer(facts_url, "transaction") as url:
        await trio.to_thread.run_sync(program, url)
    assert psql(facts_url, "SELECT count(*) FROM facts") == "20"
