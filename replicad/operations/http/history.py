"""Lag and rate of streams and tubes in the last hour, for the charts of the console. Knows no HTTP.

They are made of the figures that are exported, every STEP seconds, while the daemon serves HTTP. The memory is bounded:
1 KiB for each stream and tube, of MOST of them.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field

import trio

from replicad.daemon.figures import Delays, Sample

SPAN, STEP = 3600.0, 30.0  # seconds: what is kept, and between two points
POINTS = round(SPAN / STEP)
MOST = 1000  # streams and tubes
SLICE = 100  # samples, before other tasks run
LAGS = {"replicad_stream_lag_seconds": "stream", "replicad_tube_oldest_pod_age_seconds": "tube"}
COUNTS = {"replicad_stream_passed_rows_total": "stream", "replicad_tube_ack_delay_seconds": "tube"}

_NONE = math.nan  # nothing is known of this moment


def _empty() -> array[float]:
    return array("f", [_NONE] * POINTS)


@dataclass(slots=True)
class _Series:
    """One stream or tube: its lag in seconds and its rate per second; the newest point is the last one."""

    lag: array[float] = field(default_factory=_empty)
    rate: array[float] = field(default_factory=_empty)
    count: float | None = None  # what was counted at the last point

    def put(self, lag: float | None, count: float | None, seconds: float) -> None:
        rate = None
        if count is not None and self.count is not None and seconds > 0:
            rate = max(0.0, count - self.count) / seconds  # it begins again where a stream is served again
        self.count = count
        for series, value in ((self.lag, lag), (self.rate, rate)):
            series.pop(0)
            series.append(_NONE if value is None else value)

    @property
    def is_empty(self) -> bool:
        return all(map(math.isnan, self.lag)) and all(map(math.isnan, self.rate))


class History:
    """The points of the last hour. `samples`: all figures; `refresh`: has those that come from Postgres read again."""

    def __init__(self, samples: Callable[[], Iterable[Sample]], refresh: Callable[[], Awaitable[None]]) -> None:
        self._samples = samples
        self._refresh = refresh
        self._series: dict[tuple[str, str], _Series] = {}
        self._noted_at: float | None = None

    async def run(self) -> None:
        """Note a point every STEP seconds until cancelled; the first one at once, of what is in memory."""
        while True:
            await self.note(trio.current_time())
            await trio.sleep(STEP)
            await self._refresh()

    async def note(self, now: float) -> None:
        """Note a point of each stream and tube."""
        lags: dict[tuple[str, str], float] = {}
        counts: dict[tuple[str, str], float] = {}
        for number, (family, labels, value) in enumerate(self._samples(), 1):
            if number % SLICE == 0:
                await trio.lowlevel.checkpoint()
            if family.name in LAGS and not isinstance(value, Delays):
                key = LAGS[family.name], labels[0]
                lags[key] = max(value, lags.get(key, 0.0))  # of several partitions, the one that is furthest behind
            elif family.name in COUNTS:
                key = COUNTS[family.name], labels[0]
                counts[key] = counts.get(key, 0.0) + (value.number if isinstance(value, Delays) else value)
        seconds = 0.0 if self._noted_at is None else now - self._noted_at
        self._noted_at = now
        for key in lags.keys() | counts.keys():
            if key in self._series or len(self._series) < MOST:
                self._series.setdefault(key, _Series())
        for key, series in list(self._series.items()):
            series.put(lags.get(key), counts.get(key), seconds)
            if series.is_empty:
                del self._series[key]

    def shown(self, lists: Callable[[object, str], bool]) -> dict[str, object]:
        """All series whose kind and name `lists` admits, as JSON; null where nothing is known."""

        def points(values: Iterable[float]) -> list[float | None]:
            return [None if math.isnan(one) else round(one, 2) for one in values]

        return {
            "step": STEP,
            "series": [
                {"kind": kind, "name": name, "lag": points(one.lag), "rate": points(one.rate)}
                for (kind, name), one in sorted(self._series.items())
                if lists(kind, name)
            ],
        }
