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

from replicad.errors import DatabaseError, RowTooLong, RowUnreadable, StreamRefused, TokenExpired, UnknownStream
from replicad.postgres.bridge import Database
from replicad.postgres.horizon import Reading
from replicad.postgres.rows import Chunk, RowSource
from replicad.postgres.rows_probe import find_unreadable, is_of_a_row, try_row, unreadable
from replicad.protocol.commands import Position, Writers
from replicad.server.journal import Channel, JournalLimits
from replicad.server.troubles import Troubles
from replicad.streams import registry
from replicad.streams.registry import Stream

LINEAR = "*"  # the instance that POSITION names in a linear subscription: all writers together
POSITION_INTERVAL = 0.1  # seconds between two words that a position moved without rows; rows are never held up
RETRY_PAUSE = 0.2  # seconds before a copy that failed is tried again; doubles up to RETRY_PAUSE_MAX
RETRY_PAUSE_MAX = 5.0

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


def below(told: Positions, upto: Positions, error: RowUnreadable) -> dict[str, int]:
    """How far each writer can be told when a stream stops before a row; none goes back."""
    assert error.row_id is not None
    return {name: max(at, min(upto.get(name, at), error.row_id - 1)) for name, at in told.items()}


class Copier:
    """Copies ranges of one stream in one order."""

    def __init__(self, source: RowSource, *, linear: bool) -> None:
        self.source = source
        self.linear = linear

    async def copy(
        self, db: Database, after: Positions, upto: Positions, send: Callable[[Chunk], Awaitable[None]]
    ) -> None:
        """The rows of (after, upto] in chunks. Raises what `RowSource.copy_range` raises."""
        if self.linear:
            await self.source.copy_range(db, after[LINEAR], upto[LINEAR], send)
        elif ranges := self._ranges(after, upto):
            await self.source.copy_vector(db, ranges, send)

    async def blame(self, db: Database, after: Positions, upto: Positions, error: Exception) -> RowUnreadable | None:
        """The row because of which copying (after, upto] raised `error`; None where it is no row's fault, or no longer.

        Raises what `copy` raises, for reasons that are not of a row.
        """
        if not is_of_a_row(error):
            return None
        if isinstance(error, RowTooLong) and error.row_id is not None:
            return unreadable(self.source, error.row_id, error)
        if self.linear:
            return await find_unreadable(self.source, db, (after[LINEAR], upto[LINEAR]))
        ranges = self._ranges(after, upto)
        return await find_unreadable(self.source, db, ranges) if ranges else None

    @staticmethod
    def _ranges(after: Positions, upto: Positions) -> dict[str, tuple[int, int]]:
        return {name: (after[name], upto[name]) for name in upto if name in after and after[name] < upto[name]}


