"""The source's readers for streams: one linear order over all writers, one task, tokens as offsets.

A linear token is one integer (with the stream's epoch). No row can appear at or below the stream's position, so reading
a range between two tokens again gives the same rows. Nothing is acked; the stream's retention removes rows.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow

from replicad.client.blocking_follow import BlockingFollower
from replicad.client.events import PositionMoved, Reset, RowBatch
from replicad.errors import BadToken, ConnectionLost, DataLoss, TokenAhead, TokenExpired
from replicad.protocol.tokens import Vector
from replicad.spark.connecting import endpoint_of, patience_of
from replicad.spark.offsets import StreamOffset
from replicad.spark.options import EARLIEST, LATEST, SourceOptions

_FIRST = "EARLIEST"  # on the wire: the first row that is retained
ROWS_PER_BATCH = 10_000  # rows in one RecordBatch
SCHEMA = pa.schema([("stream", pa.string()), ("instance", pa.string()), ("token", pa.int64()), ("row", pa.string())])

_Event = RowBatch | Reset | PositionMoved

log = logging.getLogger("replicad.spark")


@dataclass
class StreamPartition(InputPartition):  # type: ignore[misc]
    """The rows of a stream in (`after`, `upto`]. It is pickled to the executor."""

    options: SourceOptions
    after: Vector
    upto: Vector

    def __repr__(self) -> str:
        return f"StreamPartition({self.options.what}, ({self.after}, {self.upto}])"


class StreamStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):  # type: ignore[misc]
    """Reads a stream for one streaming query. Any number of queries may read one stream."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._available_now = False
        self._target: Vector | None = None

    def prepareForTriggerAvailableNow(self) -> None:
        """The query will end at the present end of the stream."""
        self._available_now = True

    def initialOffset(self) -> dict[str, Any]:
        """The option startingOffsets as a token."""
        return StreamOffset(_beginning(self._options)).to_json()

    def getDefaultReadLimit(self) -> ReadLimit:
        """The option maxOffsetsPerTrigger."""
        return ReadMaxRows(self._options.max_offsets)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """The end of the next micro-batch. Waits up to pollTimeout for the stream's position to move."""
        begin = StreamOffset.from_json(start).token
        if self._available_now:
            self._target = self._target or position(self._options, None, 0.0)
            latest = self._target
        else:
            latest = position(self._options, begin, self._options.poll_timeout)
        if latest.epoch != begin.epoch or latest.minimum < begin.minimum:
            loss = f"{self._options.what} was reset: it is at {latest}, the checkpoint at {begin}"
            if self._options.fail_on_data_loss:
                raise DataLoss(f"{loss}. Start with a new checkpointLocation, or set failOnDataLoss=false")
            log.warning("%s; reading begins with its first row", loss)
            begin = Vector(_resolve(self._options, _FIRST).minimum, epoch=latest.epoch)
        end = latest.minimum
        if not isinstance(limit, ReadAllAvailable):
            most = limit.max_rows if isinstance(limit, ReadMaxRows) else self._options.max_offsets
            end = min(end, begin.minimum + most)
        return StreamOffset(Vector(end, epoch=latest.epoch)).to_json()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """One task, which keeps the rows in order."""
        after, upto = StreamOffset.from_json(start).token, StreamOffset.from_json(end).token
        if after == upto:
            return []
        if after.epoch != upto.epoch or after.minimum > upto.minimum:
            after = Vector(-1, epoch=upto.epoch)  # the stream was reset in between: from its first row
        return [StreamPartition(self._options, after, upto)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """In a task: the rows of its range."""
        assert isinstance(partition, StreamPartition)
        return _read_rows(partition)


class StreamBatchReader(DataSourceReader):  # type: ignore[misc]
    """Reads the rows that a stream retains now."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options

    def partitions(self) -> list[InputPartition]:
        """One task, from startingOffsets to the present end of the stream."""
        latest = position(self._options, None, 0.0)
        return [StreamPartition(self._options, _beginning(self._options), latest)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """In a task: the rows of its range."""
        assert isinstance(partition, StreamPartition)
        return _read_rows(partition)


def position(options: SourceOptions, known: Vector | None, wait: float) -> Vector:
    """The stream's position. If it is `known`, wait up to `wait` seconds for another one.

    Raises:
        UnknownStream, ConnectionLost, NotAuthorised.
    """
    deadline = time.monotonic() + wait
    follower = _follow(options, "NOW")
    timer = threading.Timer(max(wait, 0.0), follower.close)
    found: Vector | None = None
    with follower:
        for _ in follower:
            found = _reached(options, follower)
            if found != known or time.monotonic() >= deadline:
                break
            if not timer.is_alive():
                timer.daemon = True
                timer.start()
    timer.cancel()
    if found is None:
        raise ConnectionLost(f"the daemon did not report the position of {options.what}")
    return found


def _beginning(options: SourceOptions) -> Vector:
    if options.starting_offsets == LATEST:
        return position(options, None, 0.0)
    return _resolve(options, _FIRST if options.starting_offsets == EARLIEST else options.starting_offsets)


def _resolve(options: SourceOptions, token: str) -> Vector:
    """The token at which the daemon starts a subscription from `token`: checked, and with the epoch."""
    with _follow(options, token) as events:
        for event in events:
            if isinstance(event, PositionMoved):
                return _reached(options, events)
    raise ConnectionLost(f"the daemon did not report where {options.what} begins")


def _follow(options: SourceOptions, token: str, name: str = "spark/position") -> BlockingFollower[_Event]:
    """The stream from a token, in linear order. `name` is the client's name for the daemon."""
    assert options.stream is not None
    patience = patience_of(options)
    return (
        endpoint_of(options)
        .connect(name)
        .follow({options.stream: token}, linear=True, patience=patience, first_patience=patience, also=(PositionMoved,))
    )


def _reached(options: SourceOptions, events: BlockingFollower[_Event]) -> Vector:
    return Vector.parse(events.token(options.stream or "") or "")


def _read_rows(partition: StreamPartition) -> Iterator[pa.RecordBatch]:
    """The rows of a range as RecordBatches of `SCHEMA`, in ascending order of their tokens.

    Raises:
        DataLoss: rows of the range are no longer retained, or the stream was reset, and failOnDataLoss is set.
    """
    options, upto = partition.options, partition.upto.minimum
    held: list[RowBatch] = []
    size = 0
    for batch in _rows(options, partition.after, upto):
        held.append(batch)
        size += len(batch.rows)
        if size >= ROWS_PER_BATCH:
            yield _record_batch(held)
            held, size = [], 0
    if held:
        yield _record_batch(held)


def _rows(options: SourceOptions, after: Vector, upto: int) -> Iterator[RowBatch]:
    if after.minimum >= upto:
        return
    begin = str(after) if after.minimum >= 0 else _FIRST
    while True:
        try:
            with _follow(options, begin, "spark/task") as events:
                yield from _up_to(events, upto)
        except (TokenExpired, TokenAhead, BadToken) as error:
            if options.fail_on_data_loss or begin == _FIRST:
                raise DataLoss(
                    f"rows of {options.what} behind {after} are missing: {error}. Set failOnDataLoss=false to go on "
                    "with the rows that are still there"
                ) from error
            log.warning("rows of %s behind %s are missing: %s", options.what, after, error)
            begin = _FIRST
        else:
            return


def _up_to(events: Iterable[_Event], upto: int) -> Iterator[RowBatch]:
    for event in events:
        if isinstance(event, Reset):
            raise TokenExpired(f"{event.stream} was reset ({event.reason})")
        if isinstance(event, RowBatch) and event.token <= upto:
            yield event
        if event.token >= upto:
            return


def _record_batch(held: list[RowBatch]) -> pa.RecordBatch:
    stream = held[0].stream
    instances = [batch.instance for batch in held for _ in batch.rows]
    tokens = [batch.token for batch in held for _ in batch.rows]
    rows = [row for batch in held for row in batch.rows]
    return pa.RecordBatch.from_arrays(
        [pa.repeat(pa.scalar(stream), len(rows)), pa.array(instances), pa.array(tokens, pa.int64()), pa.array(rows)],
        schema=SCHEMA,
    )
