"""The daemon's beats: it reports itself in its database, so that every machine sees which daemons there are."""

from __future__ import annotations

import os
from importlib import metadata
from uuid import uuid4

import trio

from replicad.daemon.service import Host
from replicad.streams import daemons

INTERVAL = daemons.INTERVAL
LAST = 1.0  # seconds for the last word, when the daemon stops


class Beats:
    """Sends the beats of this daemon."""

    def __init__(self, host: Host) -> None:
        self._db = host.pools.housekeeping
        self._troubles = host.troubles
        self._schema = host.settings.database.stream_schema
        self._life = daemons.Life(
            uuid4(),
            host.settings.server_name,
            os.getpid(),
            [str(address) for address in host.addresses],
            metadata.version("replicad"),
        )
        self._began = trio.current_time()

    async def run(self) -> None:
        """Send beats until cancelled; then leave."""
        try:
            while True:
                with self._troubles.contain("service", "beats", "write"):
                    age = trio.current_time() - self._began
                    await daemons.beat(self._db, self._life, age, schema=self._schema)
                await trio.sleep(INTERVAL)
        finally:
            with trio.CancelScope(shield=True, deadline=trio.current_time() + LAST):
                with self._troubles.contain("service", "beats", "leave"):
                    await daemons.leave(self._db, self._life, schema=self._schema)
