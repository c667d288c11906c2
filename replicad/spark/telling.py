"""Tells the daemon what each micro-batch counted, so that `replicad top` shows it. Never in the way of the batch."""

from __future__ import annotations

import re
import time

import structlog

from replicad.client.blocking import BlockingClient
from replicad.errors import ReplicadError
from replicad.spark.connecting import endpoint_of
from replicad.spark.options import SourceOptions
from replicad.spark.reports import BatchReport

PATIENCE = 2.0  # seconds for a connection or an answer
SILENCE = 30.0  # seconds without a word after a report that did not get through: counts are not worth waiting for

log = structlog.get_logger("replicad.spark")


class Teller:
    """Sends reports about a tube in the name of a pipeline; connects with the first."""

    def __init__(self, options: SourceOptions, name: str) -> None:
        assert options.tube is not None
        self._options = options
        self._tube = options.tube
        self._reporter = re.sub(r"[^!-~]", "-", name)[:200] or "pipeline"
        self._client: BlockingClient | None = None
        self._quiet_until = 0.0

    def tell(self, report: BatchReport) -> None:
        """Send a report; where that fails the next ones are left out for a while."""
        if time.monotonic() < self._quiet_until:
            return
        try:
            if self._client is None:
                self._client = endpoint_of(self._options, timeout=PATIENCE).connect(f"{self._reporter}-report")
            self._client.report(self._tube, self._reporter, report.counts())
        except ReplicadError as error:
            self._quiet_until = time.monotonic() + SILENCE
            log.debug("report_failed", error=str(error))

    def close(self) -> None:
        """Safe to repeat; a later report connects again."""
        if self._client is not None:
            self._client.close()
            self._client = None
