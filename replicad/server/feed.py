"""One stream from Postgres to its journals: positions come in, finished lines go out, row by row nothing is touched.

A stream has up to two orders, each a `Lane` with a journal of its own: per writer (each writer's rows as soon as that
writer's position allows) and linear (all rows in ascending order, made when somebody first asks for it). A lane
copies what lies between what its readers were told and what the horizon says now, tells positions that moved
without rows, and seals the journal where both agree.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Set

import structlog
import trio

from replicad.errors import DatabaseError, ReplicadError, StreamRefused, TokenExpired
from replicad.postgres.bridge import Database
from replicad.postgres.horizon import Reading
from replicad.postgres.rows import Chunk, RowSource
from replicad.protocol.commands import Position, Writers
from replicad.server.journal import Channel, JournalLimits
from replicad.server.troubles import Troubles
from replicad.streams import registry
from replicad.streams.queries import Impatient, is_locked
from replicad.streams.registry import Stream

LINEAR = "*"  # the instance that POSITION names in a linear subscription: all writers together
POSITION_INTERVAL = 0.1  # seconds between two words that a position moved without rows; rows are never held up
RETRY_PAUSE = 0.2  # seconds before a copy that failed is tried again; doubles up to RETRY_PAUSE_MAX
RETRY_PAUSE_MAX = 5.0
FOLLOW = "follow"  # the cause of a trouble that keeps a feed from taking a new position

Positions = Mapping[str, int]
Send = Callable[[bytes], Awaitable[None]]
log = structlog.get_logger()


class LastTokens:
    """The last token of each writer in the chunks that went by, found from the end of each chunk."""

    def __init__(self, stream: str, writers: Positions) -> None:
        self._single = next(iter(writers)) if len(writers) == 1 else None
        self._prefixes = {name: f"RDATA {stream} {name} ".encode() for name in writers}
        self.tokens: dict[str, int] = {}
        self.done: int | None = None  # ids up to here went by whole
        self.torn = False  # the last chunk ends within a batch

    def see(self, chunk: Chunk) -> None:
        """Note what a chunk ends with. Chunks come in ascending order of ids."""
        self.torn = chunk.token is None
        if chunk.token is not None:
            self.done = chunk.token
        if self._single is not None:
            if chunk.token is not None:
                self.tokens[self._single] = chunk.token
            return
        for name, prefix in self._prefixes.items():
            at = chunk.data.rfind(b"\n" + prefix) + 1
            if at or chunk.data.startswith(prefix):
                word = chunk.data[at + len(prefix) : at + len(prefix) + 21].split(b" ", 1)[0]
                if word != b"batch":  # its number is in the next chunk
                    self.tokens[name] = int(word)


def position_lines(stream: str, told: Positions, now: Positions) -> bytes:
    """POSITION for each writer that has moved from what was told."""
    return b"".join(
        Position(stream, name, told[name], now[name]).render().encode() + b"\n"
        for name in sorted(now)
        if told[name] != now[name]
    )


class Copier:
    """Copies ranges of one stream in one order."""

    def __init__(self, source: RowSource, *, linear: bool) -> None:
        self.source = source
        self._linear = linear

    async def copy(
        self, db: Database, after: Positions, upto: Positions, send: Callable[[Chunk], Awaitable[None]]
    ) -> None:
        """The rows of (after, upto] in chunks. Raises TokenExpired where rows of the range were trimmed."""
        if self._linear:
            await self.source.copy_range(db, after[LINEAR], upto[LINEAR], send)
        else:
            ranges = {name: (after[name], upto[name]) for name in upto if after[name] < upto[name]}
            await self.source.copy_vector(db, ranges, send)


class Lane:
    """One order of one stream: a journal and the task that fills it."""

    def __init__(self, stream: str, copier: Copier, db: Database, positions: Positions, limits: JournalLimits) -> None:
        self.channel = Channel(stream, positions, limits)
        self._stream = stream
        self._copier = copier
        self._db = db
        self._target = dict(positions)
        self._heard = trio.Event()
        self._reset_lines: bytes | None = None
        self._joining: list[tuple[str, int, bytes, trio.Event]] = []
        self._notices: list[tuple[bytes, bool]] = []
        self._told_at = float("-inf")

    def aim(self, target: Positions) -> None:
        """The horizon has moved; only the latest target counts."""
        if target != self._target:
            self._target = dict(target)
            self._heard.set()

    def reset(self, target: Positions, writers: bytes) -> None:
        """The ids went back to `target`, which is told as it is; what was under way is finished first."""
        self._target = dict(target)
        self._reset_lines = writers
        self._heard.set()

    def join(self, name: str, position: int, writers: bytes) -> trio.Event:
        """A new writer, whose rows up to `position` need not be sent; the event comes when readers were told of it.

        To be called before the first target that names it.
        """
        told = trio.Event()
        self._joining.append((name, position, writers, told))
        self._heard.set()
        return told

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
        while not (self._notices or self._joining) and self._reset_lines is None and self._is_there():
            self._heard = trio.Event()
            await self._heard.wait()

    def _is_there(self) -> bool:
        return self._target == self.channel.seam.positions

    async def _advance(self) -> None:
        while self._notices:
            line, extended = self._notices.pop(0)
            await self.channel.append(line, extended=extended)
            self.channel.seal(self.channel.seam.positions)  # who joins later was not there
        if self._reset_lines is not None:
            await self._announce_reset(self._reset_lines)
            return
        for joining in self._joining:
            await self._announce_writer(*joining)
        self._joining.clear()
        told, target = dict(self.channel.seam.positions), self._target
        seen = LastTokens(self._stream, told)

        async def append(chunk: Chunk) -> None:
            await self.channel.append(chunk.data)
            seen.see(chunk)

        try:
            await self._copier.copy(self._db, told, target, append)
        except BaseException:
            self._keep_what_went_out(told, target, seen)
            raise
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

    async def _announce_writer(self, name: str, position: int, writers: bytes, told: trio.Event) -> None:
        await self.channel.append(writers, extended=True)
        await self.channel.append(Position(self._stream, name, position, position).render().encode() + b"\n")
        self.channel.seal({**self.channel.seam.positions, name: position})
        self._target.setdefault(name, position)
        told.set()

    async def _announce_reset(self, writers: bytes) -> None:
        told, target = self.channel.seam.positions, self._target
        self._reset_lines = None
        await self.channel.append(writers, extended=True)
        await self.channel.append(position_lines(self._stream, {**target, **told}, target))
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
        """`reading` has a position. `writers_changed` is told the numbers when a writer joins."""
        self.stream = stream
        self.name = stream.name
        self.numbers = dict(stream.writers)
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
        self._known_from = self._known_upto = _known(reading)  # all writers of rows between these have numbers
        self._heard = trio.Event()
        self._reset = False
        self._nursery: trio.Nursery | None = None

    # --- for subscribers ---

    @property
    def epoch(self) -> str:
        """Changes when ids mean other rows than before."""
        return self.stream.epoch

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

    def writers(self) -> Writers:
        """What vector tokens of this stream are made of."""
        return Writers(self.name, self.epoch, tuple(sorted(self.numbers.items(), key=lambda item: item[1])))

    async def know_writers_above(self, token: int) -> None:
        """Give numbers to the writers of all rows above `token`: a subscriber that begins there must not miss any."""
        if self.stream.instance_column is None or token >= self._known_from:
            return
        found = await self._source.last_tokens(self._catchup_db, token, self._known_from)
        for told in await self._welcome(found.keys() - self.numbers.keys()):
            await told.wait()
        self._known_from = min(token, self._known_from)

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

    async def copy(self, after: Positions, upto: Positions, send: Send, *, linear: bool) -> None:
        """Send the rows of (after, upto], and where each writer then stands, for one client that catches up.

        Raises:
            TokenExpired: rows of the range were trimmed.
        """
        seen = LastTokens(self.name, after)

        async def pass_on(chunk: Chunk) -> None:
            await send(chunk.data)
            seen.see(chunk)

        await Copier(self._source, linear=linear).copy(self._catchup_db, after, upto, pass_on)
        if lines := position_lines(self.name, {**after, **seen.tokens}, upto):
            await send(lines)

    async def taken(self) -> int:
        """Up to where ids have been given out by now."""
        return await registry.taken(self._db, self.stream, schema=self._schema)

    # --- for the publisher ---

    def positions(self) -> tuple[int, dict[str, int]]:
        """What was published: the linear position and each writer's."""
        told = dict(self.channel.seam.positions)
        return min([_known(self.reading), *told.values()]), told

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
            await self._discover(self.reading)
            self._aim(self.reading)

    def renew(self, stream: Stream) -> None:
        """Go on with other names of the same table, or other lines for the rows: from the next read on.

        With another epoch (a failover) the tokens of before are void; whether ids have gone back the horizon will see.
        """
        told, self.stream = self.stream, stream
        if told.epoch != stream.epoch:
            self._main.tell(self._writers_line(), extended=True)
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
        found = await self._source.last_tokens(self._looks, self._known_upto, upto)
        for told in await self._welcome(found.keys() - self.numbers.keys()):
            await told.wait()
        self._known_upto = upto

    async def _welcome(self, names: Set[str]) -> list[trio.Event]:
        """Have new writers told to all readers; the events come when that is done."""
        if not names:
            return []
        self.numbers |= await registry.ensure_writers(self._db, self.stream, names, schema=self._schema)
        self._writers_changed(self.numbers)
        log.info("writers_joined", stream=self.name, writers=sorted(names))
        line = self._writers_line()
        return [self._main.join(name, self._known_upto, line) for name in sorted(names)]

    async def _handle_reset(self) -> None:
        reading = self.reading
        stream = await registry.announce_reset(self._db, self.stream, _known(reading), schema=self._schema)
        self._source = registry.row_source(stream, schema=self._schema)
        self.stream = stream
        self._known_from = self._known_upto = _known(reading)
        log.warning("stream_reset", stream=self.name, position=reading.position, epoch=self.epoch)
        self._reset = False
        self._main.renew(self._source)
        self._main.reset(self._targets(reading), self._writers_line())
        if self._linear is not None:
            self._linear.renew(self._source)
            self._linear.reset({LINEAR: _known(reading)}, b"")

    def _writers_line(self) -> bytes:
        return self.writers().render().encode() + b"\n"

    def _targets(self, reading: Reading) -> dict[str, int]:
        position = _known(reading)
        return {name: reading.per_writer.get(name, position) for name in self.numbers}

    def _lane(self, positions: Positions, *, linear: bool) -> Lane:
        return Lane(self.name, Copier(self._source, linear=linear), self._db, positions, self._limits)


def _known(reading: Reading) -> int:
    assert reading.position is not None
    return reading.position
