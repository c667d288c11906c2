"""Bytes to lines, in linear time and bounded memory. Knows nothing of what stands on a line."""

from __future__ import annotations

from replicad.errors import RemoteProtocolError

MAX_LINE = 1 << 20  # bytes; the longest row that we accept, plus headroom


class LineTooLong(RemoteProtocolError):
    """A line went beyond the limit before it ended."""

    code = "line_too_long"


class LineBuffer:
    """Collects received bytes and hands out whole lines without their ends.

    A line ends in `\\n`; a `\\r` before it is dropped (netcat and telnet users). Bytes of an unfinished line are looked
    at once, however small the pieces in which they come.
    """

    def __init__(self, max_line: int = MAX_LINE) -> None:
        self._max_line = max_line
        self._partial = bytearray()
        self._too_long = False

    @property
    def partial(self) -> int:
        """Bytes held of a line that has not ended yet."""
        return len(self._partial)

    def feed(self, data: bytes) -> list[bytes]:
        """Take received bytes, return the lines that are now whole, oldest first.

        A line beyond the limit is not returned: the call after the lines before it raises, so that nothing that came
        first is lost. Memory stays below the limit plus one piece of data.

        Raises:
            LineTooLong: the bytes before this call began a line that is too long.
        """
        if self._too_long:
            raise LineTooLong(f"a line may have at most {self._max_line} bytes")
        *whole, rest = data.split(b"\n")
        lines: list[bytes] = []
        for piece in whole:
            if self._partial:
                self._partial += piece
                line = bytes(self._partial)
                self._partial.clear()
            else:
                line = piece
            if len(line) > self._max_line:
                self._too_long = True
                return lines
            lines.append(line[:-1] if line.endswith(b"\r") else line)
        self._partial += rest
        if len(self._partial) > self._max_line:
            self._partial.clear()
            self._too_long = True
        return lines

    def check(self) -> None:
        """Raise what the next `feed` would raise, without waiting for more bytes.

        Raises:
            LineTooLong: the line now under way is too long.
        """
        if self._too_long:
            raise LineTooLong(f"a line may have at most {self._max_line} bytes")
