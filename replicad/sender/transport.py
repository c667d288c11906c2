"""Sends one transaction as one HTTP request and returns the outcome. `engine` has the queues and retries.

A transaction always becomes the same request, but for the signature: it has the time of the try in it. Only the status
of the answer decides whether it was accepted. A little of the body is read, for a short time, so that the connection
can be used again. Redirects are not followed, and cookies are not kept.
"""

from __future__ import annotations

import json
import math
import re
import socket
import time
from base64 import b64encode
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import lru_cache
from importlib.metadata import version
from ipaddress import ip_address
from math import inf
from secrets import token_hex
from typing import NamedTuple
from urllib.parse import quote, urlsplit
from zlib import crc32

import httpcore
import httpx
import trio

from replicad.client.changes import ChangeOp
from replicad.sender import signing
from replicad.sender.items import Transaction
from replicad.sender.settings import (
    CLOUDEVENTS,
    CLOUDEVENTS_BATCH,
    MATRIX,
    Address,
    AllowedHosts,
    Delivery,
    glob,
    is_public,
)
from replicad.tracing import TRACEPARENT, span

FAILURES = (
    httpcore.TimeoutException,
    httpcore.NetworkError,
    httpcore.ProtocolError,
    httpcore.UnsupportedProtocol,
    OSError,
)
"""The errors of a request that could not be made or was not answered."""


class AddressRefused(Exception):
    """A host has no address to which the sender may connect."""

    def __init__(self, host: str, addresses: Iterable[str]) -> None:
        super().__init__(f"{host} is at {', '.join(addresses)}, which is no public address")


class CheckedBackend(httpcore.AsyncNetworkBackend):
    """Connections of httpcore whose addresses `permits` has allowed. It is called with the host and an address."""

    def __init__(self, permits: Callable[[str, Address], bool]) -> None:
        self._permits = permits
        self._tcp = httpcore.TrioBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """Connect to the first address of `host` that is permitted and answers. Each gets its share of the time.

        Raises:
            AddressRefused: no address is permitted.
            httpcore.ConnectError, httpcore.ConnectTimeout: as of httpcore.
        """
        deadline = trio.current_time() + (inf if timeout is None else timeout)
        found = await _resolve(host, port, deadline)
        permitted = [text for text in found if self._permits(host, ip_address(text))]
        if not permitted:
            raise AddressRefused(host, found)
        for left in range(len(permitted), 0, -1):
            share = max(0.0, deadline - trio.current_time()) / left
            try:
                return await self._tcp.connect_tcp(
                    permitted[-left], port, None if share == inf else share, local_address, socket_options
                )
            except (httpcore.ConnectError, httpcore.ConnectTimeout):
                if left == 1:
                    raise
        raise AssertionError("the last address neither connected nor failed")

    async def sleep(self, seconds: float) -> None:
        """As of httpcore."""
        await trio.sleep(seconds)


async def _resolve(host: str, port: int, deadline: float) -> list[str]:
    """The addresses of a host, in the order in which the system would try them."""
    try:
        with trio.fail_at(deadline):
            found = await trio.socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except trio.TooSlowError as error:
        raise httpcore.ConnectTimeout(f"{host} was not resolved in time") from error
    except (OSError, UnicodeError) as error:  # UnicodeError: a label is empty or too long
        raise httpcore.ConnectError(f"{host} cannot be resolved: {error}") from error
    return list(dict.fromkeys(_text(address) for *_, address in found))


def _text(address: tuple[object, ...]) -> str:
    """The address with its interface; a link-local address is not complete without it."""
    text = str(address[0])
    scope = address[3] if len(address) > 3 else 0
    return f"{text}%{scope}" if scope and "%" not in text else text


TARGETS = 10_000  # destinations whose parsed URL is kept

_HEX = re.compile(r"[0-9a-f]{1,64}")
_ALWAYS = (
    (b"accept", b"*/*"),
    (b"accept-encoding", b"identity"),
    (b"connection", b"keep-alive"),
    (b"user-agent", f"replicad/{version('replicad')}".encode()),
)
_JSON, _EVENT, _EVENTS = b"application/json", b"application/cloudevents+json", b"application/cloudevents-batch+json"


