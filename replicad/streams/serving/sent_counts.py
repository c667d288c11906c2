"""How much of one stream its clients were sent. Counted for each copy or piece, never for each row."""

from __future__ import annotations

from collections import deque

import trio

from replicad.daemon.journal import ChannelStatistics
from replicad.streams.row_pieces import Piece

MINUTE = 60  # seconds; bytes are kept by the second in which they were sent, so at most 60 numbers are kept


class SentCounts:
    """Counts since the stream is served, once for each client: new rows from the journal, and old rows of catch-ups."""

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
