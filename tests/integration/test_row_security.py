"""Row security never hides a row in silence: where a policy could, nothing is read, and the stream says why."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import trio

from replicad.config.settings import DatabaseSettings
from replicad.errors import DatabaseError
from replicad.operations.doctor.checks import DATABASE_CHECKS, Level
from replicad.operations.doctor.seen import Evidence
from replicad.postgres.bridge import Database
from replicad.streams import status
from replicad.streams.registry import Registry, row_source
from tests.conftest import PATIENCE, psql
from tests.daemons import Daemon
from tests.roles import DAEMON

from .conftest import Connect

TENANTS = "CREATE POLICY tenants ON {0} USING (tenant = current_setting('app.tenant', true)) WITH CHECK (true)"
FORCED = "ALTER TABLE {0} ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY; " + TENANTS


@pytest.fixture
def team(database_url: str, postgres_url: str) -> Iterator[str]:
    """A role with a table of its own, `outbox`."""
    name = f"secured_{abs(hash(database_url)) % 10**9}"
    psql(
        database_url,
        f"CREATE ROLE {name} LOGIN; CREATE SCHEMA {name} AUTHORIZATION {name}; GRANT {name} TO {DAEMON}",
        f"SET ROLE {name}; CREATE TABLE {name}.outbox (id bigserial PRIMARY KEY, tenant text NOT NULL, body text)",
    )
    yield name
    psql(database_url, f"DROP OWNED BY {name} CASCADE")
    psql(postgres_url, f"DROP ROLE {name}")


async def refused_by_doctor(database: Database) -> bool:
    [check] = [check for check in DATABASE_CHECKS if check.name == "rights"]
    found = list(await check.run(Evidence(database, DatabaseSettings(database=""))))
    return any(one.level is Level.FAILING and "row security can hide rows" in one.text for one in found)


@pytest.mark.parametrize("mended", ["ALTER TABLE {0}.outbox NO FORCE ROW LEVEL SECURITY", "ALTER ROLE {0} BYPASSRLS"])
async def test_a_policy_that_comes_while_readers_follow_stops_the_stream_before_the_first_hidden_row(
    database: Database, database_url: str, daemon: Daemon, netcat: Connect, team: str, mended: str
) -> None:
    table = f"{team}.outbox"
    insert = f"SET ROLE {team}; SET app.tenant = 't1'; INSERT INTO {table} (tenant) VALUES ('t1'), ('t2')"
    await Registry(database).add("outbox", table, "id")
    async with netcat() as live, netcat() as late:
        await live.send("REPLICATE outbox NOW")
        await live.until("POSITION outbox master .*")
        psql(database_url, insert)
        await live.until("RDATA outbox master 2 .*")
        await database.execute(FORCED.format(table))
        psql(database_url, insert)
        got = await live.until(
            f"ERROR stream_waits: stream outbox does not move: .*row security can hide rows of {table} .*"
        )
        assert not [line for line in got if line.startswith(("RDATA", "POSITION"))]
        assert mended.format(team) in got[-1]
        shown = await status.show(database, "outbox")
        assert shown.state == "denied"
        assert (shown.position or 0) <= 2
        assert await refused_by_doctor(database)
        assert "row security" in " ".join(daemon.publisher.waiting()["outbox"].args)
        await late.send("REPLICATE outbox EARLIEST")
        await late.until("ERROR .*row.level security|ERROR .*row security.*")
        await database.execute(mended.format(team))
        got = await live.until("RDATA outbox master 4 .*")
        assert [line.split()[3] for line in got if line.startswith("RDATA")] == ["3", "4"]
    assert (await Registry(database).load_stream("outbox")).denied is None
    assert not await refused_by_doctor(database)


async def test_a_role_that_reads_a_table_of_a_superuser_under_a_policy_needs_bypassrls(
    database: Database, daemon: Daemon, netcat: Connect
) -> None:
    await database.execute("CREATE TABLE plain (id bigserial PRIMARY KEY, tenant text)")
    await database.execute("ALTER TABLE plain ENABLE ROW LEVEL SECURITY")
    await Registry(database).add("plain", "public.plain", "id")
    await database.execute("INSERT INTO plain (tenant) VALUES ('t1')")
    async with netcat() as nc:
        await nc.send("REPLICATE plain EARLIEST")
        await nc.until(f"ERROR .*ALTER ROLE {DAEMON} BYPASSRLS.*")
        try:
            await database.execute(f"ALTER ROLE {DAEMON} BYPASSRLS")
            with trio.fail_after(PATIENCE):
                while "plain" not in daemon.publisher.served or daemon.publisher.waiting():
                    await trio.sleep(0.05)
            await nc.send("REPLICATE plain EARLIEST")
            await nc.until("RDATA plain master 1 .*")
        finally:
            await database.execute(f"ALTER ROLE {DAEMON} NOBYPASSRLS")


async def test_no_read_is_filtered_by_a_policy_and_none_of_its_code_runs(database: Database, team: str) -> None:
    table = f"{team}.outbox"
    await database.execute(f"SET ROLE {team}; INSERT INTO {table} (tenant) VALUES ('t1'), ('t2'); RESET ROLE")
    added = await Registry(database).add("outbox", table, "id")
    await database.execute(FORCED.format(table))
    source = row_source(added.stream)

    async def drop(_: object) -> None: ...

    for read in (
        lambda: source.copy_range(database, 0, 10, drop),
        lambda: source.copy_range(database, 0, 1 << 40, drop),
        lambda: source.copy_blocks(database, 0, 10, drop, step=5, max_line=1000),
        lambda: source.last_tokens(database, 0, 10),
        lambda: source.earliest(database),
        lambda: source.ends(database, 0, 10),
        lambda: source.count(database, 0, 10),
    ):
        with pytest.raises(DatabaseError, match="affected by row-level security policy"):
            await read()
    assert source.reader is not None
    await database.execute(f"ALTER FUNCTION {source.reader}(oid, text, text, bigint) SET row_security = on")
    with pytest.raises(DatabaseError, match="affected by row-level security policy"):
        await source.count(database, 0, 10)
    await database.execute(f"ALTER ROLE {team} BYPASSRLS")
    assert await source.count(database, 0, 10) == 2


async def test_the_functions_for_psql_do_not_look_through_policies_either(database: Database, team: str) -> None:
    await database.execute(FORCED.format(f"{team}.outbox"))
    async with database.connection() as connection:
        await connection.execute("SET row_security = on")
        with pytest.raises(DatabaseError, match="affected by row-level security policy"):
            await connection.fetch("SELECT * FROM replicad.stream_as_owner($1::text::regclass, $2)",
                                   f"{team}.outbox", f"SELECT id::text FROM {team}.outbox")  # fmt: skip
