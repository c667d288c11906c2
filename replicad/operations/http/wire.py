"""HTTP/1.1 on one connection (RFC 9110, 9112): requests one after another, each with bounds of bytes and of time.

`h11` reads heads and bodies and writes answers. It is lenient in some places where two programs may understand one
request in two ways, so `look_at_head` refuses these before: what a proxy has let through is what the daemon sees. There
is no HTTP/2 and no upgrade; the header Upgrade is ignored. A `Request` and its `Answer` are what the pages see.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from email.utils import formatdate
from functools import lru_cache
from http import HTTPStatus
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, unquote, urlsplit

import h11
import trio

if TYPE_CHECKING:
    from replicad.operations.http.guests import Guest

# A request and its answer, as the pages see them. What may stand on the wire is decided in `wire`.

MOST_PARAMETERS = 20  # of a query


class Refused(Exception):
    """The request is refused: the status of HTTP, and why."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status
        self.why = why


@dataclass(frozen=True, slots=True)
class Request:
    """A request whose head has been read. `path` is decoded; names of `headers` are lower-case, and several fields of
    one name are one value with commas. `guest`: the connection that it came on. `body` reads at most so
    many bytes; it raises Refused. `repeats`: a parameter of the query was given twice, of which `query` has the last.
    `closed` returns when the peer has closed the connection.
    """

    method: str
    path: str
    query: Mapping[str, str]
    repeats: bool
    headers: Mapping[str, str]
    guest: Guest
    body: Callable[[int], Awaitable[bytes]]
    closed: Callable[[], Awaitable[None]]


@dataclass(slots=True)
class Answer:
    """What a request is answered: whole, in memory. `close`: the connection is closed after it."""

    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    close: bool = False

    @classmethod
    def text(cls, text: str, status: int = 200, headers: Mapping[str, str] | None = None) -> Answer:
        """Plain text."""
        return cls(status, text.encode(), {"content-type": "text/plain; charset=utf-8", **(headers or {})})

    @classmethod
    def json(cls, found: object) -> Answer:
        """JSON of numbers and texts in UTF-8."""
        return cls.of_type("application/json", json.dumps(found, ensure_ascii=False, allow_nan=False).encode())

    @classmethod
    def of_type(cls, content_type: str, body: bytes) -> Answer:
        """Bytes of that type."""
        return cls(200, body, {"content-type": content_type})


def split_target(target: str) -> tuple[str, Mapping[str, str], bool]:
    """The path and the parameters of an origin-form (RFC 9112, 3.2.1), and whether a parameter was given twice.

    Raises:
        Refused: there are too many parameters.
    """
    path, _, query = target.partition("?")
    try:
        found = parse_qsl(query, keep_blank_values=True, max_num_fields=MOST_PARAMETERS)
    except ValueError:
        raise Refused(400, f"a query has at most {MOST_PARAMETERS} parameters") from None
    parameters = dict(found)
    return unquote(path, errors="replace"), parameters, len(parameters) < len(found)


HEAD_BYTES = 16 << 10  # of a request
HEAD_END = b"\r\n\r\n"
IDLE = 5.0  # seconds until a request begins
READING = 10.0  # seconds for its head, and for its body
SENDING = 5.0  # seconds for a peer to take a piece of an answer
PIECE = 64 << 10  # bytes of an answer
LINGER, LINGER_BYTES = 1.0, 256 << 10  # read from a refused peer, so that no reset overtakes the answer
RECEIVE = 16 << 10
REPEATED, REPEATED_BYTES = 256, 2048  # heads that are kept, and the longest one: readers of one page send the same

