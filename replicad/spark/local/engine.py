"""Runs a local pipeline: one process reads the tube, looks rows up and writes them to each downstream.

The main thread has the lease of the tube (holding.py), acks what every downstream has, and watches the others. A thread
reads pods as Arrow blocks ahead into the log (touchlog.py). Each downstream has a thread of its own
(writing.py), which takes what the log has for it as one batch. A touch is written once, by the trigger; the log is what
the downstreams share. A downstream that fails for `backlog_after` seconds, or that fills the log, does not hold the
others: what it lacks goes into a tube of its own (backlog.py).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import replace

from replicad.client.blocking_client import BlockingClient
from replicad.errors import (
    ConnectionLost,
    CursorAhead,
    DatabaseError,
    DatabaseUnavailable,
    EncodingUnavailable,
    LeaseHeld,
    LeaseLost,
    ReplicadError,
)
from replicad.eventlog import get_logger
from replicad.protocol.tokens import START, Cursor
from replicad.retry import Backoff
from replicad.spark.arrow import PodReader, block_batch
from replicad.spark.database import forget
from replicad.spark.holding import WHOLE, TubeHold
from replicad.spark.local.config import LocalConfig
from replicad.spark.local.tables import attach_new
from replicad.spark.local.touchlog import MOST_IDS, TouchChunk, TouchLog, ids_to_read
from replicad.spark.local.writing import DownstreamThread, Shared
from replicad.spark.options import SourceOptions, endpoint_of
from replicad.spark.pipeline_config import AVAILABLE_NOW
from replicad.spark.preflight import AwaitedBackfills
from replicad.spark.reports import PipelineResult

READ_PODS = 10_000  # in one answer
READ_IDS = 100_000  # in one answer, about
FEW_PODS, FEW_IDS = 32, 1000  # with fewer in the last answer, so many are asked for as lines: one query of the daemon
LONG_POLL = 5.0  # seconds that a request for pods waits for some
LOOK = 0.2  # seconds between two looks of the main thread
NEW_TABLES = 10.0  # seconds between two looks for new tables
BACKFILL_AHEAD = 300_000  # ids in the log above which no backfill pods are read: live pods would wait behind them

log = get_logger("replicad.spark")


class PodStream:
    """Reads the pods of a tube in order, on a connection of its own."""

    def __init__(self, options: SourceOptions, name: str) -> None:
        self._options = options
        self._client: BlockingClient = endpoint_of(options).connect(name[:255])
        self._lines = options.encoding == "lines"
        self._number = 0
        self._last: TouchChunk | None = None
        self.cursor: Cursor = START

    def read(self, term: int, *, backfill: bool, wait: float) -> TouchChunk | None:
        """The next pods; None if there are none after `wait` seconds."""
        options, tube = self._options, self._options.tube
        assert tube is not None
        bounds = {
            "limit": min(options.max_pods, READ_PODS),
            "ids": ids_to_read(self._last, READ_IDS if options.max_ids is None else options.max_ids),
            "backfill": min(options.max_backfill_pods, READ_PODS) if backfill else 0,
            "wait": wait,
        }
        few = options.encoding == "auto" and _were_few(self._last)
        if few:
            bounds["limit"] = min(options.max_pods, FEW_PODS)
        if not (few or self._lines):
            try:
                blocks = self._client.pod_blocks(tube, WHOLE, term, self.cursor, payload=True, **bounds)  # type: ignore[arg-type]
                batches = [block_batch(block, payload=True, keys=options.keys) for block in blocks]
                return self._chunk(batches, blocks.end)
            except EncodingUnavailable:
                if options.encoding != "auto":
                    raise
                self._lines = True
        chunks = self._client.pod_chunks(tube, WHOLE, term, self.cursor, **bounds)  # type: ignore[arg-type]
        batches = list(PodReader(tube, WHOLE, True, options.keys).batches(chunks))
        return self._chunk(batches, chunks.end)

    def _chunk(self, batches: list, end) -> TouchChunk | None:  # type: ignore[no-untyped-def, type-arg]
        assert end is not None
        if end.cursor == self.cursor:
            return None
        self.cursor = end.cursor
        self._number += 1
        self._last = TouchChunk.of(self._number, batches, end.cursor)
        return self._last

    def close(self) -> None:
        """Close the connection, also during a request of another thread."""
        self._client.close()


def _were_few(last: TouchChunk | None) -> bool:
    return last is not None and last.count < FEW_PODS and last.ids < FEW_IDS


def run_local(config: LocalConfig, until: Callable[[], bool] = lambda: False) -> PipelineResult:
    """Run the pipeline to its end and return its counts, summed over the downstreams.

    With the trigger `available_now` it ends when every downstream has all pods that there were, and all backfills that
    were scheduled. Otherwise it ends when `until` returns True. While the daemon or the source cannot be reached, it
    waits and tries again.

    Raises:
        UsageError, EnvironmentRefused: it cannot start. LeaseHeld: another pipeline or query has the tube.
        ReplicadError: the only downstream cannot be written, and trying again does not help.
    """
    backoff = Backoff(0.5, 60.0, jitter=0.0)
    shared: Shared | None = None
    said = ""
    begun = time.monotonic()
    while True:
        done = 0 if shared is None else shared.result.batches
        try:
            if shared is None:
                config = _with_keys(config)
                shared = Shared(config)
            _Engine(config, shared, until).run()
        except (ConnectionLost, DatabaseUnavailable, LeaseLost, CursorAhead) as error:
            if isinstance(error, LeaseHeld):
                raise
            if shared is not None and shared.result.batches > done:
                backoff.reset()
                begun = time.monotonic()
            if config.trigger == AVAILABLE_NOW and time.monotonic() - begun > 60:
                raise
            if str(error) != said:
                said = str(error)
                log.warning("waiting", error=said, hint="trying again; is the address right, and does it run?")
            deadline = time.monotonic() + backoff.next_delay()
            while time.monotonic() < deadline:
                if until():
                    return PipelineResult() if shared is None else shared.result
                time.sleep(LOOK)
        else:
            return shared.result


def _with_keys(config: LocalConfig) -> LocalConfig:
    """The configuration with the kind of the tube's ids, if the file does not have it."""
    if any(name.lower() == "keys" for name in config.options):
        return config
    with endpoint_of(config.source).connect("replicad-check") as client:
        keys = client.tube_keys(config.tube)
    return replace(config, options={**config.options, "keys": keys})


