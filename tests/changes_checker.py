"""Whether a copy that applies all changes of a table, in their order, ends equal to it: random writers, from seeds.

`World` has a table of one of several kinds (FORMS), with a stream of changes on it. Its writers run transactions of
many statements: inserts, updates, deletes, changes of keys, ON CONFLICT, MERGE, queries that write twice, TRUNCATE,
savepoints, rollbacks, two-phase commits, statements in triggers and functions that write the same rows again. Beside
them snapshots are taken, and columns come and go. The server may be exchanged for a standby meanwhile. `apply` is what
a reader does. `Reader` is a client of daemons, which may be bound to a part of the stream.
"""

from __future__ import annotations

import json
import random
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import trio

from replicad.client.events import PositionMoved, Reset, RowBatch
from replicad.errors import DatabaseError, DatabaseUnavailable, StandbyRefused, StreamRefused
from replicad.postgres.bridge import Connection, Database
from replicad.streams.registry import RecordedChanges, Registry

STREAM = "shop"
KEYS = 24  # so few that transactions meet on the same rows
WRITERS = 4
AGAIN = 0.05  # seconds until another try while the server is away
OLD_SHAPE = "42703"  # a column is gone: so ends a transaction at a higher level that began before an ALTER TABLE

T = TypeVar("T")
Copy = dict[str, dict[str, Any]]  # rows by the JSON of their keys


@dataclass(frozen=True, slots=True)
class Form:
    """A kind of table. `key`: its columns; `sql`: its definition; `recorded`: how its changes are recorded."""

    key: tuple[str, ...]
    sql: str
    recorded: RecordedChanges = field(default_factory=RecordedChanges)


FORMS = (
    Form(("id",), "CREATE TABLE shop (id bigint PRIMARY KEY, n integer, note text)"),
    Form(
        ("region", "id"),
        "CREATE TABLE shop (id integer NOT NULL, region text NOT NULL, n integer, note text, PRIMARY KEY (region, id)) "
        "PARTITION BY LIST (region); CREATE TABLE shop_a (gone text, note text, n integer, region text NOT NULL, "
        "id integer NOT NULL); ALTER TABLE shop_a DROP COLUMN gone; "
        "ALTER TABLE shop ATTACH PARTITION shop_a FOR VALUES IN ('a'); CREATE TABLE shop_b PARTITION OF shop DEFAULT",
        RecordedChanges(old=True),
    ),
    Form(
        ("id",),
        "CREATE TABLE shop (n integer, id numeric PRIMARY KEY, note text, big bytea)",
        RecordedChanges(omit=True),
    ),
    Form(
        ("id",),
        "CREATE TABLE shop (id integer PRIMARY KEY, n integer, note text)",
        RecordedChanges(where="t.n IS DISTINCT FROM 3", filters=("n",)),
    ),
    Form(
        ("id",),
        "CREATE TABLE shop (id integer PRIMARY KEY, n integer, note text)",
        RecordedChanges(filters=("note", "n"), old=True),
    ),
)
VALUES = ("1", "2", "4")  # of n, by which readers are bound


def apply(copy: Copy, changes: Iterable[Mapping[str, Any]]) -> None:
    """Apply changes to a copy, as a reader does."""
    for change in changes:
        op, key = change["op"], json.dumps(change.get("key"))
        if op == "t":
            copy.clear()
        elif op == "d":
            copy.pop(key, None)
        elif op == "u":
            copy[key] = copy.get(key, {}) | change["row"]
        elif op in ("i", "r"):
            copy[key] = change["row"]