_TOKEN = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+"
_HEAD = re.compile(rb"(%s) ([!-~]+) HTTP/(\d)\.(\d)\r\n((?:%s:[\t -~\x80-\xff]*\r\n)*)\r\n" % (_TOKEN, _TOKEN))
_HOST = re.compile(rb"(?:\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9._~%!$&'()*+,;=-]*)(?::\d{0,5})?")
# Heads that are not kept, as they have or may have a secret.
_SECRET = re.compile(rb"(?i)\r\n(?:authorization|cookie)[ \t]*:|^[^\r]*\?(?:[^\r]*&)?(?:access_token=|[^\r]*%)")
_LENGTH = re.compile(rb"\d{1,15}")
# Encodings that some programs decode and others do not, before they compare (RFC 3986, 2.3 and 6.2.2): of letters,
# digits, `-`, `.`, `_`, `~`, and of slashes. Also segments that some remove, and a `%` that encodes nothing.
_TWO_WAYS = re.compile(
    r"%(?:2[DEF]|3[0-9]|[46][1-9A-F]|[57][0-9A]|5[CF]|7E|(?![0-9A-F]{2}))|//|/\.{1,2}(?:/|$)", re.IGNORECASE
)
BAD = "this is no request of HTTP/1.1 (RFC 9112)"


class Ended(Exception):
    """The peer has closed the connection, or does not continue in time: no answer can be sent."""


def look_at_head(head: bytes) -> None:
    """Refuse a head, with its empty line, that two programs might read in different ways.

    Raises:
        Refused: with the status of RFC 9112.
    """
    found = _HEAD.fullmatch(head)
    if found is None:  # a bare CR or LF, a NUL, a folded line, a space before a colon
        raise Refused(400, BAD)
    if found[3] != b"1" or found[4] not in b"01":
        raise Refused(505, "send HTTP/1.1")
    names: dict[bytes, list[bytes]] = {}
    for line in found[5].split(b"\r\n")[:-1]:
        name, _, value = line.partition(b":")
        names.setdefault(name.lower(), []).append(value.strip(b" \t"))
    lengths, codings = names.get(b"content-length", []), names.get(b"transfer-encoding", [])
    if len(lengths) + len(codings) > 1:
        raise Refused(400, "send one Content-Length or one Transfer-Encoding, and not both")
    if lengths and not _LENGTH.fullmatch(lengths[0]):
        raise Refused(400, "Content-Length must be a number")
    if codings and found[4] == b"0":
        raise Refused(400, "HTTP/1.0 has no Transfer-Encoding")
    if codings and codings[0].lower() != b"chunked":
        raise Refused(501, "send the body as it is, or chunked")
    hosts = names.get(b"host", [])
    if len(hosts) > 1 or (not hosts and found[4] == b"1"):
        raise Refused(400, "send one header Host")
    if hosts and not _HOST.fullmatch(hosts[0]):
        raise Refused(400, "the header Host is no name or address with a port")
    expected = names.get(b"expect", [])
    if expected and [one.lower() for one in expected] != [b"100-continue"]:
        raise Refused(417, "the only expectation that is met is 100-continue")


def origin_form(target: str, host: str) -> str:
    """The path and query of a request's target.

    A target in absolute-form must name the Host of the request, and a path may be written in one way only: what a
    filter has looked at is then what counts.

    Raises:
        Refused: the target has another form, names another host, or has a path that may be read in two ways.
    """
    found = _path_and_query(target, host)
    if (odd := _TWO_WAYS.search(found.partition("?")[0])) is not None:
        raise Refused(400, f"write the path without {odd[0]}: not every program reads that in the same way")
    return found


def _path_and_query(target: str, host: str) -> str:
    if target.startswith("/") and "#" not in target:
        return target
    if target == "*":
        return "/*"
    with suppress(ValueError):
        parts = urlsplit(target)
        if parts.scheme in ("http", "https") and parts.netloc.lower() == host.lower() and not parts.fragment:
            return (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    raise Refused(400, "the target of a request must be a path, or an address with the Host of the request")


def plain_answer(status: int, text: str, **headers: str) -> bytes:
    """An answer after which the connection is closed, for a peer that has sent no valid request."""
    body = f"{text}\n".encode()
    fields = {"content-type": "text/plain; charset=utf-8", "content-length": str(len(body)), "connection": "close"}
    lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in {**fields, **headers}.items())
    return f"HTTP/1.1 {status} {phrase(status)}\r\n{lines}\r\n".encode("latin-1") + body


def phrase(status: int) -> str:
    """The reason phrase of a status."""
    return HTTPStatus(status).phrase