class TargetUrl(NamedTuple):
    """Where the requests for a destination go. `host`: ASCII, without brackets, in lower case."""

    scheme: bytes
    host: bytes
    port: int | None
    path: bytes
    headers: tuple[tuple[bytes, bytes], ...]

    @property
    def name(self) -> str:
        """The host as patterns name it: without the dot at its end."""
        return self.host.decode("ascii").lower().rstrip(".")


class RequestBuilder:
    """Makes requests in the form of the settings. `now_ms`: the wall clock, for signatures."""

    def __init__(self, settings: Delivery, now_ms: Callable[[], int]) -> None:
        self._settings = settings
        self._now_ms = now_ms
        self._method = "PUT" if settings.form == MATRIX else "POST"
        self.names_host = settings.url.startswith("{destination}") or "://{destination}" in settings.url
        self._place = token_hex(16)  # stands for the id of a transaction in a URL that is kept
        self._kept = lru_cache(TARGETS)(self._parse)
        self._timeouts = {
            "connect": settings.destination_timeout,
            "read": settings.request_timeout,
            "write": settings.request_timeout,
            "pool": settings.request_timeout,
        }

    def url(self, destination: str, transaction: str) -> str:
        """The URL for a transaction of a destination. A name in the path is quoted."""
        name = destination if self.names_host else quote(destination, safe="")
        return self._settings.url.replace("{transaction}", transaction).replace("{destination}", name)

    def target(self, destination: str, transaction: str) -> TargetUrl:
        """The parsed URL. Raises httpx.InvalidURL, UnicodeError."""
        kept = self._kept(destination, self._place)
        place = self._place.encode()
        if place in kept.host or not _HEX.fullmatch(transaction):
            return self._parse(destination, transaction)
        return kept._replace(path=kept.path.replace(place, transaction.encode()))

    def parents(self, transaction: Transaction) -> list[str]:
        """The traceparents of the facts of a transaction, in their order."""
        return [parent for parent in map(self._traceparent, transaction.pdus) if parent is not None]

    def make(
        self, destination: str, transaction: Transaction, target: TargetUrl, traceparent: str | None = None
    ) -> httpcore.Request:
        """The request; `target` is that of the destination and the transaction."""
        settings = self._settings
        content_type, body = self._content(transaction)
        name = transaction.id.encode()
        headers = [
            *target.headers,
            *_ALWAYS,
            (b"content-type", content_type),
            (b"content-length", str(len(body)).encode()),
            (signing.TRANSACTION_HEADER.encode(), name),
            (signing.TIME_HEADER.encode(), str(transaction.ts).encode()),
        ]
        if settings.form != MATRIX:
            headers.append((b"idempotency-key", name))
        if traceparent is not None:
            headers.append((b"traceparent", traceparent.encode()))
        if settings.secrets.federation_secret is not None:
            headers += self._proof(settings.secrets.federation_secret, destination, transaction, target, body)
        return httpcore.Request(
            self._method,
            httpcore.URL(scheme=target.scheme, host=target.host, port=target.port, target=target.path),
            headers=headers,
            content=body,
            extensions={"timeout": self._timeouts},
        )

    def _proof(
        self, master: str, destination: str, transaction: Transaction, target: TargetUrl, body: bytes
    ) -> list[tuple[bytes, bytes]]:
        secret = signing.derive(master, destination)
        if self._settings.sign == "bearer":
            return [(b"authorization", f"Bearer {secret}".encode())]
        if self._settings.sign == "standard":
            seconds = self._now_ms() // 1000
            made = signing.sign_standard(secret, transaction=transaction.id, sent=seconds, body=body)
            found = {
                signing.STANDARD_ID: transaction.id,
                signing.STANDARD_TIME: str(seconds),
                signing.STANDARD_SIGNATURE: made,
            }
            return [(name.encode(), value.encode()) for name, value in found.items()]
        made = signing.sign(
            secret,
            destination=destination,
            method=self._method,
            target=target.path.decode("ascii"),
            transaction=transaction.id,
            ts=transaction.ts,
            sent=self._now_ms(),
            body=body,
        )
        return [(signing.SIGNATURE_HEADER.encode(), made.encode())]

    def _parse(self, destination: str, transaction: str) -> TargetUrl:
        url = httpx.URL(self.url(destination, transaction))
        headers: tuple[tuple[bytes, bytes], ...] = ((b"host", url.netloc),)
        if url.userinfo and self._settings.sign != "bearer":
            user = f"{url.username}:{url.password}".encode()
            headers = (*headers, (b"authorization", b"Basic " + b64encode(user)))
        return TargetUrl(url.raw_scheme, url.raw_host, url.port, url.raw_path, headers)

    def _content(self, transaction: Transaction) -> tuple[bytes, bytes]:
        """The type of the content, and the content: always the same for a transaction."""
        settings = self._settings
        if settings.form in (CLOUDEVENTS, CLOUDEVENTS_BATCH):
            events = self._events(transaction)
            # Facts that stand for one another are delivered together, and so is what was stored for another form.
            if settings.form == CLOUDEVENTS and len(events) == 1:
                return _EVENT, events[0].encode()
            return _EVENTS, f"[{','.join(events)}]".encode()
        pdus, edus = ",".join(transaction.pdus), ",".join(transaction.edus)
        if settings.form == MATRIX:
            origin = json.dumps(settings.origin)
            text = f'{{"origin":{origin},"origin_server_ts":{transaction.ts},"pdus":[{pdus}],"edus":[{edus}]}}'
        else:
            text = f'{{"transaction":"{transaction.id}","ts":{transaction.ts},"facts":[{pdus}],"updates":[{edus}]}}'
        return _JSON, text.encode()

    def _events(self, transaction: Transaction) -> list[str]:
        """CloudEvents 1.0, in the JSON form. The id of the only event is that of the transaction."""
        made = datetime.fromtimestamp(transaction.ts / 1000, UTC).isoformat(timespec="milliseconds")
        events = [self._fact_event(body, made) for body in transaction.pdus]
        events += [(UPDATE_TYPE, f'"time":"{made}",', body) for body in transaction.edus]
        return [
            f'{{"specversion":"1.0","id":"{transaction.id}{f"-{number}" if len(events) > 1 else ""}",'
            f'"source":{json.dumps(self._settings.event_source)},"type":{json.dumps(kind)},{attributes}'
            f'"datacontenttype":"application/json",{self._extension(data)}"data":{data}}}'
            for number, (kind, attributes, data) in enumerate(events)
        ]

    def _fact_event(self, body: str, made: str) -> tuple[str, str, str]:
        """Type, further attributes and data of a fact: a row as it is, or a change of a table (docs/changes.md)."""
        change = _members_of_change(body)
        if change is None:
            return self._settings.event_type or FACT_TYPE, f'"time":"{made}",', body
        op = CHANGES[json.loads(change["op"])]
        subject = f'"subject":{json.dumps(_key_text(change["key"]))},' if "key" in change else ""
        data = {"op": json.dumps(op), "key": change.get("key"), "new": change.get("row"), "old": change.get("old")}
        data |= {"schema": change["schema"], "xid": change["xid"]}
        text = ",".join(f'"{name}":{value}' for name, value in data.items() if value is not None)
        return f"{self._settings.event_type or CHANGE_TYPE}.{op}", f'{subject}"time":{change["at"]},', f"{{{text}}}"

    def _extension(self, body: str) -> str:
        """The attribute of the extension Distributed Tracing of CloudEvents."""
        parent = self._traceparent(body)
        return "" if parent is None else f'"traceparent":"{parent}",'

    def _traceparent(self, body: str) -> str | None:
        """The traceparent of a fact; None where it has none that W3C Trace Context allows.

        A row that names no trace is sent without one, as a request without the header is served.
        """
        if not self._settings.traceparent:
            return None
        fact = json.loads(body)
        if isinstance(fact, dict) and self._settings.traceparent not in fact:
            fact = fact.get("row") or fact.get("new")  # of a change
        value = fact.get(self._settings.traceparent) if isinstance(fact, dict) else None
        return value if isinstance(value, str) and TRACEPARENT.fullmatch(value) else None


