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
LOCKED = "locked"  # the code of what the next look may do


class Recording:
    """The tasks of one daemon for all streams of changes. `wanted`: whether there are any."""

    def __init__(
        self, registry: Registry, troubles: Troubles, wanted: Callable[[], bool], pace: StreamIntervals
    ) -> None:
        self._registry = registry
        self._troubles = troubles
        self._wanted = wanted
        self._pace = pace
        self._troubled: set[str] = set()  # streams whose trouble was reported
        self._locked: set[str] = set()  # streams that the last look found locked

    async def look(self) -> None:
        """Look regularly until cancelled. What a daemon may not do, or what was missed, is a trouble of the stream. So
        is a lock that two looks have met.
        """
        while True:
            with self._troubles.contain("service", TASK, "look"):
                if self._wanted() or self._troubled:
                    self.report(await self._registry.look_after_changes())
            await trio.sleep(self._pace.changes)

    def report(self, found: list[tuple[str, str, str]]) -> None:
        """Begin and end the troubles of streams as a look has found them (`Registry.look_after_changes`)."""
        locked = {name for name, code, _ in found if code == LOCKED}
        troubled = {name: (code, reason) for name, code, reason in found if name not in locked - self._locked}
        for name in self._troubled - troubled.keys() - locked:
            self._troubles.end(KIND, name, CAUSE)
        for name, (code, reason) in troubled.items():
            self._troubles.begin(KIND, name, CAUSE, reason, code=code)
        self._troubled = set(troubled) | (self._troubled & locked)
        self._locked = locked

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
