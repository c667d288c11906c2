"""Attackers on real sockets, bounded so that they take a second or two: resets, crowds, half TLS handshakes, floods."""

from __future__ import annotations

import gc
import socket
import ssl
import struct
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, closing, suppress
from dataclasses import replace
from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from replicad.config.settings import Address, ServerSettings
from replicad.daemon import admission
from replicad.daemon.admission import Acceptor, AcceptQueues, Handshakes, listen
from replicad.daemon.fairness import TURN_BYTES, TURN_LINES, YieldQueue
from replicad.daemon.hub import ENDS, Hub
from replicad.daemon.relay import Relay
from replicad.daemon.session import Dispatch, Inlet, Relaying, Session
from replicad.daemon.troubles import Troubles
from tests.vocabulary import EVERY

from .test_poller_and_relay import Bus

HANG = 60.0  # seconds after which a wait is a failure
HALF = b"\x16\x03\x01\x02\x00\x01"  # the beginning of a ClientHello
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: closing sends a reset


class Server:
    """The sessions and the acceptor of a daemon, without services but the relay."""

    def __init__(
        self, nursery: trio.Nursery, queues: AcceptQueues, room: int, tls: ssl.SSLContext | None, limits: Any
    ) -> None:
        settings = ServerSettings(server_name="example.com")
        self.settings = replace(settings, limits=replace(settings.limits, **limits))
        self.hub = Hub(room, Troubles(), self.settings.limits)
        self.nursery = nursery
        self.queues = queues
        (address,) = queues.addresses
        self.address = (address.host, address.port)
        self.began: list[str] = []  # peers, in the order in which their sessions began
        self.dispatch = Dispatch([Relaying(self.hub, Relay(Bus(), "replicad", EVERY, self.hub.troubles))], 10)
        self.acceptor = Acceptor(
            self.serve,
            nursery,
            self.hub.troubles,
            room=room + 32,
            full=b"ERROR full\n",
            refused=self.hub.refuse,
            secure=None if tls is None else Handshakes(tls, self.hub, self.settings.limits.tls_timeout),
            give_way=YieldQueue(patience=0.001).next,
        )
        nursery.start_soon(self.hub.run)

    def accept(self) -> None:
        """Begin to accept; connections may wait already."""
        self.nursery.start_soon(self.acceptor.accept_forever, self.queues)

    async def serve(self, stream: trio.abc.Stream, peer: str) -> None:
        self.began.append(peer)
        session = Session(stream, peer, self.settings, self.hub, EVERY)
        if self.hub.admit(session):
            await session.run(self.dispatch.conversation(session))
        else:
            await trio.aclose_forcefully(stream)

    def connect(self, data: bytes = b"", source: str = "127.0.0.1") -> socket.socket:
        """A client that only sends."""
        link = socket.create_connection(self.address, source_address=(source, 0))
        link.sendall(data)
        return link


Open = Callable[..., Any]


@pytest.fixture
async def server(nursery: trio.Nursery) -> AsyncIterator[Open]:
    async with AsyncExitStack() as stack:

        async def start(*, room: int = 5000, tls: ssl.SSLContext | None = None, **limits: Any) -> Server:
            queues = stack.enter_context(closing(await listen(Address("127.0.0.1", 0))))
            return Server(nursery, queues, room, tls, limits)

        yield start


@asynccontextmanager
async def greeted(server: Server, tls: ssl.SSLContext | None = None) -> AsyncIterator[str]:
    """A polite client that has got its first line; yields its address."""
    with trio.fail_after(HANG):
        stream: trio.abc.Stream = await trio.open_tcp_stream(*server.address)
        assert isinstance(stream, trio.SocketStream)
        host, port = stream.socket.getsockname()
        if tls is not None:
            stream = trio.SSLStream(stream, tls, server_hostname="localhost", https_compatible=True)
        await stream.send_all(b"NAME polite\n")
        heard = b""
        while b"\n" not in heard:
            data = await stream.receive_some(1000)
            assert data, "closed"
            heard += data
        assert heard.startswith(b"SERVER example.com")
        yield f"{host}:{port}"
        await trio.aclose_forcefully(stream)


async def test_connections_that_were_reset_while_they_waited_get_no_session(server: Open) -> None:
    attacked = await server()
    for _ in range(1000):
        link = attacked.connect()
        link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        link.close()
    attacked.accept()
    async with greeted(attacked) as polite:
        assert attacked.began == [polite]
    assert attacked.acceptor.dead == 1000


