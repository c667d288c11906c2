"""The writer library: reserves ids before their rows are written, and completes them afterwards in any case.

Three forms, for streams whose method is reservation:

- `open_writer`: a writer with a connection of its own (trio). `async with writer.get_next() as stream_id` reserves an
  id; its rows may be inserted on any connection inside the block; at the end it is complete, with a row or without.
- `next_id` and `next_ids`: inside a transaction of the caller's, on asyncpg's connection or a similar connection, in
  any event loop. The id is complete when that transaction ends.
- `blocking_writer.py`: the same two for programs without async.

An advisory lock of the session protects the ids (stream_reserve in streams/sql/reservation.sql). Postgres releases it
when the writer's session ends, and the table refuses an id without a lock. So there is no need to register or to remove
writers.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final

import trio

from replicad.errors import DatabaseError, StreamRefused
from replicad.postgres.bridge import Connection, Database
from replicad.postgres.literals import fetch_in_transaction
from replicad.postgres.statements import call_rows, call_value, value_call
from replicad.streams.inflight import InFlight, Reservation
from replicad.streams.queries import SCHEMA, installed
from replicad.streams.row_text import MASTER, wire_instance

MAX_IN_FLIGHT: Final = 1000  # reservations of one writer at once; more would mean that blocks do not end
RESERVED: Final = "number, bound, ids::text AS ids"  # of stream_reserve; drivers return arrays in different types
COMPLETE_TIMEOUT: Final = 5.0  # seconds to release a lock; then the connection is closed, which releases it too


@dataclass(frozen=True, slots=True)
class Positions:
    """The position of each known writer of a stream. All rows up to `minimum`, of every writer, are committed."""

    per_writer: Mapping[str, int]
    minimum: int
    maximum: int

    @classmethod
    def of(cls, rows: Iterable[tuple[str | None, int]]) -> Positions:
        """From the rows of stream_positions(): a writer's name and position; the one without a name is the minimum."""
        found = dict(rows)
        minimum = found.pop(None)
        per_writer = {name: at for name, at in found.items() if name is not None}
        return cls(per_writer, minimum, max([minimum, *per_writer.values()]))


@dataclass(frozen=True, slots=True)
class WriterStatistics:
    """A moment of a writer: ids in flight now; connections made, and reservations that lost theirs, since the start."""

    in_flight: int
    connected: int
    lost: int


