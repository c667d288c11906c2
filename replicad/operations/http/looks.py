"""Looks at Postgres for figures: only while somebody asks, together, seldom, and never for long.

A scrape never waits for Postgres longer than `LookIntervals.wait`. A look's figures are shown with their age until they
are `LookIntervals.stale` old. Then they are left out, because a figure that does not change would look like good news.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import trio

from replicad.daemon.figures import COUNTER, GAUGE, Family, FigureQuery, Figures, Sample
from replicad.daemon.troubles import Troubles
from replicad.errors import DatabaseError

AGE = Family("replicad_look_age_seconds", GAUGE, "Age of the figures that were read from Postgres.", ("look",))
FAILURES = Family(
    "replicad_look_failures_total", COUNTER, "Looks at Postgres for figures that failed or took too long.", ("look",)
)


@dataclass(frozen=True, slots=True)
class LookIntervals:
    """Times in seconds."""

    fresh: float = 5.0  # so old may figures be before they are read again: several scrapers share a look
    wait: float = 1.5  # that a scrape waits for them
    limit: float = 5.0  # that a look may take
    stale: float = 60.0  # after which figures are left out


class Looks:
    """The looks of all sources. `run` must be running."""

    def __init__(self, figures: Figures, troubles: Troubles, pace: LookIntervals = LookIntervals()) -> None:
        self._figures = figures
        self._troubles = troubles
        self._pace = pace
        self._at: dict[str, float] = {}  # when each look that succeeded last began
        self._tried: dict[str, float] = {}
        self._failures: Counter[str] = Counter()
        self._wanted = trio.Event()
        self._done = trio.Event()

    async def run(self) -> None:
        """Look whenever `refresh` asks for it, until cancelled."""
        while True:
            await self._wanted.wait()
            self._wanted = trio.Event()
            async with trio.open_nursery() as nursery:
                for look in self._due():
                    nursery.start_soon(self._look, look)
            self._done.set()
            self._done = trio.Event()

    async def refresh(self) -> None:
        """Have figures that are too old read again, and wait a bounded time for them."""
        if self._due():
            with trio.move_on_after(self._pace.wait):
                done = self._done
                self._wanted.set()
                await done.wait()
        now = trio.current_time()
        for look in self._all():
            if now - self._at.get(look.name, now) > self._pace.stale:
                look.forget()
                del self._at[look.name]

    def samples(self) -> Iterable[Sample]:
        """How old the figures are, and how many looks have failed."""
        now = trio.current_time()
        for name, at in self._at.items():
            yield AGE(now - at, name)
        for look in self._all():
            yield FAILURES(self._failures[look.name], look.name)

    def _all(self) -> list[FigureQuery]:
        return [look for source in self._figures.sources for look in source.looks()]

    def _due(self) -> list[FigureQuery]:
        latest = trio.current_time() - self._pace.fresh
        return [look for look in self._all() if self._tried.get(look.name, float("-inf")) <= latest]

    async def _look(self, look: FigureQuery) -> None:
        began = trio.current_time()
        with self._troubles.contain_and_record("service", "figures", look.name):
            try:
                with trio.fail_after(self._pace.limit):
                    await look.run()
            except trio.TooSlowError as error:
                self._failures[look.name] += 1
                raise DatabaseError(f"the figures of {look.name} took longer than {self._pace.limit:g} s") from error
            except Exception:
                self._failures[look.name] += 1
                raise
            else:
                self._at[look.name] = began
            finally:
                self._tried[look.name] = trio.current_time()
