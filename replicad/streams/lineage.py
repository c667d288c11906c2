"""The generations of a stream: up to where the history of an earlier one is shared with the present one.

A generation is a stretch of history in which no position was taken back (docs/positions.md). The database keeps the
list. Pure values; `registry` loads them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from replicad.protocol.tokens import Vector


@dataclass(frozen=True, slots=True)
class Generation:
    """One generation. `id` is the epoch in tokens; `began` says up to where history is shared with the one before."""

    number: int
    id: str
    began: Vector
    reason: str
    created_at: datetime


@dataclass(frozen=True, slots=True)
class Lineage:
    """The generations that the database knows, in their order; never empty."""

    generations: tuple[Generation, ...]

    @property
    def present(self) -> Generation:
        """The last one, in which rows are read now."""
        return self.generations[-1]

    @property
    def floor(self) -> Vector:
        """At or below the position that is shared with any generation, known or not."""
        return Vector(min(one.began.minimum for one in self.generations))

    def shared(self, id: str) -> Vector | None:
        """Up to where what was read in generation `id` is the same in the present one. As `shared_between`."""
        return self.shared_between(id, self.present.id)

    def shared_between(self, id: str, later: str) -> Vector | None:
        """Up to where two generations share their history: for each writer the lowest beginning of all generations
        after `id` and up to `later`. None where the list does not have the two in this order: it was restored to a
        time before one of them began.

        Raises:
            ValueError: they are the same; everything is shared.
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


def lineage_of(generations: Iterable[Generation]) -> Lineage:
    """The lineage of generations in any order."""
    return Lineage(tuple(sorted(generations, key=lambda one: one.number)))
