"""Sends one client the rows between two positions, piece by piece, and counts how fast the client takes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import trio

from replicad.daemon.fairness import Asker
from replicad.daemon.service import HangUp
from replicad.daemon.session import Session
from replicad.errors import DatabaseError, RowTooLong, RowUnreadable, TableReplaced
from replicad.protocol.connection import CloseReason
from replicad.streams.chunks import Chunk
from replicad.streams.row_pieces import Piece, Segment, clipped, segments
from replicad.streams.serving.catchups import Catchups, PieceRead
from replicad.streams.serving.lane import LINEAR, Copier, LastTokens, below, position_lines
from replicad.streams.serving.starts import Start

SECONDS = 2.0  # that a client takes for one piece at most, beside many others
TOGETHER = 256 << 10  # bytes of chunks that are sent at a time
GROWTH = 4  # a piece is at most so many times as large as the one before


class Takes(Protocol):
    """The client or page that gets the rows. `asker`: whose turn it is to use a connection to Postgres."""

    asker: Asker

    async def send(self, stream: str, *pieces: bytes, to_go: float) -> None: ...


class Taking:
    """The speed at which one client takes the rows of its catch-ups. Time counts while it has rows to take."""

    def __init__(self, peer: Session, pace: int, seconds: float) -> None:
        """`pace`: the fewest bytes a second over `seconds`; 0: no bound."""
        self.asker = peer.asker
        self._peer = peer
        self._pace = pace
        self._seconds = seconds
        self._sending = 0
        self._since = 0.0
        self._busy = 0.0
        self._bytes = 0

    async def send(self, stream: str, *pieces: bytes, to_go: float) -> None:
        """Send whole lines. `to_go`: `Session.send`.

        Raises:
            HangUp: the client is too slow.
        """
        if not self._sending:
            self._since = trio.current_time()
        self._sending += 1
        try:
            await self._peer.send(*pieces, to_go=to_go)
        finally:
            now = trio.current_time()
            self._busy += now - self._since
            self._since = now
            self._sending -= 1
        self._bytes += sum(map(len, pieces))
        if self._busy >= self._seconds:
            if self._bytes < self._pace * self._busy:
                raise HangUp(
                    CloseReason.SLOW_READER,
                    f"slow_reader: rows of {stream} were taken at {self._bytes / self._busy:.0f} bytes/s for "
                    f"{self._busy:.0f} s, and the server's --catchup-pace is {self._pace}; resume from your token",
                )
            self._busy, self._bytes = 0.0, 0


class Copying:
    """One client on its way from a start to a position. `reached`: what it has of each writer, whatever happened to the
    last copy. `others_after`: the same for writers that are not listed. `epoch`: the generation of both. `preface`:
    lines that are sent together with the next rows.
    """

    def __init__(self, catchups: Catchups, taking: Takes, start: Start) -> None:
        self.stream = start.stream
        self.lane = start.lane
        self.start = start
        self._catchups = catchups
        self._asker = taking.asker
        self._taking = taking
        self._size = catchups.limits.sizes.first
        self._at: int | None = None  # all rows up to this id were sent

    @property
    def start(self) -> Start:
        """Where a reader with the rows that were sent would begin."""
        return Start(self.stream, self.lane, self.reached, self.others_after, self.epoch)

    @start.setter
    def start(self, start: Start) -> None:
        self.reached, self.others_after, self.epoch = start.positions, start.others_after, start.epoch
        self.preface = b""

    @property
    def position(self) -> int:
        """The client has all rows up to there."""
        return min(self.reached.values(), default=self.others_after) if self._at is None else self._at

    async def copy(self, upto: Mapping[str, int]) -> bool:
        """Send the rows up to `upto`, and the positions. False if the generation has ended: then less was sent.

        Raises:
            TokenExpired: rows of the range were trimmed.
            RowUnreadable: a row cannot be read; everything before it was sent, and positions just below its id.
        """
        self._catchups.under_way.add(self)
        try:
            return await self._copy(upto)
        finally:
            self._catchups.under_way.discard(self)

    async def _copy(self, upto: Mapping[str, int]) -> bool:
        stream, before = self.stream, self.reached
        copier = Copier(stream.catchup_rows(stream.stream), linear=self.lane.linear)
        seen = LastTokens(stream.name, before, one=copier.one_writer)
        stopped: RowUnreadable | None = None
        try:
            whole = await self._send_rows(copier, upto, seen)
        except TableReplaced:
            await self._send_positions(before, seen)
            raise
        except (DatabaseError, RowTooLong) as error:
            async with self._catchups.places.place(self._asker):
                stopped = await copier.blame(self.reached, upto, error, self.others_after)
            if stopped is None and isinstance(error, RowTooLong):
                raise DatabaseError(f"a row of {stream.name} changed while it was read") from error
            if stopped is None:
                raise
            whole = await self._send_rows(copier, below(self.reached, upto, stopped), seen)
        await self._send_positions(before, seen)
        if stopped is not None and whole:
            raise stopped
        return whole

    async def _send_positions(self, before: Mapping[str, int], seen: LastTokens) -> None:
        if lines := position_lines(self.stream.name, {**before, **seen.tokens}, self.reached):
            await self._taking.send(self.stream.name, lines, to_go=0)

    async def _send_rows(self, copier: Copier, upto: Mapping[str, int], seen: LastTokens) -> bool:
        """Send the rows up to `upto` and move `reached`, also when it fails. False if the generation has ended."""
        before, others_after = self.reached, self.others_after
        self._at = None
        try:
            for segment in _segments(copier, before, upto, others_after):
                if not await self._send_segment(segment, seen):
                    return False
            self._at = max(upto.values(), default=None)
        finally:
            if self._at is not None:
                at = self._at
                self.reached = {**before, **{name: max(before[name], min(at, end)) for name, end in upto.items()}}
                self.others_after = max(others_after, min([at, *upto.values()]))
        return True

    async def _send_segment(self, segment: Segment, seen: LastTokens) -> bool:
        stream, catchups = self.stream, self._catchups
        at = self._at = segment.after
        ahead: PieceRead | None = None
        try:
            while at < segment.upto:
                if stream.stream.epoch != self.epoch:
                    return False
                piece = await catchups.piece(self._asker, stream, segment, at, self._size)
                if ahead is not None:
                    catchups.leave(ahead)
                    ahead = None
                if self._size > catchups.limits.sizes.smallest and piece.upto < segment.upto:
                    ahead = catchups.ask(self._asker, stream, segment, piece.upto, self._size)
                at = self._at = await self._send_piece(piece, segment, at, seen)
        finally:
            if ahead is not None:
                catchups.leave(ahead)
        return True

    async def _send_piece(self, piece: Piece, segment: Segment, after: int, seen: LastTokens) -> int:
        """Send the rows of a piece that are wanted; returns up to where. Less than all if it is dropped meanwhile.

        Where another generation has begun, it says nothing about the rows that were sent, so it is not counted for the
        audit.
        """
        began, begin = trio.current_time(), after
        counted = self.stream.tally.affords(piece.size)
        sent, rows, most = 0, 0, min(TOGETHER, self._size)
        chunks, size = list[Chunk](), 0
        for chunk in piece.lines(after, segment.upto):
            chunks.append(chunk)
            size += len(chunk.data)
            rows += chunk.rows if counted else 0
            if size >= most:
                after = await self._send_chunks(piece, chunks, seen)
                sent += size
                chunks, size = [], 0
        if chunks:
            after = await self._send_chunks(piece, chunks, seen)
            sent += size
        if sent:
            self.stream.sent.add_piece(piece, sent)
        if counted and not piece.dropped and self.stream.stream.epoch == self.epoch:
            part = clipped(segment, begin, min(piece.upto, segment.upto))
            self.stream.tally.add_piece(self, part, rows, trio.current_time())
        if piece.dropped:  # memory is short: the rest is read again
            self._size = max(self._catchups.limits.sizes.smallest, min(sent, self._size // 2))
        elif sent:
            speed = sent / max(trio.current_time() - began, 1e-3)
            wanted = min(int(speed * SECONDS), self._size * GROWTH, self._catchups.largest)
            self._size = max(self._catchups.limits.sizes.smallest, wanted)
        return after if piece.dropped else min(piece.upto, segment.upto)

    async def _send_chunks(self, piece: Piece, chunks: Sequence[Chunk], seen: LastTokens) -> int:
        """Send chunks with nothing in between; returns the last id."""
        to_go = max(0, self.stream.sent_upto - self.position)
        preface, self.preface = self.preface, b""
        pieces = [chunk.data for chunk in chunks]
        await self._taking.send(self.stream.name, *([preface, *pieces] if preface else pieces), to_go=to_go)
        for chunk in chunks:
            seen.see(chunk)
        self._catchups.use(piece)
        self._at = chunks[-1].token
        assert self._at is not None
        return self._at


def _segments(copier: Copier, after: Mapping[str, int], upto: Mapping[str, int], others_after: int) -> list[Segment]:
    if copier.linear:
        return segments({LINEAR: (after[LINEAR], upto[LINEAR])}, None)
    return segments(*copier.ranges(after, upto, others_after))
