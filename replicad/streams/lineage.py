"""The generations of a stream, and the positions up to which two of them share their history.

A generation is a part of the history in which no position went back (docs/positions.md). The database keeps the list;
`registry` loads it. Does no I/O.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from replicad.protocol.tokens import Vector

# Reasons of a generation in which any id may be another row.
SHARES_NOTHING = frozenset({"ids_went_back", "sequence_restarted", "table_changed"})


@dataclass(frozen=True, slots=True)
class Generation:
    """One generation. `id`: the epoch in tokens. `began`: the position up to which it shares the one before."""

    number: int
    id: str
    began: Vector
    reason: str
    created_at: datetime


@dataclass(frozen=True, slots=True)
class Lineage:
    """The generations in the database's list, in their order; never empty."""

    generations: tuple[Generation, ...]

    @property
    def present(self) -> Generation:
        """The last generation: rows are read in it now."""
        return self.generations[-1]

    @property
    def floor(self) -> Vector:
        """The lowest shared position of the list: safe also for a generation that is not in it."""
        return Vector(min(one.began.minimum for one in self.generations))

    @property
    def shared_by_all(self) -> int | None:
        """Up to here all generations that there ever were have the same rows; None if there was only one."""
        later = [one.began.minimum for one in self.generations if one.number > 1]
        return min(later) if later else None

    def shared(self, id: str) -> Vector | None:
        """`shared_between` the generation `id` and the present one."""
        return self.shared_between(id, self.present.id)

    def shared_between(self, id: str, later: str) -> Vector | None:
        """The positions up to which two generations share their history: for each writer the lowest `began` of all
        generations after `id` and up to `later`. None if the list does not have the two in this order, because it was
        restored to a time before either began.

        Raises:
            ValueError: they are the same.
        """
        if id == later:
            raise ValueError(f"{id} and {later} are one generation")
        ids = [one.id for one in self.generations]
        if id not in ids or later not in ids or ids.index(id) > ids.index(later):
            return None
        lowest, *others = (one.began for one in self.generations[ids.index(id) + 1 : ids.index(later) + 1])
        for began in others:
            lowest = lowest.at_most(began)
        return lowest

    def knows(self, id: str) -> bool:
        """Whether the generation is in the list."""
        return any(one.id == id for one in self.generations)

    def has_answer(self, id: str, reason: str) -> bool:
        """Whether the generations after `id` answer a fork that was found in it for this reason.

        Where ids may have come again, only a generation that shares nothing is an answer. Others may share too much.
        """
        later = self.generations[[one.id for one in self.generations].index(id) + 1 :]
        return any(reason not in SHARES_NOTHING or one.reason in SHARES_NOTHING for one in later)


def lineage_of(generations: Iterable[Generation]) -> Lineage:
    """The lineage of generations in any order."""
    return Lineage(tuple(sorted(generations, key=lambda one: one.number)))
