"""Passes payloads of NOTIFY from the driver to trio. `Connection.listen` decides which connection listens."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from replicad.postgres.connection import Connection

_AHEAD = 1000  # payloads that may wait; further ones are lost, and users of NOTIFY must expect that


class Notices:
    """The payloads of one channel since `Connection.listen`, in the order of the commits."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._put, self._take = trio.open_memory_channel[str](_AHEAD)

    def hear(self, _driver: object, _pid: int, _channel: str, payload: str) -> None:
        """The driver's side: one payload."""
        with suppress(trio.WouldBlock, trio.ClosedResourceError):
            self._put.send_nowait(payload)

    def close(self, _driver: object = None) -> None:
        """No more payloads will come; received payloads can still be taken."""
        self._put.close()

    async def next(self, patience: float) -> str:
        """Wait for the next payload. After that many seconds without one, check that the server still answers.

        Raises DatabaseUnavailable when the connection is lost. Later payloads do not reach this listener.
        """
        while True:
            with trio.move_on_after(patience):
                try:
                    return await self._take.receive()
                except trio.EndOfChannel:
                    raise self._connection.silent() from None
            await self._connection.fetch_value("SELECT 1")
