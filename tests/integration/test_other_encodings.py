"""Databases whose encoding takes every byte, so that a text in them need not be UTF-8."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import pytest
import trio

from replicad.config.settings import ServerSettings
from replicad.postgres.bridge import Connection, Database, load_sql, open_database
from replicad.streams.registry import Registry
from tests.conftest import PATIENCE, install, psql
from tests.daemons import open_daemon
from tests.roles import ROLES, as_daemon

from .conftest import netcat_to

# A comment of 'ä's in LATIN1, so that a query of more than 200 bytes is no UTF-8 wherever it is cut.
COMMENT = f"/* {'ä' * 300} */"


@pytest.fixture
def bytes_url(postgres_url: str) -> Iterator[str]:
    name = f"bytes_{os.getpid()}"
    psql(postgres_url, f"CREATE DATABASE {name} ENCODING 'SQL_ASCII' LOCALE 'C' TEMPLATE template0")
    url = urlunsplit(urlsplit(postgres_url)._replace(path=f"/{name}"))
    try:
        psql(url, ROLES)
        install(as_daemon(url))
        yield url
    finally:
        with suppress(AssertionError):
            psql(url, "ROLLBACK PREPARED 'left'")
        psql(postgres_url, f"DROP DATABASE {name} WITH (FORCE)")


async def begin(connection: Connection, statement: str) -> None:
    """Leave a transaction open whose last query is no UTF-8."""
    await connection.execute("SET client_encoding = 'LATIN1'")
    await connection.execute("BEGIN")
    await connection.execute(f"{COMMENT} {statement}")


@pytest.fixture
async def db(bytes_url: str) -> Any:
    async with open_database(bytes_url, size=4, application_name="replicad test") as db:
        await db.execute("CREATE TABLE held (id bigserial PRIMARY KEY, body text)")
        await db.execute("CREATE TABLE calm (id bigserial PRIMARY KEY, body text)")
        await Registry(db).add("held", "public.held", "id")
        await Registry(db).add("calm", "public.calm", "id")
        yield db


@pytest.mark.parametrize(
    "statement", ["INSERT INTO held (body) VALUES ('x')", "ALTER SEQUENCE held_id_seq MAXVALUE 1000000"]
)
async def test_a_query_that_is_not_utf_8_stops_no_other_stream(
    db: Database, bytes_url: str, settings: ServerSettings, statement: str
) -> None:
    async with open_daemon(settings, bytes_url) as daemon, netcat_to(daemon) as reader:
        await reader.send("REPLICATE")
        await reader.until("POSITION .*")
        await reader.until("POSITION .*")
        async with db.connection() as connection:
            await begin(connection, statement)
            with trio.fail_after(PATIENCE):
                for _ in range(2):
                    await db.execute("INSERT INTO calm (body) VALUES ('y')")
                    await reader.until("RDATA calm .*")
        assert not any(trouble.kind in ("service", "database") for trouble in daemon.troubles.current())


async def test_a_table_that_is_locked_by_such_a_query_is_named_by_it(db: Database, bytes_url: str) -> None:
    async with db.connection() as connection:
        await begin(connection, "LOCK TABLE held IN ACCESS EXCLUSIVE MODE")
        found = await db.fetch_row(load_sql("stream_lockers"), [await db.fetch_value("SELECT 'held'::regclass::oid")])
        assert found is not None
        assert set(found["query"][3:]) == {"?"}
