"""Queues of destinations that are due, each with workers of its own: who does not answer delays nobody else.

- *proven*: the last request was accepted.
- *probing*: new, or it has failed a few times.
- *away*: it has failed for long. There may be thousands of these, each costs a time-out, and all are due when a sender
  starts again after a night. So they have a share of the probes, and never that of the others.
"""

from __future__ import annotations

from collections import OrderedDict

import trio

from replicad.sender.destination import Destination

AWAY_SHARE = 4  # a quarter of the probes


class Lane:
    """A queue of destinations that are due, each once. Workers wait for them."""

    def __init__(self) -> None:
        self.due: OrderedDict[str, Destination] = OrderedDict()
        self._idle = trio.lowlevel.ParkingLot()
        self._closed = False

    def put(self, destination: Destination) -> None:
        """Queue a destination that is not queued."""
        self.due[destination.name] = destination
        self._idle.unpark()

    async def take(self) -> Destination | None:
        """Wait for the next one. None after `close`."""
        while not self.due and not self._closed:
            await self._idle.park()
        return None if self._closed else self.due.popitem(last=False)[1]

    def close(self) -> None:
        """Give out nothing more."""
        self._closed = True
        self._idle.unpark_all()


class Lanes:
    """All lanes; a destination is queued in one at most. `crews`: each lane with the number of its workers."""

    def __init__(self, workers: int, probers: int) -> None:
        """`probers`: of those that are not proven, 2 at least."""
        self._proven, self._probing, self._away = Lane(), Lane(), Lane()
        away = max(1, probers // AWAY_SHARE)
        self.crews = ((self._proven, workers), (self._probing, max(1, probers - away)), (self._away, away))

    def __len__(self) -> int:
        return sum(len(lane.due) for lane, _ in self.crews)

    def __contains__(self, destination: Destination) -> bool:
        name = destination.name
        return name in self._proven.due or name in self._probing.due or name in self._away.due

    def put(self, destination: Destination) -> None:
        """Queue a destination that is not queued, in the lane where it belongs now."""
        lane = self._proven if destination.proven else self._away if destination.away else self._probing
        lane.put(destination)

    def remove(self, destination: Destination) -> None:
        """Take a destination out of its queue, if it is queued."""
        for lane, _ in self.crews:
            lane.due.pop(destination.name, None)

    def close(self) -> None:
        """Give out nothing more."""
        for lane, _ in self.crews:
            lane.close()
