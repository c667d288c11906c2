"""One downstream of a local pipeline: a thread that looks rows up and writes them, batch after batch.

A batch has a number that grows by one, and the term of the lease as its mark. The downstream keeps the last number in
the same transaction as the rows, and takes none twice: a process that was paused and has lost its lease writes nothing,
since the next owner has written that number, or writes every id of it later. The checkpoint has the number too, before
the pods are acked: a downstream that has fewer batches was put back from an older copy.
"""

from __future__ import annotations

import json
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from replicad.errors import (
    ColumnsChanged,
    ConnectionLost,
    DatabaseError,
    DatabaseRefused,
    DatabaseUnavailable,
    DownstreamError,
    DownstreamUnavailable,
    LeaseLost,
    ReplicadError,
    RowRefused,
    RowsUnproven,
    TableUnreadable,
    UsageError,
    ValueUnheld,
)
from replicad.eventlog import get_logger
from replicad.protocol.tokens import Cursor
from replicad.retry import Backoff
from replicad.spark.checkpoint import LocalCheckpoint
from replicad.spark.database import connection, driver_error, forget, literal, patiently, quote
from replicad.spark.enrich import CHUNK, PIECE, EnrichedRows, LookUps
from replicad.spark.holding import WHOLE, TubeHold, holder_name
from replicad.spark.local.backlog import Backlog
from replicad.spark.local.config import TRANSACTION, LocalConfig
from replicad.spark.local.groups import CommitsLost, PostgresTables, SeparateTables, TableChanges, TableGroup
from replicad.spark.local.tables import TableWork, TubeTable, make_work, tables_of, touches_of
from replicad.spark.local.touchlog import TouchChunk, TouchLog
from replicad.spark.options import endpoint_of
from replicad.spark.parking import RefusedIds, pods_with, search
from replicad.spark.pipeline_config import AVAILABLE_NOW
from replicad.spark.preflight import request_backfill
from replicad.spark.reports import BatchReport, PipelineResult, Reporter, of_several, record_batch
from replicad.spark.sinks.base import Applied, BatchId, Shape, Sink
from replicad.spark.sinks.delta_upkeep import UpkeepThread
from replicad.spark.touches import Control, deduplicate, touch_schema
from replicad.sqlstates import CONSTRAINT_OF_OTHERS, NO_TABLE, means

STATE = "replicad-local"  # in the checkpoint
_REPORTED = """
SELECT (counts ->> 'newest')::bigint FROM {schema}.tube_report
WHERE tube = {tube} AND reporter = {reporter} AND counts ->> 'query' = {query}"""
GARBAGE = 50_000  # stale ids in one step
FRUITLESS = 10  # steps of garbage in a row that return the same ids
AT_ONCE = 10_000  # touches of a batch whose rows are looked up before its transaction begins
LOOK_AGAIN = 10.0  # seconds between two looks whether the backlog has something
FLUSH_EVERY = 0.1  # seconds for which batches wait at most until the disk of the downstream has them
LAKES = ("delta", "parquet")  # kinds for which a batch of one row costs about as much as one of a thousand
REST, LONGEST_REST = 3.0, 1.0  # they rest so many times as long as a batch took, and so many seconds at most,
ENOUGH = 10_000  # or until so many ids have come
FLUSH_IDLE = 0.02  # seconds without touches after which they do not wait
REPORT_EVERY = 2.0  # seconds between two reports for `replicad top`
PATIENCE = 5.0  # seconds for a database before a failure counts as one: then the thread waits, and says so
_OUTAGES = (ConnectionLost, DatabaseUnavailable, DownstreamUnavailable)

log = get_logger("replicad.spark")


