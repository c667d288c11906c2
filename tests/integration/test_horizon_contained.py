"""What is wrong with one watched table, sequence or positions table concerns that stream and delays no other."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio

from replicad.errors import DatabaseError
from replicad.positions.horizon import HolderKind, Horizon, LockSource, Reading, TableSource
from replicad.positions.polled import LOCK_TIMEOUT
from replicad.postgres.bridge import Connection, Database, load_sql, open_database
from replicad.sqlstates import LOCKED, means

pytestmark = pytest.mark.postgres

ROLE = "horizon_reader"
OTHERS = 50  # milliseconds that locked things may add to one poll for the others


@pytest.fixture
async def reader(database_url: str, database: Database) -> AsyncIterator[Database]:
    """A pool of a role that may read what is granted to it; two streams `a` and `b`, each in a schema of its own."""
    await database.execute(f"DROP ROLE IF EXISTS {ROLE}; CREATE ROLE {ROLE} LOGIN PASSWORD 'x'")
    for name in ("a", "b"):
        await database.execute(
            f"CREATE SCHEMA {name}; CREATE TABLE {name}.t (id bigserial PRIMARY KEY);"
            f"CREATE TABLE {name}.p (stream_name text, instance_name text, stream_id bigint);"
            f"INSERT INTO {name}.p VALUES ('s', 'w', 7);"
            f"GRANT USAGE ON SCHEMA {name} TO {ROLE}; GRANT SELECT ON ALL TABLES IN SCHEMA {name} TO {ROLE};"
            f"GRANT SELECT ON ALL SEQUENCES IN SCHEMA {name} TO {ROLE}"
        )
    url = database_url.replace("postgres@", f"{ROLE}@", 1)
    async with open_database(url, size=2, application_name="replicad") as db:
        yield db
    await database.execute(f"DROP OWNED BY {ROLE}; DROP ROLE {ROLE}")


async def oid(db: Database, name: str) -> int:
    return int(await db.fetch_value("SELECT $1::text::regclass::oid::bigint", name))


async def watch(horizon: Horizon, db: Database, name: str, schema: str) -> None:
    horizon.watch(name, LockSource(await oid(db, f"{schema}.t"), await oid(db, f"{schema}.t_id_seq")))


async def watch_positions(horizon: Horizon, db: Database, name: str, schema: str) -> None:
    horizon.watch(name, TableSource(await oid(db, f"{schema}.p"), "s"))


class Clock:
    """Runs fast enough that everything that is due every few seconds is due at every poll."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 0.1
        return self.now


async def polled(horizon: Horizon, until: Callable[[dict[str, Reading]], bool]) -> dict[str, Reading]:
    with trio.fail_after(60):
        while not until(readings := dict(await horizon.poll())):
            await trio.sleep(0.001)
    return readings


TAKEN = {
    "the sequence": ("REVOKE ALL ON SEQUENCE a.t_id_seq FROM", "GRANT SELECT ON SEQUENCE a.t_id_seq TO"),
    "the table": ("REVOKE ALL ON a.t FROM", "GRANT SELECT ON a.t TO"),
    "the schema": ("REVOKE USAGE ON SCHEMA a FROM", "GRANT USAGE ON SCHEMA a TO"),
}


@pytest.mark.parametrize("used", [True, False])
@pytest.mark.parametrize("what", TAKEN)
async def test_rights_that_are_taken_away_refuse_that_stream_at_once_with_the_grant_that_mends_it(
    reader: Database, database: Database, what: str, used: bool
) -> None:
    take, grant = TAKEN[what]
    async with Horizon(reader, now=Clock()) as horizon:
        await watch(horizon, database, "a", "a")
        await watch(horizon, database, "b", "b")
        if used:
            await database.execute("INSERT INTO a.t DEFAULT VALUES; INSERT INTO b.t DEFAULT VALUES")
        await polled(horizon, lambda found: all(one.position == used for one in found.values()))
        await database.execute(f"{take} {ROLE}")
        await database.execute("INSERT INTO a.t DEFAULT VALUES; INSERT INTO b.t DEFAULT VALUES")
        readings = await horizon.poll()
        if what == "the schema":  # positions are read by number; it is noticed with the next look
            readings = await polled(horizon, lambda found: found["a"].refused is not None)
        assert f"{grant} {ROLE}" in str(readings["a"].refused)
        readings = await polled(horizon, lambda found: found["b"].position == used + 1)
        assert readings["b"].refused is None
        await database.execute(f"{grant} {ROLE}")
        readings = await polled(horizon, lambda found: found["a"].refused is None)
        await polled(horizon, lambda found: found["a"].position == used + 1)


