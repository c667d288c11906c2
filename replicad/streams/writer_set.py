"""Renders the writers of a stream as lines of WRITERS, and parses such lines into a set. Does no I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from replicad.errors import RemoteProtocolError

WRITERS_ON_LINE = 1000  # clients of the first version accept no more
MAX_WRITERS = 1_000_000  # of one stream: bounds a reader's memory, at a hundred times what a daemon lists


def writers_lines(stream: str, epoch: str, numbers: Mapping[str, int]) -> bytes:
    """The lines of WRITERS for a whole set, newlines included; at least one.

    Not by `Writers.render`, which parses what it renders: names come from the registry, where each is one word.
    """
    pairs = sorted(numbers.items(), key=lambda pair: pair[1])
    parts = [pairs[at : at + WRITERS_ON_LINE] for at in range(0, len(pairs), WRITERS_ON_LINE)] or [[]]
    return b"".join(_writers_line(f"WRITERS {stream} {epoch}", part) for part in parts)


def _writers_line(head: str, pairs: Iterable[tuple[str, int]]) -> bytes:
    return " ".join([head, *(f"{name}={number}" for name, number in pairs)]).encode() + b"\n"


class WriterSet:
    """The writers of a stream in one epoch, from the lines of WRITERS that a reader received.

    A line that names no writer, or a writer of the set, begins a new set; a line with other writers adds to
    it. A set is complete when POSITION follows. Until then `numbers` has the writers of both the old and the new set,
    so that the token of a reader never leaves out a writer that is behind.
    """

    def __init__(self) -> None:
        self._whole: dict[str, int] = {}
        self._coming: dict[str, int] | None = None
        self._begun = False  # a line came on this connection
        self.numbers: Mapping[str, int] = {}

    def begin(self) -> None:
        """A new connection: the next line begins a new set."""
        self._coming = None
        self._begun = False

    def add(self, numbers: Mapping[str, int]) -> list[str]:
        """Take one line; returns the names that were not in the set.

        Raises:
            RemoteProtocolError: more writers than any daemon serves.
        """
        known = self._whole if self._coming is None else self._coming
        anew = not numbers or not self._begun or not numbers.keys().isdisjoint(known)
        self._begun = True
        self._coming = dict(numbers) if anew else {**known, **numbers}
        if len(self._coming) > MAX_WRITERS:
            raise RemoteProtocolError(f"WRITERS of one stream names more than {MAX_WRITERS} writers")
        new = [name for name in numbers if name not in self.numbers]
        self.numbers = {**self._whole, **self._coming}
        return new

    def close(self) -> None:
        """POSITION was received: the set is complete."""
        if self._coming is not None:
            self._whole = self._coming
            self.numbers = self._whole
            self._coming = None
