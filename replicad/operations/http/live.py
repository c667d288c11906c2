"""`GET /streams/NAME/live?after=TOKEN`: a stream as server-sent events.

The reader is a session of the daemon as any other client is. Its stream translates lines into events. The answer begins
when the subscription is accepted or refused. So bounds, turns, slow readers, rights and logs are the same as on TCP.

`Events` makes server-sent events (https://html.spec.whatwg.org/#server-sent-events) of lines. It does no I/O.

The id of an event is the token to go on with after it, so a browser that connects again resumes by itself. A row has
no name, so `onmessage` gets it; a change of a table has the name of its kind (CHANGES). The names of other events are
`position`, `reset`, `notice` and `refused`. What a row moves is decided by the state of our clients
(`client/follower.py`).
"""

from __future__ import annotations

import json
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from weakref import WeakValueDictionary

import trio

from replicad.client.follower import UNKNOWN, StreamProgress
from replicad.client.refusals import is_notice, refusal
from replicad.config.access import Part
from replicad.daemon.outbox import sliced
from replicad.daemon.service import Host
from replicad.errors import LocalProtocolError, TokenForked, UnknownStream
from replicad.nurseries import open_plain_nursery
from replicad.operations.http.entry import Caller
from replicad.operations.http.streams import Page, Problem, problem_of_text, row_json
from replicad.operations.http.wire import Answer, Request
from replicad.protocol.commands import Name
from replicad.protocol.tokens import Vector
from replicad.streams.commands import Position, Replicate, Writers

NAME = "http"  # of these clients in lists
NOW = "NOW"
SLICE = 256 << 10  # bytes that are translated before other tasks run; a chunk of a journal has half of it
LOOK = 30.0  # seconds after which the clock is looked at again: it may have been set

LONGEST_ID = 2048  # characters: browsers send it back in a header. Of many writers, some rows may come again
SHARED = 16  # translated blocks that are kept for other readers of the same rows
SHARED_BYTES = 256 << 10  # of a block; a chunk of a journal has half of it. Blocks of longer rows are kept while sent
OPENING = b"retry: 2000\n\n"  # ms until a browser connects again
PING = b": ping\n\n"

State = tuple[str | None, tuple[tuple[str, int], ...]]  # the token of a reader, and the listed writers
_Key = tuple[bytes | int, State]


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class Translated:
    """A block of lines as events, and what it does to a reader."""

    block: bytes | bytearray
    events: bytes
    moved: tuple[tuple[str, int], ...] = ()
    after: State | None = None


CHANGES = {  # the events of a stream of changes, by the letter after {"op":"
    b"i": b"insert", b"u": b"update", b"d": b"delete", b"r": b"read", b"t": b"truncate", b"s": b"schema",
}  # fmt: skip


class Translations:
    """Blocks that were translated for one reader, for others that are in the same state."""

    def __init__(self) -> None:
        self._kept: OrderedDict[_Key, Translated] = OrderedDict()
        self._in_use: WeakValueDictionary[_Key, Translated] = WeakValueDictionary()

    def find(self, block: bytes | bytearray, state: State) -> Translated | None:
        """What was put. Readers have the same object."""
        return self._in_use.get(_key(block, state))

    def put(self, state: State, found: Translated) -> None:
        """Keep it as long as somebody sends it; a short one for a while longer."""
        key = _key(found.block, state)
        self._in_use[key] = found
        if len(found.block) <= SHARED_BYTES:
            self._kept[key] = found
            if len(self._kept) > SHARED:
                self._kept.popitem(last=False)


def _key(block: bytes | bytearray, state: State) -> _Key:
    """A long block is not looked at again; nothing else has its id while it is kept."""
    return (bytes(block) if len(block) <= SHARED_BYTES else id(block)), state


