"""How many pods wait behind each micro-batch, from Spark's own progress: for a dashboard, or an alert.

    spark.streams.addListener(WaitingPods(print))

The source tells Spark the end of the tube (`latestOffset`) and the end of the batch (`endOffset`).
Both count the pods of each partition.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from pyspark.sql.streaming import StreamingQueryListener


def pods(offset: str | None) -> int | None:
    """The pods up to an offset, of all partitions, and of all islands if there are several; None: not of a tube."""
    found = json.loads(offset or "null")
    tubes = list(found.get("i", {"": found}).values()) if isinstance(found, dict) else []
    if not tubes or not all("p" in tube for tube in tubes):
        return None
    return sum(place["c"] for tube in tubes for place in tube["p"].values())


def waiting(latest: str | None, end: str | None) -> int | None:
    """The pods that wait behind a batch, by `latestOffset` and `endOffset`: at most 100,000. None: unknown."""
    there, read = pods(latest), pods(end)
    return None if there is None or read is None else max(0, there - read)


class WaitingPods(StreamingQueryListener):  # type: ignore[misc]
    """Calls `tell(name of the query, pods that wait)` after each micro-batch."""

    def __init__(self, tell: Callable[[str | None, int], object]) -> None:
        self._tell = tell

    def onQueryStarted(self, event: Any) -> None:
        """Nothing is known yet."""

    def onQueryProgress(self, event: Any) -> None:
        """A micro-batch has ended."""
        for source in event.progress.sources:
            behind = waiting(source.latestOffset, source.endOffset)
            if behind is not None:
                self._tell(event.progress.name, behind)

    def onQueryIdle(self, event: Any) -> None:
        """No data came."""

    def onQueryTerminated(self, event: Any) -> None:
        """The query has ended."""


if __name__ == "__main__":
    here = '{"n": 1, "p": {"0": {"b": 0, "c": 7, "r": 40}}, "v": 1}'  # as lastProgress has them
    there = '{"n": 1, "p": {"0": {"b": 0, "c": 12, "r": 45}}, "v": 1}'
    print(f"{waiting(there, here)} pods wait")
