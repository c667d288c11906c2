"""What a transaction becomes: one HTTP request. Pure.

It is made for httpcore, without the client of httpx: what that adds (cookies, redirects, proxies of the environment) is
not wanted here, and it took as much processor time as the rest of a delivery. URLs are those of httpx.
"""

from __future__ import annotations

import json
import re
from base64 import b64encode
from collections.abc import Callable
from functools import lru_cache
from importlib.metadata import version
from secrets import token_hex
from typing import NamedTuple
from urllib.parse import quote

import httpcore
import httpx

from replicad.sender import signing
from replicad.sender.items import Transaction
from replicad.sender.settings import MATRIX, Delivery

TARGETS = 10_000  # destinations whose parsed URL is kept

_HEX = re.compile(r"[0-9a-f]{1,64}")
_ALWAYS = (
    (b"accept", b"*/*"),
    (b"accept-encoding", b"identity"),
    (b"connection", b"keep-alive"),
    (b"user-agent", f"replicad/{version('replicad')}".encode()),
    (b"content-type", b"application/json"),
)


class Target(NamedTuple):
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


class Requests:
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

    def target(self, destination: str, transaction: str) -> Target:
        """The parsed URL. Raises httpx.InvalidURL, UnicodeError."""
        kept = self._kept(destination, self._place)
        place = self._place.encode()
        if place in kept.host or not _HEX.fullmatch(transaction):
            return self._parse(destination, transaction)
        return kept._replace(path=kept.path.replace(place, transaction.encode()))

    def make(self, destination: str, transaction: Transaction, target: Target) -> httpcore.Request:
        """The request; `target` is that of the destination and the transaction."""
        settings = self._settings
        body = self._body(transaction)
        name = transaction.id.encode()
        headers = [
            *target.headers,
            *_ALWAYS,
            (b"content-length", str(len(body)).encode()),
            (signing.TRANSACTION_HEADER.encode(), name),
            (signing.TIME_HEADER.encode(), str(transaction.ts).encode()),
        ]
        if settings.form != MATRIX:
            headers.append((b"idempotency-key", name))
        if settings.secrets.federation_secret is not None:
            headers.append(self._proof(settings.secrets.federation_secret, destination, transaction, target, body))
        return httpcore.Request(
            self._method,
            httpcore.URL(scheme=target.scheme, host=target.host, port=target.port, target=target.path),
            headers=headers,
            content=body,
            extensions={"timeout": self._timeouts},
        )

    def _proof(
        self, master: str, destination: str, transaction: Transaction, target: Target, body: bytes
    ) -> tuple[bytes, bytes]:
        secret = signing.derive(master, destination)
        if self._settings.sign == "bearer":
            return (b"authorization", f"Bearer {secret}".encode())
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
        return (signing.SIGNATURE_HEADER.encode(), made.encode())

    def _parse(self, destination: str, transaction: str) -> Target:
        url = httpx.URL(self.url(destination, transaction))
        headers: tuple[tuple[bytes, bytes], ...] = ((b"host", url.netloc),)
        if url.userinfo and self._settings.sign != "bearer":
            user = f"{url.username}:{url.password}".encode()
            headers = (*headers, (b"authorization", b"Basic " + b64encode(user)))
        return Target(url.raw_scheme, url.raw_host, url.port, url.raw_path, headers)

    def _body(self, transaction: Transaction) -> bytes:
        pdus, edus = ",".join(transaction.pdus), ",".join(transaction.edus)
        if self._settings.form == MATRIX:
            origin = json.dumps(self._settings.origin)
            text = f'{{"origin":{origin},"origin_server_ts":{transaction.ts},"pdus":[{pdus}],"edus":[{edus}]}}'
        else:
            text = f'{{"transaction":"{transaction.id}","ts":{transaction.ts},"facts":[{pdus}],"updates":[{edus}]}}'
        return text.encode()
