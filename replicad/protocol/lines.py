"""Bytes to lines, in linear time and bounded memory. Knows nothing of what stands on a line."""

from __future__ import annotations

from replicad.errors import RemoteProtocolError

MAX_LINE = 1 << 20  # bytes; the longest row that we accept, plus headroom


class LineTooLong(RemoteProtocolError):
    """A line went beyond the limit before it ended."""

    code = "line_too_long"


class LineBuffer:
    """Collects received bytes and hands out whole lines, one by one or as they lie in the stream.

    A line ends in `\\n`; a `\\r` before it is dropped (netcat and telnet users). Bytes of an unfinished line are looked
    at once, however small the pieces in which they come. Memory stays below the limit plus one piece of data.
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
        """Take received bytes, return the lines that are now whole, oldest first and without their ends.

        A line beyond the limit is not returned: the call after the lines before it raises, so that nothing that came
        first is lost.

        Raises:
            LineTooLong: the bytes before this call began a line that is too long.
        """
        lines = self.feed_block(data).split(b"\n")
        lines.pop()  # what stands behind the last end: nothing
        return [line[:-1] if line.endswith(b"\r") else line for line in lines]

    def feed_block(self, data: bytes) -> bytes:
        """Like `feed`, but the lines come in one piece, ends included: for callers that take bulk apart themselves.

        Raises:
            LineTooLong: the bytes before this call began a line that is too long.
        """
        self.check()
        end = data.rfind(b"\n") + 1
        if not end:
            self._hold(data)
            return b""
        block = bytes(self._partial) + data[:end] if self._partial else data[:end]
        self._partial.clear()
        if len(block) > self._max_line:
            fitting = self._fitting(block)
            if fitting < len(block):
                self._too_long = True
                return block[:fitting]
        self._hold(data[end:])
        return block

    def check(self) -> None:
        """Raise what the next `feed` would raise, without waiting for more bytes.

        Raises:
            LineTooLong: the line now under way is too long.
        """
        if self._too_long:
            raise LineTooLong(f"a line may have at most {self._max_line} bytes")

    def _hold(self, rest: bytes) -> None:
        self._partial += rest
        if len(self._partial) > self._max_line:
            self._partial.clear()
            self._too_long = True

    def _fitting(self, block: bytes) -> int:
        """How many bytes of the block stand before its first line beyond the limit; all of them where there is none."""
        begin = 0
        while begin < len(block):
            end = block.index(b"\n", begin)
            if end - begin > self._max_line:
                return begin
            begin = end + 1
        return begin
