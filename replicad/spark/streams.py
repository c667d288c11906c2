"""The source's readers for streams: one linear order over all writers, one task, tokens as offsets.

A linear token is one integer (with the stream's epoch), and every integer at or below the stream's position is
finished, so any stretch between two of them can be read again and is the same rows. Nothing is acked; a stream forgets
by retention.
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
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from replicad.client.blocking_client import BlockingFollower
from replicad.client.events import PositionMoved, Reset, RowBatch
from replicad.errors import BadToken, ConnectionLost, DataLoss, TokenAhead, TokenExpired, UsageError
from replicad.protocol.tokens import Vector
from replicad.spark.changes import KEY, NO_CHANGES, OLD, ROW, ChangedRows, described_columns
from replicad.spark.offsets import StreamOffset
from replicad.spark.options import EARLIEST, LATEST, SourceOptions, endpoint_of, patience_of

_FIRST = "EARLIEST"  # the wire's word for the first row that is retained
_JSON = "replicad_json"  # in the metadata of a column in Spark: its type is json or jsonb
ROWS_PER_BATCH = 10_000  # rows in one RecordBatch
SCHEMA = pa.schema([("stream", pa.string()), ("instance", pa.string()), ("token", pa.int64()), ("row", pa.string())])

_Told = RowBatch | Reset | PositionMoved

log = logging.getLogger("replicad.spark")


@dataclass
class StreamPartition(InputPartition):  # type: ignore[misc]
    """The rows of a stream in (`after`, `upto`]. All that reaches an executor."""

    options: SourceOptions
    after: Vector
    upto: Vector
    columns: ChangedRows | None = None  # of changes

    def __repr__(self) -> str:
        return f"StreamPartition({self.options.what}, ({self.after}, {self.upto}])"


class StreamStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):  # type: ignore[misc]
    """Reads a stream for one streaming query. Any number of queries may read one stream."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        self._options = options
        self._columns = _columns_of(options, schema)
        self._available_now = False
        self._target: Vector | None = None

    def prepareForTriggerAvailableNow(self) -> None:
        """The query is to end where the stream ends now."""
        self._available_now = True

    def initialOffset(self) -> dict[str, Any]:
        """What startingOffsets says, as a token."""
        return StreamOffset(_beginning(self._options)).to_json()

    def getDefaultReadLimit(self) -> ReadLimit:
        """maxOffsetsPerTrigger, in Spark's words."""
        return ReadMaxRows(self._options.max_offsets)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """The stream's position, or as far towards it as a micro-batch may go;
        waits up to pollTimeout for it to move.
        """
        begin = StreamOffset.from_json(start).token
        if self._available_now:
            self._target = self._target or position(self._options, None, 0.0)
            latest = self._target
        else:
            latest = position(self._options, begin, self._options.poll_timeout)
        if latest.epoch != begin.epoch or latest.minimum < begin.minimum:
            begin = _continued(self._options, begin)
            if latest.epoch != begin.epoch:
                latest = self._target = position(self._options, None, 0.0)
        end = max(begin.minimum, latest.minimum)
        if not isinstance(limit, ReadAllAvailable):
            most = limit.max_rows if isinstance(limit, ReadMaxRows) else self._options.max_offsets
            if end - begin.minimum > most:  # a gap in the ids is no row: a stream of changes has gaps of millions
                first, _ = _first_row(self._options, begin, end)
                end = min(end, (end if first is None else first - 1) + most)
        return StreamOffset(Vector(end, epoch=latest.epoch)).to_json()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """One task, for the order's sake."""
        after, upto = StreamOffset.from_json(start).token, StreamOffset.from_json(end).token
        if after == upto:
            return []
        if after.epoch != upto.epoch:  # the history forked in between, or since the batch was planned
            after = _continued(self._options, after)
            if after.epoch != upto.epoch:
                upto = _continued(self._options, upto)
        if after.minimum >= upto.minimum:
            return []
        return [StreamPartition(self._options, after, upto, self._columns)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """In a task: the rows of its stretch."""
        assert isinstance(partition, StreamPartition)
        return read_stretch(partition)


class StreamBatchReader(DataSourceReader):  # type: ignore[misc]
    """Reads what a stream retains now."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        self._options = options
        self._columns = _columns_of(options, schema)

    def partitions(self) -> list[InputPartition]:
        """One task, from startingOffsets to where the stream ends now."""
        latest = position(self._options, None, 0.0)
        return [StreamPartition(self._options, _beginning(self._options), latest, self._columns)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """In a task: the rows of its stretch."""
        assert isinstance(partition, StreamPartition)
        return read_stretch(partition)


def position(options: SourceOptions, known: Vector | None, wait: float) -> Vector:
    """Where the stream stands; where that is `known`, up to `wait` seconds later at the latest.

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
        raise ConnectionLost(f"{options.what} did not say where it stands")
    return found


def _beginning(options: SourceOptions) -> Vector:
    if options.starting_offsets == LATEST:
        return position(options, None, 0.0)
    begin, fork = _ask(options, _FIRST if options.starting_offsets == EARLIEST else options.starting_offsets)
    if fork is not None and options.fail_on_data_loss:
        raise DataLoss(f"{_forked(options, fork)}, which is below startingOffsets. Set startingOffsets to {begin}")
    return begin


def _ask(options: SourceOptions, token: str) -> tuple[Vector, int | None]:
    """Where a subscription from a token begins, as the daemon says: checked, and with the epoch.

    With it the position after which the history forked, if the token lies above it.
    """
    fork: int | None = None
    with _follow(options, token) as events:
        for event in events:
            if isinstance(event, Reset):
                fork = event.token
            elif isinstance(event, PositionMoved):
                return _reached(options, events), fork
    raise ConnectionLost(f"{options.what} did not say where it begins")


def _first_row(options: SourceOptions, after: Vector, upto: int) -> tuple[int | None, RowBatch | None]:
    """The token of the first row after a token and up to another one, and that row. None: there is none."""
    with _follow(options, str(after) if after.minimum >= 0 else _FIRST) as events:
        for event in events:
            if isinstance(event, RowBatch) and event.token <= upto:
                return event.token, event
            if not isinstance(event, Reset) and event.token >= upto:
                return None, None
            if isinstance(event, Reset):  # whoever reads the rows meets it too
                return after.minimum + 1, None
    raise ConnectionLost(f"{options.what} did not say where its rows are")


def _columns_of(options: SourceOptions, schema: StructType) -> ChangedRows | None:
    if not options.changes:
        return None
    row = schema[ROW].dataType
    json = {field.name for field in row.fields if field.metadata.get(_JSON)} if isinstance(row, StructType) else ()
    return ChangedRows(str(options.stream), to_arrow_schema(schema, timezone="UTC"), frozenset(json)).check()


def changed_columns(options: SourceOptions) -> StructType:
    """The columns of a stream of changes, with the types of the table as it was at the last change.

    The last description is found by looking for the last change: backwards in steps that grow, then in between. Each
    change that a reader gets first comes with its description.

    Raises:
        UsageError: the stream has no changes.
    """
    top = position(options, None, 0.0)
    low, high, found = -1, top.minimum, None
    step = 1
    while found is None:
        low = max(top.minimum - step, -1)
        try:
            _, found = _first_row(options, Vector(low, epoch=top.epoch), high)
        except TokenExpired:
            _, found = _first_row(options, Vector(-1), high)
            low = -1
        if found is None and low < 0:
            raise UsageError(
                f"{options.what} has no row that describes its columns: give them yourself (.schema(...)), or run: "
                f"replicad streams snapshot {options.stream}"
            )
        step *= 64
    while found.token < high:
        middle = (found.token + high) // 2
        _, later = _first_row(options, Vector(middle, epoch=top.epoch), high)
        found, high = (later, high) if later is not None else (found, middle)
    description = described_columns(found.rows, str(options.stream))
    if description is None:
        raise UsageError(f"{options.what} {NO_CHANGES}")
    columns = ChangedRows.described(str(options.stream), description)
    made: StructType = from_arrow_schema(columns.schema, prefer_timestamp_ntz=True)
    for place in (KEY, ROW, OLD):
        for field in made[place].dataType.fields:
            field.metadata = {_JSON: True} if field.name in columns.json else {}
    return made


def _forked(options: SourceOptions, fork: int | None) -> str:
    return f"the history of {options.what} forked after {fork}"


def _continued(options: SourceOptions, token: Vector) -> Vector:
    """Where reading goes on behind an offset of another generation.

    Raises:
        DataLoss: rows up to the offset are void or no longer retained, and failOnDataLoss is set.
    """
    begin: Vector | None = None
    try:
        begin, fork = _ask(options, str(token))
    except (TokenExpired, TokenAhead, BadToken) as error:
        loss = f"{options.what} cannot go on behind the checkpoint, which is at {token}: {error}"
    else:
        if fork is None:
            return begin
        loss = f"{_forked(options, fork)}, and the checkpoint is at {token}: rows that were read after {fork} are void"
    where = "its first row" if begin is None else str(begin)
    if options.fail_on_data_loss:
        raise DataLoss(
            f"{loss}. Remove the results of those rows, then start with a new checkpointLocation. "
            f"Or set failOnDataLoss=false to go on from {where}"
        )
    log.warning("%s; reading goes on from %s", loss, where)
    return begin or _ask(options, _FIRST)[0]


def _follow(options: SourceOptions, token: str, name: str = "spark/position") -> BlockingFollower[_Told]:
    """The stream from a token, in linear order; `name` is ours for the daemon."""
    assert options.stream is not None
    patience = patience_of(options)
    return (
        endpoint_of(options)
        .connect(name)
        .follow({options.stream: token}, linear=True, patience=patience, first_patience=patience, also=(PositionMoved,))
    )


def _reached(options: SourceOptions, events: BlockingFollower[_Told]) -> Vector:
    return Vector.parse(events.token(options.stream or "") or "")


def read_stretch(partition: StreamPartition) -> Iterator[pa.RecordBatch]:
    """The rows of a stretch as RecordBatches of `SCHEMA`, in ascending order of their tokens.

    Raises:
        DataLoss: rows of the stretch are no longer retained, or the stream was reset, and failOnDataLoss is set.
    """
    options = partition.options
    held: list[RowBatch] = []
    size = 0
    for batch in _rows(options, partition.after, partition.upto):
        held.append(batch)
        size += len(batch.rows)
        if size >= ROWS_PER_BATCH:
            yield _record_batch(held, partition.columns)
            held, size = [], 0
    if held:
        yield _record_batch(held, partition.columns)


def _rows(options: SourceOptions, after: Vector, upto: Vector) -> Iterator[RowBatch]:
    if after.minimum >= upto.minimum:
        return
    begin = str(after) if after.minimum >= 0 else _FIRST
    while True:
        try:
            with _follow(options, begin, "spark/task") as events:
                yield from _up_to(options, events, upto.minimum)
                reached = _reached(options, events)
        except (TokenExpired, TokenAhead, BadToken) as error:
            if options.fail_on_data_loss or begin == _FIRST:
                raise DataLoss(
                    f"rows of {options.what} after {after} are lost: {error}. Set failOnDataLoss=false to "
                    "continue with the remaining rows"
                ) from error
            log.warning("rows of %s after %s are lost: %s", options.what, after, error)
            begin = _FIRST
        else:
            if reached.epoch != upto.epoch:
                _continued(options, upto)  # planned before a fork: were these the rows that were planned?
            return


def _up_to(options: SourceOptions, events: Iterable[_Told], upto: int) -> Iterator[RowBatch]:
    for event in events:
        if isinstance(event, Reset):
            if event.token is None:
                raise TokenExpired(f"{event.stream} was reset ({event.reason})")
            if options.fail_on_data_loss:
                raise DataLoss(
                    f"{_forked(options, event.token)} while rows up to {upto} were read. The next try "
                    "begins behind the checkpoint. Set failOnDataLoss=false to go on in any case"
                )
            log.warning(
                "%s while rows up to %s were read; reading goes on from there", _forked(options, event.token), upto
            )
            continue
        if isinstance(event, RowBatch) and event.token <= upto:
            yield event
        if event.token >= upto:
            return


def _record_batch(held: list[RowBatch], columns: ChangedRows | None) -> pa.RecordBatch:
    if columns is not None:
        return columns.batch((batch.token, row) for batch in held for row in batch.rows)
    stream = held[0].stream
    instances = [batch.instance for batch in held for _ in batch.rows]
    tokens = [batch.token for batch in held for _ in batch.rows]
    rows = [row for batch in held for row in batch.rows]
    return pa.RecordBatch.from_arrays(
        [pa.repeat(pa.scalar(stream), len(rows)), pa.array(instances), pa.array(tokens, pa.int64()), pa.array(rows)],
        schema=SCHEMA,
    )
