"""The receiving side of one connection. On a plain socket it costs an idle connection three frames instead of six."""

from __future__ import annotations

import os

import trio


class Inlet:
    """Receives from one peer."""

    __slots__ = ("_socket", "_stream")

    def __init__(self, stream: trio.abc.ReceiveStream) -> None:
        self._stream = stream
        self._socket = stream.socket if isinstance(stream, trio.SocketStream) else None

    async def receive(self, most: int) -> bytes:
        """Up to `most` bytes; nothing at the end of the input. Other tasks run before it returns.

        Raises:
            trio.BrokenResourceError: the connection is lost.
        """
        if self._socket is None:
            return bytes(await self._stream.receive_some(most))
        while True:
            await trio.lowlevel.wait_readable(self._socket)
            try:
                return os.read(self._socket.fileno(), most)
            except BlockingIOError:
                continue  # woken without data
            except OSError as error:
                raise trio.BrokenResourceError(f"cannot receive: {error.strerror}") from error