class Shared:
    """What the threads of a run share, over all its leases."""

    def __init__(self, config: LocalConfig) -> None:
        self.config = config
        self.holder = holder_name(config.source.consumer, "local", f"{os.getpid()}-{secrets.token_hex(4)}")
        self.result = PipelineResult()
        self.term = 0
        self.keys = config.source.keys
        self.query = ""
        self.tables: dict[int, TubeTable] = {}
        self.tables_version = 0
        self._lock = threading.Lock()
        self._hold: TubeHold | None = None
        self._checkpoint = LocalCheckpoint(config.checkpoint)
        self._state: dict[str, Any] = {}

    def enter(self, hold: TubeHold, term: int) -> None:
        """Begin with a lease."""
        self._hold, self.term = hold, term
        self.query = f"local/{self.config.tube}@{hold.made}"
        self._checkpoint.make()
        text = self._checkpoint.read(STATE)
        self._state = json.loads(text) if text else {}
        if self.config.tables is not None:
            self.refresh_tables()

    def refresh_tables(self) -> None:
        """Look up the tables of the tube."""
        found = tables_of(self.config)
        if found != self.tables:
            self.tables = found
            self.tables_version += 1

    def lease_is_held(self) -> bool:
        """Ask the daemon whether the lease is still ours."""
        assert self._hold is not None
        with endpoint_of(self.config.source, timeout=5.0).connect(f"{self._hold.holder}/check"[:255]) as client:
            try:
                client.renew(self.config.tube, WHOLE, self.term)
            except LeaseLost:
                return False
        return True

    def recorded(self, downstream: str) -> dict[str, Any]:
        """What the checkpoint knows of a downstream."""
        found: dict[str, Any] = self._state.get(self.query, {}).get(downstream, {})
        return found

    def record(self, downstream: str, found: Mapping[str, Any]) -> None:
        """Keep it."""
        with self._lock:
            state = {query: dict(known) for query, known in self._state.items() if query == self.query}
            state.setdefault(self.query, {})[downstream] = dict(found)
            self._checkpoint.write(STATE, json.dumps(state))
            self._state = state

    def count(self, report: BatchReport) -> None:
        """Add a batch to the sums."""
        with self._lock:
            self.result = self.result.plus(report)


@dataclass(slots=True)
class _Batch:
    """What a batch is made of: touches of tables, control pods, and the source that proves deletes."""

    touches: pa.Table
    controls: list[Control]
    pods: int = 0
    ids: int = 0
    oldest: float | None = None
    end: Cursor | None = None

    @property
    def last_pod(self) -> int:
        return int(pc.max(self.touches.column("seq")).as_py() or 0)


