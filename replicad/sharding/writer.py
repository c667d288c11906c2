"""A sharded writer for programs on trio and on asyncio.

A task keeps the membership and the slots while the writer is open, on a connection of its own. Each write uses a
connection of the pool and one transaction, which begins with the fence (writer_owns in sharding/sql/slots.sql).
keeper.py and holdings.py decide.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, cast, overload

import anyio
import anyio.lowlevel

from replicad.client.ending import ended_in_order
from replicad.errors import DatabaseUnavailable, NotOwner, ReplicadError, SchemaMissing
from replicad.eventlog import get_logger
from replicad.loops import open_plain_tasks
from replicad.postgres import failures
from replicad.postgres import schema as schemas
from replicad.postgres.literals import fill, quote_argument
from replicad.postgres.statements import value_call
from replicad.sharding.holdings import Holdings, KeyOwner, ShardedWriterStatistics, Slot
from replicad.sharding.keeper import LEAVE, TTL, Asks, MembershipKeeper
from replicad.streams.queries import SCHEMA
from replicad.streams.row_text import wire_instance

if TYPE_CHECKING:
    from asyncpg import Pool

    from replicad.postgres.bridge import Connection, Database

C = TypeVar("C")

log = get_logger(__name__)

_CONNECT_TIMEOUT = 60.0  # seconds, for a message only: the pool has the time limit


class PooledDatabase:
    """Connections of the pool of asyncpg of a program on asyncio, as a sharded writer uses a `Database`.

    Statements of the writer raise our exceptions. Statements of the program raise the exceptions of asyncpg, unchanged.
    This file does not import asyncpg: the program made the pool.
    """

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._target = failures.Target("the pool of the program", "(its own)", "(its own)")

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[PooledConnection]:
        """A connection. Raises DatabaseUnavailable and DatabaseRefused if there is none."""
        acquiring = self._pool.acquire()
        try:
            raw = await acquiring.__aenter__()
        except Exception as error:
            raise failures.while_connecting(error, self._target, _CONNECT_TIMEOUT) from error
        try:
            yield PooledConnection(raw, self._target)
        finally:
            await acquiring.__aexit__(None, None, None)  # the pool resets it, and rolls back

    async def fetch_row(self, sql: str, *args: object) -> Any:
        """The first row, or None."""
        async with self.connection() as connection:
            rows = await connection.fetch(sql, *args)
        return rows[0] if rows else None

    @staticmethod
    def own(connection: PooledConnection) -> Any:
        """The connection of asyncpg."""
        return connection.raw


class PooledConnection:
    """A connection of asyncpg."""

    def __init__(self, raw: Any, target: failures.Target) -> None:
        self.raw = raw
        self._target = target

    async def fetch(self, sql: str, *args: object) -> Sequence[Any]:
        """The rows of a statement."""
        try:
            rows: Sequence[Any] = await self.raw.fetch(sql, *args)
        except Exception as error:
            raise self._ours(error) from error
        return rows

    @asynccontextmanager
    async def transaction(self, *, opening: str, idle: float | None) -> AsyncIterator[None]:
        """A transaction, opened by that statement. `idle`: as for `Connection.transaction`; None only."""
        assert idle is None
        transaction = self.raw.transaction(isolation="read_committed")
        try:
            await transaction.start()
            await self.raw.execute(opening)
        except BaseException as error:
            if self.raw.is_in_transaction():
                await transaction.rollback()
            if isinstance(error, Exception):
                raise self._ours(error) from error
            raise
        try:
            yield
            # Where a statement has failed, Postgres rolls back at COMMIT, and asyncpg does not say so. This raises.
            await self.raw.execute("SELECT")
        except BaseException:
            if not self.raw.is_closed():
                await transaction.rollback()
            raise
        await transaction.commit()

    @asynccontextmanager
    async def listen(self, channel: str) -> AsyncIterator[PooledNotices]:
        """The NOTIFYs on a channel during the block."""
        notices = PooledNotices()

        def note(_connection: Any, _pid: int, _channel: str, payload: str) -> None:
            notices.put(payload)

        def end(_connection: Any) -> None:
            notices.put(None)

        try:
            await self.raw.add_listener(channel, note)
        except Exception as error:
            raise self._ours(error) from error
        self.raw.add_termination_listener(end)
        try:
            yield notices
        finally:
            self.raw.remove_termination_listener(end)
            if not self.raw.is_closed():
                await self.raw.remove_listener(channel, note)

    def _ours(self, error: Exception) -> ReplicadError:
        return failures.while_running(error, self._target, connection_lost=self.raw.is_closed())


class PooledNotices:
    """The payloads that came on one channel."""

    def __init__(self) -> None:
        self._payloads: deque[str | None] = deque(maxlen=1000)  # a lost hint does no harm
        self._came = anyio.Event()

    def put(self, payload: str | None) -> None:
        """A payload came; None: the connection has ended."""
        self._payloads.append(payload)
        self._came.set()

    async def next(self, _patience: float, /) -> str:
        """Wait for the next payload. Raises DatabaseUnavailable when the connection has ended."""
        while not self._payloads:
            self._came = anyio.Event()
            await self._came.wait()
        payload = self._payloads.popleft()
        if payload is None:
            self._payloads.append(None)
            raise DatabaseUnavailable("the connection that listens was lost")
        return payload


_CHANNEL = "replicad_writers"  # writer_changed in sharding/sql/members.sql
_RETRY = 0.5  # seconds until the keeper tries again after an error of Postgres
_GRACE = 2.0  # seconds beyond LEAVE, for the last statements


class _Moved(Exception):
    """The key has changed hands before the write began: find its owner again."""


class WriterNotices(Protocol):
    """NOTIFYs on one channel."""

    async def next(self, patience: float, /) -> str:
        """Wait for the next payload. Raises DatabaseUnavailable when the connection is lost."""


class WriterConnection(Protocol):
    """What a sharded writer needs of a connection: of `Database` on trio, of a pool of asyncpg on asyncio."""

    async def fetch(self, sql: str, *args: object) -> Sequence[Any]: ...

    def listen(self, channel: str) -> AbstractAsyncContextManager[WriterNotices]: ...

    def transaction(self, *, opening: str, idle: float | None) -> AbstractAsyncContextManager[None]: ...


class WriterDatabase(Protocol):
    """Makes such connections."""

    def connection(self) -> AbstractAsyncContextManager[WriterConnection]: ...


class ShardedWriter(Generic[C]):
    """A writer of a shared stream. Made by `open_sharded_writer`. Any number of tasks may use it."""

    def __init__(
        self,
        db: WriterDatabase,
        stream: str,
        instance: str,
        *,
        own: Callable[[Any], C],
        address: str | None,
        ttl: float,
        schema: str,
    ) -> None:
        """`own`: the connection of the program that belongs to a connection of `db`."""
        self._own = own
        self.stream = stream
        self.instance = wire_instance(instance)
        self._db = db
        self._schema = schema
        self._ttl = ttl
        self._holdings = Holdings(stream, self.instance, ttl)
        self._keeper = MembershipKeeper(self._holdings, address, ttl, anyio.current_time)
        self._changed = anyio.Event()  # set, and replaced, whenever a wait may be over
        self._called = anyio.Event()  # set to make the keeper look at once
        self._keeping = anyio.CancelScope(shield=True)
        self._asked = self._over = False  # the keeper has asked Postgres for something; it has ended
        self._closed = False

    @asynccontextmanager
    async def owning(self, key: str, *, wait: float = 0.0) -> AsyncIterator[C]:
        """A connection in its own transaction, in which this writer owns the key. No other writer's can overlap.

        The transaction is committed at the end and rolled back on any exception. Postgres ends it if it idles for
        longer than the writer's time to live. `wait`: how many seconds to wait while the key changes hands. Two tasks
        of this writer may be in a block for the same key at the same time.

        Raises:
            NotOwner: another writer owns the key (the error names it), or none did until the end of the wait.
            DatabaseUnavailable: no connection, or it was lost; whether a commit took place is then unknown.
        """
        deadline = anyio.current_time() + wait
        async with AsyncExitStack() as stack:
            while True:
                await self._wait_until_ready(key, deadline)
                try:
                    connection = await stack.enter_async_context(self._begun(key))
                    break
                except _Moved:
                    continue
            yield self._own(connection)

    def owner(self, key: str) -> KeyOwner | None:
        """The owner of the key at the last look, a fraction of a second ago, or None. Sends no query."""
        return self._holdings.owner(key)

    def owns(self, key: str) -> bool:
        """Whether this writer would try to write the key now. Sends no query and may be wrong; `owning` checks."""
        return not self._closed and self._holdings.is_ready(key, anyio.current_time())

    def term(self, key: str) -> int | None:
        """The term under which this writer has the key, or None. It stays while a transaction owns the key."""
        return self._holdings.term_of(key)

    def statistics(self) -> ShardedWriterStatistics:
        """Counts, as one frozen value."""
        return self._holdings.statistics()

    async def keep(self) -> None:
        """Keep the membership and the slots until the writer has left. Raises errors before it has joined.

        Only `aclose` ends it: a round that is cancelled may have joined.
        """
        joined = False
        try:
            with self._keeping:
                while not self._keeper.has_left:
                    try:
                        async with self._db.connection() as connection, connection.listen(_CHANNEL) as notices:
                            while not self._keeper.has_left:
                                self._asked = True
                                await self._round(connection)
                                joined = joined or self._holdings.term is not None
                                await self._wait_for_next_round(notices)
                    except ReplicadError as error:
                        if not joined:
                            raise
                        log.warning("writer_cannot_keep_its_share", writer=self.instance, error=str(error))
                        await anyio.sleep(_RETRY)
        finally:
            self._over = True
            self._wake_waiters()

    async def wait_joined(self) -> None:
        """Wait until the writer has joined."""
        while self._holdings.term is None:
            await self._changed.wait()

    async def aclose(self) -> None:
        """Give all slots back, within a bounded time. The other writers take the rest after the time to live."""
        self._closed = True
        self._keeper.leave()
        with anyio.move_on_after(LEAVE + _GRACE, shield=True):
            while self._asked and not (self._keeper.has_left or self._over):
                changed = self._changed
                self._called.set()
                await changed.wait()
        self._keeping.cancel()

    async def _wait_for_next_round(self, notices: WriterNotices) -> None:
        """Wait until the next round is due, a task asks for it, or a NOTIFY comes. A lost NOTIFY does no harm."""

        async def wait_for_notice() -> None:
            with suppress(DatabaseUnavailable):  # the next round raises it
                while await notices.next(math.inf) != self.stream:
                    pass
            self._called.set()

        with anyio.move_on_after(self._keeper.pause):
            async with open_plain_tasks() as tasks:
                tasks.start_soon(wait_for_notice)
                await self._called.wait()
        self._called = anyio.Event()

    async def _round(self, connection: WriterConnection) -> None:
        """One round of the keeper in a bounded time. If Postgres does not answer, a new connection is made."""
        with anyio.move_on_after(max(self._ttl, 1.0)) as patience:
            await self._drive(self._keeper.round(), connection)
        self._wake_waiters()
        if patience.cancelled_caught:
            raise DatabaseUnavailable(f"Postgres did not answer writer {self.instance} within its time to live.")

    async def _drive(self, asks: Asks, connection: WriterConnection) -> None:
        try:
            ask = next(asks)
            while True:
                ask = asks.send(await connection.fetch(ask.sql(self._schema), *ask.args))
        except StopIteration:
            pass

    async def _wait_until_ready(self, key: str, deadline: float) -> None:
        while self._closed or not self._holdings.is_ready(key, anyio.current_time()):
            changed = self._changed
            if self._keeper.has_left or anyio.current_time() >= deadline or not self._holdings.is_moving(key):
                await anyio.lowlevel.checkpoint()  # writers that redirect to each other must let keepers run
                raise self._holdings.refusal(key)
            with anyio.CancelScope(deadline=deadline):
                await changed.wait()

    @asynccontextmanager
    async def _begun(self, key: str) -> AsyncIterator[WriterConnection]:
        """The transaction of a write, after its fence. Raises _Moved if the key has changed hands meanwhile."""
        async with self._db.connection() as connection:  # may take long; the write counts as in flight only after it
            slot = self._holdings.begin(key, anyio.current_time())
            if slot is None:
                raise _Moved
            try:
                async with AsyncExitStack() as transaction:
                    await self._pass_fence(transaction, connection, key, slot)
                    yield connection
                self._holdings.counts["writes"] += 1
            finally:
                if self._holdings.end(slot):
                    self._called.set()

    async def _pass_fence(
        self, transaction: AsyncExitStack, connection: WriterConnection, key: str, slot: Slot
    ) -> None:
        owns = value_call(self._schema, "writer_owns", 4)
        fence = fill(owns, (self.stream, key, self.instance, slot.term), quote_argument)
        try:
            await transaction.enter_async_context(connection.transaction(opening=fence, idle=None))
        except NotOwner as error:
            self._holdings.doubt(slot)
            self._called.set()
            raise _Moved from error

    def _wake_waiters(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()


@overload
def open_sharded_writer(
    db: Database, stream: str, instance: str, *, address: str | None = None, ttl: float = TTL, schema: str = SCHEMA
) -> AbstractAsyncContextManager[ShardedWriter[Connection]]: ...
@overload
def open_sharded_writer(
    db: Pool, stream: str, instance: str, *, address: str | None = None, ttl: float = TTL, schema: str = SCHEMA
) -> AbstractAsyncContextManager[ShardedWriter[Any]]: ...
@asynccontextmanager
async def open_sharded_writer(
    db: Database | Pool,
    stream: str,
    instance: str,
    *,
    address: str | None = None,
    ttl: float = TTL,
    schema: str = SCHEMA,
) -> AsyncIterator[ShardedWriter[Any]]:
    """A writer that shares a stream's keys with others, for the length of the block.

    `db`: on trio a `Database`, on asyncio a pool of asyncpg (`asyncpg.create_pool`); `owning` yields its connections.

    It joins, gets its share of the slots from the others, and returns all of it at the end, also where SIGTERM ends the
    process and nobody else handles it. It holds one connection
    of `db`; each write needs another. `instance` is the name of this writer; each writer needs its own. A process that
    starts under the name of a killed writer waits for the time to live of that writer. `address` (at most 500
    characters) is given to the other writers: where the application sends requests that belong to this writer. `ttl`
    (seconds, 0.2 to 3600): after that time without a beat the others take its slots. By its own clock the writer stops
    using them before.

    Raises:
        UnknownStream, StreamRefused: there is no such stream, or its writers do not share its keys.
        InstanceTaken: another process has that name and is alive.
        SchemaMissing: the SQL of sharding is not installed in this database.
    """
    database, own = (PooledDatabase(db), PooledDatabase.own) if hasattr(db, "get_idle_size") else (db, _itself)
    await require_installed(cast("Database", database), stream, schema)
    writer = ShardedWriter(database, stream, instance, own=own, address=address, ttl=ttl, schema=schema)
    async with ended_in_order(), open_plain_tasks() as tasks:
        try:
            tasks.start_soon(writer.keep)
            await writer.wait_joined()
            yield writer
        finally:
            await writer.aclose()


def _itself(connection: C) -> C:
    return connection


async def require_installed(db: Database, stream: str, schema: str) -> None:
    """Check that the SQL of sharding is installed. Raises SchemaMissing with the remedy, and SchemaTooNew."""
    try:
        await schemas.require(db, "sharding", schema)
    except SchemaMissing as error:
        raise SchemaMissing(str(error).replace("sharding enable STREAM", f"sharding enable {stream}")) from error
