"""Writes a daemon's troubles into Postgres, so that the command line can list them on any machine.

The rows of a daemon that was killed stay; they are ignored when they have not been refreshed for some time.
"""

from __future__ import annotations

import os
from uuid import uuid4

import trio

from replicad.daemon.troubles import Troubles
from replicad.streams.daemons import DaemonReports, Row
from replicad.streams.serving.intervals import StreamIntervals

LAST_WRITE = 1.0  # seconds to remove this daemon's rows at the end
MAX_TROUBLES = 1000  # in Postgres; the log has them all


def daemon_name(server_name: str, pid: int | None = None) -> str:
    """How the name of a daemon begins, as people see it. Without a pid: of this process."""
    return f"{server_name} pid {os.getpid() if pid is None else pid}"


class TroubleBook:
    """Writes the present troubles whenever they change. `server_name`: the daemon's name for people."""

    def __init__(
        self, reports: DaemonReports, troubles: Troubles, server_name: str, pace: StreamIntervals = StreamIntervals()
    ) -> None:
        self._reports = reports
        self._pace = pace
        self._troubles = troubles
        self._daemon = f"{daemon_name(server_name)} {uuid4().hex[:8]}"
        self._written = False  # rows of this daemon are in Postgres

    async def run(self) -> None:
        """Write until cancelled; then remove this daemon's rows."""
        try:
            while True:
                changed = self._troubles.next_change()  # before reading them, so that no change is missed
                await self._write()
                await trio.sleep(self._pace.troubles)
                with trio.move_on_after(self._pace.refresh if self._written else float("inf")):
                    await changed.wait()
        finally:
            with trio.CancelScope(shield=True, deadline=trio.current_time() + LAST_WRITE):
                if self._written:
                    with self._troubles.contain("service", "troubles", "write"):
                        await self._reports.write_troubles(self._daemon, [])

    async def _write(self) -> None:
        current = self._troubles.current()[:MAX_TROUBLES]
        if not current and not self._written:
            return
        now = trio.current_time()
        rows = [Row(*one.place, one.code, one.reason, now - one.since) for one in current]
        with self._troubles.contain("service", "troubles", "write"):
            self._written = True
            await self._reports.write_troubles(self._daemon, rows)
            self._written = bool(rows)
