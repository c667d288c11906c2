"""`serve --http` as a service of the daemon. Without the option it does nothing, and imports nothing."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence

from replicad.daemon.service import Answers, Feature, Host, Job, Peer, Service
from replicad.errors import UsageError

STATUS = "status"  # the right to see /status, /clients, /metrics, and the data of the console
REPLAY = "replay"  # the right to put parked ids back into a tube
_PACKAGES = ("hypercorn", "starlette", "prometheus_client")


class NoHttp:
    """The service where nothing is served."""

    def jobs(self) -> Sequence[Job]:
        """`Service.jobs`."""
        return ()

    def answers(self, peer: Peer) -> Answers:  # noqa: ARG002
        """`Service.answers`."""
        return Answers()

    def summary(self) -> Mapping[str, object]:
        """`Service.summary`."""
        return {}


class Http(NoHttp):
    """The service with `--http`: one job, which the daemon starts again if it fails."""

    def __init__(self, host: Host) -> None:
        """Raises UsageError: the extra is not installed."""
        missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
        if missing:
            raise UsageError(f"--http needs {', '.join(missing)}: pip install 'replicad[http]'")
        from replicad.operations.http.server import Server

        self.server = Server(host)

    def jobs(self) -> Sequence[Job]:
        """`Service.jobs`."""
        return (Job("http", self.server.run, announces=True),)

    def summary(self) -> Mapping[str, object]:
        """`Service.summary`."""
        return {"http": [str(address) for address in self.server.addresses]}


def open_service(host: Host) -> Service:
    """The service for the settings of the daemon."""
    return NoHttp() if host.settings.http is None else Http(host)


FEATURE = Feature("http", (), open_service, verbs=(STATUS,), named_verbs=(REPLAY,))
