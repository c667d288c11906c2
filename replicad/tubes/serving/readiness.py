"""Sends READY to clients whose CLAIM or PODS with `ready=1` may now succeed.

Such a request leaves an entry and no task. There is one for each client and partition; the next request about the
partition replaces it. It ends when READY was sent, when its time is over, or with the connection.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import trio

from replicad.daemon.service import Peer
from replicad.tubes.commands import Part, Ready
from replicad.tubes.holders import Holder
from replicad.tubes.serving.vacancies import Claimant, Vacancies
from replicad.tubes.serving.waiters import Waiter, Waiters

_Place = tuple[str, Part]


@dataclass(frozen=True, slots=True)
class _Entry:
    until: float  # READY is sent up to then
    end: Callable[[], None]


class Readiness:
    """The clients that want READY."""

    def __init__(self, waiters: Waiters, vacancies: Vacancies) -> None:
        self._waiters = waiters
        self._vacancies = vacancies
        self._wanted: dict[int, dict[_Place, _Entry]] = {}  # by the number of the client's connection

    def want_pods(self, peer: Peer, tube: str, part: Part, until: float, read_to: int | None) -> None:
        """Send READY when the partition gets pods. `read_to`: as in `Waiter`."""
        waiter = Waiter(tube, part, partial(self._send, peer, tube, part), read_to)
        self._waiters.add(waiter)
        self._put(peer, (tube, part), _Entry(until, partial(self._waiters.remove, waiter)))

    def want_lease(self, peer: Peer, tube: str, part: Part, holder: Holder, until: float) -> None:
        """Send READY when the partition is free for this holder."""
        claimant = Claimant(tube, part, holder, partial(self._send, peer, tube, part))
        self._vacancies.add(claimant)
        self._put(peer, (tube, part), _Entry(until, partial(self._vacancies.remove, claimant)))

    def drop(self, peer: Peer, tube: str, part: Part) -> None:
        """Send no READY for this partition; safe to repeat."""
        entry = self._wanted.get(peer.number, {}).pop((tube, part), None)
        if entry is not None:
            entry.end()

    def drop_late(self) -> None:
        """End the entries whose time is over. Call it regularly."""
        now = trio.current_time()
        for wanted in self._wanted.values():
            for place in [place for place, entry in wanted.items() if entry.until < now]:
                wanted.pop(place).end()

    def _put(self, peer: Peer, place: _Place, entry: _Entry) -> None:
        self.drop(peer, *place)
        if peer.number not in self._wanted:
            self._wanted[peer.number] = {}
            peer.at_end(partial(self._drop_all, peer.number))
        self._wanted[peer.number][place] = entry

    def _drop_all(self, number: int) -> None:
        for entry in self._wanted.pop(number, {}).values():
            entry.end()

    def _send(self, peer: Peer, tube: str, part: Part) -> None:
        self.drop(peer, tube, part)
        if peer.access.may("work", tube):  # the right may have been withdrawn meanwhile
            peer.post(Ready(tube, part))
