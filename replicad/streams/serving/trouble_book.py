"""Keeps a daemon's troubles in Postgres as well, where the command line of any machine can list them.

A daemon that died leaves its rows behind; they count no more when they have not been refreshed for some time.
"""

from __future__ import annotations

import os
from uuid import uuid4

import trio

from replicad.daemon.troubles import Troubles
from replicad.streams.serving.pace import Pace
from replicad.streams.store import Notes
from replicad.streams.troubles import Row

LAST_WORD = 1.0  # seconds to remove our rows at the end
MAX_TROUBLES = 1000  # in Postgres; the log has them all


class TroubleBook:
    """Writes what `troubles` holds, whenever it changes. `server_name` is what people know the daemon by."""

    def __init__(self, notes: Notes, troubles: Troubles, server_name: str, pace: Pace = Pace()) -> None:
        self._notes = notes
        self._pace = pace
        self._troubles = troubles
        self._daemon = f"{server_name} pid {os.getpid()} {uuid4().hex[:8]}"
        self._written = False  # there are rows of ours

    async def run(self) -> None:
        """Write until cancelled; then our rows are removed."""
        try:
            while True:
                changed = self._troubles.next_change()  # before looking: none is missed while we write or pause
                await self._write()
                await trio.sleep(self._pace.troubles)
                with trio.move_on_after(self._pace.refresh if self._written else float("inf")):
                    await changed.wait()
        finally:
            with trio.CancelScope(shield=True, deadline=trio.current_time() + LAST_WORD):
                if self._written:
                    with self._troubles.contain("service", "troubles", "write"):
                        await self._notes.write_troubles(self._daemon, [])

    async def _write(self) -> None:
        current = self._troubles.current()[:MAX_TROUBLES]
        if not current and not self._written:
            return
        now = trio.current_time()
        rows = [Row(*one.place, one.code, one.reason, now - one.since) for one in current]
        with self._troubles.contain("service", "troubles", "write"):
            self._written = True
            await self._notes.write_troubles(self._daemon, rows)
            self._written = bool(rows)