async def test_a_new_client_does_not_wait_behind_a_crowd(server: Open) -> None:
    attacked = await server()
    crowd = [attacked.connect() for _ in range(300)]
    attacked.accept()
    async with greeted(attacked) as polite:
        assert attacked.began.index(polite) < len(crowd) / 2
    for link in crowd:
        link.close()


async def test_those_that_begin_with_too_long_a_line_get_no_session(server: Open) -> None:
    attacked = await server()
    crowd = [attacked.connect(b"x" * 5000) for _ in range(100)]
    attacked.accept()
    async with greeted(attacked):
        pass
    with trio.fail_after(HANG):
        while attacked.acceptor.dead + len(attacked.began) < len(crowd) + 1:
            await trio.sleep(0.01)
    assert len(attacked.began) < 5  # one in each turn has its session from the call that waited
    for link in crowd:
        link.close()


async def test_a_crowd_that_connects_and_then_sends_too_long_lines_gets_few_sessions(
    server: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "QUIET", 60.0)  # however long this machine takes for a hundred connections
    attacked = await server()
    attacked.accept()
    crowd = []
    for _ in range(100):
        crowd.append(attacked.connect())
        await wait_all_tasks_blocked()
    for link in crowd:
        link.sendall(b"x" * 5000)
    async with greeted(attacked):
        pass
    with trio.fail_after(HANG):
        while attacked.acceptor.dead + len(attacked.began) < len(crowd) + 1:
            await trio.sleep(0.01)
    assert len(attacked.began) < len(crowd) / 2
    for link in crowd:
        link.close()


@pytest.fixture(scope="module")
def both_ends(tmp_path_factory: pytest.TempPathFactory) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """The contexts of a server and of its clients."""
    folder = tmp_path_factory.mktemp("tls")
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    command = [
        "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
        "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost",
        "-keyout", str(key), "-out", str(certificate),
    ]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True)
    ours = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    ours.load_cert_chain(certificate, key)
    return ours, ssl.create_default_context(cafile=str(certificate))


def hello(tls: ssl.SSLContext) -> bytes:
    """A whole ClientHello."""
    sent = ssl.MemoryBIO()
    with pytest.raises(ssl.SSLWantReadError):
        tls.wrap_bio(ssl.MemoryBIO(), sent, server_hostname="localhost").do_handshake()
    return sent.read()


async def greeted_at_last(server: Server, tls: ssl.SSLContext) -> None:
    """A polite client that tries again when it had to give way to others from its address, as clients do."""
    with trio.fail_after(HANG):
        while True:
            with suppress(trio.BrokenResourceError, AssertionError):
                async with greeted(server, tls):
                    return


@pytest.mark.parametrize("whole", [False, True])
async def test_handshakes_that_stop_do_not_fill_the_server(
    server: Open, both_ends: tuple[ssl.SSLContext, ssl.SSLContext], whole: bool
) -> None:
    ours, theirs = both_ends
    attacked = await server(room=20, tls=ours, tls_handshakes=10, tls_timeout=HANG)
    attacked.accept()
    crowd = []
    for _ in range(200):
        crowd.append(attacked.connect(hello(theirs) if whole else HALF))
        await trio.sleep(0.001)
        assert len(attacked.hub.handshakes) <= 10
    await greeted_at_last(attacked, theirs)
    assert len(attacked.hub.handshakes) <= 10
    assert attacked.hub.statistics().handshakes_cut > 0
    for link in crowd:
        link.close()


@pytest.mark.parametrize("whole", [False, True])
async def test_handshakes_that_stop_do_not_stay(
    server: Open, both_ends: tuple[ssl.SSLContext, ssl.SSLContext], whole: bool
) -> None:
    ours, theirs = both_ends
    attacked = await server(room=20, tls=ours, tls_timeout=0.5)
    attacked.accept()
    crowd = [attacked.connect(hello(theirs) if whole else HALF) for _ in range(8)]
    with trio.fail_after(HANG):
        for link in crowd:
            await trio.to_thread.run_sync(read_to_end, link)
    assert not len(attacked.hub.handshakes)
    assert attacked.hub.statistics().handshakes_cut == 0, "there was room for all: their time was over"
    for link in crowd:
        link.close()


