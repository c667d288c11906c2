"""A stream of changes that one role has added and the daemon's role looks after: what it renews, what it reports."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterator

import pytest

from replicad.daemon.troubles import Troubles
from replicad.errors import StreamRefused
from replicad.postgres.bridge import Database, open_database
from replicad.streams.registry import RecordedChanges, Registry
from replicad.streams.serving.intervals import StreamIntervals
from replicad.streams.serving.recording import Recording
from tests.conftest import psql
from tests.roles import DAEMON, as_daemon

T = "CREATE TABLE s.t (id bigint PRIMARY KEY, n integer)"


@pytest.fixture
async def daemon(database: Database, database_url: str) -> AsyncIterator[Registry]:
    """The registry, for the role of the daemon."""
    async with open_database(as_daemon(database_url), size=1, application_name="daemon") as opened:
        yield Registry(opened)


@pytest.fixture
def schema(database_url: str, postgres_url: str) -> Iterator[str]:
    """A schema of roles of their own: `teammate`, of which the daemon's role is a member, and `stranger`."""
    roles = ("teammate", "stranger")
    psql(database_url, "CREATE SCHEMA s", *(f"CREATE ROLE {r}; GRANT ALL ON SCHEMA s TO {r}" for r in roles))
    psql(database_url, f"GRANT teammate TO {DAEMON}")
    yield "s"
    psql(database_url, *(f"DROP OWNED BY {r} CASCADE" for r in roles))
    psql(postgres_url, *(f"DROP ROLE {r}" for r in roles))


async def renewed(db: Database) -> bool:
    """Whether the trigger function knows the new column."""
    found: bool = await db.fetch_value("SELECT prosrc LIKE '%more%' FROM pg_proc WHERE proname = 'change_1'")
    return found


async def last_row(db: Database) -> str:
    row: str = await db.fetch_value('SELECT "row"::text FROM replicad.change_1 ORDER BY id DESC LIMIT 1')
    return row


@pytest.mark.parametrize("owner", ["postgres", "teammate"])
async def test_the_daemon_renews_the_function_of_a_stream_that_a_superuser_has_added(
    database: Database, daemon: Registry, schema: str, owner: str
) -> None:
    await database.execute(f"SET ROLE {owner}; {T}; RESET ROLE")
    await Registry(database).add_changes("t", "s.t", RecordedChanges())
    await database.execute("ALTER TABLE s.t ADD COLUMN more text; INSERT INTO s.t VALUES (1, 2, 'x')")
    assert await daemon.look_after_changes() == []
    assert await renewed(database)
    await database.execute("WITH a AS (UPDATE s.t SET n = 3 RETURNING id) INSERT INTO s.t SELECT 2, 3, 'y' FROM a")
    assert await last_row(database) in ('{"id":1,"n":3,"more":"x"}', '{"id":2,"n":3,"more":"y"}')


@pytest.mark.parametrize(
    ("sql", "where", "remedy"),
    [
        (f"SET ROLE stranger; {T}; RESET ROLE", None, f"run: GRANT stranger TO {DAEMON}; or run as a superuser: "),
        (f"{T}; REVOKE SELECT ON s.t FROM {DAEMON}", None, "recorded, but .* run as a superuser: "),
        (T, "t.n IS DISTINCT FROM (SELECT 7)", "recorded, but .* run as a superuser: "),
    ],
)
async def test_what_the_daemon_may_not_renew_is_recorded_and_reported_with_the_remedy(
    database: Database, daemon: Registry, schema: str, sql: str, where: str | None, remedy: str
) -> None:
    await database.execute(sql)
    superuser = Registry(database)
    await superuser.add_changes("t", "s.t", RecordedChanges(where=where))
    assert await daemon.look_after_changes() == []
    await database.execute("ALTER TABLE s.t ADD COLUMN more text; INSERT INTO s.t VALUES (1, 2, 'x')")
    [(name, code, problem)] = await daemon.look_after_changes()
    assert (name, code) == ("t", "denied"), "nothing is missed"
    assert re.search(rf"change_1\(\) belongs to role .*{remedy}SELECT replicad.stream_changes_look\(\)", problem)
    assert await last_row(database) == '{"id":1,"n":2,"more":"x"}'
    await database.execute("SELECT replicad.stream_changes_look()")
    assert await renewed(database)
    assert await daemon.look_after_changes() == []


