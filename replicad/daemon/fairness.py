"""Fair queues by client address: each address has its turn, so a crowd from one address delays only itself.

`Places` bounds who works at the same time, `YieldQueue` how much of one client's input is handled before others.
"""

from __future__ import annotations

import socket
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Hashable, Iterator
from contextlib import asynccontextmanager
from typing import Generic, NamedTuple, TypeVar

import trio

# A bounded number of places, assigned in turns by crowd, and in a crowd by client.
#
# A client that asks often delays no other client, and a crowd of many clients delays no client that does not belong to
# it.


T = TypeVar("T")


class Asker(NamedTuple):
    """Who asks for a place. `crowd`: a name in the access file, or the address that its clients come from."""

    crowd: Hashable
    client: Hashable = None


class Places:
    """So many places that may be held at the same time; one crowd holds at most `each` of them."""

    def __init__(self, number: int, each: int | None = None) -> None:
        self._free = number
        self._each = number if each is None else each
        self._held: Counter[Hashable] = Counter()  # by crowd
        self._waiting: OrderedDict[Hashable, OrderedDict[Hashable, deque[trio.Event]]] = OrderedDict()

    @property
    def waiting(self) -> int:
        """How many wait now."""
        return sum(len(events) for clients in self._waiting.values() for events in clients.values())

    @asynccontextmanager
    async def place(self, asker: Asker) -> AsyncIterator[None]:
        """Hold a place for the block. When places are rare, each crowd gets one before any gets another."""
        await self.take(asker)
        try:
            yield
        finally:
            self.give(asker)

    @property
    def full(self) -> bool:
        """Whether all places are held."""
        return self._free <= 0

    async def take(self, asker: Asker) -> None:
        """Hold a place until `give` is called with the same asker."""
        if self._free > 0 and self._held[asker.crowd] < self._each:  # then no task waits that may have it
            self._grant(asker.crowd)
            return
        event = trio.Event()
        clients = self._waiting.setdefault(asker.crowd, OrderedDict())
        clients.setdefault(asker.client, deque()).append(event)
        try:
            await event.wait()
        except trio.Cancelled:
            if event.is_set():  # the place was given to us in the same moment
                self.give(asker)
            else:
                self._forget(asker, event)
            raise

    def give(self, asker: Asker) -> None:
        """Give a place back: the next crowd in turn gets it that has not its number of them."""
        self._free += 1
        self._held[asker.crowd] -= 1
        if not self._held[asker.crowd]:
            del self._held[asker.crowd]
        for crowd, clients in self._waiting.items():
            if self._held[crowd] < self._each:
                self._grant(crowd)
                client, events = next(iter(clients.items()))
                events.popleft().set()
                _turn(clients, client)
                _turn(self._waiting, crowd)
                return

    def _grant(self, crowd: Hashable) -> None:
        self._free -= 1
        self._held[crowd] += 1

    def _forget(self, asker: Asker, event: trio.Event) -> None:
        clients = self._waiting[asker.crowd]
        events = clients[asker.client]
        events.remove(event)
        if not events:
            del clients[asker.client]
        if not clients:
            del self._waiting[asker.crowd]


def _turn(queue: OrderedDict[Hashable, T], key: Hashable) -> None:
    """It was one's turn: it comes last, or leaves if it has nobody who waits."""
    if queue[key]:
        queue.move_to_end(key)
    else:
        del queue[key]


_PREFIX = 8  # bytes of an IPv6 address that one site has for itself (RFC 4291, 2.5.4)


def address_of(client: socket.socket | trio.socket.SocketType) -> str:
    """The other end's address; of IPv6 the network of 64 bits, in which one host has as many addresses as it wants.

    Empty for a pair of sockets. Raises OSError if the connection has been reset.
    """
    name = client.getpeername()
    return network_of(str(name[0]) if isinstance(name, tuple) else "")


def network_of(host: str) -> str:
    """An address of IPv4, or the network of 64 bits of an IPv6 address. A text that is no address is returned
    unchanged.
    """
    if ":" not in host or "." in host:  # IPv4, also within IPv6
        return host
    try:
        return socket.inet_pton(socket.AF_INET6, host.partition("%")[0])[:_PREFIX].hex()
    except OSError:
        return host


