"""The bridge from trio to asyncpg. Only this module imports asyncpg and trio_asyncio.

A `Database` is a bounded pool of connections to one Postgres. A `Connection` (connection.py) is a connection of the
pool, held for a while. Errors of the driver become replicad's own (failures.py).

Private parts of the two libraries are changed in two places: `remembering` keeps the array types that asyncpg has
looked up, and `hasten` makes the loop of trio_asyncio run callbacks in few turns of trio.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet

import asyncpg
import trio
import trio_asyncio
from asyncpg import Record as Row

from replicad import errors
from replicad.eventlog import get_logger
from replicad.fixed_settings import FIXED
from replicad.postgres import failures
from replicad.postgres.connection import COPY_CHUNK, Backend, Connection, Counters, Notices, Settings, Sink
from replicad.postgres.literals import quote_ident, quote_literal
from replicad.postgres.passfile import find_password
from replicad.postgres.statements import load_sql

__all__ = [
    "COPY_CHUNK",
    "Backend",
    "Connection",
    "Database",
    "DatabaseStatistics",
    "Fence",
    "Notices",
    "Row",
    "Sink",
    "load_sql",
    "open_database",
    "quote_ident",
    "quote_literal",
]

log = get_logger(__name__)

_CLOSE = 2.0  # seconds to close all connections in an orderly way
_STATEMENTS = 256  # prepared statements kept per connection: more than replicad has queries
_SERVER = (  # as `stream_incarnation` names it, but for the database and the timeline, which a promotion changes
    "SELECT concat_ws('/', system_identifier, extract(epoch FROM pg_postmaster_start_time()), extract(epoch FROM "
    "least((SELECT a.stats_reset FROM pg_stat_get_archiver() a), pg_stat_get_bgwriter_stat_reset_time(), "
    "(SELECT w.stats_reset FROM pg_stat_get_wal() w)))) FROM pg_control_system()"
)
_VERIFY = "SELECT pg_backend_pid() AS pid, current_setting('transaction_timeout', true) AS transaction_timeout"
_IDENTITY = "SELECT pg_backend_pid(), backend_start FROM pg_stat_get_activity(pg_backend_pid())"
_DRIVER_ERRORS = (
    asyncpg.PostgresError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,
    asyncio.CancelledError,  # the driver's own task was cancelled; a cancelled trio scope raises another one
    AttributeError,  # raised by its methods when the connection is lost between two of their steps
    OSError,
)

_SESSION = {
    **FIXED,
    "default_transaction_isolation": "read committed",  # each statement must see the latest commits (docs/positions.md)
    "jit": "off",  # compiling costs more time than most of our statements take
    # What a role or a database may have set, and what would end our sessions or change what our statements mean:
    "default_transaction_deferrable": "off",
    "idle_session_timeout": "0",  # a session that listens, holds locks or waits for work is idle most of the time
    "idle_in_transaction_session_timeout": "0",  # `Connection.transaction` sets its own bound
    "lock_timeout": "0",
    "exit_on_error": "off",
}
_NEWER = {"transaction_timeout": "0"}  # of PostgreSQL 17; a server that does not know a name refuses the connection

# Prepared statements are not planned again as their tables grow: a plan that was made for an empty table must be good.
_BY_INDEX = {
    "enable_seqscan": "off",
    "enable_bitmapscan": "off",
    "enable_sort": "off",
    "plan_cache_mode": "force_generic_plan",
}

FIRST_ASSIGNED = 10_000  # lower oids are written down in the sources of Postgres (its manual: "OID Assignment")

_found: dict[frozenset[int], Any] = {}  # what the driver found, by the oids: no more than the driver's queries need
_NOT_RUN = SimpleNamespace(name="known")  # instead of the lookup's own statement, of which the driver reads the name

MOST_CALLBACKS = 64  # callbacks in one turn; then other tasks of trio run
_REPLACED = ("_q_send", "_q_recv", "_main_loop_one", "_add_reader", "_check_callback", "synchronize")


@dataclass(frozen=True, slots=True)
class DatabaseStatistics:
    """A moment of a pool. The last four count since it was opened."""

    size: int
    open: int
    idle: int
    waiting: int
    connected: int
    lost: int
    statements: int
    cancelled: int


class Fence:
    """Which run of which server the connections of some pools must lead to: the run from which positions are read.

    While an address moves from one server to another, connections to both can be open. Rows that one server has must
    not be read for positions of the other. The leader (`Horizon`) calls `lead` on each new connection. From then on
    connections to another server are not used: idle connections are closed, a new connection is refused, and `strayed`
    is set, so that the leader connects anew and sees which server it is.
    """

    def __init__(self) -> None:
        self.server: str | None = None
        self.strayed = False

    def lead(self, connection: Connection) -> None:
        """Positions are read from this connection from now on."""
        self.server = connection.server
        self.strayed = False

    def admits(self, connection: Connection) -> bool:
        """Whether the connection leads to that server."""
        return self.server is None or connection.server is None or connection.server == self.server


class Database:
    """A bounded pool of connections to one Postgres. Made by `open_database`.

    Connections are made when needed and kept. A lost one (a restart of Postgres, for example) is replaced at its next
    use. A statement during which the connection is lost raises DatabaseUnavailable and is not repeated, because it is
    unknown whether it took effect.
    """

    def __init__(
        self,
        loop: Any,
        settings: Settings,
        size: int,
        wait_timeout: float,
        *,
        identify: bool = False,
        fence: Fence | None = None,
    ) -> None:
        self._loop = loop
        self._settings = settings
        self._size = size
        self._wait_timeout = wait_timeout
        self._places = trio.Semaphore(size, max_value=size)
        self._idle: list[Connection] = []
        self._counters = Counters()
        self._identify = identify
        self.fence = fence
        self._identified: WeakSet[Connection] = WeakSet()
        self._session = settings.session
        self._closed = False

    @property
    def target(self) -> failures.Target:
        """Host, database and user, for messages. Has no password."""
        return self._settings.target

    async def fetch(self, sql: str, *args: object) -> list[Row]:
        """`Connection.fetch` on any connection of the pool."""
        async with self._borrowed() as connection:
            return await connection.fetch(sql, *args)

    async def fetch_row(self, sql: str, *args: object) -> Row | None:
        """`Connection.fetch_row` on any connection of the pool."""
        async with self._borrowed() as connection:
            return await connection.fetch_row(sql, *args)

    async def fetch_value(self, sql: str, *args: object) -> Any:
        """`Connection.fetch_value` on any connection of the pool."""
        async with self._borrowed() as connection:
            return await connection.fetch_value(sql, *args)

    async def execute(self, sql: str, *args: object) -> str:
        """`Connection.execute` on any connection of the pool; for SET and the like take `connection()`."""
        async with self._borrowed() as connection:
            return await connection.execute(sql, *args)

    async def copy_out(
        self, query: str, *args: object, sink: Sink, timeout: float | None = None, lock: str | None = None
    ) -> int:
        """`Connection.copy_out` on any connection of the pool."""
        async with self._borrowed() as connection:
            return await connection.copy_out(query, *args, sink=sink, timeout=timeout, lock=lock)

    async def copy_values(
        self, query: str, *, sink: Sink, timeout: float | None = None, lock: str | None = None
    ) -> None:
        """`Connection.copy_values` on any connection of the pool."""
        async with self._borrowed() as connection:
            await connection.copy_values(query, sink=sink, timeout=timeout, lock=lock)

    async def copy_in(
        self,
        table: str,
        *,
        columns: Sequence[str],
        records: Iterable[Sequence[object]] | None = None,
        source: Iterable[bytes] | None = None,
        schema: str | None = None,
    ) -> int:
        """`Connection.copy_in` on any connection of the pool."""
        async with self._borrowed() as connection:
            return await connection.copy_in(table, columns=columns, records=records, source=source, schema=schema)

    @asynccontextmanager
    async def connection(self, *, leader: bool = False) -> AsyncIterator[Connection]:
        """One connection for the block. At its end it is reset: transaction rolled back, settings and locks
        released. With `leader` it is a new one, and the fence follows it.
        """
        async with self._borrowed(reset=True, leader=leader) as connection:
            yield connection

    @asynccontextmanager
    async def listen(self, channel: str) -> AsyncIterator[Notices]:
        """`Connection.listen` on a connection of the pool, which the block keeps to itself."""
        async with self._borrowed(reset=True) as connection, connection.listen(channel) as notices:
            yield notices

    def backends(self) -> list[Backend]:
        """The server's processes behind the connections that are open now. The pool was opened with `identify`."""
        assert self._identify
        return [one.backend for one in self._identified if one.backend is not None and not one.is_closed]

    def statistics(self) -> DatabaseStatistics:
        """A frozen copy of the counters."""
        waiting = self._places.statistics().tasks_waiting
        busy = self._size - self._places.value
        counters = self._counters
        return DatabaseStatistics(
            size=self._size,
            open=busy + len(self._idle),
            idle=len(self._idle),
            waiting=waiting,
            connected=counters.connected,
            lost=counters.lost,
            statements=counters.statements,
            cancelled=counters.cancelled,
        )

    @asynccontextmanager
    async def _borrowed(self, *, reset: bool = False, leader: bool = False) -> AsyncIterator[Connection]:
        await self._wait_for_place()
        try:
            if leader:
                self._drop_idle()
            connection = self._pop_idle() or await self._connect()
            if self.fence is not None:
                self._check_server(connection, self.fence, leader=leader)
            try:
                yield connection
            finally:
                if await connection.settle(reset=reset) and not self._closed:
                    self._idle.append(connection)
                else:
                    connection.terminate()
                if connection.is_read_only:
                    self._drop_idle()
        finally:
            self._places.release()

    async def _wait_for_place(self) -> None:
        if self._closed:
            raise errors.DatabaseUnavailable(f"the pool of connections to Postgres at {self.target} is closed.")
        with suppress(trio.WouldBlock):
            self._places.acquire_nowait()  # the usual case, without the scheduler
            return
        with trio.move_on_after(self._wait_timeout) as scope:
            await self._places.acquire()
        if scope.cancelled_caught:
            raise errors.DatabaseUnavailable(
                f"all {self._size} connections to Postgres at {self.target} stayed busy for {self._wait_timeout:g} s: "
                "raise the size of the pool, or look for what holds them."
            )

    def _drop_idle(self) -> None:
        """Close the idle connections, so that new sessions begin: these have the unusable settings of another one, or
        lead to another server.
        """
        idle, self._idle = self._idle, []
        for connection in idle:
            connection.terminate()

    def _check_server(self, connection: Connection, fence: Fence, *, leader: bool) -> None:
        """Let the fence follow the connection, or refuse it where it leads to another server."""
        if leader:
            fence.lead(connection)
        elif not fence.admits(connection):
            fence.strayed = True
            connection.terminate()
            raise errors.DatabaseUnavailable(
                f"Postgres at {self.target.host} is another server now, or was restarted; try again."
            )

    def _pop_idle(self) -> Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if not connection.is_closed and (self.fence is None or self.fence.admits(connection)):
                return connection
            self._counters.lost += 1
            connection.terminate()
        return None

    async def _connect(self) -> Connection:
        connection = await self._open()
        try:
            row = await self._verify(connection)
            if any(row[name] not in (None, value) for name, value in _NEWER.items()):
                connection.terminate()
                self._session = self._session | _NEWER
                connection = await self._open()
                await self._verify(connection)
            if self._identify:
                await self._note_backend(connection)
            if self.fence is not None:
                connection.server = await connection.fetch_value(_SERVER)
        except BaseException:
            connection.terminate()
            raise
        return connection

    async def _open(self) -> Connection:
        settings = self._settings
        try:
            driver = await self._loop.run_aio_coroutine(
                asyncpg.connect(
                    settings.url.replace(":///?", "://?", 1),  # the driver takes an empty path for a database's name
                    password=find_password(settings.url),
                    loop=self._loop,
                    connection_class=_DRIVER,
                    timeout=settings.connect_timeout,
                    server_settings=self._session,
                    statement_cache_size=_STATEMENTS,
                    max_cached_statement_lifetime=0,
                )
            )
        except Exception as error:
            raise failures.while_connecting(error, settings.target, settings.connect_timeout) from error
        self._counters.connected += 1
        return Connection(driver, self._loop, settings, self._counters)

    async def _verify(self, connection: Connection) -> Row:
        """Refuse a connection that is not one session of Postgres; returns settings of the session.

        Two transactions are made: a pooler may give each of them to another session. The first transaction has no
        prepared statement, which a pooler may not know in its next session.
        """
        pid = connection.key_pid or await connection.fetch_value("SELECT pg_backend_pid()")  # 0: no key was sent
        if await connection.execute(f"SELECT 1 WHERE pg_catalog.pg_backend_pid() = {pid}") != "SELECT 1":
            raise failures.pooled(self.target.host)
        connection.pid = pid
        return await connection.confirm(_VERIFY)

    async def _note_backend(self, connection: Connection) -> None:
        row = await connection.fetch_row(_IDENTITY)
        assert row is not None
        connection.backend = Backend(*row)
        self._identified.add(connection)

    async def _refuse_old_server(self, min_version: int) -> None:
        version = await self.fetch_value("SELECT current_setting('server_version_num')::int")
        if version < min_version:
            raise errors.DatabaseRefused(
                f"Postgres at {self.target.host} is version {version // 10000}; "
                f"replicad needs version {min_version // 10000} or newer."
            )

    async def _close(self) -> None:
        self._closed = True
        idle, self._idle = self._idle, []
        async with trio.open_nursery() as nursery:
            for connection in idle:
                nursery.start_soon(connection.close, _CLOSE)


