"""Passes the chunks of a COPY from the driver's asyncio task to the trio task that takes them."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

import trio

COPY_CHUNK = 128 * 1024  # bytes per call of a sink; with smaller chunks the hand-over costs most (measured)
_COPY_AHEAD = 2  # chunks that may wait for a slow sink; beyond it Postgres waits


class Handoff:
    """Between one COPY and its sink; a bounded number of chunks may wait."""

    def __init__(self, loop: Any) -> None:
        self._loop = loop
        self._chunks: deque[bytes] = deque()
        self._parts: list[bytes] = []
        self._size = 0
        self._arrived = trio.Event()
        self._room: asyncio.Future[None] | None = None
        self._closed = False

    async def put(self, data: bytes) -> None:
        """The driver's side: collect COPY_CHUNK bytes, then wait until the sink has taken them."""
        self._parts.append(data)
        self._size += len(data)
        if self._size >= COPY_CHUNK:
            self._flush()
            if len(self._chunks) >= _COPY_AHEAD:
                self._room = self._loop.create_future()
                await self._room

    def close(self, _task: object = None) -> None:
        """No more data: the rest is delivered, then take() returns None."""
        if self._parts:
            self._flush()
        self._closed = True
        self._arrived.set()

    async def take(self) -> bytes | None:
        """The trio side: the next chunk, or None at the end."""
        while not self._chunks:
            if self._closed:
                return None
            self._arrived = trio.Event()
            await self._arrived.wait()
        chunk = self._chunks.popleft()
        if self._room is not None and not self._room.done():
            self._room.set_result(None)
        return chunk

    def _flush(self) -> None:
        self._chunks.append(self._parts[0] if len(self._parts) == 1 else b"".join(self._parts))
        self._parts.clear()
        self._size = 0
        self._arrived.set()
