"""The source's readers for tubes, of one daemon or of several ("islands").

Spark calls `latestOffset(start)` only when the batch that ends at `start` is in the commit log, so pods are acked there
and again in `commit`. After a crash the first call may be `partitions`, with offsets from the log. Spark also creates
readers in processes that only plan, so the constructor connects to nothing.

A read task reads exactly one range of one partition, without side effects, and checks that the range is complete.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from queue import SimpleQueue
from shlex import quote
from types import FrameType
from typing import Any, TypeVar

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow

from replicad.client.blocking_client import BlockingClient
from replicad.errors import (
    ConnectionLost,
    CursorAhead,
    DatabaseUnavailable,
    DataLoss,
    EncodingUnavailable,
    LeaseForked,
    PartitionsChanged,
    ReplicadError,
    UsageError,
)
from replicad.protocol.tokens import START, Cursor
from replicad.spark.arrow import PodReader, block_batch, last_cursor
from replicad.spark.holding import WHOLE, TubeHold, holder_name
from replicad.spark.kept_clients import kept_client
from replicad.spark.offsets import VERSION, Range, TubeOffset, check_version, foreign, ranges_between
from replicad.spark.options import AUTO, SourceOptions, endpoint_of, retries_of
from replicad.spark.planning import Budget, Goal, Waiting, plan_all, plan_batch
from replicad.tubes.commands import ARROW, LINES, CursorAt, Part, Seen

log = logging.getLogger("replicad.spark")


@dataclass
class TubePartition(InputPartition):  # type: ignore[misc]
    """One task's range and the term of the lease. It is pickled to the executor."""

    options: SourceOptions
    range: Range
    term: int
    streaming: bool = False  # its pods come again if the tube's history forks before they are acked

    def __repr__(self) -> str:
        return f"TubePartition({self.options.what} {self.range.part}, ({self.range.after}, {self.range.upto}])"


def read_range(partition: TubePartition) -> Iterator[pa.RecordBatch]:
    """The pods of a range as RecordBatches of the source's schema.

    Raises:
        DataLoss: there are fewer pods than planned, and failOnDataLoss is set.
        LeaseLost: another query has taken the tube over. If the tube's history has forked and the query is a stream,
            the range ends instead: its pods are not acked, and those that there are come again.
        EncodingUnavailable: encoding=arrow, and the daemon can only send lines.
        ConnectionLost: after all retries.
    """
    options, wanted = partition.options, partition.range
    retries = retries_of(options)
    encoding = LINES if options.encoding == LINES else ARROW
    after, pods = wanted.after, 0
    while True:
        try:
            with kept_client(endpoint_of(options), f"task/{options.consumer or 'spark'}") as client:
                for batch in _batches(client, partition, after, encoding):
                    yield batch
                    pods += batch.num_rows
                    after = last_cursor(batch, after)
            break
        except LeaseForked as error:
            if not partition.streaming:
                raise
            log.warning("%s %s ends early: %s", options.what, wanted.part, error)
            return
        except EncodingUnavailable:  # read the pods behind `after` as lines
            if options.encoding != AUTO:
                raise
            encoding = LINES
        except (ConnectionLost, DatabaseUnavailable):
            if not retries.pause():
                raise
    _check_complete(options, wanted, pods)


def _batches(
    client: BlockingClient, partition: TubePartition, after: Cursor, encoding: str
) -> Iterator[pa.RecordBatch]:
    options, part, upto = partition.options, partition.range.part, partition.range.upto
    assert options.tube is not None
    if encoding == LINES:
        chunks = client.pod_chunks(options.tube, part, partition.term, after=after, upto=upto)
        return PodReader(options.tube, part, options.include_payload, options.keys).batches(chunks)
    payload = options.include_payload
    blocks = client.pod_blocks(options.tube, part, partition.term, after=after, payload=payload, upto=upto)
    return (block_batch(block, payload=payload, keys=options.keys) for block in blocks)


def _check_complete(options: SourceOptions, wanted: Range, pods: int) -> None:
    if pods >= wanted.pods:  # pods beyond the plan came late: they are processed and acked with the rest
        return
    text = (
        f"{options.what} {wanted.part}: {wanted.pods} pods were planned in ({wanted.after}, {wanted.upto}], {pods} are "
        "there. The others were removed, or the tube was created again"
    )
    if options.fail_on_data_loss:
        raise DataLoss(f"{text}. Set failOnDataLoss=false to go on without them, and then backfill the tube")
    log.warning("%s", text)


