"""The connections of HTTP and the places for their requests: who counts where, and who gives way to whom."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import trio

from replicad.daemon.access import names_of
from replicad.daemon.fairness import Asker, ByAddress, Places, network_of
from replicad.daemon.hub import Hub

SHARE = 0.75  # of the places: so many may be held for one address


class Desk:
    """The places of requests that are being answered. Waiting requests get one in turns by address."""

    def __init__(self, places: int) -> None:
        self._places = Places(places, each=max(1, round(places * SHARE)))
        self._slow: ByAddress[Guest] = ByAddress()  # have a place, and their peers do not go on

    async def take(self, guest: Guest) -> None:
        """Wait for a place. If there is none, a request of a crowd from another address, which waits for its peer,
        loses its place.
        """
        if self._places.full:
            number, crowded = self._slow.most()
            slowest = self._slow.oldest(crowded)
            if number > 1 and crowded != guest.address and slowest is not None:
                slowest.give_way()
        await self._places.take(Asker(guest.address))

    def give(self, guest: Guest) -> None:
        """Give a place back."""
        self._places.give(Asker(guest.address))

    @contextmanager
    def waiting(self, guest: Guest) -> Iterator[None]:
        """For the block, a guest with a place waits for its peer."""
        self._slow.add(guest, guest.address)
        try:
            yield
        finally:
            self._slow.remove(guest)


class Guest:
    """One connection. `peer`: the client's `address:port`; `address`: the part by which it takes turns.

    `certificate`: the names in the checked certificate of its TLS. `server`: the address that it has reached.
    `refused`: it had to give way before it was answered.
    """

    def __init__(
        self,
        hub: Hub,
        desk: Desk,
        stream: trio.abc.Stream,
        peer: str,
        lent: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """`lent`: for the block, the connection does not count at its acceptor."""
        self.peer = peer
        self.address = network_of(peer.rpartition(":")[0].strip("[]"))
        self.certificate = names_of(stream)
        self.server = _server_of(stream)
        self.refused = False
        self._hub = hub
        self._desk = desk
        self._stream = stream
        self._lent = lent
        self._scope = trio.CancelScope()
        self._has_place = False
        self._asked = False  # whether a whole request has come that is not answered yet

    @contextmanager
    def admitted(self) -> Iterator[bool]:
        """For the block, the connection counts. False: there is no room. The block ends early if it gives way."""
        admitted = self._hub.admit_guest(self)
        self.refused = not admitted
        try:
            if admitted:
                self._hub.newcomers.hold(self, self.give_way, address=self.address)
            with self._scope:
                yield admitted
        finally:
            self._leave()

    def give_way(self) -> None:
        """End the connection: another one needs its room."""
        self.refused = self._asked
        self._scope.cancel()
        self._leave()

    async def take_place(self) -> None:
        """Wait for a place to be answered, which `rest` gives back. From then on the connection is not closed for
        others.
        """
        self._asked = True
        await self._desk.take(self)
        self._asked, self._has_place = False, True
        self._hub.newcomers.leave(self)

    def rest(self) -> None:
        """The request has been answered: the connection waits for another one."""
        self._give_place()
        self._hub.newcomers.leave(self)
        self._hub.newcomers.hold(self, self.give_way, address=self.address)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """For the block, the peer has to do something."""
        if not self._has_place:
            yield
            return
        with self._desk.waiting(self):
            yield

    @contextmanager
    def as_follower(self) -> Iterator[None]:
        """For the block, the connection waits for rows: it needs no place, and does not count at its acceptor."""
        self._give_place()
        with self._lent():
            yield

    @contextmanager
    def as_session(self) -> Iterator[trio.abc.Stream]:
        """For the block, the connection is that of a session of the daemon, and counts as such only."""
        self._leave()
        with self._lent():
            yield self._stream

    def _give_place(self) -> None:
        if self._has_place:
            self._has_place = False
            self._desk.give(self)

    def _leave(self) -> None:
        self._give_place()
        self._hub.newcomers.leave(self)
        self._hub.leave_guest(self)


def _server_of(stream: trio.abc.Stream) -> str:
    while isinstance(stream, trio.SSLStream):
        stream = stream.transport_stream
    found = getattr(stream, "socket", None)
    try:
        return str(found.getsockname()[0]) if found is not None else ""
    except OSError:  # it has been reset
        return ""
