"""One connection to Postgres, used from trio: statements, COPY in both directions, transactions, cancellation.

bridge.py makes the connected driver object and its loop, and knows which driver it is. Nothing here opens or shares
connections.

Cancellation: when a trio scope is cancelled while a statement runs, the driver sends Postgres a cancel request. The
connection then has a short, shielded time to become usable again; otherwise it is closed. So no cancelled statement
keeps running.

`Handoff` passes the chunks of a COPY, and `Notices` the payloads of NOTIFY, from the driver's asyncio tasks to the trio
tasks that take them. `Values` cuts a binary COPY into its values and does no I/O.
"""

from __future__ import annotations

import asyncio
import struct
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Literal, TypeVar, cast

import trio

from replicad import errors
from replicad.errors import DatabaseError
from replicad.postgres import failures
from replicad.postgres.literals import fill

T = TypeVar("T")
Isolation = Literal["read_committed", "repeatable_read", "serializable"]
Sink = Callable[[bytes], Awaitable[None]]
Row = Any  # a record of the driver: by index, by name, and a mapping; bridge.py exports its real class

_ISOLATION: dict[Isolation, str] = {
    "read_committed": "READ COMMITTED",
    "repeatable_read": "REPEATABLE READ",
    "serializable": "SERIALIZABLE",
}

IDLE = 20.0  # seconds without a statement within a transaction of ours
_SETTLE = 2.0  # seconds for a cancelled connection to become usable; then it is closed
_GRACE = 5.0  # seconds beyond statement_timeout after which a silent server counts as lost

# Quote and delimiter that JSON and our lines never contain, so that CSV leaves every byte as it is.
_COPY_LINES = "(FORMAT csv, QUOTE E'\\x01', DELIMITER E'\\x02')"

# The driver (asyncpg 0.32) drops the rows that it has received when a NOTICE comes after them: a function that makes a
# row may raise one.
_QUIETLY = "SET LOCAL client_min_messages = error"

# Planning a query locks all tables that it reads, until the transaction ends: the message of several statements is one.
_LOCKING = "DECLARE replicad_copy NO SCROLL CURSOR FOR {query}\n; CLOSE replicad_copy"

COPY_CHUNK = 128 * 1024  # bytes per call of a sink; with smaller chunks the hand-over costs most (measured)
_COPY_AHEAD = 2  # chunks that may wait for a slow sink; beyond it Postgres waits

# The format is in the manual of Postgres: COPY, Binary Format. All numbers are signed and big-endian.
_SIGNATURE: Final = b"PGCOPY\n\xff\r\n\0"
_HEADER: Final = struct.Struct("!11sii")  # the signature, flags, and how many bytes of extensions follow
_FIELD: Final = struct.Struct("!hi")  # the number of columns, and the length of the value
_END: Final = b"\xff\xff"

_NOTICES_AHEAD = 1000  # payloads that may wait; further ones are lost, and users of NOTIFY must expect that


@dataclass(slots=True)
class Counters:
    """What a pool has counted since it was opened; shared by its connections."""

    connected: int = 0
    lost: int = 0
    statements: int = 0
    cancelled: int = 0


@dataclass(frozen=True, slots=True)
class Settings:
    """What all connections of a pool have in common.

    `driver_errors` are the exceptions that the driver raises. `confused` is the one for a broken protocol state, for
    example after a backend was killed between two statements.
    """

    url: str
    target: failures.Target
    session: dict[str, str]
    connect_timeout: float
    statement_timeout: float | None
    driver_errors: tuple[type[BaseException], ...]
    confused: type[Exception]


@dataclass(frozen=True, slots=True)
class Backend:
    """The server's process of a connection. The pid alone is not enough: another process may get it later."""

    pid: int
    started: datetime


