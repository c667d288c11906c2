"""A bounded number of places, assigned in turns by crowd, and in a crowd by client.

A client that asks often delays no other client, and a crowd of many clients delays no client that does not belong to
it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager
from typing import NamedTuple, TypeVar

import trio

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
