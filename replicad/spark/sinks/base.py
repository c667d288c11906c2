"""The interface of a downstream of the pipeline.

A micro-batch goes to a downstream in two steps: `apply` in every task, with that task's changes, and then `commit` once
on the driver, with what the tasks returned. Spark may run a task again, and may replay a whole batch after a crash. The
(query, number, step) is then the same, and a downstream that stores it writes nothing twice.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import pyarrow as pa
import pyarrow.compute as pc

from replicad.errors import DownstreamError, DownstreamUnavailable
from replicad.spark.enrich import EnrichedRows

_LOOKED_AT = 2_000  # rows of a file, to find out which columns repeat


@dataclass(frozen=True, slots=True)
class Shape:
    """The columns of `EnrichedRows.writes`, with `_shard` and `_seq`, and the name of the id column.

    A row's identity is (`_shard`, id). `_seq` is the seq of the last touch for which it was written. `types`: the types
    that the columns have in Postgres (see `tables.Layout`), where they are known. `added` are columns that
    the source got since the last start: `prepare` adds them, with NULL for existing rows. `widened` are columns with a
    new type that holds all values of the previous type: `prepare` makes the columns downstream wider. `key`: the
    columns of the key of one table without shards, for a downstream that can have them as its key: then it gets neither
    `_shard` nor the text of the key.
    """

    schema: pa.Schema
    id: str
    types: Mapping[str, str] = field(default_factory=dict, compare=False)
    added: frozenset[str] = field(default=frozenset(), compare=False)
    widened: frozenset[str] = field(default=frozenset(), compare=False)
    key: tuple[str, ...] = field(default=(), compare=False)

    @property
    def plain(self) -> pa.Schema:
        """The columns of a table whose key is `key`, or of any table without one."""
        left_out = {"_shard", self.id}.difference(self.key) if self.key else set()
        return pa.schema([field for field in self.schema if field.name not in left_out])

    @property
    def keys(self) -> pa.Schema:
        """The columns of `EnrichedRows.deletes`."""
        return pa.schema([("_shard", pa.int32()), (self.id, self.ids), ("_seq", pa.int64())])

    @property
    def ids(self) -> pa.DataType:
        """The type of the ids: int64, or string (tubes/keys.py)."""
        return self.schema.field(self.id).type


@dataclass(frozen=True, slots=True, order=True)
class BatchId:
    """A micro-batch: the query's id, the batch's number, and its step (0 is the batch itself, then garbage collection).

    Within a query (number, step) grows, except that the last ones may be repeated. `mark` is made from the offsets of
    the batch: two batches of one number with different marks are of two copies of a checkpoint. `last_pod` is the
    highest number of a pod that this batch or one before it may have; None: not known. `term` grows whenever another
    driver takes the tube over; 0 unless the downstream is `fenced`.
    """

    query: str
    number: int
    step: int = 0
    mark: int = field(default=0, compare=False)
    last_pod: int | None = field(default=None, compare=False)
    term: int = field(default=0, compare=False)

    def is_repeated(self, last: tuple[int, int, int] | None) -> bool:
        """Whether the batch is in a downstream whose last batch of the query is `last` (number, step, mark).

        Raises:
            DownstreamError: the downstream has a later batch, or another one of this number.
        """
        if last is None or last[0] < self.number:
            return False
        if last[0] > self.number or last[2] != self.mark:
            which = "another" if last[0] == self.number else "a later"
            raise DownstreamError(
                f"batch {self.number} comes, and the downstream has {which} batch {last[0]} of this query: another "
                "driver runs from a copy of the checkpoint, or the checkpoint is an older copy. It was not written"
            )
        return last[1] >= self.step


@dataclass(frozen=True, slots=True)
class LastBatch:
    """The last batches of a query in a downstream, -1 for none.

    `whole` is the last that is there as a whole; of `newest` there is at least a part. `restored`: the downstream was
    put back to an older state after its last batch.
    """

    whole: int = -1
    newest: int = -1
    restored: bool = False


@dataclass(frozen=True, slots=True)
class Applied:
    """The result of `apply`: rows written and deleted, or `repeated` if all of it had been done before.

    `note` is passed to `commit` on the driver.
    """

    written: int = 0
    deleted: int = 0
    repeated: bool = False
    note: str = ""


class Sink(ABC):
    """A downstream. Instances are pickled to the executors, so connections must be opened there.

    `settle` is the time in seconds that a write may take to become visible to `stale_ids`. `casts`: it casts text to
    the types of Postgres, so values that Arrow has no form for come to it as text.
    """

    settle: float = 0.0
    casts: ClassVar[bool] = False

    @property
    def fenced(self) -> bool:
        """Whether batches must have the term of the tube's lease, which takes a request to the daemon for each."""
        return False

    def impatient(self, patience: float) -> Sink:  # noqa: ARG002
        """The same downstream, for the driver: its `apply` waits at most so many seconds for a server that is away."""
        return self

    def check_columns(self, names: Sequence[str]) -> None:  # noqa: B027 - most take all
        """Raise UsageError if the downstream cannot have columns of these names. Without Spark and without a server."""

    @abstractmethod
    def prepare(self, shape: Shape) -> None:
        """On the driver, before the query starts: create missing objects, refuse objects of another shape.

        Raises:
            UsageError, DatabaseError, EnvironmentRefused: the downstream cannot take rows of that shape.
        """

    def probe(self) -> None:  # noqa: B027 - most need not
        """On the driver: raise a ReplicadError if the downstream cannot be reached now. Takes seconds at most."""

    def identity(self) -> str | None:
        """On the driver, after `prepare`: a line that distinguishes this downstream from another of the same name.

        None: it is not known, or there is none yet.
        """
        return None

    def last_batch(self, query: str) -> LastBatch | None:
        """On the driver, after `prepare`: the last batches of a query. None: this downstream keeps no numbers.

        A downstream that keeps them has each batch whose `commit` returned, also a batch without changes.
        """
        del query
        return None

    @abstractmethod
    def apply(self, shape: Shape, batch: BatchId, task: int, changes: Iterable[EnrichedRows]) -> Applied:
        """In a task: write its changes. A repeated batch has the same task numbers; -1 is the driver.

        An id is in one task only, once. Every iteration over `changes` looks up the rows again, in bounded pieces.
        """

    def commit(self, batch: BatchId, applied: Sequence[Applied]) -> int | None:
        """On the driver, after all tasks: make the batch visible. When it returns, the pods of the batch may be acked.

        Returns how many rows were deleted; None if `apply` has counted them.
        """
        del batch, applied
        return None

    def write_small(
        self, shape: Shape, batch: BatchId, tasks: Mapping[int, Sequence[EnrichedRows]]
    ) -> tuple[dict[int, Applied], int | None]:
        """On the driver: `apply` for each task of a small batch, whose changes are in memory, and `commit`."""
        applied = {task: self.apply(shape, batch, task, changes) for task, changes in tasks.items()}
        return applied, self.commit(batch, list(applied.values()))

    def try_out(self, shape: Shape, changes: EnrichedRows) -> None:
        """On the driver, after batches failed: write these changes, or find out whether they would be taken.

        Only called while no batch runs. The rows are current ones, so it does no harm to write them for good.

        Raises:
            RowRefused: the content of rows is refused. They are then tried in halves.
            DownstreamError, DatabaseError: another failure.
        """
        del shape, changes

    def stale_ids(self, shape: Shape, shard: int, before: int, limit: int) -> pa.Array | None:
        """On the driver: up to `limit` ids of the shard that the downstream has with a `_seq` below `before`.

        Their type is `Shape.ids`. None: this downstream cannot list them, and garbage stays.
        """
        del shape, shard, before, limit
        return None

    # --- for `replicad pipeline verify`; nothing is changed ---

    @property
    def unread(self) -> str:
        """Why this downstream cannot be read back, so that it is never called equal; empty if it can."""
        return f"{type(self).__name__} has no method `rows`" if type(self).rows is Sink.rows else ""

    def rows(
        self,
        shape: Shape,
        shard: int | None,
        *,
        after: object = None,
        limit: int | None = None,
        ids: pa.Array | None = None,
    ) -> pa.Table | None:
        """Rows of a shard (None: of all), in the order of ids (texts by their bytes), see `as_stored`.

        They have the columns of the shape but `_shard` and `_seq`. With `ids` those with these ids. Else the first
        `limit` rows with an id above `after`; a downstream that has `stored_keys` is not asked for these.
        """
        del shape, shard, after, limit, ids
        return None

    def as_stored(self, shape: Shape, rows: pa.Table) -> pa.Table:
        """Rows of the source, without `_shard` and `_seq`, as `rows` returns them if the downstream has them."""
        del shape
        return rows

    def stored_keys(self, shape: Shape) -> Iterator[pa.Table] | None:
        """All keys (`_shard`, id) that the downstream has, in any order, if it has no rows in the order of ids.

        None: it has.
        """
        del shape
        return None

    def stored_counts(self) -> Mapping[int | None, int] | None:
        """The number of rows by shard; by None in a table without `_shard`. Nothing if there is no table.

        None: they cannot be counted.
        """
        return None