class ByAddress(Generic[T]):
    """Things, each once, with the address of each. Every operation takes the same time, however many there are."""

    def __init__(self) -> None:
        self._things: OrderedDict[str, OrderedDict[T, None]] = (
            OrderedDict()
        )  # by address; the first is the next in turn
        self._addresses: dict[T, str] = {}
        self._by_number: dict[int, OrderedDict[str, None]] = {}  # the addresses that have so many things
        self._most = 0
        self._newest: set[str] = set()  # the addresses of which the newest is next: old ones may have given up

    def __len__(self) -> int:
        return len(self._addresses)

    def __contains__(self, thing: object) -> bool:
        return thing in self._addresses

    def add(self, thing: T, address: str) -> None:
        """Add an absent item."""
        things = self._things.setdefault(address, OrderedDict())
        things[thing] = None
        self._addresses[thing] = address
        self._count(address, len(things) - 1, len(things))

    def remove(self, thing: T) -> str:
        """Remove a present item; returns its address."""
        address = self._addresses.pop(thing)
        things = self._things[address]
        del things[thing]
        self._count(address, len(things) + 1, len(things))
        if not things:
            del self._things[address]
            self._newest.discard(address)
        return address

    def take(self, address: str | None = None, *, newest: bool | None = None) -> T:
        """Remove an item of the address whose turn it is, or of `address`: its newest or its oldest; None: the oldest
        and the newest in turns.
        """
        if address is None:
            address = self.turn()
        things = self._things[address]
        if newest is None:
            newest = address in self._newest
            (self._newest.discard if newest else self._newest.add)(address)
        thing = next(reversed(things) if newest else iter(things))
        self.remove(thing)
        if address in self._things:
            self._things.move_to_end(address)
        return thing

    def count(self, address: str) -> int:
        """How many an address has."""
        return len(self._things.get(address, ()))

    def turns(self) -> Iterator[str]:
        """The addresses, in the order of their turns."""
        return iter(self._things)

    def turn(self) -> str:
        """The address whose turn it is."""
        return next(iter(self._things))

    def first(self) -> T:
        """The oldest item of the address whose turn it is."""
        return next(iter(next(iter(self._things.values()))))

    def oldest(self, address: str) -> T | None:
        """The oldest item of an address."""
        return next(iter(self._things.get(address, ())), None)

    def most(self) -> tuple[int, str]:
        """How many an address has that has the most, and that address."""
        return self._most, next(iter(self._by_number.get(self._most, ("",))))

    def _count(self, address: str, before: int, after: int) -> None:
        if before:
            addresses = self._by_number[before]
            del addresses[address]
            if not addresses:
                del self._by_number[before]
        if after:
            self._by_number.setdefault(after, OrderedDict())[address] = None
        self._most = max(self._most, after)
        if self._most and self._most not in self._by_number:
            self._most -= 1


# How much of one client's input is handled before others get their turn.
#
# A task with more work than the budget of a turn waits in a queue with all other such tasks. The next task of the queue
# continues when the event loop has nothing else to do, and at the latest after `patience`. So work in masses uses the
# remaining time. An answer that takes twenty steps between the event loop and Postgres is delayed by one budget now and
# then, and not by one in each step. Waiting tasks may take turns by address: a crowd from one address then delays
# another address by one turn.

try:  # what `trio.testing` exports; importing that one imports pytest too, where it is installed
    from trio._core import wait_all_tasks_blocked  # type: ignore[attr-defined]
except ImportError:
    from trio.testing import wait_all_tasks_blocked

TURN_LINES = 16  # a quarter of a millisecond
TURN_BYTES = 8 << 10  # splitting so much into lines takes less than a millisecond, even if they are blank
PATIENCE = 0.005  # seconds; so the queue moves on even if the event loop is never idle


class YieldQueue:
    """The budget of a turn, and the queue of tasks that have used theirs up."""

    def __init__(self, lines: int = 1, size: int = 1, patience: float = PATIENCE) -> None:
        """`lines` and `size` (bytes) are handled in one turn."""
        self.lines = lines
        self.size = size
        self.waits = 0  # times that somebody had to wait, since the start
        self._patience = patience
        self._queue = Places(1)

    async def next(self, crowd: Hashable = None) -> None:
        """Wait for the next turn. `crowd`: each of them gets a turn before any gets another."""
        self.waits += 1
        async with self._queue.place(Asker(crowd)):
            with trio.move_on_after(self._patience):
                await wait_all_tasks_blocked()
