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


async def wait_for_database(url: str, patience: float) -> None:
    """Return when Postgres accepts a connection. `patience` in seconds; 0: one try.

    Raises:
        DatabaseUnavailable: it has not answered in that time.
        DatabaseRefused: it answers and does not let us in, which waiting would not mend.
    """
    began = trio.current_time()
    pauses = Backoff(first=0.2, cap=2.0)
    reported = began - REPORT
    while True:
        try:
            async with open_database(url, size=1, application_name="replicad", connect_timeout=CONNECT):
                return
        except DatabaseUnavailable as error:
            now, pause = trio.current_time(), pauses.next_delay()
            if now + pause > began + patience:
                raise DatabaseUnavailable(f"{error} (waited {patience:g} s: --wait-for-database)") from error
            if now >= reported + REPORT:
                reported = now
                log.warning("waiting_for_database", error=str(error), left_s=round(began + patience - now))
        await trio.sleep(pause)
