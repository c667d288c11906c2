"""A user's own class as the downstream: three methods, called in the tasks, and two more to compare its rows.

Delivery is at least once: a batch may be repeated, as a whole or in part. So `write` and `delete` must be safe to
repeat, and the last call for an id must win. A node that was paused may make calls of an old batch late: a class that
must not take them has a method `begin`, and keeps the highest (term, batch) with its data.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, runtime_checkable

import pyarrow as pa
import pyarrow.compute as pc

from replicad.errors import DownstreamError, DownstreamUnavailable, ReplicadError, RowRefused, UsageError
from replicad.spark.enrich import EnrichedRows, conform
from replicad.spark.sinks.base import Applied, BatchId, Shape, Sink, chosen_rows

T = TypeVar("T")


@runtime_checkable
class Downstream(Protocol):
    """The interface of a user's class. Instances are pickled to the executors: connect in the methods, not in
    `__init__`.

    A method `begin(term, batch)`, if there is one, is called in each task before its writes and deletes. The pair never
    goes back for the owner of the tube: `term` grows when another driver takes the tube over, `batch` with each batch.
    So what comes after a higher pair is of a paused node; `begin` raises then, in one transaction with the writes if it
    can.

    A method `identity()`, if there is one, returns a text that tells this downstream from another of the same name, so
    that a checkpoint is not used with another one. The attribute `settle` (seconds, default 0) is the time that a write
    may take to become visible to `stale_ids`.

    `replicad pipeline verify` compares the rows if the class has two methods more; without them it says that it cannot.
    `read_keys()` returns or yields pairs of a shard and a list of ids, all keys that there are, in any order.
    `read_rows(shard, ids)` returns a `pyarrow.Table` with the rows that it has of these ids: all columns that `write`
    gets, but `_shard` and `_seq`, which may be left out.
    """

    def write(self, rows: pa.Table) -> None:
        """Write current rows, at most some 10,000 of one shard: the chosen columns, `_shard` and `_seq`.

        Store `_seq` with the row if garbage must be collected. When this returns, the pods of the rows may be acked.
        """

    def delete(self, shard: int, ids: Sequence[Any]) -> None:
        """Delete these ids of the shard: ints, or texts if the tube has ids of kind text. Some may never have been
        written.

        What `write` and `delete` raise is tried again. An OSError means that the downstream cannot be reached. For
        other exceptions the rows that cause them are looked for after some tries, and parked.
        """

    def stale_ids(self, shard: int, before: int) -> Iterable[Any]:
        """Ids of the shard with a `_seq` below `before`; empty if the class cannot list them."""


@dataclass(frozen=True, slots=True)
class CustomSink(Sink):
    """Adapts a `Downstream`."""

    target: Downstream
    settle: float = 0.0

    def __post_init__(self) -> None:
        missing = [name for name in ("write", "delete", "stale_ids") if not callable(getattr(self.target, name, None))]
        if missing:
            raise UsageError(
                f"the downstream {type(self.target).__qualname__} has no method {missing[0]}; it needs "
                "write(rows), delete(shard, ids) and stale_ids(shard, before)"
            )
        object.__setattr__(self, "settle", float(getattr(self.target, "settle", self.settle)))

    def prepare(self, shape: Shape) -> None:
        """Nothing to do: the class prepares itself."""

    def identity(self) -> str | None:
        """What the class says, if it has the method."""
        says = getattr(self.target, "identity", None)
        if not callable(says):
            return None
        return " ".join(str(self._asked("identity", says)).split()) or None

    def _asked(self, name: str, method: Callable[[], T]) -> T:
        """What a method of the class returns; its errors become ours."""
        try:
            return method()
        except ReplicadError:
            raise
        except Exception as error:
            kind = DownstreamUnavailable if isinstance(error, OSError) else DownstreamError
            raise kind(f"{type(self.target).__qualname__}.{name}() failed: {type(error).__name__}: {error}") from error

    @property
    def fenced(self) -> bool:
        """Whether the class has a method `begin`."""
        return callable(getattr(self.target, "begin", None))

    def apply(self, shape: Shape, batch: BatchId, task: int, changes: Iterable[EnrichedRows]) -> Applied:  # noqa: ARG002
        """Pass the changes to the class, chunk by chunk."""
        written = deleted = 0
        begun = not self.fenced or not batch.query  # without a query: rows that are tried out
        for change in changes:
            try:
                if not begun:
                    self.target.begin(batch.term, batch.number)  # type: ignore[attr-defined]
                    begun = True
                if change.writes.num_rows:
                    self.target.write(change.writes)
                    written += change.writes.num_rows
                for shard in pc.unique(change.deletes.column("_shard")).to_pylist():
                    of_shard = change.deletes.filter(pc.equal(change.deletes.column("_shard"), shard))
                    self.target.delete(shard, of_shard.column(shape.id).to_pylist())
                    deleted += of_shard.num_rows
            except ReplicadError:
                raise
            except Exception as error:
                kind = DownstreamUnavailable if isinstance(error, OSError) else DownstreamError
                raise kind(
                    f"{type(self.target).__qualname__} did not take batch {batch.number}: "
                    f"{type(error).__name__}: {error}"
                ) from error
        return Applied(written, deleted)

    def try_out(self, shape: Shape, changes: EnrichedRows) -> None:
        """Write them: `write` is safe to repeat. An exception that is not an OSError is because of the rows."""
        try:
            self.apply(shape, BatchId("", 0), 0, [changes])
        except DownstreamError as error:
            if isinstance(error, (DownstreamUnavailable, RowRefused)) or error.__cause__ is None:
                raise
            name = type(self.target).__qualname__
            raise RowRefused(f"{name} refuses it: {type(error.__cause__).__name__}: {error.__cause__}") from error

    def stale_ids(self, shape: Shape, shard: int, before: int, limit: int) -> pa.Array:
        """At most `limit` of the ids that the class returns."""
        return pa.array(list(itertools.islice(self.target.stale_ids(shard, before), limit)), shape.ids)

    @property
    def unread(self) -> str:
        """See Sink."""
        missing = [name for name in ("read_keys", "read_rows") if not callable(getattr(self.target, name, None))]
        return f"{type(self.target).__qualname__} has no method {' and no method '.join(missing)}" if missing else ""

    def rows(
        self,
        shape: Shape,
        shard: int | None,
        *,
        after: object = None,
        limit: int | None = None,
        ids: pa.Array | None = None,
    ) -> pa.Table:
        """See Sink."""
        assert shard is not None, "it has `stored_keys`"
        assert ids is not None, "it has `stored_keys`"
        del after, limit
        names = [name for name in shape.schema.names if name not in ("_shard", "_seq")]
        schema = pa.schema([shape.schema.field(name) for name in names])
        if not len(ids):
            return schema.empty_table()
        target: Any = self.target
        found = self._asked("read_rows", lambda: target.read_rows(shard, ids.to_pylist()))
        who = f"{type(target).__qualname__}.read_rows()"
        if not isinstance(found, pa.Table):
            raise DownstreamError(f"{who} returned {type(found).__name__}, not a pyarrow.Table")
        if missing := [name for name in names if name not in found.column_names]:
            raise DownstreamError(f"{who} returned no column {missing[0]!r}; it must return every column of `write`")
        try:
            return chosen_rows(conform(found, schema), shape.id, None, ids)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise DownstreamError(f"{who} returned another type than `write` got: {str(error)[:200]}") from error

    def stored_keys(self, shape: Shape) -> Iterator[pa.Table] | None:
        """See Sink."""
        return None if self.unread else self._keys(shape)

    def _keys(self, shape: Shape) -> Iterator[pa.Table]:
        target: Any = self.target
        pairs = iter(self._asked("read_keys", target.read_keys))
        while (pair := self._asked("read_keys", lambda: next(pairs, None))) is not None:

            def columns(pair: Any = pair) -> pa.Table:
                shard, ids = pair
                there = pa.array(ids, shape.ids)
                return pa.table({"_shard": pa.repeat(pa.scalar(shard, pa.int32()), len(there)), shape.id: there})

            yield self._asked("read_keys", columns)
