"""The counts of a pipeline: of one micro-batch and of its whole run, and their way to the daemons (`replicad top`)."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from replicad.client.blocking_client import BlockingClient
from replicad.errors import ReplicadError
from replicad.eventlog import get_logger
from replicad.spark.options import SourceOptions, endpoint_of
from replicad.spark.sinks.base import Applied
from replicad.spark.touches import Control
from replicad.tracing import record_span


@dataclass(frozen=True, slots=True)
class BatchReport:
    """One micro-batch. `ids` counts all ids, `distinct` each once per shard, `garbage` those left over from before a
    backfill.

    `repeated`: a part of the batch had been written before a crash and was not written again. `seconds` is its
    duration. `lag` is the age in seconds of its oldest regular pod at its end (None without any), by the clocks of two
    machines.
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
        """The counts for the log and for `replicad top`."""
        counts = {name: getattr(self, name) for name in ("pods", "ids", "written", "deleted", "garbage", "repeated")}
        lag = None if self.lag is None else round(self.lag, 3)
        return {"batch": self.number, **counts, "seconds": round(self.seconds, 3), "lag": lag}


def record_batch(
    tube: str, name: str, seconds: float, ids: int, traces: Sequence[str], *, failure: str | None = None
) -> None:
    """A span for a batch, in the traces of its rows. `name`: of the pipeline, with its downstream if it has several."""
    about: dict[str, str | int] = {
        "messaging.system": "replicad",
        "messaging.destination.name": tube,
        "messaging.consumer.group.name": name,
        "messaging.batch.message_count": ids,
    }
    record_span("replicad batch", seconds, about, traces, failure)


@dataclass(frozen=True, slots=True)
class PipelineResult:
    """The sum of all micro-batches of a run. `batches` counts those with pods."""

    batches: int = 0
    pods: int = 0
    ids: int = 0
    distinct: int = 0
    rows_written: int = 0
    rows_deleted: int = 0
    garbage: int = 0
    seconds: float = 0.0

    def plus(self, report: BatchReport) -> PipelineResult:
        """The sum with one more micro-batch."""
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
    """The sum of what the tasks of one step returned."""

    pods: int
    ids: int
    distinct: int
    written: int
    deleted: int
    repeated: bool
    oldest: float | None
    controls: tuple[Control, ...]
    applied: tuple[Applied, ...]
    traces: tuple[str, ...] = ()

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
            traces=tuple(dict.fromkeys(trace for row in rows for trace in (row["traces"] or "").split())),
        )


def of_several(last: BatchReport, total: PipelineResult) -> BatchReport:
    """The last of several batches, with the counts of all."""
    return replace(
        last,
        pods=total.pods,
        ids=total.ids,
        written=total.rows_written,
        deleted=total.rows_deleted,
        garbage=total.garbage,
        seconds=total.seconds,
    )


PATIENCE = 2.0  # seconds for a connection or an answer
SILENCE = 30.0  # seconds after a failure in which no report is sent: a batch must not wait for reports

log = get_logger("replicad.spark")


class Reporter:
    """Sends the reports of a pipeline. Connects with the first report."""

    def __init__(self, options: SourceOptions, name: str) -> None:
        assert options.tube is not None
        self._islands = list(options.by_island().values())
        self._tube = options.tube
        self._name = re.sub(r"[^!-~]", "-", name)[:200] or "pipeline"
        self._clients: list[BlockingClient] = []
        self._quiet_until = 0.0

    @property
    def name(self) -> str:
        """The name under which the source keeps the last report."""
        return self._name

    def send(self, report: BatchReport, more: Mapping[str, object] | None = None) -> None:
        """Send a report, with `more` counts. After a failure no reports are sent for `SILENCE` seconds."""
        if time.monotonic() < self._quiet_until:
            return
        try:
            if not self._clients:
                name = f"{self._name}-report"
                self._clients = [endpoint_of(one, timeout=PATIENCE).connect(name) for one in self._islands]
            for client in self._clients:
                client.report(self._tube, self._name, {**report.counts(), **(more or {})})
        except ReplicadError as error:
            self._quiet_until = time.monotonic() + SILENCE
            log.debug("report_failed", error=str(error))

    def close(self) -> None:
        """Close the connections. Safe to repeat; a later report connects again."""
        for client in self._clients:
            client.close()
        self._clients = []


class ReportThread:
    """Sends the counts of batches every `EVERY` seconds at most, in a thread of its own: a batch waits for no report.

    A report has the counts of all batches since the last one. The thread begins with the first report, and ends with
    `close` or with the process.
    """

    EVERY = 1.0  # seconds

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter
        self._changed = threading.Condition()
        self._last: BatchReport | None = None  # of those that were not sent
        self._sum = PipelineResult()
        self._closing = False
        self._thread: threading.Thread | None = None

    def post(self, report: BatchReport) -> None:
        """Let the report of a batch be sent soon."""
        with self._changed:
            self._last, self._sum = report, self._sum.plus(report)
            if self._thread is None:
                self._closing = False
                self._thread = threading.Thread(target=self._run, name="replicad-report", daemon=True)
                self._thread.start()
            self._changed.notify()

    def close(self) -> None:
        """Send what is left, and close the connections. Safe to repeat; a later report begins again."""
        with self._changed:
            thread, self._thread, self._closing = self._thread, None, True
            self._changed.notify()
        if thread is not None:
            thread.join(2 * PATIENCE)
        self._reporter.close()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or self._last is not None)
                last, total, closing = self._last, self._sum, self._closing
                self._last, self._sum = None, PipelineResult()
            if last is not None:
                self._reporter.send(of_several(last, total))
            if closing:
                return
            with self._changed:
                self._changed.wait_for(lambda: self._closing, self.EVERY)
