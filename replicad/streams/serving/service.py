"""Streams as a service of the daemon: the handlers of their commands, and their jobs."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from uuid import uuid4

import trio

from replicad.daemon.figures import COUNTER, GAUGE, Detail, Family, FigureQuery, Obstacle, Sample, StateView
from replicad.daemon.journal import JournalLimits
from replicad.daemon.poller import Poller
from replicad.daemon.service import Answers, Feature, Host, Job, Pages
from replicad.daemon.session import Session
from replicad.daemon.troubles import Troubles
from replicad.errors import DatabaseError, StreamRefused, TokenAhead
from replicad.postgres.bridge import Database
from replicad.postgres.statements import write_in_pieces
from replicad.streams.commands import COMMANDS, Doorbell, FederationAck, Replicate, Streams, Taken
from replicad.streams.daemon_registry import DaemonRegistry
from replicad.streams.daemons import DaemonReports, Row
from replicad.streams.picture import COLUMNS, OK, REFUSED, STARTING, TROUBLED, WAITING, StreamPicture, state_samples
from replicad.streams.queries import Impatient, count_waiting
from replicad.streams.registry import ReaderAck, Registry, row_source
from replicad.streams.serving.catchups import CatchupLimits, Catchups
from replicad.streams.serving.filters import FilterFeeds
from replicad.streams.serving.intervals import StreamIntervals
from replicad.streams.serving.publisher import REGISTRY, Publisher
from replicad.streams.serving.recording import CAUSE as RECORDING
from replicad.streams.serving.recording import Recording
from replicad.streams.serving.retention import Retention
from replicad.streams.serving.row_pages import RowPages
from replicad.streams.serving.served_stream import KIND, ServedStream
from replicad.streams.serving.subscriptions import Subscriptions
from replicad.streams.serving.windows import Windows

# FEDERATION_ACK: collects acks and writes them once a second.
#
# An ack that is lost when the daemon ends is replaced by the sender's next one; until then trimming keeps more rows.


MAX_WAITING = 10_000  # acks (one for each stream and sender) that wait for Postgres
FEDERATION = "federation"  # the stream of an ack without a name, as in Synapse
SERVICE = "acks"


class AckService:
    """The acks of all sessions."""

    def __init__(
        self,
        registry: Registry,
        served: Mapping[str, ServedStream],
        troubles: Troubles,
        pace: StreamIntervals = StreamIntervals(),
    ) -> None:
        """`served`: the streams that are served now, by name."""
        self._registry = registry
        self._served = served
        self._pace = pace
        self._troubles = troubles
        self._waiting: dict[tuple[str, str], ReaderAck] = {}
        self._came = trio.Event()

    @staticmethod
    def stream_of(command: FederationAck, following: Collection[str] | None) -> str | None:
        """The stream that an ack of a connection belongs to which follows these streams, or all (None).

        It belongs to the stream that it names; else to the only followed stream; else, if all are, to the stream
        called `federation`.
        """
        if command.stream is not None:
            return command.stream
        return FEDERATION if following is None else next(iter(following), None) if len(following) == 1 else None

    @staticmethod
    def refused(name: str) -> StreamRefused:
        """The answer to an ack that names a stream which is not served."""
        return StreamRefused(f"stream {name[:80]} is not served, so it takes no FEDERATION_ACK")

    def note(self, command: FederationAck, following: Collection[str] | None, reads: Callable[[str], bool]) -> bool:
        """Take an ack of a connection that follows these streams, or all (None). False if it belongs to no stream.

        `reads`: whether the connection is being sent the rows of a stream. Then it was informed if history has forked.
        From any other, a token may be of a generation before, in which the id was another row. So it counts only up to
        where all generations are the same: otherwise `trim --acked` would remove rows that the sender never had.

        Raises:
            StreamRefused: the stream that it names is not served.
            TokenAhead: the token lies beyond the stream's position, or beyond what counts from this connection.
        """
        stream = self._served.get(self.stream_of(command, following) or "")
        if stream is None:
            if command.stream is not None:
                raise self.refused(command.stream)
            return False
        position = stream.followed.position
        if position is None or command.token > position:
            raise TokenAhead(
                f"FEDERATION_ACK {command.token} is ahead of stream {stream.name}, whose position is {position}"
            )
        shared = stream.lineage.shared_by_all
        if shared is not None and command.token > shared and not reads(stream.name):
            raise TokenAhead(
                f"FEDERATION_ACK {command.token} is ahead of {shared}, where the history of stream {stream.name} "
                "forked; send it again on a connection that follows the stream"
            )
        key = (stream.name, command.instance)
        known = self._waiting.get(key)
        if known is None and len(self._waiting) >= MAX_WAITING:
            raise StreamRefused(f"the acks of {MAX_WAITING} senders wait for Postgres already; send it again later")
        if known is None or known.epoch != stream.stream.epoch or known.token < command.token:
            self._waiting[key] = ReaderAck(stream.name, stream.stream.epoch, command.instance, command.token)
            self._came.set()
        return True

    async def run(self) -> None:
        """Write acks until cancelled. Acks that cannot be written now are tried again after `pace.acks`."""
        while True:
            while not self._waiting:
                self._came = trio.Event()
                await self._came.wait()
            await trio.sleep(self._pace.acks)
            with self._troubles.contain("service", SERVICE, "write"):
                await self._write_waiting()

    async def _write_waiting(self) -> None:
        written = dict(self._waiting)
        await write_in_pieces(list(written.values()), self._write, self._refused)
        for key, ack in written.items():
            if self._waiting.get(key) is ack:
                del self._waiting[key]

    async def _write(self, some: Sequence[ReaderAck]) -> bool:
        await self._registry.note_acks(some)
        return True

    def _refused(self, error: DatabaseError) -> None:
        """Record an ack that Postgres cannot hold; the others are written."""
        self._troubles.record("service", SERVICE, "ack", error)


# The figures of the streams of one daemon: positions, lag, journals, clients that catch up.


CATCHUPS = Family("replicad_catchups", GAUGE, "Subscriptions that are being sent old rows.")
CATCHUPS_WAITING = Family("replicad_catchups_waiting", GAUGE, "Reads of old rows that wait for a connection.")
CATCHUP_READS = Family("replicad_catchup_reads_total", COUNTER, "Pieces of old rows that were read from Postgres.")
CATCHUP_ROWS = Family("replicad_catchup_read_rows_total", COUNTER, "Old rows that were read from Postgres.")
CATCHUP_CACHE = Family("replicad_catchup_cache_bytes", GAUGE, "Memory for old rows that clients share.")
CATCHUP_CACHE_LIMIT = Family("replicad_catchup_cache_limit_bytes", GAUGE, "The most of it (--catchup-bytes).")
FAMILIES = (
    *COLUMNS.families,
    *(CATCHUPS, CATCHUPS_WAITING, CATCHUP_READS, CATCHUP_ROWS, CATCHUP_CACHE, CATCHUP_CACHE_LIMIT),
)


class StreamFigures:
    """`Source` for streams. `db`: the pool on which waiting rows are counted."""

    def __init__(self, publisher: Publisher, catchups: Catchups, db: Database, schema: str, troubles: Troubles) -> None:
        self._publisher = publisher
        self._troubles = troubles
        self._catchups = catchups
        self._db = db
        self._schema = schema
        self._rows: dict[str, int | None] = {}  # what the last look has counted

    @property
    def families(self) -> Sequence[Family]:
        """`Source.families`."""
        return FAMILIES

    def samples(self) -> Iterable[Sample]:
        """`Source.samples`."""
        for name in list(self._publisher.faulty):
            yield from state_samples(name, REFUSED)
        for stream in list(self._publisher.streams.values()):
            yield from COLUMNS.samples(self.picture(stream))
        found = self._catchups.statistics()
        yield CATCHUPS(len(self._catchups.under_way))
        yield CATCHUPS_WAITING(found.waiting)
        yield CATCHUP_READS(found.reads)
        yield CATCHUP_ROWS(found.rows)
        yield CATCHUP_CACHE(found.bytes)
        yield CATCHUP_CACHE_LIMIT(self._catchups.limits.cache_bytes)

    def picture(self, stream: ServedStream) -> StreamPicture:
        """The picture of one stream, from memory."""
        now, reading, published = trio.current_time(), stream.reading, stream.published
        return StreamPicture(
            stream=stream.stream,
            state=self.state(stream),
            problem=self._publisher.why_not_served(stream) or self._troubles.why(KIND, stream.name),
            position=published,
            horizon=None if reading is None else reading.position,
            last_value=None if reading is None else reading.last_value,
            lag_rows=self._waiting_rows(stream),
            lag_seconds=stream.lag.seconds(published, now),
            held_by=None if reading is None else reading.held_by,
            held_seconds=stream.lag.held_seconds(now),
            served=stream if stream.is_served else None,
        )

    def state(self, stream: ServedStream) -> str:
        """One of STATES."""
        if stream.is_served:
            if self._publisher.why_not_served(stream) is not None:
                return WAITING
            return OK if self._troubles.why(KIND, stream.name) is None else TROUBLED
        return STARTING if stream.obstacle is None else REFUSED

    def _waiting_rows(self, stream: ServedStream) -> int | None:
        return 0 if _is_at_the_end(stream) else self._rows.get(stream.name)

    def obstacles(self) -> Iterable[Obstacle]:
        """`Source.obstacles`."""
        if not self._publisher.running:
            yield Obstacle(
                "service", "publisher", "the streams are not served yet, or are started again after a failure"
            )
        if self._publisher.registry_fault is not None:
            yield Obstacle("service", REGISTRY, f"the registry of streams: {self._publisher.registry_fault}")
        for name, why in self._publisher.faulty.items():
            yield Obstacle(KIND, name, f"stream {name} cannot be served: {why}")
        for name, stream in self._publisher.streams.items():
            reason = self._publisher.why_not_served(stream)
            if reason is not None:
                yield Obstacle(KIND, name, f"stream {name} is {self.state(stream)}: {reason}")
            for trouble in self._troubles.of(KIND, name):
                if trouble.place.cause == RECORDING:
                    yield Obstacle(KIND, name, f"stream {name} does not have all changes: {trouble.reason}")

    def details(self) -> Iterable[Detail]:
        """`Source.details`."""
        for name, why in self._publisher.faulty.items():
            yield Detail(KIND, name, {"state": REFUSED, "problem": why})
        for name, stream in self._publisher.streams.items():
            yield Detail(KIND, name, COLUMNS.fields(StateView.STATUS, self.picture(stream)))

    def looks(self) -> Sequence[FigureQuery]:
        """`Source.looks`."""
        return (FigureQuery("streams", self._count, self._rows.clear),)

    async def _count(self) -> None:
        """Count the rows that wait. Streams of which nothing can wait are not asked for."""
        sources = {
            name: (row_source(stream.stream, self._schema), published)
            for name, stream in self._publisher.streams.items()
            if (published := stream.published) is not None
            and stream.stream.denied is None
            and not _is_at_the_end(stream)
        }
        for name in self._rows.keys() - sources.keys():
            del self._rows[name]
        if sources:
            await count_waiting(Impatient(self._db), sources, self._rows)


def _is_at_the_end(stream: ServedStream) -> bool:
    """Whether no id is known above the position."""
    reading, published = stream.reading, stream.published
    if reading is None or reading.last_value is None or published is None:
        return False
    return reading.last_value <= published


class StreamService:
    """The streams of one daemon."""

    def __init__(
        self,
        publisher: Publisher,
        acks: AckService,
        book: TroubleBook,
        retention: Retention,
        poller: Poller,
        *,
        recording: Recording,
        filters: FilterFeeds,
        pace: StreamIntervals = StreamIntervals(),
    ) -> None:
        self.publisher = publisher
        self.catchups = publisher.catchups
        self._acks = acks
        self._book = book
        self._recording = recording
        self._retention = retention
        self._filters = filters
        self._poller = poller
        self._pace = pace
        self._listed: list[str] | None = None  # the streams in `_line`
        self._line = b""

    def jobs(self) -> Sequence[Job]:
        """`Service.jobs`."""
        return [
            Job("acks", self._acks.run),
            Job("troubles", self._book.run),
            Job("changes", self._recording.look),
            Job("filters", self._filters.run),
            Job("snapshots", self._recording.send_snapshots),
            Job("retention", self._retention.run),
            Job("catch-ups", self.catchups.run, announces=True),
            Job("publisher", self.publisher.run, announces=True),
        ]

    def answers(self, peer: Session) -> Answers:
        """`Service.answers`."""
        subscriptions = Subscriptions(peer, self.publisher, self._pace, filters=self._filters)

        async def list_streams(_: Streams) -> None:
            if peer.access.limited:
                peer.post(Streams(tuple(sorted(filter(peer.access.lists, self.publisher.served)))))
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
        names = list(self.publisher.served)
        if names != self._listed:
            self._listed = names
            self._line = f"{Streams(tuple(sorted(names))).render()}\n".encode()
        return self._line

    def summary(self) -> Mapping[str, object]:
        """`Service.summary`."""
        return {"streams": sorted(self.publisher.served)}


def feature(pace: StreamIntervals = StreamIntervals()) -> Feature:
    """The feature `streams`."""

    def open_service(host: Host) -> StreamService:
        pools, limits, troubles = host.pools, host.settings.limits, host.troubles
        schema = host.settings.database.stream_schema
        registry = DaemonRegistry(pools.streams, pools.catchups, schema)
        journal = JournalLimits(
            limits.journal_bytes,
            max_age=limits.journal_seconds,
            patience=limits.journal_patience,
            pace=limits.journal_pace,
        )
        windows = Windows(pools.housekeeping, pace.late_rows, schema)
        deliver = host.settings.late_rows == "deliver"
        catchups = Catchups(CatchupLimits.of(limits))
        publisher = Publisher(
            registry, windows, journal, host.poller, troubles, catchups=catchups, pace=pace, deliver=deliver
        )
        acks = AckService(Registry(pools.housekeeping, schema), publisher.served, troubles, pace)
        book = TroubleBook(DaemonReports(pools.housekeeping, schema), troubles, host.settings.server_name, pace)
        recording = Recording(
            Registry(pools.housekeeping, schema),
            troubles,
            lambda: any(stream.stream.source is not None for stream in publisher.streams.values()),
            pace,
        )
        retention = Retention(publisher.streams, Registry(pools.housekeeping, schema).trim_kept, troubles, pace)
        filters = FilterFeeds(troubles, pace)
        service = StreamService(
            publisher, acks, book, retention, host.poller, recording=recording, filters=filters, pace=pace
        )
        host.figures.add(StreamFigures(publisher, catchups, pools.housekeeping, schema, troubles))
        host.figures.catching_up = catchups.following
        pages = RowPages(publisher, pace)
        host.inside.pages = Pages(pages.page, pages.empty_page, pages.wait_beyond, pages.has_changes)
        return service

    return Feature("streams", COMMANDS, open_service)


FEATURE = feature()


# Writes a daemon's troubles into Postgres, so that the command line can list them on any machine.
#
# The rows of a daemon that was killed stay; they are ignored when they have not been refreshed for some time.

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
