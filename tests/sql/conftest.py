"""What tests of the SQL share: databases in which the tubes are installed already, and a look into a tube."""

from __future__ import annotations

import itertools
import os
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from urllib.parse import urlsplit, urlunsplit

import pytest

from replicad.postgres.bridge import Database, open_database, quote_ident
from replicad.postgres.programs import find_programs
from replicad.postgres.schema import script
from tests.conftest import PATIENCE

_numbers = itertools.count(1)

# A new database for each test would cost ten times as much.
CLEAN = """
DO $$
DECLARE
    folder name;
BEGIN
    PERFORM pg_terminate_backend(pid) FROM pg_stat_activity
        WHERE datname = current_database() AND state LIKE '%in transaction%' AND pid <> pg_backend_pid();
    PERFORM tube.tube_ensure_absent(tube) FROM tube.tube_registry;
    FOR folder IN SELECT nspname FROM pg_namespace
        WHERE nspname !~ '^pg_' AND nspname NOT IN ('tube', 'information_schema')
    LOOP
        EXECUTE format('DROP SCHEMA %I CASCADE', folder);
    END LOOP;
    CREATE SCHEMA public;
    DELETE FROM tube.tube_generation;  -- a fork moves the sequences far up
    PERFORM setval('tube.tube_seq', 1, false), setval('tube.tube_term_seq', 1, false);
END
$$
"""

Pod = tuple[str, int, list[int]]  # op, shard, ids


def run_psql(url: str, text: str) -> subprocess.CompletedProcess[str]:
    """Run a whole script through plain psql, as a user would; its notices are in stderr."""
    command = [str(find_programs() / "psql"), "--no-psqlrc", "-qtAX", "-v", "ON_ERROR_STOP=1", "-d", url, "-f", "-"]
    return subprocess.run(command, input=text, capture_output=True, text=True, timeout=PATIENCE, check=False)


@pytest.fixture
def psql_script() -> Callable[[str, str], str]:
    """Runs a script by psql, sees that it succeeds, and returns what it printed, notices included."""

    def run(url: str, text: str) -> str:
        done = run_psql(url, text)
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    return run


@pytest.fixture(scope="session")
def tube_url(postgres_url: str) -> Iterator[str]:
    """URL of a database with the tubes installed, shared by all tests of a run; `db` leaves it as it found it."""
    name = f"test_{os.getpid()}_tube"
    assert run_psql(postgres_url, f"CREATE DATABASE {name}").returncode == 0
    url = urlunsplit(urlsplit(postgres_url)._replace(path=f"/{name}"))
    done = run_psql(url, script("tube", "tube", "up"))
    assert done.returncode == 0, done.stderr
    yield url
    assert run_psql(postgres_url, f"DROP DATABASE {name} WITH (FORCE)").returncode == 0


@pytest.fixture
async def db(tube_url: str) -> AsyncIterator[Database]:
    """A pool of 12 connections to a database that holds nothing but the tubes' SQL, in schema `tube`."""
    async with open_database(tube_url, size=12, application_name="replicad test") as opened:
        yield opened
        await opened.execute(CLEAN)


@pytest.fixture
def take(db: Database) -> Callable[[str], Awaitable[list[Pod]]]:
    """Empties a tube and returns its pods by seq, control pods with their payload's type in place of the op."""

    async def read(tube: str) -> list[Pod]:
        rows = await db.fetch(
            f"WITH gone AS (DELETE FROM tube.{quote_ident(tube)} RETURNING *) "
            "SELECT coalesce(payload ->> 'type', op::text) AS op, shard, ids FROM gone ORDER BY seq"
        )
        return [(row["op"], row["shard"], row["ids"]) for row in rows]

    return read


@pytest.fixture
def explain(db: Database) -> Callable[[str], Awaitable[str]]:
    """The plan of a statement, one node a line."""

    async def read(statement: str) -> str:
        return "\n".join(row[0] for row in await db.fetch(f"EXPLAIN (COSTS OFF) {statement}"))

    return read