LAG_INTERVAL = 5.0  # seconds between two counts of waiting pods, which Postgres has to do
REPARTITION_PATIENCE = 10.0  # seconds within which a daemon notices a new number of partitions
COUNTED = 1000  # pods that are counted before the partitions are asked; with more of them each is asked
WAIT_SLICE = 10.0  # seconds of waiting in one request; daemons limit it
PLANNERS = 4  # partitions of a batch read that are planned at the same time; Postgres has to count their pods
BATCH_TTL = 5.0  # seconds after its last request for which a batch read keeps the lease


class TubeStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):  # type: ignore[misc]
    """Reads a tube for one streaming query. A second query gets LeaseHeld with the name of the first."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._hold: TubeHold | None = None
        self._acked: TubeOffset | None = None
        self._planned: TubeOffset | None = None  # the end of the batch that may be running; None: no batch is
        self._available_now = False
        self._target: Goal | None = None
        self._short_since: float | None = None  # the time since which there are fewer pods than minPodsPerTrigger
        self._passed_on: dict[str, int] = {}  # generation: the last seq of it, as long as touches of it are unknown
        self._reported: tuple[float, dict[str, Any]] | None = None

    # --- Spark's calls, in the order in which they come ---

    def prepareForTriggerAvailableNow(self) -> None:
        """The query will end when it has read the pods that there are at the first `latestOffset`."""
        self._available_now = True

    def initialOffset(self) -> dict[str, Any]:
        """Before the first unacked pod."""
        return self._to_json(TubeOffset.beginning(self._held().partitions()))

    def getDefaultReadLimit(self) -> ReadLimit:
        """The option maxPodsPerTrigger."""
        return ReadMaxRows(self._options.max_pods)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """Ack up to `start`, then plan the next micro-batch. Waits up to pollTimeout if there are no pods.

        Raises:
            LeaseHeld: another query has the tube.
            CursorAhead: the checkpoint is ahead of the tube, which was restored or created again.
            UsageError: the checkpoint is of another tube.
        """
        hold = self._held()
        begin = self._from_json(start)
        try:
            hold.expect(TubeOffset.tube_of(start)[1])
            begin, end, forked = self._read_on(hold, start, limit)
        except CursorAhead as error:
            if self._options.fail_on_data_loss:
                raise CursorAhead(
                    f"{error}. The checkpoint is ahead of the tube, which was restored or created again: start with a "
                    "new checkpointLocation and a backfill, or set failOnDataLoss=false to begin with its first pod"
                ) from error
            log.warning("%s; reading begins with the first pod", error)
            same = TubeOffset.tube_of(start)[1] in (None, hold.made)
            self._acked = begin if same else None  # restored: it has none of these pods
            hold.enter(None)
            begin, end = self._plan(hold, TubeOffset.beginning(begin.partitions), limit)
            forked = False
        if end == begin and not forked:
            self._planned = None
            return start
        self._planned = end
        return self._to_json(end)

    def _read_on(self, hold: TubeHold, start: dict[str, Any], limit: ReadLimit) -> tuple[TubeOffset, TubeOffset, bool]:
        """Ack up to `start` and plan what follows; returns whether the tube's history has forked. If it has, nothing is
        acked, and the plan begins with the first pod. The end is of the present generation then.
        """
        begin, generation = self._from_json(start), TubeOffset.generation_of(start)
        forked = False
        while True:
            try:
                hold.enter(generation)
                if not forked:
                    self._ack(begin)
                return *self._plan(hold, begin, limit), forked
            except LeaseForked as error:
                if generation is not None:
                    self._report_fork(hold, generation, begin, error)
                begin, generation, forked = TubeOffset.beginning(begin.partitions), None, True
                self._acked, self._planned, self._target = begin, None, None

    def _report_fork(self, hold: TubeHold, generation: str, begin: TubeOffset, error: LeaseForked) -> None:
        """Ask what is left of the touches that this query has passed on, and say so."""
        self._passed_on[generation] = max(begin.last_seq, 0 if self._planned is None else self._planned.last_seq)
        for earlier, passed_on in list(self._passed_on.items()):  # a later fork may lose what was noted of one before
            found = hold.seen(earlier, passed_on)
            if found.mended is not None:
                del self._passed_on[earlier]
            self._say_unknown(hold, found, error)

    @staticmethod
    def _say_unknown(hold: TubeHold, found: Seen, error: LeaseForked) -> None:
        passed_on = found.seq
        if found.state == "same":
            log.warning("%s; the tube has all touches that this query has passed on", error)
            return
        remedy = {
            "unknown": f"run: replicad tubes backfill {quote(hold.tube)} --shard all",
            "scheduled": "backfills of its tables are scheduled and bring it up to date",
            "healed": "its tables have been backfilled since",
        }[found.state or "unknown"]
        log.warning(
            "%s; the touches of tube %s with a seq in (%s, %s] are unknown: their changes were written downstream, and "
            "may not be in the database; %s",
            error,
            hold.tube,
            found.shared,
            passed_on,
            remedy,
        )

    def reportLatestOffset(self) -> dict[str, Any] | None:
        """The end of the tube, for `lastProgress`. Its `c`s minus the `c`s of endOffset are the lag in pods.

        Counts at most 100,000 pods beyond the batch, at most every 5 s.
        """
        base = self._planned or self._acked
        if base is None or self._hold is None:
            return None
        now = time.monotonic()
        if self._reported is None or now - self._reported[0] >= LAG_INTERVAL:
            try:
                self._reported = (now, self._to_json(plan_batch(self._hold.plan, base, Budget(pods=100_000))))
            except ReplicadError as error:  # the lag is only shown; it must not end the query
                log.warning("lag of tube %s is unknown: %s", self._hold.tube, error)
                return None
        return self._reported[1]

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """One task for every partition that has pods in the batch. After a crash Spark calls this first."""
        self._from_json(start)
        finish = self._from_json(end)
        ranges = ranges_between(start, end)
        if not ranges:
            return []
        self._planned = finish
        hold = self._held()
        if self._options.fail_on_data_loss:
            hold.expect(TubeOffset.tube_of(end)[1])
        try:
            hold.enter(TubeOffset.generation_of(end))
        except LeaseForked as error:  # `latestOffset` goes on with the first pod
            log.warning("%s; a batch that was planned before comes again as far as it has pods", error)
            return []
        term = hold.term()
        return [TubePartition(self._options, one, term, streaming=True) for one in ranges]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """In a task: the pods of its range."""
        assert isinstance(partition, TubePartition)
        return read_range(partition)

    def commit(self, end: dict[str, Any]) -> None:
        """The batch that ends at `end` is in the commit log: ack it, unless `latestOffset` has done so."""
        finish = self._from_json(end)
        try:
            self._held().expect(TubeOffset.tube_of(end)[1])
        except CursorAhead:
            if self._options.fail_on_data_loss:
                raise
            return  # the tube of that batch was removed
        try:
            self._held().enter(TubeOffset.generation_of(end))
            self._ack(finish)
        except LeaseForked as error:  # `latestOffset` goes on with the first pod
            log.warning("%s; the pods of the batch are not acked, and come again", error)

    def stop(self) -> None:
        """The query has ended. Release the tube, unless tasks of a running batch may still write."""
        if self._hold is not None:
            if self._planned is None:
                self._hold.release()
            self._hold.close()

    def _held(self) -> TubeHold:
        if self._hold is None:
            self._hold = TubeHold(self._options, holder=self._options.holder)
            end_on_signals(self.stop)
        return self._hold

    def _from_json(self, value: dict[str, Any]) -> TubeOffset:
        """Read an offset. Raises UsageError if it is of another tube."""
        found = TubeOffset.from_json(value)
        tube, _ = TubeOffset.tube_of(value)
        if tube not in (None, self._options.tube):
            raise UsageError(
                f"the checkpoint is of tube {tube!r}, and the option tube is {self._options.tube!r}, whose pods it "
                "would ack unread; use another checkpointLocation for each tube"
            )
        return found

    def _to_json(self, offset: TubeOffset) -> dict[str, Any]:
        hold = self._hold
        known = (None, None) if hold is None else (hold.made, hold.generation)
        return offset.to_json(self._options.tube, *known)

    def _ack(self, offset: TubeOffset) -> None:
        """Ack all pods up to an offset that this process has not acked before."""
        before = self._acked if self._acked is not None and self._acked.partitions == offset.partitions else None
        for number, place in enumerate(offset.places):
            after = before.places[number].cursor if before is not None else START
            if place.cursor not in (after, START):
                self._held().ack(offset.part(number), _lower(after, place.cursor), place.cursor)
        self._acked = offset
        if self._planned == offset:
            self._planned = None

    def _plan(self, hold: TubeHold, begin: TubeOffset, limit: ReadLimit) -> tuple[TubeOffset, TubeOffset]:
        """The beginning and the end of the next micro-batch, in the tube's present number of partitions."""
        deadline = time.monotonic() + REPARTITION_PATIENCE
        while True:
            partitions = hold.partitions()
            if partitions != begin.partitions:
                log.warning("tube %s has %d partitions now, not %d", hold.tube, partitions, begin.partitions)
                begin = TubeOffset.beginning(partitions)
            try:
                return begin, self._next(hold, begin, limit)
            except PartitionsChanged:  # just now: ask again until the daemon reports the new number
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)

    def _next(self, hold: TubeHold, begin: TubeOffset, limit: ReadLimit) -> TubeOffset:
        options = self._options
        if isinstance(limit, ReadAllAvailable):
            return plan_all(hold.plan, begin, _only_zero(options.max_backfill_pods))
        pods = limit.max_rows if isinstance(limit, ReadMaxRows) else options.max_pods
        budget = Budget(pods, options.max_ids, options.max_backfill_pods, options.max_ids_of_task)
        if not self._available_now:
            return self._wait_for_pods(hold, begin, budget)
        if self._target is None or len(self._target.cursors) != begin.partitions:
            everything = plan_all(hold.plan, begin, _only_zero(options.max_backfill_pods))
            self._target = Goal([place.cursor for place in everything.places])
        if self._target.reached(begin):
            hold.release()  # all is acked and the query ends; another request would claim the lease again
            return begin
        return plan_batch(hold.plan, begin, self._target.budget(begin, budget))

    def _wait_for_pods(self, hold: TubeHold, begin: TubeOffset, budget: Budget) -> TubeOffset:
        """Wait for enough pods, up to pollTimeout, and plan. Returns `begin` if there are not enough.

        The first request is for the whole tube: it waits for a pod of any partition, and says how many there are. The
        partitions are asked only until so many were found.
        """
        deadline = time.monotonic() + self._options.poll_timeout
        after, end = begin.lowest, begin
        while True:
            left = deadline - time.monotonic()
            if self._short_since is not None:
                left = min(left, self._short_since + self._options.max_trigger_delay - time.monotonic())
            wait = min(max(left, 0), WAIT_SLICE)
            new = hold.plan(WHOLE, after, limit=COUNTED, backfill=_only_zero(budget.backfill), wait=wait)
            if new.pods or end != begin:
                is_first = end == begin and new.pods < COUNTED
                waiting = Waiting(new.pods, new.cursor.backfill > begin.lowest.backfill) if is_first else None
                end = plan_batch(hold.plan, begin, budget, waiting)
            if self._is_enough(begin, end):
                return end
            if time.monotonic() >= deadline:
                return begin
            after = end.furthest  # new pods of any partition lie behind it

    def _is_enough(self, begin: TubeOffset, end: TubeOffset) -> bool:
        """Whether a batch may begin: minPodsPerTrigger is reached, or maxTriggerDelay is over."""
        pods, now = end.pods - begin.pods, time.monotonic()
        if pods and pods < (self._options.min_pods or 1):
            if self._short_since is None:
                self._short_since = now
            if now < self._short_since + self._options.max_trigger_delay:
                return False
        self._short_since = None
        return pods > 0