def _members_of_change(body: str) -> dict[str, str] | None:
    """The members of a change of a table as they are written, so that numbers keep their digits. None: it is none."""
    if not body.startswith("{"):
        return None
    found: dict[str, str] = {}
    at = _after_blanks(body, 1)
    while body[at] != "}":
        name, at = _DECODER.raw_decode(body, at)
        if name not in _OF_CHANGE:
            return None
        begin = _after_blanks(body, _after_blanks(body, at) + 1)  # behind the colon
        _, at = _DECODER.raw_decode(body, begin)
        found[name] = body[begin:at]
        at = _after_blanks(body, at)
        if body[at] == ",":
            at = _after_blanks(body, at + 1)
    whole = {"op", "schema", "xid", "at"} <= found.keys()
    return found if whole and found["op"].strip('"') in CHANGES else None


def _after_blanks(body: str, at: int) -> int:
    while body[at] in " \t\r\n":
        at += 1
    return at


def _key_text(key: str) -> str:
    """The key of a row as the subject of an event: the value, or JSON of several."""
    value = json.loads(key)
    return value if isinstance(value, str) else key


UPDATE_TYPE = "replicad.update"  # the type of CloudEvents of updates
FACT_TYPE = "replicad.fact"  # of rows, if no other is set
CHANGE_TYPE = "replicad.change"  # of changes of a table, with a point and the operation behind it
CHANGES = {op.value[0]: op.value for op in ChangeOp}
_OF_CHANGE = frozenset({"op", "key", "row", "old", "schema", "xid", "at"})
_DECODER = json.JSONDecoder()
POOLS = 16  # of connections: the time that one takes to find a connection grows with the square of how many it has
MAX_NAME = 1000  # bytes of a destination's name; it is part of the keys of tables
MAX_ANSWER = 64 << 10  # bytes of an answer's body that are read, to keep the connection
ANSWER_TIME = 5.0  # seconds, likewise
KEEP_IDLE = 30.0  # seconds for which an unused connection is kept