@asynccontextmanager
async def open_database(
    url: str,
    *,
    size: int,
    application_name: str,
    connect_timeout: float = 10,
    statement_timeout: float | None = 60,
    lock_timeout: float | None = None,
    wait_timeout: float = 30,
    min_version: int = 150000,
    identify: bool = False,
    by_index: bool = False,
    fence: Fence | None = None,
    local_commits: bool = False,
) -> AsyncIterator[Database]:
    """Open a pool of at most `size` connections. A connection is made at once, to check that the server answers and is
    new enough.

    Time-outs are seconds: to connect, for one statement and for one lock (kept by Postgres itself; None for none), and
    to wait for a free connection. Every connection has the FIXED settings and READ COMMITTED. Starts an asyncio loop
    for the driver, if none is running. With `identify`, `Database.backends` lists our processes. `by_index`: statements
    read large tables in the order of an index, and keep one plan. Pools with one `fence` use connections to one run of
    one server only. `local_commits`: a commit waits for the local disk, and for no standby, whatever Postgres is set to
    (docs/limits.md has a table of the data that is written so).

    Raises UsageError (not a Postgres URL), DatabaseUnavailable and DatabaseRefused (also for a server older than
    `min_version`), each with a sentence for the operator.
    """
    target = failures.parse_target(url)
    session = dict(_SESSION, application_name=application_name)
    session["statement_timeout"] = str(round((statement_timeout or 0) * 1000))
    if lock_timeout is not None:
        session["lock_timeout"] = str(round(lock_timeout * 1000))
    if by_index:
        session.update(_BY_INDEX)
    if local_commits:
        session["synchronous_commit"] = "local"
    settings = Settings(
        url, target, session, connect_timeout, statement_timeout, _DRIVER_ERRORS, asyncpg.InternalClientError
    )
    async with _asyncio_loop() as loop:
        database = Database(loop, settings, size, wait_timeout, identify=identify, fence=fence)
        try:
            await database._refuse_old_server(min_version)
            yield database
        finally:
            await database._close()


