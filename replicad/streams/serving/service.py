"""Streams as a service of the daemon: the handlers of their commands, and their jobs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from replicad.daemon.journal import JournalLimits
from replicad.daemon.poller import Poller
from replicad.daemon.service import Answers, Feature, Host, Job
from replicad.daemon.session import Session
from replicad.streams.commands import COMMANDS, Doorbell, FederationAck, Replicate, Streams, Taken
from replicad.streams.serving.ack_service import AckService
from replicad.streams.serving.catchups import CatchupLimits, Catchups
from replicad.streams.serving.figures import StreamFigures
from replicad.streams.serving.intervals import StreamIntervals
from replicad.streams.serving.publisher import Publisher
from replicad.streams.serving.row_pages import RowPages
from replicad.streams.serving.subscriptions import Subscriptions
from replicad.streams.serving.trouble_book import TroubleBook
from replicad.streams.serving.windows import Windows
from replicad.streams.store import PostgresNotes, PostgresStore


class StreamService:
    """The streams of one daemon."""

    def __init__(
        self,
        publisher: Publisher,
        acks: AckService,
        book: TroubleBook,
        poller: Poller,
        pace: StreamIntervals = StreamIntervals(),
        *,
        catchups: CatchupLimits = CatchupLimits(),
    ) -> None:
        self.publisher = publisher
        self.catchups = Catchups(catchups)
        self._acks = acks
        self._book = book
        self._poller = poller
        self._pace = pace
        self._listed: list[str] | None = None  # the streams in `_line`
        self._line = b""

    def jobs(self) -> Sequence[Job]:
        """`Service.jobs`."""
        return [
            Job("acks", self._acks.run),
            Job("troubles", self._book.run),
            Job("catch-ups", self.catchups.run, announces=True),
            Job("publisher", self.publisher.run, announces=True),
        ]

    def answers(self, peer: Session) -> Answers:
        """`Service.answers`."""
        subscriptions = Subscriptions(peer, self.publisher, self.catchups, self._pace)

        async def list_streams(_: Streams) -> None:
            if peer.access.limited:
                peer.post(Streams(tuple(sorted(filter(peer.access.lists, self.publisher.feeds)))))
            else:
                peer.post_line(self._streams_line())

        async def ring(_: Doorbell) -> None:
            self._poller.ring()

        async def acknowledge(command: FederationAck) -> None:
            name = self._acks.stream_of(command, subscriptions.followed)
            if name is None or peer.access.require("ack", "stream", name):
                self._acks.note(command, subscriptions.followed, subscriptions.reads)

        async def refuse_unknown(command: Replicate | Taken | FederationAck) -> None:
            name = command.stream or ""
            if isinstance(command, FederationAck):
                raise self._acks.refused(name)
            await self.publisher.find(name, peer.access.lists)

        return Answers(
            at_once={Streams: list_streams, Doorbell: ring, FederationAck: acknowledge},
            in_turn={Replicate: subscriptions.replicate, Taken: subscriptions.taken},
            unknown=refuse_unknown,
        )

    def _streams_line(self) -> bytes:
        """The answer to STREAMS, rendered when a stream came or went."""
        names = list(self.publisher.feeds)
        if names != self._listed:
            self._listed = names
            self._line = f"{Streams(tuple(sorted(names))).render()}\n".encode()
        return self._line

    def summary(self) -> Mapping[str, object]:
        """`Service.summary`."""
        return {"streams": sorted(self.publisher.feeds)}


def feature(pace: StreamIntervals = StreamIntervals()) -> Feature:
    """The feature `streams`."""

    def open_service(host: Host) -> StreamService:
        pools, limits, troubles = host.pools, host.settings.limits, host.troubles
        schema = host.settings.database.stream_schema
        store, notes = PostgresStore(pools.streams, pools.catchups, schema), PostgresNotes(pools.housekeeping, schema)
        journal = JournalLimits(
            limits.journal_bytes,
            max_age=limits.journal_seconds,
            patience=limits.journal_patience,
            pace=limits.journal_pace,
        )
        windows = Windows(pools.housekeeping, pace.late_rows, schema)
        deliver = host.settings.late_rows == "deliver"
        publisher = Publisher(store, windows, journal, host.poller, troubles, pace=pace, deliver=deliver)
        acks = AckService(notes, publisher.feeds, troubles, pace)
        book = TroubleBook(notes, troubles, host.settings.server_name, pace)
        service = StreamService(publisher, acks, book, host.poller, pace, catchups=CatchupLimits.of(limits))
        host.figures.add(StreamFigures(publisher, service.catchups, pools.housekeeping, schema))
        host.figures.catching_up = service.catchups.following
        host.inside.pages = RowPages(publisher, service.catchups, pace)
        return service

    return Feature("streams", COMMANDS, open_service)


FEATURE = feature()
