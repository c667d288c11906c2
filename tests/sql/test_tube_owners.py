"""Tubes of which a superuser has attached tables: the daemon's role changes and detaches them, or learns who may."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from replicad.errors import ReplicadError
from replicad.postgres.bridge import Database, open_database
from tests.conftest import psql
from tests.roles import DAEMON, as_daemon


@pytest.fixture
def teammate(database_url: str, postgres_url: str) -> Iterator[str]:
    """A role of which the daemon's role is a member, with a schema of its own."""
    psql(
        database_url, "CREATE ROLE teammate; CREATE SCHEMA s_0001 AUTHORIZATION teammate", f"GRANT teammate TO {DAEMON}"
    )
    yield "teammate"
    psql(database_url, "DROP OWNED BY teammate CASCADE")
    psql(postgres_url, "DROP ROLE teammate")


async def attach(db: Database, owner: str) -> None:
    """As a superuser: a table of this owner, in tube a with a predicate."""
    await db.execute(f"SET ROLE {owner}; CREATE TABLE s_0001.t (id bigint PRIMARY KEY, n integer); RESET ROLE")
    await db.execute(
        "SELECT tube.tube_ensure_exists('a', 2), tube.tube_ensure_exists('b', 2);"
        "SELECT tube.tube_table_ensure_attached('a', 's_0001.t', predicate => 'n > 5')"
    )


async def test_the_daemons_role_attaches_and_detaches_a_table_that_a_superuser_has_attached(
    database: Database, database_url: str, teammate: str
) -> None:
    await attach(database, teammate)
    async with open_database(as_daemon(database_url), size=1, application_name="daemon") as daemon:
        await daemon.execute("SELECT tube.tube_table_ensure_attached('b', 's_0001.t')")
        await database.execute("INSERT INTO s_0001.t VALUES (1, 7); SELECT s_0001.t_touch('{1}')")
        await daemon.execute("SELECT tube.tube_table_ensure_detached('a', 's_0001.t')")
        await daemon.execute("SELECT tube.tube_table_ensure_detached('b', 's_0001.t')")
    assert await database.fetch_value("SELECT array_agg(ids::text ORDER BY seq) FROM tube.b") == ["{1}", "{1}"]
    assert await database.fetch_value("SELECT to_regproc('s_0001.t_touch')") is None


async def test_a_function_of_a_superuser_that_the_daemons_role_would_replace_says_who_can(
    database: Database, database_url: str, teammate: str
) -> None:
    await attach(database, "postgres")
    async with open_database(as_daemon(database_url), size=1, application_name="daemon") as daemon:
        with pytest.raises(ReplicadError, match=r"belongs to role postgres, .* do the same as a superuser"):
            await daemon.execute("SELECT tube.tube_ensure_exists('a', 3, predicate => 'n < 100')")
    await database.execute("SELECT tube.tube_ensure_exists('a', 3, predicate => 'n < 100')")
