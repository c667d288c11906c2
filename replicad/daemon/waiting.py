"""Waits at the start for a Postgres that does not answer yet (`--wait-for-database`)."""

from __future__ import annotations

import structlog
import trio

from replicad.errors import DatabaseUnavailable
from replicad.postgres.bridge import open_database
from replicad.retry import Backoff

CONNECT = 5.0  # seconds for one try to connect
REPORT = 10.0  # seconds between two events while it waits
log = structlog.get_logger()


class Patience:
    """How long a start may still wait for Postgres: `seconds` from now on, for all of its tries together."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._began = trio.current_time()
        self._reported = self._began - REPORT
        self._pauses = Backoff(first=0.2, cap=2.0)

    async def wait_for_database(self, url: str) -> None:
        """Return when Postgres accepts a connection; without any time to wait, at once.

        Raises:
            DatabaseUnavailable: it has not answered in that time.
            DatabaseRefused: it answers and does not let us in, which waiting would not mend.
        """
        while self._seconds > 0:
            try:
                async with open_database(url, size=1, application_name="replicad", connect_timeout=CONNECT):
                    return
            except DatabaseUnavailable as error:
                await self.pause(error)

    async def pause(self, error: DatabaseUnavailable) -> None:
        """Wait a little before the next try after this error. Raises the error when no time is left."""
        now, pause = trio.current_time(), self._pauses.next_delay()
        left = self._began + self._seconds - now
        if pause > left:
            if self._seconds <= 0:
                raise error
            raise DatabaseUnavailable(f"{error} (waited {self._seconds:g} s: --wait-for-database)") from error
        if now >= self._reported + REPORT:
            self._reported = now
            log.warning("waiting_for_database", error=str(error), left_s=round(left))
        await trio.sleep(pause)
