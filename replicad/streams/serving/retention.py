"""Removes old rows of streams that have rules for it (`replicad streams add --keep 7d`), in bounded pieces.

Several daemons take turns by a lock. The rules are applied in Postgres (streams/sql/retention.sql).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

import trio

from replicad.daemon.troubles import Troubles
from replicad.streams.serving.intervals import StreamIntervals
from replicad.streams.serving.served_stream import ServedStream

BATCH = 2_000  # rows of a transaction: some 10 ms, for which the stream's position waits as for any other writer
REST = 3.0  # a pause after each piece takes so many times as long as the piece did


class Retention:
    """The removal of old rows of all streams of a daemon. `trim`: removes a piece of a stream and returns its size."""

    def __init__(
        self,
        streams: Mapping[str, ServedStream],
        trim: Callable[[str, int], Awaitable[int]],
        troubles: Troubles,
        pace: StreamIntervals = StreamIntervals(),
    ) -> None:
        self._streams = streams
        self._trim = trim
        self._troubles = troubles
        self._pace = pace

    async def run(self) -> None:
        """Look at all streams again and again, until cancelled."""
        while True:
            await trio.sleep(self._pace.keep)
            for name in list(self._streams):
                served = self._streams.get(name)
                rules = () if served is None else (served.stream.keep_for, served.stream.keep_rows)
                if any(rule is not None for rule in rules):
                    with self._troubles.contain("stream", name, "retention"):
                        await self._remove(name)
                else:
                    self._troubles.end("stream", name, "retention")

    async def _remove(self, name: str) -> None:
        while name in self._streams:
            began = trio.current_time()
            if not await self._trim(name, BATCH):
                return
            await trio.sleep(REST * (trio.current_time() - began))