class Events:
    """One reader of one stream.

    `started`: the subscription was accepted. `problem`: why it was not. `over`: nothing more will come. `again`: the
    token to subscribe with once more, because the history has forked.
    """

    def __init__(self, stream: str, token: str, translations: Translations, *, changes: bool = False) -> None:
        """`changes`: its rows are changes of a table. Raises BadToken: `token` is no token, nor NOW or EARLIEST."""
        self.started = self.over = False
        self.problem: Problem | None = None
        self.again: str | None = None
        self._translations = translations
        self._changes = changes
        self._progress = StreamProgress(stream, token, linear=False)
        self._rdata = f"RDATA {stream} ".encode()
        self._state: State | None = None  # computed when it is needed
        self._writers: tuple[tuple[str, int], ...] = ()
        self._single, self._prefix = b"", b""  # the only listed writer, and what stands before its tokens in ids

    def feed(self, block: bytes | bytearray) -> Translated:
        """Take whole lines, which stay as they are, and give their `events`. Readers of a long row share these."""
        if self.over:
            return Translated(block, b"")
        if not (self.started and block.startswith(self._rdata)):
            return self._translate(block)
        before = self._state = self._state or (self._progress.token(), self._writers)
        found = self._translations.find(block, before)
        if found is None:
            return self._translate(block, before)
        for instance, at in found.moved:
            self._progress.mark(instance).at = at
        self._state = found.after
        return found

    def _translate(self, block: bytes | bytearray, before: State | None = None) -> Translated:
        """`before`: the state, if the result is to be kept for others: a block of rows alone."""
        events: list[bytes] = []
        moved: dict[bytes, int] = {}
        self._state = None
        for line in bytes(block).split(b"\n")[:-1]:
            if line.startswith(self._rdata):
                events.append(self._row(line, moved))
                continue
            before = None
            events.append(self._other(line))
            if self.over:  # positions behind this line count for who got the rows, which this reader asks for again
                break
        if before is None:
            return Translated(block, b"".join(events))
        self._state = (self._progress.token(), self._writers)
        ended = tuple((instance.decode(), at) for instance, at in moved.items())
        found = Translated(block, b"".join(events), ended, self._state)
        self._translations.put(before, found)
        return found

    def _row(self, line: bytes, moved: dict[bytes, int]) -> bytes:
        _, _, instance, token, row = line.split(b" ", 4)
        data = row_json(instance, token, row)
        if self._changes:
            data = b"%s\nevent: %s" % (data, CHANGES.get(row[7:8], b"message"))
        if token == b"batch":
            return b"data: %s\n\n" % data
        at = int(token)
        mark = self._progress.mark(instance.decode())
        if at > mark.at:
            moved[instance] = mark.at = at
        if instance == self._single:
            return b"id: %s%s\ndata: %s\n\n" % (self._prefix, token, data)
        return b"%sdata: %s\n\n" % (self._id(), data)

    def _other(self, line: bytes) -> bytes:
        name, _, arguments = line.decode().partition(" ")
        match name:
            case "PING":
                return PING if self.started else b""
            case "POSITION" if self.started:
                return self._position(Position.parse(arguments))
            case "WRITERS":
                return self._set_writers(Writers.parse(arguments))
            case "ERROR":
                return self._error(arguments)
        return b""

    def _position(self, received: Position) -> bytes:
        progress = self._progress
        progress.position_received()
        mark = progress.mark(received.instance)
        if received.new < mark.at:
            instance = progress.move_back(received.instance, received.new)
            self._note_single()
            return self._resets([(instance, received.new)])
        if mark.at != UNKNOWN and received.prev > mark.at:  # rows between the two did not come: they come again
            self.over = True
            return b""
        mark.at = received.new
        self._note_single()
        return self._event("position", instance=received.instance, prev=received.prev, new=received.new)

    def _set_writers(self, received: Writers) -> bytes:
        progress = self._progress
        events = b""
        if progress.is_forked(received.epoch):
            back, again = progress.begin_generation(received.epoch)
            events = self._resets(back)
            self.over = self.over or again  # rows that are void do not come again on this connection
        self.started = progress.answered = True
        progress.set_writers(received.epoch, dict(received.numbers))
        self._writers = tuple(progress.writers.items())
        self._note_single()
        return events

    def _note_single(self) -> None:
        """Ids of a stream with one writer are written without a look at positions."""
        self._single = b""
        if len(self._writers) == 1 and self._writers[0][0] in self._progress.positions():
            self._single = self._writers[0][0].encode()
            self._prefix = f"{self._progress.epoch}!".encode()

    def _error(self, text: str) -> bytes:
        error = refusal(text)
        problem = problem_of_text(text)
        if isinstance(error, TokenForked):
            back = self._progress.rewind(Vector.parse(error.rewind))
            self.started, self.again = True, self._progress.token()
            return self._resets(back)
        if is_notice(error):
            return self._event("notice", **problem.fields) if self.started else b""
        if not self.started:
            self.problem = self.problem or problem
            return b""
        self.over = True
        return self._event("refused", **problem.fields)

    def _resets(self, back: Iterable[tuple[str | None, int]]) -> bytes:
        """Rows above a position are void: rows of one writer, or of all (null)."""
        token = self._progress.token(LONGEST_ID)
        events = (
            self._event("reset", instance=instance, discard_after=position, token=token) for instance, position in back
        )
        return b"".join(events)

    def _event(self, name: str, **fields: object) -> bytes:
        data = json.dumps(fields, ensure_ascii=False, separators=(",", ":"))
        return b"%sevent: %s\ndata: %s\n\n" % (self._id(), name.encode(), data.encode())

    def _id(self) -> bytes:
        """The line of the id; none as long as there is no position."""
        token = self._progress.token(LONGEST_ID)
        return b"" if token in (None, "NOW", "EARLIEST") else f"id: {token}\n".encode()


