"""The backfiller: picks up what was scheduled and puts all ids of a table into its tube, piece by piece.

Everything it knows is in Postgres (tube_backfill and the control pods): a crash costs nothing, and any daemon goes
on where another stopped. An advisory lock per tube and partition sees that one works at a time. It waits while the
partition has as much backlog as it may have: the tube stays bounded however large the table is.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import structlog
import trio

from replicad.errors import DatabaseError, ReplicadError
from replicad.postgres.bridge import Connection, Database, Row, quote_ident
from replicad.tubes.pods import TubeInfo

LOOK_INTERVAL = 1.0  # seconds between two looks for work
CHUNK_IDS = 100_000  # ids in one transaction: a few hundred milliseconds, during which the tube's position stands still
MAX_BACKLOG = 10_000  # backfill pods of a partition, of 250 ids each, before the backfiller waits for the workers
BACKLOG_INTERVAL = 0.2  # seconds between two looks at a backlog that is full
STEP2_TIMEOUT = 10.0  # seconds to wait for open transactions before the culprit is named and the wait goes on
PROGRESS_INTERVAL = 5.0  # seconds between two words about progress
RETRY_PAUSE = 10.0  # seconds before a backfill that failed is tried again

_LOCK_CLASS = 0x5253  # first half of the advisory locks of backfills

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Job:
    """A backfill of one attached table. `start_seq` None: scheduled and not begun; `seq` is then the schedule's pod."""

    tube: str
    table: str
    order_col: str
    shard: int
    start_seq: str | None = None
    seq: int | None = None


class Backfiller:
    """Does the backfills of all tubes of one schema, one per partition at a time. `now` as in the other services."""

    def __init__(self, db: Database, schema: str) -> None:
        """`db` needs a connection for each backfill that runs."""
        self._db = db
        self._schema = quote_ident(schema)
        self._running: set[tuple[str, int]] = set()  # tube, partition
        self._resting: dict[tuple[str, str], float] = {}  # tube, table: not to be tried again before

    async def run(self, tubes: Sequence[TubeInfo], nursery: trio.Nursery) -> None:
        """Look once: start in `nursery` what can be started now."""
        for tube in tubes:
            for job in await self._jobs(tube):
                key = (job.tube, job.shard % tube.partitions)
                if key in self._running or self._resting.get((job.tube, job.table), 0) > trio.current_time():
                    continue
                if len(self._running) >= 2:
                    return  # the others wait their turn: a backfill loads Postgres, and two saturate a small one
                self._running.add(key)
                nursery.start_soon(self._do, job, key, tube.partitions)

    async def _jobs(self, tube: TubeInfo) -> list[Job]:
        """What is under way comes before what is scheduled."""
        begun = await self._db.fetch(
            f"SELECT tbl::regclass::text AS tbl, order_col::text, shard, start_seq FROM {self._schema}.tube_backfill "
            "WHERE tube = $1 AND NOT finished ORDER BY started_at",
            tube.name,
        )
        scheduled = await self._db.fetch(
            f"SELECT seq, shard, payload ->> 'tbl' AS tbl, payload ->> 'order_col' AS order_col "
            f"FROM {self._table(tube.name)} WHERE cardinality(ids) = 0 AND payload ->> 'type' = 'backfill_schedule' "
            "ORDER BY seq LIMIT 1000"
        )
        return [
            *(Job(tube.name, row["tbl"], row["order_col"], row["shard"], row["start_seq"]) for row in begun),
            *(Job(tube.name, row["tbl"], row["order_col"], row["shard"], None, row["seq"]) for row in scheduled),
        ]

    async def _do(self, job: Job, key: tuple[str, int], partitions: int) -> None:
        say = log.bind(tube=job.tube, table=job.table, shard=job.shard)
        try:
            async with self._locked(key) as connection:
                if connection is not None:
                    await self._backfill(connection, job, partitions)
        except ReplicadError as error:
            self._resting[job.tube, job.table] = trio.current_time() + RETRY_PAUSE
            say.warning("backfill_interrupted", error=str(error), again_in_s=RETRY_PAUSE)
        finally:
            self._running.discard(key)

    @asynccontextmanager
    async def _locked(self, key: tuple[str, int]) -> AsyncIterator[Connection | None]:
        """A connection that holds the lock of a partition's backfill; None while another daemon has it."""
        async with self._db.connection() as connection:
            name = f"{key[0]} {key[1]}"
            got = await connection.fetch_value("SELECT pg_try_advisory_lock($1, hashtext($2))", _LOCK_CLASS, name)
            yield connection if got else None  # the lock goes when the connection is reset, or lost

    async def _backfill(self, connection: Connection, job: Job, partitions: int) -> None:
        say = log.bind(tube=job.tube, table=job.table, shard=job.shard)
        start_seq = job.start_seq or await self._begin(connection, job)
        began = told_at = trio.current_time()
        done = 0
        while True:
            await self._wait_for_room(job.tube, job.shard % partitions, partitions)
            row = await self._next_piece(connection, job, start_seq)
            if row["ids"] is None:
                return  # its control pods are still in the tube: the schedule waits until they are acked
            done += row["ids"]
            now = trio.current_time()
            if row["finished"]:
                say.info("backfill_done", ids=done, seconds=round(now - began, 1))
                return
            if now >= told_at + PROGRESS_INTERVAL:
                told_at = now
                say.info("backfill_progress", ids=done, seconds=round(now - began, 1))

    async def _next_piece(self, connection: Connection, job: Job, start_seq: str) -> Row:
        """Put the next ids into the tube. With the first of them what asked for the backfill goes: it is asked once."""
        async with connection.transaction():
            row = await connection.fetch_row(
                f"SELECT ids, finished FROM {self._schema}.tube_backfill_chunk($1, $2, $3::text::regclass, $4, $5, $6)",
                start_seq,
                job.tube,
                job.table,
                job.order_col,
                job.shard,
                CHUNK_IDS,
            )
            assert row is not None
            if job.seq is not None and row["ids"] is not None:
                await connection.execute(
                    f"DELETE FROM {self._table(job.tube)} WHERE seq = $1 AND payload ->> 'type' = 'backfill_schedule'",
                    job.seq,
                )
        return row

    async def _begin(self, connection: Connection, job: Job) -> str:
        """Steps 1 and 2: note the sequence, then wait for whoever may still write below it."""
        start_seq: str = await connection.fetch_value(f"SELECT {self._schema}.tube_backfill_step1()")
        while True:
            try:
                await connection.execute(
                    f"SELECT {self._schema}.tube_backfill_step2(make_interval(secs => $1))", STEP2_TIMEOUT
                )
            except DatabaseError as error:
                if error.sqlstate != "55P03":
                    raise
                log.warning("backfill_waits", tube=job.tube, table=job.table, error=str(error))
            else:
                return start_seq

    async def _wait_for_room(self, tube: str, partition: int, partitions: int) -> None:
        query = (
            f"SELECT count(*) FROM (SELECT FROM {self._table(tube)} "
            f"WHERE (shard % {partitions}) = {partition} AND ((op = 'B')::integer) = 1 AND cardinality(ids) > 0 "
            f"LIMIT {MAX_BACKLOG}) AS waiting"
        )
        while await self._db.fetch_value(query) >= MAX_BACKLOG:
            await trio.sleep(BACKLOG_INTERVAL)

    def _table(self, tube: str) -> str:
        return f"{self._schema}.{quote_ident(tube)}"
