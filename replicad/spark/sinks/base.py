"""What a downstream of the pipeline must do, and what it is told.

A micro-batch goes to a downstream in two steps: `apply` in every task, with that task's changes, and then `commit` once
on the driver, with what the tasks returned. Spark may run a task again and may replay a whole batch after a crash: the
same (query, number, step) comes again, and a downstream that remembers it writes nothing twice.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import pyarrow as pa

from replicad.spark.enrich import Changes


@dataclass(frozen=True, slots=True)
class Shape:
    """What rows look like: the columns of `Changes.writes` (`_shard` and `_seq` among them) and which of them is the
    id.

    A row's identity is (`_shard`, id). `_seq` is the seq of the last touch that it was written for.
    """

    schema: pa.Schema
    id: str


@dataclass(frozen=True, slots=True, order=True)
class BatchId:
    """A micro-batch: the query's id, the batch's number, and the step in it (0 is the batch itself, then garbage).

    Within a query (number, step) only ever grows, except that the last ones may come again.
    """

    query: str
    number: int
    step: int = 0


@dataclass(frozen=True, slots=True)
class Applied:
    """What `apply` did: rows written and deleted, or `repeated` where all of it had been done before.

    `note` goes to `commit` on the driver as it is.
    """

    written: int = 0
    deleted: int = 0
    repeated: bool = False
    note: str = ""


class Sink(ABC):
    """A downstream. Instances are pickled to the executors; connections are made there, not before.

    `settle` is how long, in seconds, a write may take to become visible to `stale_ids`.
    """

    settle: float = 0.0

    @abstractmethod
    def prepare(self, shape: Shape) -> None:
        """On the driver, before the query starts: make what is missing, refuse what does not fit.

        Raises:
            UsageError, DatabaseError, EnvironmentRefused: the downstream cannot take rows of that shape.
        """

    @abstractmethod
    def apply(self, shape: Shape, batch: BatchId, task: int, changes: Iterable[Changes]) -> Applied:
        """In a task: take its changes. Tasks of a batch are numbered alike when it comes again; -1 is the driver
        itself.

        An id is in one task only, once. Every iteration over `changes` looks the rows up anew, in bounded pieces; not
        iterating saves the look-up.
        """

    def commit(self, batch: BatchId, applied: Sequence[Applied]) -> int | None:
        """On the driver, after all tasks: make the batch visible. When it returns the batch may be acked.

        Returns how many rows were deleted where only now that is known, None where `apply` has counted them.
        """
        del batch, applied
        return None

    def stale_ids(self, shape: Shape, shard: int, before: int, limit: int) -> pa.Array | None:
        """On the driver: up to `limit` ids (bigint) that the downstream holds for the shard with a `_seq` below
        `before`.

        None: this downstream cannot tell, and garbage stays.
        """
        del shape, shard, before, limit
        return None
