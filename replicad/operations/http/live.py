"""`GET /streams/NAME/live?after=TOKEN`: a stream as server-sent events.

The reader is a session of the daemon as any other client is. Its stream translates lines into events. The answer begins
when the subscription is accepted or refused. So bounds, turns, slow readers, rights and logs are the same as on TCP.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

import trio

from replicad.daemon.outbox import sliced
from replicad.daemon.service import Host
from replicad.errors import LocalProtocolError, UnknownStream
from replicad.nurseries import open_plain_nursery
from replicad.operations.http.entry import Caller
from replicad.operations.http.events import OPENING, Events, Translations
from replicad.operations.http.messages import Answer, Request
from replicad.operations.http.problems import Problem
from replicad.operations.http.streams import Page
from replicad.protocol.commands import Name
from replicad.streams.commands import Replicate

NAME = "http"  # of these clients in lists
NOW = "NOW"
SLICE = 256 << 10  # bytes that are translated before other tasks run; a chunk of a journal has half of it
LOOK = 30.0  # seconds after which the clock is looked at again: it may have been set
LINES = 8  # commands that may wait for the session; it is sent two or three


class Live(Page):
    """The page."""

    closes = True

    def __init__(self, host: Host) -> None:
        super().__init__(host)
        self._translations = Translations()

    async def answer(self, request: Request, caller: Caller, name: str) -> Answer | None:
        """`Page.answer`: sends it. The header Last-Event-ID, which browsers send, wins over `after`."""
        token = request.headers.get("last-event-id") or request.query.get("after") or NOW
        events = Events(name, token, self._translations)
        head = self._head(request)
        with request.guest.as_session() as below:
            stream = EventStream(events, name, head, lambda: below)
            stream.say(f"{Name(NAME).render()}\n".encode())
            stream.subscribe(token)
            async with open_plain_nursery() as nursery:
                nursery.start_soon(_watch, below, stream.end_input)
                if caller.browser is not None:
                    nursery.start_soon(_expire, caller.browser.expires, caller.access.expire)
                await self.host.inside.serve(stream, request.guest.peer, caller.access)
                nursery.cancel_scope.cancel()
        if stream.begun:
            return None
        raise (events.problem or Problem("connection_lost", "the connection was ended; try again")).noted()

    def _head(self, request: Request) -> bytes:
        fields = {
            "content-type": "text/event-stream",
            "cache-control": "no-store",
            "connection": "close",  # at its end; so the body needs no length
            "x-accel-buffering": "no",  # nginx would gather events
            "x-content-type-options": "nosniff",
            **self.allowed(request),
        }
        lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        return f"HTTP/1.1 200 OK\r\n{lines}\r\n".encode("latin-1") + OPENING


class EventStream(trio.abc.Stream):
    """The connection of a reader as its session sees it: takes lines, and gives commands in its place.

    `take` gives the connection below; it is called when the answer begins.
    """

    def __init__(self, events: Events, stream: str, head: bytes, take: Callable[[], trio.abc.Stream]) -> None:
        self.transport_stream: trio.abc.Stream | None = None
        self._closed = False
        self._events = events
        self._stream = stream
        self._head = head
        self._take = take
        self._says, self._said = trio.open_memory_channel[bytes](LINES)

    @property
    def begun(self) -> bool:
        """Whether the answer has begun."""
        return self.transport_stream is not None

    def say(self, line: bytes) -> None:
        """Send a command to the session."""
        with suppress(trio.ClosedResourceError):  # the reader has closed
            self._says.send_nowait(line)

    def subscribe(self, token: str) -> None:
        """Send REPLICATE. Raises UnknownStream: no stream can have that name."""
        try:
            self.say(f"{Replicate(self._stream, token).render()}\n".encode())
        except LocalProtocolError as error:
            raise UnknownStream(f"there is no stream {self._stream[:80]!r}") from error

    def end_input(self) -> None:
        """The reader sends nothing more: the session ends."""
        self._says.close()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:  # noqa: ARG002 - lines are short
        """The next command; nothing at the end."""
        try:
            return b"" if self._closed else await self._said.receive()
        except trio.EndOfChannel:
            return b""

    async def send_pieces(self, pieces: Sequence[bytes | memoryview]) -> None:
        """`send_all` of each: a chunk of a journal is translated once for all readers, if it stays the same object."""
        for piece in pieces:
            await self.send_all(piece)

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Translate whole lines and send the events. Raises ClosedResourceError: somebody else may answer already."""
        if self._closed:
            raise trio.ClosedResourceError
        events = self._events
        for part in _slices(data):
            translated = events.feed(part)
            if events.again is not None:
                self.subscribe(events.again)
                events.again = None
            if self.transport_stream is None and events.started:
                self.transport_stream = self._take()
                await self.transport_stream.send_all(self._head)
            if translated.events and self.transport_stream is not None:
                for slice_ in sliced([translated.events]):
                    await self.transport_stream.send_all(slice_)
            if events.over or events.problem is not None:
                self.end_input()

    async def wait_send_all_might_not_block(self) -> None:
        """As the connection below."""
        if self.transport_stream is not None:
            await self.transport_stream.wait_send_all_might_not_block()

    async def aclose(self) -> None:
        """Close the connection, if the answer has begun. Otherwise somebody else answers."""
        self._closed = True
        self.end_input()
        if self.transport_stream is not None:
            await self.transport_stream.aclose()
        else:
            await trio.lowlevel.checkpoint()


def _slices(data: bytes | bytearray | memoryview) -> Iterator[bytes | bytearray]:
    """What holds a long line stays the object that it is, by which readers know that they share it."""
    if len(data) <= SLICE or isinstance(data, memoryview):
        data = bytes(data)
    first = data.rfind(b"\n", 0, SLICE) + 1
    if data.find(b"\n", first, first + SLICE) < 0:  # the line after the first slice is long
        yield data
        return
    begin = 0
    while len(data) - begin > SLICE and (end := data.rfind(b"\n", begin, begin + SLICE) + 1):
        yield bytes(data[begin:end])
        begin = end
    yield bytes(data[begin:]) if begin else data


async def _expire(at: float, end: Callable[[], None]) -> None:
    """Call `end` at that time, in seconds since 1970, by whatever the clock shows then."""
    while (left := at - time.time()) > 0:
        await trio.sleep(min(left, LOOK))
    end()


async def _watch(below: trio.abc.Stream, gone: Callable[[], None]) -> None:
    """Call `gone` when the reader has closed the connection. Its input is ignored."""
    with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
        while await below.receive_some(4096):
            pass
    gone()
