"""The backfiller: picks up what was scheduled and puts all ids of a table into its tube, piece by piece.

Everything it knows is in Postgres (tube_backfill and the control pods): a crash costs nothing, and any daemon goes
on where another stopped. An advisory lock per tube and partition sees that one works at a time. It waits while the
partition has as much backlog as it may have: the tube stays bounded however large the table is.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import structlog
import trio

from replicad import sqlstates
from replicad.errors import DatabaseError, DatabaseUnavailable
from replicad.postgres.bridge import Connection, Database, Row, quote_ident
from replicad.postgres.statements import call_row, call_value
from replicad.tubes.pods import TubeInfo

PROGRESS_INTERVAL = 5.0  # seconds between two words about progress
MAX_RUNNING = 2  # at a time: a backfill loads Postgres, and two saturate a small one
LOOK_LOCK_TIMEOUT = "50ms"  # for the table of one tube, while the others wait
PIECE_LOCK_TIMEOUT = "5s"  # for the attached table and the tube: DDL there is over by then, or has its turn

_LOCK_CLASS = 0x5253  # first half of the advisory locks of backfills

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast backfills go: times in seconds."""

    piece: int = 100_000  # ids in a transaction: a few hundred milliseconds, in which the tube's position stands still
    max_backlog: int = 10_000  # backfill pods of a partition, of 250 ids each, before it waits for the workers
    backlog: float = 0.2  # between two looks at a backlog that is full
    writers: float = 10.0  # to wait for open transactions before the culprit is named and the wait goes on
    retry: float = 10.0  # before a backfill that failed is tried again
    turn: float = 3.0  # before one that gave its turn away wants another; longer than a look takes to come round


@dataclass(frozen=True, slots=True)
class Job:
    """A backfill of one attached table. `start_seq` None: scheduled and not begun; `seq` is then the schedule's pod."""

    tube: str
    table: str
    order_col: str
    shard: int
    start_seq: str | None = None
    seq: int | None = None


class Reports(Protocol):
    """Where troubles of tubes are reported, as in `daemon/troubles.py`."""

    def begin(self, kind: str, name: str, cause: str, reason: str, *, code: str) -> None: ...

    def fail(self, kind: str, name: str, cause: str, error: BaseException) -> None: ...

    def end(self, kind: str, name: str, cause: str) -> None: ...