class Connection:
    """One connection, held by one task at a time. Made by `bridge.Database`, which also closes it or takes it back."""

    def __init__(self, driver: Any, loop: Any, settings: Settings, counters: Counters) -> None:
        self._driver = driver
        self._loop = loop
        self._settings = settings
        self._counters = counters
        self.backend: Backend | None = None  # known in pools that were opened with `identify`
        self.pid: int | None = None  # of the server's process, once it is known that the session is ours alone
        self.server: str | None = None  # which run of which server it leads to; known in pools with a `Fence`
        self._savepoints = 0
        self._together = False  # statements run in the driver's loop already
        self._dirty = False  # a statement was cancelled: check the connection before its next use
        self.is_read_only = False  # a statement was refused for that; changed settings of roles need a new session

    @property
    def is_closed(self) -> bool:
        """True when the connection is lost or closed; all other methods then raise DatabaseUnavailable."""
        return bool(self._driver.is_closed())

    @property
    def key_pid(self) -> int:
        """The process that the server named as ours when the connection was made; 0 if it named none."""
        return int(self._driver.get_server_pid())

    @property
    def target(self) -> failures.Target:
        """Host, database and user, for messages. Has no password."""
        return self._settings.target

    async def together(self, work: Callable[[], Awaitable[T]]) -> T:
        """Run `work`, which sends short statements on this connection, in the loop of the driver.

        The way there and back takes as long as a short statement; so it is made once for all of them. `work` waits for
        nothing but this connection, and must end within the time of one statement. Raises what `work` raises.
        """
        self._together = True
        try:
            return cast("T", await self._cross(work))
        finally:
            self._together = False

    async def fetch(self, sql: str, *args: object) -> list[Row]:
        """All rows of one statement with parameters `$1`, `$2`, ..."""
        rows: list[Row] = await self._run(self._driver.fetch, sql, *args)
        return rows

    async def fetch_row(self, sql: str, *args: object) -> Row | None:
        """The first row, or None."""
        return await self._run(self._driver.fetchrow, sql, *args)

    async def fetch_value(self, sql: str, *args: object) -> Any:
        """The first column of the first row, or None."""
        return await self._run(self._driver.fetchval, sql, *args)

    async def confirm(self, sql: str = "SELECT pg_backend_pid() AS pid") -> Row:
        """Raise DatabaseRefused, and close the connection, if the session behind it is another one by now.

        Returns the row of `sql`, whose column `pid` is the process of the session.
        """
        row = await self.fetch_row(sql)
        if row is None or row["pid"] != self.pid:
            self.terminate()
            raise failures.pooled(self.target.host)
        return row

    async def execute(self, sql: str, *args: object) -> str:
        """Run a statement (without arguments also several, separated by semicolons); returns the last one's tag."""
        tag: str = await self._run(self._driver.execute, sql, *args)
        return tag

    async def copy_out(
        self, query: str, *args: object, sink: Sink, timeout: float | None = None, lock: str | None = None
    ) -> int:
        """Send the lines of a query with one text column to `sink`; returns their number.

        Each value becomes its bytes and a newline; a value must not be empty nor `\\.`, and hold no newline and no
        control character U+0001 or U+0002 (JSON text and our lines never do). `sink` gets chunks of about COPY_CHUNK
        bytes that need not end at a line's end, in the calling task; while it waits, Postgres waits. `timeout`
        (seconds) bounds the whole; the pool's statement_timeout applies besides, and counts the sink's time too.

        `lock`: a statement that locks what the query reads. It runs before the COPY, in the same message and
        transaction, because COPY takes its snapshot before it locks tables (SELECT takes it afterwards): where it waits
        for a session that rewrites a table, it would see none of the rows that this session has written
        (docs/positions.md). None: a cursor for the query, which locks the same tables; it costs another planning.
        Empty: the query itself takes its snapshot after its locks.

        Raises what the sink raises; the COPY is cancelled in Postgres then.
        """
        tag = await self._copy(fill(query, args), _COPY_LINES, sink, timeout, lock)
        return int(tag.rpartition(" ")[2])

    async def copy_values(
        self, query: str, *, sink: Sink, timeout: float | None = None, lock: str | None = None
    ) -> None:
        """Send each value of a query with one text column, which is never NULL, to `sink`. Else as `copy_out`.

        For few large values: a hundred kilobytes in one cost a third of what they cost in a thousand lines.
        """
        values = Values()
        given = 0

        async def cut(data: bytes) -> None:
            nonlocal given
            for value in values.feed(data):
                given += 1
                await sink(value)

        tag = await self._copy(query, "(FORMAT binary)", cut, timeout, lock)
        values.finish()
        if int(tag.rpartition(" ")[2]) != given:
            raise errors.DatabaseError(f"a COPY had {tag.rpartition(' ')[2]} values, and {given} of them arrived.")

    async def _copy(self, query: str, options: str, sink: Sink, timeout: float | None, lock: str | None) -> str:
        first = _LOCKING.format(query=query) if lock is None else lock
        statement = f"{_QUIETLY}; {first}{first and '; '}COPY ({query}) TO STDOUT {options}"
        handoff = Handoff(self._loop)
        tag = ""
        with _deadline(timeout) as deadline:
            # The driver's public copy_from_query builds its own COPY and does not accept our options.
            tag = await self._alongside(self._driver._copy_out(statement, handoff.put, None), handoff, sink)
        if deadline.cancelled_caught:
            raise errors.DatabaseUnavailable(
                f"reading from Postgres at {self._settings.target} took longer than {timeout:g} s and was given up."
            )
        return tag

    async def copy_in(
        self,
        table: str,
        *,
        columns: Sequence[str],
        records: Iterable[Sequence[object]] | None = None,
        source: Iterable[bytes] | None = None,
        schema: str | None = None,
    ) -> int:
        """Load a table by COPY from `records` (tuples) or `source` (bytes in text format); returns the rows written.

        Both are read lazily, as Postgres takes them. Raises what they raise; then nothing is written.
        """
        if (records is None) == (source is None):
            raise ValueError("copy_in takes either records or source")
        where = {"columns": list(columns), "schema_name": schema}
        if records is not None:
            tag = await self._run(self._driver.copy_records_to_table, table, records=records, **where)
        else:
            tag = await self._run(self._driver.copy_to_table, table, source=_chunks(source or ()), **where)
        return int(tag.rpartition(" ")[2])

    @asynccontextmanager
    async def listen(self, channel: str) -> AsyncIterator[Notices]:
        """LISTEN to a channel for the length of the block."""
        notices = Notices(self)
        self._driver.add_termination_listener(notices.close)
        try:
            await self._run(self._driver.add_listener, channel, notices.hear)
            yield notices
        finally:
            notices.close()
            self._driver.remove_termination_listener(notices.close)

    @contextmanager
    def remarks(self, hear: Callable[[str], None]) -> Iterator[None]:
        """Call `hear` with each NOTICE and WARNING of Postgres while statements of the block run."""

        def on_message(_driver: object, message: Any) -> None:
            hear(message.message)

        self._driver.add_log_listener(on_message)
        try:
            yield
        finally:
            self._driver.remove_log_listener(on_message)

    @asynccontextmanager
    async def transaction(
        self,
        *,
        isolation: Isolation = "read_committed",
        readonly: bool = False,
        opening: str = "",
        idle: float | None = IDLE,
    ) -> AsyncIterator[None]:
        """A transaction, or a savepoint within an open transaction: committed at the end, rolled back on any exception.

        `idle`: seconds after which Postgres ends the session if it gets no statement of the transaction, so that a
        process of ours that is suspended holds no locks for longer. None: the transaction belongs to a user's program,
        which decides that. `opening` is a statement without parameters that is sent together with BEGIN, to save a
        round trip. If the connection is lost during the commit, DatabaseUnavailable is raised, and the outcome is
        unknown.
        """
        outermost = not self._in_transaction()
        if outermost:
            access = " READ ONLY" if readonly else ""  # otherwise the default of the role or database counts
            begin, commit, rollback = f"BEGIN ISOLATION LEVEL {_ISOLATION[isolation]}{access}", "COMMIT", "ROLLBACK"
            if idle is not None:
                begin += f"; SET LOCAL idle_in_transaction_session_timeout = {round(idle * 1000)}"
        else:
            self._savepoints += 1
            name = f"replicad_{self._savepoints}"
            begin, commit = f"SAVEPOINT {name}", f"RELEASE SAVEPOINT {name}"
            rollback = f"ROLLBACK TO SAVEPOINT {name}; RELEASE SAVEPOINT {name}"
        try:
            await self.execute(f"{begin}; {opening}" if opening else begin)
        except BaseException:
            if opening:
                await self._roll_back(rollback)
            raise
        try:
            yield
        except BaseException:
            await self._roll_back(rollback)
            raise
        if await self.execute(commit) == "ROLLBACK":  # the answer of Postgres if a statement has failed before
            raise errors.DatabaseError(
                f"Postgres at {self._settings.target} rolled the transaction back: a statement in it had failed."
            )

    def terminate(self) -> None:
        """Close the connection at once, without a message. Never blocks; may be called again."""
        self._driver.terminate()

    async def settle(self, *, reset: bool) -> bool:
        """Reset the connection for its next holder, shielded and in a bounded time; False if it had to be closed."""
        if self.is_closed or self.is_read_only:
            return False
        if not (reset or self._dirty or self._in_transaction()):
            return True
        usable = False
        with trio.move_on_after(_SETTLE, shield=True):
            try:
                if self._dirty or self._in_transaction():
                    await self.execute("ROLLBACK")
                await self._run(self._driver.reset)
                usable = not self.is_closed
            except errors.ReplicadError:
                usable = False
        self._dirty = False
        if not usable:
            self.terminate()
        return usable

    async def close(self, seconds: float) -> None:
        """Close in an orderly way within that time, or at once after it."""
        with trio.move_on_after(seconds, shield=True):
            with suppress(errors.ReplicadError):
                await self._run(self._driver.close, timeout=seconds)
        self.terminate()

    async def _roll_back(self, statement: str) -> None:
        rolled_back = False
        with trio.move_on_after(_SETTLE, shield=True):
            with suppress(errors.ReplicadError):
                await self.execute(statement)
                rolled_back = True
        if not rolled_back:
            self.terminate()

    async def _alongside(self, copy: Any, handoff: Handoff, sink: Sink) -> str:
        """Run the driver's COPY as an asyncio task and the sink in this task. Both end together."""
        self._counters.statements += 1
        task = self._loop.create_task(copy)
        task.add_done_callback(handoff.close)
        finished = False
        try:
            while True:
                with _deadline(self._patience()) as patience:
                    chunk = await handoff.take()
                if patience.cancelled_caught:
                    raise self.silent()
                if chunk is None:
                    break
                await sink(chunk)
            finished = True
        finally:
            if not finished:
                self._dirty = True
                self._counters.cancelled += 1
                task.cancel()
                with trio.move_on_after(_SETTLE, shield=True):
                    await self._loop.run_aio_coroutine(asyncio.wait([task]))
                if task.done() and not task.cancelled():
                    task.exception()  # retrieved, so that asyncio does not log it
        tag: str = await self._run(_result, task)
        return tag

    async def _run(self, method: Callable[..., Any], *args: object, **named: object) -> Any:
        """Await a coroutine of the driver. Its errors become ours; no answer within the time-out is a lost
        connection.
        """
        self._counters.statements += 1
        if not self._together:
            return await self._cross(method, *args, **named)
        try:
            return await method(*args, **named)
        except asyncio.CancelledError:
            raise  # by the caller that waits for all of `together`
        except self._settings.driver_errors as error:
            raise self._failure(error) from error

    async def _cross(self, method: Callable[..., Any], *args: object, **named: object) -> Any:
        result = None
        try:
            with _deadline(self._patience()) as patience:
                result = await self._loop.run_aio_coroutine(method(*args, **named))
        except self._settings.driver_errors as error:
            raise self._failure(error) from error
        except BaseException:
            self._dirty = True
            self._counters.cancelled += 1
            raise
        if patience.cancelled_caught:
            raise self.silent()
        return result

    def _failure(self, error: BaseException) -> BaseException:
        """Our error for an error of the driver."""
        if isinstance(error, AttributeError) and not self.is_closed:
            raise error  # a defect of ours, and not an effect of a lost connection in the driver
        self.is_read_only |= failures.is_read_only(error)
        lost = self._is_lost(error)
        return failures.while_running(error, self._settings.target, connection_lost=lost)

    def _is_lost(self, error: BaseException) -> bool:
        """Whether the connection is unusable after this error, even if the driver has not noticed it yet."""
        fatal = getattr(error, "severity_en", None) in ("FATAL", "PANIC") or isinstance(error, self._settings.confused)
        lost = fatal or self.is_closed
        if lost:
            self.terminate()
            self._counters.lost += 1
        return lost

    def _in_transaction(self) -> bool:
        return not self.is_closed and bool(self._driver.is_in_transaction())

    def _patience(self) -> float | None:
        limit = self._settings.statement_timeout
        return None if limit is None else limit + _GRACE

    def silent(self) -> errors.DatabaseUnavailable:
        """Close the connection because the server does not answer; returns the exception to raise."""
        self.terminate()
        self._counters.lost += 1
        return errors.DatabaseUnavailable(f"Postgres at {self._settings.target} stopped answering.")