_HOST = re.compile(r"(?:[A-Za-z0-9_](?:[A-Za-z0-9._-]{0,252})|\[[0-9A-Fa-f:.]{2,45}\])(?::[0-9]{1,5})?")
_PLAIN = re.compile(r"[!-~]+")
_REFUSED = frozenset({400, 413, 414, 415, 422, 431})  # the request itself is refused; a repeat would be refused too
OWN = "it is the name of this server"
_REASON = 200  # characters of a reason that are kept


@dataclass(frozen=True, slots=True)
class SendResult:
    """How a request ended. `refused`: the destination will never accept it. `forbidden`: the settings forbid to send
    it, and nothing was sent. `retry_after`: the pause that the destination asks for, in seconds.
    """

    delivered: bool
    reason: str
    refused: bool = False
    retry_after: float = 0.0
    forbidden: bool = False


class HttpTransport:
    """Delivers transactions, any number at the same time. Made by `open_transport`."""

    def __init__(
        self,
        pools: Sequence[httpcore.AsyncConnectionPool],
        settings: Delivery,
        *,
        now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
    ) -> None:
        self._pools = pools
        self._settings = settings
        self._requests = RequestBuilder(settings, now_ms)
        self._allowed = [glob(pattern) for pattern in settings.allow_destinations]
        self._http = AllowedHosts(settings.allow_http)

    def objection(self, destination: str) -> str | None:
        """The reason why no item is ever kept for a destination of that name, or None.

        A name must be valid at its place in the URL, not our own, and allowed.
        """
        if destination == self._settings.origin:
            return OWN
        if not self._is_name(destination):
            return "it is not the name of a destination"
        return self._outside(destination)

    def _is_name(self, destination: str) -> bool:
        if len(destination.encode()) > MAX_NAME:
            return False
        if self._settings.url.startswith("{destination}"):
            return _is_url(destination)
        if "://{destination}" in self._settings.url:
            return _HOST.fullmatch(destination) is not None and _is_url(f"http://{destination}")
        return bool(destination)

    async def send(self, destination: str, transaction: Transaction) -> SendResult:
        """Deliver a transaction within the request's time-out. A failure is an outcome, not an exception."""
        try:
            target = self._requests.target(destination, transaction.id)
        except (httpx.InvalidURL, UnicodeError) as error:
            return SendResult(False, _reason("url", error), refused=True)
        forbidden = self._outside(destination) or self._unprotected(target)
        if forbidden is not None:
            return SendResult(False, forbidden[:_REASON], forbidden=True)
        parents = self._requests.parents(transaction)
        about = {"server.address": target.name, "replicad.transaction": transaction.id}
        with span("replicad deliver", "CLIENT", about, parents) as opened:
            traceparent = opened.traceparent or next(iter(parents), None)
            result = await self._deliver(
                destination, self._requests.make(destination, transaction, target, traceparent)
            )
            if not result.delivered:
                opened.fail(result.reason)
        return result

    async def _deliver(self, destination: str, request: httpcore.Request) -> SendResult:
        outcome: SendResult | None = None
        with trio.move_on_after(self._settings.request_timeout):
            try:
                response = await self._pool(destination).handle_async_request(request)
                outcome = _judge(response)
                await _drain(response)
            except AddressRefused as error:
                return SendResult(False, f"{error}; --allow-private can name it"[:_REASON], forbidden=True)
            except FAILURES as error:
                outcome = outcome or SendResult(False, _reason("request", error))
        return outcome or SendResult(False, f"no answer within {self._settings.request_timeout:g} s")

    def _outside(self, destination: str) -> str | None:
        """Why the list of allowed destinations does not hold this one, or None."""
        if not self._allowed:
            return None
        name = destination
        if self._requests.names_host:
            try:
                name = self._requests.target(destination, "0").name
            except (httpx.InvalidURL, UnicodeError):
                return "it has no host that can be allowed"
        if any(pattern.fullmatch(name) for pattern in self._allowed):
            return None
        return "--allow-destinations does not name it"

    def _unprotected(self, target: TargetUrl) -> str | None:
        """Why nothing that is made with the secret may be sent there, or None."""
        if self._settings.secrets.federation_secret is None or target.scheme == b"https":
            return None
        if self._http.name(target.name):
            return None
        remedy = f"use https://, or name {target.name} in --allow-http"
        return f"http:// does not protect secrets and signatures; {remedy}"

    def _pool(self, destination: str) -> httpcore.AsyncConnectionPool:
        return self._pools[crc32(destination.encode()) % len(self._pools)]


