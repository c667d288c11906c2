"""Connects to destinations, and only to addresses that were checked.

A name is resolved once for each connection. The addresses that it has are checked, and the connection is made to one
that passed. So a name that resolves to another address a moment later changes nothing. TLS still checks the name.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable
from ipaddress import ip_address
from math import inf

import httpcore
import trio

from replicad.sender.reach import Address

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
    """The address with its interface, without which a link-local one is not complete."""
    text = str(address[0])
    scope = address[3] if len(address) > 3 else 0
    return f"{text}%{scope}" if scope and "%" not in text else text
