"""Sends one transaction as one HTTP request and returns the outcome. `engine` has the queues and retries.

A transaction always becomes the same request, byte for byte. Only the status of the answer decides whether it was
accepted. A little of the body is read, for a short time, so that the connection can be used again.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from importlib.metadata import version
from typing import Protocol
from urllib.parse import quote, urlsplit
from zlib import crc32

import httpx
import trio

from replicad.sender import signing
from replicad.sender.items import Transaction
from replicad.sender.settings import MATRIX, Delivery

POOLS = 16  # of connections: the time that one takes to find a connection grows with the square of how many it has
MAX_NAME = 1000  # bytes of a destination's name; it is part of the keys of tables
MAX_ANSWER = 64 << 10  # bytes of an answer's body that are read, to keep the connection
ANSWER_TIME = 5.0  # seconds, likewise
KEEP_IDLE = 30.0  # seconds for which an unused connection is kept

_HOST = re.compile(r"(?:[A-Za-z0-9_](?:[A-Za-z0-9._-]{0,252})|\[[0-9A-Fa-f:.]{2,45}\])(?::[0-9]{1,5})?")
_PLAIN = re.compile(r"[!-~]+")
_REFUSED = frozenset({400, 413, 414, 415, 422, 431})  # the request itself is refused; a repeat would be refused too
_REASON = 200  # characters of a reason that are kept


@dataclass(frozen=True, slots=True)
class SendResult:
    """How a request ended. `refused`: the destination will never accept it. `retry_after`: the pause it asks for,
    in seconds.
    """

    delivered: bool
    reason: str
    refused: bool = False
    retry_after: float = 0.0


class Transport(Protocol):
    """Delivers transactions; any number at the same time."""

    def accepts(self, destination: str) -> bool:
        """Whether a name is valid for a destination."""

    async def send(self, destination: str, transaction: Transaction) -> SendResult:
        """Deliver a transaction. A failure is an outcome, not an exception."""


class HttpTransport:
    """See the module. Made by `open_transport`."""

    def __init__(self, clients: Sequence[httpx.AsyncClient], settings: Delivery) -> None:
        self._clients = clients
        self._settings = settings
        self._method = "PUT" if settings.form == MATRIX else "POST"

    def accepts(self, destination: str) -> bool:
        """Whether a name is valid at its place in the URL, and is not our own name."""
        if destination == self._settings.origin or len(destination.encode()) > MAX_NAME:
            return False
        if self._settings.url.startswith("{destination}"):
            return _is_url(destination)
        if "://{destination}" in self._settings.url:
            return _HOST.fullmatch(destination) is not None and _is_url(f"http://{destination}")
        return bool(destination)

    def url(self, destination: str, transaction: str) -> str:
        """The URL for a transaction of a destination. A name in the path is quoted."""
        template = self._settings.url
        plain = template.startswith("{destination}") or "://{destination}" in template
        name = destination if plain else quote(destination, safe="")
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
        secret = self._settings.federation_secret
        if secret is not None and self._settings.sign == "bearer":
            request.headers["authorization"] = f"Bearer {secret}"
        elif secret is not None:
            request.headers[signing.SIGNATURE_HEADER] = signing.sign(
                secret,
                method=self._method,
                target=request.url.raw_path.decode("ascii"),
                transaction=transaction.id,
                ts=transaction.ts,
                body=body,
            )
        return request

    async def send(self, destination: str, transaction: Transaction) -> SendResult:
        """See Transport. Takes no longer than the request's time-out."""
        try:
            request = self.request(destination, transaction)
        except (httpx.InvalidURL, UnicodeError) as error:
            return SendResult(False, _reason("url", error), refused=True)
        outcome: SendResult | None = None
        with trio.move_on_after(self._settings.request_timeout):
            try:
                response = await self._client(destination).send(request, stream=True)
                outcome = _judge(response)
                await _drain(response)
            except (httpx.HTTPError, httpx.StreamError, OSError) as error:
                outcome = outcome or SendResult(False, _reason("request", error))
        return outcome or SendResult(False, f"no answer within {self._settings.request_timeout:g} s")

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
    async with AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(
                httpx.AsyncClient(
                    verify=trusted,
                    trust_env=False,
                    follow_redirects=False,
                    timeout=httpx.Timeout(settings.request_timeout, connect=settings.destination_timeout),
                    limits=httpx.Limits(
                        max_connections=most, max_keepalive_connections=idle, keepalive_expiry=KEEP_IDLE
                    ),
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


def _judge(response: httpx.Response) -> SendResult:
    status = response.status_code
    wait = response.headers.get("retry-after", "")
    return SendResult(
        delivered=200 <= status < 300,
        reason=f"status {status}",
        refused=status in _REFUSED,
        retry_after=float(wait) if re.fullmatch(r"[0-9]{1,7}", wait) else 0.0,
    )


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
