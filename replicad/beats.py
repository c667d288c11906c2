"""Measures for how long each beat has not changed (docs/leases.md). Pure: the caller passes monotonic seconds.

A beat is a number that its holder changes as a sign of life. If a watcher has seen a beat unchanged for the holder's
time to live, the holder counts as expired for this watcher. No wall clock takes part, so machines whose clocks disagree
do no harm. A watcher that has just started waits one full time to live. Only time between real looks counts: a watcher
that was stopped, or could not reach Postgres, declares no holder expired because of that.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

B = TypeVar("B", bound=Hashable)


class BeatWatch(Generic[B]):
    """Remembers for how long each beat has been unchanged. A value that was replaced must never be used again."""

    def __init__(self, longest_gap: float) -> None:
        """`longest_gap`: the most seconds that count between two looks."""
        self._longest_gap = longest_gap
        self._silent: dict[B, float] = {}
        self._looked_at: float | None = None

    def observe(self, beats: Iterable[B], now: float) -> dict[B, float]:
        """Take all present beats; returns for how long (seconds) each is unchanged. Beats that are absent are
        dropped.
        """
        passed = 0.0 if self._looked_at is None else min(max(0.0, now - self._looked_at), self._longest_gap)
        self._looked_at = now
        before = self._silent
        self._silent = {beat: before[beat] + passed if beat in before else 0.0 for beat in beats}
        return dict(self._silent)
