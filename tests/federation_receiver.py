"""A small HTTP server that plays many destinations: `/NAME/...` is the one called NAME. Real sockets, h11, trio."""

from __future__ import annotations

import json
import socket
import ssl
import struct
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import h11
import trio

from tests.conftest import PATIENCE


@dataclass(frozen=True)
class Request:
    """What arrived."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes

    @property
    def destination(self) -> str:
        return self.target.split("/")[1]

    @property
    def transaction(self) -> str:
        return self.headers["replicad-transaction"]

    @cached_property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def facts(self) -> list[Any]:
        return self._items("pdus", "facts", updates=False)

    @property
    def updates(self) -> list[Any]:
        return self._items("edus", "updates", updates=True)

    def _items(self, matrix: str, webhook: str, *, updates: bool) -> list[Any]:
        if isinstance(self.json, dict) and "specversion" not in self.json:
            found: list[Any] = self.json[matrix] if matrix in self.json else self.json[webhook]
            return found
        events = self.json if isinstance(self.json, list) else [self.json]
        return [event["data"] for event in events if (event["type"] == "replicad.update") == updates]


@dataclass(frozen=True)
class Reply:
    """How to answer. `accept`: whether it is taken; what follows may still go wrong on the way back."""

    status: int = 200
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes = b"{}"
    chunks: int = 1  # the body, as often
    pause: float = 0.0  # seconds before each chunk
    delay: float = 0.0  # seconds before the status line
    reset: bool = False  # the connection, in the place of an answer
    accept: bool = True


Behaviour = Callable[[Request], Reply]


class Receiver:
    """Remembers what it took: by destination, by transaction id, in order; and every request."""

    def __init__(self, behave: Behaviour | None = None) -> None:
        self.behave: Behaviour = behave or (lambda _: Reply())
        self.taken: defaultdict[str, dict[str, Request]] = defaultdict(dict)
        self.requests: list[Request] = []
        self.counts: Counter[str] = Counter()  # facts taken, by destination
        self.repeats = 0
        self.most_in_flight = 0  # requests of one destination at the same time, as its sender sees it
        self._in_flight: defaultdict[str, list[trio.SocketStream]] = defaultdict(list)
        self.connections = 0
        self.port = 0

    def facts(self, destination: str) -> list[Any]:
        """The facts that a destination took, in order; a repeat of a transaction counts once."""
        return [fact for request in self.taken[destination].values() for fact in request.facts]

    def updates(self, destination: str) -> list[Any]:
        return [update for request in self.taken[destination].values() for update in request.updates]

    def in_flight(self, destination: str) -> int:
        """Requests of a destination that are not answered yet, whether or not somebody waits for the answer."""
        return len(self._in_flight[destination])

    @asynccontextmanager
    async def listening(
        self, port: int = 0, host: str = "127.0.0.1", tls: ssl.SSLContext | None = None
    ) -> AsyncIterator[Receiver]:
        async with trio.open_nursery() as nursery:
            listeners = await trio.open_tcp_listeners(port, host=host, backlog=512)
            self.port = listeners[0].socket.getsockname()[1]
            served = [trio.SSLListener(one, tls, https_compatible=True) for one in listeners] if tls else listeners
            nursery.start_soon(trio.serve_listeners, self._serve, served)
            yield self
            nursery.cancel_scope.cancel()

    async def expect(self, condition: Callable[[], bool], seconds: float = PATIENCE) -> None:
        """Look until the condition holds; fails when it does not within that time."""
        with trio.fail_after(seconds):
            while not condition():
                await trio.sleep(0.01)

    async def _serve(self, stream: trio.SocketStream) -> None:
        self.connections += 1
        connection = h11.Connection(h11.SERVER)
        try:
            while await self._one(stream, connection):
                connection.start_next_cycle()
        except (trio.BrokenResourceError, h11.RemoteProtocolError):
            pass
        finally:
            await trio.aclose_forcefully(stream)

    async def _one(self, stream: trio.SocketStream, connection: h11.Connection) -> bool:
        head: h11.Request | None = None
        body = bytearray()
        while True:
            event = connection.next_event()
            if event is h11.NEED_DATA:
                connection.receive_data(await stream.receive_some(65536))
            elif isinstance(event, h11.Request):
                head = event
            elif isinstance(event, h11.Data):
                body += event.data
            elif isinstance(event, h11.EndOfMessage):
                break
            else:
                return False
        assert head is not None
        headers = {name.decode(): value.decode() for name, value in head.headers}
        request = Request(head.method.decode(), head.target.decode(), headers, bytes(body))
        others = self._in_flight[request.destination]
        others.append(stream)
        # A sender that gave a request up may send the next one while the answer to the first is still being made.
        same_time = sum(not closed_by_peer(other) for other in others) if len(others) > 1 else 1
        self.most_in_flight = max(self.most_in_flight, same_time)
        try:
            reply = self.behave(request)
            self._note(request, reply)
            if reply.delay:
                await trio.sleep(reply.delay)
        finally:
            others.remove(stream)
        if reply.reset:
            stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            return False
        await self._answer(stream, connection, reply)
        return connection.our_state is h11.DONE and connection.their_state is h11.DONE

    def _note(self, request: Request, reply: Reply) -> None:
        self.requests.append(request)
        if not (200 <= reply.status < 300 and reply.accept):
            return
        known = self.taken[request.destination].get(request.transaction)
        if known is None:
            self.taken[request.destination][request.transaction] = request
            self.counts[request.destination] += len(request.facts)
        else:
            self.repeats += 1
            assert known.body == request.body, "one transaction id, two contents"

    async def _answer(self, stream: trio.SocketStream, connection: h11.Connection, reply: Reply) -> None:
        length = ("content-length", str(len(reply.body) * reply.chunks))
        head = h11.Response(status_code=reply.status, headers=[length, *reply.headers])
        await stream.send_all(connection.send(head) or b"")
        for _ in range(reply.chunks):
            if reply.pause:
                await trio.sleep(reply.pause)
            await stream.send_all(connection.send(h11.Data(data=reply.body)) or b"")
        await stream.send_all(connection.send(h11.EndOfMessage()) or b"")


def closed_by_peer(stream: trio.SocketStream) -> bool:
    """Whether the other side has closed the connection, by the kernel's word: no task need have noticed."""
    with socket.fromfd(stream.socket.fileno(), stream.socket.family, stream.socket.type) as same:
        try:
            return same.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True