@asynccontextmanager
async def _asyncio_loop() -> AsyncIterator[Any]:
    around = trio_asyncio.current_loop.get()
    if around is not None and not around.is_closed():
        yield around
        return
    failure: BaseException | None = None
    async with trio_asyncio.open_loop() as loop:
        loop.set_exception_handler(_log_stray_error)
        hasten(loop)
        try:
            yield loop
        except (Exception, KeyboardInterrupt, SystemExit) as error:  # noqa: BLE001 - raised again below
            failure = error  # raised again outside the nurseries of the loop, which would wrap it in exception groups
    if failure is not None:
        raise failure


def _log_stray_error(_loop: Any, context: dict[str, Any]) -> None:
    """Log an error that no task waits for. By default trio_asyncio would end the whole loop for it."""
    error = context.get("exception")
    # Errors of the driver were raised in the task that waited; these are copies.
    tell = log.debug if isinstance(error, _DRIVER_ERRORS) else log.warning
    tell("asyncio_error", message=context.get("message"), error=repr(error))


def remembering(driver: type[Any]) -> type[Any]:
    """A class of connections like `driver`, asyncpg's, of which only the first one looks up the types of Postgres.

    asyncpg looks up each type that it has no codec for, and it has none for most arrays: bigint[] and boolean[], say.
    It does so on every connection, by a recursive query over the catalog that takes Postgres some 6 ms, and by two more
    that switch JIT off and on. But the types of Postgres itself are the same on every server: below `FIRST_ASSIGNED` an
    oid is part of the sources of Postgres. So the answer is kept for the whole process.

    This class overrides a private method. A version of asyncpg that has no such method, or one with another result,
    looks up types as ever.
    """

    class Remembering(driver):  # type: ignore[misc]
        __slots__ = ()

        async def _introspect_types(self, typeoids: Iterable[int], *rest: Any, **named: Any) -> Any:
            oids = frozenset(typeoids)
            if oids in _found:
                return _found[oids], _NOT_RUN
            result = await super()._introspect_types(oids, *rest, **named)
            if isinstance(result, tuple) and len(result) == 2 and max(oids) < FIRST_ASSIGNED:
                _found[oids] = result[0]
            return result

    return Remembering


