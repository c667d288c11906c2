"""Who is alive, decided without any wall clock: a beat that stays the same for its writer's whole time to live.

Pure: times are handed in, seconds of one monotonic clock. Only time during which somebody really looked counts, so a
watcher that was stopped, or could not reach Postgres, holds nobody for dead because of that.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from replicad.streams.ownership.planning import Member

LONGEST_GAP: Final = 1.0  # seconds between two looks that count as watched, at most


class BeatWatch:
    """Remembers for how long each beat has been seen unchanged."""

    def __init__(self) -> None:
        self._silent: dict[int, float] = {}
        self._looked_at: float | None = None

    def observe(self, members: Iterable[Member], now: float) -> list[int]:
        """Take all members that there are now; returns the beats of those that are dead for this watcher."""
        passed = 0.0 if self._looked_at is None else min(max(0.0, now - self._looked_at), LONGEST_GAP)
        self._looked_at = now
        before, self._silent = self._silent, {}
        dead = []
        for member in members:
            silent = before[member.beat] + passed if member.beat in before else 0.0
            self._silent[member.beat] = silent
            if silent >= member.ttl:
                dead.append(member.beat)
        return dead
