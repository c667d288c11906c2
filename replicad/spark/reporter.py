"""Send the counts of each micro-batch to the daemons, for `replicad top`. A failure does not disturb the batch."""

from __future__ import annotations

import re
import time

from replicad.client.blocking_client import BlockingClient
from replicad.errors import ReplicadError
from replicad.eventlog import get_logger
from replicad.spark.connecting import endpoint_of
from replicad.spark.options import SourceOptions
from replicad.spark.reports import BatchReport

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

    def send(self, report: BatchReport) -> None:
        """Send a report. After a failure no reports are sent for `SILENCE` seconds."""
        if time.monotonic() < self._quiet_until:
            return
        try:
            if not self._clients:
                name = f"{self._name}-report"
                self._clients = [endpoint_of(one, timeout=PATIENCE).connect(name) for one in self._islands]
            for client in self._clients:
                client.report(self._tube, self._name, report.counts())
        except ReplicadError as error:
            self._quiet_until = time.monotonic() + SILENCE
            log.debug("report_failed", error=str(error))

    def close(self) -> None:
        """Close the connections. Safe to repeat; a later report connects again."""
        for client in self._clients:
            client.close()
        self._clients = []
