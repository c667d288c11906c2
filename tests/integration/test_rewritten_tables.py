"""A table that is rewritten while it is read: no row is taken for absent. On each PostgreSQL that this machine has.

Commands such as ALTER TABLE ... TYPE write each row anew. A statement whose snapshot is older sees none of the new
rows; and COPY takes its snapshot before it waits for the lock of such a command.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import pytest
import trio

from replicad.postgres.bridge import Database, open_database
from replicad.postgres.statements import call_value
from replicad.protocol.tokens import Cursor
from replicad.streams.chunks import Chunk
from replicad.streams.registry import Registry, row_source
from replicad.streams.rows import FEW, RowSource
from replicad.tubes.commands import Part
from replicad.tubes.pods import PodBook, PodReadBounds, Span
from tests.conftest import PATIENCE, install, psql
from tests.lengths import first
from tests.other_servers import PROGRAMS, other_server

from .conftest import Connect

ROWS = 2 * FEW
ALL = 1 << 40

Read = Callable[[], Awaitable[Any]]


@pytest.fixture(
    scope="module",
    params=first(1, [None, *PROGRAMS]),
    ids=lambda programs: "embedded" if programs is None else str(programs),
)
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    """URL of a database with streams and tubes, on a server of each version that there is, of a superuser."""
    with ExitStack() as stack:
        if request.param is None:
            server: str = request.getfixturevalue("postgres_url")
        else:
            server = stack.enter_context(other_server(request.param))
        name = f"rewritten_{os.getpid()}"
        psql(server, f"CREATE DATABASE {name}")
        found = urlunsplit(urlsplit(server)._replace(path=f"/{name}"))
        install(found)
        yield found
        psql(server, f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture
async def db(url: str) -> AsyncIterator[Database]:
    """A pool on that database, which has no stream before and after a test."""
    async with open_database(url, size=32, application_name="test") as opened:
        yield opened
        await opened.execute("SELECT replicad.stream_remove(name) FROM replicad.stream")
        await opened.execute("DROP TABLE IF EXISTS events CASCADE; DROP TABLE IF EXISTS fresh CASCADE")


@pytest.fixture
async def owner(db: Database) -> AsyncIterator[str]:
    """A role that owns tables and nothing else."""
    name = f"rewriter_{os.getpid()}"
    await db.execute(f"CREATE ROLE {name}; GRANT CREATE ON SCHEMA public TO {name}")
    yield name
    await db.execute(f"DROP OWNED BY {name} CASCADE; DROP ROLE {name}")


async def while_rewritten(db: Database, rewrite: str, reads: Mapping[str, Read]) -> dict[str, Any]:
    """What each read finds that begins while a session has rewritten a table, and waits until this is committed."""
    found: dict[str, Any] = {}

    async def run(name: str, read: Read) -> None:
        found[name] = await read()

    with trio.fail_after(PATIENCE):
        async with trio.open_nursery() as nursery, db.connection() as other:
            async with other.transaction():
                await other.execute(rewrite)
                for name, read in reads.items():
                    nursery.start_soon(run, name, read)
                while await db.fetch_value(
                    "SELECT count(DISTINCT pid) FROM pg_locks WHERE NOT granted AND locktype = 'relation' "
                    "AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
                ) < len(reads):
                    await trio.sleep(0.005)
                assert not found, "it did not wait"
    return found


PLAIN = """
    CREATE TABLE events (id bigserial PRIMARY KEY, writer text, v int);
    INSERT INTO events (writer, v) SELECT 'w' || n % 3, n FROM generate_series(1, {rows}) n;
"""
PARTITIONS = """
    CREATE TABLE events (id bigserial PRIMARY KEY, writer text, v int) PARTITION BY RANGE (id);
    CREATE TABLE events_1 PARTITION OF events FOR VALUES FROM (0) TO (300);
    CREATE TABLE events_2 PARTITION OF events FOR VALUES FROM (300) TO (100000);
    INSERT INTO events (writer, v) SELECT 'w' || n % 3, n FROM generate_series(1, {rows}) n;
"""
HEIRS = """
    CREATE TABLE events (id bigserial PRIMARY KEY, writer text, v int);
    CREATE TABLE events_1 (PRIMARY KEY (id)) INHERITS (events);
    INSERT INTO events_1 (writer, v) SELECT 'w' || n % 3, n FROM generate_series(1, {rows}) n;
"""
FILLED_AGAIN = """
    CREATE TEMP TABLE kept ON COMMIT DROP AS SELECT * FROM {0}; TRUNCATE ONLY {0}; INSERT INTO {0} SELECT * FROM kept
