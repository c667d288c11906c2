"""One stream from Postgres to its journals: positions come in, finished lines go out, row by row nothing is touched.

A stream has up to two orders, each a `Lane` with a journal of its own: per writer (each writer's rows as soon as that
writer's position allows) and linear (all rows in ascending order, made when somebody first asks for it). A lane
copies what lies between what its readers were told and what the horizon says now, tells positions that moved
without rows, and seals the journal where both agree.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Set

import structlog
import trio

from replicad.errors import DatabaseError, ReplicadError, StreamRefused, TokenExpired
from replicad.postgres.bridge import Database
from replicad.postgres.horizon import Reading
from replicad.postgres.rows import Chunk, RowSource
from replicad.protocol.tokens import Vector
from replicad.protocol.writer_set import WRITERS_ON_LINE, writers_lines
from replicad.server.journal import Channel, JournalLimits
from replicad.server.roster import Roster
from replicad.server.told import LastTokens, Positions, position_lines, set_lines
from replicad.server.troubles import Troubles
from replicad.streams import registry
from replicad.streams.queries import Impatient, is_locked
from replicad.streams.registry import Stream

LINEAR = "*"  # the instance that POSITION names in a linear subscription: all writers together
POSITION_INTERVAL = 0.1  # seconds between two words that a position moved without rows; rows are never held up
RETRY_PAUSE = 0.2  # seconds before a copy that failed is tried again; doubles up to RETRY_PAUSE_MAX
RETRY_PAUSE_MAX = 5.0
FOLLOW = "follow"  # the cause of a trouble that keeps a feed from taking a new position
UNKNOWN = -(1 << 63)  # below every position

Send = Callable[[bytes], Awaitable[None]]
log = structlog.get_logger()


class Copier:
    """Copies ranges of one stream in one order."""

    def __init__(self, source: RowSource, *, linear: bool) -> None:
        self.source = source
        self.one_writer = linear or source.instance_column is None
        self._linear = linear

    async def copy(
        self,
        db: Database,
        after: Positions,
        upto: Positions,
        send: Callable[[Chunk], Awaitable[None]],
        others_after: int | None = None,
    ) -> None:
        """The rows of (after, upto] in chunks. Writers that are not listed stand at the minimum of those that are;
        before, where `others_after` says so, at that. Raises TokenExpired where rows of the range were trimmed.
        """
        if self._linear:
            await self.source.copy_range(db, after[LINEAR], upto[LINEAR], send)
            return
        ranges = {name: (after[name], at) for name, at in upto.items()}
        if self.one_writer:
            await self.source.copy_vector(db, {n: span for n, span in ranges.items() if span[0] < span[1]}, send)
            return
        lowest = min(after.values(), default=None) if others_after is None else others_after
        others = None if lowest is None else (lowest, max(lowest, min(upto.values(), default=lowest)))
        if any(low < high for low, high in ranges.values()) or (others and others[0] < others[1]):
            await self.source.copy_vector(db, ranges, send, others=others)


class Lane:
    """One order of one stream: a journal and the task that fills it."""

    def __init__(
        self,
        stream: str,
        copier: Copier,
        db: Database,
        positions: Positions,
        *,
        limits: JournalLimits,
        writers: Callable[[Iterable[str]], bytes],
    ) -> None:
        """`writers` makes the lines of WRITERS that name a set."""
        self.channel = Channel(stream, positions, limits)
        self._stream = stream
        self._copier = copier
        self._db = db
        self._writers = writers
        self._target = dict(positions)
        self._heard = trio.Event()
        self._resetting = False
        self._joining: set[str] = set()
        self._leaving: set[str] = set()
        self._relisted = trio.Event()
        self._left: dict[str, int] = {}  # writers that are listed no more, and what was told of them last
        self._copied: Positions | None = None  # rows up to here went out, though readers may be told less
        self._notices: list[tuple[bytes, bool]] = []
        self._told_at = float("-inf")

    def aim(self, target: Positions) -> None:
        """The horizon has moved; only the latest target counts."""
        if target != self._target:
            self._target = dict(target)
            self._heard.set()

    def reset(self, target: Positions) -> None:
        """The ids went back to `target`, which is told as it is; what was under way is finished first."""
        self._target = dict(target)
        self._resetting = True
        self._heard.set()

    def relist(self, joining: Set[str], leaving: Set[str]) -> trio.Event:
        """List writers, from where those stand that are not listed, and others no more; the event comes when readers
        were told of those that join. One that leaves does so when it is no longer behind all that stay.
        """
        self._joining = (self._joining - leaving) | joining
        self._leaving = (self._leaving - joining) | leaving
        self._heard.set()
        return self._relisted

    def tell(self, line: bytes, *, extended: bool = False) -> None:
        """Send a line that is no row, when no row is on its way."""
        self._notices.append((line, extended))
        self._heard.set()

    def renew(self, source: RowSource) -> None:
        """Read from this from the next copy on."""
        self._copier.source = source
        self._heard.set()

    async def run(self) -> None:
        """Fill the journal until cancelled. Failures of Postgres are told and tried again."""
        pause = RETRY_PAUSE
        while True:
            try:
                await self._wait_for_work()
                await self._advance()
                pause = RETRY_PAUSE
            except TokenExpired as error:
                log.warning("stream_trimmed_unread", stream=self._stream, error=str(error))
                self.channel.cut(error, self._target)
            except DatabaseError as error:
                log.warning("stream_copy_failed", stream=self._stream, error=str(error), again_in_s=pause)
                await trio.sleep(pause)
                pause = min(2 * pause, RETRY_PAUSE_MAX)

    async def _wait_for_work(self) -> None:
        """Until the target differs from what was told, and the time to say so has come."""
        while not (self._notices or self._joining or self._resetting or self._may_leave() or not self._is_there()):
            self._heard = trio.Event()
            await self._heard.wait()

    def _is_there(self) -> bool:
        return self._goal() == self.channel.seam.positions

    def _goal(self) -> dict[str, int]:
        """The target of the writers that are listed. One that is about to leave follows the others."""
        told, target = self.channel.seam.positions, self._target
        if told.keys() == target.keys():
            return target
        lowest = min(target.values(), default=UNKNOWN)
        return {name: target[name] if name in target else max(at, lowest) for name, at in told.items()}

    def _may_leave(self) -> Set[str]:
        """Which of those that are to leave can: from then on they stand where the lowest of the others stands."""
        told = self.channel.seam.positions
        if not self._leaving or self._joining:
            return frozenset()
        lowest = min((at for name, at in told.items() if name not in self._leaving), default=None)
        return {name for name in self._leaving & told.keys() if lowest is not None and told[name] >= lowest}

    async def _advance(self) -> None:
        while self._notices:
            line, extended = self._notices.pop(0)
            await self.channel.append(line, extended=extended)
            self.channel.seal(self.channel.seam.positions)  # who joins later was not there
        if self._resetting:
            await self._announce_reset()
            return
        if self._joining:
            await self._announce_joining()
        if leaving := self._may_leave():
            await self._announce_leaving(leaving)
        told, target = dict(self.channel.seam.positions), self._goal()
        seen = LastTokens(self._stream, told, one=self._copier.one_writer)

        async def append(chunk: Chunk) -> None:
            await self.channel.append(chunk.data)
            seen.see(chunk)

        copied, self._copied = self._copied, None
        try:
            await self._copier.copy(self._db, copied or told, target, append)
        except BaseException:
            self._keep_what_went_out(told, target, seen)
            raise
        self._copied = target
        told |= seen.tokens
        now = trio.current_time()
        if told != target and now >= self._told_at + POSITION_INTERVAL:
            await self.channel.append(position_lines(self._stream, told, target))
            self._told_at = now
            told = dict(target)
        self.channel.seal(told)
        if told != target:
            self._heard = trio.Event()
            with trio.move_on_at(self._told_at + POSITION_INTERVAL):
                await self._heard.wait()

    def _keep_what_went_out(self, told: dict[str, int], target: Positions, seen: LastTokens) -> None:
        """A copy broke off: go on behind the last whole row that readers got, or cut them off where there is none."""
        if seen.torn:
            self.channel.cut(DatabaseError("Postgres broke off within a batch; reconnect and resume"), told)
        elif seen.done is not None:
            done = seen.done
            self.channel.seal({name: max(at, min(done, target[name])) for name, at in told.items()})

    async def _announce_joining(self) -> None:
        """List the writers that join: the whole set where one line holds it, else the new ones, which add to it."""
        told = self.channel.seam.positions
        joining, names = self._joining, self._joining - told.keys()
        relisted, self._relisted = self._relisted, trio.Event()
        lowest = min((told or self._target).values(), default=0)
        if names:
            listed = {**told, **dict.fromkeys(names, lowest)}
            whole = len(listed) <= WRITERS_ON_LINE
            await self.channel.append(self._writers(listed if whole else names), extended=True)
            before = {name: min(self._left.pop(name, lowest), lowest) for name in names}
            lines = position_lines(self._stream, before, dict.fromkeys(names, lowest), all_of_them=True)
            await self.channel.append(lines)
            if self._copied is not None:
                self._copied = {**self._copied, **dict.fromkeys(names, min(self._copied.values(), default=lowest))}
            self._target = {**dict.fromkeys(names, lowest), **self._target}
            self.channel.seal(listed)
        self._joining = self._joining - joining
        relisted.set()

    async def _announce_leaving(self, leaving: Set[str]) -> None:
        """List writers no more. The set is told whole, and a POSITION behind it says so."""
        told = self.channel.seam.positions
        listed = {name: at for name, at in told.items() if name not in leaving}
        await self.channel.append(set_lines(self._stream, self._writers(listed), listed), extended=True)
        self._left |= {name: told[name] for name in leaving}
        if self._copied is not None:
            self._copied = {name: at for name, at in self._copied.items() if name in listed}
        self._leaving = self._leaving - leaving
        self.channel.seal(listed)

    async def _announce_reset(self) -> None:
        told = self.channel.seam.positions
        target = {name: self._target.get(name, min(self._target.values(), default=at)) for name, at in told.items()}
        self._resetting = False
        self._copied = None
        if LINEAR not in told:
            await self.channel.append(self._writers(told), extended=True)
        await self.channel.append(position_lines(self._stream, told, target, all_of_them=True))
        self.channel.seal(target)


class Feed:
    """A stream that is served: its lanes, its writers' numbers, its epoch."""

    def __init__(
        self,
        stream: Stream,
        db: Database,
        catchup_db: Database,
        reading: Reading,
        *,
        schema: str,
        limits: JournalLimits,
        troubles: Troubles,
        writers_changed: Callable[[Mapping[str, int]], None],
    ) -> None:
        """`reading` has a position. `writers_changed` is told the numbers of the writers that are listed."""
        self.stream = stream
        self.name = stream.name
        self._roster = Roster(stream, db, self._relist, troubles, schema=schema)
        self._preambles: dict[bool, tuple[Positions, bytes]] = {}
        self.reading = reading
        self.late_rows = 0  # that turned up at or below a position that was told: each is a row that readers missed
        self._db = db
        self._catchup_db = catchup_db
        self._schema = schema
        self._limits = limits
        self._troubles = troubles
        self._looks = Impatient(db)  # what asks the stream's table must not wait long for whoever has it locked
        self._writers_changed = writers_changed
        self._source = registry.row_source(stream, schema=schema)
        self._linear: Lane | None = None
        self._main = self._lane(self._targets(reading), linear=False)
        self._known_upto = _known(reading)  # the writers of rows that come behind are looked for first
        self._heard = trio.Event()
        self._reset = False
        self._nursery: trio.Nursery | None = None

    # --- for subscribers ---

    @property
    def epoch(self) -> str:
        """Changes when ids mean other rows than before."""
        return self.stream.epoch

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
        return min(self.channel.seam.positions.values(), default=self._known_upto)

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

    def writers_of(self, names: Iterable[str]) -> bytes:
        """The lines of WRITERS that name a set: what vector tokens of this stream are made of."""
        return writers_lines(self.name, self.epoch, {name: self._roster.every[name] for name in names})

    def preamble(self, positions: Positions, *, extended: bool) -> bytes:
        """What a subscription begins with: positions, and for subscribers by name the writers before them.

        Kept for the last positions: after a restart of the daemon all clients come at about the same time.
        """
        known = self._preambles.get(extended)
        if known is None or known[0] is not positions:
            lines = position_lines(self.name, positions, positions, all_of_them=True)
            if extended:
                lines = self.writers_of(self.channel.seam.positions) + lines
            known = self._preambles[extended] = (positions, lines)
        return known[1]

    async def know_writers(self, token: Vector) -> Set[int]:
        """Take note of the writers that the token names and that are not listed; returns numbers that nobody has."""
        return await self._roster.know_numbers(token.ahead.keys())

    async def know_writers_between(self, after: int, upto: int) -> None:
        """List the writers of rows in (after, upto]: a subscriber whose token would pass over them must not."""
        if self.stream.instance_column is not None and not self._roster.crowded and after < upto:
            await self._roster.welcome((await self._source.last_tokens(self._catchup_db, after, upto)).keys())

    async def retained(self) -> int:
        """The oldest token after which nothing was removed.

        Raises:
            StreamRefused: the stream was removed just now, or its table is locked.
        """
        try:
            token = await self._source.earliest(self._looks)
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

    async def count(self, after: int, upto: int) -> int:
        """How many rows (after, upto] has now. Gives up quickly where the table is locked."""
        return await self._source.count(self._looks, after, upto)

    async def copy(self, after: Positions, upto: Positions, send: Send, *, linear: bool, others_after: int) -> None:
        """Send the rows of (after, upto], and where each writer then stands, for one client that catches up.

        Writers that are not in `upto` stand at `others_after`.

        Raises:
            TokenExpired: rows of the range were trimmed.
        """
        copier = Copier(self._source, linear=linear)
        seen = LastTokens(self.name, after, one=copier.one_writer)

        async def pass_on(chunk: Chunk) -> None:
            await send(chunk.data)
            seen.see(chunk)

        await copier.copy(self._catchup_db, after, upto, pass_on, others_after)
        if lines := position_lines(self.name, {**after, **seen.tokens}, upto):
            await send(lines)

    async def taken(self) -> int:
        """Up to where ids have been given out by now."""
        return await registry.taken(self._db, self.stream, schema=self._schema)

    # --- for the publisher ---

    def positions(self) -> tuple[int, dict[str, int]]:
        """What was published: the linear position, and of the writers that are ahead of it each one's."""
        told = self.channel.seam.positions
        linear = min([_known(self.reading), *told.values()])
        return linear, {name: at for name, at in told.items() if at > linear}

    def on_registered(self, writers: Set[str]) -> None:
        """The registry has these writers, those that are retired left out."""
        if self._roster.on_registered(writers):
            self._heard.set()

    def on_reading(self, reading: Reading) -> None:
        """The horizon has spoken."""
        if reading.position is None or reading.refused is not None:
            return
        self._reset = self._reset or reading.reset
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
                except DatabaseError as error:
                    self._troubles.fail("stream", self.name, FOLLOW, error)
                    await trio.sleep(RETRY_PAUSE)
                    self._heard.set()
                else:
                    self._troubles.end("stream", self.name, FOLLOW)

    async def _follow(self) -> None:
        """Go where the horizon is now."""
        if self._reset:
            await self._handle_reset()
        else:
            await self._roster.look()
            await self._discover(self.reading)
            self._aim(self.reading)

    def renew(self, stream: Stream) -> None:
        """Go on with other names of the same table, or other lines for the rows: from the next read on.

        With another epoch (a failover) the tokens of before are void; whether ids have gone back the horizon will see.
        """
        told, self.stream = self.stream, stream
        if told.epoch != stream.epoch:
            self._main.tell(self.writers_of(self.channel.seam.positions), extended=True)
        self._source = registry.row_source(stream, schema=self._schema)
        for lane in (self._main, self._linear):
            if lane is not None:
                lane.renew(self._source)

    def tell(self, line: bytes) -> None:
        """Send a line that is no row to all readers, between two reads."""
        for lane in (self._main, self._linear):
            if lane is not None:
                lane.tell(line)

    def end(self, error: ReplicadError) -> None:
        """Tell all readers that the stream is over."""
        for lane in (self._main, self._linear):
            if lane is not None:
                lane.channel.cut(error, lane.channel.seam.positions)

    def _aim(self, reading: Reading) -> None:
        self._main.aim(self._targets(reading))
        if self._linear is not None:
            self._linear.aim({LINEAR: _known(reading)})

    async def _discover(self, reading: Reading) -> None:
        """Writers that nobody knew: give them numbers before the first of their rows goes out."""
        upto = _known(reading)
        if self.stream.instance_column is None or upto <= self._known_upto:
            return
        if not self._roster.crowded:
            await self._roster.welcome((await self._source.last_tokens(self._looks, self._known_upto, upto)).keys())
        self._known_upto = upto

    def _relist(self, joining: Set[str], leaving: Set[str]) -> trio.Event:
        """The list of writers has changed."""
        self._writers_changed({} if self._roster.crowded else self.numbers)
        self._main.aim(self._targets(self.reading))
        return self._main.relist(joining, leaving)

    async def _handle_reset(self) -> None:
        reading = self.reading
        stream = await registry.announce_reset(self._db, self.stream, _known(reading), schema=self._schema)
        self._source = registry.row_source(stream, schema=self._schema)
        self.stream = stream
        self._known_upto = _known(reading)
        log.warning("stream_reset", stream=self.name, position=reading.position, epoch=self.epoch)
        self._reset = False
        self._main.renew(self._source)
        self._main.reset(self._targets(reading))
        if self._linear is not None:
            self._linear.renew(self._source)
            self._linear.reset({LINEAR: _known(reading)})

    def _targets(self, reading: Reading) -> dict[str, int]:
        position = _known(reading)
        if self._roster.crowded:
            return dict.fromkeys(self.numbers, position)
        return {name: reading.per_writer.get(name, position) for name in self.numbers}

    def _lane(self, positions: Positions, *, linear: bool) -> Lane:
        return Lane(
            self.name,
            Copier(self._source, linear=linear),
            self._db,
            positions,
            limits=self._limits,
            writers=self.writers_of,
        )


def _known(reading: Reading) -> int:
    assert reading.position is not None
    return reading.position
