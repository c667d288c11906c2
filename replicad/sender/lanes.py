"""Queues of destinations that are due, each with workers of its own: who does not answer delays nobody else.

- *proven*: the last request was accepted.
- *probing*: new, or it has failed a few times.
- *away*: it has failed for long. There may be thousands of these, each costs a time-out, and all are due when a sender
  starts again after a night. So they have a share of the probes, and never that of the others.

A transaction is stored before it is sent. For proven destinations that is done ahead: while so many requests are under
way, as many more transactions are stored, so that Postgres and the destinations work at the same time.
"""

from __future__ import annotations

from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import trio

from replicad.sender.destination import Destination

AWAY_SHARE = 4  # a quarter of the probes


class Visit(NamedTuple):
    """A destination that is due; `turn`: how many transactions in a row it has accepted just before."""

    destination: Destination
    turn: int


class Lane:
    """A queue of destinations that are due, each once, and a hand-over of those whose transaction is stored."""

    def __init__(self) -> None:
        self.due: OrderedDict[str, Visit] = OrderedDict()
        self._idle = trio.lowlevel.ParkingLot()
        self._closed = False
        self._give, self._ready = trio.open_memory_channel[Visit](0)

    def put(self, visit: Visit) -> None:
        """Queue a destination that is not queued; before all others while its turn lasts."""
        name = visit.destination.name
        self.due[name] = visit
        if visit.turn:
            self.due.move_to_end(name, last=False)
        self._idle.unpark()

    async def take(self) -> Visit | None:
        """Wait for the next one. None after `close`."""
        while not self.due and not self._closed:
            await self._idle.park()
        return None if self._closed else self.due.popitem(last=False)[1]

    async def hand_over(self, visit: Visit) -> None:
        """Wait until somebody has time to send what is stored. After `close` nobody has."""
        with suppress(trio.BrokenResourceError):
            await self._give.send(visit)

    async def take_stored(self) -> Visit | None:
        """Wait for the next one that was handed over. None after `close`."""
        try:
            return await self._ready.receive()
        except trio.ClosedResourceError:
            return None

    def close(self) -> None:
        """Give out nothing more."""
        self._closed = True
        self._idle.unpark_all()
        self._ready.close()


@dataclass(frozen=True, slots=True)
class Crew:
    """The workers of a lane: how many requests at a time. `ahead`: others store as many transactions meanwhile."""

    lane: Lane
    size: int
    ahead: bool = False


class Lanes:
    """All lanes; a destination is queued in one at most."""

    def __init__(self, workers: int, probers: int) -> None:
        """`probers`: of those that are not proven, 2 at least."""
        self._proven, self._probing, self._away = Lane(), Lane(), Lane()
        away = max(1, probers // AWAY_SHARE)
        self.crews = (
            Crew(self._proven, workers, ahead=True),
            Crew(self._probing, max(1, probers - away)),
            Crew(self._away, away),
        )

    def __len__(self) -> int:
        return sum(len(crew.lane.due) for crew in self.crews)

    def __contains__(self, destination: Destination) -> bool:
        name = destination.name
        return name in self._proven.due or name in self._probing.due or name in self._away.due

    def put(self, destination: Destination, turn: int = 0) -> None:
        """Queue a destination that is not queued, in the lane where it belongs now."""
        lane = self._proven if destination.proven else self._away if destination.away else self._probing
        lane.put(Visit(destination, turn))

    def remove(self, destination: Destination) -> None:
        """Take a destination out of its queue, if it is queued."""
        for crew in self.crews:
            crew.lane.due.pop(destination.name, None)

    def close(self) -> None:
        """Give out nothing more."""
        for crew in self.crews:
            crew.lane.close()
