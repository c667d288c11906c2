"""Tells the daemons what each micro-batch counted, so that `replicad top` shows it. Never in the way of the batch."""

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
SILENCE = 30.0  # seconds without a word after a report that did not get through: counts are not worth waiting for

log = get_logger("replicad.spark")


class Teller:
    """Sends reports about a tube in the name of a pipeline; connects with the first."""

    def __init__(self, options: SourceOptions, name: str) -> None:
        assert options.tube is not None
        self._islands = list(options.by_island().values())
        self._tube = options.tube
        self._reporter = re.sub(r"[^!-~]", "-", name)[:200] or "pipeline"
        self._clients: list[BlockingClient] = []
        self._quiet_until = 0.0

    def tell(self, report: BatchReport) -> None:
        """Send a report; where that fails the next ones are left out for a while."""
        if time.monotonic() < self._quiet_until:
            return
        try:
            if not self._clients:
                name = f"{self._reporter}-report"
                self._clients = [endpoint_of(one, timeout=PATIENCE).connect(name) for one in self._islands]
            for client in self._clients:
                client.report(self._tube, self._reporter, report.counts())
        except ReplicadError as error:
            self._quiet_until = time.monotonic() + SILENCE
            log.debug("report_failed", error=str(error))

    def close(self) -> None:
        """Safe to repeat; a later report connects again."""
        for client in self._clients:
            client.close()
        self._clients = []
