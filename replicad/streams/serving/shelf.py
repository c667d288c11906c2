"""Pieces in memory: a cache that is bounded in bytes, and for each stream a shelf that finds a piece by its ids.

A shelf belongs to one state of a stream: its generation, its table, its row expression, its skipped ids. When this
state changes, the shelf is closed and the stream gets a new shelf. So a piece of an earlier state is never found.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from replicad.streams.registry import Stream
from replicad.streams.row_pieces import Blocks, Piece, Segment

OLDEST = 60.0  # seconds after which a piece is read again: rows that came late or were changed are seen then
UNUSED = 5.0  # seconds after which a piece is dropped that no client uses or is on its way to
FIRST_ROW = 256.0  # bytes of a row, until the first piece was read
FIRST_SPAN = 1 << 20  # ids that are looked through for a few writers' rows: some tenths of a second
LEAST_SPAN = 1 << 16
DENSE = 4.0  # ids for each row, up to which they are read in blocks
SMALL_ROW = 16 << 10  # bytes of a row, up to which several are read as one block
HELD = 16 << 20  # bytes that Postgres holds at most for a block, if suddenly all of its lines are as long as it allows
READER_HELD = 64 << 20  # the same for the blocks of a piece: a reader (AsOwner) holds up to 50 of them
ROW_BY_ROW = 16  # pieces that are read row by row when blocks have failed, before they are tried again
QUICK, SLOW = 0.1, 0.5  # seconds: the span grows after a quick read without enough rows, and shrinks after a slow one


@dataclass(slots=True)
class _Kept:
    size: int
    used_at: float
    forget: Callable[[], None]


class PieceCache:
    """The pieces of all streams, at most `max_bytes`. The least recently used ones are dropped first."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.bytes = 0
        self._pieces: OrderedDict[Piece, _Kept] = OrderedDict()

    def __len__(self) -> int:
        return len(self._pieces)

    def add(self, piece: Piece, now: float, forget: Callable[[], None]) -> bool:
        """Keep a piece; False if it alone is too large. `forget` is called when it is dropped."""
        size = piece.size + 1024  # of the objects
        if size > self.max_bytes // 2:
            return False
        self._pieces[piece] = _Kept(size, now, forget)
        self.bytes += size
        while self.bytes > self.max_bytes:
            self.drop(next(iter(self._pieces)))
        return True

    def use(self, piece: Piece, now: float) -> None:
        """The piece is in use: others are dropped before it."""
        kept = self._pieces.get(piece)
        if kept is not None:
            kept.used_at = now
            self._pieces.move_to_end(piece)

    def need(self, piece: Piece, now: float) -> None:
        """A client will need the piece: it does not count as unused, but others are not dropped before it."""
        kept = self._pieces.get(piece)
        if kept is not None:
            kept.used_at = now

    def drop(self, piece: Piece) -> None:
        """Remove a piece from memory; safe to repeat."""
        kept = self._pieces.pop(piece, None)
        if kept is not None:
            self.bytes -= kept.size
            piece.drop()
            kept.forget()

    def sweep(self, now: float) -> None:
        """Drop pieces that are too old, and pieces that no client has used for a while."""
        for piece, kept in list(self._pieces.items()):
            if now >= min(kept.used_at + UNUSED, piece.read_at + OLDEST):
                self.drop(piece)


