"""What tests of the SQL share: databases in which the tubes are installed already, and a look into a tube."""

from __future__ import annotations

import itertools
import os
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from urllib.parse import urlsplit, urlunsplit

import pytest

from replicad.postgres.bridge import Database, open_database, quote_ident
from replicad.postgres.embedded import find_programs
from replicad.postgres.schema import script

_numbers = itertools.count(1)

Pod = tuple[str, int, list[int]]  # op, shard, ids


def run_psql(url: str, text: str) -> subprocess.CompletedProcess[str]:
    """Run a whole script through plain psql, as a user would; its notices are in stderr."""
    command = [find_programs() / "psql", "--no-psqlrc", "-qtAX", "-v", "ON_ERROR_STOP=1", "-d", url, "-f", "-"]
    return subprocess.run(command, input=text, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture
def psql_script() -> Callable[[str, str], str]:
    """Runs a script by psql, sees that it succeeds, and returns what it printed, notices included."""

    def run(url: str, text: str) -> str:
        done = run_psql(url, text)
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    return run


@pytest.fixture(scope="session")
def tube_template(postgres_url: str) -> Iterator[str]:
    """Name of a database with the tube part in schema `tube`, to be copied."""
    name = f"test_{os.getpid()}_tube_template"
    assert run_psql(postgres_url, f"CREATE DATABASE {name}").returncode == 0
    done = run_psql(_in_database(postgres_url, name), script("tube", "tube", "up"))
    assert done.returncode == 0, done.stderr
    yield name
    assert run_psql(postgres_url, f"DROP DATABASE {name} WITH (FORCE)").returncode == 0


@pytest.fixture
def tube_url(postgres_url: str, tube_template: str) -> Iterator[str]:
    """URL of a fresh database with the tubes installed, dropped after the test."""
    name = f"test_{os.getpid()}_tube_{next(_numbers)}"
    assert run_psql(postgres_url, f"CREATE DATABASE {name} TEMPLATE {tube_template}").returncode == 0
    yield _in_database(postgres_url, name)
    assert run_psql(postgres_url, f"DROP DATABASE {name} WITH (FORCE)").returncode == 0


@pytest.fixture
async def db(tube_url: str) -> AsyncIterator[Database]:
    """A pool of 12 connections to a fresh database with the tubes installed."""
    async with open_database(tube_url, size=12, application_name="replicad test") as opened:
        yield opened


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


def _in_database(url: str, name: str) -> str:
    return urlunsplit(urlsplit(url)._replace(path=f"/{name}"))
