"""The writer library for programs without async, on any DB-API connection to Postgres (psycopg, pg8000, ADBC, ...).

`BlockingWriter` has a connection of its own; `next_id` and `next_ids` work in the caller's transaction. writer.py
explains them and why they are safe. Errors of the driver are raised unchanged.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final

from replicad.errors import StreamRefused
from replicad.postgres.literals import DbApi, close_quietly, commits_by_itself, run, told_pid
from replicad.postgres.statements import rows_call, value_call
from replicad.streams.inflight import InFlight, Reservation
from replicad.streams.queries import SCHEMA
from replicad.streams.row_text import MASTER, wire_instance
from replicad.streams.writer import MAX_IN_FLIGHT, RESERVED, Positions, parse_ids, session_name

_PID: Final = "pg_catalog.pg_backend_pid()"
# The session's own: it may be idle for long while it holds its locks, and it must hold them.
_SESSION: Final = f"SELECT pg_catalog.set_config('idle_session_timeout', '0', false), {_PID}"
_TURN: Final = 60.0  # seconds to wait for the connection while other threads use it


class BlockingWriter:
    """One writer of one stream, for any number of threads. It owns the connection and closes it.

    The connection must be a session of its own: no pooler that hands it round between transactions. A session that
    changes is refused, with StreamRefused. When the connection breaks, the ids in flight are no longer protected (the
    table refuses them) and every call raises the driver's error: make a new writer.
    """

    def __init__(self, connection: DbApi, stream: str, instance: str = MASTER, *, schema: str = SCHEMA) -> None:
        self.stream = stream
        self.instance = wire_instance(instance)
        self._connection = connection
        self._schema = schema
        self._turn = threading.Lock()
        self._places = threading.BoundedSemaphore(MAX_IN_FLIGHT)
        self._number = 0
        self._ask(value_call("pg_catalog", "set_config", 3), *session_name(self.instance))
        self._pid = told_pid(connection) or self._ask(_SESSION)[0][1]
        self._check_session(self._ask(_SESSION)[0][1])
        found = self.positions()
        self._in_flight = InFlight(found.per_writer.get(self.instance, found.minimum))

    def __enter__(self) -> BlockingWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @contextmanager
    def get_next(self) -> Iterator[int]:
        """Reserve the next id for the length of the block."""
        with self.get_next_mult(1) as ids:
            yield ids[0]

    @contextmanager
    def get_next_mult(self, n: int) -> Iterator[tuple[int, ...]]:
        """Reserve n ids (1 to 10,000), ascending, for the length of the block.

        Raises:
            StreamRefused: the sequence went back, or the connection stays busy.
        """
        with self._places:
            reservation = self._reserve(n)
            try:
                yield reservation.ids
            finally:
                self._complete(reservation)

    def get_current_token(self) -> int:
        """The largest id up to which this writer has completed all of its own. Sends no query."""
        return self._in_flight.position

    def get_minimum_and_maximum(self) -> tuple[int, int]:
        """The current token, and the highest id that this writer has reserved, complete or not."""
        return self._in_flight.position, self._in_flight.maximum

    def positions(self) -> Positions:
        """The present positions of all writers of the stream, from Postgres."""
        with self._taken():
            rows = self._ask(rows_call(self._schema, "stream_positions", 1), self.stream)
        return Positions.of((row[0], row[1]) for row in rows)

    def close(self) -> None:
        """Close the connection, which releases all reservations. Safe to repeat."""
        close_quietly(self._connection)

    def _reserve(self, n: int) -> Reservation:
        with self._taken():
            held = self._in_flight.held
            try:
                ((number, bound, ids, pid),) = self._ask(
                    rows_call(self._schema, "stream_reserve", 3, f"{RESERVED}, {_PID}"), self.stream, n, held
                )
                self._check_session(pid)
                self._number = number
                return self._in_flight.reserve(parse_ids(ids), bound)
            except BaseException:
                if held is None:  # the statement may have taken the lock although its result was not received
                    self.close()
                raise

    def _complete(self, reservation: Reservation) -> None:
        """Closes the connection rather than keep a lock; the id is complete either way."""
        with self._taken():
            move = self._in_flight.complete(reservation)
            if move is None:
                return
            released = False
            with suppress(Exception):  # drivers raise different exceptions for a lost connection
                ((released,),) = self._ask(
                    value_call(self._schema, "stream_complete", 3), self._number, move.release, move.take
                )
            if not released:
                self._in_flight.lost()
                self.close()

    def _ask(self, sql: str, *args: object) -> Sequence[Any]:
        """Run a statement in its own transaction; its locks belong to the session and stay."""
        rows = run(self._connection, sql, args)
        self._connection.commit()
        return rows

    def _check_session(self, pid: int) -> None:
        if pid != self._pid:
            self.close()
            raise StreamRefused(
                f"writer {self.instance} of stream {self.stream}: the session behind its connection has changed, so "
                "a pooler (such as PgBouncer) stands between it and Postgres, and the session's locks are not the "
                "writer's alone: connect it to Postgres itself, or take ids by next_id in the transaction of the rows."
            )

    @contextmanager
    def _taken(self) -> Iterator[None]:
        if not self._turn.acquire(timeout=_TURN):
            raise StreamRefused(f"the connection of writer {self.instance} has been busy for {_TURN:g} s.")
        try:
            yield
        finally:
            self._turn.release()


def next_id(connection: DbApi, stream: str, *, schema: str = SCHEMA) -> int:
    """Reserve the next id in the caller's transaction; it is complete when that ends, committed or rolled back.

    Raises:
        StreamRefused: the connection is in autocommit mode, where an id would be complete at once.
    """
    _must_have_transactions(connection)
    ((found,),) = run(connection, value_call(schema, "stream_next", 1), (stream,))
    return int(found)


def next_ids(connection: DbApi, stream: str, n: int, *, schema: str = SCHEMA) -> tuple[int, ...]:
    """As `next_id`, n ids at once (1 to 10,000), ascending."""
    _must_have_transactions(connection)
    ((found,),) = run(connection, value_call(schema, "stream_next_mult", 2, "text"), (stream, n))
    return parse_ids(found)


def _must_have_transactions(connection: object) -> None:
    if commits_by_itself(connection):
        raise StreamRefused("an id is reserved for one transaction: turn autocommit off, take the id, insert, commit.")