@dataclass(frozen=True, slots=True)
class Head:
    """The head of a request. `last`: the peer wants its answer to be the last one. `parts`: the target, as
    `split_target` divides it. Requests may share a head.
    """

    method: str
    target: str  # in origin-form
    headers: Mapping[str, str]
    last: bool = field(default=False, compare=False)
    parts: tuple[str, Mapping[str, str], bool] = field(default=("", {}, False), compare=False)


@lru_cache(maxsize=REPEATED)
def _head_without_body(head: bytes) -> Head | None:
    """The head of a request; None if a body follows it. Crowds send the same heads. Raises Refused."""
    look_at_head(head)
    http = h11.Connection(h11.SERVER, HEAD_BYTES)
    found, unread = _parsed(http, head)
    return None if unread else found


def _parsed(http: h11.Connection, head: bytes) -> tuple[Head, bool]:
    """The head, and whether a body follows it. Raises Refused."""
    try:
        http.receive_data(head)
        event = http.next_event()
        assert isinstance(event, h11.Request)
        unread = http.next_event() is h11.NEED_DATA
    except h11.RemoteProtocolError as error:
        raise Refused(error.error_status_hint, f"{BAD}: {error}") from None
    headers: dict[str, str] = {}
    for name, value in event.headers:
        key, text = name.decode(), value.decode("latin-1")
        headers[key] = f"{headers[key]}, {text}" if key in headers else text
    wanted = {one.strip().lower() for one in headers.get("connection", "").split(",")}
    target = origin_form(event.target.decode(), headers.get("host", ""))
    last = event.http_version != b"1.1" or "close" in wanted
    return Head(event.method.decode(), target, headers, last, split_target(target)), unread


@lru_cache(maxsize=REPEATED)
def _answer_head(status: int, fields: tuple[tuple[str, str], ...]) -> bytes:
    """The status line and these fields, without the empty line. h11 refuses fields that would break lines."""
    found = h11.Response(
        status_code=status, headers=[(name.encode(), value.encode("latin-1")) for name, value in fields]
    )
    lines = [b"%s: %s\r\n" % (name, value) for name, value in found.headers.raw_items()]
    return b"HTTP/1.1 %d %s\r\n%s" % (status, phrase(status).encode(), b"".join(lines))


@lru_cache(maxsize=1)
def _date(second: int) -> bytes:
    return b"date: %s\r\n\r\n" % formatdate(second, usegmt=True).encode()


