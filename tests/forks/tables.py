"""The streams of these tests, one for each method and form of token, and what writers do to their tables.

All tables have the columns id, who, part, body. Each body is unique, so a row that takes the id of another is seen.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field

import trio

from replicad.errors import DatabaseError
from replicad.postgres.bridge import Connection, Database, open_database
from tests.conftest import psql

from .ledger import Row

WRITERS = ("w1", "w2", "w3")
PART = 100  # ids of a partition
_TEXTS = (
    ", f float8 DEFAULT random() / 3, i interval DEFAULT '1 mon 2 days 03:04:05.6', b bytea DEFAULT '\\x0041ff', "
    "at timestamptz DEFAULT now()"
)
_SLOW = (
    "CASE WHEN t.body LIKE 'slow%' THEN pg_sleep(0.05)::text || t.body "
    "WHEN t.body LIKE 'poison%' THEN (1 / (length(t.body) * 0))::text ELSE t.body END"
)


@dataclass(frozen=True)
class Table:
    """A table that is a stream of the same name."""

    name: str
    method: str = "lock_watch"
    several: bool = True  # has an instance column, so tokens are vectors
    batches: bool = False  # ids have several rows
    two_phases: bool = True
    parted: bool = False  # by ranges of ids, of PART ids each, and a default partition
    texts: bool = False  # has columns whose texts depend on settings, which are part of the body
    shrinks: bool = False  # rows are removed, and readers keep them
    slow: bool = False  # reading a row takes 50 ms if its body begins with "slow", and fails if it begins with "poison"

    @property
    def sequence(self) -> str:
        return f"{self.name}_id_seq"

    def create(self) -> str:
        """The commands that make the table and register the stream."""
        return (
            f"CREATE TABLE {self.name} (id bigserial{'' if self.batches else ' PRIMARY KEY'}, "
            "who text NOT NULL DEFAULT current_setting('application_name'), part int DEFAULT 0, "
            f"body text NOT NULL DEFAULT gen_random_uuid()::text{_TEXTS if self.texts else ''})"
            + (
                f" PARTITION BY RANGE (id); CREATE TABLE {self.name}_rest PARTITION OF {self.name} DEFAULT;"
                + "".join(self.create_part(number) for number in range(3))
                if self.parted
                else ";"
            )
            + (f"CREATE INDEX ON {self.name} (id);" if self.batches else "")
            + (
                f"CREATE TABLE {self.name}_positions (stream_name text, instance_name text, stream_id bigint, "
                "PRIMARY KEY (stream_name, instance_name));"
                f"INSERT INTO {self.name}_positions SELECT '{self.name}', w, 0 FROM unnest({_array(WRITERS)}) w;"
                if self.method == "positions_table"
                else ""
            )
            + self.register()
        )

    def create_part(self, number: int) -> str:
        """The command that makes a partition."""
        return (
            f"CREATE TABLE IF NOT EXISTS {self.name}_{number} PARTITION OF {self.name} "
            f"FOR VALUES FROM ({number * PART}) TO ({(number + 1) * PART});"
        )

    def body(self) -> str:
        """What clients get as the body."""
        return (
            _SLOW if self.slow else "t.body || ' ' || concat_ws(' ', t.f, t.i, t.b, t.at)" if self.texts else "t.body"
        )

    def register(self) -> str:
        """The command that makes the table a stream."""
        instance = "'who'" if self.several else "NULL"
        row = f"json_build_array(t.id, {'t.who, ' if self.several else ''}{self.body()})"
        positions = f"'public.{self.name}_positions'::regclass" if self.method == "positions_table" else "NULL"
        return (
            f"SELECT replicad.stream_add('{self.name}', 'public.{self.name}'::regclass, 'id', "
            f"instance_column => {instance}, row_sql => {_quote(row)}, method => '{self.method}', "
            f"positions => {positions});"
        )

    def insert(self, rows: int = 1) -> str:
        """Insert rows under ids of their own."""
        if self.method == "reservation":
            return f"INSERT INTO {self.name} (id) SELECT replicad.stream_next('{self.name}') FROM {_series(rows)}"
        if self.method == "positions_table":
            # In one transaction with its position: what forks between the two would make the position a false one.
            return (
                f"WITH new AS (INSERT INTO {self.name} (part) SELECT n FROM {_series(rows)} n RETURNING id) "
                f"UPDATE {self.name}_positions SET stream_id = greatest(stream_id, (SELECT max(id) FROM new)) "
                "WHERE instance_name = current_setting('application_name')"
            )
        return f"INSERT INTO {self.name} (part) SELECT n FROM {_series(rows)} n"

    def insert_batch(self, rows: int) -> str:
        """Insert rows under one id."""
        assert self.batches
        return (
            f"WITH one AS MATERIALIZED (SELECT nextval('{self.sequence}') AS id) "
            f"INSERT INTO {self.name} (id, part) SELECT one.id, n FROM one, {_series(rows)} n"
        )

    def advance(self) -> str:
        """What idle writers do, so that the linear position does not wait for them; nothing where nothing is to do."""
        if self.method != "positions_table":
            return ""
        return (
            f"UPDATE {self.name}_positions SET stream_id = greatest(stream_id, "
            f"coalesce(pg_sequence_last_value('{self.sequence}'::regclass), 0))"
        )

    def last_id(self) -> str:
        """The last id that the sequence gave out."""
        return f"SELECT coalesce(pg_sequence_last_value('{self.sequence}'::regclass), 0)"

    def highest(self) -> str:
        """The position of the writer that is furthest, while nobody writes."""
        if self.method == "positions_table":
            return f"SELECT coalesce(max(stream_id), 0) FROM {self.name}_positions"
        return self.last_id()

    def truncate(self) -> str:
        """Empty the table and begin its ids again."""
        if self.method != "positions_table":
            return f"TRUNCATE {self.name} RESTART IDENTITY"
        return (
            f"TRUNCATE {self.name}_positions, {self.name} RESTART IDENTITY; "
            f"INSERT INTO {self.name}_positions SELECT '{self.name}', w, 0 FROM unnest({_array(WRITERS)}) w"
        )

    def set_back(self, to: int) -> str:
        """Remove the rows after an id and give their ids out again; within a transaction, which keeps writers out."""
        positions = self.method == "positions_table"
        return (
            (f"LOCK TABLE {self.name}_positions IN EXCLUSIVE MODE;" if positions else "")
            + f"LOCK TABLE {self.name} IN EXCLUSIVE MODE; DELETE FROM {self.name} WHERE id > {to};"
            + (f"UPDATE {self.name}_positions SET stream_id = least(stream_id, {to});" if positions else "")
            + f"SELECT setval('{self.sequence}', {to})"
        )


LONE = Table("lone", several=False)
MANY = Table("many", batches=True)
RESERVED = Table("reserved", method="reservation")
TABLED = Table("tabled", method="positions_table", two_phases=False)
TABLES = (LONE, MANY, RESERVED, TABLED)

ALTERED = Table("altered", texts=True)
PARTED = Table("parted", parted=True, shrinks=True)
SWAPPED = Table("swapped")
EVERYDAY = (ALTERED, PARTED, SWAPPED)  # tables to which operators do what they do


def create_all(tables: Iterable[Table] = (*TABLES, *EVERYDAY)) -> str:
    """The commands that make the tables and register the streams."""
    return "".join(table.create() for table in tables)


def rows_of(url: str, table: Table) -> list[Row]:
    """The rows that there are now, as a client should have them."""
    who = "who" if table.several else "'master'"
    body = "t.body" if table.slow else table.body()
    found = psql(url, f"SELECT json_build_array({who}, t.id, {body}) FROM {table.name} t ORDER BY t.id, t.body")
    return [(row[0], row[1], row[2]) for row in map(json.loads, found.splitlines())]


@dataclass
class Writing:
    """Writers of all kinds at work on the tables, as long as the gate is open."""

    url: str
    seed: int = 0
    tables: tuple[Table, ...] = TABLES
    pause: float = 0.01  # seconds between two transactions, on average
    orphans: float = 0.0  # how many of the prepared transactions nobody ends
    done: Counter[str] = field(default_factory=Counter)
    _open: trio.Event = field(default_factory=trio.Event)
    _closed: bool = True
    _busy: int = 0
    _idle: trio.Event = field(default_factory=trio.Event)
    _gids: int = 0

    async def run(self) -> None:
        """Three writers for each table, until cancelled."""
        async with trio.open_nursery() as nursery:
            for writer in WRITERS:
                nursery.start_soon(self._connect, writer)

    def go(self) -> None:
        """Open the gate."""
        self._closed = False
        self._open.set()

    async def wait_open(self) -> None:
        """Wait until the gate is open."""
        await self._open.wait()

    def begin(self) -> None:
        """A transaction of somebody else begins, for which `rest` waits."""
        self._busy += 1

    def end(self) -> None:
        """It has ended."""
        self._busy -= 1
        self._idle.set()

    async def rest(self) -> None:
        """Close the gate, and wait until no transaction of a writer is open."""
        self._closed, self._open = True, trio.Event()
        while self._busy:
            self._idle = trio.Event()
            await self._idle.wait()

    async def _connect(self, writer: str) -> None:
        while True:
            with suppress(DatabaseError):  # of opening; what writing raises stays there
                async with open_database(self.url, size=len(self.tables), application_name=writer) as db:
                    async with trio.open_nursery() as nursery:
                        for table in self.tables:
                            nursery.start_soon(self._write, db, writer, table)
            await trio.sleep(0.05)

    async def _write(self, db: Database, writer: str, table: Table) -> None:
        rng = random.Random(f"{self.seed} {writer} {table.name}")
        while True:
            await self._open.wait()
            self.begin()
            try:
                with suppress(DatabaseError):
                    async with db.connection() as connection:
                        while not self._closed:
                            kind = rng.choice([kind for kind, fits in _KINDS if fits(table)])
                            await kind(self, connection, table, rng)
                            self.done[kind.__name__] += 1
                            await trio.sleep(rng.expovariate(1 / self.pause))
            finally:
                self.end()
            await trio.sleep(0.05)

    def gid(self) -> str:
        self._gids += 1
        return f"g{self._gids}"


Kind = Callable[[Writing, Connection, Table, random.Random], Awaitable[None]]


async def _one_row(writing: Writing, connection: Connection, table: Table, rng: random.Random) -> None:
    await connection.execute(table.insert())


async def _one_row_unflushed(writing: Writing, connection: Connection, table: Table, rng: random.Random) -> None:
    async with connection.transaction():
        await connection.execute("SET LOCAL synchronous_commit = off")
        await connection.execute(table.insert())


async def _many_rows_slowly(writing: Writing, connection: Connection, table: Table, rng: random.Random) -> None:
    async with connection.transaction():
        for _ in range(rng.randrange(1, 4)):
            await connection.execute(table.insert(rng.randrange(1, 12)))
            await trio.sleep(rng.expovariate(100))


async def _one_batch(writing: Writing, connection: Connection, table: Table, rng: random.Random) -> None:
    await connection.execute(table.insert_batch(rng.randrange(1, 5)))


async def _roll_back(writing: Writing, connection: Connection, table: Table, rng: random.Random) -> None:
    with suppress(ZeroDivisionError):
        async with connection.transaction():
            await connection.execute(table.insert(rng.randrange(1, 12)))
            await trio.sleep(rng.expovariate(100))
            raise ZeroDivisionError


async def _roll_back_a_savepoint(writing: Writing, connection: Connection, table: Table, rng: random.Random) -> None:
    async with connection.transaction():
        with suppress(ZeroDivisionError):
            async with connection.transaction():
                await connection.execute(table.insert())
                await trio.sleep(rng.expovariate(100))
                raise ZeroDivisionError
        await connection.execute(table.insert())


async def _advance(writing: Writing, connection: Connection, table: Table, rng: random.Random) -> None:
    await connection.execute(table.advance() + " WHERE instance_name = current_setting('application_name')")


async def _two_phases(writing: Writing, connection: Connection, table: Table, rng: random.Random) -> None:
    gid = writing.gid()
    await connection.execute("BEGIN")
    try:
        await connection.execute(table.insert(rng.randrange(1, 4)))
        await connection.execute(f"PREPARE TRANSACTION '{gid}'")
    except DatabaseError:
        with suppress(DatabaseError):
            await connection.execute("ROLLBACK")
        raise
    await trio.sleep(rng.expovariate(100))
    if rng.random() >= writing.orphans:
        await connection.execute(f"{rng.choice(('COMMIT', 'COMMIT', 'ROLLBACK'))} PREPARED '{gid}'")


_KINDS: tuple[tuple[Kind, Callable[[Table], bool]], ...] = (
    (_one_row, lambda table: True),
    (_one_row_unflushed, lambda table: True),
    (_many_rows_slowly, lambda table: True),
    (_roll_back, lambda table: True),
    (_roll_back_a_savepoint, lambda table: True),
    (_one_batch, lambda table: table.batches),
    (_advance, lambda table: table.method == "positions_table"),
    (_two_phases, lambda table: table.two_phases),
)


def _series(rows: int) -> str:
    return f"generate_series(1, {rows})"


def _array(words: Iterable[str]) -> str:
    return f"ARRAY[{', '.join(map(_quote, words))}]"


def _quote(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
