"""What a daemon does for senders, beside serving streams: it tells their figures to operators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from replicad.daemon.service import Answers, Feature, Host, Job, Peer
from replicad.sender.figures import SenderFigures


class SenderService:
    """The service: no jobs and no commands."""

    def jobs(self) -> Sequence[Job]:
        """`Service.jobs`."""
        return ()

    def answers(self, peer: Peer) -> Answers:  # noqa: ARG002
        """`Service.answers`."""
        return Answers()

    def summary(self) -> Mapping[str, object]:
        """`Service.summary`."""
        return {}


def open_service(host: Host) -> SenderService:
    """The service; adds the figures of senders to those of the daemon."""
    host.figures.add(SenderFigures(host.pools.housekeeping, host.settings.database.stream_schema))
    return SenderService()


FEATURE = Feature("sender", (), open_service)
