"""A sharded writer for programs without async, on any DB-API connections to Postgres.

A thread keeps the membership and the slots, on a connection of its own. Writes use connections of the caller. writer.py
describes the methods; keeper.py and holdings.py decide. Errors of the driver are raised unchanged.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

from replicad.eventlog import get_logger
from replicad.postgres.literals import DbApi, close_quietly, roll_back_quietly, run, sqlstate_of
from replicad.sharding.holdings import Holdings, KeyOwner, ShardedWriterStatistics, Slot
from replicad.sharding.keeper import LEAVE, TTL, Ask, MembershipKeeper
from replicad.sqlstates import NOT_OWNER, means
from replicad.streams.queries import SCHEMA
from replicad.streams.row_text import wire_instance

log = get_logger(__name__)

_RETRY: Final = 0.5  # seconds until the keeper tries again after an error of Postgres
_GRACE: Final = 2.0  # seconds beyond LEAVE, for the last statements


class BlockingShardedWriter:
    """A writer of a shared stream, for any number of threads. A context manager.

    `connect` makes a connection. The keeper makes its own connections with it and closes them. `open_sharded_writer`
    has the other arguments too. Entering waits until the writer has joined. It raises what `connect` raises,
    StreamRefused or the driver's error if the stream's keys are not shared, and InstanceTaken.
    """

    def __init__(
        self,
        connect: Callable[[], DbApi],
        stream: str,
        instance: str,
        *,
        address: str | None = None,
        ttl: float = TTL,
        schema: str = SCHEMA,
    ) -> None:
        self.stream = stream
        self.instance = wire_instance(instance)
        self._connect = connect
        self._schema = schema
        self._holdings = Holdings(stream, self.instance, ttl)
        self._keeper = MembershipKeeper(self._holdings, address, ttl, time.monotonic)
        self._turn = threading.Condition()  # guards holdings and keeper; notified whenever a wait may be over
        self._called = threading.Event()
        self._closed = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._keep, name=f"replicad writer {self.instance}", daemon=True)

    def __enter__(self) -> BlockingShardedWriter:
        self._thread.start()
        try:
            with self._turn:
                self._turn.wait_for(lambda: self._holdings.term is not None or self._failure is not None)
        except BaseException:  # of a handler of a signal: the thread may have joined
            self.close()
            raise
        if self._failure is not None:
            raise self._failure
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @contextmanager
    def owning(self, connection: DbApi, key: str, *, wait: float = 0.0) -> Iterator[None]:
        """Run the block in a transaction of the connection, in which this writer owns the key.

        It is committed at the end and rolled back on any exception. The connection must not be in a transaction, and
        not in autocommit mode. The caller may use it otherwise before and after, in one thread at a time.

        Raises:
            NotOwner: another writer owns the key (the error names it), or none did until the end of the wait.
        """
        slot = self._begin(connection, key, time.monotonic() + wait)
        try:
            try:
                yield
            except BaseException:
                roll_back_quietly(connection)
                raise
            connection.commit()
            with self._turn:
                self._holdings.counts["writes"] += 1
        finally:
            self._end(slot)

    def owner(self, key: str) -> KeyOwner | None:
        """The owner of the key at the last look, a fraction of a second ago, or None. Sends no query."""
        with self._turn:
            return self._holdings.owner(key)

    def owns(self, key: str) -> bool:
        """Whether this writer would try to write the key now. Sends no query and may be wrong; `owning` checks."""
        with self._turn:
            return not self._closed and self._holdings.is_ready(key, time.monotonic())

    def term(self, key: str) -> int | None:
        """The term under which this writer has the key, or None. It stays while a transaction owns the key."""
        with self._turn:
            return self._holdings.term_of(key)

    def statistics(self) -> ShardedWriterStatistics:
        """Counts, as one frozen value."""
        with self._turn:
            return self._holdings.statistics()

    def close(self) -> None:
        """Give all slots back, within a bounded time. May be called again."""
        with self._turn:
            self._closed = True
            self._keeper.leave()
            self._turn.notify_all()
        self._called.set()
        if self._thread.ident is not None:
            self._thread.join(LEAVE + _GRACE)

    def _begin(self, connection: DbApi, key: str, deadline: float) -> Slot:
        while True:
            with self._turn:
                slot = None
                while slot is None:
                    remaining = deadline - time.monotonic()
                    slot = None if self._closed else self._holdings.begin(key, time.monotonic())
                    if slot is not None:
                        break
                    if self._keeper.has_left or remaining <= 0 or not self._holdings.is_moving(key):
                        raise self._holdings.refusal(key)
                    self._turn.wait(remaining)
            passed = False
            try:
                passed = self._pass_fence(connection, key, slot)
            finally:
                if not passed:
                    self._end(slot)
            if passed:
                return slot

    def _pass_fence(self, connection: DbApi, key: str, slot: Slot) -> bool:
        try:
            args = (self.stream, key, self.instance, slot.term)
            run(connection, Ask("writer_owns", args).sql(self._schema), args)
        except Exception as error:
            roll_back_quietly(connection)
            if not means(sqlstate_of(error), NOT_OWNER):
                raise
            with self._turn:
                self._holdings.doubt(slot)
            self._called.set()
            return False
        return True

    def _end(self, slot: Slot) -> None:
        with self._turn:
            drained = self._holdings.end(slot)
        if drained:
            self._called.set()

    def _keep(self) -> None:
        """The thread: run rounds of the keeper until it has left. When a connection fails, make a new one."""
        while not (self._keeper.has_left or self._failure or (self._closed and self._holdings.term is None)):
            connection: DbApi | None = None
            try:
                connection = self._connect()
                while not self._keeper.has_left:
                    self._round(connection)
                    self._called.wait(self._keeper.pause)
                    self._called.clear()
            except Exception as error:  # noqa: BLE001 - drivers differ; raised by __enter__, or tried again
                with self._turn:
                    if not self._holdings.counts["joined"]:
                        self._failure = error
                    self._turn.notify_all()
                log.warning("writer_cannot_keep_its_share", writer=self.instance, error=str(error))
                self._called.wait(_RETRY)
            finally:
                if connection is not None:
                    close_quietly(connection)

    def _round(self, connection: DbApi) -> None:
        asks = self._keeper.round()
        rows: Any = None
        with suppress(StopIteration):
            while True:
                with self._turn:
                    ask = asks.send(rows)
                rows = run(connection, ask.sql(self._schema), ask.args)
                connection.commit()
        with self._turn:
            self._turn.notify_all()
