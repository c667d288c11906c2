"""Pieces: parts of a stream in memory, bounded in rows and bytes, that begin and end at complete ids.

A piece is read as fast as Postgres gives it. Then its connection and its snapshot are free, however slowly its clients
take it. A batch (rows that share one id) is never divided between two pieces.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from replicad.errors import DatabaseError, RowTooLong
from replicad.streams.chunks import HEAD, Chunk, Enough, chunk_of, joined, line_token, whole_ids
from replicad.streams.row_text import Range
from replicad.streams.table_rows import TableRows

OVERSHOOT = 2  # a COPY is cancelled when it exceeds the wanted size by this factor; usually its limit of rows ends it
BLOCKS_TIME = 5.0  # seconds to read a piece in blocks; it takes a hundredth, unless rows have become gigantic
GROWTH = 8  # the next try has so many times the size when not even one complete id had room


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows to be read: the rows of (after, upto] of all writers; or, with `ranges`, a range for each writer.

    Writers that are not in `ranges` have the range `others`. All ranges lie in (after, upto].
    """

    after: int
    upto: int
    ranges: tuple[tuple[str, Range], ...] | None = None
    others: Range | None = None


def segments(ranges: Mapping[str, Range], others: Range | None) -> list[Segment]:
    """Divide a range for each writer by ids, so that as much as possible is of all writers: that part can be shared.

    Below it writers have different beginnings, above it different ends.
    """
    spans = [*ranges.values(), *([] if others is None else [others])]
    if not spans:
        return []
    lowest, begin = min(low for low, _ in spans), max(low for low, _ in spans)
    end, highest = min(high for _, high in spans), max(high for _, high in spans)
    if begin >= end:
        return [_clipped(ranges, others, lowest, highest)] if lowest < highest else []
    found = [Segment(begin, end)]
    if lowest < begin:
        found.insert(0, _clipped(ranges, others, lowest, begin))
    if end < highest:
        found.append(_clipped(ranges, others, end, highest))
    return found


def clipped(segment: Segment, after: int, upto: int) -> Segment:
    """The part of a segment in (after, upto]."""
    if segment.ranges is None:
        return Segment(after, upto)
    return _clipped(dict(segment.ranges), segment.others, after, upto)


def _clipped(ranges: Mapping[str, Range], others: Range | None, after: int, upto: int) -> Segment:
    def clip(span: Range) -> Range:
        low, high = (min(max(at, after), upto) for at in span)
        return low, max(low, high)

    named = tuple((name, clip(span)) for name, span in sorted(ranges.items()))
    return Segment(after, upto, named, None if others is None else clip(others))


@dataclass(eq=False, slots=True)
class Piece:
    """The rows of (after, upto] as lines. Each chunk ends at the end of an id. `rows` is how many Postgres has sent.

    `cut`: the piece ends where its bounds ended it, and not where the wanted range ends. `no_blocks`: it could not be
    read in blocks, and was read row by row.
    """

    after: int
    upto: int
    chunks: Sequence[Chunk]
    rows: int
    cut: bool
    no_blocks: bool = False
    read_at: float = 0.0
    dropped: bool = False  # no longer in memory: its chunks were removed
    size: int = field(init=False)  # bytes of all lines

    def __post_init__(self) -> None:
        self.size = sum(len(chunk.data) for chunk in self.chunks)

    def drop(self) -> None:
        """Remove the chunks from memory, except chunks that clients are being sent."""
        self.chunks, self.dropped = (), True

    def lines(self, after: int, upto: int) -> Iterator[Chunk]:
        """The rows of (after, upto], chunk by chunk. Ends early if the piece is dropped meanwhile."""
        at, done = 0, self.after
        while at < len(self.chunks):
            chunk = self.chunks[at]
            last = _last(chunk)
            if last > after:
                part = between(chunk, after, upto) if done < after or last > upto else chunk
                if part is not None:
                    yield part
            if last >= upto:
                return
            at, done = at + 1, last


def _last(chunk: Chunk) -> int:
    assert chunk.token is not None
    return chunk.token


def between(chunk: Chunk, after: int, upto: int) -> Chunk | None:
    """The rows of (after, upto] of a chunk that ends at the end of an id; the chunk itself if that is all of it."""
    data = chunk.data
    begin = _offset_after(data, after)
    end = len(data) if _last(chunk) <= upto else _offset_after(data, upto)
    if begin >= end:
        return None
    if begin == 0 and end == len(data):
        return chunk
    return chunk_of(data[begin:end])