class Live(Page):
    """The page."""

    closes = True

    def __init__(self, host: Host) -> None:
        super().__init__(host)
        self._translations = Translations()

    async def answer(self, request: Request, caller: Caller, name: str) -> Answer | None:
        """`Page.answer`: sends it. The header Last-Event-ID, which browsers send, wins over `after`."""
        token = request.headers.get("last-event-id") or request.query.get("after") or NOW
        pages = self.host.inside.pages
        changes = pages is not None and pages.has_changes(name)
        part = self.part_in(request, name)
        events = Events(name, token, self._translations, changes=changes)
        head = self._head(request)
        with request.guest.as_session() as below:
            stream = EventStream(events, name, head, lambda: below, part)
            stream.say(f"{Name(NAME).render()}\n".encode())
            stream.subscribe(token)
            watch = partial(_watch, below, stream.end_input)
            if caller.browser is not None:
                watch = partial(_expire_beside, watch, caller.browser.expires, caller.access.expire)
            await self.host.inside.serve(stream, request.guest.peer, caller.access, watch)
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

    def __init__(
        self,
        events: Events,
        stream: str,
        head: bytes,
        take: Callable[[], trio.abc.Stream],
        part: Part | None = None,
    ) -> None:
        """`part`: of the stream, only the changes of this part are asked for."""
        self.transport_stream: trio.abc.Stream | None = None
        self._closed = False
        self._events = events
        self._stream = stream
        self._part = part
        self._head = head
        self._take = take
        self._said = bytearray()  # commands that the session has not received: two or three
        self._input_ended = False
        self._stirred = trio.Event()

    @property
    def begun(self) -> bool:
        """Whether the answer has begun."""
        return self.transport_stream is not None

    def say(self, line: bytes) -> None:
        """Send a command to the session."""
        if not self._input_ended:
            self._said += line
            self._stirred.set()

    def subscribe(self, token: str) -> None:
        """Send REPLICATE. Raises UnknownStream: no stream can have that name."""
        try:
            self.say(f"{Replicate(self._stream, token, where=self._part).render()}\n".encode())
        except LocalProtocolError as error:
            raise UnknownStream(f"there is no stream {self._stream[:80]!r}") from error

    def end_input(self) -> None:
        """The reader sends nothing more: the session ends."""
        self._input_ended = True
        self._stirred.set()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:  # noqa: ARG002 - lines are short
        """The next commands; nothing at the end."""
        await trio.lowlevel.checkpoint()
        while not (self._said or self._closed or self._input_ended):
            await self._stirred.wait()
            self._stirred = trio.Event()
        said = b"" if self._closed else bytes(self._said)
        self._said.clear()
        return said

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


async def _expire_beside(watch: Callable[[], Awaitable[None]], at: float, end: Callable[[], None]) -> None:
    """Watch, and call `end` at that time. Readers without a time to end need no task for it."""
    async with open_plain_nursery() as nursery:
        nursery.start_soon(_expire, at, end)
        await watch()
        nursery.cancel_scope.cancel()


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