def ordered(rows: pa.Table, id_: str) -> pa.Table:
    """Rows of one shard in the order of their ids. They mostly are in it: sorting them costs a copy."""
    ids = rows.column(id_)
    if len(ids) < 2 or pc.all(pc.less(ids.slice(0, len(ids) - 1), ids.slice(1))).as_py():
        return rows
    return rows.sort_by(id_)


def repeating(rows: pa.Table) -> list[str]:
    """The columns (paths of Parquet) whose values repeat in the first rows. A dictionary of others only costs time."""
    found = []
    first = rows.slice(0, _LOOKED_AT)
    for name, column in zip(first.column_names, first.columns, strict=True):
        if pa.types.is_nested(column.type):
            found.append(f"{name}.list.element")  # we have no others than lists
        elif 2 * pc.count_distinct(column).as_py() <= len(first):
            found.append(name)
    return found


def chosen_rows(table: pa.Table, id_: str, after: object, ids: pa.Array | None) -> pa.Table:
    """The rows of a table that `Sink.rows` wants, in any order and number."""
    known = table.column(id_)
    if ids is not None:
        return table.filter(pc.is_in(known, value_set=ids))
    return table if after is None else table.filter(pc.greater(known, pa.scalar(after, known.type)))


@contextlib.contextmanager
def written(what: str) -> Iterator[None]:
    """Turn an OSError, for example of a full disk, into a DownstreamUnavailable that says what cannot be written."""
    try:
        yield
    except OSError as error:
        raise DownstreamUnavailable(f"{what} cannot be written: {error.strerror or error}") from error