@pytest.mark.parametrize("take", ["REVOKE ALL ON a.p FROM", "REVOKE USAGE ON SCHEMA a FROM"])
async def test_rights_on_a_positions_table_that_are_taken_away_refuse_its_stream_only(
    reader: Database, database: Database, take: str
) -> None:
    async with Horizon(reader, now=Clock()) as horizon:
        await watch_positions(horizon, database, "a", "a")
        await watch_positions(horizon, database, "b", "b")
        await polled(horizon, lambda found: all(one.position == 7 for one in found.values()))
        await database.execute(f"{take} {ROLE}")
        await database.execute("UPDATE b.p SET stream_id = 8")
        readings = await polled(horizon, lambda found: found["b"].position == 8)
        assert "GRANT" in str(readings["a"].refused)
        assert readings["b"].refused is None
        await database.execute(
            take.replace("REVOKE ALL", "GRANT SELECT").replace("REVOKE", "GRANT").replace("FROM", f"TO {ROLE}")
        )
        await polled(horizon, lambda found: found["a"].refused is None)


class Failing:
    """Stands in for a Database: a statement about a sequence that is in `bad` fails as Postgres might fail it.

    `waits`: how many statements have waited for a lock until their time was over.
    """

    def __init__(self, db: Database) -> None:
        self._db, self.target, self.fence, self.bad, self.waits = db, db.target, db.fence, set[int](), 0

    @asynccontextmanager
    async def connection(self, *, leader: bool) -> AsyncIterator[Any]:
        async with self._db.connection(leader=leader) as connection:
            yield FailingConnection(connection, self)


class FailingConnection:
    def __init__(self, connection: Connection, db: Failing) -> None:
        self._connection, self._db = connection, db

    async def fetch(self, sql: str, *args: Any) -> Any:
        if sql == load_sql("horizon_last_values") and self._db.bad & set(args[0]):
            raise DatabaseError("could not read block 0 of the sequence", sqlstate="XX001")
        try:
            return await self._connection.fetch(sql, *args)
        except DatabaseError as error:
            self._db.waits += means(error.sqlstate, LOCKED)
            raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)


async def test_any_error_about_one_sequence_refuses_that_stream_until_it_is_mended(database: Database) -> None:
    db = Failing(database)
    async with Horizon(db, now=Clock()) as horizon:  # type: ignore[arg-type]
        for name in ("a", "b", "c"):
            await database.execute(f"CREATE SCHEMA {name}; CREATE TABLE {name}.t (id bigserial)")
            await watch(horizon, database, name, name)
        await polled(horizon, lambda found: len(found) == 3)
        db.bad.add(await oid(database, "b.t_id_seq"))
        for n in (1, 2, 3):
            await database.execute("INSERT INTO a.t DEFAULT VALUES; INSERT INTO c.t DEFAULT VALUES")
            readings = await polled(horizon, lambda found, n=n: found["a"].position == found["c"].position == n)
            assert "could not read block 0" in str(readings["b"].refused)
        db.bad.clear()
        await database.execute("INSERT INTO b.t DEFAULT VALUES")
        await polled(horizon, lambda found: found["b"].refused is None and found["b"].position == 1)


async def lock_all(connection: Connection, names: list[str]) -> None:
    """Locks against every reader, in a transaction that stays open."""
    await connection.execute("BEGIN")
    for name in names:
        await connection.execute(
            f"ALTER SEQUENCE {name}.t_id_seq MINVALUE 0; LOCK TABLE {name}.t, {name}.p IN ACCESS EXCLUSIVE MODE"
        )


async def test_many_locked_sequences_and_tables_delay_one_poll_by_at_most_50_ms_in_sum(database: Database) -> None:
    names = [f"s{n}" for n in range(12)]
    db = Failing(database)
    async with Horizon(db) as horizon, database.connection() as locker:  # type: ignore[arg-type]
        for name in ("free", *names):
            await database.execute(
                f"CREATE SCHEMA {name}; CREATE TABLE {name}.t (id bigserial);"
                f"CREATE TABLE {name}.p (stream_name text, instance_name text, stream_id bigint)"
            )
            await watch(horizon, database, name, name)
            await watch_positions(horizon, database, f"{name}_p", name)
        await polled(horizon, lambda found: len(found) == 26)
        await lock_all(locker, names)
        most = 0
        for _ in range(60):
            await database.execute("INSERT INTO free.t DEFAULT VALUES")
            horizon._inspect_at = 0.0  # every look is due at every poll
            before = db.waits
            await horizon.poll()
            most = max(most, db.waits - before)
        readings = await polled(horizon, lambda found: found["free"].position == 60)
        kinds = {
            kind: [name for name, one in readings.items() if one.held_by and one.held_by.kind == kind]
            for kind in HolderKind
        }
        assert sorted(kinds[HolderKind.SEQUENCE_LOCK]) == sorted(names)
        assert sorted(kinds[HolderKind.TABLE_LOCK]) == sorted(f"{name}_p" for name in names)
        assert 0 < most * int(LOCK_TIMEOUT.removesuffix("ms")) <= OTHERS
        await locker.execute("ROLLBACK")
        await polled(horizon, lambda found: all(one.held_by is None for one in found.values()))


