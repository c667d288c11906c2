"""One registered stream in this daemon, from the look at the registry that found it to the one that does not.

First it is watched; when its first position is known a feed serves it. What fails ends the feed alone: its readers are
told, the trouble is reported, and after a pause that grows the stream is watched and served anew. Which streams there
are is the publisher's business.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import structlog
import trio

from replicad.daemon.journal import JournalLimits
from replicad.daemon.service import Positions
from replicad.daemon.supervision import keep_running
from replicad.daemon.troubles import Troubles
from replicad.errors import ReplicadError, StreamRefused, StreamWaits
from replicad.groups import sole_leaf
from replicad.postgres.horizon import Fork, Reading
from replicad.protocol.commands import Error
from replicad.protocol.tokens import Vector
from replicad.streams import registry
from replicad.streams.lineage import Lineage
from replicad.streams.registry import Published, Stream, differences
from replicad.streams.serving.feed import FOLLOW, Feed
from replicad.streams.serving.pace import Pace
from replicad.streams.store import Store

KIND = "stream"  # of the troubles
ELSEWHERE = Fork("another daemon")  # has begun a generation, as a look has found
FORK = "fork"  # the cause of a trouble that keeps a stream from going on in another generation
STALLS = ("copy", FOLLOW, FORK)  # the causes of troubles in which a feed sends nothing and tries again
WAITS = "position"  # the cause of a trouble that keeps a stream from moving and leaves its readers connected

log = structlog.get_logger()
OnFeed = Callable[[Feed], None]
Note = tuple[Stream, int, Mapping[str, int]]  # a stream, with the numbers of its writers, and what was published of it


@dataclass(frozen=True, slots=True)
class Means:
    """What serving any stream takes. `feeds` are the streams that are served now, by name; every Serving keeps its own
    entry. `followers` are called with each new feed.
    """

    store: Store
    poller: Positions
    troubles: Troubles
    limits: JournalLimits
    pace: Pace = Pace()
    feeds: dict[str, Feed] = field(default_factory=dict)
    followers: set[OnFeed] = field(default_factory=set)


class Serving:
    """One stream. `run` is its task; the other methods never wait and never raise."""

    def __init__(self, means: Means, stream: Stream, lineage: Lineage, published: Published | None) -> None:
        self.stream = stream  # as it was registered when serving it began, or was renewed
        self.lineage = lineage
        self.name = stream.name
        self.feed: Feed | None = None
        self.reading: Reading | None = None  # the last one
        self.over: str | None = None  # why it cannot go on; the next look ends it
        self._means = means
        self._denied = stream.denied
        self._blind: str | None = None  # why the registry cannot be read
        self._published = None if published is None else (published.position, dict(published.per_writer))
        self._note: Note | None = None  # when its feed ended
        self._told: str | None = None  # the obstacle that was reported last
        self._watching = False
        self._fork: Fork | None = None  # that a reading has shown, and no generation has begun because of it
        self._forked = trio.Event()  # another generation has begun, or has to
        self._changed = trio.Event()
        self._scope = trio.CancelScope()

    # --- for whoever looks ---

    @property
    def obstacle(self) -> str | None:
        """Why the stream does not move now, though nothing of it has ended; None while it can."""
        if self._blind is not None:
            return self._blind
        if self._denied is not None:
            return self._denied
        if self.reading is not None and self.reading.refused is not None:
            return str(self.reading.refused)
        return self._failure()

    def _failure(self) -> str | None:
        """Why the feed cannot go on now, though it tries again and again."""
        lasting = trio.current_time() - self._means.pace.stall_grace
        failing = [
            one
            for one in self._means.troubles.of(KIND, self.name)
            if one.place.cause in STALLS and one.since <= lasting
        ]
        return failing[0].reason if failing else None

    async def wait_settled(self) -> None:
        """Until it is served, or it is known why it is not."""
        while self.feed is None and self.obstacle is None:
            await self._changed.wait()

    @property
    def forked(self) -> bool:
        """Whether history has forked, and the next generation is not taken over."""
        return self._fork is not None

    async def wait_taken_over(self) -> None:
        """Until it is served in the present generation, as far as that is known."""
        while self._fork is not None:
            await self._changed.wait()

    def why_not(self) -> str:
        """Why the stream is not served yet."""
        failed = self._means.troubles.why(KIND, self.name)
        return self.obstacle or failed or _why(self.reading)

    # --- for the publisher ---

    async def run(self) -> None:
        """Serve the stream until `stop`, or cancelled."""
        with self._scope:
            await keep_running(self._serve, KIND, self.name, self._means.troubles, self._means.pace.restarts)

    def stop(self, why: str) -> None:
        """End it at once: readers are told, and nothing of it is left when this returns."""
        had_feed = self.feed is not None
        self._close(StreamRefused(f"stream {self.name} is no longer served: {why}"))
        self._scope.cancel()
        self._means.troubles.forget(KIND, self.name)
        self._told = None
        if had_feed:
            log.warning("stream_dropped", stream=self.name, reason=why)

    def note(self) -> Note | None:
        """What was published of it; None while nothing was."""
        return self._note if self.feed is None else _note_of(self.feed)

    def compare(self, found: Stream) -> None:
        """A look has found the same stream. Where it has other names or other lines for its rows, go on with these.

        Where another generation has begun, nothing more is published before it is taken over.
        """
        if found.epoch != self.stream.epoch:
            self.fork(ELSEWHERE)
        elif changed := differences(self.stream, found):
            log.info("stream_renewed", stream=self.name, changed=sorted(changed))
            self.stream = found
            if self.feed is not None:
                self.feed.renew(found)
        if self._fork is not None:
            self._forked.set()  # it is tried again, whatever was in the way
        if self.feed is not None:
            self.feed.on_registered(found.writers.keys())
        self._denied = found.denied
        self._blind = None
        self.judge()

    def fork(self, fork: Fork) -> None:
        """Positions may not hold any more: none is published before it is known up to where history is shared."""
        self._fork = fork
        self._unwatch()
        self._forked.set()

    def blind(self, why: str) -> None:
        """The registry cannot be read, so it is not known whether there still is such a stream."""
        self._blind = why
        self.judge()

    # --- inside ---

    async def _serve(self) -> None:
        """Watch, wait for the first position, then run a feed until it fails."""
        failure: ReplicadError = StreamRefused(f"stream {self.name} is no longer served: this server stops serving it")
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._mind_forks)
                self._watch()
                reading = await self._first_position()
                feed = self.feed = self._means.feeds[self.name] = self._make_feed(reading)
                self._wake()
                log.info("stream_served", stream=self.name, position=reading.position, writers=len(feed.numbers))
                for on_feed in list(self._means.followers):
                    with self._means.troubles.contain("service", "subscriptions", "join"):
                        on_feed(feed)
                await feed.run()
        except BaseExceptionGroup as group:
            failed, _ = group.split(Exception)
            if failed is not None:
                failure = _end_of(self.name, failed)
            raise
        finally:
            self._close(failure)

    def _watch(self) -> None:
        self.reading = None
        position, per_writer = self._published or (None, None)
        numbers = self.stream.writers if self.feed is None else self.feed.numbers
        self._watching = True
        self._means.poller.watch(
            self.name,
            registry.horizon_source(self.stream),
            self._on_reading,
            published=position,
            per_writer=per_writer,
            writers=_writers(self.stream, numbers),
            file=self.stream.sequence_file,
        )
        if self._fork is not None:
            self._unwatch()  # it is taken over first

    def _unwatch(self) -> None:
        if self._watching:
            self._watching = False
            self._means.poller.unwatch(self.name)

    async def _mind_forks(self) -> None:
        """Begin generations, and take over those that have begun, until cancelled."""
        try:
            await self._mind_each_fork()
        finally:
            self._means.troubles.end(KIND, self.name, FORK)

    async def _mind_each_fork(self) -> None:
        if self._fork is not None:
            self._forked.set()
        while True:
            await self._forked.wait()
            self._forked = trio.Event()
            try:
                await self._take_over()
            except ReplicadError as error:
                self._means.troubles.fail(KIND, self.name, FORK, error)
                await trio.sleep(self._means.pace.follow_retry)
                self._forked.set()
            else:
                self._means.troubles.end(KIND, self.name, FORK)

    async def _take_over(self) -> None:
        """Go on in the present generation, from where its history is shared with what was published."""
        store, fork, before = self._means.store, self._fork, self.stream
        if fork is None:
            return
        if fork is not ELSEWHERE:
            await store.fork(before, fork.reason, fork.back_to)
        lineage = (await store.lineages(self.name)).get(self.name)
        if lineage is not None and not lineage.knows(before.epoch):
            # The list was restored to a time before our generation, and the rows with it.
            await store.fork(replace(before, epoch=lineage.present.id), "restored")
            lineage = (await store.lineages(self.name)).get(self.name)
        found = (await store.load_streams()).get(self.name)
        if self._fork is not fork or lineage is None or found is None or found.fault is not None:
            return  # there is one more; or the next look ends us
        if found.epoch != lineage.present.id:
            self._forked.set()  # one more has begun meanwhile
            return
        if found.epoch == before.epoch:  # the look was older than what we have taken over since
            self._go_on()
            return
        shared = lineage.shared(before.epoch) or lineage.floor
        if self.feed is not None and not await self.feed.has_same_writers():
            self.over = "its writers have other numbers in the database that was restored; it begins anew"
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
            remedy="readers are told to discard the rows after that position, and get the present ones",
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
        means = self._means
        return Feed(
            self.stream,
            self.lineage,
            means.store,
            reading,
            limits=means.limits,
            troubles=means.troubles,
            writers_changed=self._writers_changed,
            pace=means.pace,
        )

    def _writers_changed(self, numbers: Mapping[str, int]) -> None:
        if self._watching:
            self._means.poller.set_writers(self.name, _writers(self.stream, numbers))

    def _on_reading(self, _: str, reading: Reading) -> None:
        self.reading = reading
        if reading.fork is not None:
            self.fork(reading.fork)
        elif self.feed is None:
            self._wake()
        else:
            self.feed.on_reading(reading)
        self.judge()

    def judge(self) -> None:
        """Report an obstacle when it begins, changes and is over, in the log and to those who follow the stream."""
        obstacle = self.obstacle
        if obstacle == self._told:
            return
        self._told = obstacle
        self._wake()
        if obstacle is None:
            self._means.troubles.end(KIND, self.name, WAITS)
            return
        if obstacle == self._failure():  # which is reported already
            self._means.troubles.end(KIND, self.name, WAITS)
        else:
            self._means.troubles.begin(KIND, self.name, WAITS, obstacle, code=StreamWaits.code)
        if self.feed is not None:
            self.feed.tell(waits_line(self.name, obstacle))

    def _close(self, error: ReplicadError) -> None:
        """Undo what `_serve` did; safe to repeat."""
        self._unwatch()
        feed, self.feed = self.feed, None
        if feed is not None:
            self._note = _note_of(feed)
            self._published = feed.positions()  # readers have had these: who comes back with them is not ahead
            if self._means.feeds.get(self.name) is feed:
                del self._means.feeds[self.name]
            feed.end(error)
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = trio.Event()


def waits_line(name: str, obstacle: str) -> bytes:
    """The line that tells readers of a stream that it moves no further for now."""
    text = f"{StreamWaits.code}: stream {name} does not move: {obstacle}; the subscription stays and goes on afterwards"
    return Error(" ".join(text.split())).render().encode() + b"\n"


def _note_of(feed: Feed) -> Note:
    return replace(feed.stream, writers=feed.numbers), *feed.positions()


def _end_of(name: str, error: BaseException) -> ReplicadError:
    cause = sole_leaf(error)
    if isinstance(cause, ReplicadError):
        return StreamRefused(f"stream {name} is served anew: {cause} Reconnect and resume from your token.")
    return StreamRefused(f"stream {name} is served anew after an internal error; reconnect and resume from your token")


def _writers(stream: Stream, numbers: Mapping[str, int]) -> tuple[str, ...]:
    """Who may be told apart by application_name: nobody where rows do not say whose they are."""
    return () if stream.instance_column is None else tuple(numbers)


def _why(reading: Reading | None) -> str:
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
