"""Sends one transaction as one HTTP request and returns the outcome. `engine` has the queues and retries.

A transaction always becomes the same request, but for the signature: it has the time of the try in it. Only the status
of the answer decides whether it was accepted. A little of the body is read, for a short time, so that the connection
can be used again. Redirects are not followed, and cookies are not kept.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import UTC
from email.utils import parsedate_to_datetime
from typing import Protocol
from urllib.parse import urlsplit
from zlib import crc32

import httpcore
import httpx
import trio

from replicad.sender.connecting import FAILURES, AddressRefused, CheckedBackend
from replicad.sender.items import Transaction
from replicad.sender.reach import Address, Places, glob, is_public
from replicad.sender.requests import Requests, Target
from replicad.sender.settings import Delivery

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


class Transport(Protocol):
    """Delivers transactions; any number at the same time."""

    def objection(self, destination: str) -> str | None:
        """Why nothing is ever kept for a destination of that name, or None."""

    async def send(self, destination: str, transaction: Transaction) -> SendResult:
        """Deliver a transaction. A failure is an outcome, not an exception."""


class HttpTransport:
    """See the module. Made by `open_transport`."""

    def __init__(
        self,
        pools: Sequence[httpcore.AsyncConnectionPool],
        settings: Delivery,
        *,
        now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
    ) -> None:
        self._pools = pools
        self._settings = settings
        self._requests = Requests(settings, now_ms)
        self._allowed = [glob(pattern) for pattern in settings.allow_destinations]
        self._http = Places(settings.allow_http)

    def objection(self, destination: str) -> str | None:
        """See Transport. A name must be valid at its place in the URL, not our own, and allowed."""
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
        """See Transport. Takes no longer than the request's time-out."""
        try:
            target = self._requests.target(destination, transaction.id)
        except (httpx.InvalidURL, UnicodeError) as error:
            return SendResult(False, _reason("url", error), refused=True)
        forbidden = self._outside(destination) or self._unprotected(target)
        if forbidden is not None:
            return SendResult(False, forbidden[:_REASON], forbidden=True)
        request = self._requests.make(destination, transaction, target)
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

    def _unprotected(self, target: Target) -> str | None:
        """Why nothing that is made with the secret may be sent there, or None."""
        if self._settings.secrets.federation_secret is None or target.scheme == b"https":
            return None
        if self._http.name(target.name):
            return None
        remedy = f"use https://, or name {target.name} in --allow-http"
        return f"http:// does not protect what is made with the secret; {remedy}"

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
    private = Places(settings.allow_private)

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
    said = f"{type(error).__name__}: {error}".rstrip(": ")
    return f"{what} failed, {said}"[:_REASON]
