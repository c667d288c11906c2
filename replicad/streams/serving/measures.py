"""What is measured of one served stream for figures: what its clients were sent, and for how long ids have waited."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import trio

from replicad.daemon.journal import ChannelStatistics
from replicad.positions.horizon import Reading
from replicad.streams.row_pieces import Piece

MINUTE = 60  # seconds; bytes are kept by the second in which they were sent, so at most 60 numbers are kept
MARKS = 64  # kept for each stream; when there are more, two neighbours become one


class SentCounts:
    """Counts since the stream is served, once for each client: new rows from the journal, and old rows of catch-ups.

    Counted for each copy or piece, never for each row.
    """

    def __init__(self) -> None:
        self.rows = 0
        self._bytes: deque[tuple[int, int]] = deque()  # of the last minute: the second, and the bytes in it

    def add_copy(self, before: ChannelStatistics, after: ChannelStatistics) -> None:
        """A copy has put rows into a journal, which had these statistics before it and has those after it."""
        self.rows += (after.appended_lines - before.appended_lines) * after.readers
        self._add_bytes((after.appended_bytes - before.appended_bytes) * after.readers)

    def add_piece(self, piece: Piece, size: int) -> None:
        """So many bytes of a piece were sent to one client. A piece of which all was sent has exactly so many rows."""
        self.rows += round(piece.rows * min(1.0, size / max(1, piece.size)))
        self._add_bytes(size)

    @property
    def bytes_last_minute(self) -> int:
        """The bytes of rows of the last 60 seconds."""
        self._forget(int(trio.current_time()))
        return sum(size for _, size in self._bytes)

    def _add_bytes(self, size: int) -> None:
        if not size:
            return
        second = int(trio.current_time())
        if self._bytes and self._bytes[-1][0] == second:
            size += self._bytes.pop()[1]
        self._bytes.append((second, size))
        self._forget(second)

    def _forget(self, second: int) -> None:
        while self._bytes and self._bytes[0][0] <= second - MINUTE:
            self._bytes.popleft()


class Lag:
    """For how long ids of a stream have been waiting, and its position has been held back: from readings, without SQL.

    It remembers when the sequence was first seen at which value.
    """

    __slots__ = ("_held", "_marks", "_moved_at", "_position")

    def __init__(self) -> None:
        self._marks: deque[tuple[float, int]] = deque()  # (when, last value), both rising
        self._position: int | None = None
        self._moved_at = 0.0
        self._held = False

    def observe(self, reading: Reading, now: float, published: Callable[[], int | None]) -> None:
        """Take a reading. `published` returns up to where readers were sent all rows; it is seldom called."""
        last, marks = reading.last_value, self._marks
        if reading.position != self._position or not self._held:
            self._position, self._moved_at = reading.position, now
        self._held = reading.held_by is not None
        if last is None or (marks and marks[-1][1] == last):
            return
        if marks and last < marks[-1][1]:  # the sequence was set back
            marks.clear()
        marks.append((now, last))
        if len(marks) > MARKS:
            self._drop(published())
        if len(marks) > MARKS:
            kept = list(marks)  # an earlier time with a later value: the lag is never shown too short
            marks.clear()
            marks.extend((kept[i][0], kept[min(i + 1, len(kept) - 1)][1]) for i in range(0, len(kept), 2))

    def seconds(self, published: int | None, now: float) -> float:
        """Time since the first id above `published` was seen; 0 if there is none. None: nothing is published."""
        self._drop(published)
        return max(0.0, now - self._marks[0][0]) if self._marks else 0.0

    def held_seconds(self, now: float) -> float | None:
        """For how long the position has not moved while it is held back; None if it is not held back."""
        return max(0.0, now - self._moved_at) if self._held else None

    def _drop(self, published: int | None) -> None:
        while published is not None and self._marks and self._marks[0][1] <= published:
            self._marks.popleft()