class TubeBatchReader(DataSourceReader):  # type: ignore[misc]
    """Reads the pods of a tube without removing them. No other query can have the tube meanwhile."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options

    def partitions(self) -> list[InputPartition]:
        """One task for every partition with pods. Spark does not report their end, so the lease is left to expire."""
        with ExitStack() as stack:
            hold = stack.enter_context(self._hold())
            begin = TubeOffset.beginning(hold.partitions())
            hold.term()  # claims the lease; the other connections use the same holder and get the same term
            free: SimpleQueue[TubeHold] = SimpleQueue()
            free.put(hold)
            planners = min(PLANNERS, begin.partitions)
            for _ in range(planners - 1):
                free.put(stack.enter_context(self._hold()))

            def ask(part: Part, after: Cursor, **bounds: Any) -> CursorAt:
                one = free.get()
                try:
                    return one.plan(part, after, **bounds)
                finally:
                    free.put(one)

            ranges = begin.ranges_to(plan_all(ask, begin, at_once=planners))
            if not ranges:
                hold.release()
            return [TubePartition(self._options, one, hold.term()) for one in ranges]

    def _hold(self) -> TubeHold:
        """All actions of one Spark application use the same holder, so that they do not wait for each other."""
        holder = holder_name(self._options.consumer, "batch", os.getppid())
        return TubeHold(self._options, holder=holder, ttl=BATCH_TTL, renewing=False)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """In a task: the pods of its range. Without any range Spark makes a partition of its own: then none."""
        return read_range(partition) if isinstance(partition, TubePartition) else iter(())


def end_on_signals(stop: Callable[[], None]) -> None:
    """Call `stop` on SIGTERM and SIGHUP: Spark ends this process with them, mostly without calling `stop`."""
    if threading.current_thread() is not threading.main_thread():
        return

    def end(number: int, _frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        stop()
        os.kill(os.getpid(), number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, end)


def _lower(one: Cursor, other: Cursor) -> Cursor:
    """Where an ack begins: at `one`, or at the start if `one` is not before the end (after a restart of reading)."""
    return one if one.regular <= other.regular and one.backfill <= other.backfill else START


def _only_zero(backfill: int | None) -> int | None:
    """0 if backfill pods are excluded, otherwise no limit."""
    return 0 if backfill == 0 else None


SLICE = 0.25  # seconds to wait for all islands at a time: the longest delay for pods of an island

T = TypeVar("T")


class IslandsStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):  # type: ignore[misc]
    """Reads the tubes of all islands for one streaming query. Limits apply to each island."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._readers = {
            name: TubeStreamReader(replace(one, poll_timeout=min(SLICE, one.poll_timeout)))
            for name, one in options.by_island().items()
        }
        self._threads: ThreadPoolExecutor | None = None  # made with the first request: some processes only plan

    # --- Spark's calls, as in TubeStreamReader ---

    def prepareForTriggerAvailableNow(self) -> None:
        """See TubeStreamReader."""
        for reader in self._readers.values():
            reader.prepareForTriggerAvailableNow()

    def initialOffset(self) -> dict[str, Any]:
        """Before the first unacked pod of every island."""
        return _joined(self._each(lambda _, reader: reader.initialOffset()))

    def getDefaultReadLimit(self) -> ReadLimit:
        """The limit of each island."""
        return next(iter(self._readers.values())).getDefaultReadLimit()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """Ack up to `start`, then plan the next micro-batch. Waits up to pollTimeout if no island has pods.

        Raises:
            LeaseHeld, CursorAhead: as TubeStreamReader, for any island.
        """
        begin = self._split(start)
        deadline = time.monotonic() + self._options.poll_timeout
        while True:
            end = self._each(lambda name, reader: reader.latestOffset(self._begin(begin, name, reader), limit))
            if end != begin or time.monotonic() >= deadline:
                return _joined(end)

    def reportLatestOffset(self) -> dict[str, Any] | None:
        """The ends of all tubes; None if an end is unknown."""
        found = self._each(lambda _, reader: reader.reportLatestOffset())
        known = {name: one for name, one in found.items() if one is not None}
        return _joined(known) if len(known) == len(found) else None

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """One task for every partition of every island that has pods in the batch.

        Downstreams know a task of a repeated batch by its number. So the order is that of the islands' names, and not
        that of the option, which may be another one when the batch comes again.
        """
        begin, finish = self._split(start), self._split(end)

        def plan(name: str, reader: TubeStreamReader) -> list[InputPartition]:
            return reader.partitions(self._begin(begin, name, reader), finish[name]) if name in finish else []

        planned = self._each(plan)
        return [one for name in sorted(planned) for one in planned[name]]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """In a task: the pods of its range, from its island."""
        assert isinstance(partition, TubePartition)
        return read_range(partition)

    def commit(self, end: dict[str, Any]) -> None:
        """The batch that ends at `end` is in the commit log."""
        finish = self._split(end)
        self._each(lambda name, reader: reader.commit(finish[name]) if name in finish else None)

    def stop(self) -> None:
        """The query has ended: release every tube."""
        for reader in self._readers.values():
            reader.stop()
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)

    def _each(self, call: Callable[[str, TubeStreamReader], T]) -> dict[str, T]:
        """Call the readers of all islands at once. When all have ended, raise the first failure in their order."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(len(self._readers), thread_name_prefix="island")
            end_on_signals(self.stop)
        calls = {name: self._threads.submit(call, name, reader) for name, reader in self._readers.items()}
        for one in calls.values():
            one.exception()  # wait
        return {name: one.result() for name, one in calls.items()}

    def _split(self, offset: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        check_version(offset)
        found = offset.get("i")
        if not isinstance(found, Mapping):
            raise foreign(offset)
        if missing := sorted(found.keys() - self._readers.keys()):
            raise UsageError(
                f"the checkpoint has an island {missing[0]!r}, but the option islands has only "
                f"{', '.join(self._readers)}; add it there, or use another checkpointLocation"
            )
        return dict(found)

    @staticmethod
    def _begin(begin: Mapping[str, dict[str, Any]], name: str, reader: TubeStreamReader) -> dict[str, Any]:
        """Where an island begins: at its first pod if the checkpoint does not have it yet."""
        return begin[name] if name in begin else reader.initialOffset()


def _joined(offsets: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    return {"i": dict(sorted(offsets.items())), "v": VERSION}
