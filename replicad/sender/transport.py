"""Sends one transaction as one HTTP request and returns the outcome. `engine` has the queues and retries.

A transaction always becomes the same request, but for the signature: it has the time of the try in it. Only the status
of the answer decides whether it was accepted. A little of the body is read, for a short time, so that the connection
can be used again. Redirects are not followed, and cookies are not kept.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import UTC
from email.utils import parsedate_to_datetime
from http.cookiejar import CookieJar, DefaultCookiePolicy
from importlib.metadata import version
from typing import Protocol
from urllib.parse import quote, urlsplit
from zlib import crc32

import httpcore
import httpx
import trio

from replicad.sender import signing
from replicad.sender.connecting import FAILURES, AddressRefused, CheckedBackend, CheckedTransport
from replicad.sender.items import Transaction
from replicad.sender.reach import Address, Places, glob, is_public
from replicad.sender.settings import MATRIX, Delivery

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
        clients: Sequence[httpx.AsyncClient],
        settings: Delivery,
        *,
        now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
    ) -> None:
        self._clients = clients
        self._settings = settings
        self._now_ms = now_ms
        self._method = "PUT" if settings.form == MATRIX else "POST"
        self._names_host = settings.url.startswith("{destination}") or "://{destination}" in settings.url
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

    def url(self, destination: str, transaction: str) -> str:
        """The URL for a transaction of a destination. A name in the path is quoted."""
        template = self._settings.url
        name = destination if self._names_host else quote(destination, safe="")
        return template.replace("{transaction}", transaction).replace("{destination}", name)

    def request(self, destination: str, transaction: Transaction) -> httpx.Request:
        """The request that a transaction becomes. Raises httpx.InvalidURL."""
        body = self._body(transaction)
        headers = {
            "content-type": "application/json",
            signing.TRANSACTION_HEADER: transaction.id,
            signing.TIME_HEADER: str(transaction.ts),
        }
        if self._settings.form != MATRIX:
            headers["idempotency-key"] = transaction.id
        request = self._client(destination).build_request(
            self._method, self.url(destination, transaction.id), content=body, headers=headers
        )
        master = self._settings.secrets.federation_secret
        if master is None:
            return request
        secret = signing.derive(master, destination)
        if self._settings.sign == "bearer":
            request.headers["authorization"] = f"Bearer {secret}"
        else:
            request.headers[signing.SIGNATURE_HEADER] = signing.sign(
                secret,
                destination=destination,
                method=self._method,
                target=request.url.raw_path.decode("ascii"),
                transaction=transaction.id,
                ts=transaction.ts,
                sent=self._now_ms(),
                body=body,
            )
        return request

    async def send(self, destination: str, transaction: Transaction) -> SendResult:
        """See Transport. Takes no longer than the request's time-out."""
        try:
            request = self.request(destination, transaction)
        except (httpx.InvalidURL, UnicodeError) as error:
            return SendResult(False, _reason("url", error), refused=True)
        forbidden = self._outside(destination) or self._unprotected(request.url)
        if forbidden is not None:
            return SendResult(False, forbidden[:_REASON], forbidden=True)
        outcome: SendResult | None = None
        with trio.move_on_after(self._settings.request_timeout):
            try:
                response = await self._client(destination).send(request, stream=True)
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
        if self._names_host:
            try:
                name = _host(httpx.URL(self.url(destination, "0")))
            except (httpx.InvalidURL, UnicodeError):
                return "it has no host that can be allowed"
        if any(pattern.fullmatch(name) for pattern in self._allowed):
            return None
        return "--allow-destinations does not name it"

    def _unprotected(self, url: httpx.URL) -> str | None:
        """Why nothing that is made with the secret may be sent there, or None."""
        if self._settings.secrets.federation_secret is None or url.scheme == "https" or self._http.name(_host(url)):
            return None
        return (
            f"http:// does not protect what is made with the secret; use https://, or name {_host(url)} in --allow-http"
        )

    def _client(self, destination: str) -> httpx.AsyncClient:
        return self._clients[crc32(destination.encode()) % len(self._clients)]

    def _body(self, transaction: Transaction) -> bytes:
        pdus, edus = ",".join(transaction.pdus), ",".join(transaction.edus)
        if self._settings.form == MATRIX:
            origin = json.dumps(self._settings.origin)
            text = f'{{"origin":{origin},"origin_server_ts":{transaction.ts},"pdus":[{pdus}],"edus":[{edus}]}}'
        else:
            text = f'{{"transaction":"{transaction.id}","ts":{transaction.ts},"facts":[{pdus}],"updates":[{edus}]}}'
        return text.encode()


@asynccontextmanager
async def open_transport(settings: Delivery) -> AsyncIterator[HttpTransport]:
    """A transport with its own bounded set of connections, which are closed at the end.

    Raises UsageError if the certificates to trust cannot be read.
    """
    most = settings.concurrency + settings.probes  # requests at a time; there are as many workers
    idle = math.ceil(most / POOLS)
    trusted = settings.ssl_context()
    private = Places(settings.allow_private)

    def permits(host: str, address: Address) -> bool:
        return is_public(address) or private.name(host.lower().rstrip(".")) or private.hold(address)

    async with AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(
                httpx.AsyncClient(
                    transport=CheckedTransport(
                        httpcore.AsyncConnectionPool(
                            ssl_context=trusted,
                            max_connections=most,
                            max_keepalive_connections=idle,
                            keepalive_expiry=KEEP_IDLE,
                            network_backend=CheckedBackend(permits),
                        )
                    ),
                    trust_env=False,
                    follow_redirects=False,
                    timeout=httpx.Timeout(settings.request_timeout, connect=settings.destination_timeout),
                    cookies=CookieJar(DefaultCookiePolicy(allowed_domains=[])),
                    headers={"user-agent": f"replicad/{version('replicad')}", "accept-encoding": "identity"},
                )
            )
            for _ in range(POOLS)
        ]
        yield HttpTransport(clients, settings)


def _is_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        port = parts.port  # raises if it is not a port
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and bool(parts.hostname) and port != 0 and bool(_PLAIN.fullmatch(text))


def _host(url: httpx.URL) -> str:
    """The host as patterns name it: ASCII, without brackets and the dot at its end."""
    return url.raw_host.decode("ascii").lower().rstrip(".")


def _judge(response: httpx.Response) -> SendResult:
    status = response.status_code
    wait = response.headers.get("retry-after", "")
    return SendResult(
        delivered=200 <= status < 300,
        reason=f"status {status}",
        refused=status in _REFUSED,
        retry_after=_seconds(wait, time.time()),
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


async def _drain(response: httpx.Response) -> None:
    """Read the rest of a short answer and close it. With a longer answer the connection is dropped."""
    received = 0
    try:
        with trio.move_on_after(ANSWER_TIME):
            async for chunk in response.aiter_raw():
                received += len(chunk)
                if received > MAX_ANSWER:
                    break
    finally:
        await response.aclose()


def _reason(what: str, error: Exception) -> str:
    said = f"{type(error).__name__}: {error}".rstrip(": ")
    return f"{what} failed, {said}"[:_REASON]
