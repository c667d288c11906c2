"""A bounded number of places, given to those who wait in turn by client: one who asks often delays nobody else."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager

import trio


class Places:
    """So many places that may be held at the same time; one client holds at most `each` of them."""

    def __init__(self, number: int, each: int | None = None) -> None:
        self._free = number
        self._each = number if each is None else each
        self._held: Counter[Hashable] = Counter()
        self._waiting: OrderedDict[Hashable, deque[trio.Event]] = OrderedDict()

    @property
    def waiting(self) -> int:
        """How many wait now."""
        return sum(len(events) for events in self._waiting.values())

    @asynccontextmanager
    async def place(self, client: Hashable) -> AsyncIterator[None]:
        """Hold a place for the block. When places are rare, each client gets one before any gets another."""
        await self.take(client)
        try:
            yield
        finally:
            self.give(client)

    @property
    def full(self) -> bool:
        """Whether all places are held."""
        return self._free <= 0

    async def take(self, client: Hashable) -> None:
        """Hold a place until `give` is called with the same client."""
        if self._free > 0 and self._held[client] < self._each:  # then no task waits that may have it
            self._grant(client)
            return
        event = trio.Event()
        self._waiting.setdefault(client, deque()).append(event)
        try:
            await event.wait()
        except trio.Cancelled:
            if event.is_set():  # the place was given to us in the same moment
                self.give(client)
            else:
                self._forget(client, event)
            raise

    def give(self, client: Hashable) -> None:
        """Give a place back: the next client in turn gets it that has not its number of them."""
        self._free += 1
        self._held[client] -= 1
        if not self._held[client]:
            del self._held[client]
        for waiting, events in self._waiting.items():
            if self._held[waiting] < self._each:
                self._grant(waiting)
                events.popleft().set()
                if events:
                    self._waiting.move_to_end(waiting)
                else:
                    del self._waiting[waiting]
                return

    def _grant(self, client: Hashable) -> None:
        self._free -= 1
        self._held[client] += 1

    def _forget(self, client: Hashable, event: trio.Event) -> None:
        events = self._waiting[client]
        events.remove(event)
        if not events:
            del self._waiting[client]