def _deadline(seconds: float | None) -> trio.CancelScope:
    return trio.CancelScope() if seconds is None else trio.CancelScope(deadline=trio.current_time() + seconds)


async def _result(task: Any) -> Any:
    return await task


async def _chunks(source: Iterable[bytes]) -> AsyncIterator[bytes]:
    for chunk in source:
        yield chunk


class Handoff:
    """Between one COPY and its sink; a bounded number of chunks may wait."""

    def __init__(self, loop: Any) -> None:
        self._loop = loop
        self._chunks: deque[bytes] = deque()
        self._parts: list[bytes] = []
        self._size = 0
        self._arrived = trio.Event()
        self._room: asyncio.Future[None] | None = None
        self._closed = False

    async def put(self, data: bytes) -> None:
        """The driver's side: collect COPY_CHUNK bytes, then wait until the sink has taken them."""
        self._parts.append(data)
        self._size += len(data)
        if self._size >= COPY_CHUNK:
            self._flush()
            if len(self._chunks) >= _COPY_AHEAD:
                self._room = self._loop.create_future()
                await self._room

    def close(self, _task: object = None) -> None:
        """No more data: the rest is delivered, then take() returns None."""
        if self._parts:
            self._flush()
        self._closed = True
        self._arrived.set()

    async def take(self) -> bytes | None:
        """The trio side: the next chunk, or None at the end."""
        while not self._chunks:
            if self._closed:
                return None
            self._arrived = trio.Event()
            await self._arrived.wait()
        chunk = self._chunks.popleft()
        if self._room is not None and not self._room.done():
            self._room.set_result(None)
        return chunk

    def _flush(self) -> None:
        self._chunks.append(self._parts[0] if len(self._parts) == 1 else b"".join(self._parts))
        self._parts.clear()
        self._size = 0
        self._arrived.set()


