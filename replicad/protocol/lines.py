"""Split received bytes into lines, and into announced raw bytes, in linear time and bounded memory.

Knows only the first word of a line: raw bytes may follow a line that begins with `stop`.
"""

from __future__ import annotations

from replicad.errors import RemoteProtocolError

MAX_LINE = 1 << 20  # bytes; the longest row that we accept, plus headroom
_HEAD = 4096  # bytes; the words before a row's JSON are shorter


class LineTooLong(RemoteProtocolError):
    """A line is longer than the limit. `stream` is the stream of its row; None if the line is not RDATA."""

    code = "line_too_long"

    def __init__(self, message: str, *, stream: str | None = None) -> None:
        super().__init__(message)
        self.stream = stream


class LineBuffer:
    """Collects received bytes and returns them as blocks of whole lines.

    A line ends in `\\n`. Every byte is searched once, however small the received pieces are. Memory stays below the
    limit plus one piece of data.
    """

    __slots__ = ("__weakref__", "_head", "_max_line", "_partial", "_too_long")

    def __init__(self, max_line: int = MAX_LINE) -> None:
        self._max_line = max_line
        self._partial = bytearray()
        self._too_long = False
        self._head = b""  # of the line that is too long

    def allow(self, max_line: int) -> None:
        """Change the limit for lines that are not too long yet."""
        self._max_line = max_line

    def drop(self) -> None:
        """Forget the line that has not ended."""
        self._partial = bytearray()

    @property
    def partial(self) -> int:
        """Bytes held of a line that has not ended yet."""
        return len(self._partial)

    def feed(self, data: bytes) -> bytes:
        """Take received bytes; return all lines that are now complete as one block, with their ends.

        The lines before a line that is too long are returned; the next call raises.

        Raises:
            LineTooLong: a line that began before this call is too long.
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
        """Raise LineTooLong now if the next `feed` would."""
        if self._too_long:
            row, stream = _row_of(self._head)
            raise LineTooLong(f"a line may have at most {self._max_line} bytes{row}", stream=stream)

    def _hold(self, rest: bytes) -> None:
        self._partial += rest
        if len(self._partial) > self._max_line:
            self._head = bytes(self._partial[:_HEAD])
            self._partial.clear()
            self._too_long = True

    def _fitting(self, block: bytes) -> int:
        """The number of bytes before the first line of the block that is too long; all if there is none."""
        begin = 0
        while begin < len(block):
            end = block.index(b"\n", begin)
            if end - begin > self._max_line:
                return begin
            begin = end + 1
        return begin


def _row_of(head: bytes) -> tuple[str, str | None]:
    """If a line that begins so is RDATA: a phrase for the error, and the stream's name."""
    words = head.split(b" ", 4)
    if words[0] != b"RDATA" or len(words) < 5:
        return "", None
    stream, instance, token = (word.decode(errors="replace") for word in words[1:4])
    return f", and the one with token {token} of stream {stream}, writer {instance}, has more", stream


class MixedBuffer(LineBuffer):
    """A LineBuffer for lines with raw bytes between them.

    It returns nothing beyond a line that begins with `stop`. The reader of that line calls `expect_raw`; the next block
    is then the raw bytes and the newline behind them. With `stop` None there are only lines. Memory stays below the raw
    bytes, or the limit of a line, plus one piece of data.
    """

    __slots__ = ("_held", "_raw", "_raw_left", "stop")

    def __init__(self, max_line: int = MAX_LINE) -> None:
        super().__init__(max_line)
        self.stop: bytes | None = None
        self._held = b""  # bytes behind a line that begins with `stop`, not looked at yet
        self._raw: list[bytes] = []
        self._raw_left = 0

    @property
    def held(self) -> bool:
        """Whether `feed(b"")` may return something."""
        return bool(self._held)

    @property
    def raw(self) -> bool:
        """Whether raw bytes are expected."""
        return self._raw_left > 0

    def expect_raw(self, size: int) -> None:
        """The next block is `size` raw bytes and a newline."""
        self._raw_left = size + 1

    def feed(self, data: bytes) -> bytes:
        """Take received bytes; return the lines that are now complete, or the raw bytes once all are there, or nothing.

        Raises:
            LineTooLong: a line that began before this call is too long.
        """
        if self._held:
            data, self._held = self._held + data, b""
        if self._raw_left:
            return self._feed_raw(data)
        end = self._announcement_end(data)
        if end:
            data, self._held = data[:end], data[end:]
        return super().feed(data)

    def _feed_raw(self, data: bytes) -> bytes:
        piece, self._held = data[: self._raw_left], data[self._raw_left :]
        self._raw.append(piece)
        self._raw_left -= len(piece)
        if self._raw_left:
            return b""
        whole = self._raw[0] if len(self._raw) == 1 else b"".join(self._raw)
        self._raw.clear()
        return whole

    def _announcement_end(self, data: bytes) -> int:
        """The end of the first line in this data that begins with `stop`; 0 if there is none."""
        if self.stop is None:
            return 0
        begin = 0
        if not (self._partial[: len(self.stop)] + data[: len(self.stop)]).startswith(self.stop):
            begin = data.find(b"\n" + self.stop) + 1
            if not begin:
                return 0
        return data.find(b"\n", begin) + 1