class World:
    """The table of a seed, its stream, and its writers. `move`: exchanges the server while they run. Transactions that
    it meets are lost, and the writers go on until it has ended, and some time after it.
    """

    def __init__(self, seed: int, db: Database, move: Callable[[], Awaitable[None]] | None = None) -> None:
        self.seed, self.db, self._move = seed, db, move
        self._moved = trio.Event()
        self.form = FORMS[seed % len(FORMS)]
        self.registry = Registry(db)
        self.prepared = self.stream = 0
        self.refused: dict[str, int] = {}

    async def begin(self) -> int:
        """Make the table with some rows, and the stream; ask for a snapshot. Returns the number of the stream."""
        await self.db.execute(f"{self.form.sql}; CREATE SEQUENCE shop_made; {_AGAIN}")
        for row in range(0, KEYS, 2):
            await self.db.execute(f"INSERT INTO shop ({', '.join(self._columns())}) VALUES {self._values(row)}")
        added = await self.registry.add_changes(STREAM, "public.shop", self.form.recorded)
        await self.registry.request_snapshot(STREAM)
        self.stream = added.stream.number
        return self.stream

    def _columns(self) -> tuple[str, ...]:
        return (*self.form.key, "n", "note")

    def _values(self, number: int, chance: random.Random | None = None) -> str:
        key = [f"'{'abc'[number % 3]}'", str(number)] if "region" in self.form.key else [str(number)]
        n = "NULL::integer" if chance is None else chance.choice(["NULL::integer", "1", "2", "3"])
        return f"({', '.join([*key, n])}, 'note {number} ' || nextval('shop_made'))"

    async def write(self, number: int, transactions: int) -> None:
        """One writer: so many transactions."""
        chance = random.Random(self.seed * 1000 + number)
        left = transactions
        while left > 0:
            level = chance.choice(["READ COMMITTED"] * 4 + ["REPEATABLE READ", "SERIALIZABLE"])
            try:
                async with self.db.connection() as connection:
                    await self._written(connection, chance, level)
            except DatabaseError as error:
                if not self._is_away(error):
                    raise
                await trio.sleep(AGAIN)
            if self._move is None or self._moved.is_set():
                left -= 1
            await trio.lowlevel.checkpoint()

    async def _written(self, connection: Connection, chance: random.Random, level: str) -> None:
        try:
            await self._transaction(connection, chance, level)
        except (DatabaseError, StreamRefused) as error:  # of a partition alone, TRUNCATE is refused at some levels
            if isinstance(error, DatabaseError) and self._is_away(error):
                raise
            code = error.sqlstate if isinstance(error, DatabaseError) else error.code
            if code != OLD_SHAPE or level == "READ COMMITTED":
                self.refused[code or "?"] = self.refused.get(code or "?", 0) + 1
            with suppress(DatabaseError):
                await connection.execute("ROLLBACK")

    def _is_away(self, error: DatabaseError) -> bool:
        """Whether this is the error of a server that is being exchanged."""
        return self._move is not None and isinstance(error, DatabaseUnavailable | StandbyRefused)

    async def _persist(self, step: Callable[[], Awaitable[T]]) -> T:
        """Try a step again while the server is away."""
        while True:
            try:
                return await step()
            except DatabaseError as error:
                if not self._is_away(error):
                    raise
                await trio.sleep(AGAIN)

    async def _exchange(self) -> None:
        """Exchange the server; roll back what was prepared by writers who lost theirs."""
        assert self._move is not None
        await self._move()
        for (gid,) in await self._persist(lambda: self.db.fetch("SELECT gid FROM pg_prepared_xacts")):
            with suppress(DatabaseError):  # a writer has ended it itself
                await self.db.execute(f"ROLLBACK PREPARED '{gid}'")
        self._moved.set()

    async def _transaction(self, connection: Connection, chance: random.Random, level: str) -> None:
        await connection.execute(f"BEGIN ISOLATION LEVEL {level}; SET LOCAL lock_timeout = '2s'")
        for _ in range(chance.randint(1, 4)):
            await self._statement(connection, chance)
        end = chance.choices(["COMMIT", "ROLLBACK", "PREPARE"], [8, 1, 1])[0]
        if end != "PREPARE":
            await connection.execute(end)
            return
        self.prepared += 1
        gid = f"shop {self.seed} {self.prepared}"
        await connection.execute(f"PREPARE TRANSACTION '{gid}'")
        await trio.sleep(chance.choice([0, 0.01, 0.05]))
        end = f"{chance.choice(['COMMIT', 'COMMIT', 'ROLLBACK'])} PREPARED '{gid}'"
        await self._persist(lambda: self.db.execute(end))

    async def _statement(self, connection: Connection, chance: random.Random) -> None:
        sql = self._sql(chance)
        if chance.random() < 0.2:  # a savepoint that is rolled back, or that survives an error
            await connection.execute("SAVEPOINT here")
            try:
                await connection.execute(sql)
            except (DatabaseError, StreamRefused):
                await connection.execute("ROLLBACK TO here")
                return
            if chance.random() < 0.5:
                await connection.execute("ROLLBACK TO here")
            return
        await connection.execute(sql)

    def _sql(self, chance: random.Random) -> str:
        one, other = chance.randrange(KEYS), chance.randrange(KEYS)
        columns, key = ", ".join(self._columns()), ", ".join(self.form.key)
        row, again = self._values(one, chance), self._values(other, chance)
        several = f"id BETWEEN {min(one, other)} AND {max(one, other)}"
        touched = "n = coalesce(n, 0) % 4 + 1, note = note || '.'"
        both = " AND ".join(f"t.{k} = s.{k}" for k in self.form.key)
        inserted = ", ".join(f"s.{column}" for column in self._columns())
        return chance.choice(
            [
                f"INSERT INTO shop ({columns}) VALUES {row} ON CONFLICT DO NOTHING",
                f"INSERT INTO shop ({columns}) VALUES {row} ON CONFLICT ({key}) DO UPDATE SET n = excluded.n",
                f"INSERT INTO shop ({columns}) SELECT * FROM (VALUES {row}) AS v ON CONFLICT ({key}) DO UPDATE "
                f"SET id = shop.id + {KEYS}",
                f"UPDATE shop SET {touched} WHERE {several}",
                f"UPDATE shop SET {touched} WHERE id = {one}",
                f"UPDATE shop SET note = left(note, 5) WHERE id = {one}",
                f"UPDATE shop SET id = {other} WHERE id = {one}",
                f"UPDATE shop SET id = id + 1 WHERE id = (SELECT max(id) FROM shop WHERE id < {KEYS})",
                f"DELETE FROM shop WHERE id = {one}",
                f"DELETE FROM shop WHERE {several} AND n = 2",
                f"WITH gone AS (DELETE FROM shop WHERE id = {one} RETURNING *) INSERT INTO shop ({columns}) "
                f"SELECT {columns.replace('note', 'note || 1')} FROM gone",
                f"WITH new AS (INSERT INTO shop ({columns}) VALUES {row} RETURNING 1) "
                f"DELETE FROM shop WHERE id = {one}",
                f"MERGE INTO shop AS t USING (VALUES {row}, {again}) AS s ({columns}) ON {both} "
                f"WHEN MATCHED AND t.n = 1 THEN DELETE WHEN MATCHED THEN UPDATE SET n = s.n "
                f"WHEN NOT MATCHED THEN INSERT ({columns}) VALUES ({inserted})",
                f"UPDATE shop SET {touched} WHERE id = shop_again({one})",
                f"DO $$ BEGIN UPDATE shop SET n = 1 WHERE id = {one}; DELETE FROM shop WHERE id = {other}; END $$",
                "TRUNCATE shop" if chance.random() < 0.2 else f"UPDATE shop SET n = NULL WHERE {several}",
                *(["TRUNCATE shop_a"] if "region" in self.form.key and chance.random() < 0.2 else []),
                *(
                    [
                        "UPDATE shop SET region = 'c' WHERE id = 3",
                        f"MERGE INTO shop AS t USING (VALUES {row}, {again}) AS s ({columns}) ON {both} "
                        "WHEN MATCHED AND t.n = 4 THEN UPDATE SET region = translate(t.region, 'abc', 'bca') "
                        f"WHEN MATCHED THEN UPDATE SET id = t.id + {KEYS} "
                        f"WHEN NOT MATCHED THEN INSERT ({columns}) VALUES ({inserted})",
                    ]
                    if "region" in self.form.key
                    else []
                ),
                *(
                    [f"UPDATE shop SET big = decode(repeat('ab', {one * 40}), 'hex') WHERE {several}"]
                    if self.form.recorded.omit
                    else []
                ),
            ]
        )

    async def change_columns(self) -> None:
        """Columns come, get another name and type, and go."""
        chance = random.Random(self.seed)
        for sql in (
            "ADD COLUMN extra integer DEFAULT 7",
            "RENAME COLUMN extra TO more",
            "ALTER COLUMN more TYPE text USING more || ' text'",
            "DROP COLUMN more",
        ):
            await trio.sleep(chance.uniform(0.05, 0.2))
            with suppress(DatabaseError):  # it waited too long behind a writer
                await self.db.execute(f"SET lock_timeout = '1s'; ALTER TABLE shop {sql}; RESET lock_timeout")
            if chance.random() < 0.5:
                await self._persist(self.registry.look_after_changes)

    async def snapshots(self, stream: int, done: trio.Event) -> None:
        """Send snapshots in small chunks, and ask for another one now and then, until the writers have ended."""
        while True:
            step = await self._persist(lambda: self.registry.snapshot_step(stream, size=3))
            if step is None and any(one.finished_at is None for one in await self._persist(self.registry.snapshots)):
                await trio.sleep(0.01)  # a daemon is at it
            elif step is None:
                if done.is_set():
                    return
                await self._persist(lambda: self.registry.request_snapshot(STREAM))
            await trio.lowlevel.checkpoint()

    async def take_ids(self, stream: int, done: trio.Event) -> None:
        """Take many ids now and then, so that changes come into several partitions."""
        while not done.is_set():
            await self._persist(
                lambda: self.db.execute(
                    "SELECT count(nextval($1::text::regclass)) FROM generate_series(1, 70000)",
                    f"replicad.change_{stream}_id_seq",
                )
            )
            with trio.move_on_after(0.3):
                await done.wait()

    async def play(self, transactions: int) -> str | None:
        """Let everybody run, apply the changes, and compare. Returns what is wrong."""
        stream = self.stream or await self.begin()
        done = trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.snapshots, stream, done)
            nursery.start_soon(self.take_ids, stream, done)
            async with trio.open_nursery() as writers:
                for number in range(WRITERS):
                    writers.start_soon(self.write, number, transactions)
                writers.start_soon(self.change_columns)
                if self._move is not None:
                    writers.start_soon(self._exchange)
            done.set()
        return await self.difference(stream)

    async def difference(self, stream: int) -> str | None:
        """Apply all recorded changes, and compare the copy with the table."""
        rows = await self.db.fetch(
            f"SELECT ({await self._line(stream)})::text AS line FROM replicad.change_{stream} AS t ORDER BY t.id"
        )
        copy: Copy = {}
        apply(copy, (json.loads(row["line"]) for row in rows))
        return compare(_without_added(copy), _without_added(await self.present()))

    async def _line(self, stream: int) -> str:
        line: str = await self.db.fetch_value("SELECT row_sql FROM replicad.stream WHERE number = $1", stream)
        return line

    async def taken(self) -> int:
        """The last id that was given out: no copy of the server made until now has one beyond it."""
        return int(await self.db.fetch_value(f"SELECT last_value FROM replicad.change_{self.stream}_id_seq"))

    async def last_id(self) -> int:
        """The id of the last change."""
        return int(await self.db.fetch_value(f"SELECT max(id) FROM replicad.change_{self.stream}"))

    async def present(self, value: str | None = None) -> Copy:
        """The rows of the table that belong to the stream, or to its part where n is `value`."""
        part = "true" if value is None else f"t.n = {value}"
        names = ", ".join(f"t.{name}" for name in self.form.key)
        key = names if len(self.form.key) == 1 else f"json_build_array({names})"
        rows = await self.db.fetch(
            f"SELECT to_json({key})::text AS key, row_to_json(t)::text AS line FROM shop AS t "
            f"WHERE ({self.form.recorded.where or 'true'}) AND {part}"
        )
        return {json.dumps(json.loads(row["key"])): json.loads(row["line"]) for row in rows}