_DRIVER = remembering(asyncpg.Connection)


def hasten(loop: Any) -> None:
    """Let this loop, which was opened just now, run its callbacks in few turns.

    trio_asyncio gives each callback of asyncio a turn of trio of its own, in which the kernel is asked for events. One
    answer of Postgres is three to five callbacks. Here queued callbacks run one after the other, as in asyncio itself,
    and callbacks that follow from an answer run in the task that has read it. A short statement then takes half to two
    thirds of the processor time (measured), and the poller sends hundreds a second.

    This replaces private parts of trio_asyncio's loop. A version that lacks any of these parts is left unchanged.
    """
    if not all(hasattr(loop, name) for name in _REPLACED):
        return
    loop.call_soon(_nothing)  # the main loop waits in the queue that is replaced
    queue = _CallbackQueue()
    loop._q_send = loop._q_recv = queue
    loop._check_callback = _nothing  # looks for mistakes of programmers; asyncio's own loop does so in debug mode only
    loop._main_loop_one = partial(_run_some, queue, loop._main_loop_one)
    loop._add_reader = partial(_add_reader, queue, loop._add_reader)
    loop.synchronize = partial(_synchronize, queue, loop.synchronize)


class _CallbackQueue:
    """The queue of work, both ends of it: callbacks, timers, and trio functions that are to be started."""

    def __init__(self) -> None:
        self.held = False  # a task runs the callbacks that come now itself
        self._handles: deque[asyncio.Handle] = deque()
        self._arrived = trio.Event()

    def send_nowait(self, handle: asyncio.Handle) -> None:
        self._handles.append(handle)
        if not self.held:
            self._arrived.set()

    async def receive(self) -> asyncio.Handle:
        if self._handles:
            await trio.lowlevel.checkpoint()  # other tasks run between two of our turns
        while not self._handles:
            self._arrived = trio.Event()
            await self._arrived.wait()
        return self._handles.popleft()

    def receive_nowait(self) -> asyncio.Handle:
        if not self._handles:
            raise trio.WouldBlock
        return self._handles.popleft()

    def run_nowait(self) -> None:
        """Run the callbacks that come first. The main loop is woken for the rest, which need not be callbacks."""
        for _ in range(MOST_CALLBACKS):
            if not self._handles or type(self._handles[0]) is not asyncio.Handle:
                break
            handle = self._handles.popleft()
            if not handle.cancelled():
                handle._run()
        if self._handles:
            self._arrived.set()

    @property
    def empty(self) -> bool:
        return not self._handles


async def _run_some(queue: _CallbackQueue, run_one: Callable[[bool], Any], no_wait: bool = False) -> None:
    """In place of the method that waits for one callback and runs it: run those, too, that are queued then."""
    await run_one(no_wait)
    if not no_wait:
        queue.run_nowait()


def _add_reader(
    queue: _CallbackQueue, add: Callable[..., Any], fd: int, callback: Callable[..., None], *args: object
) -> Any:
    """In place of the method that calls `callback` when there is something to read. `synchronize` is called next."""

    def read() -> None:
        queue.held = True
        try:
            callback(*args)
        finally:
            queue.held = False

    return add(fd, read)


async def _synchronize(queue: _CallbackQueue, synchronize: Callable[[], Any]) -> None:
    """In place of the method that waits until all that is queued by now was run."""
    queue.run_nowait()
    if not queue.empty:
        await synchronize()


def _nothing(*_: object) -> None:
    pass