class Lane:
    """One order of one stream: a journal and the task that fills it.

    Where a row cannot be read, all rows before it go out, then the lane *holds*: its position stays just below the
    row's id, readers that get there are told why, and the row is tried again with a pause that grows, until it can be
    read.
    """

    def __init__(
        self,
        stream: str,
        copier: Copier,
        db: Database,
        positions: Positions,
        *,
        limits: JournalLimits,
        troubles: Troubles,
    ) -> None:
        self.channel = Channel(stream, positions, limits)
        self._stream = stream
        self._copier = copier
        self._db = db
        self._troubles = troubles
        order = " (linear)" if copier.linear else ""  # both lanes of a stream can fail, each at its own time
        self._copy_cause, self._row_cause = f"copy{order}", f"row{order}"
        self._target = dict(positions)
        self._heard = trio.Event()
        self._reset_lines: bytes | None = None
        self._joining: list[tuple[str, int, bytes, trio.Event]] = []
        self._told_at = float("-inf")
        self._held: RowUnreadable | None = None
        self._try_again_at = 0.0
        self._row_pause = RETRY_PAUSE

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

    def renew(self, copier: Copier) -> None:
        """Read by another statement from the next copy on; a row that could not be read is tried at once."""
        self._copier = copier
        self._try_again_at, self._row_pause = 0.0, RETRY_PAUSE
        self._heard.set()

    async def run(self) -> None:
        """Fill the journal until cancelled. Failures, whatever they are, are reported and tried again."""
        pause = RETRY_PAUSE
        while True:
            try:
                await self._wait_for_work()
                await self._work()
            except TokenExpired as error:
                log.warning("stream_trimmed_unread", stream=self._stream, error=str(error))
                self.channel.cut(error, self._target)
            except UnknownStream:  # whoever looks at the registry, each second, sees it too, and ends us
                await trio.sleep(RETRY_PAUSE)
            except Exception as error:  # noqa: BLE001 - reported, with its traceback where it is a defect
                self._troubles.fail("stream", self._stream, self._copy_cause, error)
                if self.channel.seam.index != self.channel.head:  # half of something went out that nobody accounts for
                    broken = DatabaseError(f"stream {self._stream} broke off; reconnect and resume")
                    self.channel.cut(broken, self.channel.seam.positions)
                await trio.sleep(pause)
                pause = min(2 * pause, RETRY_PAUSE_MAX)
            else:
                pause = RETRY_PAUSE
                self._troubles.end("stream", self._stream, self._copy_cause)

    async def _wait_for_work(self) -> None:
        """Until the target differs from what was told, and the time to say so has come."""
        while not self._joining and self._reset_lines is None:
            if self._held is None and self._target != self.channel.seam.positions:
                return
            if self._held is not None and trio.current_time() >= self._try_again_at:
                return
            self._heard = trio.Event()
            with trio.move_on_at(float("inf") if self._held is None else self._try_again_at):
                await self._heard.wait()

    async def _work(self) -> None:
        if self._reset_lines is not None:
            self._release()
            await self._announce_reset(self._reset_lines)
            return
        while self._joining:
            await self._announce_writer(*self._joining[0])
            del self._joining[0]
        if self._held is not None and not await self._readable_by_now(self._held):
            return
        try:
            await self._advance(self._target)
        except (DatabaseError, RowTooLong) as error:
            target = self._target
            at_fault = await self._copier.blame(self._db, self.channel.seam.positions, target, error)
            if at_fault is None:
                raise
            await self._advance(below(self.channel.seam.positions, target, at_fault), at_once=True)
            self._hold(at_fault)

    async def _readable_by_now(self, held: RowUnreadable) -> bool:
        """Try the row that the lane stops at again, if it is time to; when it can be read, go on."""
        if trio.current_time() < self._try_again_at:
            return False
        assert held.row_id is not None
        still = await try_row(self._copier.source, self._db, held.row_id)
        if still is not None:
            self._hold(still)
            return False
        self._release()
        return True

    def _hold(self, error: RowUnreadable) -> None:
        if self._held is None:
            self._row_pause = RETRY_PAUSE
        self._held = error
        self._try_again_at = trio.current_time() + self._row_pause
        self._row_pause = min(2 * self._row_pause, RETRY_PAUSE_MAX)
        self._troubles.begin("stream", self._stream, self._row_cause, str(error), code=error.code)
        self.channel.hold(error)

    def _release(self) -> None:
        if self._held is not None:
            self._held = None
            self._troubles.end("stream", self._stream, self._row_cause)
            self.channel.release()

    async def _advance(self, target: Positions, *, at_once: bool = False) -> None:
        """Copy what lies between what was told and the target; positions are told now and then, or `at_once`."""
        told = dict(self.channel.seam.positions)
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
        if told != target and (at_once or now >= self._told_at + POSITION_INTERVAL):
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
            StreamRefused: the stream was removed just now.
        """
        token = await self._source.earliest(self._db)
        if token is None:
            raise StreamRefused(f"stream {self.name} was removed")
        return token

    async def count(self, after: int, upto: int) -> int:
        """How many rows (after, upto] has now."""
        return await self._source.count(self._db, after, upto)

    async def copy(self, after: Positions, upto: Positions, send: Send, *, linear: bool) -> None:
        """Send the rows of (after, upto], and where each writer then stands, for one client that catches up.

        Raises:
            TokenExpired: rows of the range were trimmed.
            RowUnreadable: a row cannot be read; everything before it was sent, and positions just below its id.
        """
        seen, copier = LastTokens(self.name, after), Copier(self._source, linear=linear)
        stopped: RowUnreadable | None = None

        async def pass_on(chunk: Chunk) -> None:
            await send(chunk.data)
            seen.see(chunk)

        try:
            await copier.copy(self._catchup_db, after, upto, pass_on)
        except (DatabaseError, RowTooLong) as error:
            done = seen.done
            reached = after if done is None else {name: max(at, min(done, upto[name])) for name, at in after.items()}
            stopped = await copier.blame(self._catchup_db, reached, upto, error)
            if stopped is None and isinstance(error, RowTooLong):
                raise DatabaseError(f"a row of {self.name} changed while it was read") from error
            if stopped is None:
                raise
            upto = below(reached, upto, stopped)
            await copier.copy(self._catchup_db, reached, upto, pass_on)
        if lines := position_lines(self.name, {**after, **seen.tokens}, upto):
            await send(lines)
        if stopped is not None:
            raise stopped

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

    def renew(self, stream: Stream) -> None:
        """The registry says something else about rows of the same table: read by that from now on."""
        self.stream = stream
        self._source = registry.row_source(stream, schema=self._schema)
        for lane in (self._main, self._linear):
            if lane is not None:
                lane.renew(Copier(self._source, linear=lane is self._linear))

    async def run(self) -> None:
        """Serve the stream until cancelled."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            nursery.start_soon(self._main.run)
            while True:
                await self._heard.wait()
                self._heard = trio.Event()
                try:
                    if self._reset:
                        await self._handle_reset()
                    else:
                        await self._discover(self.reading)
                        self._aim(self.reading)
                except DatabaseError as error:
                    log.warning("stream_waits", stream=self.name, error=str(error))
                    await trio.sleep(RETRY_PAUSE)
                    self._heard.set()

    def end(self, error: StreamRefused) -> None:
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
        found = await self._source.last_tokens(self._db, self._known_upto, upto)
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
        self.stream = await registry.announce_reset(self._db, self.stream, _known(reading), schema=self._schema)
        self._known_from = self._known_upto = _known(reading)
        log.warning("stream_reset", stream=self.name, position=reading.position, epoch=self.epoch)
        self._reset = False
        self._main.reset(self._targets(reading), self._writers_line())
        if self._linear is not None:
            self._linear.reset({LINEAR: _known(reading)}, b"")

    def _writers_line(self) -> bytes:
        return self.writers().render().encode() + b"\n"

    def _targets(self, reading: Reading) -> dict[str, int]:
        position = _known(reading)
        return {name: reading.per_writer.get(name, position) for name in self.numbers}

    def _lane(self, positions: Positions, *, linear: bool) -> Lane:
        copier = Copier(self._source, linear=linear)
        return Lane(self.name, copier, self._db, positions, limits=self._limits, troubles=self._troubles)


def _known(reading: Reading) -> int:
    assert reading.position is not None
    return reading.position
