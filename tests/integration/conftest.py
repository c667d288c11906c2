"""A real daemon in the test's own process, and somebody with netcat."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
import trio

from replicad.client.async_client import AsyncClient, open_client
from replicad.config.limits import Limits
from replicad.config.settings import Address, ServerSettings
from replicad.postgres.bridge import Database
from tests.conftest import PATIENCE
from tests.daemons import Daemon, Paces, open_daemon


class Netcat:
    """A TCP client that knows nothing: it sends what it is told to and waits for lines."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self.stream = stream
        self.lines: list[str] = []  # received and not expected yet
        self._rest = b""

    async def send(self, *lines: str) -> None:
        await self.send_bytes("".join(f"{line}\n" for line in lines).encode())

    async def send_bytes(self, data: bytes) -> None:
        await self.stream.send_all(data)

    async def line(self) -> str:
        """The next line, PINGs included."""
        with trio.fail_after(PATIENCE):
            while not self.lines:
                data = await self.stream.receive_some(65536)
                if not data:
                    raise EOFError(f"closed by the server; unfinished: {self._rest!r}")
                *whole, self._rest = (self._rest + data).split(b"\n")
                self.lines += [line.decode() for line in whole]
        return self.lines.pop(0)

    async def expect(self, *patterns: str) -> list[str]:
        """The next lines but PINGs, each of which must match its pattern in full."""
        found = []
        for pattern in patterns:
            [*_, line] = await self._told(".*", pings=False, wanted=pattern)
            assert re.fullmatch(pattern, line), f"expected {pattern!r}, got {line!r}"
            found.append(line)
        return found

    async def until(self, pattern: str) -> list[str]:
        """All lines up to and with the first that matches the pattern in full."""
        return await self._told(pattern, pings=True, wanted=pattern)

    async def _told(self, pattern: str, *, pings: bool, wanted: str) -> list[str]:
        """All lines up to and with the first that matches the pattern. `pings`: whether a PING may be it."""
        found: list[str] = []
        heard = trio.current_time()
        while True:
            found.append(await self.line())
            ping = found[-1].startswith("PING")
            if re.fullmatch(pattern, found[-1]) and (pings or not ping):
                return found
            heard = heard if ping else trio.current_time()
            assert trio.current_time() < heard + PATIENCE, f"nothing but PINGs, and no {wanted!r}; {found[-5:]}"

    async def expect_exactly(self, *lines: str) -> None:
        await self.expect(*map(re.escape, lines))

    async def expect_end(self) -> None:
        """The server closes, with nothing more than PINGs before it."""
        with pytest.raises(EOFError):
            await self.expect("")


Connect = Callable[[], AbstractAsyncContextManager[Netcat]]


@pytest.fixture
def settings() -> ServerSettings:
    return ServerSettings(listen=Address("127.0.0.1", 0), server_name="example.com")


@pytest.fixture
def paces() -> Paces:
    """How often the daemon does what. A module that wants other intervals replaces this fixture, a test parametrizes
    it.
    """
    return Paces()


@pytest.fixture
def start_daemon(
    settings: ServerSettings, database_url: str, paces: Paces
) -> Callable[..., AbstractAsyncContextManager[Daemon]]:
    """Start a daemon, with limits that differ from the defaults where they are given by name."""

    def start(paces: Paces = paces, **changes: Any) -> AbstractAsyncContextManager[Daemon]:
        limits = {name: value for name, value in changes.items() if hasattr(Limits(), name)}
        others = {name: value for name, value in changes.items() if name not in limits}
        made = replace(settings, limits=replace(settings.limits, **limits), **others)
        return open_daemon(made, database_url, paces=paces)

    return start


@pytest.fixture
async def daemon(
    start_daemon: Callable[..., AbstractAsyncContextManager[Daemon]], database: Database
) -> AsyncIterator[Daemon]:
    """A running daemon; asks for `database` so that it ends before the asyncio loop that they share."""
    async with start_daemon() as running:
        yield running


@asynccontextmanager
async def netcat_to(daemon: Daemon) -> AsyncIterator[Netcat]:
    address = daemon.addresses[0]
    async with await trio.open_tcp_stream(address.host, address.port) as stream:
        yield Netcat(stream)


@pytest.fixture
def netcat(daemon: Daemon) -> Connect:
    """Connect to the daemon."""
    return lambda: netcat_to(daemon)


@pytest.fixture
async def events(database: Database, daemon: Daemon) -> Database:
    """A table `events` that is the stream `events`; returns the database."""
    from replicad.streams.registry import Registry

    await database.execute("CREATE TABLE events (id bigserial PRIMARY KEY, instance_name text, body jsonb)")
    await Registry(database).add("events", "public.events", "id", row="body")
    await daemon.publisher.find("events")
    return database


OpenClient = Callable[[], AbstractAsyncContextManager[AsyncClient]]


@pytest.fixture
def open_worker_client(daemon: Daemon) -> OpenClient:
    """Opens a client of the daemon for a worker."""
    address = daemon.addresses[0]
    return lambda: open_client(address.host, address.port, name="worker")


@pytest.fixture
async def queue(database: Database, daemon: Daemon) -> Database:
    """A tube `queue` of one partition."""
    await database.execute("SELECT tube.tube_ensure_exists('queue')")
    return database


@pytest.fixture
async def items(database: Database, daemon: Daemon) -> Database:
    """A table `items` attached to the tube `items` of two partitions; even ids are in shard 0, odd ones in shard 1."""
    await database.execute("SELECT tube.tube_ensure_exists('items', 2)")
    await database.execute(
        "CREATE TABLE items (id bigint PRIMARY KEY, value int);"
        "SELECT tube.tube_table_ensure_attached('items', 'items', 0, routing => '(id % 2)::integer')"
    )
    return database
