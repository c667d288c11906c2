"""Looks for garbage in reference cycles: for new objects a hundred times a second, for all of them rarely.

Python by itself looks when the new objects that are left have reached a number. That number counts every object that
goes, so while thousands of clients come and go it is reached late, and one look at all that is new has then stopped the
event loop for 200 to 400 ms. Looked at every ten milliseconds, the same objects cost the same time in all, a
millisecond or two at once. Sessions leave no cycles, so looking at all objects, which takes half a microsecond for
each, is rarely of use.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

import trio

YOUNG = 0.01  # seconds between two looks at new objects
ALL = 60.0  # seconds between two looks at all objects
SHARE = 0.001  # of the time at most for these: a look that took 0.2 s is followed by 200 s without one
_NEW, _EVERY = 1, 2  # generations of the `gc` module


class CycleCollector(trio.abc.Instrument):
    """Collects at the end of a turn of the event loop, when nothing waits in the middle of its work.

    For `trio.run(..., instruments=[...])`. Python's own collections end when it begins.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, collect: Callable[[int], object] = gc.collect
    ) -> None:
        """`collect` looks at a generation and at all younger ones."""
        self._clock = clock
        self._collect = collect
        self._young_at = float("-inf")
        self._all_at = clock() + ALL

    def before_run(self) -> None:
        """The run begins."""
        gc.disable()

    def after_run(self) -> None:
        """The run has ended."""
        gc.enable()

    def before_io_wait(self, timeout: float) -> None:  # noqa: ARG002 - what trio calls it with
        """A turn ends."""
        now = self._clock()
        if now >= self._all_at:
            self._collect(_EVERY)
            done = self._clock()
            self._all_at = done + max(ALL, (done - now) / SHARE)
            self._young_at = done + YOUNG
        elif now >= self._young_at:
            self._collect(_NEW)
            self._young_at = self._clock() + YOUNG
