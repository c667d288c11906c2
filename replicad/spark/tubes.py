"""The source's readers for tubes: Spark's calls and their order, as found by experiment.

`latestOffset(start)` comes only when the batch that ends at `start` is in the commit log, so that is where acks happen;
`commit` repeats them, because the last one never gets a `commit`, and after a crash the first call may be `partitions`
with offsets from the log. Readers are also made in processes that only plan, so making one opens nothing.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from queue import SimpleQueue
from types import FrameType
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow

from replicad.errors import CursorAhead, PartitionsChanged, ReplicadError
from replicad.protocol.tokens import START, Cursor
from replicad.spark.holding import WHOLE, TubeHold, holder_name
from replicad.spark.offsets import TubeOffset
from replicad.spark.options import SourceOptions
from replicad.spark.planning import Budget, Goal, plan_all, plan_batch
from replicad.spark.reading import TubePartition, read_range
from replicad.tubes.commands import CursorAt, Part

LAG_INTERVAL = 5.0  # seconds between two looks at how much is waiting; each costs a count in Postgres
REPARTITION_PATIENCE = 10.0  # seconds for which a daemon may not know yet that the number of partitions changed
WAIT_SLICE = 10.0  # seconds of waiting in one request; daemons bound it
PLANNERS = 4  # partitions of a batch read that are asked about at once; Postgres counts their pods one by one
BATCH_TTL = 5.0  # seconds for which a batch read keeps others from the tube after its last request

log = logging.getLogger("replicad.spark")


class TubeStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):  # type: ignore[misc]
    """Reads a tube for one streaming query. One query owns the tube; a second one is told who that is."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._hold: TubeHold | None = None
        self._acked: TubeOffset | None = None
        self._planned: TubeOffset | None = None  # the end of a batch that may be under way; None: nothing is
        self._available_now = False
        self._target: Goal | None = None
        self._idle_at: TubeOffset | None = None  # where the last trigger found nothing
        self._short_since: float | None = None  # since when there are fewer pods than minPodsPerTrigger
        self._reported: tuple[float, dict[str, Any]] | None = None

    # --- Spark's calls, in the order in which they come ---

    def prepareForTriggerAvailableNow(self) -> None:
        """The query is to end when it has read what there is now; the first look at the tube says what that is."""
        self._available_now = True

    def initialOffset(self) -> dict[str, Any]:
        """Before the first pod that was not acked."""
        return TubeOffset.beginning(self._held().partitions()).to_json()

    def getDefaultReadLimit(self) -> ReadLimit:
        """maxPodsPerTrigger, in Spark's words."""
        return ReadMaxRows(self._options.max_pods)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """Ack up to `start`, then plan the next micro-batch; waits up to pollTimeout where there is nothing.

        Raises:
            LeaseHeld: another query has the tube.
            CursorAhead: the checkpoint is ahead of the tube, which was restored or made anew.
        """
        hold = self._held()
        begin = TubeOffset.from_json(start)
        try:
            self._ack(begin)
            begin, end = self._plan(hold, begin, limit)
        except CursorAhead as error:
            if self._options.fail_on_data_loss:
                raise CursorAhead(
                    f"{error}. The checkpoint is ahead of the tube, which was restored or made anew: start with a new "
                    "checkpointLocation and a backfill, or set failOnDataLoss=false to begin with its first pod"
                ) from error
            log.warning("%s; reading begins anew", error)
            self._acked = begin  # nothing of it is there to be acked
            begin, end = self._plan(hold, TubeOffset.beginning(begin.partitions), limit)
        if end == begin:
            self._planned = None
            return start
        self._planned = end
        return end.to_json()

    def reportLatestOffset(self) -> dict[str, Any] | None:
        """How far the tube goes, for `lastProgress`; the `c`s minus those of endOffset are the lag in pods.

        At most 100,000 pods beyond the batch are counted, and not more often than every 5 s.
        """
        base = self._planned or self._acked
        if base is None or self._hold is None:
            return None
        now = time.monotonic()
        if self._reported is None or now - self._reported[0] >= LAG_INTERVAL:
            try:
                self._reported = (now, plan_batch(self._hold.plan, base, Budget(pods=100_000)).to_json())
            except ReplicadError as error:  # it is a figure for people; what matters fails where it matters
                log.warning("lag of tube %s not known: %s", self._hold.tube, error)
                return None
        return self._reported[1]

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """A task for every partition that has pods in the batch. After a crash this is the first call of all."""
        begin, finish = TubeOffset.from_json(start), TubeOffset.from_json(end)
        ranges = begin.ranges_to(finish)
        if not ranges:
            return []
        self._planned = finish
        term = self._held().term()
        return [TubePartition(self._options, one, term) for one in ranges]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """In a task: the pods of its range."""
        assert isinstance(partition, TubePartition)
        return read_range(partition)

    def commit(self, end: dict[str, Any]) -> None:
        """The batch that ends at `end` is in the commit log: ack it, if `latestOffset` has not."""
        self._ack(TubeOffset.from_json(end))

    def stop(self) -> None:
        """The query has ended. Lets the tube go at once, unless a batch was under way whose tasks may still write."""
        if self._hold is not None:
            if self._planned is None:
                self._hold.release()
            self._hold.close()

    # --- how ---

    def _held(self) -> TubeHold:
        if self._hold is None:
            self._hold = TubeHold(self._options, holder=self._options.holder)
            end_on_signals(self.stop)
        return self._hold

    def _ack(self, offset: TubeOffset) -> None:
        """Ack everything up to an offset; what this process has acked before is not asked for again."""
        before = self._acked if self._acked is not None and self._acked.partitions == offset.partitions else None
        for number, place in enumerate(offset.places):
            after = before.places[number].cursor if before is not None else START
            if place.cursor not in (after, START):
                self._held().ack(offset.part(number), _lower(after, place.cursor), place.cursor)
        self._acked = offset
        if self._planned == offset:
            self._planned = None

    def _plan(self, hold: TubeHold, begin: TubeOffset, limit: ReadLimit) -> tuple[TubeOffset, TubeOffset]:
        """The next micro-batch, in the tube's own number of partitions: where it begins, and its end."""
        deadline = time.monotonic() + REPARTITION_PATIENCE
        while True:
            partitions = hold.partitions()
            if partitions != begin.partitions:
                log.warning("tube %s has %d partitions now, not %d", hold.tube, partitions, begin.partitions)
                begin = TubeOffset.beginning(partitions)
            try:
                return begin, self._next(hold, begin, limit)
            except PartitionsChanged:  # just now: the daemon will have noticed in a moment
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)

    def _next(self, hold: TubeHold, begin: TubeOffset, limit: ReadLimit) -> TubeOffset:
        options = self._options
        if isinstance(limit, ReadAllAvailable):
            return plan_all(hold.plan, begin, _only_zero(options.max_backfill_pods))
        pods = limit.max_rows if isinstance(limit, ReadMaxRows) else options.max_pods
        budget = Budget(pods, options.max_ids, options.max_backfill_pods)
        if not self._available_now:
            return self._wait_for_pods(hold, begin, budget)
        if self._target is None or len(self._target.cursors) != begin.partitions:
            everything = plan_all(hold.plan, begin, _only_zero(options.max_backfill_pods))
            self._target = Goal([place.cursor for place in everything.places])
        if self._target.reached(begin):
            hold.release()  # all is acked and the query ends now; should Spark ask again, it is claimed again
            return begin
        return plan_batch(hold.plan, begin, self._target.budget(begin, budget))

    def _wait_for_pods(self, hold: TubeHold, begin: TubeOffset, budget: Budget) -> TubeOffset:
        """Plan, waiting for enough pods for as long as the options say; `begin` where there are not enough."""
        deadline = time.monotonic() + self._options.poll_timeout
        end = begin
        if self._idle_at != begin or not self._options.poll_timeout:
            # else there was nothing a moment ago, and waiting sees what came since
            end = plan_batch(hold.plan, begin, budget)
        while not self._is_enough(begin, end):
            left = deadline - time.monotonic()
            if left <= 0:
                self._idle_at = begin if end == begin else None
                return begin
            if self._short_since is not None:
                left = min(left, self._short_since + self._options.max_trigger_delay - time.monotonic())
            # Whatever comes lies behind the furthest cursor, in whichever partition; this only waits for it.
            wait = min(max(left, 0), WAIT_SLICE)
            came = hold.plan(WHOLE, end.furthest, limit=1, backfill=_only_zero(budget.backfill), wait=wait)
            if came.pods or end != begin:
                end = plan_batch(hold.plan, begin, budget)
        self._idle_at = None
        return end

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
    """Reads what a tube holds now and leaves it there. Needs the tube for itself while it reads."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options

    def partitions(self) -> list[InputPartition]:
        """A task for every partition that has pods. Nobody says when they are done: the lease runs out by itself."""
        with ExitStack() as stack:
            hold = stack.enter_context(self._hold())
            begin = TubeOffset.beginning(hold.partitions())
            hold.term()  # claimed once; who asks for the same holder gets the same term
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
        """The same holder for every action of one Spark application, so that they do not wait for each other."""
        holder = holder_name(self._options.consumer, "batch", os.getppid())
        return TubeHold(self._options, holder=holder, ttl=BATCH_TTL, renewing=False)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """In a task: the pods of its range; nothing where Spark made a partition up because there was none."""
        return read_range(partition) if isinstance(partition, TubePartition) else iter(())


def end_on_signals(stop: Callable[[], None]) -> None:
    """Where a query stops normally Spark ends this process by signals, and mostly `stop` would not be called."""
    if threading.current_thread() is not threading.main_thread():
        return

    def end(number: int, _frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        stop()
        os.kill(os.getpid(), number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, end)


def _lower(one: Cursor, other: Cursor) -> Cursor:
    """Where an ack begins: never behind its end, which happens where reading began anew."""
    return one if one.regular <= other.regular and one.backfill <= other.backfill else START


def _only_zero(backfill: int | None) -> int | None:
    """A bound that matters even where nothing is limited: no backfill at all."""
    return 0 if backfill == 0 else None
