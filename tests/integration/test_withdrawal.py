"""Access that is withdrawn at any moment of a request: nothing that is written afterwards reaches the client.

New rights are given to all connections in one step of a task. So a client can meet that only between two steps of the
tasks that serve it, and the tests do it between each two of them.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, suppress
from hashlib import sha256
from itertools import count, cycle
from pathlib import Path

import pytest
import trio
import trio.testing

from replicad.config.browser_tokens import Claims, sign
from replicad.config.settings import ServerSettings
from replicad.daemon.access import Guesses
from replicad.postgres.bridge import Database
from tests.conftest import PATIENCE
from tests.daemons import Daemon
from tests.lengths import first

from .test_access_reload import Authority
from .test_http import ANY_PORT, SECRET

Start = Callable[..., AbstractAsyncContextManager[Daemon]]
MOST = 400  # steps of a request, which takes some tens

KNOWN = f'token_sha256 = "{sha256(SECRET.encode()).hexdigest()}"\ncertificate = "spiffe://corp/ops"'
RIGHTS = 'allow = ["read events", "status"]'
BEFORE = f"[client.ops]\n{KNOWN}\n{RIGHTS}\n"
WAYS = {
    "removed": '[client.other]\ncertificate = "x"\nallow = ["*"]\n',
    "other secret and certificate": f'[client.ops]\ncertificate = "x"\n{RIGHTS}\n',
    "other addresses": f'[client.ops]\n{KNOWN}\nfrom = ["10.0.0.0/8"]\n{RIGHTS}\n',
    "other rights": f'[client.ops]\n{KNOWN}\nallow = ["status"]\n',
}
WORD = f"ops.{SECRET}"


def get(path: str, word: str = "") -> bytes:
    proof = f"authorization: bearer {word}\r\n" if word else ""
    return f"GET {path} HTTP/1.1\r\nhost: localhost\r\n{proof}connection: close\r\n\r\n".encode()


DOORS = {
    "TCP": (False, f"AUTH {WORD}\nREPLICATE events NOW\n".encode(), b"POSITION"),
    "TCP, old rows": (False, f"AUTH {WORD}\nREPLICATE events EARLIEST\n".encode(), b"RDATA"),
    "server-sent events": (True, get("/streams/events/live", WORD), b"event: position"),
    "pages": (True, get("/streams/events/rows", WORD), b"\r\n\r\n"),
}
BY_CERTIFICATE = {
    "TCP": (False, b"REPLICATE events NOW\n", b"POSITION"),
    "server-sent events": (True, get("/streams/events/live"), b"event: position"),
}


class BetweenSteps(trio.abc.Instrument):
    """Calls `act` before one step of the tasks that began later than this."""

    def __init__(self, number: int, act: Callable[[], None]) -> None:
        self._left = number
        self._act = act
        self._tasks: set[object] = set()

    def task_spawned(self, task: trio.lowlevel.Task) -> None:
        self._tasks.add(task)

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        if task in self._tasks:
            self._left -= 1
            if self._left == 0:
                self._act()


class Attempt:
    """One request, during which the access is withdrawn."""

    def __init__(self, stream: trio.abc.Stream, until: bytes) -> None:
        self.stream = stream
        self.received = b""
        self.over = trio.Event()  # the access was withdrawn, or the answer has begun before
        self.withdrawn = False
        self.ended = trio.Event()
        self._until = until

    async def read(self) -> None:
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            while data := await self.stream.receive_some(65536):
                self.received += data
                if self._until in self.received:
                    self.over.set()
        self.over.set()
        self.ended.set()


@pytest.fixture
def settings() -> ServerSettings:
    return ServerSettings(listen=ANY_PORT, http=ANY_PORT, server_name="example.com")


async def sweep(
    daemon: Daemon,
    events: Database,
    write: Callable[[str], object],
    connect: Callable[[], AbstractAsyncContextManager[trio.abc.Stream]],
    request: bytes,
    until: bytes,
    before: str = BEFORE,
    ways: Mapping[str, str] = WAYS,
) -> int:
    """Withdraw the access before each step, in turn in each way, until the answer begins before; how often that was."""
    turns = cycle(ways.items())
    feed = await daemon.publisher.find("events")
    late = 0
    for number in count(1):
        assert number < MOST
        name, way = next(turns)
        write(before)
        assert await daemon.reload()
        write(way)
        async with connect() as stream, trio.open_nursery() as nursery:
            attempt = Attempt(stream, until)
            nursery.start_soon(attempt.read)
            await trio.testing.wait_all_tasks_blocked()

            def withdraw(attempt: Attempt = attempt) -> None:
                daemon.access.replace(daemon.access.read_file(), daemon.access.read_browsers())
                attempt.withdrawn = True
                attempt.over.set()

            between = BetweenSteps(number, withdraw)
            trio.lowlevel.add_instrument(between)
            try:
                await stream.send_all(request)
                with trio.fail_after(PATIENCE):
                    await attempt.over.wait()
            finally:
                trio.lowlevel.remove_instrument(between)
            if not attempt.withdrawn:
                late += 1
                nursery.cancel_scope.cancel()
            else:
                mark = f"written-after-withdrawal-{number}."  # caches keep the rows of earlier ones
                insert = "INSERT INTO events (body) VALUES (to_jsonb($1::text)) RETURNING id"
                id = await events.fetch_value(insert, mark)
                with trio.fail_after(PATIENCE):
                    while feed.sent_upto < id:
                        await feed.channel.wait_sealed()
                    if isinstance(stream, trio.SocketStream):
                        with suppress(trio.BrokenResourceError):
                            await stream.send_eof()
                        await attempt.ended.wait()
                    elif name != "other rights":
                        await attempt.ended.wait()
                    nursery.cancel_scope.cancel()
                assert mark.encode() not in attempt.received, f"{name}, before step {number}: {attempt.received!r}"
        if late == len(ways):
            return number
    raise AssertionError


@pytest.fixture
def without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Guesses, "reserve", lambda *_: 0.0)


@pytest.mark.parametrize("door", first(3, ("TCP", "server-sent events", "pages", "TCP, old rows")))
@pytest.mark.usefixtures("without_pauses")
async def test_a_client_whose_access_is_withdrawn_at_any_step_is_sent_nothing_that_is_written_later(
    door: str, events: Database, start_daemon: Start, tmp_path: Path
) -> None:
    over_http, request, until = DOORS[door]
    await events.execute("INSERT INTO events (body) VALUES ('1')")
    file = tmp_path / "access.toml"
    file.touch(0o600)
    file.write_text(BEFORE)
    async with start_daemon(access_file=file) as daemon:
        address = daemon.http if over_http else daemon.addresses[0]
        assert address is not None

        def connect() -> AbstractAsyncContextManager[trio.abc.Stream]:
            return _Connected(address.host, address.port)

        assert await sweep(daemon, events, file.write_text, connect, request, until) > len(WAYS)


@pytest.mark.parametrize("door", first(1, BY_CERTIFICATE))
async def test_the_same_for_a_client_that_is_known_by_its_certificate(
    door: str, events: Database, start_daemon: Start, tmp_path: Path
) -> None:
    over_http, request, until = BY_CERTIFICATE[door]
    authority = Authority(tmp_path, "authority")
    certificate, key = authority.certify("server", "IP:127.0.0.1")
    file = tmp_path / "access.toml"
    file.touch(0o600)
    file.write_text(BEFORE)
    files = {"tls_cert": certificate, "tls_key": key, "tls_client_ca": authority.certificate, "access_file": file}
    trusting = ssl.create_default_context(cafile=authority.certificate)
    trusting.load_cert_chain(*authority.certify("ops", "URI:spiffe://corp/ops"))
    async with start_daemon(**files) as daemon:
        address = daemon.http if over_http else daemon.addresses[0]
        assert address is not None

        def connect() -> AbstractAsyncContextManager[trio.abc.Stream]:
            return _Connected(address.host, address.port, trusting)

        assert await sweep(daemon, events, file.write_text, connect, request, until) > len(WAYS)


async def test_the_same_for_a_browser_whose_key_is_removed(
    events: Database, start_daemon: Start, tmp_path: Path
) -> None:
    pytest.importorskip("jwt", reason="PyJWT is not installed: pip install 'replicad[http]'")
    file = tmp_path / "browser.key"
    file.touch(0o600)
    file.write_text(f"{SECRET * 2}\n")
    token = sign(Claims("alice", ("events",), int(time.time()) + 600), file)
    async with start_daemon(browser_key=file, token=SECRET) as daemon:
        address = daemon.http
        assert address is not None

        def connect() -> AbstractAsyncContextManager[trio.abc.Stream]:
            return _Connected(address.host, address.port)

        request, ways = get(f"/streams/events/live?access_token={token}"), {"removed": f"{SECRET * 3}\n"}
        before = f"{SECRET * 2}\n"
        assert await sweep(daemon, events, file.write_text, connect, request, b"event: position", before, ways) > 3


class _Connected:
    """A connection that is closed at the end of the block, whatever the other side does."""

    def __init__(self, host: str, port: int, tls: ssl.SSLContext | None = None) -> None:
        self._host, self._port, self._tls = host, port, tls

    async def __aenter__(self) -> trio.abc.Stream:
        self._stream: trio.abc.Stream = await trio.open_tcp_stream(self._host, self._port)
        if self._tls is not None:
            secured = trio.SSLStream(self._stream, self._tls, server_hostname="127.0.0.1", https_compatible=True)
            await secured.do_handshake()
            self._stream = secured
        return self._stream

    async def __aexit__(self, *_: object) -> None:
        await trio.aclose_forcefully(self._stream)
