"""The last token of each writer in the chunks that were sent, and lines of POSITION. Does no I/O."""

from __future__ import annotations

import re
from collections.abc import Mapping

from replicad.streams.chunks import Chunk

FEW = 8  # writers that are searched for one by one; for more, one regular expression over the chunk is cheaper
SORTED = 1000  # lines that are sorted for human readers; with more, sorting would cost as much as making them

Positions = Mapping[str, int]


class LastTokens:
    """The last token of each writer in the chunks that were sent.

    Few writers are searched for from the end of a chunk; for many the chunk is scanned once.
    """

    def __init__(self, stream: str, writers: Positions, *, one: bool) -> None:
        """`one`: all rows count as rows of the only name in `writers`."""
        self._single = next(iter(writers)) if one else None
        self._writers = writers
        self._prefixes = {name: f"RDATA {stream} {name} ".encode() for name in writers} if len(writers) <= FEW else {}
        self._lines = re.compile(rb"^RDATA %s ([^ ]+) (-?[0-9]+) " % re.escape(stream.encode()), re.MULTILINE)
        self.tokens: dict[str, int] = {}
        self.done: int | None = None  # all rows up to this id were in the chunks
        self.torn = False  # the last chunk ends within a batch

    def see(self, chunk: Chunk) -> None:
        """Take the last tokens of a chunk. Chunks come in ascending order of ids."""
        self.torn = chunk.token is None
        if chunk.token is not None:
            self.done = chunk.token
        if self._single is not None:
            if chunk.token is not None:
                self.tokens[self._single] = chunk.token
        elif self._prefixes:
            self._search(chunk.data)
        else:
            last: dict[bytes, bytes] = dict(self._lines.findall(chunk.data))
            names = ((name.decode(), token) for name, token in last.items())
            self.tokens |= {name: int(token) for name, token in names if name in self._writers}

    def _search(self, data: bytes) -> None:
        for name, prefix in self._prefixes.items():
            at = data.rfind(b"\n" + prefix) + 1
            if at or data.startswith(prefix):
                word = data[at + len(prefix) : at + len(prefix) + 21].split(b" ", 1)[0]
                if word != b"batch":  # its number is in the next chunk
                    self.tokens[name] = int(word)


def position_lines(stream: str, sent: Positions, now: Positions, *, all_of_them: bool = False) -> bytes:
    """POSITION for each writer whose position differs from the position that was sent, or for `all_of_them`.

    Not by `Position.render`, which parses what it renders: names come from the registry, where each is one word.
    """
    moved = [(name, sent[name], at) for name, at in now.items() if all_of_them or sent[name] != at]
    if len(moved) <= SORTED:
        moved.sort()
    return "".join([f"POSITION {stream} {name} {before} {at}\n" for name, before, at in moved]).encode()


def set_lines(stream: str, writers: bytes, positions: Positions) -> bytes:
    """The lines of a whole set, and a POSITION without change: it ends the set."""
    for name, at in positions.items():
        return writers + f"POSITION {stream} {name} {at} {at}\n".encode()
    return writers