"""
SWAPPED = """
    CREATE TABLE fresh (LIKE events_1 INCLUDING ALL); INSERT INTO fresh SELECT * FROM events_1;
    ALTER TABLE events DETACH PARTITION events_1; DROP TABLE events_1;
    ALTER TABLE events ATTACH PARTITION fresh FOR VALUES FROM (0) TO (300)
"""
SUBSELECT = "to_json((SELECT e.v FROM public.events e WHERE e.id = t.id))"
REWRITES = {
    "type": (PLAIN, "ALTER TABLE events ALTER COLUMN v TYPE bigint"),
    "type of partitions": (PARTITIONS, "ALTER TABLE events ALTER COLUMN v TYPE bigint"),
    "one heir": (HEIRS, FILLED_AGAIN.format("events_1")),
    "partition swapped": (PARTITIONS, SWAPPED),
    "volatile default": (PLAIN, "ALTER TABLE events ADD COLUMN r float8 DEFAULT random()"),
    "generated": (PLAIN, "ALTER TABLE events ADD COLUMN g int GENERATED ALWAYS AS (v + 1) STORED"),
    "filled again": (PLAIN, FILLED_AGAIN.format("events")),
    "cluster": (PLAIN, "CLUSTER events USING events_pkey"),
    "one partition": (PARTITIONS, FILLED_AGAIN.format("events_1")),
}


def reads_of(db: Database, source: RowSource) -> dict[str, Read]:
    """Every read of a stream's table; those of rows give the ids."""

    def copied(read: Callable[..., Awaitable[int]], *args: Any, **named: Any) -> Read:
        async def ids() -> list[int]:
            data: list[bytes] = []

            async def keep(chunk: Chunk) -> None:
                data.append(chunk.data)

            rows = await read(db, *args, keep, **named)
            found = [int(line.split()[3]) for line in b"".join(data).splitlines()]
            assert rows == len(found)
            return found

        return ids

    spans = {"w0": (0, ALL), "w1": (5, ALL)}
    return {
        "range": copied(source.copy_range, 0, ALL),
        "limited": copied(source.copy_range, 0, ALL, limit=100),
        "few": copied(source.copy_range, 0, 20),
        "vector": copied(source.copy_vector, spans, others=(9, ALL)),
        "blocks": copied(source.copy_blocks, 0, ROWS, step=50, max_line=1000),
        "subselect": copied(replace(source, row=SUBSELECT).copy_range, 0, ALL),
        "last tokens": lambda: source.last_tokens(db, 0, ALL),
        "last token": lambda: replace(source, instance_column=None).last_tokens(db, 0, ALL),
        "earliest": lambda: source.earliest(db),
        "ends": lambda: source.ends(db, 0, ALL),
        "count": lambda: source.count(db, 0, ALL),
    }  # fmt: skip


@pytest.mark.parametrize("kind", first(4, REWRITES))
async def test_each_read_of_a_stream_that_waits_for_a_rewrite_finds_all_rows(
    db: Database, owner: str, kind: str
) -> None:
    """Reads of our own role, and those that a reader does as the owner of the table."""
    layout, rewrite = REWRITES[kind]
    await db.execute(f"SET ROLE {owner}; {layout.format(rows=ROWS)}; RESET ROLE")
    added = await Registry(db).add("events", "public.events", "id", instance_column="writer")
    as_owner = replace(row_source(added.stream), unique_ids=True)
    assert as_owner.reader is not None
    own = replace(as_owner, reader=None)
    assert (own.lock is None) == (layout is PARTITIONS)
    reads = {f"{name} as {who}": read for who, source in (("owner", as_owner), ("us", own))
             for name, read in reads_of(db, source).items()}  # fmt: skip
    expected = {name: await read() for name, read in reads.items()}
    assert len(expected["range as us"]) == ROWS
    assert await while_rewritten(db, rewrite, reads) == expected


async def test_a_copy_without_a_lock_before_it_sees_no_row_of_a_rewritten_table(db: Database) -> None:
    """The reason for all this: if it ever fails, Postgres has changed, and a COPY alone is enough."""
    await db.execute(PLAIN.format(rows=10))

    def copied(lock: str | None) -> Read:
        async def drop(_: bytes) -> None: ...

        return lambda: db.copy_out("SELECT id::text FROM public.events", sink=drop, lock=lock)

    reads = {"nothing": copied(""), "cursor": copied(None), "lock": copied("LOCK TABLE events IN ACCESS SHARE MODE")}
    assert await while_rewritten(db, REWRITES["type"][1], reads) == {"nothing": 0, "cursor": 10, "lock": 10}


