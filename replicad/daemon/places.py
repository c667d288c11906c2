"""A bounded number of places, given to those who wait in turn by client: one who asks often delays nobody else."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager

import trio


class Places:
    """So many places that may be held at the same time."""

    def __init__(self, number: int) -> None:
        self._free = number
        self._waiting: OrderedDict[Hashable, deque[trio.Event]] = OrderedDict()

    @property
    def waiting(self) -> int:
        """How many wait now."""
        return sum(len(events) for events in self._waiting.values())

    @asynccontextmanager
    async def place(self, client: Hashable) -> AsyncIterator[None]:
        """Hold a place for the block. When places are rare, each client gets one before any gets another."""
        await self._take(client)
        try:
            yield
        finally:
            self._give()

    async def _take(self, client: Hashable) -> None:
        if self._free > 0:  # then no task waits
            self._free -= 1
            return
        event = trio.Event()
        self._waiting.setdefault(client, deque()).append(event)
        try:
            await event.wait()
        except trio.Cancelled:
            if event.is_set():  # the place was given to us in the same moment
                self._give()
            else:
                self._forget(client, event)
            raise

    def _give(self) -> None:
        """Pass a place on to the client whose turn it is."""
        if not self._waiting:
            self._free += 1
            return
        client, events = next(iter(self._waiting.items()))
        events.popleft().set()
        if events:
            self._waiting.move_to_end(client)
        else:
            del self._waiting[client]

    def _forget(self, client: Hashable, event: trio.Event) -> None:
        events = self._waiting[client]
        events.remove(event)
        if not events:
            del self._waiting[client]