class Shelf:
    """The pieces of one stream in one state, and the known sizes of its rows."""

    def __init__(self, stream: Stream, late_rows: int, cache: PieceCache) -> None:
        """`late_rows`: how many were found so far; with each more, pieces may lack a row."""
        self.stream = stream
        self.late_rows = late_rows
        self.row_bytes = FIRST_ROW
        self.ids_per_row = 1.0
        self.span = FIRST_SPAN
        self._row_by_row = 1  # so many more pieces are read before blocks are: the first one tells how large rows are
        self._closed = False
        self._cache = cache
        self._begins: list[int] = []
        self._whole: dict[int, Piece] = {}  # of all writers, by their beginnings
        self._parts: dict[tuple[Segment, int], Piece] = {}  # of ranges for each writer

    def is_of(self, stream: Stream, late_rows: int) -> bool:
        """Whether the pieces belong to the stream's present state."""
        return self.stream is stream and self.late_rows == late_rows

    def find(self, segment: Segment, after: int, now: float) -> Piece | None:
        """The piece with the rows that follow `after`; None if it must be read."""
        if segment.ranges is None:
            at = bisect_right(self._begins, after) - 1
            piece = self._whole[self._begins[at]] if at >= 0 else None
        else:
            piece = self._parts.get((segment, after))
        if piece is None or piece.upto <= after:
            return None
        if now >= piece.read_at + OLDEST:
            self._cache.drop(piece)
            return None
        self._cache.use(piece, now)
        return piece

    def end_of_gap(self, segment: Segment, after: int) -> int:
        """Up to where rows after `after` must be read: where the next piece begins, or the segment ends."""
        if segment.ranges is not None:
            return min(segment.upto, after + self.span)
        at = bisect_right(self._begins, after)
        return min(segment.upto, self._begins[at]) if at < len(self._begins) else segment.upto

    def blocks(self, segment: Segment, rows: int, size: int) -> Blocks | None:
        """How a piece with so many rows is read in blocks of `size` bytes; None if it is read row by row."""
        if segment.ranges is not None or not self.stream.unique_ids or self._row_by_row:
            return None
        if self.ids_per_row > DENSE or self.row_bytes > SMALL_ROW or rows * self.row_bytes < 2 * size:
            return None
        step = max(1, int(size / self.row_bytes * self.ids_per_row))
        ids = max(1, int(rows * self.ids_per_row))
        return Blocks(ids, step, HELD // step if self.stream.reader is None else READER_HELD // ids)

    def put(self, segment: Segment, piece: Piece, now: float) -> None:
        """Keep a piece for others, unless the shelf is closed."""
        if self._closed:
            return
        if segment.ranges is not None:
            key = segment, piece.after
            if self._cache.add(piece, now, lambda: self._forget_part(key, piece)):
                self._parts[key] = piece
            return
        old = self._whole.get(piece.after)
        if old is not None:
            self._cache.drop(old)
        if self._cache.add(piece, now, lambda: self._forget_whole(piece)):
            insort(self._begins, piece.after)
            self._whole[piece.after] = piece

    def learn(self, segment: Segment, piece: Piece, seconds: float) -> None:
        """Take the size of rows, and how dense ids are, from a piece that was read in `seconds`."""
        if piece.rows:
            self.row_bytes = max(1.0, piece.size / piece.rows)
        if segment.ranges is None:
            if piece.cut:
                self.ids_per_row = (piece.upto - piece.after) / max(1, piece.rows)
            self._row_by_row = ROW_BY_ROW if piece.no_blocks else max(0, self._row_by_row - 1)
        elif seconds > SLOW:
            self.span = max(LEAST_SPAN, self.span // 4)
        elif seconds < QUICK and not piece.cut:
            self.span = min(1 << 62, self.span * 4)

    def need_above(self, lowest: int, now: float) -> None:
        """A client that has the rows up to `lowest` will need the pieces above."""
        for piece in [*self._whole.values(), *self._parts.values()]:
            if piece.upto > lowest:
                self._cache.need(piece, now)

    def trimmed(self, upto: int) -> None:
        """Drop pieces with rows that were trimmed: those up to `upto`."""
        for piece in [*self._whole.values(), *self._parts.values()]:
            if piece.after < upto:
                self._cache.drop(piece)

    def close(self) -> None:
        """Drop all pieces; pieces that are being read will not be kept."""
        self._closed = True
        for piece in [*self._whole.values(), *self._parts.values()]:
            self._cache.drop(piece)

    def _forget_whole(self, piece: Piece) -> None:
        if self._whole.get(piece.after) is piece:
            del self._whole[piece.after]
            self._begins.remove(piece.after)

    def _forget_part(self, key: tuple[Segment, int], piece: Piece) -> None:
        if self._parts.get(key) is piece:
            del self._parts[key]
