"""An attached table whose name leads to another table by now, and triggers that cannot run: told within seconds."""

from __future__ import annotations

import shlex
from collections.abc import Awaitable, Callable

import pytest

from replicad.postgres.bridge import Database
from replicad.tubes.untouched import TriggerLooks
from tests.commands import replicad_async
from tests.daemons import Daemon
from tests.lengths import first

from .test_tubes_contained import tubes, until_true

__all__ = ["tubes"]

REPLACED = {  # a migration after which the application writes to another table
    "renamed": "BEGIN; ALTER TABLE bad_rows RENAME TO bad_old;"
    "CREATE TABLE bad_rows (LIKE bad_old INCLUDING ALL); COMMIT",
    "moved": "CREATE SCHEMA old; ALTER TABLE bad_rows SET SCHEMA old; CREATE TABLE bad_rows (id bigint PRIMARY KEY)",
    "a partitioned one": "ALTER TABLE bad_rows RENAME TO bad_old; CREATE TABLE bad_rows (id bigint PRIMARY KEY)"
    " PARTITION BY HASH (id)",
    "a view": "ALTER TABLE bad_rows RENAME TO bad_old; CREATE VIEW bad_rows AS SELECT * FROM bad_old",
}
FAILS = {  # what makes each write of the table fail, as it is attached with the predicate `v > 0 AND f(v)`
    "the key renamed": "ALTER TABLE bad_rows RENAME COLUMN id TO number",
    "a column of the predicate dropped": "ALTER TABLE bad_rows DROP COLUMN v",
    "a column of the predicate renamed": "ALTER TABLE bad_rows RENAME COLUMN v TO w",
    "a column with another type": "ALTER TABLE bad_rows ALTER COLUMN v TYPE text",
    "a function of the predicate dropped": "DROP FUNCTION app.f(integer)",
    "the schema of a function renamed": "ALTER SCHEMA app RENAME TO app2",
}
PREDICATE = "v > 0 AND app.f(v)"


Looks = Callable[[], Awaitable[None]]


@pytest.fixture
def looked(monkeypatch: pytest.MonkeyPatch) -> Looks:
    """Waits for two whole looks of the daemon from now on: one may be under way."""
    done = 0
    look = TriggerLooks._try

    async def counted(self: TriggerLooks, db: Database) -> None:
        nonlocal done
        await look(self, db)
        done += 1

    async def wait() -> None:
        until = done + 3  # the last one ends after the reports of the second one
        await until_true(lambda: done >= until)

    monkeypatch.setattr(TriggerLooks, "_try", counted)
    return wait


async def told(daemon: Daemon) -> str:
    await until_true(lambda: daemon.troubles.why("tube", "bad"))
    return daemon.troubles.why("tube", "bad") or ""


async def follow(url: str, command: str) -> None:
    """Run a printed command word for word."""
    done = await replicad_async(*shlex.split(command)[1:], "--database", url)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("how", first(2, REPLACED))
async def test_a_table_that_took_the_name_of_an_attached_one_is_a_trouble_until_it_is_attached(
    tubes: Database, daemon: Daemon, database_url: str, how: str
) -> None:
    await tubes.execute(REPLACED[how])
    reason = await told(daemon)
    assert "public.bad_rows" in reason
    assert daemon.troubles.why("tube", "good") is None
    if how == "a view":
        return
    [attach, *_] = [part for part in reason.split("`") if part.startswith("replicad tubes attach")]
    await follow(database_url, attach)
    await until_true(lambda: daemon.troubles.why("tube", "bad") is None)
    before = await tubes.fetch_value("SELECT count(*) FROM tube.bad")
    if how != "a partitioned one":
        await tubes.execute("INSERT INTO bad_rows (id) VALUES (7000)")
        assert await tubes.fetch_value("SELECT count(*) FROM tube.bad") == before + 1


async def test_a_table_that_was_renamed_on_purpose_is_no_trouble_and_may_keep_its_new_name(
    tubes: Database, daemon: Daemon, database_url: str, looked: Looks
) -> None:
    await tubes.execute("ALTER TABLE bad_rows RENAME TO bad_old")
    await looked()
    assert daemon.troubles.why("tube", "bad") is None
    await tubes.execute("CREATE TABLE bad_rows (id bigint)")
    reason = await told(daemon)
    [_, keep] = [part for part in reason.split("`") if part.startswith("replicad tubes attach")]
    await follow(database_url, keep)
    await until_true(lambda: daemon.troubles.why("tube", "bad") is None)
    assert await tubes.fetch_value("SELECT count(*) FROM tube.tube_attachment WHERE tube = 'bad'") == 1


