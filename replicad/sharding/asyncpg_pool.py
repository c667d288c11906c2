"""The pool of asyncpg of a program on asyncio, as a sharded writer uses a `Database`.

Statements of the writer raise our exceptions. Statements of the program raise those of asyncpg, unchanged. This file
does not import asyncpg: the program made the pool.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Protocol, runtime_checkable

import anyio

from replicad.errors import DatabaseUnavailable, ReplicadError
from replicad.postgres import failures

_CONNECT_TIMEOUT = 60.0  # seconds, for a message only: the pool has the time limit


@runtime_checkable
class Pool(Protocol):
    """A pool of asyncpg."""

    def acquire(self) -> AbstractAsyncContextManager[Any]: ...

    def get_idle_size(self) -> int: ...


class PooledDatabase:
    """Connections of the pool."""

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
