"""Bytes to lines, in linear time and bounded memory, and to raw bytes where whoever reads the lines asks for them.

Knows nothing of what stands on a line, but for the first word of those behind which raw bytes may come.
"""

from __future__ import annotations

from replicad.errors import RemoteProtocolError

MAX_LINE = 1 << 20  # bytes; the longest row that we accept, plus headroom


_HEAD = 4096  # bytes in which the words before a row's JSON end


class LineTooLong(RemoteProtocolError):
    """A line went beyond the limit before it ended. `stream` is whose row it is, None where it is no RDATA."""

    code = "line_too_long"

    def __init__(self, message: str, *, stream: str | None = None) -> None:
        super().__init__(message)
        self.stream = stream


class LineBuffer:
    """Collects received bytes and hands out whole lines, one by one or as they lie in the stream.

    A line ends in `\\n`; a `\\r` before it is dropped (netcat and telnet users). Bytes of an unfinished line are looked
    at once, however small the pieces in which they come. Memory stays below the limit plus one piece of data.
    """

    def __init__(self, max_line: int = MAX_LINE) -> None:
        self._max_line = max_line
        self._partial = bytearray()
        self._too_long = False
        self._head = b""  # of the line that is too long

    @property
    def partial(self) -> int:
        """Bytes held of a line that has not ended yet."""
        return len(self._partial)

    def begins(self, size: int) -> bytes:
        """The first bytes of the line that has not ended yet, at most so many."""
        return bytes(self._partial[:size])

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
                self._head = block[fitting : fitting + _HEAD]
                return block[:fitting]
        self._hold(data[end:])
        return block

    def check(self) -> None:
        """Raise what the next `feed` would raise, without waiting for more bytes.

        Raises:
            LineTooLong: the line now under way is too long.
        """
        if self._too_long:
            said, stream = _row_of(self._head)
            raise LineTooLong(f"a line may have at most {self._max_line} bytes{said}", stream=stream)

    def _hold(self, rest: bytes) -> None:
        self._partial += rest
        if len(self._partial) > self._max_line:
            self._head = bytes(self._partial[:_HEAD])
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


def _row_of(head: bytes) -> tuple[str, str | None]:
    """Which row a line that begins so is of, in words, and the stream's name; nothing for other lines."""
    words = head.split(b" ", 4)
    if words[0] != b"RDATA" or len(words) < 5:
        return "", None
    stream, instance, token = (word.decode(errors="replace") for word in words[1:4])
    return f", and the one with token {token} of stream {stream}, writer {instance}, has more", stream


class MixedBuffer:
    """Collects received bytes of which some are lines and some are not, and hands out one or the other.

    It stops behind every line that begins with `stop`. Whoever reads that line says how many raw bytes follow it, and
    is given these, in one piece with the newline behind them, before any line comes again. With `stop` None all is
    lines. Takes linear time; memory stays below the raw bytes, or the limit of a line, plus one piece of data.
    """

    def __init__(self, max_line: int = MAX_LINE) -> None:
        self.stop: bytes | None = None
        self._lines = LineBuffer(max_line)
        self._held = b""  # what came behind a line that ends in `stop`, not looked at yet
        self._raw: list[bytes] = []
        self._raw_left = 0

    @property
    def held(self) -> bool:
        """Whether there are bytes that `feed(b"")` may make something of."""
        return bool(self._held)

    @property
    def raw(self) -> bool:
        """Whether raw bytes are awaited."""
        return self._raw_left > 0

    @property
    def partial(self) -> int:
        """Bytes held of a line that has not ended yet."""
        return self._lines.partial

    def expect_raw(self, size: int) -> None:
        """What comes next, and is handed out as one piece, are `size` raw bytes and a newline."""
        self._raw_left = size + 1

    def feed(self, data: bytes) -> bytes:
        """Take received bytes; return the lines that are now whole, or the raw bytes once all are there, or nothing.

        Raises:
            LineTooLong: the bytes before this call began a line that is too long.
        """
        if self._held:
            data, self._held = self._held + data, b""
        if self._raw_left:
            return self._feed_raw(data)
        end = self._announcement_end(data)
        if end:
            data, self._held = data[:end], data[end:]
        return self._lines.feed_block(data)

    def check(self) -> None:
        """As `LineBuffer.check`."""
        self._lines.check()

    def _feed_raw(self, data: bytes) -> bytes:
        piece, self._held = (
            (data, b"") if len(data) <= self._raw_left else (data[: self._raw_left], data[self._raw_left :])
        )
        self._raw.append(piece)
        self._raw_left -= len(piece)
        if self._raw_left:
            return b""
        whole = self._raw[0] if len(self._raw) == 1 else b"".join(self._raw)
        self._raw.clear()
        return whole

    def _announcement_end(self, data: bytes) -> int:
        """Where the first line that begins with `stop` ends in this data; 0 where none does."""
        if self.stop is None:
            return 0
        begin = 0
        if not (self._lines.begins(len(self.stop)) + data[: len(self.stop)]).startswith(self.stop):
            begin = data.find(b"\n" + self.stop) + 1
            if not begin:
                return 0
        return data.find(b"\n", begin) + 1