@dataclass(eq=False)
class Reader:
    """A client that keeps a copy of the stream, or of the part to which it is bound (`value` of n). `position`: up to
    where its copy goes. `wrong`: what it was sent and must not see. `kept`: all changes with their tokens, of a client
    that goes back where the history forked, so often as `returns`; None for one that may not be sent back.
    """

    name: str
    value: str | None = None
    copy: Copy = field(default_factory=dict)
    position: int = -1
    wrong: str | None = None
    kept: list[tuple[int, list[dict[str, Any]]]] | None = None
    returns: int = 0

    def take(self, event: object) -> None:
        """Apply what was received."""
        if isinstance(event, Reset):
            self._go_back(event)
        elif isinstance(event, PositionMoved):
            self.position = max(self.position, event.token)
        elif isinstance(event, RowBatch):
            changes = [json.loads(row) for row in event.rows]
            if self.kept is not None:
                self.kept.append((int(event.token), changes))
            apply(self.copy, changes)
            self.position = int(event.token)
            for row in (change.get(place) for change in changes for place in ("row", "old") if change["op"] != "s"):
                if self.value is not None and row is not None and str(row["n"]) != self.value:
                    self.wrong = self.wrong or f"reader {self.name} was sent {event.rows}"

    def _go_back(self, reset: Reset) -> None:
        """Make the copy again, of the changes up to the fork."""
        assert self.kept is not None, f"reader {self.name}: {reset}"
        self.returns += 1
        upto = -1 if reset.token is None else reset.token
        self.kept = [(token, changes) for token, changes in self.kept if token <= upto]
        self.copy, self.position = {}, upto
        for _, changes in self.kept:
            apply(self.copy, changes)

    async def difference(self, world: World) -> str | None:
        """What is wrong with the copy; None if nothing is."""
        found = compare(_without_added(self.copy), _without_added(await world.present(self.value)))
        return self.wrong or (found and f"reader {self.name}: {found}")


