"""When to try a failing destination again: exponential, with a cap and jitter. Pure; time and chance are arguments."""

from __future__ import annotations

from dataclasses import dataclass

_DOUBLINGS = 60  # beyond this the power is above any cap anyway


@dataclass(frozen=True, slots=True)
class Backoff:
    """`first` and `most` in seconds; a pause is `factor` times the one before, `jitter` the largest part that is
    randomly left off.
    """

    first: float = 5.0
    most: float = 6 * 3600.0
    factor: float = 2.0
    jitter: float = 0.2

    def interval(self, failures: int) -> float:
        """The pause after that many failures in a row (1 or more), in seconds, without the random part."""
        return min(self.most, self.first * self.factor ** min(failures - 1, _DOUBLINGS))

    def pause(self, failures: int, chance: float, at_least: float = 0.0) -> float:
        """The pause to make, in seconds: never above the cap, and shortened by up to `jitter` of itself.

        `chance` is from 0 to 1. `at_least` is what the destination asked for; the cap limits it too.
        """
        interval = self.interval(failures)
        return min(self.most, max(interval * (1 - self.jitter * chance), at_least))
