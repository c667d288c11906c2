"""Serves the registered streams: reads the registry every second, starts and ends streams, notes published positions.

A failure of one step or one stream is reported and does not stop the others. Each look at the registry compares every
field that serving a stream depends on.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

import structlog
import trio

from replicad.daemon.joined import Joined
from replicad.daemon.journal import JournalLimits
from replicad.daemon.poller import Poller
from replicad.daemon.troubles import DATABASE, Place, Troubles, keep_running
from replicad.errors import (
    DatabaseError,
    DatabaseUnavailable,
    SchemaMissing,
    StreamRefused,
    StreamWaits,
    TableReplaced,
    UnknownStream,
)
from replicad.positions.horizon import Fork
from replicad.streams.daemon_registry import DaemonRegistry
from replicad.streams.registry import GENERATION, RENEWABLE, Stream, differences
from replicad.streams.serving.audit import Audit
from replicad.streams.serving.catchups import Catchups
from replicad.streams.serving.intervals import StreamIntervals
from replicad.streams.serving.served_stream import KIND, Context, Note, ServedStream
from replicad.streams.serving.windows import Windows

REGISTRY = "registry"  # the cause of troubles with a stream's entry in the registry; also the name of this service
READERS = 30.0  # seconds between two tries to make the readers that streams lack
MANY = 250  # streams; of more, the registry is looked at less often, so that a second of looks costs the same

T = TypeVar("T")
log = structlog.get_logger()


class Publisher:
    """The streams of the registry, and those that are served; followers of all streams are called with each new one."""

    def __init__(
        self,
        registry: DaemonRegistry,
        windows: Windows,
        limits: JournalLimits,
        poller: Poller,
        troubles: Troubles,
        *,
        catchups: Catchups,
        pace: StreamIntervals = StreamIntervals(),
        deliver: bool = True,
    ) -> None:
        """`windows`: what the audit compares with. `limits`: of the journal of each stream. `deliver`: readers are sent
        back to rows that were skipped.
        """
        self._registry = registry
        self._pace = pace
        self.catchups = catchups
        self._context = Context(registry, poller, troubles, limits, catchups, self.look_at, pace)
        self.served: Mapping[str, ServedStream] = self._context.served  # now, by name
        self._troubles = troubles
        self._streams: dict[str, ServedStream] = {}
        self._faulty: dict[str, str] = {}  # registered, and why they cannot be served
        self._registry_fault: str | None = None  # why the registry cannot be read
        self._noted: dict[str, Note] = {}
        rewind = registry.rewind if deliver else None
        self.audit = Audit(windows, self.served, troubles, pace, rewind=rewind, keep=registry.keep)
        self._look = Joined(self._look_once)
        self._nursery: trio.Nursery | None = None
        self._readers_at = 0.0  # when readers that streams lack are made again at the earliest
        poller.before_polling(self._look_on_new_connection)

    # --- for sessions ---

    async def find(self, name: str, lists: Callable[[str], bool] = lambda _: True) -> ServedStream:
        """A stream that is served. For a stream that was just added, waits for its first reading.

        `lists`: whether the client may know a name. A stream whose name it may not know counts as unknown.

        Raises:
            UnknownStream: no stream of that name is registered.
            StreamRefused: it cannot be served (now); the message says why.
        """
        hidden = not lists(name)
        if hidden or name not in self._streams:
            await self._look_for(name)
        if not hidden:
            found = await self._find_served(name)
            if found is not None:
                return found
        if self._registry_fault is not None:
            raise StreamRefused(f"stream {name[:80]!r} cannot be looked up: {self._registry_fault}")
        known = ", ".join(sorted(filter(lists, self._streams))) or "none yet; add one with `replicad streams add`"
        raise UnknownStream(f"there is no stream {name[:80]!r}; the streams are: {known}")

    async def _find_served(self, name: str) -> ServedStream | None:
        """The stream; None if no stream of that name is registered. Raises StreamRefused: it cannot be served."""
        stream = self._streams.get(name)
        if stream is not None and not stream.is_served:
            with trio.move_on_after(self._pace.first_reading):
                while (stream := self._streams.get(name)) is not None and not stream.is_served:
                    if stream.obstacle is not None:
                        break
                    await stream.wait_settled()
            stream = self._streams.get(name)
        if stream is not None:
            why = self._why_waiting(stream)
            if stream.is_served and why is None:
                return stream
            raise StreamRefused(f"stream {name} cannot be served: {why or stream.reason()}")
        if name in self._faulty:
            raise StreamRefused(f"stream {name} cannot be served: {self._faulty[name]}")
        return None

    async def look_at(self, name: str) -> None:
        """Read the registry, since another daemon may have found a fork first; wait until the fork is handled.

        Raises:
            StreamRefused: the registry cannot be read.
        """
        await self._look_for(name)
        stream = self._streams.get(name)
        if stream is not None:
            with trio.move_on_after(self._pace.ahead):
                await stream.wait_taken_over()

    async def use(self, name: str, lists: Callable[[str], bool], use: Callable[[ServedStream], Awaitable[T]]) -> T:
        """The result of `use` with the stream of that name; `lists` as in `find`. Where `use` has found that the table
        was replaced before the registry was looked at, it is called again after a look, for `pace.ahead` seconds.
        """
        began = trio.current_time()
        while True:
            stream = await self.find(name, lists)
            try:
                return await use(stream)
            except TableReplaced as error:
                if trio.current_time() >= began + self._pace.ahead:
                    raise StreamRefused(f"stream {name} cannot be served now: {error}") from error
            await self.look_at(name)
            await trio.sleep(self._pace.look_pause)

    def waiting(self) -> dict[str, StreamWaits]:
        """The streams that do not advance or are not served, with the reasons, for clients that follow all streams."""
        reasons = {name: why for name, s in self._streams.items() if (why := self._why_waiting(s)) is not None}
        return {
            name: StreamWaits(f"stream {name} does not move: {why}")
            for name, why in sorted({**self._faulty, **reasons}.items())
        }

    def follow(self, on_served: Callable[[ServedStream], None]) -> None:
        """Call `on_served` for every stream that is added from now on."""
        self._context.followers.add(on_served)

    def unfollow(self, on_served: Callable[[ServedStream], None]) -> None:
        """Undo `follow`; safe to repeat."""
        self._context.followers.discard(on_served)

    def _why_waiting(self, stream: ServedStream) -> str | None:
        """Why a stream does not advance: its own obstacle, or a trouble with the database server.

        An outage does not count: the rows in the journal can be read, and the others follow when it is over.
        """
        if stream.obstacle is not None:
            return stream.obstacle
        whole = [t for t in self._troubles.of(DATABASE, DATABASE) if t.code != DatabaseUnavailable.code]
        return whole[0].reason if whole else None

    # --- for figures ---

    @property
    def running(self) -> bool:
        """Whether `run` runs; False while it is restarted after a failure."""
        return self._nursery is not None

    @property
    def streams(self) -> Mapping[str, ServedStream]:
        """The registered streams that can be served, by name."""
        return self._streams

    @property
    def faulty(self) -> Mapping[str, str]:
        """The registered streams that cannot be served, and why."""
        return self._faulty

    @property
    def registry_fault(self) -> str | None:
        """Why the registry cannot be read; None if it can."""
        return self._registry_fault

    def why_not_served(self, stream: ServedStream) -> str | None:
        """Why a stream is not served, or does not advance. None: it is served."""
        return self._why_waiting(stream) or (None if stream.is_served else stream.reason())

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
                    for stream in list(self._streams.values()):
                        await stream.wait_settled()
                task_status.started()
                nursery.start_soon(self._look_when_trouble_begins)
                audit = self.audit.run
                nursery.start_soon(keep_running, audit, "service", "late_rows", self._troubles, self._pace.restarts)
                look_at = 0.0
                while True:
                    await trio.sleep(self._pace.look)
                    if trio.current_time() >= look_at:
                        await self._look_contained()
                        many = max(1.0, len(self._streams) / MANY)
                        look_at = trio.current_time() + (many - 0.5) * self._pace.look
                    troubled = self._troubles.names(KIND)
                    for name, stream in list(self._streams.items()):
                        if stream.is_obstructed or name in troubled:
                            stream.report_obstacle()  # also where the look has failed
                        if stream.is_served:
                            stream.tidy()
                    await self._note_published()
        finally:
            self._nursery = None
            with trio.move_on_after(self._pace.last_note) as scope:
                scope.shield = True
                await self._note_published()  # so that a restart of Postgres until the next start rewinds nothing
            if scope.cancelled_caught:
                log.warning("positions_not_noted", waited_s=self._pace.last_note)
            for stream in self._streams.values():
                stream.stop("this server stops serving streams")
            self._streams.clear()

    async def _look_when_trouble_begins(self) -> None:
        """Read the registry at once when a stream's trouble begins: its entry may have changed."""
        known: set[Place] = set()
        changed = self._troubles.next_change()
        while True:
            await changed.wait()
            changed = self._troubles.next_change()  # before reading the troubles, so that no change is missed
            now = {trouble.place for trouble in self._troubles.current() if trouble.place.kind == KIND}
            begun = {place for place in now - known if place.cause != REGISTRY}
            for name in {place.name for place in known ^ now} & self._streams.keys():
                self._streams[name].report_obstacle()
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
            for name in list(self._streams):
                self._end(name, f"the registry of streams cannot be read after a reconnection to Postgres: {error}")

    async def _look_once(self) -> None:
        """Compare the registry with the served streams; start, renew and end streams that differ."""
        noted = {name: (note[1], note[0].epoch) for name, note in self._noted.items()}  # the registry must have it
        try:
            found = await self._load_streams()
            fresh = {name for name, stream in found.items() if self._is_new(stream)}
            published = await self._registry.published() if fresh else {}
            lineages = await self._registry.lineages() if fresh else {}
        except SchemaMissing as error:
            self._registry_fault = str(error)
            for stream in self._streams.values():
                stream.on_registry_fault(self._registry_fault)
            raise
        self._registry_fault = None
        for name, stream in list(self._streams.items()):
            current = found.get(name)
            if current is None:
                self._end(name, "it was removed")
                continue
            at, epoch = noted.get(name, (0, ""))
            missing = epoch == current.epoch and (current.noted is None or current.noted < at)
            if stream.knows(current) and not missing:
                continue
            if (why := _why_to_end(stream, current)) is not None:
                self._end(name, why)
            else:
                stream.compare(current)
                if missing:
                    stream.fork(Fork("restored"))  # the note is missing, so rows may be missing too
                stream.on_registered(current.writers.keys())
        self._report_faults(found)
        for name in fresh & lineages.keys() - self._streams.keys():
            if self._nursery is not None and found[name].fault is None:
                stream = ServedStream(self._context, found[name], lineages[name], published.get(name))
                self._streams[name] = stream
                stream.compare(found[name])
                self._nursery.start_soon(stream.run)

    async def _load_streams(self) -> Mapping[str, Stream]:
        """The registry. For a stream whose generation is no longer valid, begins the next one."""
        obstructed = {name for name, stream in self._streams.items() if stream.is_obstructed}
        found = await self._registry.look(self._troubles.names(KIND) | self._faulty.keys() | obstructed)
        if trio.current_time() >= self._readers_at and any(stream.lacks_reader for stream in found.values()):
            self._readers_at = trio.current_time() + READERS
            await self._registry.ensure_readers()
            found = await self._registry.look()
        if all(stream.continues or stream.fault is not None for stream in found.values()):
            return found
        await self._registry.continue_streams()
        return await self._registry.look()

    def _is_new(self, found: Stream) -> bool:
        stream = self._streams.get(found.name)
        return stream is None or (not stream.knows(found) and _why_to_end(stream, found) is not None)

    def _end(self, name: str, why: str) -> None:
        self._streams.pop(name).stop(why)
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
        for name, stream in list(self._streams.items()):
            note = stream.note()
            if note is None or self._noted.get(name) is note:
                continue
            with self._troubles.contain(KIND, name, "note"):
                if await self._registry.publish(*note):
                    self._noted[name] = note


def _why_to_end(stream: ServedStream, found: Stream) -> str | None:
    """Why a stream cannot be renewed in place; None if it can (other names, another generation)."""
    if found.fault is not None:
        return found.fault
    renewable = RENEWABLE if found.epoch == stream.stream.epoch else RENEWABLE | GENERATION
    if lasting := differences(stream.stream, found) - renewable:
        return f"its registration or table was replaced (changed: {', '.join(sorted(lasting))}); it is served again"
    return stream.over
