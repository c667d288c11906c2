"""Pieces of a stream: whatever their bounds, one after another has every row once, and no batch is divided."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast
from unittest.mock import patch

import trio
from hypothesis import given
from hypothesis import strategies as st

from replicad.errors import DatabaseError, RowTooLong, RowUnreadable
from replicad.streams import row_pieces
from replicad.streams.chunks import Chunk, LineCutter, chunk_of, no_longer
from replicad.streams.row_pieces import Blocks, Piece, PieceBounds, RowSizes, Segment, between, copy_all, segments
from replicad.streams.row_text import Range
from replicad.streams.rows import ChunkSink
from replicad.streams.table_rows import TableRows

Row = tuple[int, str]  # id, writer

writers = st.sampled_from(["a", "b"])
tables = st.lists(st.tuples(st.integers(1, 30), writers), max_size=40).map(sorted)


def lines(rows: list[Row]) -> list[bytes]:
    """As Postgres writes them: `batch` in place of the token where the next row has the same id and writer."""
    after = [*rows[1:], (0, "")]
    return [
        f"RDATA s {writer} {'batch' if (id, writer) == then else id} 1\n".encode()
        for (id, writer), then in zip(rows, after, strict=False)
    ]


def ids(data: bytes, rows: list[Row]) -> list[Row]:
    """Which of the rows the lines are; fails where the last batch is not complete."""
    found: list[Row] = []
    batch = 0
    for line in data.splitlines():
        _, _, writer, token, _ = line.decode().split()
        batch += 1
        if token != "batch":
            found += [(int(token), writer)] * batch
            batch = 0
    assert batch == 0
    return found


@dataclass
class Table:
    """`TableRows` of a list, in chunks of a few bytes. Ids may repeat. The row with id `bad` fails."""

    rows: list[Row]
    chunk: int = 40
    bad: int | None = None
    unique_ids: bool = False
    names_writers: bool = True
    sends_blocks: bool = True
    reads: int = 0
    blocks: int = 0

    async def copy_range(self, after: int, upto: int, sink: ChunkSink, *, limit: int | None = None) -> int:
        return await self._copy([row for row in self.rows if after < row[0] <= upto], sink, limit)

    async def copy_vector(
        self, ranges: Mapping[str, Range], sink: ChunkSink, *, others: Range | None = None, limit: int | None = None
    ) -> int:
        return await self._copy([row for row in self.rows if wanted(row, ranges, others)], sink, limit)

    async def _copy(self, chosen: list[Row], sink: ChunkSink, limit: int | None) -> int:
        self.reads += 1
        found = lines(chosen)[:limit]
        cutter = LineCutter(self.chunk)
        for row, line in zip(chosen, found, strict=False):
            if row[0] == self.bad:
                for chunk in cutter.rescue():
                    await sink(chunk)
                raise DatabaseError("broken", sqlstate="22012")
            for chunk in cutter.feed(line):
                await sink(chunk)
        for chunk in cutter.finish():
            await sink(chunk)
        return len(found)

    async def copy_blocks(
        self, after: int, upto: int, sink: ChunkSink, timeout: float | None = None, *, step: int, max_line: int
    ) -> int:
        self.reads += 1
        count = 0
        for low in range(after, upto, step):
            chosen = [row for row in self.rows if low < row[0] <= min(low + step, upto)]
            if any(id == self.bad for id, _ in chosen):
                raise DatabaseError("broken", sqlstate="22012")
            block = b"".join(lines(chosen))
            if not no_longer(block, max_line):
                raise RowTooLong("a line is too long for a block")
            if block:
                self.blocks += 1
                await sink(chunk_of(block))
            count += len(chosen)
        return count

    async def last_tokens(self, after: int, upto: int) -> dict[str, int]:
        raise NotImplementedError

    async def earliest(self) -> int | None:
        raise NotImplementedError

    async def find_unreadable(
        self, wanted: Range | Mapping[str, Range], others: Range | None = None
    ) -> RowUnreadable | None:
        raise NotImplementedError

    async def try_row(self, row_id: int) -> RowUnreadable | None:
        raise NotImplementedError

    def unreadable(self, row_id: int, error: Exception) -> RowUnreadable:
        raise NotImplementedError


async def read_piece(table: Table, segment: Segment, after: int, upto: int, bounds: PieceBounds) -> Piece:
    """The function of that name, on a table in memory."""
    return await row_pieces.read_piece(cast(TableRows, table), segment, after, upto, bounds)


def wanted(row: Row, ranges: Mapping[str, Range], others: Range | None) -> bool:
    span = ranges.get(row[1], others)
    return span is not None and span[0] < row[0] <= span[1]


def data(piece: Piece, after: int, upto: int) -> bytes:
    return b"".join(chunk.data for chunk in piece.lines(after, upto))


@given(tables, st.integers(1, 50), st.integers(1, 200), st.integers(1, 200))
def test_pieces_one_after_another_have_every_row_once_and_no_batch_is_divided(
    rows: list[Row], limit: int, size: int, chunk: int
) -> None:
    async def read() -> bytes:
        table, at, found = Table(rows, chunk), 0, b""
        segment = Segment(0, 31)
        while at < segment.upto:
            piece = await read_piece(table, segment, at, segment.upto, PieceBounds(limit, size))
            assert piece.upto > at
            found += data(piece, at, segment.upto)
            at = piece.upto
        return found

    assert ids(trio.run(read), rows) == rows


@given(
    st.lists(st.tuples(st.integers(1, 200), writers), max_size=60, unique_by=lambda row: row[0]).map(sorted),
    st.none() | st.integers(1, 200),
    st.builds(Blocks, st.integers(1, 80), st.integers(1, 30), st.integers(15, 20)),  # a line has 14 to 16 bytes
    st.integers(1, 600),
)
def test_pieces_that_are_read_in_blocks_have_the_same_rows_and_end_before_the_same_row(
    rows: list[Row], bad: int | None, blocks: Blocks, size: int
) -> None:
    async def read() -> bytes:
        table, at, found = Table(rows, bad=bad, unique_ids=True), 0, b""
        segment = Segment(0, 200)
        while at < segment.upto:
            table.reads = 0
            try:
                piece = await read_piece(table, segment, at, segment.upto, PieceBounds(7, size, blocks))
            except DatabaseError:
                break
            assert piece.upto > at
            assert piece.no_blocks == (table.reads > 1)
            assert piece.rows == data(piece, at, piece.upto).count(b"\n")
            found += data(piece, at, segment.upto)
            at = piece.upto
        return found

    readable = next((rows[:number] for number, row in enumerate(rows) if row[0] == bad), rows)
    assert ids(trio.run(read), readable) == readable


@given(tables, st.integers(0, 31), st.integers(0, 31), st.integers(1, 200))
def test_a_part_of_a_piece_has_exactly_the_rows_between_two_ids(
    rows: list[Row], after: int, upto: int, chunk: int
) -> None:
    async def read() -> Piece:
        return await read_piece(Table(rows, chunk), Segment(0, 31), 0, 31, PieceBounds(1000, 1 << 20))

    piece = trio.run(read)
    assert ids(data(piece, after, upto), rows) == [row for row in rows if after < row[0] <= upto]


@given(
    st.dictionaries(st.sampled_from(["a", "b", "c"]), st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=3),
    st.none() | st.tuples(st.integers(0, 20), st.integers(0, 20)),
    st.integers(1, 20),
)
def test_segments_have_what_the_ranges_have_and_the_middle_is_of_all_writers(
    ranges: dict[str, Range], others: Range | None, limit: int
) -> None:
    ranges = {name: (min(span), max(span)) for name, span in ranges.items()}
    others = None if others is None else (min(others), max(others))
    rows = [(id, writer) for id in range(1, 21) for writer in ("a", "b", "c", "other")]
    named = [row for row in rows if row[1] in ranges or others is not None]  # else there are no other writers

    async def read() -> list[Row]:
        found: list[Row] = []
        last = -1
        for segment in segments(ranges, others):
            assert segment.after >= last
            at, last = segment.after, segment.upto
            while at < segment.upto:
                piece = await read_piece(Table(named), segment, at, segment.upto, PieceBounds(limit, 1000))
                found += ids(data(piece, at, segment.upto), rows)
                at = piece.upto
        return found

    assert trio.run(read) == [row for row in named if wanted(row, ranges, others)]
    if others is not None and len({*ranges.values(), others}) == 1 and others[0] < others[1]:
        assert segments(ranges, others) == [Segment(*others)]


async def test_a_piece_ends_before_a_row_that_fails_and_the_next_one_raises() -> None:
    table = Table([(1, "a"), (2, "a"), (3, "a")], bad=3)
    piece = await read_piece(table, Segment(0, 9), 0, 9, PieceBounds(100, 1000))
    assert (piece.upto, piece.cut) == (1, True), "the last id may have more rows: it is read again"
    try:
        await read_piece(table, Segment(0, 9), 2, 9, PieceBounds(100, 1000))
    except DatabaseError:
        pass
    else:
        raise AssertionError("nothing could be read")


async def test_a_row_larger_than_the_bound_is_a_piece_of_its_own() -> None:
    class Wide(Table):
        async def _copy(self, chosen: list[Row], sink: ChunkSink, limit: int | None) -> int:
            for id, _ in chosen[:limit]:
                await sink(Chunk(b"RDATA s a %d %s\n" % (id, b"x" * 5000), "a", id))
            return len(chosen[:limit])

    table = Wide([(1, "a"), (2, "a")], unique_ids=True)
    piece = await read_piece(table, Segment(0, 9), 0, 9, PieceBounds(100, 1000))
    assert (piece.upto, piece.rows) == (1, 1)


def test_a_chunk_that_is_wanted_whole_is_not_copied() -> None:
    chunk = Chunk(b"RDATA s a 1 1\nRDATA s a 2 1\n", "a", 2)
    assert between(chunk, 0, 2) is chunk
    part = between(chunk, 1, 2)
    assert part is not None
    assert part.data == b"RDATA s a 2 1\n"
    assert between(chunk, 2, 9) is None


LINE = len(lines([(1, "a")])[0])


@given(
    st.sets(st.one_of(st.integers(1, 60), st.integers(1, 2000))),
    st.one_of(st.none(), st.integers(1, 60)),
    st.integers(2, 5).map(lambda rows: rows * LINE),
    st.integers(1, 5),
    st.integers(0, 20),
)
def test_many_rows_are_sent_once_and_in_order_up_to_the_one_that_fails(
    found: set[int], bad: int | None, chunk: int, sample: int, after: int
) -> None:
    rows: list[Row] = [(id, "a") for id in sorted(found)]
    table = Table(rows, chunk, bad, unique_ids=True)
    sizes, sent = RowSizes(), list[bytes]()

    async def keep(chunk: Chunk) -> None:
        sent.append(chunk.data)

    async def copy() -> int:
        return await copy_all(cast(TableRows, table), sizes, after, 2000, keep)

    for _ in range(2):
        sent.clear()
        with patch.multiple(row_pieces, CHUNK=chunk, SAMPLE=sample, RANGE=2):
            fails = bad in found and bad is not None and bad > after
            try:
                assert trio.run(copy) == len([id for id in found if id > after])
                assert not fails
            except DatabaseError:
                assert fails
        upto = bad - 1 if fails and bad is not None else 2000
        assert ids(b"".join(sent), rows) == [row for row in rows if after < row[0] <= upto]


def test_many_dense_rows_are_sent_in_blocks_and_sparse_ones_row_by_row() -> None:
    async def copy(table: Table) -> None:
        await copy_all(cast(TableRows, table), RowSizes(), 0, table.rows[-1][0], pass_over)

    async def pass_over(_: Chunk) -> None:
        pass

    dense, sparse = (Table([(id, "a") for id in range(gap, 12_000 * gap, gap)], 4096) for gap in (1, 100))
    with patch.object(row_pieces, "CHUNK", 8192):
        trio.run(copy, dense)
        trio.run(copy, sparse)
    assert 1 < dense.blocks < 40
    assert sparse.blocks == 0
    jump = Table([*[(id, "a") for id in range(1, 12_000)], (1 << 60, "a")], 4096)
    with patch.object(row_pieces, "CHUNK", 8192):
        trio.run(copy, jump)
    assert jump.blocks
    assert jump.reads < 10, "a range without rows is not asked for block by block"