class Writer:
    """One writer of one stream. Made by `open_writer`; any number of tasks may use it at once."""

    def __init__(self, db: Database, stream: str, instance: str, schema: str, max_in_flight: int) -> None:
        self.stream = stream
        self.instance = wire_instance(instance)
        self._db = db
        self._schema = schema
        self._places = trio.Semaphore(max_in_flight, max_value=max_in_flight)
        self._turn = trio.Lock()  # the connection does one thing at a time
        self._pin = AsyncExitStack()
        self._connection: Connection | None = None
        self._number = 0
        self._in_flight = InFlight(0)
        self._connected = 0
        self._lost = 0

    @asynccontextmanager
    async def get_next(self) -> AsyncIterator[int]:
        """Reserve the next id for the length of the block.

        Raises:
            UnknownStream, StreamRefused: there is no such stream, or its ids cannot be reserved.
            DatabaseUnavailable: no connection.
        """
        async with self.get_next_mult(1) as ids:
            yield ids[0]

    @asynccontextmanager
    async def get_next_mult(self, n: int) -> AsyncIterator[tuple[int, ...]]:
        """Reserve n ids (1 to 10,000), ascending, for the length of the block. Raises as `get_next`."""
        async with self._places:
            reservation = await self._reserve(n)
            try:
                yield reservation.ids
            finally:
                await self._complete(reservation)

    def get_current_token(self) -> int:
        """The largest id up to which this writer has completed all of its own. Sends no query."""
        return self._in_flight.position

    def get_minimum_and_maximum(self) -> tuple[int, int]:
        """The current token, and the highest id that this writer has reserved, complete or not."""
        return self._in_flight.position, self._in_flight.maximum

    async def positions(self) -> Positions:
        """The present positions of all writers of the stream, from Postgres."""
        async with self._turn:
            connection = await self._session()
            with installed(self._schema):
                rows = await call_rows(connection, self._schema, "stream_positions", self.stream)
        return Positions.of((row["writer"], row["position"]) for row in rows)

    def statistics(self) -> WriterStatistics:
        """Counts, as one frozen value."""
        return WriterStatistics(len(self._in_flight), self._connected, self._lost)

    async def start(self) -> None:
        """Connect and read the stream's positions; this writer begins at its own, or at the minimum."""
        found = await self.positions()
        self._in_flight = InFlight(found.per_writer.get(self.instance, found.minimum))

    async def aclose(self) -> None:
        """Give the connection back, and with it all locks."""
        with trio.CancelScope(shield=True):
            async with self._turn:
                await self._leave()

    async def _reserve(self, n: int) -> Reservation:
        async with self._turn:
            connection = await self._session()
            held = self._in_flight.held
            try:
                with installed(self._schema):
                    [row] = await call_rows(
                        connection, self._schema, "stream_reserve", self.stream, n, held, columns=RESERVED
                    )
                self._number = row["number"]
                return self._in_flight.reserve(parse_ids(row["ids"]), row["bound"])
            except ValueError as error:
                await self._leave()
                raise StreamRefused(f"stream {self.stream}: {error}; open the writer again.") from error
            except BaseException:
                if held is None:  # the statement may have taken the lock although its result was not received
                    with trio.CancelScope(shield=True):
                        await self._leave()
                raise

    async def _complete(self, reservation: Reservation) -> None:
        """Shielded and bounded, and never fails: if the lock cannot be released, the connection is closed."""
        with trio.move_on_after(COMPLETE_TIMEOUT, shield=True) as patience:
            async with self._turn:
                await self._release(reservation)
        if patience.cancelled_caught and not reservation.completed:  # another task's statement hangs
            if self._connection is not None:
                self._connection.terminate()
            self._lost += self._in_flight.lost()
            self._in_flight.complete(reservation)

    async def _release(self, reservation: Reservation) -> None:
        move = self._in_flight.complete(reservation)
        if move is None or self._connection is None or self._connection.is_closed:
            return
        held = False
        try:
            with suppress(DatabaseError):
                held = await call_value(
                    self._connection, self._schema, "stream_complete", self._number, move.release, move.take
                )
        finally:
            if not held:
                with trio.CancelScope(shield=True):
                    await self._leave()

    async def _session(self) -> Connection:
        """The connection that holds the locks; a new one if it was lost."""
        if self._connection is not None and not self._connection.is_closed:
            return self._connection
        await self._leave()
        connection = await self._pin.enter_async_context(self._db.connection())
        self._connection = connection
        self._connected += 1
        await call_value(connection, "pg_catalog", "set_config", *session_name(self.instance))
        return connection

    async def _leave(self) -> None:
        """Give the connection back to the pool, which resets it: it holds no locks afterwards."""
        self._lost += self._in_flight.lost()
        self._connection = None
        await self._pin.aclose()
        self._pin = AsyncExitStack()


@asynccontextmanager
async def open_writer(
    db: Database, stream: str, instance: str = MASTER, *, schema: str = SCHEMA, max_in_flight: int = MAX_IN_FLIGHT
) -> AsyncIterator[Writer]:
    """A writer of a stream, with one connection out of `db` for as long as the block lasts.

    `instance` is the name of this writer. Its session has it as application_name, so that it holds back its own
    position only. At the end all locks are released; ids still in flight can then no longer be inserted.

    Raises:
        UnknownStream, StreamRefused: there is no such stream, or its ids are not reserved.
        SchemaMissing: streams are not installed in this database.
    """
    writer = Writer(db, stream, instance, schema, max_in_flight)
    try:
        await writer.start()
        yield writer
    finally:
        await writer.aclose()


async def next_id(connection: Any, stream: str, *, schema: str = SCHEMA) -> int:
    """Reserve the next id in the caller's transaction; it is complete when that ends, committed or rolled back.

    Takes a connection of asyncpg, or a connection of replicad. Refusals of Postgres are raised as its exceptions, with
    SQLSTATE RS001 or RS002; RS003 for a row whose id is no longer reserved.

    Raises:
        StreamRefused: the connection is not in a transaction, where an id would be complete at once.
    """
    return int(await _ask(connection, value_call(schema, "stream_next", 1), stream))


async def next_ids(connection: Any, stream: str, n: int, *, schema: str = SCHEMA) -> tuple[int, ...]:
    """As `next_id`, n ids at once (1 to 10,000), ascending."""
    return parse_ids(await _ask(connection, value_call(schema, "stream_next_mult", 2, "text"), stream, n))


async def _ask(connection: Any, sql: str, *args: object) -> Any:
    refusal = StreamRefused("an id is reserved for one transaction: begin it, take the id, insert, commit.")
    return await fetch_in_transaction(connection, sql, args, refusal)


def session_name(instance: str) -> tuple[str, str, bool]:
    """The arguments of set_config() that give the session the writer's name, so that it holds back only that writer."""
    return "application_name", instance, False


def parse_ids(text: str) -> tuple[int, ...]:
    """The ids in the text of a bigint[] such as `{5,6}`; the text is the same for every driver."""
    return tuple(map(int, text.strip("{}").split(",")))
