"""One served stream: gets positions from the poller and passes targets to its lanes, which fill the journals.

A stream has up to two orders, each a `Lane` with its own journal: per writer, and linear, which is made for its first
subscriber. The feed also decides which writers are listed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set

import trio

from replicad.daemon.joined import Joined
from replicad.daemon.journal import Channel, JournalLimits
from replicad.daemon.troubles import Troubles
from replicad.errors import DatabaseError, ReplicadError, StreamRefused, TableReplaced
from replicad.positions.horizon import Reading
from replicad.protocol.tokens import Vector
from replicad.streams.lineage import Lineage
from replicad.streams.queries import is_locked
from replicad.streams.registry import Stream
from replicad.streams.rows_probe import is_of_a_row
from replicad.streams.serving.intervals import StreamIntervals
from replicad.streams.serving.lane import LINEAR, LINEAR_ORDER, PER_WRITER, Copier, Lane
from replicad.streams.serving.sent_counts import SentCounts
from replicad.streams.serving.sent_positions import Positions, position_lines
from replicad.streams.serving.stretches import Tally
from replicad.streams.serving.writer_list import ALL, WriterList
from replicad.streams.store import PostgresStore, TableRows
from replicad.streams.writer_set import writers_lines

FOLLOW = "follow"  # the cause of a trouble that keeps a feed from taking a new position


class Feed:
    """A stream that is served: its lanes, its writers' numbers, its generations."""

    def __init__(
        self,
        stream: Stream,
        lineage: Lineage,
        store: PostgresStore,
        reading: Reading,
        *,
        limits: JournalLimits,
        troubles: Troubles,
        writers_changed: Callable[[Mapping[str, int]], None],
        pace: StreamIntervals = StreamIntervals(),
    ) -> None:
        """`reading` has a position. `writers_changed` is called with the numbers of the listed writers."""
        self.stream = stream
        self.lineage = lineage  # of the stream; its present generation is the stream's
        self.name = stream.name
        self._writers = WriterList(stream, store, self._change_writers, troubles, max_listed=pace.max_listed)
        self._preambles: dict[bool, tuple[Positions, bytes]] = {}
        self.reading = self._target_reading = reading
        self.late_rows = 0  # rows found at or below a position that was sent: readers have missed each of them
        self.strayed: str | None = None  # by the audit: why its rows may be in another table; no position is taken then
        self.rewinds = 0  # how often positions went back
        self.tally = Tally()  # the sent rows, until the audit has compared them with the table
        self.sent = SentCounts()
        self._store = store
        self._pace = pace
        self._limits = limits
        self._troubles = troubles
        self._writers_changed = writers_changed
        self._rows = store.rows(stream)
        self._retained = 0
        self._look_for_retained = Joined(self._find_retained)
        self._linear: Lane | None = None
        self._main = self._lane(self._targets(reading), linear=False)
        self._known_upto = _known(reading)  # the writers of all rows up to here are listed
        self._changed = trio.Event()
        self._nursery: trio.Nursery | None = None

    # --- for subscribers ---

    def epoch(self, channel: Channel) -> str:
        """The generation that was sent to readers of this journal last; it may be behind that of `stream`."""
        return self._lane_of(channel).epoch

    async def wait_epoch_sent(self, channel: Channel) -> None:
        """Wait until the present generation has been sent to readers of this journal."""
        await self._lane_of(channel).wait_epoch_sent(self.stream.epoch)

    async def wait_beyond(self, channel: Channel, epoch: str) -> None:
        """Wait until a later generation has been sent to readers of this journal, or the journal has ended."""
        while self._lane_of(channel).epoch == epoch and channel.ended is None:
            await channel.wait_sealed()

    def _lane_of(self, channel: Channel) -> Lane:
        return self._linear if self._linear is not None and self._linear.channel is channel else self._main

    @property
    def numbers(self) -> Mapping[str, int]:
        """The listed writers and their numbers."""
        return self._writers.numbers

    @property
    def channel(self) -> Channel:
        """The journal of the order per writer."""
        return self._main.channel

    @property
    def lanes(self) -> Mapping[str, Lane]:
        """The lanes by order: `per_writer`, and `linear` once it had a subscriber."""
        return {PER_WRITER: self._main} | ({} if self._linear is None else {LINEAR_ORDER: self._linear})

    @property
    def sent_upto(self) -> int:
        """All rows up to here, of every writer, were sent to readers of the order per writer."""
        return min(self.channel.boundary.positions.values(), default=self._known_upto)

    def linear_channel(self) -> Channel:
        """The journal of the linear order, begun with the first call.

        It begins at the reading that the lanes have as their target. A newer one may wait for its writers to be listed,
        and the lane would then be given a lower target than it began at.
        """
        if self._linear is None:
            assert self._nursery is not None
            self._linear = self._lane({LINEAR: _known(self._target_reading)}, linear=True)
            self._nursery.start_soon(self._linear.run)
        return self._linear.channel

    def number(self, name: str) -> int:
        """The number of a writer that is listed, or was."""
        return self._writers.every[name]

    def writers_of(self, epoch: str, names: Iterable[str]) -> bytes:
        """The lines of WRITERS for these writers: vector tokens use their numbers."""
        return writers_lines(self.name, epoch, {name: self._writers.every[name] for name in names})

    def kept(self, positions: Positions, shared: Vector) -> dict[str, int]:
        """Positions of another generation, lowered to the shared position."""
        return {name: min(at, self._shared_by(name, shared)) for name, at in positions.items()}

    def _shared_by(self, name: str, shared: Vector) -> int:
        number = None if name in (LINEAR, ALL) else self._writers.every.get(name)
        return shared.minimum if number is None else shared.at(number)

    def preamble(self, positions: Positions, *, extended: bool) -> bytes:
        """The first lines of a subscription: for subscribers by name the writers, then positions.

        Cached for the last positions, because all clients reconnect at about the same time after a restart.
        """
        known = self._preambles.get(extended)
        if known is None or known[0] is not positions:
            lines = position_lines(self.name, positions, positions, all_of_them=True)
            if extended:
                lines = self.writers_of(self._main.epoch, self.channel.boundary.positions) + lines
            known = self._preambles[extended] = (positions, lines)
        return known[1]

    async def list_writers(self, token: Vector) -> Set[int]:
        """List the writers that the token names; returns the numbers that no writer has."""
        return await self._writers.add_numbered(token.ahead.keys())

    async def list_writers_between(self, after: int, upto: int) -> None:
        """List the writers of rows in (after, upto], so that a subscriber's token does not skip their rows."""
        if self.stream.instance_column is not None and not self._writers.crowded and after < upto:
            await self._writers.add((await self.catchup_rows(self.stream).last_tokens(after, upto)).keys())

    async def retained(self) -> int:
        """The oldest token after which nothing was removed.

        All who ask at the same time share one query: new rows are read on the same connections.

        Raises:
            StreamRefused: the stream was removed just now, or its table is locked.
        """
        await self._look_for_retained()
        return self._retained

    async def _find_retained(self) -> None:
        try:
            token = await self._rows.earliest()
        except DatabaseError as error:
            raise self._locked_or(error) from error
        if token is None:
            raise StreamRefused(f"stream {self.name} was removed")
        self._retained = token

    def catchup_rows(self, stream: Stream) -> TableRows:
        """The rows of this stream, as it is or was, for clients that catch up."""
        return self._store.catchup_rows(stream)

    async def taken(self) -> int:
        """An id that no row which is committed by now is above. Raises StreamRefused: the table is locked."""
        try:
            return await self._store.taken(self.stream, self.positions()[0])
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

    # --- for the publisher ---

    def positions(self) -> tuple[int, dict[str, int]]:
        """The published positions in the present generation: the linear position, and the positions of the writers
        ahead of it.
        """
        sent = self.channel.boundary.positions
        linear = min([_known(self.reading), *sent.values()])
        if self._linear is not None and self._linear.epoch == self.stream.epoch:  # it may be ahead
            linear = max(linear, self._linear.channel.boundary.positions[LINEAR])
        if self._main.epoch != self.stream.epoch:
            return linear, {}
        return linear, {name: at for name, at in sent.items() if at > linear}

    def published_from(self) -> tuple[object, ...]:
        """The objects that `positions` and `numbers` depend on: while they are the same ones, so are these."""
        main, linear = self._main, self._linear
        found = (self.stream, self.reading, self.numbers, main.epoch, main.channel.boundary)
        return found if linear is None else (*found, linear.epoch, linear.channel.boundary)

    def on_registered(self, writers: Set[str]) -> None:
        """Take the names of the registered writers that are not retired."""
        if self._writers.on_registered(writers):
            self._changed.set()

    def tidy(self) -> None:
        """Free the rows that all readers have; where none come, nothing else does."""
        for lane in (self._main, self._linear):
            if lane is not None and lane.channel.tail < lane.channel.head:
                lane.channel.tidy(trio.current_time())

    @property
    def gather(self) -> float:
        """The seconds in which the next reading is not wanted: with many readers, more is sent to each at a time."""
        readers = sum(lane.channel.readers for lane in (self._main, self._linear) if lane is not None)
        return min(readers * self._pace.gather, self._pace.longest_gather)

    def on_reading(self, reading: Reading) -> None:
        """Take a new reading of the horizon."""
        if reading.position is None or reading.refused is not None or self.strayed is not None:
            return
        self.reading = reading
        self._changed.set()

    async def run(self) -> None:
        """Serve the stream until cancelled. Raises StreamRefused if its writers have got other numbers."""
        refused = False
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            nursery.start_soon(self._main.run)
            self._changed.set()
            while True:
                await self._changed.wait()
                self._changed = trio.Event()
                try:
                    await self._follow()
                except (DatabaseError, TableReplaced, StreamRefused) as error:
                    if isinstance(error, StreamRefused) and refused:
                        raise  # no fork was found that explains it: the stream is served anew
                    refused = isinstance(error, StreamRefused)
                    self._troubles.fail("stream", self.name, FOLLOW, error)
                    await trio.sleep(self._pace.follow_retry)
                    self._changed.set()
                else:
                    refused = False
                    self._troubles.end("stream", self.name, FOLLOW)

    async def _follow(self) -> None:
        """List new writers, then pass the position on to the lanes."""
        reading, lineage = self.reading, self.lineage  # a newer reading may have writers that are not listed yet
        await self._writers.look()
        await self._discover(reading)
        if self.lineage is lineage:
            self._set_targets(reading)

    def renew(self, stream: Stream) -> None:
        """Use changed names of the table or another row expression, from the next read on."""
        self.stream = stream
        self._rows = self._store.rows(stream)
        for lane in (self._main, self._linear):
            if lane is not None:
                lane.renew(self._rows)

    async def has_same_writers(self) -> bool:
        """Whether all writers have the numbers in the database that were sent to readers."""
        looked = None
        while looked != self._writers.every:  # one may join meanwhile
            looked = dict(self._writers.every)
            found = {one.name: one.number for one in await self._store.named(self.stream, looked.values())}
            if found != looked:
                return False
        return True

    def adopt(self, stream: Stream, lineage: Lineage, shared: Vector) -> None:
        """Go on in another generation. Readers are sent back to the position `shared` with the one before."""
        sent = self.channel.boundary.positions
        if any(at > self._shared_by(name, shared) for name, at in sent.items()):
            self.rewinds += 1
            self.late_rows = 0
        self.lineage = lineage
        self.strayed = None  # the operator has named the table; the audit looks again
        self.tally.fork(shared.minimum)
        self._writers.forked()
        self.renew(stream)
        reading = self.reading
        kept = min(_known(reading), shared.minimum)
        per_writer = {name: max(kept, at) for name, at in self.kept(reading.per_writer, shared).items()}
        self.reading = self._target_reading = Reading(position=kept, per_writer=per_writer)
        self._known_upto = min(self._known_upto, kept)
        for lane in (self._main, self._linear):
            if lane is not None:
                lane.fork(stream.epoch, lambda name: self._shared_by(name, shared))

    def send_line(self, line: bytes) -> None:
        """Send a line that is no row to all readers, between two reads."""
        for lane in (self._main, self._linear):
            if lane is not None:
                lane.send_line(line)

    def end(self, error: ReplicadError) -> None:
        """End the journals; all readers get the error."""
        for lane in (self._main, self._linear):
            if lane is not None:
                lane.channel.end(error)

    def _set_targets(self, reading: Reading) -> None:
        self._target_reading = reading
        self._main.set_target(self._targets(reading))
        if self._linear is not None:
            self._linear.set_target({LINEAR: _known(reading)})

    async def _discover(self, reading: Reading) -> None:
        """Find new writers and list them, with their numbers, before the first of their rows is sent."""
        upto = _known(reading)
        if self.stream.instance_column is None or upto <= self._known_upto:
            return
        if self._writers.crowded:
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
                await self._writers.add(found.keys())
                if self.lineage is not lineage:
                    return  # history has forked meanwhile
                self._known_upto, upto = upto, _known(reading)

    def _change_writers(self, joining: Set[str], leaving: Set[str]) -> trio.Event:
        """Pass a changed list of writers to the poller and to the lane."""
        self._writers_changed({} if self._writers.crowded else self.numbers)
        self._main.set_target(self._targets(self._target_reading))
        return self._main.change_writers(joining, leaving)

    def _targets(self, reading: Reading) -> dict[str, int]:
        position = _known(reading)
        if self._writers.crowded:
            return dict.fromkeys(self.numbers, position)
        return {name: reading.per_writer.get(name, position) for name in self.numbers}

    def _lane(self, positions: Positions, *, linear: bool) -> Lane:
        return Lane(
            self.name,
            Copier(self._rows, linear=linear),
            positions,
            limits=self._limits,
            troubles=self._troubles,
            writers=self.writers_of,
            epoch=self.stream.epoch,
            pace=self._pace,
            tally=self.tally,
            sent=self.sent,
        )


def _known(reading: Reading) -> int:
    assert reading.position is not None
    return reading.position
