"""A stream whose ids are reserved, and a reader that trusts the horizon and checks it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count

import pytest
import trio

from replicad.positions.horizon import Horizon, Reading
from replicad.postgres import schema
from replicad.postgres.bridge import Connection, Database, open_database
from replicad.streams.registry import Method, Registry, Stream, horizon_source
from tests.conftest import PATIENCE

# True once there is no session of writer one; kills it until then.
KILL_ONE = """
SELECT count(pg_terminate_backend(pid)) = 0 FROM pg_stat_activity
WHERE application_name = 'one' AND datname = current_database() AND pid <> pg_backend_pid()
"""


async def until(db: Database, sql: str) -> None:
    """Wait for a query to become true."""
    with trio.fail_after(PATIENCE):
        while not await db.fetch_value(sql):
            await trio.sleep(0.005)


class Facts:
    """A reserved stream `facts` with an instance column, and a reader that trusts the horizon and checks it."""

    def __init__(self, db: Database, url: str, horizon: Horizon, stream: Stream) -> None:
        self.db, self.url, self.horizon, self.stream = db, url, horizon, stream
        self.position = 0
        self.rows: set[int] = set()

    async def poll(self) -> Reading:
        """Poll, read the new rows, and see that none had turned up at or below the old position."""
        reading = (await self.horizon.poll())["facts"]
        assert reading.position is not None
        found = {row["id"] for row in await self.db.fetch("SELECT id FROM facts WHERE id <= $1", reading.position)}
        late = {number for number in found - self.rows if number <= self.position}
        assert not late, f"{late} turned up at or below {self.position}"
        self.position, self.rows = reading.position, found
        return reading

    async def insert(self, *ids: int, via: Database | Connection | None = None, instance: str = "one") -> None:
        await (via or self.db).execute("INSERT INTO facts SELECT unnest($1::bigint[]), $2", list(ids), instance)

    async def spend(self, n: int) -> None:
        """Move the sequence on, as other writers do."""
        await self.db.execute("SELECT nextval('facts_id_seq') FROM generate_series(1, $1)", n)

    @asynccontextmanager
    async def transaction(self, name: str = "somebody") -> AsyncIterator[Connection]:
        """A connection in a transaction; what the test leaves open is rolled back."""
        async with self.db.connection() as connection:
            await connection.execute("SELECT set_config('application_name', $1, false)", name)
            await connection.execute("BEGIN")
            yield connection

    async def locks(self, of: str | None = None) -> int:
        """How many advisory locks there are, in all or of sessions of that name."""
        return int(
            await self.db.fetch_value(
                "SELECT count(*) FROM pg_locks l JOIN pg_database d ON d.oid = l.database"
                " LEFT JOIN pg_stat_activity a ON a.pid = l.pid"
                " WHERE l.locktype = 'advisory' AND d.datname = current_database()"
                " AND ($1::text IS NULL OR a.application_name = $1)",
                of,
            )
        )


@pytest.fixture
async def facts(database_url: str) -> AsyncIterator[Facts]:
    async with open_database(database_url, size=20, application_name="replicad test") as db:
        await schema.install(db, "stream", "replicad")
        await db.execute("CREATE TABLE facts (id bigserial PRIMARY KEY, instance_name text)")
        stream = (
            await Registry(db).add("facts", "facts", "id", instance_column="instance_name", method=Method.RESERVATION)
        ).stream
        numbers = await Registry(db).ensure_writers(stream, ["one", "two", "three"])
        # A clock on which every forced flush is due at once, so that no position waits for the next poll.
        async with Horizon(db, now=count(0, 0.1).__next__) as horizon:
            horizon.watch("facts", horizon_source(stream), published=0, writers=numbers)
            await horizon.poll()  # a value counts as given out once it has moved since the first poll
            yield Facts(db, database_url, horizon, stream)
