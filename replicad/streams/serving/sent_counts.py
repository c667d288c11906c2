"""How much of one stream its clients were sent. Counted for each copy or piece, never for each row."""

from __future__ import annotations

from replicad.daemon.journal import ChannelStatistics
from replicad.streams.row_pieces import Piece


class SentCounts:
    """Counts since the stream is served, once for each client: new rows from the journal, and old rows of catch-ups."""

    def __init__(self) -> None:
        self.rows = 0

    def add_copy(self, before: ChannelStatistics, after: ChannelStatistics) -> None:
        """A copy has put rows into a journal, which had these statistics before it and has those after it."""
        self.rows += (after.appended_lines - before.appended_lines) * after.readers

    def add_piece(self, piece: Piece, size: int) -> None:
        """So many bytes of a piece were sent to one client. A piece of which all was sent has exactly so many rows."""
        self.rows += round(piece.rows * min(1.0, size / max(1, piece.size)))
