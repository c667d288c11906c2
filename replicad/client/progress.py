"""How far a reader has got in one stream, writer by writer, and the token that says so.

Pure bookkeeping: it is told of positions and numbers and renders tokens. Which rows move a position is for `follower`.
"""

from __future__ import annotations

from collections.abc import Mapping

from replicad.errors import RemoteProtocolError
from replicad.protocol.tokens import MAX_WRITERS_IN_TOKEN, Vector

UNKNOWN = -(1 << 63) - 1  # below every bigint: a position that nobody has told yet
LINEAR = "*"  # the instance in whose name POSITION speaks of all writers
WORDS = (None, "NOW", "EARLIEST")
MAX_WRITERS = MAX_WRITERS_IN_TOKEN  # of one stream


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
        self._numbers: Mapping[str, int] = {}
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
        """The position that a row or a POSITION of `instance` moves.

        Raises:
            RemoteProtocolError: more writers than a stream can have.
        """
        if self.linear:
            return self._all
        found = self._marks.get(instance)
        if found is None:
            if len(self._marks) >= MAX_WRITERS:
                raise RemoteProtocolError(f"stream {self.name} has more than {MAX_WRITERS} writers")
            found = self._marks[instance] = Mark()
        return found

    def positions(self) -> dict[str, int]:
        """Every position that is known, by instance."""
        marks = {LINEAR: self._all} if self.linear else self._marks
        return {instance: mark.at for instance, mark in marks.items() if mark.at != UNKNOWN}

    def set_writers(self, epoch: str, numbers: Mapping[str, int]) -> bool:
        """Note the epoch and the writers' numbers; True where the epoch is another, and all positions are forgotten."""
        if self._epoch is not None and epoch != self._epoch:
            self.forget("EARLIEST")
            self._epoch, self._numbers = epoch, numbers
            return True
        if self.positions():
            self._base = self._vector()
        elif not numbers and not self.linear and self._base in (None, "NOW"):
            self._base = "EARLIEST"  # there is no writer yet: from now on is from the first row on
        self._epoch, self._numbers = epoch, numbers
        return False

    def new_connection(self) -> None:
        """Keep the positions that the token speaks of: from there the next connection begins."""
        self.answered = self.live = False
        self._base = self._vector()
        if not self.linear:
            kept = self._numbers if isinstance(self._base, Vector) else ()
            self._marks = {instance: mark for instance, mark in self._marks.items() if instance in kept}

    def forget(self, word: str) -> None:
        """Begin again from `NOW` or `EARLIEST`, in whatever epoch that is."""
        self._epoch = None
        self._numbers = {}
        self._marks = {}
        self._all = Mark()
        self._base = word

    def token(self) -> str | None:
        """What to subscribe with to go on from here; None and NOW mean: from now on."""
        base = self._vector()
        return base if base is None else str(base)

    def _vector(self) -> Vector | str | None:
        known = self.positions()
        if self.linear:
            return Vector(known[LINEAR], epoch=self._epoch) if known else self._base
        told = {number: known[instance] for instance, number in self._numbers.items() if instance in known}
        if told and len(told) == len(self._numbers):
            return Vector(min(told.values()), told, self._epoch)
        if not isinstance(self._base, Vector):
            return self._base
        # Not all writers were told: those that were not stand where they stood.
        stand = {number: told.get(number, self._base.at(number)) for number in self._numbers.values()}
        return Vector(min([self._base.minimum, *stand.values()]), {**self._base.ahead, **stand}, self._epoch)
