"""Serves the registered streams: reads the registry every second, starts and ends streams, notes published positions.

A failure of one step or one stream is reported and does not stop the others. Each look at the registry compares every
field of a stream that its feed depends on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import structlog
import trio

from replicad.daemon.joined import Joined
from replicad.daemon.journal import JournalLimits
from replicad.daemon.poller import Poller
from replicad.daemon.supervision import keep_running
from replicad.daemon.troubles import DATABASE, Place, Troubles
from replicad.errors import (
    DatabaseError,
    DatabaseUnavailable,
    SchemaMissing,
    StreamRefused,
    StreamWaits,
    UnknownStream,
)
from replicad.positions.horizon import Fork
from replicad.streams.registry import GENERATION, RENEWABLE, Stream, differences
from replicad.streams.serving.audit import Audit
from replicad.streams.serving.feed import Feed
from replicad.streams.serving.intervals import StreamIntervals
from replicad.streams.serving.served_stream import KIND, Context, Note, OnFeed, Serving
from replicad.streams.serving.windows import Windows
from replicad.streams.store import PostgresStore

REGISTRY = "registry"  # the cause of troubles with a stream's entry in the registry; also the name of this service
READERS = 30.0  # seconds between two tries to make the readers that streams lack
MANY = 250  # streams; of more, the registry is looked at less often, so that a second of looks costs the same

log = structlog.get_logger()


class Publisher:
    """The feeds by stream name; followers of all streams are called with each new one."""

    def __init__(
        self,
        store: PostgresStore,
        windows: Windows,
        limits: JournalLimits,
        poller: Poller,
        troubles: Troubles,
        *,
        pace: StreamIntervals = StreamIntervals(),
        deliver: bool = True,
    ) -> None:
        """`windows`: what the audit compares with. `limits`: of the journal of each stream. `deliver`: readers are sent
        back to rows that were skipped.
        """
        self._store = store
        self._pace = pace
        self._context = Context(store, poller, troubles, limits, pace)
        self.feeds: Mapping[str, Feed] = self._context.feeds
        self._troubles = troubles
        self._servings: dict[str, Serving] = {}
        self._faulty: dict[str, str] = {}  # registered, and why they cannot be served
        self._registry_fault: str | None = None  # why the registry cannot be read
        self._noted: dict[str, Note] = {}
        rewind = store.rewind if deliver else None
        self.audit = Audit(windows, self.feeds, troubles, pace, rewind=rewind, keep=store.keep)
        self._look = Joined(self._look_once)
        self._nursery: trio.Nursery | None = None
        self._readers_at = 0.0  # when readers that streams lack are made again at the earliest
        poller.before_polling(self._look_on_new_connection)

    # --- for sessions ---

    async def find(self, name: str, lists: Callable[[str], bool] = lambda _: True) -> Feed:
        """The feed of a stream. For a stream that was just added, waits for its first reading.

        `lists`: whether the client may know a name. A stream whose name it may not know counts as unknown.

        Raises:
            UnknownStream: no stream of that name is registered.
            StreamRefused: it cannot be served (now); the message says why.
        """
        hidden = not lists(name)
        if hidden or name not in self._servings:
            await self._look_for(name)
        if not hidden:
            found = await self._find_served(name)
            if found is not None:
                return found
        if self._registry_fault is not None:
            raise StreamRefused(f"stream {name[:80]!r} cannot be looked up: {self._registry_fault}")
        known = ", ".join(sorted(filter(lists, self._servings))) or "none yet; add one with `replicad streams add`"
        raise UnknownStream(f"there is no stream {name[:80]!r}; the streams are: {known}")

    async def _find_served(self, name: str) -> Feed | None:
        """The feed; None if no stream of that name is registered. Raises StreamRefused: it cannot be served."""
        with trio.move_on_after(self._pace.first_reading):
            while (serving := self._servings.get(name)) is not None and serving.feed is None:
                if serving.obstacle is not None:
                    break
                await serving.wait_settled()
        serving = self._servings.get(name)
        if serving is not None:
            why = self._why_waiting(serving)
            if serving.feed is not None and why is None:
                return serving.feed
            raise StreamRefused(f"stream {name} cannot be served: {why or serving.reason()}")
        if name in self._faulty:
            raise StreamRefused(f"stream {name} cannot be served: {self._faulty[name]}")
        return None

    async def look_at(self, name: str) -> None:
        """Read the registry, since another daemon may have found a fork first; wait until the fork is handled.

        Raises:
            StreamRefused: the registry cannot be read.
        """
        await self._look_for(name)
        serving = self._servings.get(name)
        if serving is not None:
            with trio.move_on_after(self._pace.ahead):
                await serving.wait_taken_over()

    def is_forked(self, name: str) -> bool:
        """Whether the stream's history has forked and the next generation is not taken over yet."""
        serving = self._servings.get(name)
        return serving is not None and serving.forked

    def waiting(self) -> dict[str, StreamWaits]:
        """The streams that do not advance or are not served, with the reasons, for clients that follow all streams."""
        reasons = {name: why for name, s in self._servings.items() if (why := self._why_waiting(s)) is not None}
        return {
            name: StreamWaits(f"stream {name} does not move: {why}")
            for name, why in sorted({**self._faulty, **reasons}.items())
        }

    def follow(self, on_feed: OnFeed) -> None:
        """Call `on_feed` for every stream that is added from now on."""
        self._context.followers.add(on_feed)

    def unfollow(self, on_feed: OnFeed) -> None:
        """Undo `follow`; safe to repeat."""
        self._context.followers.discard(on_feed)

    def _why_waiting(self, serving: Serving) -> str | None:
        """Why a stream does not advance: its own obstacle, or a trouble with the database server.

        An outage does not count: the rows in the journal can be read, and the others follow when it is over.
        """
        if serving.obstacle is not None:
            return serving.obstacle
        whole = [t for t in self._troubles.of(DATABASE, DATABASE) if t.code != DatabaseUnavailable.code]
        return whole[0].reason if whole else None

    # --- for figures ---

    @property
    def running(self) -> bool:
        """Whether `run` runs; False while it is restarted after a failure."""
        return self._nursery is not None

    @property
    def servings(self) -> Mapping[str, Serving]:
        """The registered streams that can be served, by name."""
        return self._servings

    @property
    def faulty(self) -> Mapping[str, str]:
        """The registered streams that cannot be served, and why."""
        return self._faulty

    @property
    def registry_fault(self) -> str | None:
        """Why the registry cannot be read; None if it can."""
        return self._registry_fault

    def why_not_served(self, serving: Serving) -> str | None:
        """Why a stream is not served, or does not advance. None: it is served."""
        return self._why_waiting(serving) or (serving.reason() if serving.feed is None else None)

    # --- life ---

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve the registered streams until cancelled. Reports `started` when each is served or has an obstacle.

        May be run again after a failure: it begins with no stream.
        """
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                await self._look()
                with trio.move_on_after(self._pace.first_reading):
                    for serving in list(self._servings.values()):
                        await serving.wait_settled()
                task_status.started()
                nursery.start_soon(self._look_when_trouble_begins)
                audit = self.audit.run
                nursery.start_soon(keep_running, audit, "service", "late_rows", self._troubles, self._pace.restarts)
                look_at = 0.0
                while True:
                    await trio.sleep(self._pace.look)
                    if trio.current_time() >= look_at:
                        await self._look_contained()
                        many = max(1.0, len(self._servings) / MANY)
                        look_at = trio.current_time() + (many - 0.5) * self._pace.look
                    troubled = self._troubles.names(KIND)
                    for name, serving in list(self._servings.items()):
                        if serving.is_obstructed or name in troubled:
                            serving.report_obstacle()  # also where the look has failed
                        if serving.feed is not None:
                            serving.feed.tidy()
                    await self._note_published()
        finally:
            self._nursery = None
            with trio.move_on_after(self._pace.last_note) as scope:
                scope.shield = True
                await self._note_published()  # so that a restart of Postgres until the next start rewinds nothing
            if scope.cancelled_caught:
                log.warning("positions_not_noted", waited_s=self._pace.last_note)
            for serving in self._servings.values():
                serving.stop("this server stops serving streams")
            self._servings.clear()

    async def _look_when_trouble_begins(self) -> None:
        """Read the registry at once when a stream's trouble begins: its entry may have changed."""
        known: set[Place] = set()
        changed = self._troubles.next_change()
        while True:
            await changed.wait()
            changed = self._troubles.next_change()  # before reading the troubles, so that no change is missed
            now = {trouble.place for trouble in self._troubles.current() if trouble.place.kind == KIND}
            begun = {place for place in now - known if place.cause != REGISTRY}
            for name in {place.name for place in known ^ now} & self._servings.keys():
                self._servings[name].report_obstacle()
            known = set(now)
            if begun:
                await self._look_contained()
                await trio.sleep(self._pace.look_pause)

    # --- the registry ---

    async def _look_contained(self) -> None:
        with self._troubles.contain("service", REGISTRY, "look"):
            await self._look()

    async def _look_for(self, name: str) -> None:
        """Read the registry for a client; raises StreamRefused if that fails."""
        try:
            await self._look()
        except DatabaseError as error:
            raise StreamRefused(f"stream {name[:80]!r} cannot be looked up now: {error}") from error

    async def _look_on_new_connection(self) -> None:
        """Read the registry first: a new connection may lead to another server or a restored database."""
        if self._nursery is None:
            return
        try:
            await self._look()
        except DatabaseUnavailable:
            raise
        except Exception as error:  # noqa: BLE001 - reported; tubes go on, streams continue after the next look
            self._troubles.fail("service", REGISTRY, "look", error)
            for name in list(self._servings):
                self._end(name, f"the registry of streams cannot be read after a reconnection to Postgres: {error}")

    async def _look_once(self) -> None:
        """Compare the registry with the served streams; start, renew and end streams that differ."""
        noted = {name: (note[1], note[0].epoch) for name, note in self._noted.items()}  # the registry must have it
        try:
            found = await self._load_streams()
            fresh = {name for name, stream in found.items() if self._is_new(stream)}
            published = await self._store.published() if fresh else {}
            lineages = await self._store.lineages() if fresh else {}
        except SchemaMissing as error:
            self._registry_fault = str(error)
            for serving in self._servings.values():
                serving.on_registry_fault(self._registry_fault)
            raise
        self._registry_fault = None
        for name, serving in list(self._servings.items()):
            current = found.get(name)
            if current is None:
                self._end(name, "it was removed")
                continue
            at, epoch = noted.get(name, (0, ""))
            missing = epoch == current.epoch and (current.noted is None or current.noted < at)
            if serving.knows(current) and not missing:
                continue
            if (why := _why_to_end(serving, current)) is not None:
                self._end(name, why)
            else:
                serving.compare(current)
                if missing:
                    serving.fork(Fork("restored"))  # the note is missing, so rows may be missing too
                serving.on_registered(current.writers.keys())
        self._report_faults(found)
        for name in fresh & lineages.keys() - self._servings.keys():
            if self._nursery is not None and found[name].fault is None:
                serving = Serving(self._context, found[name], lineages[name], published.get(name))
                self._servings[name] = serving
                serving.compare(found[name])
                self._nursery.start_soon(serving.run)

    async def _load_streams(self) -> Mapping[str, Stream]:
        """The registry. For a stream whose generation is no longer valid, begins the next one."""
        obstructed = {name for name, serving in self._servings.items() if serving.is_obstructed}
        found = await self._store.load_streams(self._troubles.names(KIND) | self._faulty.keys() | obstructed)
        if trio.current_time() >= self._readers_at and any(stream.lacks_reader for stream in found.values()):
            self._readers_at = trio.current_time() + READERS
            await self._store.ensure_readers()
            found = await self._store.load_streams()
        if all(stream.continues or stream.fault is not None for stream in found.values()):
            return found
        await self._store.continue_streams()
        return await self._store.load_streams()

    def _is_new(self, stream: Stream) -> bool:
        serving = self._servings.get(stream.name)
        return serving is None or (not serving.knows(stream) and _why_to_end(serving, stream) is not None)

    def _end(self, name: str, why: str) -> None:
        self._servings.pop(name).stop(why)
        self._noted.pop(name, None)

    def _report_faults(self, found: Mapping[str, Stream]) -> None:
        faults = {name: stream.fault for name, stream in found.items() if stream.fault is not None}
        for name, fault in faults.items():
            self._troubles.begin(KIND, name, REGISTRY, fault, code=StreamRefused.code)
        for name in self._faulty.keys() - faults.keys():
            self._troubles.end(KIND, name, REGISTRY)
        self._faulty = faults

    # --- published positions ---

    async def _note_published(self) -> None:
        """Note the published positions, so that a daemon that starts later need not wait for open transactions."""
        for name, serving in list(self._servings.items()):
            note = serving.note()
            if note is None or self._noted.get(name) is note:
                continue
            with self._troubles.contain(KIND, name, "note"):
                if await self._store.publish(*note):
                    self._noted[name] = note


def _why_to_end(serving: Serving, found: Stream) -> str | None:
    """Why a stream cannot be renewed in place; None if it can (other names, another generation)."""
    if found.fault is not None:
        return found.fault
    renewable = RENEWABLE if found.epoch == serving.stream.epoch else RENEWABLE | GENERATION
    if lasting := differences(serving.stream, found) - renewable:
        return f"its registration or table was replaced (changed: {', '.join(sorted(lasting))}); it is served again"
    return serving.over