class Backfiller:
    """Does the backfills of all tubes of one schema, one per partition at a time.

    What fails is a trouble of its tube, and is tried again after a pause. One that has to wait, for workers or for
    open transactions, gives its turn to those of other tubes that wait for one.
    """

    def __init__(self, db: Database, schema: str, reports: Reports, pace: Pace = Pace()) -> None:
        """`db` needs a connection for each backfill that runs, and one to look for them."""
        self._db = db
        self._schema = schema
        self._reports = reports
        self._pace = pace
        self._running: set[tuple[str, int]] = set()  # tube, partition
        self._resting: dict[tuple[str, str], float] = {}  # tube, table: not to be tried again before
        self._failed: set[tuple[str, str]] = set()  # tube, table: reported
        self._others_wait = False  # for a turn, at the last look

    async def run(self, tubes: Sequence[TubeInfo], nursery: trio.Nursery) -> None:
        """Look once: start in `nursery` what can be started now. Tubes that have fewer running come first."""
        now = trio.current_time()
        self._resting = {key: until for key, until in self._resting.items() if until > now}
        found: list[tuple[Job, TubeInfo]] = []
        if tubes:
            async with self._db.connection() as connection:
                await connection.execute(f"SET lock_timeout = '{LOOK_LOCK_TIMEOUT}'")
                for tube in tubes:
                    found += [(job, tube) for job in await self._jobs_or_none(connection, tube)]
        found.sort(key=lambda pair: sum(key[0] == pair[1].name for key in self._running))
        waiting = False
        for job, tube in found:
            key = (job.tube, job.shard % tube.partitions)
            if key in self._running or (job.tube, job.table) in self._resting:
                continue
            if len(self._running) >= MAX_RUNNING:
                waiting = True
                break
            self._running.add(key)
            nursery.start_soon(self._do, job, key, tube.partitions)
        self._others_wait = waiting

    async def _jobs_or_none(self, connection: Connection, tube: TubeInfo) -> list[Job]:
        """The jobs of one tube; none where they cannot be seen, which is that tube's trouble."""
        try:
            jobs = await self._jobs(connection, tube)
        except DatabaseUnavailable:
            raise
        except Exception as error:  # noqa: BLE001 - reported
            self._reports.fail("tube", tube.name, "backfill", error)
            return []
        self._reports.end("tube", tube.name, "backfill")
        for key in [key for key in self._failed if key[0] == tube.name and key[1] not in {job.table for job in jobs}]:
            self._reports.end("tube", tube.name, _cause(key[1]))  # it was called off
            self._failed.discard(key)
        return jobs

    async def _jobs(self, connection: Connection, tube: TubeInfo) -> list[Job]:
        """What is under way comes before what is scheduled."""
        begun = await connection.fetch(
            f"SELECT tbl::regclass::text AS tbl, order_col::text, shard, start_seq FROM {self._table('tube_backfill')} "
            "WHERE tube = $1 AND NOT finished ORDER BY started_at",
            tube.name,
        )
        scheduled = await connection.fetch(
            f"SELECT seq, shard, payload ->> 'tbl' AS tbl, payload ->> 'order_col' AS order_col "
            f"FROM {self._table(tube.name)} WHERE cardinality(ids) = 0 AND payload ->> 'type' = 'backfill_schedule' "
            "ORDER BY seq LIMIT 1000"
        )
        return [
            *(Job(tube.name, row["tbl"], row["order_col"], row["shard"], row["start_seq"]) for row in begun),
            *(Job(tube.name, row["tbl"], row["order_col"], row["shard"], None, row["seq"]) for row in scheduled),
        ]

    async def _do(self, job: Job, key: tuple[str, int], partitions: int) -> None:
        pause = self._pace.turn
        try:
            async with self._locked(key) as connection:
                if connection is None:
                    self._works(job)  # another daemon is at it, and reports what it meets
                elif await self._backfill(connection, job, partitions):
                    pause = 0.0
        except Exception as error:  # noqa: BLE001 - reported
            pause = self._pace.retry
            self._failed.add((job.tube, job.table))
            self._reports.fail("tube", job.tube, _cause(job.table), error)
        finally:
            if pause:
                self._resting[job.tube, job.table] = trio.current_time() + pause
            self._running.discard(key)

    def _works(self, job: Job) -> None:
        self._failed.discard((job.tube, job.table))
        self._reports.end("tube", job.tube, _cause(job.table))

    @asynccontextmanager
    async def _locked(self, key: tuple[str, int]) -> AsyncIterator[Connection | None]:
        """A connection that holds the lock of a partition's backfill; None while another daemon has it."""
        async with self._db.connection() as connection:
            name = f"{key[0]} {key[1]}"
            got = await connection.fetch_value("SELECT pg_try_advisory_lock($1, hashtext($2))", _LOCK_CLASS, name)
            yield connection if got else None  # the lock goes when the connection is reset, or lost

    async def _backfill(self, connection: Connection, job: Job, partitions: int) -> bool:
        """Go on to the end; False where it gave its turn away before."""
        say = log.bind(tube=job.tube, table=job.table, shard=job.shard)
        start_seq = job.start_seq or await self._begin(connection, job)
        if start_seq is None:
            return False
        began = told_at = trio.current_time()
        done = 0
        while await self._wait_for_room(job.tube, job.shard % partitions, partitions):
            row = await self._next_piece(connection, job, start_seq)
            self._works(job)
            if row["ids"] is None:
                return True  # its control pods are still in the tube: the schedule waits until they are acked
            done += row["ids"]
            now = trio.current_time()
            if row["finished"]:
                say.info("backfill_done", ids=done, seconds=round(now - began, 1))
                return True
            if now >= told_at + PROGRESS_INTERVAL:
                told_at = now
                say.info("backfill_progress", ids=done, seconds=round(now - began, 1))
        return False

    async def _next_piece(self, connection: Connection, job: Job, start_seq: str) -> Row:
        """Put the next ids into the tube. With the first of them what asked for the backfill goes: it is asked once."""
        async with connection.transaction(opening=f"SET LOCAL lock_timeout = '{PIECE_LOCK_TIMEOUT}'"):
            row: Row = await call_row(
                connection,
                self._schema,
                "tube_backfill_chunk",
                start_seq,
                job.tube,
                job.table,
                job.order_col,
                job.shard,
                self._pace.piece,
            )
            if job.seq is not None and row["ids"] is not None:
                await connection.execute(
                    f"DELETE FROM {self._table(job.tube)} WHERE seq = $1 AND payload ->> 'type' = 'backfill_schedule'",
                    job.seq,
                )
        return row

    async def _begin(self, connection: Connection, job: Job) -> str | None:
        """Steps 1 and 2: note the sequence, then wait for whoever may still write below it; None: the turn is over."""
        start_seq: str = await call_value(connection, self._schema, "tube_backfill_step1")
        while True:
            try:
                await call_value(connection, self._schema, "tube_backfill_step2", timedelta(seconds=self._pace.writers))
            except DatabaseError as error:
                if not sqlstates.means(error.sqlstate, sqlstates.LOCKED):
                    raise
                self._failed.add((job.tube, job.table))
                self._reports.begin("tube", job.tube, _cause(job.table), str(error), code="backfill_waits")
                if self._others_wait:
                    return None
            else:
                return start_seq

    async def _wait_for_room(self, tube: str, partition: int, partitions: int) -> bool:
        """Until the partition has room for the next piece; False where others wait for their turn meanwhile."""
        query = (
            f"SELECT count(*) FROM (SELECT FROM {self._table(tube)} "
            f"WHERE (shard % {partitions}) = {partition} AND ((op = 'B')::integer) = 1 AND cardinality(ids) > 0 "
            f"LIMIT {self._pace.max_backlog}) AS waiting"
        )
        while await self._db.fetch_value(query) >= self._pace.max_backlog:
            if self._others_wait:
                return False
            await trio.sleep(self._pace.backlog)
        return True

    def _table(self, name: str) -> str:
        return f"{quote_ident(self._schema)}.{quote_ident(name)}"


def _cause(table: str) -> str:
    """The cause under which the troubles of a table's backfill are reported."""
    return f"backfill of {table}"