@pytest.mark.parametrize("how", first(2, FAILS))
async def test_triggers_that_cannot_run_are_a_trouble_that_says_why_and_its_remedy_works(
    tubes: Database, daemon: Daemon, database_url: str, how: str, looked: Looks
) -> None:
    await tubes.execute(
        "CREATE SCHEMA app; CREATE FUNCTION app.f(integer) RETURNS boolean LANGUAGE sql AS 'SELECT $1 <> 13';"
        "ALTER TABLE bad_rows ADD COLUMN v integer DEFAULT 1;"
        f"SELECT tube.tube_table_ensure_attached('bad', 'bad_rows', 0, '{PREDICATE}')"
    )
    await looked()
    assert daemon.troubles.why("tube", "bad") is None
    await tubes.execute(FAILS[how])
    reason = await told(daemon)
    assert "each write of public.bad_rows fails" in reason
    if how == "the key renamed":
        [attach, *_] = [part for part in reason.split("`") if part.startswith("replicad tubes attach")]
    else:
        [attach] = [part for part in reason.split("`") if part.startswith("replicad tubes detach")]
    await follow(database_url, attach)
    await until_true(lambda: daemon.troubles.why("tube", "bad") is None)
    key = "number" if how == "the key renamed" else "id"
    await tubes.execute(f"INSERT INTO bad_rows ({key}) VALUES (7001)")


async def test_a_look_tells_no_fault_while_somebody_only_locks_the_table(
    tubes: Database, daemon: Daemon, looked: Looks
) -> None:
    await tubes.execute(
        "ALTER TABLE bad_rows ADD COLUMN v integer;"
        "SELECT tube.tube_table_ensure_attached('bad', 'bad_rows', 0, 'v > 0')"
    )
    async with tubes.connection() as other:
        await other.execute("BEGIN; ALTER TABLE bad_rows ADD COLUMN w integer")
        await looked()
        assert daemon.troubles.why("tube", "bad") is None
        await other.execute("ROLLBACK")


GONE = {
    "dropped": "DROP TABLE p1",
    "detached": "ALTER TABLE p DETACH PARTITION p1",
    "a partition of a partition": "DROP TABLE p2a",
    "no heir any more": "ALTER TABLE heir NO INHERIT bad_rows",
}


@pytest.mark.parametrize("how", first(1, GONE))
async def test_rows_that_left_with_their_partition_are_a_trouble_until_the_table_is_backfilled(
    tubes: Database, daemon: Daemon, database_url: str, how: str, looked: Looks
) -> None:
    await tubes.execute(
        "CREATE TABLE p (id bigint, v integer) PARTITION BY RANGE (id);"
        "CREATE TABLE p1 PARTITION OF p FOR VALUES FROM (0) TO (9);"
        "CREATE TABLE p2 PARTITION OF p FOR VALUES FROM (9) TO (99) PARTITION BY RANGE (id);"
        "CREATE TABLE p2a PARTITION OF p2 FOR VALUES FROM (9) TO (50);"
        "CREATE TABLE heir () INHERITS (bad_rows);"
        "SELECT tube.tube_table_ensure_attached('bad', 'p', 7), tube.tube_table_ensure_attached('bad', 'bad_rows', 0);"
        "INSERT INTO p VALUES (1, 1), (10, 1); INSERT INTO heir VALUES (8000)"
    )
    await looked()
    assert daemon.troubles.why("tube", "bad") is None
    await tubes.execute(GONE[how])
    reason = await told(daemon)
    table, shards = ("public.bad_rows", "0") if how == "no heir any more" else ("public.p", "7")
    assert f"partitions of {table} were dropped or detached" in reason
    command = reason[reason.index("replicad tubes backfill") :]
    assert command == f"replicad tubes backfill bad --shard {shards}"
    if how == "detached":
        roots = await tubes.fetch("SELECT root::text FROM tube.tube_attachment WHERE tbl = 'p1'::regclass")
        assert [row["root"] for row in roots] == ["p1"], "it is attached by itself, and can be detached"
    await follow(database_url, command)
    await until_true(lambda: daemon.troubles.why("tube", "bad") is None)
