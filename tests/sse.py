"""A client of server-sent events on a plain socket, as a browser's EventSource reads them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import trio

from replicad.config.settings import Address
from tests.conftest import PATIENCE


@dataclass(frozen=True)
class Event:
    """`id`: the last one that came, as in a browser."""

    name: str
    id: str
    data: Any


class EventSource:
    """One answer to /live. `comments` counts keep-alives."""

    def __init__(self, stream: trio.SocketStream, status: int, headers: dict[str, str], rest: bytes) -> None:
        self.stream = stream
        self.status = status
        self.headers = headers
        self.id = ""
        self.comments = 0
        self._rest = rest

    async def body(self) -> Any:
        """The JSON of a refusal."""
        length = int(self.headers["content-length"])
        while len(self._rest) < length:
            self._rest += await self._more()
        return json.loads(self._rest)

    async def _more(self) -> bytes:
        with trio.fail_after(PATIENCE):
            data = await self.stream.receive_some(65536)
        if not data:
            raise EOFError("closed by the daemon")
        return bytes(data)

    async def next(self) -> Event:
        """The next event. Raises EOFError at the end."""
        while True:
            while b"\n\n" not in self._rest:
                self._rest += await self._more()
            block, _, self._rest = self._rest.partition(b"\n\n")
            name, data = "message", []
            for line in block.decode().split("\n"):
                field, _, value = line.partition(":")
                value = value.removeprefix(" ")
                if field == "":
                    self.comments += 1
                elif field == "id":
                    self.id = value
                elif field == "event":
                    name = value
                elif field == "data":
                    data.append(value)
            if data:
                return Event(name, self.id, json.loads("\n".join(data)))

    async def until(self, name: str) -> Event:
        """The next event of that name."""
        while (found := await self.next()).name != name:
            pass
        return found

    async def rows(self, count: int) -> list[Any]:
        """The rows of the next messages."""
        return [(await self.until("message")).data["row"] for _ in range(count)]


@asynccontextmanager
async def event_source(
    address: Address | None, path: str, after: str | None = None, **headers: str
) -> AsyncIterator[EventSource]:
    """Ask for /live. `after`: the header Last-Event-ID."""
    assert address is not None
    fields = {"host": str(address), **headers, **({} if after is None else {"last-event-id": after})}
    async with await trio.open_tcp_stream(address.host, address.port) as stream:
        lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        await stream.send_all(f"GET {path} HTTP/1.1\r\n{lines}\r\n".encode())
        received = b""
        with trio.fail_after(PATIENCE):
            while b"\r\n\r\n" not in received:
                data = await stream.receive_some(65536)
                assert data, received
                received += data
        head, _, rest = received.partition(b"\r\n\r\n")
        first, *others = head.decode().split("\r\n")
        found = dict(line.lower().split(": ", 1) for line in others)
        yield EventSource(stream, int(first.split(" ")[1]), found, rest)
