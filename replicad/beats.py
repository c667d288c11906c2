"""Who is alive, decided without any wall clock: by a beat, a number that changes with every sign of life.

Whose beat stays the same for its whole time to live is dead for whoever watched it. So leases and members hold across
machines whose clocks disagree or jump, and who has just started waits one full time to live before it holds anybody for
dead. Only time during which somebody really looked counts: a watcher that was stopped, or could not reach Postgres,
which others could not reach either, holds nobody for dead because of that. Pure: times are handed in, seconds of one
monotonic clock.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

B = TypeVar("B", bound=Hashable)


class BeatWatch(Generic[B]):
    """Remembers for how long each beat has been seen unchanged. A beat must never come again once it has changed."""

    def __init__(self, longest_gap: float) -> None:
        """`longest_gap`: seconds between two looks that count as watched, at most."""
        self._longest_gap = longest_gap
        self._silent: dict[B, float] = {}
        self._looked_at: float | None = None

    def observe(self, beats: Iterable[B], now: float) -> dict[B, float]:
        """Take all beats that there are now; returns how long (seconds) each has been silent. Others are forgotten."""
        passed = 0.0 if self._looked_at is None else min(max(0.0, now - self._looked_at), self._longest_gap)
        self._looked_at = now
        before = self._silent
        self._silent = {beat: before[beat] + passed if beat in before else 0.0 for beat in beats}
        return dict(self._silent)
