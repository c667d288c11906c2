"""The positions of a reader in one stream, for each writer, and the token for them. Does no I/O.

`follower` decides which rows move a position.

A token names one epoch, that is one generation of the stream's history. When the history forks, positions go back to
the position that both generations share. Writers without a position of their own here (retired, or known only to an
earlier process) have the token's minimum. So when the minimum goes back, the rows of every writer above it are void.
"""

from __future__ import annotations

from collections.abc import Mapping

from replicad.protocol.tokens import MAX_TOKEN, Vector
from replicad.streams.writer_set import WriterSet

UNKNOWN = -(1 << 63) - 1  # below every bigint: a position that was not received yet
LINEAR = "*"  # the instance in POSITION that stands for all writers
WORDS = (None, "NOW", "EARLIEST")
MAX_UNLISTED = 100_000  # writers not named in WRITERS whose last token is kept, to discard repeated rows


Back = list[tuple[str | None, int]]  # whose rows above which position are void; None: the rows of all writers


class Mark:
    """One position, shared by the objects that move or read it."""

    __slots__ = ("at",)

    def __init__(self, at: int = UNKNOWN) -> None:
        self.at = at


class StreamProgress:
    """One stream of a reader: positions, the writers' numbers, the epoch.

    `answered`: the subscription was accepted on this connection. `live`: a POSITION was received, so rows count.
    """

    def __init__(self, name: str, token: str | None, *, linear: bool) -> None:
        """`token`: NOW (or None), EARLIEST, or a vector's text.

        Raises:
            BadToken: `token` is none of these.
        """
        self.name = name
        self.linear = linear
        self.answered = False
        self.live = False
        self._epoch: str | None = None
        self._writers = WriterSet()
        self._marks: dict[str, Mark] = {}
        self._all = Mark()  # the one position of a linear subscription
        self._handed_upto = UNKNOWN  # rows of writers without a mark may have been yielded up to here
        self._base: Vector | str | None  # the first token, or the one before the last change of writers
        if token in WORDS:
            self._base = token
        else:
            assert token is not None
            self._base = Vector.parse(token)
            self._epoch = self._base.epoch
            self._handed_upto = self._base.minimum

    def mark(self, instance: str) -> Mark:
        """The position that a row or a POSITION of `instance` moves."""
        if self.linear:
            return self._all
        found = self._marks.get(instance)
        if found is None:
            if len(self._marks) >= MAX_UNLISTED + len(self._writers.numbers):
                self._handed_upto = max([self._handed_upto, *(mark.at for mark in self._marks.values())])
                self._marks = {name: self._marks[name] for name in self._writers.numbers if name in self._marks}
            found = self._marks[instance] = Mark()
        return found

    def positions(self) -> dict[str, int]:
        """Every known position, by instance."""
        marks = {LINEAR: self._all} if self.linear else self._marks
        return {instance: mark.at for instance, mark in marks.items() if mark.at != UNKNOWN}

    @property
    def epoch(self) -> str | None:
        """The generation in which the positions are; None as long as it is not known."""
        return self._epoch

    @property
    def writers(self) -> Mapping[str, int]:
        """The small numbers of the listed writers, by name."""
        return self._writers.numbers

    def is_forked(self, epoch: str) -> bool:
        """Whether the token is of another generation than the server."""
        return self._epoch is not None and epoch != self._epoch

    def begin_generation(self, epoch: str) -> tuple[Back, bool]:
        """The server goes on in another generation, from the positions that it sent or accepted.

        True if rows that are now void will not come again on this connection.
        """
        at = self._vector()
        back: Back = []
        again = False
        if isinstance(at, Vector):
            at = at if self.answered else at.shortened()
            others = self._others_above(at.minimum)
            back = self._rewind(at)
            again = bool(back) and back[0][0] is None and (bool(at.ahead) or (self.answered and others))
        self._epoch = epoch
        self._writers.begin()  # the WRITERS line with the epoch begins a new set
        return back, again

    def rewind(self, token: Vector) -> Back:
        """Go back to a token of another generation, from which the next subscription begins."""
        back = self._rewind(token)
        self._epoch = token.epoch
        return back

    def move_back(self, instance: str, position: int) -> str | None:
        """A POSITION went back. Returns whose rows above it are void: the writer's, or all writers' (None)."""
        self._keep_minimum(self._vector())
        self.mark(instance).at = position
        if self._writers.numbers.keys() == {instance} and self._others_above(position):
            self._rewind(Vector(position))  # writers that are not listed have the position of the listed one
            return None
        return instance

    def set_writers(self, epoch: str, numbers: Mapping[str, int]) -> None:
        """Take a line of WRITERS; of another epoch after `begin_generation`."""
        if self.positions():
            self._keep_minimum(self._vector())
            self._base = self._vector()
        elif not numbers and not self.linear and self._base in (None, "NOW"):
            self._base = "EARLIEST"  # there is no writer yet, so NOW is the same as EARLIEST
        self._epoch = epoch
        had_writers = bool(self._writers.numbers)
        for name in self._writers.add(numbers):
            if had_writers and name in self._marks:
                self._marks[name].at = UNKNOWN  # POSITION sets it, whatever rows came before

    def position_received(self) -> None:
        """A POSITION was received: the set of writers before it is complete."""
        self._writers.close()

    def new_connection(self) -> None:
        """Keep only the positions in the token: the next connection begins there."""
        self.answered = self.live = False
        self._base = base = self._vector()
        if not self.linear:
            # Of writers that are not listed keep positions beyond the token: their rows may come again.
            known = self._writers.numbers
            self._marks = {
                instance: mark
                for instance, mark in self._marks.items()
                if isinstance(base, Vector) and (instance in known or mark.at > base.minimum)
            }
        self._writers.begin()

    def token(self, size: int = MAX_TOKEN) -> str | None:
        """The token to go on with, of at most `size` characters; None and NOW mean: from now on."""
        base = self._vector()
        return str(base.shortened(size)) if isinstance(base, Vector) else base

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
        # Writers whose POSITION was not received keep their earlier position.
        stand = {number: told.get(number, self._base.at(number)) for number in numbers.values()}
        return Vector(min([self._base.minimum, *stand.values()]), {**self._base.ahead, **stand}, self._epoch)

    def _keep_minimum(self, at: Vector | str | None) -> None:
        if isinstance(at, Vector):
            self._handed_upto = max(self._handed_upto, at.minimum)

    def _others_above(self, position: int) -> bool:
        """Whether rows above a position were yielded of writers that are not listed."""
        return not self.linear and any(
            mark.at > position for name, mark in self._marks.items() if name not in self._writers.numbers
        )

    def _rewind(self, to: Vector) -> Back:
        """Lower all positions to those of `to`."""
        base = self._vector()
        if not isinstance(base, Vector):
            return []
        if self.linear:
            if base.minimum <= to.minimum:
                return []
            if self._all.at != UNKNOWN:
                self._all.at = to.minimum
            self._base = Vector(to.minimum, epoch=to.epoch)
            return [(LINEAR, to.minimum)]
        positions = self.positions()
        known = {name: number for name, number in self._writers.numbers.items() if name in positions}
        nameless = base.ahead.keys() - known.values()
        if (
            max(self._handed_upto, base.minimum) > to.minimum
            or self._others_above(to.minimum)
            or any(base.ahead[number] > to.at(number) for number in nameless)
        ):
            for mark in self._marks.values():
                mark.at = min(mark.at, to.minimum)
            self._handed_upto = to.minimum
            self._base = Vector(to.minimum, epoch=to.epoch)
            return [(None, to.minimum)]
        back: Back = []
        for name, number in known.items():
            if self._marks[name].at > to.at(number):
                self._marks[name].at = to.at(number)
                back.append((name, to.at(number)))
        self._base = to
        return back
