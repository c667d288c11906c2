"""Pieces: parts of a stream in memory, bounded in rows and bytes, that begin and end at complete ids.

A piece is read as fast as Postgres gives it. Then its connection and its snapshot are free, however slowly its clients
take it. A batch (rows that share one id) is never divided between two pieces.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from replicad.errors import DatabaseError, RowTooLong
from replicad.streams.chunks import CHUNK, HEAD, Chunk, Enough, chunk_of, divided, joined, line_token, whole_ids
from replicad.streams.row_text import Range
from replicad.streams.rows import ChunkSink
from replicad.streams.table_rows import TableRows, is_of_a_row

OVERSHOOT = 2  # a COPY is cancelled when it exceeds the wanted size by this factor; usually its limit of rows ends it
BLOCKS_TIME = 5.0  # seconds to read a piece in blocks; it takes a hundredth, unless rows have become gigantic
GROWTH = 8  # the next try has so many times the size when not even one complete id had room
FIRST_ROW = 256.0  # bytes of a row, until the first rows were read
DENSE = 4.0  # ids for each row, up to which they are read in blocks
SMALL_ROW = 16 << 10  # bytes of a row, up to which several are read as one block
HELD = 16 << 20  # bytes that Postgres holds at most for a block, if suddenly all of its lines are as long as it allows
READER_HELD = 64 << 20  # the same for the blocks of a piece: a reader (AsOwner) holds up to 50 of them
ROW_BY_ROW = 16  # reads that are made row by row when blocks have failed, before they are tried again
SAMPLE = 4096  # ids that are read row by row before a large range is: they tell how large rows are
MANY = 2 * SAMPLE  # ids from which blocks are worth a sample
RANGE = 1024  # blocks of one statement: a range where suddenly no id has a row costs some milliseconds


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


class RowSizes:
    """The known size of a stream's rows, and how dense their ids are. They decide whether rows are read in blocks."""

    __slots__ = ("_row_by_row", "ids_per_row", "row_bytes")

    def __init__(self) -> None:
        self.row_bytes = FIRST_ROW
        self.ids_per_row = 1.0
        self._row_by_row = 1  # so many more reads are made row by row before blocks are: the first one tells the sizes

    def learn(self, rows: int, size: int, ids: int | None, *, failed: bool = False) -> None:
        """Take the sizes from a read of `rows` rows and `size` bytes in `ids` ids (None: unknown). `failed`: it could
        not be read in blocks.
        """
        self.learn_bytes(rows, size)
        if ids is not None:
            self.ids_per_row = ids / max(1, rows)
        self._row_by_row = ROW_BY_ROW if failed else max(0, self._row_by_row - 1)

    def learn_bytes(self, rows: int, size: int) -> None:
        """Take only the size of a row."""
        if rows:
            self.row_bytes = max(1.0, size / rows)

    def blocks(self, rows: float, size: int, *, by_reader: bool = False) -> Blocks | None:
        """How so many rows are read in blocks of `size` bytes; None if they are read row by row.

        `by_reader`: a reader reads them.
        """
        if self._row_by_row or self.ids_per_row > DENSE or self.row_bytes > SMALL_ROW:
            return None
        if rows * self.row_bytes < 2 * size:
            return None
        step = max(1, int(size / self.row_bytes * self.ids_per_row))
        ids = max(1, int(rows * self.ids_per_row))
        return Blocks(ids, step, READER_HELD // ids if by_reader else HELD // step)


async def copy_all(rows: TableRows, sizes: RowSizes, after: int, upto: int, sink: ChunkSink) -> int:
    """Send the rows of (after, upto] of all writers in chunks; returns how many. In blocks, if most ids have rows.

    For at least MANY ids, of rows that `sends_blocks`. If blocks fail, it goes on row by row: so what is raised is what
    `RowSource.copy_range` raises.
    """
    total, end = 0, after + SAMPLE
    while True:
        sent = _Sent(sink)
        blocks = sizes.blocks((upto - after) / max(1.0, sizes.ids_per_row), CHUNK)
        failed = False
        if blocks is None:
            await rows.copy_range(after, end, sent.pass_on)
        else:
            end = min(upto, after + RANGE * blocks.step)
            try:
                await rows.copy_blocks(after, end, sent.pass_on, step=blocks.step, max_line=blocks.max_line)
            except (DatabaseError, RowTooLong) as error:
                if not is_of_a_row(error):
                    raise
                failed, end = True, sent.upto or after
        total += sent.rows
        if failed or end - after >= SAMPLE:
            sizes.learn(sent.rows, sent.size, None if failed else end - after, failed=failed)
        if end >= upto:
            return total
        after, end = end, upto


@dataclass(slots=True)
class _Sent:
    """What was sent to a sink: rows, bytes, and the last id."""

    sink: ChunkSink
    rows: int = 0
    size: int = 0
    upto: int | None = None

    async def pass_on(self, chunk: Chunk) -> None:
        """Send a chunk; a block whose rows are suddenly longer becomes several."""
        for part in divided(chunk):
            await self.sink(part)
            self.rows += part.rows
            self.size += len(part.data)
            self.upto = part.token


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
