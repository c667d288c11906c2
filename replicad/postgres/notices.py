"""What others tell by NOTIFY, from the driver's side to trio's. Which connection listens is not decided here."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from replicad.postgres.connection import Connection

_AHEAD = 1000  # payloads that may wait for whoever listens; more are lost, and NOTIFY promises no more


class Notices:
    """What was told by NOTIFY on one channel since `Connection.listen`, in the order of the commits."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._put, self._take = trio.open_memory_channel[str](_AHEAD)

    def hear(self, _driver: object, _pid: int, _channel: str, payload: str) -> None:
        """The driver's side: one payload."""
        with suppress(trio.WouldBlock, trio.ClosedResourceError):
            self._put.send_nowait(payload)

    def close(self, _driver: object = None) -> None:
        """No more of them; what was heard already can still be taken."""
        self._put.close()

    async def next(self, patience: float) -> str:
        """Wait for the next payload. After so many seconds of silence the server is asked whether it is there.

        Raises DatabaseUnavailable when the connection is lost: what is told from then on is told to others only.
        """
        while True:
            with trio.move_on_after(patience):
                try:
                    return await self._take.receive()
                except trio.EndOfChannel:
                    raise self._connection.silent() from None
            await self._connection.fetch_value("SELECT 1")
