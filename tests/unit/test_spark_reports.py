"""The reports of a Spark pipeline: no batch waits for them, and no count is left out."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

from replicad.spark.reports import BatchReport, ReportThread


def report(number: int) -> BatchReport:
    return BatchReport(number, 1, 2, 2, 2, 0, 0, repeated=False, seconds=0.5, lag=None)


def test_batches_wait_for_no_report_and_every_count_is_sent() -> None:
    sent: list[BatchReport] = []
    closed: list[bool] = []
    begun, answered = threading.Event(), threading.Event()

    def send(one: BatchReport) -> None:
        begun.set()
        answered.wait(30)  # a daemon that answers late
        sent.append(one)

    reporter: Any = SimpleNamespace(send=send, close=lambda: closed.append(True))
    reports = ReportThread(reporter)
    reports.post(report(0))
    assert begun.wait(30)
    for number in range(1, 6):
        reports.post(report(number))
    assert sent == []
    answered.set()
    reports.close()
    reports.close()
    assert [(one.number, one.pods, one.ids, one.seconds) for one in sent] == [(0, 1, 2, 0.5), (5, 5, 10, 2.5)]
    assert closed
    reports.post(report(6))  # the query has begun again
    reports.close()
    assert [one.number for one in sent] == [0, 5, 6]
