"""Positions as text: vector tokens of streams and cursors of tubes. Pure functions, no state.

A vector position says how far each writer of a stream has got (docs/positions.md). Its text is the linear minimum, then
only the writers ahead of it, each by its small persistent number. `58~2.61~5.60` means: everything up to 58 is
finished, for all writers; writer 2 is finished up to 61, writer 5 up to 60. An epoch may stand in front:
`a1b2c3d4!58~2.61`. A token that is kept over a restored backup needs it, because ids can climb back to where they were.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

from replicad.errors import BadToken, RemoteProtocolError

MAX_TOKEN = 256 * 1024  # characters; a quarter of the longest line that a server takes by default
_BIG = (1 << 63) - 1
_INTEGER = r"(?:0|-?[1-9][0-9]{0,18})"
_CURSOR = re.compile(r"[0-9]{1,19}\.[0-9]{1,19}").fullmatch
_VECTOR = re.compile(rf"(?:([0-9a-f]{{8,32}})!)?({_INTEGER})((?:~[1-9][0-9]{{0,8}}\.{_INTEGER})*)")


@dataclass(frozen=True, slots=True)
class Vector:
    """How far each writer has got: `minimum` for all of them, `ahead` for the numbers of those beyond it.

    Canonical by construction: `ahead` keeps only positions above `minimum`. Equal positions are equal objects
    and render to equal text.
    """

    minimum: int
    ahead: Mapping[int, int] = field(default_factory=dict)
    epoch: str | None = None

    def __post_init__(self) -> None:
        kept = {number: at for number, at in sorted(self.ahead.items()) if at > self.minimum}
        object.__setattr__(self, "ahead", kept)

    def __hash__(self) -> int:
        return hash((self.minimum, tuple(self.ahead.items()), self.epoch))

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `[epoch!]minimum[~number.position]...`.

        Raises:
            BadToken: not of that form, out of range, or a writer named twice.
        """
        found = _VECTOR.fullmatch(text) if len(text) <= MAX_TOKEN else None
        if found is None:
            raise BadToken(f"{text[:80]!r} is not a token; a token looks like 58 or 58~2.61")
        epoch, minimum, rest = found.groups()
        pairs = [part.split(".") for part in rest.split("~")[1:]]
        ahead = {int(number): int(at) for number, at in pairs}
        values = [int(minimum), *ahead.values()]
        if len(ahead) != len(pairs) or not all(-_BIG <= v <= _BIG for v in values):
            raise BadToken(f"{text[:80]!r} is not a token: a writer stands in it twice, or a number is too large")
        return cls(int(minimum), ahead, epoch)

    def __str__(self) -> str:
        head = f"{self.epoch}!" if self.epoch else ""
        return head + str(self.minimum) + "".join(f"~{number}.{at}" for number, at in self.ahead.items())

    def shortened(self, size: int = MAX_TOKEN) -> Vector:
        """A vector at or behind this one, for every writer, whose text has at most `size` characters.

        Writers that do not fit stand at the minimum, the least ahead first: their rows may come again, none is lost.
        """
        if len(str(self)) <= size:
            return self
        left = size - len(str(Vector(self.minimum, epoch=self.epoch)))
        kept: dict[int, int] = {}
        for number, at in sorted(self.ahead.items(), key=lambda pair: -pair[1]):
            left -= len(f"~{number}.{at}")
            if left < 0:
                break
            kept[number] = at
        return Vector(self.minimum, kept, self.epoch)

    def at(self, number: int) -> int:
        """The position of the writer with that number."""
        return self.ahead.get(number, self.minimum)

    @property
    def maximum(self) -> int:
        """The highest position of any writer."""
        return max(self.ahead.values(), default=self.minimum)

    def merge(self, other: Vector) -> Vector:
        """What someone knows who knows both: the larger position, writer by writer.

        Raises:
            BadToken: the two are of different epochs and have nothing to do with each other.
        """
        self._same_epoch(other)
        numbers = self.ahead.keys() | other.ahead.keys()
        return Vector(
            max(self.minimum, other.minimum),
            {number: max(self.at(number), other.at(number)) for number in numbers},
            self.epoch,
        )

    def at_most(self, bound: Vector) -> Vector:
        """The same, with no writer beyond where it stands in `bound`. The epoch stays."""
        numbers = self.ahead.keys() | bound.ahead.keys()
        return Vector(
            min(self.minimum, bound.minimum),
            {number: min(self.at(number), bound.at(number)) for number in numbers},
            self.epoch,
        )

    def compare(self, other: Vector) -> int | None:
        """-1, 0 or 1 where this token is behind, equal or ahead for every writer; None where they are incomparable.

        Raises:
            BadToken: the two are of different epochs.
        """
        self._same_epoch(other)
        numbers = self.ahead.keys() | other.ahead.keys()
        pairs = [(self.minimum, other.minimum), *((self.at(n), other.at(n)) for n in numbers)]
        behind, before = any(a < b for a, b in pairs), any(a > b for a, b in pairs)
        return None if behind and before else before - behind

    def _same_epoch(self, other: Vector) -> None:
        if self.epoch != other.epoch:
            raise BadToken(f"tokens of two epochs, {self.epoch} and {other.epoch}, cannot be compared")


@dataclass(frozen=True, slots=True, order=False)
class Cursor:
    """A place in one partition of a tube: the seq of the last regular and of the last backfill pod, `120.88`."""

    regular: int
    backfill: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `regular.backfill`.

        Raises:
            RemoteProtocolError: not of that form.
        """
        if not _CURSOR(text):
            raise RemoteProtocolError(f"a cursor is written like 120.88 (regular.backfill), got {text[:40]!r}")
        regular, backfill = map(int, text.split("."))
        if max(regular, backfill) > _BIG:
            raise RemoteProtocolError(f"cursor {text} is out of range")
        return cls(regular, backfill)

    def __str__(self) -> str:
        return f"{self.regular}.{self.backfill}"


START = Cursor(0, 0)  # before the first pod; seqs start at 1
