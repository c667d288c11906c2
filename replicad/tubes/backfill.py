"""The backfiller: puts all ids of an attached table into its tube, piece by piece, when a backfill is scheduled.

Its whole state is in Postgres (`tube_backfill` and the control pods), so any daemon can go on where another stopped.
An advisory lock per tube and partition lets only one daemon work at a time. The backfiller waits while the partition
has `max_backlog` pods, so that the tube stays bounded however large the table is.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta

import structlog
import trio

from replicad import sqlstates
from replicad.daemon.troubles import Troubles
from replicad.errors import DatabaseError, DatabaseUnavailable, TubeRefused
from replicad.postgres.bridge import Connection, Database, Row, quote_ident
from replicad.postgres.statements import call_row, call_value
from replicad.remedies import Remedy, word
from replicad.retry import Backoff
from replicad.tubes.pods import TubeInfo

PROGRESS_INTERVAL = 5.0  # seconds between two log events about progress
MAX_RUNNING = 2  # at a time: two backfills saturate a small Postgres
LOOK_LOCK_TIMEOUT = "50ms"  # for the table of one tube, because the other tubes wait meanwhile
PIECE_LOCK_TIMEOUT = "5s"  # for the attached table and the tube: a DDL statement that waits behind us gets its turn

_LOCK_CLASS = 0x5253  # first half of the advisory locks of backfills

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class BackfillIntervals:
    """How fast backfills go: times in seconds."""

    piece: int = 100_000  # ids per transaction: a few hundred ms, during which the tube's position does not move
    max_backlog: int = 10_000  # backfill pods of a partition, of 250 ids each, before it waits for the workers
    backlog: float = 0.2  # between two queries whether a full backlog has room again
    writers: float = 10.0  # to wait for open transactions before they are reported; then the wait goes on
    retry: float = 10.0  # before a backfill that failed is tried again; doubles with each failure
    retry_max: float = 600.0  # a table that is locked or broken is not tried more often
    statement: float = (
        3600.0  # that one statement of a backfill may take, whatever --statement-timeout says: without an
    )
    # index on its order column, a piece reads the whole table
    turn: float = 3.0  # pause after giving way to another tube; longer than the interval between two calls of `run`


@dataclass(frozen=True, slots=True)
class BackfillJob:
    """A backfill of one attached table.

    `start_seq` is None when it is scheduled and has not begun; `seq` is then the control pod that schedules it.
    """

    tube: str
    table: str
    order_col: str
    shard: int
    start_seq: str | None = None
    seq: int | None = None


class Backfiller:
    """Runs the backfills of all tubes of one schema, one per partition at a time.

    A failed backfill is a trouble of its tube and is tried again after a pause. A backfill that waits for workers or
    for open transactions stops when backfills of other tubes wait to run.
    """

    def __init__(
        self, db: Database, schema: str, troubles: Troubles, pace: BackfillIntervals = BackfillIntervals()
    ) -> None:
        """`db` needs one connection for each running backfill, and one for `run`."""
        self._db = db
        self._schema = schema
        self._troubles = troubles
        self._pace = pace
        self._running: set[tuple[str, int]] = set()  # tube, partition
        self._resting: dict[tuple[str, str], float] = {}  # tube, table: the time before which it is not tried again
        self._failed: set[tuple[str, str]] = set()  # tube, table: those with a reported trouble
        self._retries: dict[tuple[str, str], Backoff] = {}  # tube, table: failed backfills
        self._last: dict[str, int] = {}  # tube: when it last started a backfill, counted in starts
        self._starts = 0
        self._found: list[tuple[BackfillJob, TubeInfo]] = []  # by the last look, and not started since
        self._others_wait = False  # whether some of these cannot start

    async def run(self, tubes: Sequence[TubeInfo], nursery: trio.Nursery) -> None:
        """Start in `nursery` the backfills that can start now. The tube with the fewest running ones comes first, among
        such tubes that whose turn was longest ago. So a tube with many full partitions delays no other tube.
        """
        now = trio.current_time()
        self._resting = {key: until for key, until in self._resting.items() if until > now}
        found: list[tuple[BackfillJob, TubeInfo]] = []
        if tubes:
            async with self._db.connection() as connection:
                await connection.execute(f"SET lock_timeout = '{LOOK_LOCK_TIMEOUT}'")
                for tube in tubes:
                    found += [(job, tube) for job in await self._jobs_or_none(connection, tube)]
        names = {tube.name for tube in tubes}
        self._last = {name: number for name, number in self._last.items() if name in names}
        self._found = found
        self._start(nursery)

    def _start(self, nursery: trio.Nursery) -> None:
        """Start the backfills that can start, of those that the last look has found."""
        while able := [(job, tube) for job, tube in self._found if self._may_start(job, tube)]:
            if len(self._running) >= MAX_RUNNING:
                break
            job, tube = min(able, key=lambda pair: self._turn(pair[0].tube))
            key = (job.tube, job.shard % tube.partitions)
            self._found.remove((job, tube))
            self._running.add(key)
            self._starts += 1
            self._last[job.tube] = self._starts
            nursery.start_soon(self._do, job, key, tube.partitions, nursery)
        self._others_wait = bool(able)

    def _may_start(self, job: BackfillJob, tube: TubeInfo) -> bool:
        key = (job.tube, job.shard % tube.partitions)
        return key not in self._running and (job.tube, job.table) not in self._resting

    def _turn(self, tube: str) -> tuple[int, int]:
        return sum(key[0] == tube for key in self._running), self._last.get(tube, 0)

    async def _jobs_or_none(self, connection: Connection, tube: TubeInfo) -> list[BackfillJob]:
        """The jobs of one tube. If they cannot be read: none, and a trouble of that tube."""
        try:
            jobs = await self._jobs(connection, tube)
        except DatabaseUnavailable:
            raise
        except Exception as error:  # noqa: BLE001 - reported
            self._troubles.fail("tube", tube.name, "backfill", error)
            return []
        self._troubles.end("tube", tube.name, "backfill")
        for key in [key for key in self._failed if key[0] == tube.name and key[1] not in {job.table for job in jobs}]:
            self._troubles.end("tube", tube.name, _cause(key[1]))  # it was cancelled
            self._failed.discard(key)
            self._retries.pop(key, None)
        return jobs

    async def _jobs(self, connection: Connection, tube: TubeInfo) -> list[BackfillJob]:
        """Backfills that have begun come before backfills that are only scheduled."""
        qualified = self._table("tube_qualified")
        begun = await connection.fetch(
            f"SELECT coalesce({qualified}(tbl), tbl::oid::text) AS tbl, order_col::text, shard, start_seq "
            f"FROM {self._table('tube_backfill')} "
            "WHERE tube = $1 AND NOT finished ORDER BY started_at",
            tube.name,
        )
        scheduled = await connection.fetch(
            f"SELECT seq, shard, coalesce({qualified}((payload ->> 'oid')::oid), payload ->> 'tbl') AS tbl, "
            f"payload ->> 'order_col' AS order_col FROM {self._table(tube.name)} "
            "WHERE cardinality(ids) = 0 AND payload ->> 'type' = 'backfill_schedule' "
            "ORDER BY seq LIMIT 1000"
        )
        return [
            *(BackfillJob(tube.name, row["tbl"], row["order_col"], row["shard"], row["start_seq"]) for row in begun),
            *(
                BackfillJob(tube.name, row["tbl"], row["order_col"], row["shard"], None, row["seq"])
                for row in scheduled
            ),
        ]

    async def _do(self, job: BackfillJob, key: tuple[str, int], partitions: int, nursery: trio.Nursery) -> None:
        """Run a backfill; the next one starts at its end, since small tables take less than the time between looks."""
        pause = self._pace.turn
        try:
            async with self._locked(key) as connection:
                if connection is None:
                    self._end_trouble(job)  # another daemon runs it and reports its troubles
                elif await self._backfill(connection, job, partitions):
                    pause = 0.0
        except Exception as error:  # noqa: BLE001 - reported
            retries = self._retries.setdefault(
                (job.tube, job.table), Backoff(self._pace.retry, self._pace.retry_max, jitter=0.0)
            )
            pause = retries.next_delay()
            self._failed.add((job.tube, job.table))
            self._troubles.fail("tube", job.tube, _cause(job.table), error)
        finally:
            if pause:
                self._resting[job.tube, job.table] = trio.current_time() + pause
            self._running.discard(key)
        self._start(nursery)

    def _end_trouble(self, job: BackfillJob) -> None:
        self._retries.pop((job.tube, job.table), None)
        self._failed.discard((job.tube, job.table))
        self._troubles.end("tube", job.tube, _cause(job.table))

    @asynccontextmanager
    async def _locked(self, key: tuple[str, int]) -> AsyncIterator[Connection | None]:
        """A connection that holds the advisory lock of a partition's backfill; None if another daemon holds it."""
        async with self._db.connection() as connection:
            name = f"{key[0]} {key[1]}"
            got = await connection.fetch_value("SELECT pg_try_advisory_lock($1, hashtext($2))", _LOCK_CLASS, name)
            yield connection if got else None  # Postgres releases the lock when the connection is reset or lost

    async def _backfill(self, connection: Connection, job: BackfillJob, partitions: int) -> bool:
        """Run the backfill to its end. False if it stopped before, for another tube."""
        events = log.bind(tube=job.tube, table=job.table, shard=job.shard)
        await self._check_attached(connection, job)
        if job.start_seq is None and await self._earlier_waits(connection, job):
            return True  # control pods of an earlier backfill are in the tube: wait until they are acked
        start_seq = job.start_seq or await self._begin(connection, job)
        if start_seq is None:
            return False
        began = logged_at = trio.current_time()
        done = 0
        while await self._wait_for_room(job.tube, job.shard % partitions, partitions):
            try:
                row = await self._next_piece(connection, job, start_seq, begun=bool(job.start_seq or done))
            except _Cancelled:
                events.info("backfill_cancelled", ids=done)
                return True
            self._end_trouble(job)
            if row["ids"] is None:
                return True  # as above
            done += row["ids"]
            now = trio.current_time()
            if row["finished"]:
                events.info("backfill_done", ids=done, seconds=round(now - began, 1))
                return True
            if now >= logged_at + PROGRESS_INTERVAL:
                logged_at = now
                events.info("backfill_progress", ids=done, seconds=round(now - began, 1))
        return False

    async def _check_attached(self, connection: Connection, job: BackfillJob) -> None:
        """Refuse a backfill whose table is no longer there; the reason names the remedy."""
        query = (
            f"SELECT EXISTS (SELECT FROM {self._table('tube_attachment')} AS a JOIN pg_class AS c ON c.oid = a.tbl "
            "WHERE a.tube = $1 AND a.tbl = to_regclass($2))"
        )
        if not await connection.fetch_value(query, job.tube, job.table):
            remedy = Remedy.make("cancel_backfill", tube=word(job.tube), shard=job.shard)
            raise TubeRefused(
                f"the backfill of table {job.table} cannot run: the table was dropped, or is not attached any more. "
                f"Cancel it: {remedy}"
            )

    async def _earlier_waits(self, connection: Connection, job: BackfillJob) -> bool:
        """Whether the first piece would be skipped. Asking costs little; a piece may read the whole table first."""
        query = f"SELECT {self._table('tube_backfilling')}($1, $2::text::regclass, $3)"
        return bool(await connection.fetch_value(query, job.tube, job.table, job.shard))

    async def _next_piece(self, connection: Connection, job: BackfillJob, start_seq: str, *, begun: bool) -> Row:
        """Put the next ids into the tube. The first piece also deletes the pod that scheduled the backfill.

        Raises _Cancelled, with nothing written, if the backfill was cancelled or replaced.
        """
        async with connection.transaction(opening=f"SET LOCAL lock_timeout = '{PIECE_LOCK_TIMEOUT}'"):
            await self._give_time(connection)
            if begun:  # locks the attachment, as the piece does; who cancels locks it too
                where = job.tube, job.table, job.order_col
                attached = f"SELECT ({self._table('tube_attached')}($1, $2::text::regclass, $3)).shard"
                await connection.execute(attached, *where)
                if not await connection.fetch_value(
                    f"SELECT EXISTS (SELECT FROM {self._table('tube_backfill')} WHERE tube = $1 "
                    "AND tbl = $2::text::regclass AND start_seq = $3 AND NOT finished)",
                    job.tube,
                    job.table,
                    start_seq,
                ):
                    raise _Cancelled
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
            if job.seq is not None and not begun and row["ids"] is not None:
                scheduled = await connection.fetch_value(
                    f"DELETE FROM {self._table(job.tube)} "
                    "WHERE seq = $1 AND payload ->> 'type' = 'backfill_schedule' RETURNING seq",
                    job.seq,
                )
                if scheduled is None:
                    raise _Cancelled
        return row

    async def _give_time(self, connection: Connection) -> None:
        milliseconds = int(self._pace.statement * 1000)
        await connection.execute(f"SET LOCAL statement_timeout = {milliseconds}")

    async def _begin(self, connection: Connection, job: BackfillJob) -> str | None:
        """Steps 1 and 2: read the sequence, then wait for the transactions that may still write pods below that number.

        Returns None if it stopped for another tube.
        """
        start_seq: str = await call_value(connection, self._schema, "tube_backfill_step1")
        while True:
            try:
                async with connection.transaction():
                    await self._give_time(connection)
                    waiting = timedelta(seconds=self._pace.writers)
                    await call_value(connection, self._schema, "tube_backfill_step2", waiting)
            except DatabaseError as error:
                if not sqlstates.means(error.sqlstate, sqlstates.LOCKED):
                    raise
                self._failed.add((job.tube, job.table))
                self._troubles.begin("tube", job.tube, _cause(job.table), str(error), code="backfill_waits")
                if self._others_wait:
                    return None
            else:
                return start_seq

    async def _wait_for_room(self, tube: str, partition: int, partitions: int) -> bool:
        """Wait until the partition has room for the next piece. False if it has none and another tube waits to run."""
        query = (
            f"SELECT count(*) FROM (SELECT FROM {self._table(tube)} "
            f"WHERE (shard % {partitions}) = {partition} AND ((op = 'B')::integer) = 1 AND cardinality(ids) > 0 "
            f"AND seq > (SELECT {self._table('tube_low_of')}($1, {partitions}, {partition}, true)) "
            f"LIMIT {self._pace.max_backlog}) AS waiting"
        )
        told = False
        while await self._db.fetch_value(query, tube) >= self._pace.max_backlog:
            if not told:
                told = True
                log.info("backfill_waits_for_workers", tube=tube, partition=partition, pods=self._pace.max_backlog)
            if self._others_wait:
                return False
            await trio.sleep(self._pace.backlog)
        return True

    def _table(self, name: str) -> str:
        return f"{quote_ident(self._schema)}.{quote_ident(name)}"


class _Cancelled(Exception):
    """The backfill was cancelled, or replaced by another one."""


def _cause(table: str) -> str:
    """The cause in `Troubles` for the backfill of a table."""
    return f"backfill of {table}"