async def test_a_role_with_rights_on_some_columns_reads_as_before(db: Database, owner: str) -> None:
    grants = (
        "SELECT (id, v) ON events",
        "SELECT ON SEQUENCE events_id_seq",
        "USAGE ON SCHEMA replicad",
        "SELECT ON ALL TABLES IN SCHEMA replicad",
    )
    await db.execute(PLAIN.format(rows=10) + "".join(f"; GRANT {grant} TO {owner}" for grant in grants))
    await Registry(db).add("events", "public.events", "id", row="to_json(t.v)")
    async with db.connection() as connection:
        await connection.execute(f"SET ROLE {owner}")
        stream = await Registry(connection).load_stream("events")
        assert not stream.plain
        rows = 0

        async def count(chunk: Chunk) -> None:
            nonlocal rows
            rows += chunk.rows

        await row_source(stream).copy_range(connection, 0, ALL, count)
        await connection.execute("RESET ROLE")
    assert rows == 10


async def test_each_read_of_a_tube_that_waits_for_a_rewrite_finds_all_pods(db: Database) -> None:
    """A COPY that found none would be acked as read, and the pods be deleted."""
    await call_value(db, "tube", "tube_ensure_exists", "t", 1)
    await db.execute("INSERT INTO tube.t (op, shard, ids) SELECT 'U', 0, ARRAY[n] FROM generate_series(1, 100) n")
    term = await db.fetch_value("SELECT term FROM tube.tube_lease_claim('t', 1, 0, 'me', '1 hour', '{}')")
    book, part = PodBook(db, db, db, "tube"), Part(0, 1)
    last = await db.fetch_value("SELECT max(seq) FROM tube.t")
    bounds = PodReadBounds(position=last, limit=1000)

    async def renew() -> None: ...

    async def lines() -> int:
        got = 0

        async def take(data: bytes) -> None:
            nonlocal got
            got += data.count(b"\n")

        span = Span(Cursor(0, 0), Cursor(last, last))
        assert await book.lines("t", part, term, span, sink=take, renew=renew) == got
        return got

    async def short() -> int:
        found = await book.short("t", part, term, Cursor(last - 5, 0), bounds)
        assert found is not None
        return found[0].pods

    async def plan() -> int:
        return (await book.plan("t", part, term, Cursor(0, 0), bounds)).pods

    reads = {"plan": plan, "lines": lines, "short": short}
    expected = {"plan": 100, "lines": 100, "short": 5}
    assert {name: await read() for name, read in reads.items()} == expected
    rewrite = "ALTER TABLE tube.t ADD COLUMN more float8 DEFAULT random()"
    assert await while_rewritten(db, rewrite, reads) == expected


@pytest.mark.parametrize("rows", [5, 2000], ids=["by statement", "by COPY"])
async def test_readers_of_a_daemon_get_each_row_that_is_written_around_a_rewrite(
    database: Database, netcat: Connect, rows: int
) -> None:
    await database.execute("CREATE TABLE events (id bigserial PRIMARY KEY, v int)")
    await Registry(database).add("events", "public.events", "id")
    insert = f"INSERT INTO events (v) SELECT n FROM generate_series(1, {rows}) n"
    async with netcat() as live, netcat() as late:
        await live.send("REPLICATE events NOW")
        await live.until("POSITION events master .*")
        for number in range(1, 4):
            async with database.connection() as other, other.transaction():
                await other.execute(insert)
            async with database.connection() as other, other.transaction():
                await other.execute(f"ALTER TABLE events ALTER COLUMN v TYPE {'bigint' if number % 2 else 'int'}")
                if number == 2:
                    await late.send("REPLICATE events EARLIEST")
                await wait_for_a_waiter(database)
        for netcat_ in (live, late):
            got = await netcat_.until(f"RDATA events master {3 * rows} .*")
            ids = [int(line.split()[3]) for line in got if line.startswith("RDATA")]
            assert ids == list(range(1, 3 * rows + 1))


async def wait_for_a_waiter(db: Database) -> None:
    """Wait until another session waits for the lock of a rewrite, or has had the time for it."""
    with trio.move_on_after(1.0):
        while not await db.fetch_value("SELECT EXISTS (SELECT FROM pg_locks WHERE NOT granted)"):
            await trio.sleep(0.005)
