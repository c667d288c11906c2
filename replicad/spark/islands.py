"""One streaming query over several daemons ("islands"), each with its own database and a tube of that name.

Each island has a `TubeStreamReader`; this file combines their offsets and batches. The offset is
`{"i":{"east":{...},"west":{...}},"v":1}`, by the names of the islands. The names must not change; hosts and ports may.
An island may be added: it begins with its first pod.

A row's identity downstream is its shard and id, so no two islands may have the same shard number.
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

SLICE = 0.25  # seconds to wait for all islands at a time: the longest delay for pods of one of them

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
        """The ends of all tubes; None if one of them is unknown."""
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