async def test_hellos_from_one_address_cut_no_client_from_another(
    server: Open, both_ends: tuple[ssl.SSLContext, ssl.SSLContext]
) -> None:
    ours, theirs = both_ends
    attacked = await server(room=8, tls=ours)
    first = hello(theirs)
    crowd = [attacked.connect(first, "127.0.0.2") for _ in range(100)]
    attacked.accept()

    async def flood() -> None:
        while True:
            crowd.append(attacked.connect(first, "127.0.0.2"))
            await trio.sleep(0.001)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(flood)
        for _ in range(10):
            async with greeted(attacked, theirs):
                pass
        nursery.cancel_scope.cancel()
    assert attacked.hub.statistics().handshakes_cut > 0
    for link in crowd:
        link.close()


async def test_a_hello_of_which_a_second_record_never_comes_holds_nobody_up(
    server: Open, both_ends: tuple[ssl.SSLContext, ssl.SSLContext]
) -> None:
    ours, theirs = both_ends
    attacked = await server(room=20, tls=ours, tls_timeout=HANG)
    attacked.accept()
    content = hello(theirs)[5:]
    half = struct.pack("!BHH", 22, 0x0301, len(content) // 2) + content[: len(content) // 2]
    crowd = [attacked.connect(half, "127.0.0.2") for _ in range(8)]
    with trio.fail_after(HANG / 2):
        while len(attacked.hub.handshakes) < len(crowd):
            await trio.sleep(0.01)
        async with greeted(attacked, theirs):
            pass
    for link in crowd:
        link.close()


def read_to_end(link: socket.socket) -> None:
    link.settimeout(HANG)
    with suppress(ConnectionError):
        while link.recv(4096):
            pass


@pytest.mark.parametrize("end", ["served", "cut", "not TLS", "gone", "too slow"])
async def test_what_tls_holds_is_freed_when_its_connection_ends_without_the_collector(
    server: Open, both_ends: tuple[ssl.SSLContext, ssl.SSLContext], end: str
) -> None:
    def held() -> int:
        return sum(type(one) is ssl.SSLObject and one.server_side for one in gc.get_objects())

    ours, theirs = both_ends
    attacked = await server(room=20, tls=ours, tls_handshakes=2, tls_timeout=0.2 if end == "too slow" else HANG)
    attacked.accept()
    links: list[socket.socket] = []
    gc.collect()
    gc.disable()
    try:
        before = held()
        with trio.fail_after(HANG):
            if end == "served":
                async with greeted(attacked, theirs):
                    assert held() > before
            else:
                first = b"GET / HTTP/1.1\r\n" if end == "not TLS" else hello(theirs)
                links = [attacked.connect(first) for _ in range(8 if end == "cut" else 2)]
            while end == "cut" and attacked.hub.statistics().handshakes_cut < 6:
                await trio.sleep(0.01)
            for link in links:
                if end in ("cut", "gone"):
                    with suppress(OSError):  # reset
                        link.shutdown(socket.SHUT_WR)
                await trio.to_thread.run_sync(read_to_end, link)
            while held() > before or len(attacked.hub) or len(attacked.hub.handshakes):
                await trio.sleep(0.01)
    finally:
        gc.enable()
        for link in links:
            link.close()


async def test_a_client_that_the_server_has_answered_stays_while_others_begin_handshakes(
    server: Open, both_ends: tuple[ssl.SSLContext, ssl.SSLContext]
) -> None:
    ours, theirs = both_ends
    attacked = await server(room=20, tls=ours)
    attacked.accept()
    received, sent = ssl.MemoryBIO(), ssl.MemoryBIO()
    secured = theirs.wrap_bio(received, sent, server_hostname="localhost")
    with trio.fail_after(HANG):
        async with await trio.open_tcp_stream(*attacked.address) as polite:
            with pytest.raises(ssl.SSLWantReadError):
                secured.do_handshake()
            await polite.send_all(sent.read())
            received.write(await polite.receive_some())  # the answer
            crowd = []
            while attacked.hub.statistics().handshakes_cut < 50:
                crowd.append(attacked.connect(HALF))
                await trio.sleep(0.001)
            while True:
                try:
                    secured.do_handshake()
                    break
                except ssl.SSLWantReadError:
                    received.write(await polite.receive_some())
            secured.write(b"NAME polite\n")
            await polite.send_all(sent.read())
            heard = b""
            while b"SERVER" not in heard:
                data = await polite.receive_some()
                assert data, "closed"
                received.write(data)
                with suppress(ssl.SSLWantReadError):
                    heard += secured.read()
    for link in crowd:
        link.close()


async def test_a_polite_client_is_answered_while_relays_flood_a_crowd(server: Open) -> None:
    attacked = await server()
    attacked.accept()
    crowd = [attacked.connect(b"NAME idle\n") for _ in range(300)]
    with trio.fail_after(HANG):
        while len(attacked.hub) < len(crowd):
            await trio.sleep(0.01)
        async with await trio.open_tcp_stream(*attacked.address) as flood, trio.open_nursery() as nursery:
            nursery.start_soon(flood.send_all, b"REMOTE_SERVER_UP x\n" * 20_000)
            for _ in range(20):
                async with greeted(attacked):
                    pass
            announced = attacked.hub.statistics().announced
            nursery.cancel_scope.cancel()
    assert announced < 20_000
    for link in crowd:
        link.close()


class InTurns(trio.abc.Instrument):
    """Counts events in each turn of the event loop."""

    def __init__(self) -> None:
        self.most = self.all = self._now = 0

    def before_io_wait(self, timeout: float) -> None:
        self.most, self._now = max(self.most, self._now), 0

    def count(self) -> None:
        self.all += 1
        self._now += 1


async def test_the_sessions_of_a_crowd_that_leaves_end_a_few_in_a_turn(
    server: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended, finish = InTurns(), Session._finish

    async def counted(self: Session) -> None:
        ended.count()
        await finish(self)

    monkeypatch.setattr(Session, "_finish", counted)
    attacked = await server()
    attacked.accept()
    crowd = [attacked.connect(b"NAME x\n") for _ in range(200)]
    with trio.fail_after(HANG):
        while len(attacked.hub) < len(crowd):
            await trio.sleep(0.01)
        trio.lowlevel.add_instrument(ended)
        for link in crowd:
            link.close()
        while len(attacked.hub):
            await trio.sleep(0.01)
        trio.lowlevel.remove_instrument(ended)
    assert ended.all == len(crowd)
    assert ended.most <= ENDS


async def test_of_a_crowd_that_pours_one_is_read_in_a_turn_and_waits_in_the_sockets(
    server: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    received, receive = InTurns(), Inlet.receive_nowait

    def counted(self: Inlet, most: int) -> bytes | None:
        data = receive(self, most)
        if data and data.startswith(b"y"):
            received.count()
        return data

    monkeypatch.setattr(Inlet, "receive_nowait", counted)
    attacked = await server()
    attacked.accept()
    pouring = b"PING x\n" + b"x" * 4 * TURN_BYTES + b"y" * 8 * TURN_BYTES
    crowd = [attacked.connect() for _ in range(50)]
    with trio.fail_after(HANG):
        while len(attacked.hub) < len(crowd):
            await trio.sleep(0.01)
        trio.lowlevel.add_instrument(received)
        for link in crowd:
            link.sendall(pouring)
        while received.all < 7 * len(crowd):
            await trio.sleep(0.01)
        trio.lowlevel.remove_instrument(received)
    assert received.most <= 2, "the one whose turn it is, and the one after it"
    for link in crowd:
        link.close()


async def test_long_input_of_one_address_waits_behind_one_client_of_another_and_not_behind_its_crowd(
    server: Open,
) -> None:
    attacked = await server()
    attacked.accept()
    crowd = [attacked.connect(b"NAME x\n", "127.0.0.2") for _ in range(30)]
    pings = b"PING x\n" * 10_000

    async def flood(link: socket.socket) -> None:
        link.setblocking(False)
        while True:
            await trio.lowlevel.wait_writable(link)
            link.send(pings)

    with trio.fail_after(HANG):
        while len(attacked.hub) < len(crowd):
            await trio.sleep(0.01)
        async with trio.open_nursery() as nursery:
            for link in crowd:
                nursery.start_soon(flood, link)
            async with await trio.open_tcp_stream(*attacked.address) as polite:
                while attacked.hub.statistics().turns < 10 * len(crowd):
                    await trio.sleep(0.01)
                before = attacked.hub.statistics().turns
                await polite.send_all(b"PING x\n" * TURN_LINES * 100 + b"HELP PING\n")
                heard = b""
                while b"HELP PING" not in heard:
                    heard += await polite.receive_some(1000)
                turns = attacked.hub.statistics().turns - before
            nursery.cancel_scope.cancel()
    assert turns < 100 * len(crowd) / 3, "some 2 for each of its 100 slices"
    for link in crowd:
        link.close()
