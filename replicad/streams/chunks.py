"""Chunks of whole lines of a stream, and how bytes from Postgres are cut into them. Does no I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from replicad.errors import DatabaseError, RowTooLong

CHUNK: Final = 128 * 1024  # bytes; sending more at once gained nothing (measured)
MAX_ROW: Final = 64 << 20  # bytes of a line without its newline, the default bound: clients accept no more
SEPARATOR: Final = b"\x01"  # ends a line in a block: JSON text and our lines never contain it
HEAD: Final = 4096  # bytes in which the words before the JSON end: two names of 200 characters and a token


class Enough(Exception):
    """No more lines are wanted: the read ends here, though the range has more rows."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Whole lines of one stream; `instance` and `token` of the last line. `token` is None if it ends within a batch.

    `counted`: the number of lines where it is known. To count them takes as long as Postgres takes for a third of them.
    """

    data: bytes
    instance: str
    token: int | None
    counted: int | None = field(default=None, compare=False)

    @property
    def rows(self) -> int:
        """The number of lines."""
        return self.data.count(b"\n") if self.counted is None else self.counted


class LineCutter:
    """Cuts bytes into chunks of whole lines. Each chunk ends with the first line that makes it `size` bytes long.

    Takes linear time and holds at most one chunk, one unfinished line of at most `max_row` bytes and one piece of data.
    """

    def __init__(self, size: int = CHUNK, max_row: int = MAX_ROW) -> None:
        self._size = size
        self._max_row = max_row
        self._pieces: list[bytes] = []
        self._length = 0  # of all pieces
        self._unfinished = 0  # bytes of the last line, where the pieces do not end it
        self._left: list[Chunk] = []  # complete chunks before a line that was too long

    def feed(self, data: bytes) -> list[Chunk]:
        """The chunks that these bytes complete.

        Raises:
            RowTooLong: a line is longer than `max_row`; `rescue` returns the whole lines before it.
        """
        chunks: list[Chunk] = []
        at = 0
        try:
            while at < len(data):
                enough = max(at, at + self._size - self._length - 1)
                end = data.find(b"\n", enough) + 1
                if not end:
                    break
                self._add(data[at:end] if at or end < len(data) else data)
                chunks.append(self._cut())
                at = end
            if at < len(data):
                self._add(data[at:] if at else data)
                if self._unfinished > self._max_row:
                    self._refuse(b"".join(self._pieces), self._length - self._unfinished)
        except RowTooLong:
            self._left = chunks
            raise
        return chunks

    def finish(self) -> list[Chunk]:
        """The last chunk. Raises DatabaseError if it ends within a line (the COPY failed), and what `feed` raises."""
        if self._unfinished:
            raise DatabaseError("Postgres ended a COPY in the middle of a line.")
        return [self._cut()] if self._pieces else []

    def rescue(self) -> list[Chunk]:
        """After a failure: the whole lines that were not returned yet, without an incomplete batch."""
        data = b"".join(self._pieces)
        end = data.rfind(b"\n") + 1
        while end:
            start = data.rfind(b"\n", 0, end - 1) + 1
            if line_token(data[start : start + HEAD]) is not None:
                self._pieces, self._length, self._unfinished = [data[:end]], end, 0
                return [*self._left, self._cut()]
            end = start
        return self._left

    def _add(self, piece: bytes) -> None:
        self._pieces.append(piece)
        self._length += len(piece)
        after_end = len(piece) - (piece.rfind(b"\n") + 1)
        self._unfinished = after_end if after_end < len(piece) else self._unfinished + after_end

    def _cut(self) -> Chunk:
        data = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        if len(data) > self._max_row:  # else no line of it can be too long
            self._check(data)
        self._pieces.clear()
        self._length = self._unfinished = 0
        start = data.rfind(b"\n", 0, len(data) - 1) + 1
        head = data[start : start + HEAD]
        return Chunk(data, head.split(b" ", 3)[2].decode(), line_token(head), data.count(b"\n"))

    def _check(self, data: bytes) -> None:
        start = 0
        while start < len(data):
            end = data.index(b"\n", start)
            if end - start > self._max_row:
                self._refuse(data, start)
            start = end + 1

    def _refuse(self, data: bytes, start: int) -> None:
        """Raise RowTooLong for the line that begins at `start`; the lines before it are kept."""
        self._pieces, self._length, self._unfinished = [data[:start]] if start else [], start, 0
        raise RowTooLong(f"a line has more than {self._max_row} bytes", row_id=line_token(data[start : start + HEAD]))


def line_token(head: bytes) -> int | None:
    """The token of a line with this beginning; None for `batch`."""
    token = head.split(b" ", 4)[3]
    return None if token == b"batch" else int(token)


def chunk_of(data: bytes, rows: int | None = None) -> Chunk:
    """The chunk with these whole lines; `rows`: their number, where it is known."""
    start = data.rfind(b"\n", 0, len(data) - 1) + 1
    head = data[start : start + HEAD]
    return Chunk(data, head.split(b" ", 3)[2].decode(), line_token(head), rows)


def divided(chunk: Chunk) -> list[Chunk]:
    """The same lines in chunks of about CHUNK bytes, if they are more than two of these."""
    if len(chunk.data) <= 2 * CHUNK:
        return [chunk]
    cutter = LineCutter()
    return [*cutter.feed(chunk.data), *cutter.finish()]


def lines_of_block(block: bytes) -> tuple[int, bytes]:
    """The rows of a block and their lines (`RowText.blocks_sql`).

    Each line ends with SEPARATOR there. An end of line is within JSON; it becomes a blank, as in the lines of a COPY.
    """
    rows, _, lines = block.partition(b"\n")
    for end in (b"\n", b"\r"):
        if end in lines:
            lines = lines.replace(end, b" ")
    return int(rows), lines.replace(SEPARATOR, b"\n")


def no_longer(data: bytes, most: int) -> bool:
    """Whether each of these whole lines has at most `most` bytes. Looks at no more than a few ends of lines."""
    start = 0
    while len(data) - start > most + 1:
        end = data.rfind(b"\n", start, start + most + 1)
        if end < 0:
            return False
        start = end + 1
    return True


def whole_ids(chunks: Sequence[Chunk], *, unique: bool) -> list[Chunk]:
    """The chunks without an incomplete batch at their end, divided at the ends of ids only.

    If rows of several writers may share an id (`unique` is False), the last id is left out too: more of its rows may
    follow.
    """
    found = list(chunks)
    bound: int | None = None
    while found:
        end, bound = _end_of_ids(found[-1].data, bound, unique=unique)
        if end:
            found[-1] = found[-1] if end == len(found[-1].data) else chunk_of(found[-1].data[:end])
            return joined(found, unique=unique)
        found.pop()
    return []


def joined(chunks: Sequence[Chunk], *, unique: bool) -> list[Chunk]:
    """The same lines in chunks that end at the ends of ids; the last chunk is assumed to do so."""
    ended: list[Chunk] = []
    parts: list[bytes] = []
    for chunk in chunks:
        if unique and chunk.token is not None and not parts:
            ended.append(chunk)
            continue
        data = chunk.data
        end = _end_of_ids(data, None, unique=unique)[0]
        if end:
            ended.append(chunk_of(b"".join([*parts, data[:end]])))
            parts, data = [], data[end:]
        if data:
            parts.append(data)
    return [*ended, chunk_of(b"".join(parts))] if parts else ended


def _end_of_ids(data: bytes, bound: int | None, *, unique: bool) -> tuple[int, int | None]:
    """Where the last id ends that is surely complete (0: nowhere), and the lowest id that is perhaps not.

    `bound`: an id that follows the data, if it is known.
    """
    end = len(data)
    while end:
        start = data.rfind(b"\n", 0, end - 1) + 1
        id = line_token(data[start : start + HEAD])
        if id is not None and (unique or (bound is not None and id < bound)):
            return end, bound
        bound = id if bound is None else bound
        end = start
    return 0, bound
