"""One order of one stream: copies the rows between the positions that were sent and the target into a journal.

The order is either per writer (each writer's rows as soon as that writer's position allows) or linear (all rows in
ascending order). A lane copies rows, sends POSITION for positions that moved without rows, and sets the journal's
boundary when both are sent. No row is touched in Python. `ServedStream` decides the target and which writers
are listed.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Set

import structlog
import trio

from replicad.daemon.journal import Channel, JournalLimits
from replicad.daemon.troubles import Troubles
from replicad.errors import DatabaseError, RowTooLong, RowUnreadable, TokenExpired, UnknownStream
from replicad.retry import Backoff
from replicad.streams.chunks import Chunk, Enough
from replicad.streams.commands import WRITERS_ON_LINE
from replicad.streams.row_pieces import MANY, RowSizes, copy_all
from replicad.streams.row_text import MASTER, Range, is_one
from replicad.streams.serving.counts import SentCounts, Tally, spans_of
from replicad.streams.serving.intervals import StreamIntervals
from replicad.streams.table_rows import TableRows, is_of_a_row

LINEAR = "*"  # the instance that POSITION names in a linear subscription: all writers together
PER_WRITER, LINEAR_ORDER = "per_writer", "linear"  # the orders of a stream
ROOM = 256 << 10  # bytes that must be free before a copy that was ended goes on: beginning one takes milliseconds
UNKNOWN = -(1 << 63)  # below every position

log = structlog.get_logger()


def below(sent: Positions, upto: Positions, error: RowUnreadable) -> dict[str, int]:
    """The position of each writer when a stream stops before an unreadable row; none goes back."""
    assert error.row_id is not None
    return {name: max(at, min(upto.get(name, at), error.row_id - 1)) for name, at in sent.items()}


class Copier:
    """Copies ranges of one stream in one order."""

    def __init__(self, rows: TableRows, *, linear: bool) -> None:
        self.rows = rows
        self.sizes = RowSizes()
        self.linear = linear
        self.one_writer = linear or not rows.names_writers

    async def copy(
        self,
        after: Positions,
        upto: Positions,
        send: Callable[[Chunk], Awaitable[None]],
        others_after: int | None = None,
    ) -> int:
        """Send the rows of (after, upto] in chunks; returns how many. Writers that are not listed are at the minimum of
        the listed ones; `others_after` replaces their lower bound. Raises what `RowSource.copy_range` raises.
        """
        if self.linear:
            span = after[LINEAR], upto[LINEAR]
            return await (self._copy_many(span, send) if self._is_many(span) else self.rows.copy_range(*span, send))
        ranges, others = self.ranges(after, upto, others_after)
        one = others if self.rows.names_writers else ranges.get(MASTER)
        if one is not None and is_one(ranges, one) and self._is_many(one):
            return await self._copy_many(one, send)
        if any(low < high for low, high in (*ranges.values(), *([others] if others else ()))):
            return await self.rows.copy_vector(ranges, send, others=others)
        return 0

    def _is_many(self, span: Range) -> bool:
        return span[1] - span[0] >= MANY and self.rows.sends_blocks

    async def _copy_many(self, span: Range, send: Callable[[Chunk], Awaitable[None]]) -> int:
        return await copy_all(self.rows, self.sizes, *span, send)

    async def blame(
        self, after: Positions, upto: Positions, error: Exception, others_after: int | None = None
    ) -> RowUnreadable | None:
        """The row that made the copy of (after, upto] raise `error`; None if none did, or it can be read now.

        Raises what `copy` raises, for reasons that are not of a row.
        """
        if not is_of_a_row(error):
            return None
        if isinstance(error, RowTooLong) and error.row_id is not None:
            return self.rows.unreadable(error.row_id, error)
        if self.linear:
            return await self.rows.find_unreadable((after[LINEAR], upto[LINEAR]))
        ranges, others = self.ranges(after, upto, others_after)
        return await self.rows.find_unreadable(ranges, others)

    def ranges(
        self, after: Positions, upto: Positions, others_after: int | None
    ) -> tuple[dict[str, Range], Range | None]:
        """A range for each listed writer, and the range of all others."""
        return spans_of(after, upto, one=self.one_writer, others_after=others_after)


class Lane:
    """A journal and the task that fills it.

    If a row cannot be read, all rows before it are sent. Then the lane *holds*: its position stays just below the row's
    id, readers that reach it get the reason, and the row is tried again with a growing pause.
    """

    def __init__(
        self,
        stream: str,
        copier: Copier,
        positions: Positions,
        *,
        limits: JournalLimits,
        troubles: Troubles,
        writers_of: Callable[[str, Iterable[str]], bytes],
        epoch: str,
        pace: StreamIntervals = StreamIntervals(),
        tally: Tally | None = None,
        sent: SentCounts | None = None,
        seen_since: Callable[[int], float | None] = lambda _: None,
    ) -> None:
        """`writers_of(epoch, names)` makes lines of WRITERS that name a set. `epoch` is the generation of `positions`.
        `tally`: where the rows that were sent are counted for the audit; `sent`: where they are counted for figures.
        `seen_since(id)`: when the first id above this one was seen to be given out.
        """
        self.channel = Channel(stream, positions, limits)
        self._seen_since = seen_since
        self.epoch = epoch  # the generation that was sent to readers last
        self.linear = copier.linear
        self._stream = stream
        self._copier = copier
        self._pace = pace
        self.writers_of = writers_of
        self._troubles = troubles
        self._order = LINEAR_ORDER if copier.linear else PER_WRITER
        order = " (linear)" if copier.linear else ""  # both lanes of a stream can fail, independently
        self._copy_cause, self._row_cause = f"copy{order}", f"row{order}"
        self._tally = Tally() if tally is None else tally
        self._sent = SentCounts() if sent is None else sent
        self._target = dict(positions)
        self._changed = trio.Event()
        self._forked: tuple[str, Callable[[str], int]] | None = None  # the next epoch, and the position shared with it
        self._joining: set[str] = set()
        self._leaving: set[str] = set()
        self._untold: list[trio.Event] = []  # of changes of the writers that readers were not sent yet
        self._over = False
        self._left: dict[str, int] = {}  # writers that are no longer listed, and their positions that were sent last
        self._copied: Positions | None = None  # rows up to here were sent; the positions sent may be lower
        self._notices: list[bytes] = []
        self._position_sent_at = float("-inf")
        self._held: RowUnreadable | None = None
        self._try_again_at = 0.0
        self._copy_backoff = Backoff(pace.copy_retry, pace.longest_copy_retry, jitter=0.0)
        self._row_backoff = Backoff(pace.copy_retry, pace.longest_copy_retry, jitter=0.0)

    def set_target(self, target: Positions) -> None:
        """Copy up to these positions; only the latest target counts."""
        if target != self._target:
            self._target = dict(target)
            self._changed.set()

    def fork(self, epoch: str, shared: Callable[[str], int]) -> None:
        """Go on in another generation, with no writer beyond its shared position. A copy that runs is finished first:
        its rows are the same in both histories, or lie above the shared position.
        """
        before = self._forked
        bound = shared if before is None else lambda name: min(before[1](name), shared(name))
        self._forked = (epoch, bound)
        self._target = {name: min(at, bound(name)) for name, at in self.channel.boundary.positions.items()}
        self._changed.set()

    async def wait_epoch_sent(self, epoch: str) -> None:
        """Wait until this generation has been sent to readers."""
        while self.epoch != epoch:
            await self.channel.wait_sealed()

    async def wait_beyond(self, epoch: str) -> None:
        """Wait until a later generation has been sent to readers, or the journal has ended."""
        while self.epoch == epoch and self.channel.ended is None:
            await self.channel.wait_sealed()

    def change_writers(self, joining: Set[str], leaving: Set[str]) -> trio.Event:
        """Change the listed writers. Joining writers begin at the position of writers that are not listed. A leaving
        writer is removed when it is not behind all that stay. The event is set when the joining writers, of this change
        or earlier ones, have been announced to readers, or when the lane has stopped.
        """
        self._joining = (self._joining - leaving) | joining
        self._leaving = (self._leaving - joining) | leaving
        self._changed.set()
        told = trio.Event()
        self._untold.append(told)
        if self._over:
            self._tell(1)
        return told

    def send_line(self, line: bytes) -> None:
        """Send a line that is no row, between two copies."""
        self._notices.append(line)
        self._changed.set()

    def renew(self, rows: TableRows) -> None:
        """Use another statement from the next copy on. An unreadable row is tried again at once."""
        self._copier.rows = rows
        self._try_again_at = 0.0
        self._row_backoff.reset()
        self._changed.set()

    async def run(self) -> None:
        """Fill the journal until cancelled. Every failure is reported, and the copy is tried again."""
        try:
            await self._fill()
        finally:  # the next lane of the stream cannot end these
            self._over = True
            self._tell(len(self._untold))
            self._troubles.end("stream", self._stream, self._copy_cause)
            self._troubles.end("stream", self._stream, self._row_cause)

    async def _fill(self) -> None:
        while True:
            try:
                await self._wait_for_work()
                await self._work()
            except TokenExpired as error:
                log.warning("stream_trimmed_unread", stream=self._stream, error=str(error))
                self._copied = None  # the rows of before the cut are gone: the next copy begins at the target
                self.channel.cut(error, self._target)
            except UnknownStream:  # the publisher reads the registry each second, and will end this lane
                await trio.sleep(self._pace.copy_retry)
            except Exception as error:  # noqa: BLE001 - reported, with its traceback where it is a defect
                self._troubles.fail("stream", self._stream, self._copy_cause, error)
                if self.channel.boundary.index != self.channel.head:  # rows after the boundary were sent
                    broken = DatabaseError(f"stream {self._stream} broke off; reconnect and resume")
                    self.channel.cut(broken, self.channel.boundary.positions)
                await trio.sleep(self._copy_backoff.next_delay())
            else:
                self._copy_backoff.reset()
                self._troubles.end("stream", self._stream, self._copy_cause)

    async def _wait_for_work(self) -> None:
        """Wait until the target differs from the sent position, and a held row may be tried again."""
        while not (self._notices or self._untold or self._forked or self._may_leave()):
            if self._held is None and not self._is_there():
                return
            if self._held is not None and trio.current_time() >= self._try_again_at:
                return
            self._changed = trio.Event()
            with trio.move_on_at(float("inf") if self._held is None else self._try_again_at):
                await self._changed.wait()

    def _is_there(self) -> bool:
        return self._goal() == self.channel.boundary.positions

    def _goal(self) -> dict[str, int]:
        """The target of the listed writers. A writer that is about to leave gets the lowest target of the others."""
        sent, target = self.channel.boundary.positions, self._target
        if sent.keys() == target.keys():
            return target
        lowest = min(target.values(), default=UNKNOWN)
        return {name: target[name] if name in target else max(at, lowest) for name, at in sent.items()}

    def _may_leave(self) -> Set[str]:
        """The leaving writers that may be removed now: those not behind the lowest of the others."""
        sent = self.channel.boundary.positions
        if not self._leaving or self._joining:
            return frozenset()
        lowest = min((at for name, at in sent.items() if name not in self._leaving), default=None)
        return {name for name in self._leaving & sent.keys() if lowest is not None and sent[name] >= lowest}

    async def _work(self) -> None:
        while self._notices:
            await self.channel.append(self._notices.pop(0))
            self.channel.seal(self.channel.boundary.positions)  # later subscribers do not get the line
        if self._forked is not None:
            self._release()
            await self._announce_fork(*self._forked)
            return
        if self._untold:
            await self._announce_joining()
        if leaving := self._may_leave():
            await self._announce_leaving(leaving)
        if self._held is not None and not await self._readable_by_now(self._held):
            return
        target = self._goal()
        try:
            await self._advance(target)
        except (DatabaseError, RowTooLong) as error:
            at_fault = await self._copier.blame(self.channel.boundary.positions, target, error)
            if at_fault is None:
                raise
            done = {**self.channel.boundary.positions, **(self._copied or {})}
            before = below(done, target, at_fault)
            while not await self._advance(before, at_once=True):
                pass
            self._hold(at_fault)

    async def _readable_by_now(self, held: RowUnreadable) -> bool:
        """If it is time, try the held row again; when it can be read, end the hold."""
        if trio.current_time() < self._try_again_at:
            return False
        assert held.row_id is not None
        still = await self._copier.rows.try_row(held.row_id)
        if still is not None:
            self._hold(still)
            return False
        self._release()
        return True

    def _hold(self, error: RowUnreadable) -> None:
        if self._held is None:
            self._row_backoff.reset()
        self._held = error
        self._try_again_at = trio.current_time() + self._row_backoff.next_delay()
        self._troubles.begin("stream", self._stream, self._row_cause, str(error), code=error.code)
        self.channel.hold(error)

    def _release(self) -> None:
        if self._held is not None:
            self._held = None
            self._troubles.end("stream", self._stream, self._row_cause)
            self.channel.release()

    async def _advance(self, target: Positions, *, at_once: bool = False) -> bool:
        """Copy the rows up to the target. POSITION is sent every `pace.position` seconds at most, or `at_once`.

        A client that comes back while a large copy runs has a token within it. So there are boundaries within a copy.
        A copy holds a snapshot, so it does not wait for slow readers: it is ended, and False is returned when there is
        room again.
        """
        sent = dict(self.channel.boundary.positions)
        seen = LastTokens(self._stream, sent, one=self._copier.one_writer)
        before, first, began = self.channel.statistics(), self.channel.head, trio.current_time()
        seal_at, ends_at = began + self._pace.seal, began + self._pace.held

        async def append(chunk: Chunk) -> None:
            nonlocal seal_at
            now, size = trio.current_time(), len(chunk.data)
            full = self.channel.is_full(size)
            if seen.done is not None and not seen.torn and (full or now >= seal_at):
                self.channel.seal({**sent, **seen.tokens})
                seal_at = now + self._pace.seal
            if full and not seen.torn and not await self.channel.wait_room(size, max(0.0, ends_at - now)):
                raise Enough
            above = lowest if seen.done is None else seen.done
            await self.channel.append(chunk.data, since=self._seen_since(above), lines=chunk.rows)
            seen.see(chunk)

        def count(upto: Positions) -> None:
            now, seconds = trio.current_time(), trio.current_time() - began - (self.channel.waited - before.waited_s)
            rows, chunks = self.channel.lines - before.appended_lines, range(first, self.channel.head)
            one = self._copier.one_writer
            self._tally.add(self._order, after, upto, rows, now, one=one, seconds=seconds, chunks=chunks)

        after, self._copied = self._copied or sent, None
        lowest = min(after.values(), default=UNKNOWN)
        try:
            await self._copier.copy(after, target, append)
        except BaseException as error:
            self._keep_what_went_out(sent, after, target, seen)
            if self._copied is not after and self._copied is not None:
                count(self._copied)
            if not isinstance(error, Enough):
                raise
            await self.channel.wait_room(min(ROOM, self.channel.limits.max_bytes // 2))
            return False
        finally:
            self._sent.add_copy(before, self.channel.statistics())
        self._copied = target
        count(target)
        sent = {**sent, **seen.tokens}  # a new one: the tally has the other
        now = trio.current_time()
        if sent != target and (at_once or now >= self._position_sent_at + self._pace.position):
            await self.channel.append(position_lines(self._stream, sent, target))
            self._position_sent_at = now
            sent = dict(target)
        self.channel.seal(sent)
        if sent != target:
            self._changed = trio.Event()
            with trio.move_on_at(self._position_sent_at + self._pace.position):
                await self._changed.wait()
        return True

    def _keep_what_went_out(self, sent: Positions, after: Positions, target: Positions, seen: LastTokens) -> None:
        """After a copy that failed: continue after the last complete batch that was sent; else disconnect readers.

        Writers without a row in it keep the position that readers were sent.
        """
        self._copied = after
        if seen.torn:
            self.channel.cut(DatabaseError("Postgres broke off within a batch; reconnect and resume"), sent)
        elif seen.done is not None:
            self._copied = {name: max(at, min(seen.done, target[name])) for name, at in after.items()}
            self.channel.seal({**sent, **seen.tokens})

    async def _announce_joining(self) -> None:
        """Send the writers that join: the whole set if one line holds it, else only the new ones, which are added."""
        sent = self.channel.boundary.positions
        joining, names, changes = self._joining, self._joining - sent.keys(), len(self._untold)
        lowest = min((sent or self._target).values(), default=0)
        if names:
            listed = {**sent, **dict.fromkeys(names, lowest)}
            whole = len(listed) <= WRITERS_ON_LINE
            await self.channel.append(self.writers_of(self.epoch, listed if whole else names), extended=True)
            before = {name: min(self._left.pop(name, lowest), lowest) for name in names}
            lines = position_lines(self._stream, before, dict.fromkeys(names, lowest), all_of_them=True)
            await self.channel.append(lines)
            if self._copied is not None:
                self._copied = {**self._copied, **dict.fromkeys(names, min(self._copied.values(), default=lowest))}
            self._target = {**dict.fromkeys(names, lowest), **self._target}
            self.channel.seal(listed)
        self._joining = self._joining - joining
        self._tell(changes)

    def _tell(self, changes: int) -> None:
        """Readers were sent the oldest `changes` changes of the writers."""
        for told in self._untold[:changes]:
            told.set()
        del self._untold[:changes]

    async def _announce_leaving(self, leaving: Set[str]) -> None:
        """Remove writers from the list: send the whole set, and a POSITION after it."""
        sent = self.channel.boundary.positions
        listed = {name: at for name, at in sent.items() if name not in leaving}
        await self.channel.append(set_lines(self._stream, self.writers_of(self.epoch, listed), listed), extended=True)
        self._left |= {name: sent[name] for name in leaving}
        if self._copied is not None:
            self._copied = {name: at for name, at in self._copied.items() if name in listed}
        self._leaving = self._leaving - leaving
        self.channel.seal(listed)

    async def _announce_fork(self, epoch: str, shared: Callable[[str], int]) -> None:
        """Send positions back to the shared ones, then the new epoch. In this order a reader's token is valid at any
        moment: it is of the earlier generation, or not beyond the shared position.
        """
        sent = self.channel.boundary.positions
        kept = {name: min(at, shared(name)) for name, at in sent.items()}
        left = {name: at for name, at in self._left.items() if at > shared(name)}  # not listed, but known to readers
        self._forked = None
        self._copied = None
        self._tally.fork(min(kept.values(), default=UNKNOWN), self._order)
        self._target |= {name: max(at, self._target.get(name, at)) for name, at in kept.items()}
        self._left = {name: min(at, shared(name)) for name, at in self._left.items()}
        if lines := position_lines(self._stream, {**sent, **left}, {**kept, **{name: shared(name) for name in left}}):
            await self.channel.append(lines)
        again = position_lines(self._stream, kept, kept, all_of_them=True)
        await self.channel.append(self.writers_of(epoch, () if LINEAR in sent else sent) + again, extended=True)
        self.epoch = epoch
        self.channel.seal(kept)


# The last token of each writer in the chunks that were sent, and lines of POSITION. Does no I/O.

FEW = 8  # writers that are searched for one by one; for more, one regular expression over the chunk is cheaper
SORTED = 1000  # lines that are sorted for human readers; with more, sorting would cost as much as making them

Positions = Mapping[str, int]


class LastTokens:
    """The last token of each writer in the chunks that were sent.

    Few writers are searched for from the end of a chunk; for many the chunk is scanned once.
    """

    def __init__(self, stream: str, writers: Positions, *, one: bool) -> None:
        """`one`: all rows count as rows of the only name in `writers`."""
        self._single = next(iter(writers)) if one else None
        self._writers = writers
        self._prefixes = {name: f"RDATA {stream} {name} ".encode() for name in writers} if len(writers) <= FEW else {}
        self._lines = re.compile(rb"^RDATA %s ([^ ]+) (-?[0-9]+) " % re.escape(stream.encode()), re.MULTILINE)
        self.tokens: dict[str, int] = {}
        self.done: int | None = None  # all rows up to this id were in the chunks
        self.torn = False  # the last chunk ends within a batch

    def see(self, chunk: Chunk) -> None:
        """Take the last tokens of a chunk. Chunks come in ascending order of ids."""
        self.torn = chunk.token is None
        if chunk.token is not None:
            self.done = chunk.token
        if self._single is not None:
            if chunk.token is not None:
                self.tokens[self._single] = chunk.token
        elif self._prefixes:
            self._search(chunk.data)
        else:
            last: dict[bytes, bytes] = dict(self._lines.findall(chunk.data))
            names = ((name.decode(), token) for name, token in last.items())
            self.tokens |= {name: int(token) for name, token in names if name in self._writers}

    def _search(self, data: bytes) -> None:
        for name, prefix in self._prefixes.items():
            at = data.rfind(b"\n" + prefix) + 1
            if at or data.startswith(prefix):
                word = data[at + len(prefix) : at + len(prefix) + 21].split(b" ", 1)[0]
                if word != b"batch":  # its number is in the next chunk
                    self.tokens[name] = int(word)


def position_lines(stream: str, sent: Positions, now: Positions, *, all_of_them: bool = False) -> bytes:
    """POSITION for each writer whose position differs from the position that was sent, or for `all_of_them`.

    Not by `Position.render`, which parses what it renders: names come from the registry, where each is one word.
    """
    moved = [(name, sent[name], at) for name, at in now.items() if all_of_them or sent[name] != at]
    if len(moved) <= SORTED:
        moved.sort()
    return "".join([f"POSITION {stream} {name} {before} {at}\n" for name, before, at in moved]).encode()


def set_lines(stream: str, writers: bytes, positions: Positions) -> bytes:
    """The lines of a whole set, and a POSITION without change: it ends the set."""
    for name, at in positions.items():
        return writers + f"POSITION {stream} {name} {at} {at}\n".encode()
    return writers
