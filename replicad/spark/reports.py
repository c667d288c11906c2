"""What a pipeline counted: per micro-batch, and over its whole run. Plain values, made from what the tasks returned."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from replicad.spark.sinks.base import Applied
from replicad.spark.touches import Control


@dataclass(frozen=True, slots=True)
class BatchReport:
    """One micro-batch. `ids` as they came, `distinct` each once per shard; `garbage` are ids that a finished backfill
    left over.

    `repeated`: a part of it had been written before a crash and was not written again. `seconds` is what it took, `lag`
    the age in seconds of its oldest regular pod when it was done (None without any), by the clocks of two machines.
    """

    number: int
    pods: int
    ids: int
    distinct: int
    written: int
    deleted: int
    garbage: int
    repeated: bool
    seconds: float
    lag: float | None

    def counts(self) -> dict[str, object]:
        """As it is logged, and told to the daemon for `replicad top`."""
        counts = {name: getattr(self, name) for name in ("pods", "ids", "written", "deleted", "garbage", "repeated")}
        lag = None if self.lag is None else round(self.lag, 3)
        return {"batch": self.number, **counts, "seconds": round(self.seconds, 3), "lag": lag}


@dataclass(frozen=True, slots=True)
class PipelineResult:
    """All micro-batches of a run together. `batches` counts those that had pods."""

    batches: int = 0
    pods: int = 0
    ids: int = 0
    distinct: int = 0
    rows_written: int = 0
    rows_deleted: int = 0
    garbage: int = 0
    seconds: float = 0.0

    def plus(self, report: BatchReport) -> PipelineResult:
        """With one more micro-batch."""
        return replace(
            self,
            batches=self.batches + 1,
            pods=self.pods + report.pods,
            ids=self.ids + report.ids,
            distinct=self.distinct + report.distinct,
            rows_written=self.rows_written + report.written,
            rows_deleted=self.rows_deleted + report.deleted,
            garbage=self.garbage + report.garbage,
            seconds=self.seconds + report.seconds,
        )


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the tasks of one step returned, together."""

    pods: int
    ids: int
    distinct: int
    written: int
    deleted: int
    repeated: bool
    oldest: float | None
    controls: tuple[Control, ...]
    applied: tuple[Applied, ...]

    @classmethod
    def of(cls, rows: Sequence[Mapping[str, Any]]) -> StepResult:
        """Add up the summary rows of tasks (see `tasks.SUMMARY_DDL`)."""
        controls = [Control(*control) for row in rows for control in json.loads(row["controls"])]
        oldest = [row["oldest"] for row in rows if row["oldest"] is not None]
        return cls(
            pods=sum(row["pods"] for row in rows),
            ids=sum(row["ids"] for row in rows),
            distinct=sum(row["distinct"] for row in rows),
            written=sum(row["written"] for row in rows),
            deleted=sum(row["deleted"] for row in rows),
            repeated=any(row["repeated"] for row in rows),
            oldest=min(oldest, default=None),
            controls=tuple(sorted(controls, key=lambda control: control.seq)),
            applied=tuple(Applied(row["written"], row["deleted"], row["repeated"], row["note"] or "") for row in rows),
        )