def _without_added(copy: Copy) -> Copy:
    """Without the columns that were added: values that ALTER TABLE gives to rows come with the next snapshot only."""
    return {key: {name: row[name] for name in row if name not in ("extra", "more")} for key, row in copy.items()}


def compare(copy: Copy, table: Copy) -> str | None:
    """What is different, in a sentence; None if nothing is."""
    if copy == table:
        return None
    keys = sorted(key for key in copy.keys() | table.keys() if copy.get(key) != table.get(key))
    shown = "; ".join(f"{key}: copy {copy.get(key)}, table {table.get(key)}" for key in keys[:5])
    return f"{len(keys)} of {len(table)} rows differ: {shown}"


# Statements that write rows of the table again, inside a statement on the table: in a trigger for each row, and in a
# function that an expression calls.
_AGAIN = """
CREATE FUNCTION shop_touched() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF NEW.n = 2 THEN
        UPDATE shop SET n = 4, note = 'touched' WHERE id = NEW.id;
    ELSIF NEW.n = 1 AND NEW.id % 5 = 0 THEN
        DELETE FROM shop WHERE id = NEW.id;
    END IF;
    RETURN NULL;
END $$;
CREATE TRIGGER a_touched AFTER INSERT OR UPDATE ON shop FOR EACH ROW EXECUTE FUNCTION shop_touched();
CREATE FUNCTION shop_again(key integer) RETURNS integer LANGUAGE plpgsql AS $$
BEGIN
    UPDATE shop SET note = 'again' WHERE id IN (key - 1, key + 1);
    RETURN key;
END $$
"""