async def test_locks_that_come_and_go_between_two_looks_stop_nobody_for_good(database: Database) -> None:
    async with Horizon(database) as horizon:
        for name in ("free", "busy"):
            await database.execute(
                f"CREATE SCHEMA {name}; CREATE TABLE {name}.t (id bigserial);"
                f"CREATE TABLE {name}.p (stream_name text, instance_name text, stream_id bigint)"
            )
            await watch(horizon, database, name, name)
        await polled(horizon, lambda found: len(found) == 2)

        async def flicker() -> None:
            async with database.connection() as connection:
                while True:
                    await lock_all(connection, ["busy"])
                    await trio.sleep(0.02)
                    await connection.execute("ROLLBACK")

        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(flicker)
                for n in range(1, 100):
                    await database.execute("INSERT INTO free.t DEFAULT VALUES")
                    await polled(horizon, lambda found, n=n: found["free"].position == n)
                nursery.cancel_scope.cancel()


async def test_a_session_whose_pid_is_another_ones_by_now_is_not_taken_for_ours(
    database: Database, database_url: str
) -> None:
    """The pid alone would leave out whoever gets it next; so would a name that an application chose."""
    await database.execute("CREATE SCHEMA a; CREATE TABLE a.t (id bigserial)")
    async with open_database(database_url, size=1, application_name="replicad ack", identify=True) as stranger:
        [theirs] = stranger.backends()
        stale = [type(theirs)(theirs.pid, theirs.started.replace(year=2000))]
        async with Horizon(database, own_backends=lambda: stale) as horizon:
            source = LockSource(await oid(database, "a.t"), await oid(database, "a.t_id_seq"), own_deletes=True)
            horizon.watch("a", source)
            await polled(horizon, lambda found: found["a"].position == 0)
            async with stranger.connection() as connection, connection.transaction():
                await connection.execute("INSERT INTO a.t DEFAULT VALUES")
                await database.execute("INSERT INTO a.t DEFAULT VALUES")
                for _ in range(3):
                    assert (await horizon.poll())["a"].position == 0
            await polled(horizon, lambda found: found["a"].position == 2)


async def test_our_own_sessions_count_on_tables_that_they_do_not_only_delete_from(
    database: Database, database_url: str
) -> None:
    """A trigger on DELETE may write what was acknowledged into a table that is a stream."""
    await database.execute(
        "CREATE SCHEMA a; CREATE TABLE a.t (id bigserial); CREATE TABLE tube_table (seq bigserial);"
        "CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN INSERT INTO a.t DEFAULT VALUES; RETURN OLD; END $$;"
        "CREATE TRIGGER note BEFORE DELETE ON tube_table FOR EACH ROW EXECUTE FUNCTION note();"
        "INSERT INTO tube_table DEFAULT VALUES"
    )
    async with (
        open_database(database_url, size=1, application_name="x", identify=True) as own,
        Horizon(database, own_backends=own.backends) as horizon,
    ):
        await watch(horizon, database, "a", "a")
        table, sequence = await oid(database, "tube_table"), await oid(database, "tube_table_seq_seq")
        source = LockSource(table, sequence, own_deletes=True, id_column="seq")
        horizon.watch("tube", source)
        await polled(horizon, lambda found: found.keys() == {"a", "tube"} and found["tube"].position == 1)
        async with own.connection() as connection, connection.transaction():
            await connection.execute("DELETE FROM tube_table")
            await database.execute("INSERT INTO a.t DEFAULT VALUES; INSERT INTO tube_table DEFAULT VALUES")
            readings = await polled(horizon, lambda found: found["tube"].position == 2)
            assert readings["a"].position == 0
        await polled(horizon, lambda found: found["a"].position == 2)