class Values:
    """Cuts bytes into values in linear time. Holds at most one incomplete value and one piece of data."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._size = 0  # of all parts
        self._wanted = _HEADER.size  # bytes with which something can be done
        self._begun = False

    def feed(self, data: bytes) -> list[bytes]:
        """The values that these bytes complete. Raises DatabaseError if they are not of one column, or NULL."""
        self._parts.append(data)
        self._size += len(data)
        if self._size < self._wanted:
            return []
        data = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        at = 0
        if not self._begun:
            signature, _, extension = _HEADER.unpack_from(data)
            if signature != _SIGNATURE or extension:
                raise DatabaseError("Postgres began a binary COPY in a format that is not known.")
            at, self._begun = _HEADER.size, True
        found: list[bytes] = []
        self._wanted = _FIELD.size
        while len(data) >= at + _FIELD.size:
            columns, size = _FIELD.unpack_from(data, at)
            if columns != 1 or size < 0:
                raise DatabaseError("Postgres sent other values in a COPY than were asked for.")
            begin = at + _FIELD.size
            if len(data) < begin + size:
                self._wanted = _FIELD.size + size
                break
            found.append(bytes(data[begin : begin + size]))
            at = begin + size
        self._parts, self._size = [data[at:]], len(data) - at
        return found

    def finish(self) -> None:
        """There are no more bytes. Raises DatabaseError if the last value is not complete."""
        if not self._begun or b"".join(self._parts) != _END:
            raise DatabaseError("Postgres ended a COPY in the middle of a value.")


class Notices:
    """The payloads of one channel since `Connection.listen`, in the order of the commits."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._put, self._take = trio.open_memory_channel[str](_NOTICES_AHEAD)

    def hear(self, _driver: object, _pid: int, _channel: str, payload: str) -> None:
        """The driver's side: one payload."""
        with suppress(trio.WouldBlock, trio.ClosedResourceError):
            self._put.send_nowait(payload)

    def close(self, _driver: object = None) -> None:
        """No more payloads will come; received payloads can still be taken."""
        self._put.close()

    async def next(self, patience: float) -> str:
        """Wait for the next payload. After that many seconds without one, check that the server still answers.

        Raises DatabaseUnavailable when the connection is lost. Later payloads do not reach this listener.
        """
        while True:
            with trio.move_on_after(patience):
                try:
                    return await self._take.receive()
                except trio.EndOfChannel:
                    raise self._connection.silent() from None
            await self._connection.fetch_value("SELECT 1")
