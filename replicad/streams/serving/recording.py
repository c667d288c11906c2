"""Looks after streams of changes: new partitions, shapes of tables, triggers that are off; sends their snapshots."""

from __future__ import annotations

from collections.abc import Callable

import trio

from replicad.daemon.troubles import Troubles
from replicad.errors import ReplicadError
from replicad.streams.registry import Registry
from replicad.streams.serving.intervals import StreamIntervals

KIND = "stream"  # of the troubles of one stream: it is served, and changes of its table may be missing
CAUSE = "recording"  # of these troubles
TASK = "changes"  # the name of the work in troubles of the service
MISSED = "changes_missed"


class Recording:
    """The tasks of one daemon for all streams of changes. `wanted`: whether there are any."""

    def __init__(
        self, registry: Registry, troubles: Troubles, wanted: Callable[[], bool], pace: StreamIntervals
    ) -> None:
        self._registry = registry
        self._troubles = troubles
        self._wanted = wanted
        self._pace = pace
        self._missing: set[str] = set()  # streams whose trouble was reported

    async def look(self) -> None:
        """Look regularly until cancelled. What a daemon may not do, or what was missed, is a trouble of the stream."""
        while True:
            with self._troubles.contain("service", TASK, "look"):
                if self._wanted() or self._missing:
                    found = dict(await self._registry.look_after_changes())
                    for name in self._missing - found.keys():
                        self._troubles.end(KIND, name, CAUSE)
                    for name, reason in found.items():
                        self._troubles.begin(KIND, name, CAUSE, reason, code=MISSED)
                    self._missing = set(found)
            await trio.sleep(self._pace.changes)

    async def send_snapshots(self) -> None:
        """Send the unfinished snapshots until cancelled, beside other processes that do it."""
        while True:
            with self._troubles.contain("service", TASK, "snapshots"):
                if self._wanted():
                    await self._send()
            await trio.sleep(self._pace.changes)

    async def _send(self) -> None:
        failure: ReplicadError | None = None
        left = [one.stream for one in await self._registry.snapshots() if one.finished_at is None]
        for number in dict.fromkeys(left):
            try:
                while (step := await self._registry.snapshot_step(number)) is not None and not step.waits_for:
                    pass
            except ReplicadError as error:  # the other streams go on
                failure = error
        if failure is not None:
            raise failure
