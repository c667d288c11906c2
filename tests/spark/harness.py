"""Spark's calls without Spark: offsets go through JSON text, readers and partitions through pickle, in the order of a
real query.

`Query` keeps an offset log and a commit log, so it can be killed between any two calls and begun again from its logs.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
from pyspark.sql.streaming.datasource import ReadLimit

from replicad.spark.source import ReplicadDataSource


def through_json(offset: dict[str, Any]) -> dict[str, Any]:
    """What Spark does to an offset between two processes; the text must come back as it went."""
    text = json.dumps(offset)
    found: dict[str, Any] = json.loads(text)
    assert json.dumps(found) == text
    return found


def make_source(options: dict[str, str]) -> ReplicadDataSource:
    """A data source as the driver pickles it."""
    return pickle.loads(pickle.dumps(ReplicadDataSource(options)))  # type: ignore[no-any-return]


def struct(source: ReplicadDataSource) -> Any:
    """The schema that Spark hands to the readers."""
    from pyspark.sql.types import LongType, StructField, StructType

    return StructType([StructField(part.split()[0], LongType()) for part in source.schema().split(", ")])


def read_tasks(source: ReplicadDataSource, partitions: list[Any]) -> list[dict[str, Any]]:
    """What the tasks yield: each with a reader and a partition of its own, out of pickle."""
    rows: list[dict[str, Any]] = []
    for partition in partitions:
        reader = pickle.loads(pickle.dumps(source)).streamReader(struct(source))
        reader = pickle.loads(pickle.dumps(reader))
        batches = list(reader.read(pickle.loads(pickle.dumps(partition))))
        rows.extend(pa.Table.from_batches(batches).to_pylist() if batches else [])
    return rows


QUERIES: list[Query] = []  # all that a test made, so that none of them outlives it


@dataclass
class Query:
    """A streaming query. `offsets` and `commits` are its checkpoint and may be handed to the next one."""

    options: dict[str, str]
    offsets: list[dict[str, Any]] = field(default_factory=list)  # [0] is where the first batch starts
    commits: int = 0  # batches in the commit log
    available_now: bool = False
    rows: list[list[dict[str, Any]]] = field(default_factory=list)  # by batch, as the sink got them
    before_commit: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        QUERIES.append(self)
        self.source = make_source(self.options)
        self.reader: Any = self.source.streamReader(struct(self.source))
        if self.available_now:
            self.reader.prepareForTriggerAvailableNow()
        self.limit: ReadLimit = self.reader.getDefaultReadLimit()
        if not self.offsets:
            self.offsets.append(through_json(self.reader.initialOffset()))
        if len(self.offsets) - 1 > self.commits:  # killed within a batch: straight from the log
            self.run_batch()

    def trigger(self) -> bool:
        """One trigger: plan, log, commit the batch before, run; False where there was nothing."""
        start = self.offsets[-1]
        end = through_json(self.reader.latestOffset(start, self.limit))
        self.reader.reportLatestOffset()
        if json.dumps(end) == json.dumps(start):
            return False
        self.offsets.append(end)
        if self.commits:
            self.reader.commit(self.offsets[self.commits])
        self.run_batch()
        return True

    def run_batch(self) -> None:
        partitions = self.reader.partitions(self.offsets[-2], self.offsets[-1])
        self.rows.append(read_tasks(self.source, partitions))
        self.before_commit()
        self.commits += 1

    def drain(self) -> None:
        """Trigger until there is nothing more."""
        while self.trigger():
            pass

    def die(self) -> None:
        """The driver is gone without a word: its connections close, its lease stays until it runs out."""
        for reader in getattr(self.reader, "_readers", {"": self.reader}).values():
            if reader._hold is not None:
                reader._hold.close()

    def kill(self) -> Query:
        """The driver dies, and the next one begins from the logs."""
        self.die()
        return Query(self.options, self.offsets, self.commits, self.available_now, self.rows)

    @property
    def ids(self) -> list[int]:
        """All ids that the sink got, in order."""
        return [one for batch in self.rows for row in batch for one in row["ids"]]
