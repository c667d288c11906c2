"""A TCP proxy that does to connections what networks do: cuts them after any byte, delays, or forgets them."""

from __future__ import annotations

import random
import socket
import struct
import threading

import trio

from tests.conftest import PATIENCE


class FaultProxy:
    """Forwards to a port. `budgets` says after how many bytes from the server each connection is cut; then never again.

    Half of the cuts are resets, the other half orderly ends in the middle of a line. `frozen` keeps connections open
    and forwards nothing.
    """

    def __init__(self, target: int, budgets: list[int] | None = None, seed: int = 0) -> None:
        self.target = target
        self.port = 0
        self.cuts = 0
        self.frozen = False
        self._budgets = list(budgets or [])
        self._chance = random.Random(seed)

    def __enter__(self) -> FaultProxy:
        ready = threading.Event()
        self._thread = threading.Thread(target=trio.run, args=(self._main, ready), name="fault-proxy", daemon=True)
        self._thread.start()
        assert ready.wait(PATIENCE)
        return self

    def __exit__(self, *_: object) -> None:
        self._trio.run_sync_soon(self._scope.cancel)
        self._thread.join(PATIENCE)

    async def _main(self, ready: threading.Event) -> None:
        self._trio = trio.lowlevel.current_trio_token()
        self._scope = trio.CancelScope()
        [listener] = await trio.open_tcp_listeners(0, host="127.0.0.1")
        self.port = listener.socket.getsockname()[1]
        ready.set()
        with self._scope:
            await trio.serve_listeners(self._serve, [listener])

    async def _serve(self, client: trio.SocketStream) -> None:
        try:
            server = await trio.open_tcp_stream("127.0.0.1", self.target)
        except OSError:
            await trio.aclose_forcefully(client)
            return
        budget = self._budgets.pop(0) if self._budgets else None
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._forward, client, server, None)
                await self._forward(server, client, budget)
                nursery.cancel_scope.cancel()
        except* (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        if budget is not None and self._chance.random() < 0.5:
            client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset
        for stream in (client, server):
            await trio.aclose_forcefully(stream)

    async def _forward(self, source: trio.SocketStream, sink: trio.SocketStream, budget: int | None) -> None:
        while budget is None or budget > 0:
            size = self._chance.choice([1, 7, 100, 4096, 65536])
            data = await source.receive_some(size if budget is None else min(size, budget))
            if self.frozen:
                await trio.sleep_forever()
            if not data:
                raise trio.BrokenResourceError
            await sink.send_all(data)
            if budget is not None:
                budget -= len(data)
        self.cuts += 1
