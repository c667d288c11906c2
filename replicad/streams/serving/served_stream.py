"""One registered stream in this daemon, as long as the registry has it.

First it is watched; when its first position is known, a feed serves it. A failure ends only this feed: its readers get
the reason, the trouble is reported, and after a growing pause the stream is watched and served again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field, replace
from operator import is_

import structlog
import trio

from replicad.daemon.journal import JournalLimits
from replicad.daemon.poller import Poller
from replicad.daemon.supervision import keep_running
from replicad.daemon.troubles import Troubles
from replicad.errors import ReplicadError, StreamRefused, StreamWaits
from replicad.groups import sole_leaf
from replicad.positions.horizon import Fork, Reading
from replicad.protocol.commands import Error
from replicad.protocol.tokens import Vector
from replicad.streams import registry
from replicad.streams.lineage import SHARES_NOTHING, Lineage
from replicad.streams.registry import Published, Stream, differences
from replicad.streams.serving.feed import FOLLOW, Feed
from replicad.streams.serving.intervals import StreamIntervals
from replicad.streams.store import PostgresStore

MARKS = 64  # kept for each stream; when there are more, two neighbours become one


class Lag:
    """For how long ids of a stream have been waiting, and its position has been held back: from readings, without SQL.

    It remembers when the sequence was first seen at which value.
    """

    __slots__ = ("_held", "_marks", "_moved_at", "_position")

    def __init__(self) -> None:
        self._marks: deque[tuple[float, int]] = deque()  # (when, last value), both rising
        self._position: int | None = None
        self._moved_at = 0.0
        self._held = False

    def observe(self, reading: Reading, now: float, published: Callable[[], int | None]) -> None:
        """Take a reading. `published` returns up to where readers were sent all rows; it is seldom called."""
        last, marks = reading.last_value, self._marks
        if reading.position != self._position or not self._held:
            self._position, self._moved_at = reading.position, now
        self._held = reading.held_by is not None
        if last is None or (marks and marks[-1][1] == last):
            return
        if marks and last < marks[-1][1]:  # the sequence was set back
            marks.clear()
        marks.append((now, last))
        if len(marks) > MARKS:
            self._drop(published())
        if len(marks) > MARKS:
            kept = list(marks)  # an earlier time with a later value: the lag is never shown too short
            marks.clear()
            marks.extend((kept[i][0], kept[min(i + 1, len(kept) - 1)][1]) for i in range(0, len(kept), 2))

    def seconds(self, published: int | None, now: float) -> float:
        """Time since the first id above `published` was seen; 0 if there is none. None: nothing is published."""
        self._drop(published)
        return max(0.0, now - self._marks[0][0]) if self._marks else 0.0

    def held_seconds(self, now: float) -> float | None:
        """For how long the position has not moved while it is held back; None if it is not held back."""
        return max(0.0, now - self._moved_at) if self._held else None

    def _drop(self, published: int | None) -> None:
        while published is not None and self._marks and self._marks[0][1] <= published:
            self._marks.popleft()


def waits_line(name: str, obstacle: str) -> bytes:
    """The ERROR line for readers of a stream that does not advance now."""
    text = f"{StreamWaits.code}: stream {name} does not move: {obstacle}; the subscription stays and goes on afterwards"
    return Error(" ".join(text.split())).render().encode() + b"\n"


def end_of(name: str, error: BaseException) -> ReplicadError:
    """The error for readers of a feed that ended by this exception."""
    cause = sole_leaf(error)
    if isinstance(cause, ReplicadError):
        return StreamRefused(f"stream {name} is served again: {cause} Reconnect and resume from your token.")
    return StreamRefused(f"stream {name} is served again after an internal error; reconnect and resume from your token")


def why_unknown(reading: Reading | None) -> str:
    """Why there is no first position."""
    if reading is None:
        return "it was added just now; try again"
    holder = reading.held_by
    if holder is None:
        return "it has no position yet; try again"
    who = f"prepared transaction {holder.gid!r}" if holder.gid else f"pid {holder.pid} ({holder.application_name})"
    return (
        f"it has no position yet: {who} began before this server did and may still write; it can be served when that "
        "has ended"
    )


KIND = "stream"  # of the troubles
ELSEWHERE = Fork("another daemon")  # it has begun a generation, as a look at the registry has shown
FORK = "fork"  # the cause of a trouble that keeps a stream from going on in another generation
STALLS = ("copy", FOLLOW, FORK)  # the causes of troubles during which a feed sends nothing and tries again
WAITS = "position"  # the cause of a trouble that stops a stream while its readers stay connected

log = structlog.get_logger()
OnFeed = Callable[[Feed], None]
Note = tuple[Stream, int, Mapping[str, int]]  # a stream, its position, and the positions of its writers


@dataclass(frozen=True, slots=True)
class Context:
    """What all servings share. `feeds`: the streams served now, by name; each Serving sets and removes its own entry.
    `followers` are called with each new feed.
    """

    store: PostgresStore
    poller: Poller
    troubles: Troubles
    limits: JournalLimits
    pace: StreamIntervals = StreamIntervals()
    feeds: dict[str, Feed] = field(default_factory=dict)
    followers: set[OnFeed] = field(default_factory=set)


class Serving:
    """One stream. `run` is its task; the other methods never wait and never raise."""

    def __init__(self, context: Context, stream: Stream, lineage: Lineage, published: Published | None) -> None:
        self.stream = stream  # as it was registered when serving it began, or was renewed
        self.lineage = lineage
        self.name = stream.name
        self.feed: Feed | None = None
        self.reading: Reading | None = None  # the last one
        self.over: str | None = None  # why it cannot go on; the next look at the registry ends it
        self.lag = Lag()
        self._context = context
        self._denied = stream.denied
        self._compared: Stream | None = None  # the entry of the registry that was taken over completely
        self._registry_fault: str | None = None  # why the registry cannot be read
        self._published = None if published is None else (published.position, dict(published.per_writer))
        self._note: Note | None = None  # the last one; the present one if there is no feed
        self._note_of: tuple[object, ...] = ()  # what it was made from
        self._reported: str | None = None  # the obstacle that was reported last
        self._watching = False
        self._fork: Fork | None = None  # a fork that was found and not handled yet
        self._forked = trio.Event()  # set when there is one
        self._changed = trio.Event()
        self._scope = trio.CancelScope()

    # --- state ---

    @property
    def obstacle(self) -> str | None:
        """Why the stream does not advance now though it is registered; None if nothing stops it."""
        if self._registry_fault is not None:
            return self._registry_fault
        if self._denied is not None:
            return self._denied
        if self.reading is not None and self.reading.refused is not None:
            return str(self.reading.refused)
        if self.feed is not None and self.feed.strayed is not None:
            return self.feed.strayed
        return self._failure()

    def _failure(self) -> str | None:
        """Why the feed has been failing for longer than `stall_grace`; None if it is not."""
        lasting = trio.current_time() - self._context.pace.stall_grace
        failing = [
            one
            for one in self._context.troubles.of(KIND, self.name)
            if one.place.cause in STALLS and one.since <= lasting
        ]
        return failing[0].reason if failing else None

    @property
    def published(self) -> int | None:
        """The linear position that was published last; None if there was none."""
        if self.feed is not None:
            return self.feed.positions()[0]
        return None if self._published is None else self._published[0]

    async def wait_settled(self) -> None:
        """Wait until it is served or has an obstacle."""
        while self.feed is None and self.obstacle is None:
            await self._changed.wait()

    @property
    def forked(self) -> bool:
        """Whether history has forked and the next generation is not taken over yet."""
        return self._fork is not None

    async def wait_taken_over(self) -> None:
        """Wait until no fork is left to be handled."""
        while self._fork is not None:
            await self._changed.wait()

    def reason(self) -> str:
        """Why the stream is not served yet."""
        failed = self._context.troubles.why(KIND, self.name)
        return self.obstacle or failed or why_unknown(self.reading)

    @property
    def is_obstructed(self) -> bool:
        """Whether an obstacle has been reported and is not over."""
        return self._reported is not None

    # --- for the publisher ---

    async def run(self) -> None:
        """Serve the stream until `stop`, or cancelled."""
        with self._scope:
            await keep_running(self._serve, KIND, self.name, self._context.troubles, self._context.pace.restarts)

    def stop(self, why: str) -> None:
        """End it at once: readers get the reason, and its troubles and watch are removed."""
        had_feed = self.feed is not None
        self._close(StreamRefused(f"stream {self.name} is no longer served: {why}"))
        self._scope.cancel()
        self._context.troubles.forget(KIND, self.name)
        self._reported = None
        if had_feed:
            log.warning("stream_dropped", stream=self.name, reason=why)

    def note(self) -> Note | None:
        """Its published position; None before the first position. The same object until something changes."""
        feed, known = self.feed, self._note
        if feed is None:
            return known
        made_from = feed.published_from()
        if known is not None and len(made_from) == len(self._note_of) and all(map(is_, made_from, self._note_of)):
            return known
        self._note_of = made_from
        positions = feed.positions()
        if (
            known is None
            or known[1:] != positions
            or known[0].writers != feed.numbers
            or known[0].epoch != feed.stream.epoch
        ):
            self._note = (replace(feed.stream, writers=feed.numbers), *positions)
        return self._note

    def compare(self, found: Stream) -> None:
        """Take the registry's present entry: changed names and row expression are used from the next read on.

        If another generation has begun, nothing more is published before it is taken over.
        """
        if found.epoch != self.stream.epoch:
            self.fork(ELSEWHERE)
        elif changed := differences(self.stream, found):
            log.info("stream_renewed", stream=self.name, changed=sorted(changed))
            self.stream = found
            if self.feed is not None:
                self.feed.renew(found)
                if "identity" in changed and self._fork is None:  # the watch compares other names from now on
                    self._go_on()
        if self._fork is not None:
            self._forked.set()  # it is tried again, whatever was in the way
        self._denied = found.denied
        self._registry_fault = None
        self._compared = found if self.feed is not None and self._fork is None else None
        self.report_obstacle()

    def knows(self, found: Stream) -> bool:
        """Whether this very entry of the registry was compared before, and nothing is left to be done for it."""
        if found is not self._compared or found.epoch != self.stream.epoch:
            return False
        return self._fork is None and self.over is None and self._registry_fault is None

    def on_registered(self, writers: Set[str]) -> None:
        """Take the names of the registered writers, without retired ones; none while history may have forked.

        A restored registry does not know all writers. They are not retired: their rows would be read again, from the
        new history, before readers are informed of it.
        """
        if self.feed is not None and self._fork is None:
            self.feed.on_registered(writers)

    def fork(self, fork: Fork) -> None:
        """History may have forked: publish no position until the shared position is known."""
        if self._fork is None or self._fork.reason not in SHARES_NOTHING:  # else it covers this one
            self._fork = fork
        self._unwatch()
        self._forked.set()

    def on_registry_fault(self, why: str) -> None:
        """Report that the registry cannot be read, so that the stream may have been changed or removed."""
        self._registry_fault = why
        self.report_obstacle()

    # --- inside ---

    async def _serve(self) -> None:
        """Watch, wait for the first position, then run a feed until it fails."""
        failure: ReplicadError = StreamRefused(f"stream {self.name} is no longer served: this server stops serving it")
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._handle_forks)
                self._watch()
                reading = await self._first_position()
                await trio.lowlevel.checkpoint_if_cancelled()  # a stopped one must not be found by anybody
                feed = self.feed = self._context.feeds[self.name] = self._make_feed(reading)
                self._wake()
                log.info("stream_served", stream=self.name, position=reading.position, writers=len(feed.numbers))
                for on_feed in list(self._context.followers):
                    with self._context.troubles.contain("service", "subscriptions", "join"):
                        on_feed(feed)
                await feed.run()
        except BaseExceptionGroup as group:
            failed, _ = group.split(Exception)
            if failed is not None:
                failure = end_of(self.name, failed)
            raise
        finally:
            self._close(failure)

    def _watch(self) -> None:
        if self._scope.cancel_called:
            return  # stopped; its tasks run on to their next wait, while another Serving may watch this stream already
        self.reading = None
        position, per_writer = self._published or (None, None)
        numbers = self.stream.writers if self.feed is None else self.feed.numbers
        self._watching = True
        self._context.poller.watch(
            self.name,
            registry.horizon_source(self.stream),
            self._on_reading,
            published=position,
            per_writer=per_writer,
            writers=_writers(self.stream, numbers),
            file=self.stream.sequence_file,
        )
        if self._fork is not None:
            self._unwatch()  # the fork is handled first

    def _unwatch(self) -> None:
        if self._watching:
            self._watching = False
            self._context.poller.unwatch(self.name)

    async def _handle_forks(self) -> None:
        """Handle forks until cancelled: begin a generation, or adopt a generation that another daemon began."""
        try:
            await self._handle_each_fork()
        finally:
            self._context.troubles.end(KIND, self.name, FORK)

    async def _handle_each_fork(self) -> None:
        if self._fork is not None:
            self._forked.set()
        while True:
            await self._forked.wait()
            self._forked = trio.Event()
            try:
                await self._take_over()
            except ReplicadError as error:
                self._context.troubles.fail(KIND, self.name, FORK, error)
                await trio.sleep(self._context.pace.follow_retry)
                self._forked.set()
            else:
                self._context.troubles.end(KIND, self.name, FORK)

    async def _take_over(self) -> None:
        """Continue in the present generation, from the position that it shares with the published history."""
        store, fork, before = self._context.store, self._fork, self.stream
        if fork is None:
            return
        if fork is not ELSEWHERE:
            await store.fork(before, fork.reason)
        lineage = (await store.lineages(self.name)).get(self.name)
        if lineage is not None and not lineage.knows(before.epoch):
            # The list was restored to a time before our generation, and the rows with it.
            await store.fork(replace(before, epoch=lineage.present.id), "restored")
            lineage = (await store.lineages(self.name)).get(self.name)
        elif (
            lineage is not None
            and fork is not ELSEWHERE
            and lineage.present.id != before.epoch  # else the change was undone, or a user has to say what it was
            and not lineage.has_answer(before.epoch, fork.reason)
        ):
            # Another daemon began a generation meanwhile, for something else.
            await store.fork(replace(before, epoch=lineage.present.id), fork.reason)
            self._forked.set()
            return
        found = (await store.load_streams()).get(self.name)
        if self._fork is not fork or lineage is None or found is None or found.fault is not None:
            return  # there is another fork, or the next look at the registry ends this stream
        if found.epoch != lineage.present.id:
            self._forked.set()  # another generation has begun meanwhile
            return
        if found.epoch == before.epoch:  # the look was older than the generation that was taken over since
            self._go_on()
            return
        shared = lineage.shared(before.epoch) or lineage.floor
        if self.feed is not None and not await self.feed.has_same_writers():
            self.over = "its writers have other numbers in the restored database; it is served again from the start"
            return
        self._adopt(found, lineage, shared)

    def _adopt(self, found: Stream, lineage: Lineage, shared: Vector) -> None:
        numbers = found.writers if self.feed is None else self.feed.numbers
        self.stream, self.lineage, self._fork = found, lineage, None
        self._published = (shared.minimum, {name: shared.at(number) for name, number in numbers.items()})
        log.warning(
            "stream_forked",
            stream=self.name,
            reason=lineage.present.reason,
            shared=str(shared),
            generation=lineage.present.id,
            remedy="readers are sent back to that position and get the present rows",
        )
        if self.feed is not None:
            self.feed.adopt(found, lineage, shared)
        self._watch()
        self._wake()

    def _go_on(self) -> None:
        """There was no fork."""
        self._fork = None
        if self.feed is not None:
            self._published = self.feed.positions()
        self._watch()
        self._wake()

    async def _first_position(self) -> Reading:
        while self.reading is None or self.reading.position is None or self.reading.refused is not None:
            await self._changed.wait()
        return self.reading

    def _make_feed(self, reading: Reading) -> Feed:
        context = self._context
        return Feed(
            self.stream,
            self.lineage,
            context.store,
            reading,
            limits=context.limits,
            troubles=context.troubles,
            writers_changed=self._writers_changed,
            pace=context.pace,
        )

    def _writers_changed(self, numbers: Mapping[str, int]) -> None:
        if self._watching:
            self._context.poller.set_writers(self.name, _writers(self.stream, numbers))

    def _on_reading(self, _: str, reading: Reading) -> float:
        self.reading = reading
        self.lag.observe(reading, trio.current_time(), lambda: self.published)
        if reading.fork is not None:
            self.fork(reading.fork)
        elif self.feed is None:
            self._wake()
        else:
            self.feed.on_reading(reading)
        self.report_obstacle()
        return 0.0 if self.feed is None else self.feed.gather

    def report_obstacle(self) -> None:
        """Report an obstacle when it begins, changes or ends, in the log and to the stream's readers."""
        obstacle = self.obstacle
        if obstacle == self._reported:
            return
        self._reported = obstacle
        self._wake()
        if obstacle is None:
            self._context.troubles.end(KIND, self.name, WAITS)
            return
        if obstacle == self._failure():  # reported already
            self._context.troubles.end(KIND, self.name, WAITS)
        else:
            self._context.troubles.begin(KIND, self.name, WAITS, obstacle, code=StreamWaits.code)
        if self.feed is not None:
            self.feed.send_line(waits_line(self.name, obstacle))

    def _close(self, error: ReplicadError) -> None:
        """Undo what `_serve` did; safe to repeat."""
        self._unwatch()
        feed = self.feed
        if feed is not None:
            self.note()
            self.feed = None
            self._published = feed.positions()  # so that tokens of returning readers are not ahead
            if self._context.feeds.get(self.name) is feed:
                del self._context.feeds[self.name]
            feed.end(error)
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = trio.Event()


def _writers(stream: Stream, numbers: Mapping[str, int]) -> tuple[str, ...]:
    """The writers that the horizon tells apart by application_name; none without an instance column."""
    return () if stream.instance_column is None else tuple(numbers)
