"""Hands lines to every session but their sender, a bounded number of sessions in each turn of the event loop.

A line is rendered once. Lines that come while others are handed out are handed out together afterwards, so that many
lines cost each session one send.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from typing import Protocol

import trio

from replicad.daemon.turns import Turns

RELAY_BYTES = 1 << 20  # that may wait: ten thousand lines; senders wait for room, the oldest of other daemons go
BATCH = 64 << 10  # bytes that are handed out together
SLICE = 25  # sessions that get them in one turn: a quarter of a millisecond


class Listener(Protocol):
    """Who gets the lines."""

    @property
    def hears(self) -> bool:
        """Whether it may get them."""

    def deliver(self, lines: bytes) -> None:
        """Send whole lines now, if the socket is free, or queue them. Never raises."""


class Announcing:
    """The lines that wait to be handed out, in their order."""

    def __init__(self, listeners: Collection[Listener], most: int, turns: Turns) -> None:
        """`most`: the bytes that may wait; if more do, the oldest lines are dropped."""
        self._turns = turns
        self.announced = self.dropped = 0  # lines, since the start
        self._listeners = listeners
        self._most = most
        self._waiting: deque[tuple[bytes, object | None]] = deque()
        self._waiting_bytes = 0
        self._has_lines = trio.Event()
        self._room = trio.Event()

    @property
    def crowded(self) -> bool:
        """Whether so much waits that a sender should wait for `wait_room` before it sends more."""
        return self._waiting_bytes >= min(BATCH, self._most)

    async def wait_room(self) -> None:
        """Wait until it is not crowded."""
        while self.crowded:
            self._room = trio.Event()
            await self._room.wait()

    def put(self, line: bytes, sender: object | None) -> None:
        """Queue a rendered line with its end for all but `sender`. Never waits."""
        self._waiting.append((line, sender))
        self._waiting_bytes += len(line)
        while self._waiting_bytes > self._most:
            dropped, _ = self._waiting.popleft()
            self._waiting_bytes -= len(dropped)
            self.dropped += 1
        self._has_lines.set()

    async def run(self) -> None:
        """Hand out until cancelled."""
        while True:
            while not self._waiting:
                self._has_lines = trio.Event()
                await self._has_lines.wait()
            await self._hand_out(self._take())

    def _take(self) -> list[tuple[bytes, object | None]]:
        batch: list[tuple[bytes, object | None]] = []
        size = 0
        while self._waiting and (not batch or size + len(self._waiting[0][0]) <= BATCH):
            batch.append(self._waiting.popleft())
            size += len(batch[-1][0])
        self._waiting_bytes -= size
        self._room.set()
        return batch

    async def _hand_out(self, batch: list[tuple[bytes, object | None]]) -> None:
        whole = b"".join(line for line, _ in batch)
        senders = {sender for _, sender in batch if sender is not None}
        self.announced += len(batch)
        for number, listener in enumerate(list(self._listeners), 1):
            if not listener.hears:
                pass
            elif listener not in senders:
                listener.deliver(whole)
            elif lines := b"".join(line for line, sender in batch if sender is not listener):
                listener.deliver(lines)
            if number % SLICE == 0:
                await self._turns.next()
