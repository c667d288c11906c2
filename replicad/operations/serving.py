"""What operators see of a daemon, as a service: its beats in the database and, with `--http`, the pages.

Without the option nothing of HTTP is imported.

By its beats the daemon reports itself in its database, so that every machine sees which daemons there are.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping, Sequence
from importlib import metadata
from uuid import uuid4

import trio

from replicad.daemon.service import Answers, Feature, Host, Job, Service
from replicad.daemon.session import Session
from replicad.errors import UsageError
from replicad.streams import daemons
from replicad.streams.daemons import DaemonReports

STATUS = "status"  # the right to see /status, /clients, /metrics, and the data of the console
REPLAY = "replay"  # the right to put parked ids back into a tube
DROP = "drop"  # the right to delete parked ids of a tube
PAUSE = "pause"  # the right to pause and resume a tube
CANCEL = "cancel"  # the right to cancel backfills of a tube
_PACKAGES = ("h11", "prometheus_client")

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
                    await DaemonReports(self._db, self._schema).beat(self._life, age)
                await trio.sleep(INTERVAL)
        finally:
            with trio.CancelScope(shield=True, deadline=trio.current_time() + LAST):
                with self._troubles.contain("service", "beats", "leave"):
                    await DaemonReports(self._db, self._schema).leave(self._life)


class StatusService:
    """The service without `--http`."""

    def __init__(self, host: Host) -> None:
        self._beats = Beats(host)

    def jobs(self) -> Sequence[Job]:
        """`Service.jobs`."""
        return (Job("beats", self._beats.run),)

    def answers(self, peer: Session) -> Answers:  # noqa: ARG002
        """`Service.answers`."""
        return Answers()

    def summary(self) -> Mapping[str, object]:
        """`Service.summary`."""
        return {}


class Http(StatusService):
    """The service with `--http`: one job more, which the daemon starts again if it fails."""

    def __init__(self, host: Host) -> None:
        """Raises UsageError: the extra is not installed."""
        super().__init__(host)
        missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
        if missing:
            raise UsageError(f"--http needs {', '.join(missing)}: pip install 'replicad[http]'")
        from replicad.operations.http.server import HttpServer

        self.server = HttpServer(host)

    def jobs(self) -> Sequence[Job]:
        """`Service.jobs`."""
        return (*super().jobs(), Job("http", self.server.run, announces=True))

    def summary(self) -> Mapping[str, object]:
        """`Service.summary`."""
        return {"http": [str(address) for address in self.server.addresses]}


def open_service(host: Host) -> Service:
    """The service for the settings of the daemon."""
    return StatusService(host) if host.settings.http is None else Http(host)


FEATURE = Feature("http", (), open_service, verbs=(STATUS,), named_verbs=(REPLAY, DROP, PAUSE, CANCEL))