async def test_a_partition_that_the_daemon_may_not_follow_is_reported_with_the_remedy(
    database: Database, daemon: Registry, schema: str
) -> None:
    await database.execute(f"{T} PARTITION BY RANGE (id)")
    await Registry(database).add_changes("t", "s.t", RecordedChanges())
    await database.execute("CREATE TABLE s.t_1 PARTITION OF s.t DEFAULT")
    [(_, code, problem)] = await daemon.look_after_changes()
    assert code == "changes_missed"
    assert "triggers of replicad on s.t_1 are missing" in problem
    assert "run as a superuser: SELECT replicad.stream_changes_look()" in problem
    await database.execute("SELECT replicad.stream_changes_look()")
    assert await daemon.look_after_changes() == []


async def test_a_table_that_gets_another_owner_is_recorded_with_the_rights_of_that_owner(
    database: Database, daemon: Registry, schema: str
) -> None:
    await database.execute(f"SET ROLE teammate; {T}; RESET ROLE")
    await Registry(database).add_changes("t", "s.t", RecordedChanges())
    await database.execute("ALTER TABLE s.t OWNER TO postgres")
    remedy = f"GRANT SELECT ON s.t TO {DAEMON}"
    [(_, code, problem)] = await daemon.look_after_changes()
    assert (code, problem.endswith(remedy)) == ("denied", True), problem
    await database.execute(remedy)
    assert await daemon.look_after_changes() == []
    await database.execute("INSERT INTO s.t VALUES (1, 2)")
    await database.execute("INSERT INTO s.t VALUES (1, 2) ON CONFLICT (id) DO UPDATE SET n = 3")
    runner = await database.fetch_value("SELECT proowner::regrole::text FROM pg_proc WHERE proname = 'change_1'")
    assert runner == DAEMON
    assert await last_row(database) == '{"id":1,"n":3}'


async def test_a_stream_that_the_role_may_not_remove_says_who_can(
    database: Database, daemon: Registry, schema: str
) -> None:
    await database.execute(f"SET ROLE stranger; {T}; RESET ROLE")
    await Registry(database).add_changes("t", "s.t", RecordedChanges())
    with pytest.raises(StreamRefused, match=r"cannot remove what records the changes of s\.t") as refused:
        await daemon.remove("t")
    assert f"run: GRANT stranger TO {DAEMON}; or run as a superuser: SELECT replicad.stream_remove('t')" in str(
        refused.value
    )


async def test_a_lock_that_one_look_meets_is_no_trouble_and_one_that_two_meet_is(
    database: Database, daemon: Registry, schema: str
) -> None:
    await database.execute(f"{T} PARTITION BY RANGE (id)")
    await Registry(database).add_changes("t", "s.t", RecordedChanges())
    troubles = Troubles()
    recording = Recording(daemon, troubles, lambda: True, StreamIntervals())
    await database.execute("CREATE TABLE s.t_1 PARTITION OF s.t DEFAULT")
    await database.execute("ALTER TABLE s.t OWNER TO teammate; ALTER TABLE s.t_1 OWNER TO teammate")
    async with database.connection() as holder:
        await holder.execute("BEGIN; LOCK TABLE s.t_1")
        for seen in (False, True):
            recording.report(await daemon.look_after_changes())
            assert (troubles.why("stream", "t") is not None) == seen
        await holder.execute("ROLLBACK")
    recording.report(await daemon.look_after_changes())
    assert troubles.why("stream", "t") is None
