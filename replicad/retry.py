"""How long to wait before the next try, and whether there is one: pauses that double up to a cap.

`Backoff` is pure: whoever uses it waits. `Retries` waits by itself, for code that blocks.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from random import random

_DOUBLINGS = 60  # beyond this the delay is above any cap, and the power would overflow in the end


@dataclass(slots=True)
class Backoff:
    """Delays that double up to a cap. A part of each is random, so that a thousand clients do not come back at once.

    `first` and `cap` in seconds; `chance` gives numbers in [0, 1); `jitter` is the largest part that is left off.
    """

    first: float = 0.1  # a daemon that restarts is back within a second or two
    cap: float = 10.0  # an outage of an hour ends for everybody within this time
    chance: Callable[[], float] = random
    jitter: float = 0.5
    _tries: int = field(default=0, init=False)

    def whole(self, tries: int) -> float:
        """The delay after that many tries before, in seconds, with nothing left off."""
        return min(self.cap, self.first * 2.0 ** min(tries, _DOUBLINGS))

    def delay(self, tries: int, chance: float) -> float:
        """The delay after that many tries before; `chance` from 0 (the most is left off) to 1 (nothing is)."""
        return self.whole(tries) * (1 - self.jitter + self.jitter * chance)

    def next_delay(self) -> float:
        """The delay before the next try, in seconds. Each call counts as a try."""
        self._tries += 1
        return self.delay(self._tries - 1, self.chance())

    def reset(self) -> None:
        """A try was successful: begin again with the shortest delay."""
        self._tries = 0


class Retries:
    """The tries of one piece of work: at most `most` after the first one, and none later than `patience` seconds."""

    def __init__(
        self,
        first: float,
        cap: float,
        *,
        most: float = math.inf,
        patience: float = math.inf,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`first` and `cap`: see Backoff."""
        self._backoff = Backoff(first, cap, jitter=0.0)
        self._left = most
        self._now, self._sleep = now, sleep
        self._deadline = now() + patience

    def pause(self) -> bool:
        """Wait before the next try. False, without waiting, if there is none."""
        delay = self._backoff.next_delay()
        if self._left < 1 or self._now() + delay > self._deadline:
            return False
        self._left -= 1
        self._sleep(delay)
        return True
