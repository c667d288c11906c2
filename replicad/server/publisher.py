"""Which streams are served: finds them in the registry, gives each a feed, remembers what was published."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import structlog
import trio

from replicad.config import ServerSettings
from replicad.errors import DatabaseError, StreamRefused, UnknownStream
from replicad.postgres.bridge import Database
from replicad.postgres.horizon import LockSource, Reading, ReservationSource, Source, TableSource
from replicad.server.feed import Feed
from replicad.server.journal import JournalLimits
from replicad.server.poller import Poller
from replicad.server.troubles import Troubles
from replicad.streams import registry
from replicad.streams.registry import Method, Published, Stream

LOOK_INTERVAL = 1.0  # seconds between two looks at the registry, and between two notes of what was published
FIRST_READING = 2.0  # seconds to wait for the first position of a stream; only an open transaction takes longer

LATE_INTERVAL = 5.0  # seconds between two looks for rows that turned up at or below a published position
LATE_WINDOW = 10_000  # ids below the position that are looked at; a late row is late by seconds, not by days

log = structlog.get_logger()
OnFeed = Callable[[Feed], None]


@dataclass(slots=True)
class _Pending:
    """A stream that is watched and has no position yet."""

    stream: Stream
    reading: Reading | None = None


class Publisher:
    """The feeds by stream name; `on_feed` of whoever follows all streams is called for each new one."""

    def __init__(
        self, db: Database, catchup_db: Database, settings: ServerSettings, poller: Poller, troubles: Troubles
    ) -> None:
        limits = settings.limits
        self.feeds: dict[str, Feed] = {}
        self._db = db
        self._catchup_db = catchup_db
        self._schema = settings.database.stream_schema
        self._poller = poller
        self._troubles = troubles
        self._limits = JournalLimits(limits.journal_bytes, limits.journal_chunks, limits.journal_seconds)
        self._pending: dict[str, _Pending] = {}
        self._faulty: dict[str, str] = {}
        self._scopes: dict[str, trio.CancelScope] = {}
        self._followers: set[OnFeed] = set()
        self._noted: dict[str, object] = {}
        self._counted: dict[str, tuple[int, int, int]] = {}  # stream: (after, upto], and how many rows it had
        self._late_at = 0.0
        self._arrived = trio.Event()
        self._nursery: trio.Nursery

    # --- for sessions ---

    async def find(self, name: str) -> Feed:
        """The feed of a stream, also of one that was added a moment ago: its first reading is waited for.

        Raises:
            UnknownStream: nothing of that name is registered.
            StreamRefused: it is, but cannot be served (now); the message says why.
        """
        if name not in self.feeds and name not in self._pending:
            await self._look()
        with trio.move_on_after(FIRST_READING):
            while name in self._pending:
                await self._arrived.wait()
        if name in self.feeds:
            return self.feeds[name]
        if name in self._faulty:
            raise StreamRefused(f"stream {name} cannot be served: {self._faulty[name]}")
        if name in self._pending:
            raise StreamRefused(f"stream {name} has no position yet: {_why(self._pending[name].reading)}")
        known = ", ".join(sorted(self.feeds)) or "none yet; add one with `replicad streams add`"
        raise UnknownStream(f"there is no stream {name[:80]!r}; the streams are: {known}")

    def follow(self, on_feed: OnFeed) -> None:
        """Have `on_feed` called for every stream that is added from now on."""
        self._followers.add(on_feed)

    def unfollow(self, on_feed: OnFeed) -> None:
        """Undo `follow`; safe to repeat."""
        self._followers.discard(on_feed)

    # --- life ---

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve the registered streams until cancelled; started once those that nobody holds back are there."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            await self._look()
            with trio.move_on_after(FIRST_READING):
                while self._pending:
                    await self._arrived.wait()
            task_status.started()
            while True:
                await trio.sleep(LOOK_INTERVAL)
                try:
                    await self._look()
                    await self._note_published()
                    await self._look_for_late_rows()
                except DatabaseError as error:  # the poller tells of the outage; here it only means "later"
                    log.debug("registry_unseen", error=str(error))

    async def _look(self) -> None:
        found = await registry.load_streams(self._db, schema=self._schema)
        for name in [*self.feeds, *self._pending]:
            served = self.feeds[name].stream if name in self.feeds else self._pending[name].stream
            current = found.get(name)
            if current is None or (current.number, current.created_at) != (served.number, served.created_at):
                self._drop(name, "it was removed")
            elif current.fault is not None:
                self._drop(name, current.fault)
            elif name in self.feeds and (current.skipped, current.max_row) != (served.skipped, served.max_row):
                self.feeds[name].renew(current)
        self._tell_of_faults({name: stream.fault for name, stream in found.items() if stream.fault})
        new = [s for name, s in found.items() if not s.fault and name not in self.feeds and name not in self._pending]
        if new:
            published = await registry.published(self._db, schema=self._schema)
            for stream in new:
                self._watch(stream, published.get(stream.name))

    def _watch(self, stream: Stream, published: Published | None) -> None:
        self._pending[stream.name] = _Pending(stream)
        self._poller.watch(
            stream.name,
            _source(stream),
            self._on_reading,
            published=None if published is None else published.position,
            per_writer=None if published is None else published.per_writer,
            writers=_writers(stream, stream.writers),
        )

    def _drop(self, name: str, why: str) -> None:
        self._poller.unwatch(name)
        self._pending.pop(name, None)
        feed = self.feeds.pop(name, None)
        if feed is not None:
            feed.end(StreamRefused(f"stream {name} is no longer served: {why}"))
            self._scopes.pop(name).cancel()
            self._counted.pop(name, None)
            log.warning("stream_dropped", stream=name, reason=why)

    def _tell_of_faults(self, faults: Mapping[str, str]) -> None:
        for name, fault in faults.items():
            if self._faulty.get(name) != fault:
                log.error("stream_faulty", stream=name, reason=fault)
        self._faulty = dict(faults)

    def _on_reading(self, name: str, reading: Reading) -> None:
        feed = self.feeds.get(name)
        if feed is not None:
            feed.on_reading(reading)
            return
        pending = self._pending[name]
        pending.reading = reading
        self._arrived.set()
        self._arrived = trio.Event()
        if reading.position is None or reading.refused is not None:
            return
        del self._pending[name]
        stream = pending.stream
        feed = Feed(
            stream,
            self._db,
            self._catchup_db,
            reading,
            schema=self._schema,
            limits=self._limits,
            troubles=self._troubles,
            writers_changed=lambda numbers: self._poller.set_writers(name, _writers(stream, numbers)),
        )
        self.feeds[name] = feed
        self._scopes[name] = trio.CancelScope()
        self._nursery.start_soon(self._serve, feed, self._scopes[name])
        log.info("stream_served", stream=name, position=reading.position, writers=sorted(feed.numbers))
        for on_feed in list(self._followers):
            on_feed(feed)

    @staticmethod
    async def _serve(feed: Feed, scope: trio.CancelScope) -> None:
        with scope:
            await feed.run()

    async def _look_for_late_rows(self) -> None:
        """Tell of rows that turned up where readers were told that nothing would (positions).

        It takes an id that was taken outside of the inserting statement: the lock-watch cannot see those.
        """
        now = trio.current_time()
        if now < self._late_at:
            return
        self._late_at = now + LATE_INTERVAL
        for name, feed in list(self.feeds.items()):
            if name in self._counted:
                after, upto, before = self._counted.pop(name)
                late = await feed.count(after, upto) - before
                if late > 0:
                    feed.late_rows += late
                    log.error(
                        "rows_below_position",
                        stream=name,
                        rows=late,
                        after=after,
                        upto=upto,
                        remedy="readers have missed them; writers that take ids ahead need --method reservation",
                    )
            upto = feed.told_upto
            after = max(upto - LATE_WINDOW, 0)
            self._counted[name] = (after, upto, await feed.count(after, upto))

    async def _note_published(self) -> None:
        """Keep what was published, for daemons that start later: they need not wait for transactions of today."""
        for name, feed in list(self.feeds.items()):
            position, per_writer = feed.positions()
            if self._noted.get(name) == (position, per_writer):
                continue
            if await registry.publish(self._db, feed.stream, position, per_writer, schema=self._schema):
                self._noted[name] = (position, per_writer)


def _source(stream: Stream) -> Source:
    match stream.method:
        case Method.LOCK_WATCH:
            return LockSource(stream.table_oid, stream.sequence_oid)
        case Method.RESERVATION:
            return ReservationSource(stream.number, stream.sequence_oid)
        case Method.POSITIONS_TABLE:
            assert stream.positions_oid is not None
            return TableSource(stream.positions_oid, stream.name)


def _writers(stream: Stream, numbers: Mapping[str, int]) -> tuple[str, ...]:
    """Who may be told apart by application_name: nobody where rows do not say whose they are."""
    return () if stream.instance_column is None else tuple(numbers)


def _why(reading: Reading | None) -> str:
    if reading is None:
        return "it was added just now; try again"
    if reading.refused is not None:
        return str(reading.refused)
    holder = reading.held_by
    if holder is None:
        return "try again"
    who = f"prepared transaction {holder.gid!r}" if holder.gid else f"pid {holder.pid} ({holder.application_name})"
    return f"{who} began before this server did and may still write; it can be served when that has ended"
