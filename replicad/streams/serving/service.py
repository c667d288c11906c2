"""Streams as a service of the daemon: what clients ask about them, and the jobs behind it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from replicad.daemon.poller import Poller
from replicad.daemon.service import Answers, Feature, Host, Job, Peer
from replicad.streams.commands import COMMANDS, Doorbell, FederationAck, Replicate, Streams, Taken
from replicad.streams.serving.ack_service import AckService
from replicad.streams.serving.publisher import Publisher
from replicad.streams.serving.subscriptions import Subscriptions
from replicad.streams.serving.trouble_book import TroubleBook


class StreamService:
    """All streams of one daemon."""

    def __init__(self, publisher: Publisher, acks: AckService, book: TroubleBook, poller: Poller) -> None:
        self.publisher = publisher
        self._acks = acks
        self._book = book
        self._poller = poller

    def jobs(self) -> Sequence[Job]:
        """`Service.jobs`."""
        return [
            Job("acks", self._acks.run),
            Job("troubles", self._book.run),
            Job("publisher", self.publisher.run, announces=True),
        ]

    def answers(self, peer: Peer) -> Answers:
        """`Service.answers`."""
        subscriptions = Subscriptions(peer, self.publisher)

        async def list_streams(_: Streams) -> None:
            peer.post(Streams(tuple(sorted(self.publisher.feeds))))

        async def ring(_: Doorbell) -> None:
            self._poller.ring()

        async def acknowledge(command: FederationAck) -> None:
            self._acks.note(command, subscriptions.followed)

        return Answers(
            at_once={Streams: list_streams, Doorbell: ring, FederationAck: acknowledge},
            in_turn={Replicate: subscriptions.replicate, Taken: subscriptions.taken},
        )

    def summary(self) -> Mapping[str, object]:
        """`Service.summary`."""
        return {"streams": sorted(self.publisher.feeds)}


def _open(host: Host) -> StreamService:
    schema = host.settings.database.stream_schema
    pools = host.pools
    publisher = Publisher(pools.streams, pools.copies, host.settings, host.poller, host.troubles)
    acks = AckService(pools.short, schema, publisher, host.troubles)
    book = TroubleBook(pools.short, schema, host.troubles, host.settings.server_name)
    return StreamService(publisher, acks, book, host.poller)


FEATURE = Feature("streams", COMMANDS, _open)