class DownstreamThread:
    """Writes to one downstream until it is stopped. `failure`: the error that ended it."""

    def __init__(self, name: str, config: LocalConfig, shared: Shared, touch_log: TouchLog) -> None:
        self.name = name
        self.failure: ReplicadError | BaseException | None = None
        self._config = config
        self._shared = shared
        self._log = touch_log
        self._maker = config.downstreams[name]
        self._group: TableGroup = SeparateTables()
        if self._maker.url is not None and config.tables is not None:
            self._group = PostgresTables(self._maker.url, patience=PATIENCE)
        self._works: dict[str, TableWork] = {}
        self._version = -1
        self._number = 0
        self._chunk = CHUNK  # ids in one look-up
        self._noted = -1  # the last batch that the downstream has for sure
        self._recorded: dict[str, int] = {}
        self._identities: dict[str, str] = {}
        self._stopping = threading.Event()
        self._failing_since: float | None = None
        self._busy = False
        self._began = 0.0  # the batch in hand
        self._traces: dict[str, None] = {}  # of its rows
        self._title = config.name if len(config.downstreams) == 1 else f"{config.name}/{name}"
        self._reporter = Reporter(config.source, self._title)
        self._unreported: PipelineResult = PipelineResult()
        self._last: BatchReport | None = None  # that was not sent
        self._reported_at = 0.0
        self._looked_at = 0.0
        self._thread = threading.Thread(target=self._run, name=f"replicad-{name}", daemon=True)
        self._unflushed: list[TouchChunk] = []  # that were written, and may be lost if the downstream crashes
        self._flush_at = 0.0
        self._excluded: dict[int, pa.Table] = {}  # touches that were parked, by the number of their chunk
        self._pods: str | None = None  # the table of the pods that prove deletes, if not the tube's
        self.backlog = Backlog(config, name)
        self._upkeep = UpkeepThread(self._tables) if self._maker.kind == "delta" else None
        touch_log.places[name] = 1

    # --- for the main thread ---

    def prepare(self) -> None:
        """Look the tables up and compare the downstream with the checkpoint, in the main thread.

        Raises:
            UsageError: the downstream is another one than that of the checkpoint, or was put back.
            EnvironmentRefused, DatabaseError, DownstreamError: it cannot be used.
        """
        try:
            self._prepare()
        except (DatabaseUnavailable, DownstreamUnavailable) as error:
            if len(self._config.downstreams) == 1:
                raise
            self._fail(error)  # the others go on; the thread tries again

    def _prepare(self) -> None:
        self._make_works()
        self._check()

    def start(self) -> None:
        """Begin."""
        self._thread.start()
        if self._upkeep is not None:
            self._upkeep.start()

    def stop(self) -> None:
        """End after the batch in hand; does not wait."""
        self._stopping.set()
        self._log.stir()

    def join(self) -> None:
        """Wait for the end."""
        if self._upkeep is not None:
            self._upkeep.stop()
        if self._thread.ident is not None:
            self._thread.join(timeout=120 if self._failing_since is None else 10)
        self._reporter.close()

    def _tables(self) -> list[tuple[Sink, Shape]]:
        return [(work.sink, work.shape) for work in list(self._works.values())]

    @property
    def is_idle(self) -> bool:
        """Whether it has everything that was read, also of its backlog."""
        return not self._busy and not self.backlog.is_used and self._log.behind(self.name) == 0

    def is_failing_for(self, seconds: float) -> bool:
        """Whether no batch was written for so long because the downstream fails."""
        since = self._failing_since
        return since is not None and time.monotonic() - since >= seconds

    @property
    def is_draining(self) -> bool:
        """Whether it has a backlog, which comes first."""
        return self.backlog.is_used

    def divert(self) -> None:
        """Put what the log has for this downstream into its backlog, so that the log does not wait for it."""
        if not self.backlog.may_grow():
            return
        for chunk in self._log.lacking(self.name):
            self.backlog.add(chunk)
            self._log.done(self.name, chunk.number)

    # --- the thread ---

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                self._step()
            if self._failing_since is None:
                self._flush()
        except BaseException as error:  # noqa: BLE001 - the main thread raises it
            if not self._stopping.is_set():
                self.failure = error
        finally:
            self._send_report(now=True)
            forget(self._config.database)
            if self._maker.url is not None:
                forget(self._maker.url)
            self._log.stir()

    def _step(self) -> None:
        if self._failing_since is not None and not self._works:
            self._with_patience(self._prepare)
        if time.monotonic() >= self._looked_at + LOOK_AGAIN:
            self._looked_at = time.monotonic()
            self.backlog.look_again()  # ids that were parked in it may have been put back
        if self.backlog.is_used:
            if not self._unflushed or self._with_patience(self._flush):
                self._drain()
            return
        chunks = self._log.take(self.name, FLUSH_IDLE if self._unflushed else 0.5)
        if self._unflushed and (not chunks or time.monotonic() >= self._flush_at):
            self._with_patience(self._flush)
        if not chunks:
            if not self._unflushed:  # else the run ends: the report waits for the flush, whose number it has
                self._send_report()
            return
        self._busy = True
        try:
            if self._with_patience(partial(self._write_chunks, chunks), chunks):
                self._wrote(chunks)
        finally:
            self._busy = False
            if not self._unflushed:
                self._excluded.clear()
        if self._config.trigger != AVAILABLE_NOW and self._config.trigger:
            self._with_patience(self._flush)
            self._stopping.wait(float(self._config.trigger))
        elif self._config.trigger != AVAILABLE_NOW and self._maker.kind in LAKES:
            spent = time.monotonic() - self._began
            self._log.gather(self.name, ENOUGH, min(LONGEST_REST, REST * spent))

    def _wrote(self, chunks: list[TouchChunk]) -> None:
        """A batch was written; it may be acked when the disk has it."""
        if self._group.is_flushed:
            self._note()
            self._log.done(self.name, chunks[-1].number)
            return
        if not self._unflushed:
            self._flush_at = time.monotonic() + FLUSH_EVERY
        self._unflushed += chunks
        self._log.wrote(self.name, chunks[-1].number)

    def _note(self) -> None:
        """Note the batches that the downstream has for sure."""
        self._record()
        self._noted = self._number - 1
        self._send_report()

    def _flush(self) -> None:
        """Wait until the disk of the downstream has what was written, and let it be acked."""
        chunks = self._unflushed
        if chunks and self._log.places[self.name] <= chunks[-1].number:  # they are not in the backlog
            try:
                self._group.flush(self._shared.query)
            except CommitsLost as error:
                log.warning("commits_lost", downstream=self.name, error=str(error))
                self._write(self._batch_of(chunks))
                self._group.flush(self._shared.query)
            self._note()
            self._log.done(self.name, chunks[-1].number)
        self._unflushed = []
        self._excluded.clear()

    def _with_patience(self, work: Callable[[], None], chunks: list[TouchChunk] | None = None) -> bool:
        """Run `work` until it succeeds. False: the run ends, or its touches went into the backlog."""
        backoff = Backoff(0.2, 30.0, jitter=0.0)
        tries = 0
        while not self._stopping.is_set():
            diverted = self.backlog.is_used or not self._log.take(self.name, 0)
            if chunks is not None and self._pods is None and diverted:
                return False  # the main thread has put them into the backlog meanwhile
            try:
                work()
            except (DatabaseError, DownstreamError, ConnectionLost) as error:
                if isinstance(error, DownstreamError) and self._was_fenced(error):
                    continue
                self._fail(error)
                tries = self._learn_from(error, chunks, tries)
            else:
                if self._failing_since is not None:
                    log.info("downstream_works", downstream=self.name)
                self._failing_since = None
                return True
            if tries:
                self._stopping.wait(backoff.next_delay())
        return False

    def _learn_from(self, error: ReplicadError, chunks: list[TouchChunk] | None, tries: int) -> int:
        """Do what helps against a failure before the next try; returns the failures since something was parked.

        Raises `error` if trying again does not help, and there is no other downstream that goes on meanwhile.
        """
        alone = len(self._config.downstreams) == 1
        if isinstance(error, (RowsUnproven, DatabaseRefused)) and alone:
            raise error
        if isinstance(error, (ColumnsChanged, TableUnreadable)):
            self._shared.refresh_tables()
            self._works = {}
            self._with_patience(self._make_works)
        if isinstance(error, _OUTAGES):
            return max(tries, 1)
        if chunks is None or (tries + 1 < self._config.tries and not isinstance(error, ValueUnheld)):
            return tries + 1
        if isinstance(error, ColumnsChanged) or not self._park(chunks, tries + 1):
            if alone:
                raise error
            return 1
        return 0

    def _fail(self, error: ReplicadError) -> None:
        if self._failing_since is None:
            self._failing_since = time.monotonic()
        log.warning("batch_failed", downstream=self.name, error=str(error))
        if self._busy:
            spent = time.monotonic() - self._began
            record_batch(self._config.tube, self._title, spent, 0, tuple(self._traces), failure=str(error))

    def _was_fenced(self, error: DownstreamError) -> bool:
        """After a refused number: take the next one, if the lease is ours. Raises LeaseLost if it is not."""
        if "this query" not in str(error):
            return False
        if not self._shared.lease_is_held():
            raise LeaseLost(f"another pipeline has taken tube {self._config.tube} over: {error}") from error
        newest = self._newest()
        if newest < self._number:
            return False
        self._number = newest + 1
        return True

    # --- tables ---

    def _make_works(self) -> None:
        shared = self._shared
        version = shared.tables_version
        works: dict[str, TableWork] = {}
        if self._config.tables is None:
            works["*"] = self._works.get("*") or make_work(self._config, self.name, None, shared.keys)
        for table in shared.tables.values():
            known = self._works.get(table.name)
            if not table.attached or not self._is_chosen(table):
                continue
            if known is None or known.shards.ranges[0][0] != table.shard:
                try:
                    known = make_work(self._config, self.name, table, shared.keys)
                except UsageError as error:
                    if self._version < 0:  # at the start
                        raise
                    log.warning("table_left_out", downstream=self.name, table=table.name, error=str(error))
                    continue
            works[table.name] = known
        if self._pods is not None:
            works = {name: self._proved_by(work, self._pods) for name, work in works.items()}
        self._group.begin({name: (work.sink, work.shape) for name, work in works.items()})
        self._works, self._version = works, version

    def _is_chosen(self, table: TubeTable) -> bool:
        return self._config.tables is None or self._config.tables.chooses(table.plain)

    @staticmethod
    def _proved_by(work: TableWork, pods: str) -> TableWork:
        return replace(work, enricher=replace(work.enricher, pods=pods))

    def _newest(self) -> int:
        found = self._group.last_batch(self._shared.query, {name: one.sink for name, one in self._works.items()})
        return max((last.newest for last in found.values()), default=-1)

    def _check(self) -> None:
        """Compare the downstream with what the checkpoint has of it."""
        known = self._shared.recorded(self.name)
        sinks = {name: one.sink for name, one in self._works.items()}
        last = self._group.last_batch(self._shared.query, sinks)
        identities = {name: sink.identity() or "" for name, sink in sinks.items()}
        replaced = [
            name for name, one in known.get("identity", {}).items() if identities.get(name, one) not in (one, "")
        ]
        behind = [
            name
            for name, number in known.get("last", {}).items()
            if name in last and (last[name].restored or last[name].whole < number)
        ]
        newest, reported = max((one.newest for one in last.values()), default=-1), self._reported()
        if replaced or behind or (last and reported > newest):  # an index and a class of a user keep no numbers
            which = next(iter(replaced or behind), "")
            why = (
                f"table {which} was dropped, restored or replaced"
                if replaced
                else f"the source knows batch {reported} of it, and its last one is {newest}: it was put back "
                "together with the checkpoint, or both are new"
                if not behind
                else f"{which} has batch {last[which].whole} as its last one, and batch {known['last'][which]} was "
                "acked, so it was put back from an older copy"
            )
            if not self._config.rebuild:
                raise UsageError(
                    f"downstream {self.name} is not the one that checkpoint {self._config.checkpoint} has written to: "
                    f"{why}. Start with --rebuild, which schedules a backfill of all rows; or bring the old one back"
                )
            config = self._config
            tables = request_backfill(config.database, config.tube_schema, config.tube, None)
            log.warning("downstream_rebuilt", downstream=self.name, tables=tables)
        self._number = max(newest, reported, *known.get("last", {}).values()) + 1
        self._noted = self._number - 1
        self._recorded = {name: one.whole for name, one in last.items() if one.whole >= 0} or known.get("last", {})
        self._identities = {name: one for name, one in identities.items() if one}
        self._record()

    def _reported(self) -> int:
        """The last batch that the source knows of, by a report of this pipeline; -1 if there is none."""
        sql = _REPORTED.format(
            schema=quote(self._config.tube_schema),
            tube=literal(self._config.tube),
            reporter=literal(self._reporter.name),
            query=literal(self._shared.query),
        )

        def work(driver: Any) -> int:
            with driver.cursor() as cursor:
                cursor.execute(sql)
                return int((cursor.fetchone() or [-1])[0])

        try:
            return patiently(self._config.database, work, patience=PATIENCE)
        except DatabaseUnavailable:
            raise
        except DatabaseError as error:  # the role may not read it
            log.warning("reports_not_read", error=str(error))
            return -1

    def _record(self) -> None:
        self._shared.record(self.name, {"identity": self._identities, "last": self._recorded})

    # --- batches ---

    def _batch_of(self, chunks: list[TouchChunk]) -> _Batch:
        tables = []
        for chunk in chunks:
            touches = chunk.touches
            if (parked := self._excluded.get(chunk.number)) is not None:
                touches = _without(touches, parked)
            tables.append(touches)
        merged = deduplicate(pa.concat_tables(tables)) if len(tables) > 1 else tables[0]
        oldest = [chunk.oldest for chunk in chunks if chunk.oldest is not None]
        return _Batch(
            merged,
            [control for chunk in chunks for control in chunk.controls],
            sum(chunk.count for chunk in chunks),
            sum(chunk.ids for chunk in chunks),
            min(oldest, default=None),
            chunks[-1].end,
        )

    def _write_chunks(self, chunks: list[TouchChunk]) -> None:
        try:
            self._write(self._batch_of(chunks))
        except CommitsLost as error:
            log.warning("commits_lost", downstream=self.name, error=str(error))
            self._write(self._batch_of([*self._unflushed, *chunks]))

    def _write(self, batch: _Batch) -> None:
        started = self._began = time.monotonic()
        self._traces.clear()
        number = self._number
        distinct = batch.touches.num_rows
        applied = self._write_touches(batch)
        again, garbage = Applied(), 0
        if isinstance(self._group, PostgresTables):
            again = self._write_waiting(batch)
        for control in batch.controls:
            log.info("control_pod", downstream=self.name, kind=control.kind, shard=control.shard, seq=control.seq)
            if control.start_seq is not None:
                found = self._collect(control)
                garbage += found[0]
                again = Applied(again.written + found[1].written, again.deleted + found[1].deleted)
        record_batch(self._config.tube, self._title, time.monotonic() - started, batch.ids, tuple(self._traces))
        self._report(
            BatchReport(
                number=number,
                pods=batch.pods,
                ids=batch.ids,
                distinct=distinct,
                written=applied.written + again.written,
                deleted=applied.deleted + again.deleted,
                garbage=garbage,
                repeated=applied.repeated,
                seconds=time.monotonic() - started,
                lag=None if batch.oldest is None else max(0.0, time.time() - batch.oldest),
            )
        )

    def _write_touches(self, batch: _Batch, purged: int | None = None) -> Applied:
        """Look up and write touches in a batch of their own number."""
        if not batch.touches.num_rows:
            return Applied()
        if self._version != self._shared.tables_version:
            self._make_works()
        with self._snapshot(batch) as check:
            split = self._split(batch.touches)
            seq = batch.last_pod

            def more(ids: Mapping[str, pa.Array]) -> list[TableChanges]:
                found = [(self._works[name], touches_of(self._works, name, keys, seq)) for name, keys in ids.items()]
                return [self._changes(work, touches, purged) for work, touches in found]

            changes = [self._changes(work, touches, purged) for work, touches in split]
            if batch.touches.num_rows <= AT_ONCE:
                changes = _looked_up(changes)
            name = BatchId(
                self._shared.query,
                self._number,
                mark=self._shared.term,
                last_pod=seq,
                term=self._shared.term,
            )
            applied = self._group.write(name, changes, more, check)
        written = ["*"] if isinstance(self._group, PostgresTables) else [one.name for one in changes]
        self._recorded.update(dict.fromkeys(written, self._number))
        self._number += 1
        return applied

    def _changes(self, work: TableWork, touches: pa.Table, purged: int | None = None) -> TableChanges:
        enricher = work.enricher if purged is None else replace(work.enricher, purged=frozenset({purged}))
        enricher = enricher if self._chunk == CHUNK else replace(enricher, chunk=self._chunk)
        return TableChanges(work.name, work.sink, work.shape, LookUps(enricher, touches, self._traces))

    def _split(self, touches: pa.Table) -> list[tuple[TableWork, pa.Table]]:
        """The touches of each table."""
        if self._config.tables is None:
            return [(self._works["*"], touches)]
        by_shard = {work.shards.ranges[0][0]: work for work in self._works.values()}
        found = []
        for shard in pc.unique(touches.column("shard")).to_pylist():
            mine = touches.filter(pc.equal(touches.column("shard"), shard))
            if (work := by_shard.get(shard)) is None:
                table = self._shared.tables.get(shard)
                if table is not None and table.attached and not self._is_chosen(table):
                    continue  # `exclude` names it
                if table is None:
                    self._shared.refresh_tables()
                    if shard in self._shared.tables:
                        self._make_works()
                        return self._split(touches)
                name = table.name if table is not None else f"of shard {shard}"
                raise TableUnreadable(
                    f"table {name} is not attached to tube {self._config.tube} any more", sqlstate=NO_TABLE[0]
                )
            found.append((work, mine))
        return found

    @contextmanager
    def _snapshot(self, batch: _Batch) -> Iterator[Callable[[], None]]:
        """With consistency = "transaction": all look-ups see one state, and the batch has every pod of it.

        Yields a check that raises DatabaseUnavailable if the look-ups did not: the connection was lost, or closed
        because rows were too long for a piece. The next try reads smaller pieces.
        """
        if self._config.consistency != TRANSACTION or batch.end is None or self._pods is not None:
            yield lambda: None
            return
        url = self._config.database
        source = connection(url)

        def ask(sql: str) -> Any:
            with source.cursor() as cursor:
                cursor.execute(sql)
                return cursor.fetch_arrow_table()

        def state() -> Any:
            sql = "SELECT pg_backend_pid() AS pid, now()::text AS at, current_setting('transaction_isolation') AS level"
            return ask(sql).to_pylist()

        try:
            with source.cursor() as cursor:
                cursor.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
            before = state()
            tube = f"{quote(self._config.tube_schema)}.{quote(self._config.tube)}"
            found = ask(
                f"SELECT p.shard, p.seq, k AS id FROM {tube} p, unnest(p.ids) k "
                f"WHERE p.seq > {batch.end.regular} AND p.op <> 'B'"
            )
            if found.num_rows:
                ids = batch.touches.schema.field("id").type
                early = found.select(["shard", "id", "seq"]).cast(touch_schema(ids))
                batch.touches = deduplicate(pa.concat_tables([batch.touches, early]))

            def check() -> None:
                if connection(url) is not source or state() != before:
                    self._snapshot_is_lost()

            yield check
            self._chunk = CHUNK
        except ReplicadError:
            raise
        except Exception as error:
            forget(url)
            known = driver_error(error)
            if known is None:
                raise
            raise known from error
        finally:
            with suppress(Exception), connection(url).cursor() as cursor:
                cursor.execute("ROLLBACK")

    def _snapshot_is_lost(self) -> None:
        self._chunk = max(1, self._chunk // 8)
        raise DatabaseUnavailable(
            f"the snapshot of a batch was lost, with the connection or by long rows; again with {self._chunk} at once"
        )

    def _write_waiting(self, batch: _Batch) -> Applied:
        """Write the rows that waited for a row of a table that the batch has written, and so on."""
        total = Applied()
        shards = set(pc.unique(batch.touches.column("shard")).to_pylist()) if batch.touches.num_rows else set()
        names = {work.name for work in self._works.values() if work.shards.ranges[0][0] in shards}
        seen: set[str] = set()
        while names - seen:
            seen |= names
            waiting = self._group.waiting(self._shared.query, names)
            found = {name: keys for name, keys in waiting.items() if name in self._works}
            if not found:
                break
            touches = pa.concat_tables(
                [touches_of(self._works, name, keys, batch.last_pod) for name, keys in found.items()]
            )
            done = self._write_touches(_Batch(deduplicate(touches), []))
            total = Applied(total.written + done.written, total.deleted + done.deleted)
            names = set(found)
        return total

    def _collect(self, control: Control) -> tuple[int, Applied]:
        """After the end of a backfill, treat the ids that the downstream has from before it like touches."""
        assert control.start_seq is not None
        works = [work for work in self._works.values() if control.shard in work.shards]
        ids, total, fruitless = 0, Applied(), 0
        seen: pa.Array | None = None
        for work in works:
            settled = False
            while not self._stopping.is_set():
                stale = work.sink.stale_ids(work.shape, control.shard, control.start_seq, GARBAGE)
                if stale is None:
                    log.warning("garbage_kept", shard=control.shard, why="the downstream cannot list stale ids")
                    break
                if not len(stale):
                    if settled or not work.sink.settle:
                        break
                    settled = True
                    time.sleep(work.sink.settle)
                    continue
                fruitless = fruitless + 1 if seen is not None and stale.equals(seen) else 0
                if fruitless >= FRUITLESS:
                    raise DownstreamError(
                        f"the downstream still lists {len(stale)} stale ids of {work.name}, e.g. {stale[0]}, after "
                        "they were written or deleted; does it store _seq with its rows?"
                    )
                settled, seen = False, stale
                table = pa.table(
                    {
                        "shard": pa.repeat(pa.scalar(control.shard, pa.int32()), len(stale)),
                        "id": stale.cast(work.shape.ids),
                        "seq": pa.repeat(pa.scalar(control.seq, pa.int64()), len(stale)),
                    }
                )
                purged = control.shard if control.purges else None
                done = self._write_touches(_Batch(deduplicate(table), []), purged)
                ids += len(stale)
                total = Applied(total.written + done.written, total.deleted + done.deleted)
        return ids, total

    # --- rows that cannot be read or are refused ---

    def _park(self, chunks: list[TouchChunk], tries: int) -> bool:
        """Park the ids whose rows cannot be read or are refused. False if they are not the reason."""
        found: list[tuple[int, RefusedIds]] = []
        fine = 0
        for chunk in chunks:
            touches = self._batch_of([chunk]).touches
            for work, mine in self._split_readable(touches, found, chunk.number):
                refused, good = search(work.enricher, partial(_try_out, work), mine)
                fine += good
                found += [(chunk.number, one) for one in refused]
        few = all(one.surely for _, one in found) and sum(len(one.ids) for _, one in found) <= 100
        if not found or not (fine or few):
            return False
        by_number = {chunk.number: chunk for chunk in chunks}
        found = _joined(found)
        for number, one in found:
            if len(self._config.downstreams) > 1:
                self.backlog.park(one, tries)
            else:
                self._park_in_tube(by_number[number], one, tries)
            table = pa.table({"shard": pa.repeat(pa.scalar(one.shard, pa.int32()), len(one.ids)), "id": one.ids})
            before = self._excluded.get(number)
            self._excluded[number] = table if before is None else pa.concat_tables([before, table])
            log.warning("parked", downstream=self.name, shard=one.shard, ids=len(one.ids), error=one.error)
        return True

    def _split_readable(
        self, touches: pa.Table, found: list[tuple[int, RefusedIds]], number: int
    ) -> list[tuple[TableWork, pa.Table]]:
        """As `_split`; ids of shards whose table is not there any more are added to `found`."""
        split = []
        for shard in pc.unique(touches.column("shard")).to_pylist():
            mine = touches.filter(pc.equal(touches.column("shard"), shard))
            try:
                split += self._split(mine)
            except TableUnreadable as error:
                found.append((number, RefusedIds(shard, mine.column("id").combine_chunks(), str(error), surely=True)))
        return split

    def _park_in_tube(self, chunk: TouchChunk, one: RefusedIds, tries: int) -> None:
        with endpoint_of(self._config.source).connect(f"{self._shared.holder}/parking"[:255]) as client:
            for seq, ids in pods_with(list(chunk.pods), one):
                client.park(self._config.tube, WHOLE, self._shared.term, seq, ids, tries=tries, error=one.error)

    # --- the backlog ---

    def _drain(self) -> None:
        """Write the touches of the backlog, until it is empty; then the log is read again."""
        self._prove_by(self.backlog.tube)
        try:
            while not self._stopping.is_set():
                chunk: list[TouchChunk] = []
                if not self._with_patience(partial(self._next_of_backlog, chunk)) or not chunk:
                    return
                self._busy = True
                if not self._with_patience(partial(self._write_chunks, chunk), chunk):
                    continue
                if self._with_patience(partial(self._keep_for_sure, chunk)):
                    self._with_patience(partial(self.backlog.ack, chunk[0]))
        finally:
            self._busy = False
            self._excluded.clear()
            self._prove_by(None)

    def _keep_for_sure(self, chunks: list[TouchChunk]) -> None:
        """Wait for the disk of the downstream before touches of the backlog are acked."""
        try:
            self._group.flush(self._shared.query)
        except CommitsLost:
            self._write(self._batch_of(chunks))
            self._group.flush(self._shared.query)
        self._note()

    def _next_of_backlog(self, found: list[TouchChunk]) -> None:
        chunk = self.backlog.next_chunk()
        found[:] = [] if chunk is None else [chunk]

    def _prove_by(self, tube: str | None) -> None:
        """The pods of this tube prove deletes from now on; None: those of the pipeline's tube."""
        schema = quote(self._config.tube_schema)
        self._pods = None if tube is None else f"{schema}.{quote(tube)}"
        pods = self._pods or f"{schema}.{quote(self._config.tube)}"
        self._works = {name: self._proved_by(work, pods) for name, work in self._works.items()}

    # --- reports ---

    def _report(self, report: BatchReport) -> None:
        self._shared.count(report)
        log.info("batch_done", downstream=self.name, **report.counts())
        self._unreported, self._last = self._unreported.plus(report), report

    def _send_report(self, *, now: bool = False) -> None:
        """Send the counts since the last report, every `REPORT_EVERY` seconds. The source keeps it."""
        last, total = self._last, self._unreported
        if last is None or (time.monotonic() < self._reported_at + REPORT_EVERY and not now):
            return
        self._last, self._unreported, self._reported_at = None, PipelineResult(), time.monotonic()
        self._reporter.send(
            of_several(last, total),
            {"query": self._shared.query, "newest": self._noted},
        )


def _looked_up(tables: list[TableChanges]) -> list[TableChanges]:
    """The changes with their rows, so that no transaction waits for look-ups; as they are, if the rows are large."""
    size, done = 0, []
    for one in tables:
        held = []
        for rows in one.changes:
            size += rows.writes.nbytes
            if size > PIECE:
                return tables
            held.append(rows)
        done.append(replace(one, changes=held))
    return done


def _joined(found: list[tuple[int, RefusedIds]]) -> list[tuple[int, RefusedIds]]:
    """Ids of one chunk and shard with one error together."""
    alike: dict[tuple[int, int, str], list[RefusedIds]] = {}
    for number, one in found:
        alike.setdefault((number, one.shard, one.error), []).append(one)
    return [
        (number, replace(same[0], ids=pa.concat_arrays([one.ids for one in same])))
        for (number, _, _), same in alike.items()
    ]


def _without(touches: pa.Table, parked: pa.Table) -> pa.Table:
    both = touches.join(parked, keys=["shard", "id"], join_type="left anti")
    return deduplicate(both.select(touches.column_names).cast(touches.schema))


def _try_out(work: TableWork, rows: EnrichedRows) -> None:
    """Try a piece of rows out. That rows of other tables are missing is not their fault: the group deals with it."""
    try:
        work.sink.try_out(work.shape, rows)
    except RowRefused as error:
        if not means(getattr(error.__cause__, "sqlstate", None), CONSTRAINT_OF_OTHERS):
            raise
