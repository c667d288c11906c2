"""What readers were told of writers: the last token of each in the rows that went by, and the lines that say positions.

Pure functions and bookkeeping. What is to be told, and when, is for `feed`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from replicad.streams.rows import Chunk

FEW = 8  # writers that are searched for one by one; beyond it reading a chunk once is cheaper
SORTED = 1000  # lines that are put in order for people; beyond it that would cost as much as making them

Positions = Mapping[str, int]


class LastTokens:
    """The last token of each writer in the chunks that went by.

    Few writers are searched for from the end of a chunk; of many the chunk is read once, whatever their number.
    """

    def __init__(self, stream: str, writers: Positions, *, one: bool) -> None:
        """`one`: all rows are of the one writer, whatever it is called."""
        self._single = next(iter(writers)) if one else None
        self._writers = writers
        self._prefixes = {name: f"RDATA {stream} {name} ".encode() for name in writers} if len(writers) <= FEW else {}
        self._lines = re.compile(rb"^RDATA %s ([^ ]+) (-?[0-9]+) " % re.escape(stream.encode()), re.MULTILINE)
        self.tokens: dict[str, int] = {}
        self.done: int | None = None  # ids up to here went by whole
        self.torn = False  # the last chunk ends within a batch

    def see(self, chunk: Chunk) -> None:
        """Note what a chunk ends with. Chunks come in ascending order of ids."""
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


def position_lines(stream: str, told: Positions, now: Positions, *, all_of_them: bool = False) -> bytes:
    """POSITION for each writer that has moved from what was told, or for `all_of_them`.

    Not by `Position.render`, which parses what it renders: names come from the registry, where each is one word.
    """
    moved = [(name, told[name], at) for name, at in now.items() if all_of_them or told[name] != at]
    if len(moved) <= SORTED:
        moved.sort()
    return "".join([f"POSITION {stream} {name} {before} {at}\n" for name, before, at in moved]).encode()


def set_lines(stream: str, writers: bytes, positions: Positions) -> bytes:
    """The lines of a whole set, and a POSITION that moves nothing: it says that the set is whole."""
    for name, at in positions.items():
        return writers + f"POSITION {stream} {name} {at} {at}\n".encode()
    return writers
