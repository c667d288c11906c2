"""One registered stream in this daemon, as long as the registry has it: `ServedStream`.

First it is watched. When its first position is known, it is served: it takes positions from the poller, lists new
writers, and passes targets to its orders, which fill the journals. It has up to two orders, each a `Lane`: per writer,
and linear, which begins with its first subscriber. A failure ends only this stream: its readers get the reason, the
trouble is reported, and after a growing pause the stream is watched and served again, with new journals.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Set
from dataclasses import dataclass, field, replace
from operator import is_

import structlog
import trio

from replicad.daemon.fairness import Asker
from replicad.daemon.joined import Joined
from replicad.daemon.journal import Channel, JournalLimits
from replicad.daemon.poller import Poller
from replicad.daemon.troubles import Troubles, keep_running
from replicad.errors import (
    DatabaseError,
    ReplicadError,
    StreamRefused,
    StreamWaits,
    TableReplaced,
    TokenAhead,
)
from replicad.groups import sole_leaf
from replicad.positions.horizon import Fork, Reading
from replicad.protocol.commands import Error
from replicad.protocol.tokens import Vector
from replicad.streams.daemon_registry import DaemonRegistry
from replicad.streams.lineage import SHARES_NOTHING, Lineage
from replicad.streams.queries import is_locked
from replicad.streams.registry import Published, Stream, differences, horizon_source
from replicad.streams.row_text import MASTER
from replicad.streams.serving.catchups import Catchups
from replicad.streams.serving.counts import Lag, SentCounts, Tally
from replicad.streams.serving.intervals import StreamIntervals
from replicad.streams.serving.lane import LINEAR, LINEAR_ORDER, PER_WRITER, Copier, Lane, Positions, position_lines
from replicad.streams.serving.writer_list import ALL, WriterList
from replicad.streams.table_rows import TableRows, is_of_a_row

KIND = "stream"  # of the troubles
ELSEWHERE = Fork("another daemon")  # it has begun a generation, as a look at the registry has shown
FOLLOW = "follow"  # the cause of a trouble that keeps a stream from taking a new position
FORK = "fork"  # the cause of a trouble that keeps a stream from going on in another generation
STALLS = ("copy", FOLLOW, FORK)  # the causes of troubles during which a stream sends nothing and tries again
WAITS = "position"  # the cause of a trouble that stops a stream while its readers stay connected

log = structlog.get_logger()
Note = tuple[Stream, int, Mapping[str, int]]  # a stream, its position, and the positions of its writers


@dataclass(frozen=True, slots=True)
class Context:
    """What all streams share. `look(name)` reads the registry for a stream, and waits until its fork is handled.
    `served`: the streams that are served now, by name; each sets and removes its own entry. `followers` are called with
    each stream that begins to be served.
    """

    registry: DaemonRegistry
    poller: Poller
    troubles: Troubles
    limits: JournalLimits
    catchups: Catchups
    look: Callable[[str], Awaitable[None]]
    pace: StreamIntervals = StreamIntervals()
    served: dict[str, ServedStream] = field(default_factory=dict)
    followers: set[Callable[[ServedStream], None]] = field(default_factory=set)


class ServedStream:
    """One stream. `run` is its task."""

    # Set each time when it begins to be served, and valid while `is_served`:
    followed: Reading  # the last reading with a position; after a fork, the shared position
    writers: WriterList
    tally: Tally  # the sent rows, until the audit has compared them with the table
    sent: SentCounts
    late_rows: int  # rows found at or below a position that was sent: readers have missed each of them
    rewinds: int  # how often positions went back
    _main: Lane
    _linear: Lane | None
    _rows: TableRows
    _target_reading: Reading
    _known_upto: int  # the writers of all rows up to here are listed
    _first_lines: dict[bool, tuple[Positions, bytes]]
    _nursery: trio.Nursery

    def __init__(self, context: Context, stream: Stream, lineage: Lineage, published: Published | None) -> None:
        self.stream = stream  # as it was registered when serving it began, or was renewed
        self.lineage = lineage  # its present generation is that of `stream`
        self.name = stream.name
        self.is_served = False
        self.reading: Reading | None = None  # the last one
        self.over: str | None = None  # why it cannot go on; the next look at the registry ends it
        self.strayed: str | None = None  # by the audit: why its rows may be in another table; no position is taken then
        self.lag = Lag()
        self._context = context
        self.pace = context.pace
        self._denied = stream.denied
        self._compared: Stream | None = None  # the entry of the registry that was taken over completely
        self._registry_fault: str | None = None  # why the registry cannot be read
        self._published = None if published is None else (published.position, dict(published.per_writer))
        self._note: Note | None = None  # the last one; the present one while it is not served
        self._note_of: tuple[object, ...] = ()  # what it was made from
        self._reported: str | None = None  # the obstacle that was reported last
        self._watching = False
        self._fork: Fork | None = None  # a fork that was found and not handled yet
        self._forked = trio.Event()  # set when there is one
        self._changed = trio.Event()
        self._to_follow = trio.Event()  # set when there is a reading, or a change of the writers
        self._scope = trio.CancelScope()
        self._retained = 0
        self._look_for_retained = Joined(self._find_retained)
        self._described: tuple[str, int, list[tuple[int, str]]] = ("", -1, [])  # the generation, up to where, what
        self._look_for_descriptions = Joined(self._find_descriptions)

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
        if self.is_served and self.strayed is not None:
            return self.strayed
        return self._failure()

    def _failure(self) -> str | None:
        """Why the stream has been failing for longer than `stall_grace`; None if it is not."""
        lasting = trio.current_time() - self.pace.stall_grace
        failing = [
            one
            for one in self._context.troubles.of(KIND, self.name)
            if one.place.cause in STALLS and one.since <= lasting
        ]
        return failing[0].reason if failing else None

    @property
    def published(self) -> int | None:
        """The linear position that was published last; None if there was none."""
        if self.is_served:
            return self.positions()[0]
        return None if self._published is None else self._published[0]

    async def wait_settled(self) -> None:
        """Wait until it is served or has an obstacle."""
        while not self.is_served and self.obstacle is None:
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
            await keep_running(self._serve, KIND, self.name, self._context.troubles, self.pace.restarts)

    def stop(self, why: str) -> None:
        """End it at once: readers get the reason, and its troubles and watch are removed."""
        was_served = self.is_served
        self._close(StreamRefused(f"stream {self.name} is no longer served: {why}"))
        self._scope.cancel()
        self._context.troubles.forget(KIND, self.name)
        self._reported = None
        if was_served:
            log.warning("stream_dropped", stream=self.name, reason=why)

    def note(self) -> Note | None:
        """Its published position; None before the first position. The same object until something changes."""
        known = self._note
        if not self.is_served:
            return known
        made_from = self._published_from()
        if known is not None and len(made_from) == len(self._note_of) and all(map(is_, made_from, self._note_of)):
            return known
        self._note_of = made_from
        positions = self.positions()
        if (
            known is None
            or known[1:] != positions
            or known[0].writers != self.numbers
            or known[0].epoch != self.stream.epoch
        ):
            self._note = (replace(self.stream, writers=self.numbers), *positions)
        return self._note

    def _published_from(self) -> tuple[object, ...]:
        """The objects that `positions` and `numbers` depend on: while they are the same ones, so are these."""
        main, linear = self._main, self._linear
        found = (self.stream, self.followed, self.numbers, main.epoch, main.channel.boundary)
        return found if linear is None else (*found, linear.epoch, linear.channel.boundary)

    def compare(self, found: Stream) -> None:
        """Take the registry's present entry: changed names and row expression are used from the next read on.

        If another generation has begun, nothing more is published before it is taken over.
        """
        if found.epoch != self.stream.epoch:
            self.fork(ELSEWHERE)
        elif changed := differences(self.stream, found):
            log.info("stream_renewed", stream=self.name, changed=sorted(changed))
            self.stream = found
            if self.is_served:
                self._renew()
                if "identity" in changed and self._fork is None:  # the watch compares other names from now on
                    self._go_on()
        if self._fork is not None:
            self._forked.set()  # it is tried again, whatever was in the way
        self._denied = found.denied
        self._registry_fault = None
        self._compared = found if self.is_served and self._fork is None else None
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
        if self.is_served and self._fork is None and self.writers.on_registered(writers):
            self._to_follow.set()

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
        if self.is_served:
            for lane in self.lanes.values():
                lane.send_line(waits_line(self.name, obstacle))

    def tidy(self) -> None:
        """Free the rows that all readers have; where none come, nothing else does."""
        for lane in self.lanes.values():
            if lane.channel.tail < lane.channel.head:
                lane.channel.tidy(trio.current_time())

    # --- what is served, while it is ---

    @property
    def numbers(self) -> Mapping[str, int]:
        """The listed writers and their numbers."""
        return self.writers.numbers

    @property
    def channel(self) -> Channel:
        """The journal of the order per writer."""
        return self._main.channel

    @property
    def lanes(self) -> Mapping[str, Lane]:
        """The lanes by order: `per_writer`, and `linear` once it had a subscriber."""
        return {PER_WRITER: self._main} | ({} if self._linear is None else {LINEAR_ORDER: self._linear})

    def lane(self, *, linear: bool) -> Lane:
        """One of the orders. The linear one begins with the first call.

        It begins at the reading that the lanes have as their target. A newer one may wait for its writers to be listed,
        and the lane would then be given a lower target than it began at.
        """
        if not linear:
            return self._main
        if self._linear is None:
            self._linear = self._make_lane({LINEAR: _known(self._target_reading)}, linear=True)
            self._nursery.start_soon(self._linear.run)
        return self._linear

    @property
    def sent_upto(self) -> int:
        """All rows up to here, of every writer, were sent to readers of the order per writer."""
        return self.lowest(self.channel.boundary.positions)

    def lowest(self, positions: Positions) -> int:
        """The lowest of the positions of listed writers."""
        return min(positions.values(), default=self._known_upto)

    def positions(self) -> tuple[int, dict[str, int]]:
        """The published positions in the present generation: the linear position, and the positions of the writers
        ahead of it.
        """
        sent = self.channel.boundary.positions
        linear = min([_known(self.followed), *sent.values()])
        if self._linear is not None and self._linear.epoch == self.stream.epoch:  # it may be ahead
            linear = max(linear, self._linear.channel.boundary.positions[LINEAR])
        if self._main.epoch != self.stream.epoch:
            return linear, {}
        return linear, {name: at for name, at in sent.items() if at > linear}

    def first_lines(self, lane: Lane, positions: Positions, *, extended: bool) -> bytes:
        """The first lines of a subscription that begins at these positions; with `extended`, the writers are first.

        Cached for the last positions, because all clients reconnect at about the same time after a restart.
        """
        cached = lane is self._main and positions is lane.channel.boundary.positions
        known = self._first_lines.get(extended) if cached else None
        if known is not None and known[0] is positions:
            return known[1]
        lines = position_lines(self.name, positions, positions, all_of_them=True)
        if extended:  # in linear order, too: a token without the epoch in WRITERS is not valid after a restore
            lines = lane.writers_of(lane.epoch, self.channel.boundary.positions) + lines
        if cached:
            self._first_lines[extended] = (positions, lines)
        return lines

    async def retained(self) -> int:
        """The oldest token after which nothing was removed.

        All who ask at the same time share one query: new rows are read on the same connections.

        Raises:
            StreamRefused: the stream was removed just now, or its table is locked.
        """
        await self._look_for_retained()
        self._context.catchups.trimmed(self, self._retained)
        return self._retained

    async def _find_retained(self) -> None:
        try:
            token = await self._rows.earliest()
        except DatabaseError as error:
            raise self._locked_or(error) from error
        if token is None:
            raise StreamRefused(f"stream {self.name} was removed")
        self._retained = token

    async def description(self, after: int) -> bytes:
        """The line that describes the columns of the next change after an id: it is a part of the batch of that change.
        Nothing for a stream of rows, and where the first change of a stream describes them.

        Raises:
            DatabaseError: it cannot be read.
        """
        if self.stream.source is None:
            return b""
        epoch, upto, found = self._described
        if epoch != self.stream.epoch or after > upto:
            await self._look_for_descriptions()
            _, _, found = self._described
        line = next((line for since, line in found if since <= after), None)
        return b"" if line is None else f"RDATA {self.name} {MASTER} batch {line}\n".encode()

    async def _find_descriptions(self) -> None:
        epoch, upto = self.stream.epoch, self.sent_upto  # all descriptions up to here are found
        self._described = (epoch, upto, await self._context.registry.descriptions(self.stream))

    def catchup_rows(self, stream: Stream) -> TableRows:
        """The rows of this stream, as it is or was, for clients that catch up."""
        return self._context.registry.catchup_rows(stream)

    async def taken(self) -> int:
        """An id that no row which is committed by now is above. Raises StreamRefused: the table is locked."""
        try:
            return await self._context.registry.taken(self.stream, self.positions()[0])
        except DatabaseError as error:
            raise self._locked_or(error) from error

    def _locked_or(self, error: DatabaseError) -> ReplicadError:
        """What to raise for an error of a read: StreamRefused if another session has the table locked."""
        if not is_locked(error):
            return error
        return StreamRefused(
            f"table {self.stream.table} of stream {self.name} is locked by another session, so its rows cannot be "
            "read; try again, or see with `replicad streams list` who it is"
        )

    async def wait_for_generation(self, epoch: str, lane: Lane) -> None:
        """Wait until the present generation was sent to readers of a lane. A token is of `epoch`, which is another one
        than they were sent: another daemon may have found a fork first. Raises TokenAhead: it takes too long.
        """
        if not self.lineage.knows(epoch):
            await self._context.look(self.name)
        with trio.move_on_after(self.pace.ahead) as scope:
            await lane.wait_epoch_sent(self.stream.epoch)
        if scope.cancelled_caught:
            raise TokenAhead(f"stream {self.name} goes over to generation {self.stream.epoch}; try again")

    async def list_writers_between(self, after: int, upto: int, asker: Asker) -> None:
        """List the writers of rows in (after, upto], so that a subscriber's token does not skip their rows. `asker`
        waits in turn for a connection to Postgres.
        """
        async with self._context.catchups.places.place(asker):
            if self.stream.instance_column is not None and not self.writers.crowded and after < upto:
                await self.writers.add((await self.catchup_rows(self.stream).last_tokens(after, upto)).keys())

    # --- its life ---

    async def _serve(self) -> None:
        """Watch, wait for the first position, then serve until something fails."""
        failure: ReplicadError = StreamRefused(f"stream {self.name} is no longer served: this server stops serving it")
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._handle_forks)
                self._watch()
                reading = await self._first_position()
                await trio.lowlevel.checkpoint_if_cancelled()  # a stopped one must not be found by anybody
                self._begin(reading, nursery)
                log.info("stream_served", stream=self.name, position=reading.position, writers=len(self.numbers))
                for on_served in list(self._context.followers):
                    with self._context.troubles.contain("service", "subscriptions", "join"):
                        on_served(self)
                await self._follow_readings()
        except BaseExceptionGroup as group:
            failed, _ = group.split(Exception)
            if failed is not None:
                failure = end_of(self.name, failed)
            raise
        finally:
            self._close(failure)

    async def _first_position(self) -> Reading:
        while self.reading is None or self.reading.position is None or self.reading.refused is not None:
            await self._changed.wait()
        return self.reading

    def _begin(self, reading: Reading, nursery: trio.Nursery) -> None:
        """Begin to serve at this reading, which has a position."""
        context = self._context
        self.writers = WriterList(
            self.stream, context.registry, self._change_writers, context.troubles, max_listed=self.pace.max_listed
        )
        self.followed = self._target_reading = reading
        self.strayed = None
        self.late_rows = self.rewinds = 0
        self.tally, self.sent = Tally(), SentCounts()
        self._first_lines = {}
        self._rows = context.registry.rows(self.stream)
        self._nursery = nursery
        self._linear = None
        self._main = self._make_lane(self._targets(reading), linear=False)
        self._known_upto = _known(reading)
        self._to_follow = trio.Event()
        self._to_follow.set()
        nursery.start_soon(self._main.run)
        self.is_served = True
        context.served[self.name] = self
        self._wake()

    def _close(self, error: ReplicadError) -> None:
        """Undo what `_serve` did; all readers get the error. Safe to repeat."""
        self._unwatch()
        if self.is_served:
            self.note()
            self.is_served = False
            self._published = self.positions()  # so that tokens of returning readers are not ahead
            if self._context.served.get(self.name) is self:
                del self._context.served[self.name]
            for lane in self.lanes.values():
                lane.channel.end(error)
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    # --- positions, as the poller reads them ---

    def _watch(self) -> None:
        if self._scope.cancel_called:
            return  # stopped; its tasks run on to their next wait, while its successor may watch this stream already
        self.reading = None
        position, per_writer = self._published or (None, None)
        numbers = self.numbers if self.is_served else self.stream.writers
        self._watching = True
        self._context.poller.watch(
            self.name,
            horizon_source(self.stream),
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

    def _on_reading(self, _: str, reading: Reading) -> float:
        """Take a new reading of the horizon; returns the seconds in which the next one is not wanted."""
        self.reading = reading
        self.lag.observe(reading, trio.current_time(), lambda: self.published)
        if reading.fork is not None:
            self.fork(reading.fork)
        elif not self.is_served:
            self._wake()
        else:
            self.follow(reading)
        self.report_obstacle()
        return self._gather if self.is_served else 0.0

    def follow(self, reading: Reading) -> None:
        """Have the lanes follow a reading, if it has a position."""
        if reading.position is not None and reading.refused is None and self.strayed is None:
            self.followed = reading
            self._to_follow.set()

    @property
    def _gather(self) -> float:
        """With many readers, more is sent to each at a time: so long no reading is wanted."""
        readers = sum(lane.channel.readers for lane in self.lanes.values())
        return min(readers * self.pace.gather, self.pace.longest_gather)

    async def _follow_readings(self) -> None:
        """Follow readings until cancelled. Raises StreamRefused if its writers have got other numbers."""
        refused = False
        while True:
            await self._to_follow.wait()
            self._to_follow = trio.Event()
            try:
                await self._follow()
            except (DatabaseError, TableReplaced, StreamRefused) as error:
                if isinstance(error, StreamRefused) and refused:
                    raise  # no fork was found that explains it: the stream is served anew
                refused = isinstance(error, StreamRefused)
                self._context.troubles.fail(KIND, self.name, FOLLOW, error)
                await trio.sleep(self.pace.follow_retry)
                self._to_follow.set()
            else:
                refused = False
                self._context.troubles.end(KIND, self.name, FOLLOW)

    async def _follow(self) -> None:
        """List new writers, then pass the position on to the lanes."""
        reading, lineage = self.followed, self.lineage  # a newer reading may have writers that are not listed yet
        await self.writers.look()
        await self._discover(reading)
        if self.lineage is lineage:
            self._target_reading = reading
            self._main.set_target(self._targets(reading))
            if self._linear is not None:
                self._linear.set_target({LINEAR: _known(reading)})

    async def _discover(self, reading: Reading) -> None:
        """Find new writers and list them, with their numbers, before the first of their rows is sent."""
        upto = _known(reading)
        if self.stream.instance_column is None or upto <= self._known_upto:
            return
        if self.writers.crowded:
            self._known_upto = upto
            return
        lineage = self.lineage
        while self._known_upto < upto and self.channel.held is None:
            try:
                found = await self._rows.last_tokens(self._known_upto, upto)
            except DatabaseError as error:
                if not is_of_a_row(error):
                    raise
                if upto == self._known_upto + 1:
                    return  # this row's writer cannot be read: the lane stops before the row and reports it
                upto = (self._known_upto + upto) // 2
            else:
                await self.writers.add(found.keys())
                if self.lineage is not lineage:
                    return  # history has forked meanwhile
                self._known_upto, upto = upto, _known(reading)

    def _change_writers(self, joining: Set[str], leaving: Set[str]) -> trio.Event:
        """Pass a changed list of writers to the poller and to the lane."""
        if self._watching:
            numbers = {} if self.writers.crowded else self.numbers
            self._context.poller.set_writers(self.name, _writers(self.stream, numbers))
        self._main.set_target(self._targets(self._target_reading))
        return self._main.change_writers(joining, leaving)

    def _targets(self, reading: Reading) -> dict[str, int]:
        position = _known(reading)
        if self.writers.crowded:
            return dict.fromkeys(self.numbers, position)
        return {name: reading.per_writer.get(name, position) for name in self.numbers}

    def _make_lane(self, positions: Positions, *, linear: bool) -> Lane:
        return Lane(
            self.name,
            Copier(self._rows, linear=linear),
            positions,
            limits=self._context.limits,
            troubles=self._context.troubles,
            writers_of=self.writers.lines,
            epoch=self.stream.epoch,
            pace=self.pace,
            tally=self.tally,
            sent=self.sent,
            seen_since=self.lag.since,
        )

    def _renew(self) -> None:
        """Use changed names of the table or another row expression, from the next read on."""
        self._rows = self._context.registry.rows(self.stream)
        for lane in self.lanes.values():
            lane.renew(self._rows)

    # --- generations ---

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
                await trio.sleep(self.pace.follow_retry)
                self._forked.set()
            else:
                self._context.troubles.end(KIND, self.name, FORK)

    async def _take_over(self) -> None:
        """Continue in the present generation, from the position that it shares with the published history."""
        registry, fork, before = self._context.registry, self._fork, self.stream
        if fork is None:
            return
        if fork is not ELSEWHERE:
            await registry.fork(before, fork.reason)
        lineage = (await registry.lineages(self.name)).get(self.name)
        if lineage is not None and not lineage.knows(before.epoch):
            # The list was restored to a time before our generation, and the rows with it.
            await registry.fork(replace(before, epoch=lineage.present.id), "restored")
            lineage = (await registry.lineages(self.name)).get(self.name)
        elif (
            lineage is not None
            and fork is not ELSEWHERE
            and lineage.present.id != before.epoch  # else the change was undone, or a user has to say what it was
            and not lineage.has_answer(before.epoch, fork.reason)
        ):
            # Another daemon began a generation meanwhile, for something else.
            await registry.fork(replace(before, epoch=lineage.present.id), fork.reason)
            self._forked.set()
            return
        found = (await registry.look()).get(self.name)
        if self._fork is not fork or lineage is None or found is None or found.fault is not None:
            return  # there is another fork, or the next look at the registry ends this stream
        if found.epoch != lineage.present.id:
            self._forked.set()  # another generation has begun meanwhile
            return
        if found.epoch == before.epoch:  # the look was older than the generation that was taken over since
            self._go_on()
            return
        shared = lineage.shared(before.epoch) or lineage.floor
        if self.is_served and not await self._has_same_writers():
            self.over = "its writers have other numbers in the restored database; it is served again from the start"
            return
        self._adopt(found, lineage, shared)

    def kept(self, positions: Positions, shared: Vector) -> dict[str, int]:
        """Positions of another generation, lowered to the shared position."""
        return {name: min(at, self._shared_by(name, shared)) for name, at in positions.items()}

    def _shared_by(self, name: str, shared: Vector) -> int:
        number = None if name in (LINEAR, ALL) else self.writers.every.get(name)
        return shared.minimum if number is None else shared.at(number)

    async def _has_same_writers(self) -> bool:
        """Whether all writers have the numbers in the database that were sent to readers."""
        looked = None
        while looked != self.writers.every:  # one may join meanwhile
            looked = dict(self.writers.every)
            known = await self._context.registry.writers_numbered(self.stream, looked.values())
            found = {one.name: one.number for one in known}
            if found != looked:
                return False
        return True

    def _adopt(self, found: Stream, lineage: Lineage, shared: Vector) -> None:
        """Go on in another generation. Readers are sent back to the position `shared` with the one before."""
        numbers = self.numbers if self.is_served else found.writers
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
        if self.is_served:
            self._send_back(shared)
        self._watch()
        self._wake()

    def _send_back(self, shared: Vector) -> None:
        """Have the lanes send readers back to the shared position, and go on in the present generation."""
        if any(at > self._shared_by(name, shared) for name, at in self.channel.boundary.positions.items()):
            self.rewinds += 1
            self.late_rows = 0
        self.strayed = None  # the operator has named the table; the audit looks again
        self.tally.fork(shared.minimum)
        self.writers.forked()
        self._renew()
        kept = min(_known(self.followed), shared.minimum)
        per_writer = {name: max(kept, at) for name, at in self.kept(self.followed.per_writer, shared).items()}
        self.followed = self._target_reading = Reading(position=kept, per_writer=per_writer)
        self._known_upto = min(self._known_upto, kept)
        for lane in self.lanes.values():
            lane.fork(self.stream.epoch, lambda name: self._shared_by(name, shared))

    def _go_on(self) -> None:
        """There was no fork."""
        self._fork = None
        if self.is_served:
            self._published = self.positions()
        self._watch()
        self._wake()


def _writers(stream: Stream, numbers: Iterable[str]) -> tuple[str, ...]:
    """The writers that the horizon tells apart by application_name; none without an instance column."""
    return () if stream.instance_column is None else tuple(numbers)


def _known(reading: Reading) -> int:
    assert reading.position is not None
    return reading.position


def waits_line(name: str, obstacle: str) -> bytes:
    """The ERROR line for readers of a stream that does not advance now."""
    text = f"{StreamWaits.code}: stream {name} does not move: {obstacle}; the subscription stays and goes on afterwards"
    return Error(" ".join(text.split())).render().encode() + b"\n"


def end_of(name: str, error: BaseException) -> ReplicadError:
    """The error for readers of a stream whose serving ended by this exception."""
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