@asynccontextmanager
async def open_transport(settings: Delivery) -> AsyncIterator[HttpTransport]:
    """A transport with its own bounded set of connections, which are closed at the end.

    Raises UsageError if the certificates to trust cannot be read.
    """
    most = settings.concurrency + max(2, settings.probes)  # requests at a time; there are as many workers (`lanes`)
    idle = math.ceil(most / POOLS)
    trusted = settings.ssl_context()
    private = AllowedHosts(settings.allow_private)

    def permits(host: str, address: Address) -> bool:
        return is_public(address) or private.name(host.lower().rstrip(".")) or private.hold(address)

    async with AsyncExitStack() as stack:
        pools = [
            await stack.enter_async_context(
                httpcore.AsyncConnectionPool(
                    ssl_context=trusted,
                    max_connections=most,
                    max_keepalive_connections=idle,
                    keepalive_expiry=KEEP_IDLE,
                    network_backend=CheckedBackend(permits),
                )
            )
            for _ in range(POOLS)
        ]
        yield HttpTransport(pools, settings)


def _is_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        port = parts.port  # raises if it is not a port
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and bool(parts.hostname) and port != 0 and bool(_PLAIN.fullmatch(text))


def _judge(response: httpcore.Response) -> SendResult:
    status = response.status
    wait = next((value for name, value in response.headers if name.lower() == b"retry-after"), b"")
    return SendResult(
        delivered=200 <= status < 300,
        reason=f"status {status}",
        refused=status in _REFUSED,
        retry_after=_seconds(wait.decode("ascii", "replace"), time.time()) if wait else 0.0,
    )


def _seconds(wait: str, now: float) -> float:
    """The pause that a Retry-After asks for (RFC 9110, 10.2.3): seconds, also with a fraction, or a date. Else 0."""
    if re.fullmatch(r"[0-9]{1,7}(\.[0-9]{0,9})?", wait):
        return float(wait)
    try:
        found = parsedate_to_datetime(wait)
        return max(0.0, (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp() - now)
    except (TypeError, ValueError, OverflowError):
        return 0.0


async def _drain(response: httpcore.Response) -> None:
    """Read the rest of a short answer and close it. With a longer answer the connection is dropped."""
    received = 0
    try:
        with trio.move_on_after(ANSWER_TIME):
            async for chunk in response.aiter_stream():
                received += len(chunk)
                if received > MAX_ANSWER:
                    break
    finally:
        await response.aclose()


def _reason(what: str, error: Exception) -> str:
    text = f"{type(error).__name__}: {error}".rstrip(": ")
    return f"{what} failed, {text}"[:_REASON]
