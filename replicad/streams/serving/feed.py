"""One stream from Postgres to its journals: positions come in, finished lines go out, row by row nothing is touched.

A stream has up to two orders, each a `Lane` with a journal of its own: per writer, and linear, which is made when it is
first asked for. A feed tells its lanes how far the horizon is and which writers are listed.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Set

import trio

from replicad.daemon.journal import Channel, JournalLimits
from replicad.daemon.troubles import Troubles
from replicad.errors import DatabaseError, ReplicadError, RowTooLong, RowUnreadable, StreamRefused, TableReplaced
from replicad.postgres.horizon import Reading
from replicad.protocol.tokens import Vector
from replicad.streams.lineage import Lineage
from replicad.streams.queries import is_locked
from replicad.streams.registry import Stream
from replicad.streams.rows import Chunk
from replicad.streams.rows_probe import is_of_a_row
from replicad.streams.serving.lane import LINEAR, Copier, Lane, below
from replicad.streams.serving.pace import Pace
from replicad.streams.serving.roster import ALL, Roster
from replicad.streams.serving.told import LastTokens, Positions, position_lines
from replicad.streams.store import Store
from replicad.streams.writer_set import writers_lines

FOLLOW = "follow"  # the cause of a trouble that keeps a feed from taking a new position

Send = Callable[[bytes], Awaitable[None]]


class Feed:
    """A stream that is served: its lanes, its writers' numbers, its generations."""

    def __init__(
        self,
        stream: Stream,
        lineage: Lineage,
        store: Store,
        reading: Reading,
        *,
        limits: JournalLimits,
        troubles: Troubles,
        writers_changed: Callable[[Mapping[str, int]], None],
        pace: Pace = Pace(),
    ) -> None:
        """`reading` has a position. `writers_changed` is told the numbers of the writers that are listed."""
        self.stream = stream
        self.lineage = lineage  # of the stream; its present generation is the stream's
        self.name = stream.name
        self._roster = Roster(stream, store, self._relist, troubles, max_listed=pace.max_listed)
        self._preambles: dict[bool, tuple[Positions, bytes]] = {}
        self.reading = self._aimed = reading
        self.late_rows = 0  # that turned up at or below a position that was told: each is a row that readers missed
        self.rewinds = 0  # how often positions were taken back
        self._store = store
        self._pace = pace
        self._limits = limits
        self._troubles = troubles
        self._writers_changed = writers_changed
        self._rows = store.rows(stream)
        self._linear: Lane | None = None
        self._main = self._lane(self._targets(reading), linear=False)
        self._known_upto = _known(reading)  # the writers of rows that come behind are looked for first
        self._heard = trio.Event()
        self._nursery: trio.Nursery | None = None

    # --- for subscribers ---

    def epoch(self, channel: Channel) -> str:
        """The generation that readers of this journal were told last; that of `stream` is on its way to them."""
        return self._lane_of(channel).epoch

    async def wait_told(self, channel: Channel) -> None:
        """Until readers of this journal were told of the present generation."""
        await self._lane_of(channel).wait_told(self.stream.epoch)

    async def wait_beyond(self, channel: Channel, epoch: str) -> None:
        """Until readers of this journal were told of another generation than this one, or the journal has ended."""
        while self._lane_of(channel).epoch == epoch and channel.ended is None:
            await channel.wait_sealed()

    def _lane_of(self, channel: Channel) -> Lane:
        return self._linear if self._linear is not None and self._linear.channel is channel else self._main

    @property
    def numbers(self) -> Mapping[str, int]:
        """The writers that are listed, and their numbers."""
        return self._roster.numbers

    @property
    def channel(self) -> Channel:
        """The journal of the order per writer."""
        return self._main.channel

    @property
    def told_upto(self) -> int:
        """All rows up to here were told to readers of the order per writer, whoever wrote them."""
        return min(self.channel.boundary.positions.values(), default=self._known_upto)

    def linear_channel(self) -> Channel:
        """The journal of the linear order, begun when it is first asked for."""
        if self._linear is None:
            assert self._nursery is not None
            self._linear = self._lane({LINEAR: _known(self.reading)}, linear=True)
            self._nursery.start_soon(self._linear.run)
        return self._linear.channel

    def number(self, name: str) -> int:
        """The number of a writer that is listed, or was."""
        return self._roster.every[name]

    def writers_of(self, epoch: str, names: Iterable[str]) -> bytes:
        """The lines of WRITERS that name a set: what vector tokens of this stream are made of."""
        return writers_lines(self.name, epoch, {name: self._roster.every[name] for name in names})

    def kept(self, positions: Positions, shared: Vector) -> dict[str, int]:
        """What is left of positions of another generation, whose history is shared up to there."""
        return {name: min(at, self._shared_by(name, shared)) for name, at in positions.items()}

    def _shared_by(self, name: str, shared: Vector) -> int:
        number = None if name in (LINEAR, ALL) else self._roster.every.get(name)
        return shared.minimum if number is None else shared.at(number)

    def preamble(self, positions: Positions, *, extended: bool) -> bytes:
        """What a subscription begins with: positions, and for subscribers by name the writers before them.

        Kept for the last positions: after a restart of the daemon all clients come at about the same time.
        """
        known = self._preambles.get(extended)
        if known is None or known[0] is not positions:
            lines = position_lines(self.name, positions, positions, all_of_them=True)
            if extended:
                lines = self.writers_of(self._main.epoch, self.channel.boundary.positions) + lines
            known = self._preambles[extended] = (positions, lines)
        return known[1]

    async def know_writers(self, token: Vector) -> Set[int]:
        """Take note of the writers that the token names and that are not listed; returns numbers that nobody has."""
        return await self._roster.know_numbers(token.ahead.keys())

    async def know_writers_between(self, after: int, upto: int) -> None:
        """List the writers of rows in (after, upto]: a subscriber whose token would pass over them must not."""
        if self.stream.instance_column is not None and not self._roster.crowded and after < upto:
            await self._roster.welcome((await self._store.catchup_rows(self.stream).last_tokens(after, upto)).keys())

    async def retained(self) -> int:
        """The oldest token after which nothing was removed.

        Raises:
            StreamRefused: the stream was removed just now, or its table is locked.
        """
        try:
            token = await self._rows.earliest()
        except DatabaseError as error:
            if not is_locked(error):
                raise
            raise StreamRefused(
                f"table {self.stream.table} of stream {self.name} is locked by another session, so its rows cannot be "
                "read; try again, or see with `replicad streams list` who it is"
            ) from error
        if token is None:
            raise StreamRefused(f"stream {self.name} was removed")
        return token

    async def copy(self, after: Positions, upto: Positions, send: Send, *, linear: bool, others_after: int) -> None:
        """Send the rows of (after, upto], and where each writer then stands, for one client that catches up.

        Writers that are not in `upto` stand at `others_after`.

        Raises:
            TokenExpired: rows of the range were trimmed.
            RowUnreadable: a row cannot be read; everything before it was sent, and positions just below its id.
        """
        copier = Copier(self._store.catchup_rows(self.stream), linear=linear)
        seen = LastTokens(self.name, after, one=copier.one_writer)
        stopped: RowUnreadable | None = None

        async def pass_on(chunk: Chunk) -> None:
            await send(chunk.data)
            seen.see(chunk)

        try:
            await copier.copy(after, upto, pass_on, others_after)
        except (DatabaseError, RowTooLong) as error:
            done = seen.done
            reached = after if done is None else {name: max(at, min(done, upto[name])) for name, at in after.items()}
            others = others_after if done is None else max(others_after, done)
            stopped = await copier.blame(reached, upto, error, others)
            if stopped is None and isinstance(error, RowTooLong):
                raise DatabaseError(f"a row of {self.name} changed while it was read") from error
            if stopped is None:
                raise
            upto = below(reached, upto, stopped)
            await copier.copy(reached, upto, pass_on, others)
        if lines := position_lines(self.name, {**after, **seen.tokens}, upto):
            await send(lines)
        if stopped is not None:
            raise stopped

    async def taken(self) -> int:
        """Up to where ids have been given out by now."""
        return await self._store.taken(self.stream)

    # --- for the publisher ---

    def positions(self) -> tuple[int, dict[str, int]]:
        """What was published in the present generation: the linear position, and of the writers that are ahead of it
        each one's.
        """
        told = self.channel.boundary.positions
        linear = min([_known(self.reading), *told.values()])
        if self._linear is not None and self._linear.epoch == self.stream.epoch:  # it may have told of more
            linear = max(linear, self._linear.channel.boundary.positions[LINEAR])
        if self._main.epoch != self.stream.epoch:
            return linear, {}
        return linear, {name: at for name, at in told.items() if at > linear}

    def on_registered(self, writers: Set[str]) -> None:
        """The registry has these writers, those that are retired left out."""
        if self._roster.on_registered(writers):
            self._heard.set()

    def on_reading(self, reading: Reading) -> None:
        """The horizon has spoken."""
        if reading.position is None or reading.refused is not None:
            return
        self.reading = reading
        self._heard.set()

    async def run(self) -> None:
        """Serve the stream until cancelled."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            nursery.start_soon(self._main.run)
            self._heard.set()
            while True:
                await self._heard.wait()
                self._heard = trio.Event()
                try:
                    await self._follow()
                except (DatabaseError, TableReplaced) as error:
                    self._troubles.fail("stream", self.name, FOLLOW, error)
                    await trio.sleep(self._pace.follow_retry)
                    self._heard.set()
                else:
                    self._troubles.end("stream", self.name, FOLLOW)

    async def _follow(self) -> None:
        """Go where the horizon is now."""
        reading, lineage = self.reading, self.lineage  # newer ones may come meanwhile: their writers are not known yet
        await self._roster.look()
        await self._discover(reading)
        if self.lineage is lineage:
            self._aim(reading)

    def renew(self, stream: Stream) -> None:
        """Go on with other names of the same table, or other lines for the rows: from the next read on."""
        self.stream = stream
        self._rows = self._store.rows(stream)
        for lane in (self._main, self._linear):
            if lane is not None:
                lane.renew(self._rows)

    async def has_same_writers(self) -> bool:
        """Whether the database knows all writers under the numbers that readers were told."""
        numbers = {number: name for name, number in self._roster.every.items()}
        found = {one.number: one.name for one in await self._store.named(self.stream, numbers)}
        return found == numbers

    def adopt(self, stream: Stream, lineage: Lineage, shared: Vector) -> None:
        """Go on in another generation, whose history is shared up to there: readers are told to go back to it."""
        told = self.channel.boundary.positions
        if any(at > self._shared_by(name, shared) for name, at in told.items()):
            self.rewinds += 1
            self.late_rows = 0
        self.lineage = lineage
        self.renew(stream)
        reading = self.reading
        kept = min(_known(reading), shared.minimum)
        per_writer = {name: max(kept, at) for name, at in self.kept(reading.per_writer, shared).items()}
        self.reading = self._aimed = Reading(position=kept, per_writer=per_writer)
        self._known_upto = min(self._known_upto, kept)
        for lane in (self._main, self._linear):
            if lane is not None:
                lane.fork(stream.epoch, lambda name: self._shared_by(name, shared))

    def tell(self, line: bytes) -> None:
        """Send a line that is no row to all readers, between two reads."""
        for lane in (self._main, self._linear):
            if lane is not None:
                lane.tell(line)

    def end(self, error: ReplicadError) -> None:
        """Tell all readers that the stream is over."""
        for lane in (self._main, self._linear):
            if lane is not None:
                lane.channel.end(error)

    def _aim(self, reading: Reading) -> None:
        self._aimed = reading
        self._main.aim(self._targets(reading))
        if self._linear is not None:
            self._linear.aim({LINEAR: _known(reading)})

    async def _discover(self, reading: Reading) -> None:
        """Writers that nobody knew: give them numbers before the first of their rows goes out."""
        upto = _known(reading)
        if self.stream.instance_column is None or upto <= self._known_upto:
            return
        if self._roster.crowded:
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
                    return  # a writer's name that cannot be read: the lane stops before this row, and says which it is
                upto = (self._known_upto + upto) // 2
            else:
                await self._roster.welcome(found.keys())
                if self.lineage is not lineage:
                    return  # history has forked meanwhile
                self._known_upto, upto = upto, _known(reading)

    def _relist(self, joining: Set[str], leaving: Set[str]) -> trio.Event:
        """The list of writers has changed."""
        self._writers_changed({} if self._roster.crowded else self.numbers)
        self._main.aim(self._targets(self._aimed))
        return self._main.relist(joining, leaving)

    def _targets(self, reading: Reading) -> dict[str, int]:
        position = _known(reading)
        if self._roster.crowded:
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
        )


def _known(reading: Reading) -> int:
    assert reading.position is not None
    return reading.position
