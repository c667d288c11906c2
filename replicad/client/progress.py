"""How far a reader has got in one stream, writer by writer, and the token that says so.

Pure bookkeeping: it is told of positions and numbers and renders tokens. Which rows move a position is for `follower`.
"""

from __future__ import annotations

from collections.abc import Mapping

from replicad.protocol.tokens import Vector
from replicad.streams.writer_set import WriterSet

UNKNOWN = -(1 << 63) - 1  # below every bigint: a position that nobody has told yet
LINEAR = "*"  # the instance in whose name POSITION speaks of all writers
WORDS = (None, "NOW", "EARLIEST")
MAX_UNLISTED = 100_000  # writers that WRITERS does not name whose last row is remembered, to pass over its repeats


class Mark:
    """One position, shared by whoever has to move or read it."""

    __slots__ = ("at",)

    def __init__(self, at: int = UNKNOWN) -> None:
        self.at = at


class StreamProgress:
    """One stream of a reader: positions, the writers' numbers, the epoch.

    `answered`: the subscription was accepted on this connection; `live`: a POSITION came, so that rows count.
    """

    def __init__(self, name: str, token: str | None, *, linear: bool) -> None:
        """`token`: NOW (or None), EARLIEST, or a vector's text.

        Raises:
            BadToken: it is none of these.
        """
        self.name = name
        self.linear = linear
        self.answered = False
        self.live = False
        self._epoch: str | None = None
        self._writers = WriterSet()
        self._marks: dict[str, Mark] = {}
        self._all = Mark()  # the one position of a linear subscription
        self._base: Vector | str | None  # where we began, or stood before the last change of writers
        if token in WORDS:
            self._base = token
        else:
            assert token is not None
            self._base = Vector.parse(token)
            self._epoch = self._base.epoch

    def mark(self, instance: str) -> Mark:
        """The position that a row or a POSITION of `instance` moves."""
        if self.linear:
            return self._all
        found = self._marks.get(instance)
        if found is None:
            if len(self._marks) >= MAX_UNLISTED + len(self._writers.numbers):
                self._marks = {name: self._marks[name] for name in self._writers.numbers if name in self._marks}
            found = self._marks[instance] = Mark()
        return found

    def positions(self) -> dict[str, int]:
        """Every position that is known, by instance."""
        marks = {LINEAR: self._all} if self.linear else self._marks
        return {instance: mark.at for instance, mark in marks.items() if mark.at != UNKNOWN}

    def set_writers(self, epoch: str, numbers: Mapping[str, int]) -> bool:
        """Take a line of WRITERS; True where the epoch is another, and all positions are forgotten."""
        changed = self._epoch is not None and epoch != self._epoch
        if changed:
            self.forget("EARLIEST")
        elif self.positions():
            self._base = self._vector()
        elif not numbers and not self.linear and self._base in (None, "NOW"):
            self._base = "EARLIEST"  # there is no writer yet: from now on is from the first row on
        self._epoch = epoch
        had_writers = bool(self._writers.numbers)
        for name in self._writers.add(numbers):
            if had_writers and name in self._marks:
                self._marks[name].at = UNKNOWN  # who joins stands where POSITION says, whatever rows came unlisted
        return changed

    def told(self) -> None:
        """A POSITION came: the writers that were named before it are all there are."""
        self._writers.close()

    def new_connection(self) -> None:
        """Keep the positions that the token speaks of: from there the next connection begins."""
        self.answered = self.live = False
        self._base = base = self._vector()
        if not self.linear:
            # Of writers that are not listed only what lies beyond the token: rows that may come again.
            known = self._writers.numbers
            self._marks = {
                instance: mark
                for instance, mark in self._marks.items()
                if isinstance(base, Vector) and (instance in known or mark.at > base.minimum)
            }
        self._writers.begin()

    def forget(self, word: str) -> None:
        """Begin again from `NOW` or `EARLIEST`, in whatever epoch that is."""
        self._epoch = None
        self._writers = WriterSet()
        self._marks = {}
        self._all = Mark()
        self._base = word

    def token(self) -> str | None:
        """What to subscribe with to go on from here; None and NOW mean: from now on."""
        base = self._vector()
        return str(base.shortened()) if isinstance(base, Vector) else base

    def _vector(self) -> Vector | str | None:
        known = self.positions()
        if self.linear:
            return Vector(known[LINEAR], epoch=self._epoch) if known else self._base
        numbers = self._writers.numbers
        told = {number: known[instance] for instance, number in numbers.items() if instance in known}
        if told and len(told) == len(numbers):
            return Vector(min(told.values()), told, self._epoch)
        if not isinstance(self._base, Vector):
            return self._base
        # Not all writers were told: those that were not stand where they stood.
        stand = {number: told.get(number, self._base.at(number)) for number in numbers.values()}
        return Vector(min([self._base.minimum, *stand.values()]), {**self._base.ahead, **stand}, self._epoch)