def _offset_after(data: bytes, bound: int) -> int:
    """Where the rows with ids above `bound` begin. Ids ascend, and the data ends at the end of an id."""
    low, high = 0, len(data)
    while low < high:
        start = data.rfind(b"\n", low, (low + high) // 2) + 1 or low
        id, end = _batch_at(data, start)
        if id <= bound:
            low = end
        else:
            high = start
    return low


def _batch_at(data: bytes, start: int) -> tuple[int, int]:
    """The id of the row at `start`, and where its batch ends."""
    while True:
        id = line_token(data[start : start + HEAD])
        start = data.index(b"\n", start) + 1
        if id is not None:
            return id, start


@dataclass(frozen=True, slots=True)
class Blocks:
    """How a piece is read in blocks: the ids of the piece, the ids of a block, and the bytes of the longest line."""

    ids: int
    step: int
    max_line: int


@dataclass(frozen=True, slots=True)
class PieceBounds:
    """Of one piece: rows, and about so many bytes. `blocks`: most ids have rows, so that it is read in blocks."""

    rows: int
    size: int
    blocks: Blocks | None = None


async def read_piece(rows: TableRows, segment: Segment, after: int, upto: int, bounds: PieceBounds) -> Piece:
    """Read the rows of a segment in (after, upto] up to the bounds, but the rows of an id at least.

    If a row fails, the piece ends before it; if it is the first, the error is raised.

    Raises what `RowSource.copy_range` raises.
    """
    if bounds.blocks is not None:
        assert segment.ranges is None
        piece = await _read_blocks(rows, after, upto, bounds.size, bounds.blocks)
        if piece is None:
            piece = await read_piece(rows, segment, after, upto, PieceBounds(bounds.rows, bounds.size))
            piece.no_blocks = True
        return piece
    while True:
        piece = await _try_to_read(rows, segment, after, upto, bounds)
        if piece is not None:
            return piece
        bounds = PieceBounds(bounds.rows * GROWTH, bounds.size * GROWTH)  # a batch has more rows, or more bytes


async def _read_blocks(rows: TableRows, after: int, upto: int, size: int, blocks: Blocks) -> Piece | None:
    """A piece of about `size` bytes; None if it cannot be read in blocks.

    A row may be unreadable, or much longer than the others. Which one it is, a row by row reading finds out.
    """
    chunks: list[Chunk] = []
    received = 0

    async def take(chunk: Chunk) -> None:
        nonlocal received
        chunks.append(chunk)
        received += len(chunk.data)
        if received > OVERSHOOT * size:
            raise Enough

    end = min(upto, after + blocks.ids)
    try:
        count = await rows.copy_blocks(after, end, take, BLOCKS_TIME, step=blocks.step, max_line=blocks.max_line)
    except Enough:
        if not chunks:
            return None
        return Piece(after, _last(chunks[-1]), tuple(chunks), sum(chunk.rows for chunk in chunks), cut=True)
    except (DatabaseError, RowTooLong):
        return None
    return Piece(after, end, tuple(chunks), count, cut=end < upto)


async def _try_to_read(rows: TableRows, segment: Segment, after: int, upto: int, bounds: PieceBounds) -> Piece | None:
    """A piece; None if the bounds have no room for one complete id."""
    chunks: list[Chunk] = []
    received = 0

    async def take(chunk: Chunk) -> None:
        nonlocal received
        chunks.append(chunk)
        received += len(chunk.data)
        if received > OVERSHOOT * bounds.size:
            raise Enough

    failure: Exception | None = None
    unique = rows.unique_ids or not rows.names_writers  # no two writers share an id
    count = None
    try:
        if segment.ranges is None:
            count = await rows.copy_range(after, upto, take, limit=bounds.rows)
        else:
            part = clipped(segment, after, upto)
            named = dict(part.ranges or ())
            count = await rows.copy_vector(named, take, others=part.others, limit=bounds.rows)
    except Enough:
        pass
    except (DatabaseError, RowTooLong) as error:
        failure = error
    if count is not None and count < bounds.rows:
        return Piece(after, upto, tuple(joined(chunks, unique=unique)), count, cut=False)
    complete = whole_ids(chunks, unique=unique)
    if complete:
        count = sum(chunk.rows for chunk in complete) if count is None else count
        return Piece(after, _last(complete[-1]), tuple(complete), count, cut=True)
    if failure is not None:
        raise failure
    return None
