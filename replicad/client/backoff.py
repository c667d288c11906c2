"""How long to wait before connecting again. Pure: randomness is handed in, and waiting is somebody else's business."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import random


@dataclass(slots=True)
class Backoff:
    """Delays that double up to a cap. Half of each is chance, so that a thousand clients do not come back at once.

    `first` and `cap` in seconds; `chance` gives numbers in [0, 1).
    """

    first: float = 0.1  # a daemon that restarts is back within a second or two
    cap: float = 10.0  # an outage of an hour ends for everybody within this time
    chance: Callable[[], float] = random
    _tries: int = field(default=0, init=False)

    def next_delay(self) -> float:
        """The delay before the next try, in seconds: between half of min(cap, first * 2**tries) and all of it."""
        whole = min(self.cap, self.first * 2.0 ** min(self._tries, 30))
        self._tries += 1
        return whole * (0.5 + self.chance() / 2)

    def reset(self) -> None:
        """A try was successful: begin again with the shortest delay."""
        self._tries = 0