class HttpWire:
    """One connection. `waits` is entered while the peer has to do something."""

    def __init__(self, stream: trio.abc.Stream, waits: Callable[[], AbstractContextManager[None]]) -> None:
        self._stream = stream
        self._waits = waits
        self._held = bytearray()  # was received and belongs to what comes next
        self._http: h11.Connection | None = None  # of a request with a body
        self._unread = False  # whether the request has a body of which something is left
        self._length = 0  # of that body, if it was declared
        self._close = False  # whether the peer wants this answer to be the last one

    async def wait_request(self) -> bool:
        """Wait until a request begins. False: the peer closes the connection before it, or sends none in time."""
        if not self._held:
            with trio.move_on_after(IDLE), suppress(Ended):
                await self._receive()
        return bool(self._held)

    async def next_head(self) -> Head | None:
        """The next request; None if the peer closes the connection before it, or sends none in time.

        Raises:
            Refused: it is not valid. The connection must be closed then.
            Ended: the peer does not finish it.
        """
        if not await self.wait_request():
            return None
        with trio.move_on_after(READING):
            return self._taken(await self._whole_head())
        raise Ended

    async def _whole_head(self) -> bytes:
        while True:
            if self._held.startswith(b"\r\n"):  # after a body (RFC 9112, 2.2)
                del self._held[:2]
            end = self._held.find(HEAD_END, 0, HEAD_BYTES)
            if end >= 0:
                head = bytes(self._held[: end + len(HEAD_END)])
                del self._held[: end + len(HEAD_END)]
                return head
            if len(self._held) >= HEAD_BYTES:
                raise Refused(431, f"the head of a request has at most {HEAD_BYTES} bytes")
            if b"\n" in self._held and _impossible(self._held):
                raise Refused(400, BAD)
            await self._receive()

    def _taken(self, raw: bytes) -> Head:
        kept = len(raw) <= REPEATED_BYTES and not _SECRET.search(raw)
        head = _head_without_body(raw) if kept else _head_without_body.__wrapped__(raw)
        self._http, self._unread, self._length = None, head is None, 0
        if head is None:
            self._http = h11.Connection(h11.SERVER, HEAD_BYTES)
            head, _ = _parsed(self._http, raw)
            self._length = int(head.headers.get("content-length", 0))
        self._close = head.last
        return head

    async def read_body(self, most: int) -> bytes:
        """The body of the request.

        Raises:
            Refused: it has more than `most` bytes, or is no body of HTTP/1.1.
            Ended: the peer does not finish it.
        """
        found = bytearray()
        if self._length > most:
            raise Refused(413, f"a request has at most {most} bytes")
        with trio.move_on_after(READING):
            if self._http is not None and self._http.they_are_waiting_for_100_continue:
                await self._send(self._http.send(h11.InformationalResponse(status_code=100, headers=[])) or b"")
            while self._unread:
                if not self._held:
                    await self._receive()
                data = bytes(self._held)
                self._held.clear()
                self._take(data, found, most)
            return bytes(found)
        raise Ended

    def _take(self, data: bytes, found: bytearray, most: int) -> None:
        assert self._http is not None
        try:
            self._http.receive_data(data)
            while (event := self._http.next_event()) is not h11.NEED_DATA:
                if isinstance(event, h11.Data):
                    found += event.data
                    if len(found) > most:
                        raise Refused(413, f"a request has at most {most} bytes")
                else:  # the end, after which h11 holds what follows
                    self._unread = False
                    self._held += self._http.trailing_data[0]
                    return
        except h11.RemoteProtocolError:
            raise Refused(400, f"{BAD}: its body is not") from None

    async def wait_closed(self) -> None:
        """Wait until the peer has closed the connection. What it sends meanwhile belongs to its next request; of a peer
        that sends more than a head may have, the end is not noticed.
        """
        with suppress(Ended):
            while len(self._held) < HEAD_BYTES:
                await self._receive()
            await trio.sleep_forever()

    async def send(self, answer: Answer, *, head_only: bool, close: bool) -> bool:
        """Send the answer of the request. Returns whether another request may follow.

        Raises:
            Ended: the peer does not take it.
        """
        fields = dict(answer.headers)
        if answer.status not in (204, 304):
            fields["content-length"] = str(len(answer.body))
        close = close or self._close or self._unread
        if close:
            fields["connection"] = "close"
        first = _answer_head(answer.status, tuple(fields.items())) + _date(int(time.time()))
        body = b"" if head_only else answer.body
        for begin in range(0, max(1, len(body)), PIECE):
            await self._send(first + body[begin : begin + PIECE])
            first = b""
        if self._unread:
            await self.linger()
            return False
        return not close

    async def refuse(self, refused: Refused) -> None:
        """Answer input that is no request, and read a little more of it."""
        await self._send(plain_answer(refused.status, refused.why))
        await self.linger()

    async def linger(self) -> None:
        """Take what the peer still sends, for a bounded time: a reset would discard the answer."""
        if isinstance(self._stream, trio.abc.HalfCloseableStream):
            with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                await self._stream.send_eof()
        left = LINGER_BYTES
        with trio.move_on_after(LINGER), suppress(Ended):
            while left > 0:
                self._held.clear()
                await self._receive()
                left -= len(self._held)

    async def _receive(self) -> None:
        """Raises Ended at the end of the input."""
        try:
            with self._waits():
                data = await self._stream.receive_some(RECEIVE)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            raise Ended from None
        if not data:
            raise Ended
        self._held += data

    async def _send(self, data: bytes) -> None:
        try:
            with trio.move_on_after(SENDING), self._waits():
                await self._stream.send_all(data)
                return
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            raise Ended from None
        raise Ended


def _impossible(held: bytearray) -> bool:
    """Whether no more input can make a request of it: its lines do not end in CRLF."""
    return held.find(b"\n") == 0 or held[held.find(b"\n") - 1] != 0x0D
