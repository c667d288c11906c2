"""One streaming query over several daemons, each with a database and a tube of that name of its own ("islands").

A reader for each island does what it always does; here their offsets, batches and ends are put together. The offset is
`{"i":{"east":{...},"west":{...}},"v":1}`, by the islands' names, which must stay what they are; where their daemons run
may change. An island may be added: it begins with its first pod.

A row's identity downstream is its shard and id, so shards are numbered across islands.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit, SupportsTriggerAvailableNow

from replicad.errors import UsageError
from replicad.spark.offsets import VERSION, check_version, foreign
from replicad.spark.options import SourceOptions
from replicad.spark.reading import TubePartition, read_range
from replicad.spark.tubes import TubeStreamReader, end_on_signals

SLICE = 0.25  # seconds for which all islands are waited for at a time: what comes at one is not held up for longer

T = TypeVar("T")


class IslandsStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):  # type: ignore[misc]
    """Reads the tubes of all islands for one streaming query. Limits count for each island."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._readers = {
            name: TubeStreamReader(replace(one, poll_timeout=min(SLICE, one.poll_timeout)))
            for name, one in options.by_island().items()
        }
        self._threads: ThreadPoolExecutor | None = None  # not before the first request: some processes only plan

    # --- Spark's calls, as in TubeStreamReader ---

    def prepareForTriggerAvailableNow(self) -> None:
        """See TubeStreamReader."""
        for reader in self._readers.values():
            reader.prepareForTriggerAvailableNow()

    def initialOffset(self) -> dict[str, Any]:
        """Before the first pod of every island that was not acked."""
        return _joined(self._each(lambda _, reader: reader.initialOffset()))

    def getDefaultReadLimit(self) -> ReadLimit:
        """Of each island."""
        return next(iter(self._readers.values())).getDefaultReadLimit()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """Ack up to `start`, then plan the next micro-batch; waits up to pollTimeout where no island has anything.

        Raises:
            LeaseHeld, CursorAhead: as TubeStreamReader's, of any island.
        """
        begin = self._split(start)
        deadline = time.monotonic() + self._options.poll_timeout
        while True:
            end = self._each(lambda name, reader: reader.latestOffset(self._begin(begin, name, reader), limit))
            if end != begin or time.monotonic() >= deadline:
                return _joined(end)

    def reportLatestOffset(self) -> dict[str, Any] | None:
        """How far all tubes go; None while one of them cannot say."""
        found = self._each(lambda _, reader: reader.reportLatestOffset())
        known = {name: one for name, one in found.items() if one is not None}
        return _joined(known) if len(known) == len(found) else None

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """A task for every partition of every island that has pods in the batch."""
        begin, finish = self._split(start), self._split(end)

        def plan(name: str, reader: TubeStreamReader) -> list[InputPartition]:
            return reader.partitions(self._begin(begin, name, reader), finish[name]) if name in finish else []

        return [one for planned in self._each(plan).values() for one in planned]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """In a task: the pods of its range, from its island."""
        assert isinstance(partition, TubePartition)
        return read_range(partition)

    def commit(self, end: dict[str, Any]) -> None:
        """The batch that ends at `end` is in the commit log."""
        finish = self._split(end)
        self._each(lambda name, reader: reader.commit(finish[name]) if name in finish else None)

    def stop(self) -> None:
        """The query has ended; every tube is let go of."""
        for reader in self._readers.values():
            reader.stop()
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)

    # --- how ---

    def _each(self, ask: Callable[[str, TubeStreamReader], T]) -> dict[str, T]:
        """Ask all islands at once; the first failure, in the order of their names, is raised when all have answered."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(len(self._readers), thread_name_prefix="island")
            end_on_signals(self.stop)
        asked = {name: self._threads.submit(ask, name, reader) for name, reader in self._readers.items()}
        for one in asked.values():
            one.exception()  # wait
        return {name: one.result() for name, one in asked.items()}

    def _split(self, offset: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        check_version(offset)
        found = offset.get("i")
        if not isinstance(found, Mapping):
            raise foreign(offset)
        if gone := sorted(found.keys() - self._readers.keys()):
            raise UsageError(
                f"the checkpoint knows an island {gone[0]!r}, and the option islands has only "
                f"{', '.join(self._readers)}; name it there, or use another checkpointLocation"
            )
        return dict(found)

    @staticmethod
    def _begin(begin: Mapping[str, dict[str, Any]], name: str, reader: TubeStreamReader) -> dict[str, Any]:
        """Where an island begins; one that the checkpoint does not know yet, at its start."""
        return begin[name] if name in begin else reader.initialOffset()


def _joined(offsets: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    return {"i": dict(sorted(offsets.items())), "v": VERSION}
