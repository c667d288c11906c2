"""The ids that one writer has reserved and not completed, and the writer's position.

No connection and no clock. The position is the largest id up to which this writer has completed all of its own; it
moves past ids that were completed out of order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Reservation:
    """Ids that are reserved together and completed together, ascending.

    All are above `bound`; a lock on it protects them. None if that lock was lost.
    """

    ids: tuple[int, ...]
    bound: int | None
    completed: bool = False


@dataclass(frozen=True, slots=True)
class Handover:
    """A change of the lock: take the bound `take` (None: nothing is in flight), then release `release`."""

    release: int
    take: int | None


class InFlight:
    """The reservations of one writer. One lock, on the lowest bound in flight, protects them all."""

    def __init__(self, position: int) -> None:
        """`position`: all ids of this writer up to it are complete."""
        self.position = position
        self._highest = position
        self._reserved: deque[Reservation] = deque()

    def __len__(self) -> int:
        return sum(not reservation.completed for reservation in self._reserved)

    @property
    def maximum(self) -> int:
        """The highest id that was reserved."""
        return self._highest

    @property
    def held(self) -> int | None:
        """The bound of the lock; None if there is no lock."""
        return next((r.bound for r in self._reserved if r.bound is not None and not r.completed), None)

    def reserve(self, ids: Sequence[int], bound: int) -> Reservation:
        """Add ids that were reserved under `bound`, or under the lock that is held already.

        Raises:
            ValueError: they are not ascending, not above earlier reservations, or not above their bound.
        """
        last = max(self._highest, bound)
        for number in ids:
            if number <= last:
                raise ValueError(f"id {number} was reserved after {last}: the sequence went back")
            last = number
        reservation = Reservation(tuple(ids), bound)
        self._reserved.append(reservation)
        self._highest = max(self._highest, last)
        return reservation

    def complete(self, reservation: Reservation) -> Handover | None:
        """Complete ids, with a row or without. Returns the change of the lock, or None.

        Raises:
            ValueError: they were completed already.
        """
        if reservation.completed:
            raise ValueError(f"ids {reservation.ids} are complete already")
        before = self.held
        reservation.completed = True
        while self._reserved and self._reserved[0].completed:
            self.position = max(self.position, self._reserved.popleft().ids[-1])
        after = self.held
        return None if before is None or before == after else Handover(before, after)

    def lost(self) -> int:
        """The lock was lost: ids in flight are no longer protected, and the next reservation takes a new lock.

        Returns how many reservations have lost it.
        """
        affected = [r for r in self._reserved if r.bound is not None and not r.completed]
        for reservation in affected:
            reservation.bound = None
        return len(affected)