class _Engine:
    """One lease of the tube."""

    def __init__(self, config: LocalConfig, shared: Shared, until: Callable[[], bool]) -> None:
        self._config = config
        self._shared = shared
        self._until = until
        self._log = TouchLog()
        self._ending = threading.Event()  # nothing more is read
        self._reading: BaseException | None = None
        self._acked: Cursor = START
        self._new_at = 0.0

    def run(self) -> None:
        """Until the end. Raises what ended it."""
        with TubeHold(self._config.source, holder=self._shared.holder) as hold:
            hold.partitions()
            term = hold.term()
            try:
                self._work(hold, term)
            except ConnectionLost:
                raise  # the next try has the same name, and gets the lease at once
            except BaseException:
                with suppress(ReplicadError):  # nothing works any more; so the next pipeline need not wait
                    hold.release()
                raise
            hold.release()

    def _work(self, hold: TubeHold, term: int) -> None:
        self._shared.enter(hold, term)
        if self._config.tables is not None:
            self._look_for_tables()
        threads = {
            name: DownstreamThread(name, self._config, self._shared, self._log) for name in self._config.downstreams
        }
        try:
            for one in threads.values():
                one.prepare()
            for one in threads.values():
                one.start()
            stream = PodStream(self._config.source, f"{hold.holder}/pods")
            reader = threading.Thread(target=self._read, args=(stream, term), name="replicad-read", daemon=True)
            reader.start()
            with closing(stream):
                self._watch(hold, threads, reader)
        finally:
            self._ending.set()
            for one in threads.values():
                one.stop()
            for one in threads.values():
                one.join()
        self._ack(hold)

    def _watch(self, hold: TubeHold, threads: dict[str, DownstreamThread], reader: threading.Thread) -> None:
        while True:
            if self._reading is not None:
                raise self._reading
            for one in threads.values():
                if one.failure is not None:
                    raise one.failure
            self._ack(hold)
            self._divert(threads)
            if self._until():
                return
            if not reader.is_alive() and self._log.is_empty and all(one.is_idle for one in threads.values()):
                return
            if self._config.tables is not None and self._config.trigger != AVAILABLE_NOW:
                self._look_for_tables()
            self._log.wait(LOOK)

    def _divert(self, threads: dict[str, DownstreamThread]) -> None:
        """Let downstreams that hold the others put what they lack into tubes of their own."""
        if len(threads) < 2:
            return
        full = self._log.weight >= MOST_IDS // 2
        for one in threads.values():
            if one.is_failing_for(self._config.backlog_after) or (full and (one.is_failing_for(0) or one.is_draining)):
                one.divert()

    def _read(self, stream: PodStream, term: int) -> None:
        """Read ahead, in a thread of its own."""
        config, now = self._config, self._config.trigger == AVAILABLE_NOW
        awaited = AwaitedBackfills(config.database, config.tube_schema, config.tube)
        settled = False  # whether no backfill was awaited after the last pods
        try:
            patience = time.monotonic() + 5
            while not self._ending.is_set():
                if self._log.weight >= MOST_IDS:
                    self._log.wait(LOOK)
                    continue
                backfill = self._log.weight < BACKFILL_AHEAD
                try:
                    chunk = stream.read(term, backfill=backfill, wait=0.0 if now or not backfill else LONG_POLL)
                except CursorAhead:
                    if time.monotonic() > patience:  # a daemon that has just started learns the position soon
                        raise
                    time.sleep(0.1)
                    continue
                if chunk is not None:
                    self._log.add(chunk)
                    settled = False
                elif not backfill:
                    self._log.wait(0.02)
                elif settled:
                    return
                elif now and awaited.look(stream.cursor.backfill, busy=not self._log.is_empty):
                    self._log.wait(LOOK)
                else:
                    settled = now
        except BaseException as error:  # noqa: BLE001 - the main thread raises it
            if not self._ending.is_set():
                self._reading = error
        finally:
            forget(config.database)
            self._log.end()

    def _ack(self, hold: TubeHold) -> None:
        finished = self._log.take_finished()
        if finished is not None:
            hold.ack(WHOLE, self._acked, finished.end)
            self._acked = finished.end

    def _look_for_tables(self) -> None:
        """Attach tables that the file chooses and that are new."""
        if time.monotonic() < self._new_at:
            return
        self._new_at = time.monotonic() + NEW_TABLES
        try:
            new = attach_new(self._config)
        except DatabaseUnavailable:
            raise
        except (DatabaseError, ReplicadError) as error:
            self._new_at = time.monotonic() + 10 * NEW_TABLES
            log.warning(
                "tables_not_attached",
                error=str(error),
                hint=f"run as a role that may: replicad tubes attach {self._config.tube} TABLE, and a backfill of it",
            )
            return
        if new:
            log.info("tables_attached", tables=", ".join(new[:10]), count=len(new))
        try:
            self._shared.refresh_tables()
        except ReplicadError as error:  # touches of a table that is not known yet ask again
            log.info("tables_not_looked_up", error=str(error))
