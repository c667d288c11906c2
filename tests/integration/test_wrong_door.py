"""What belongs to another protocol, at each port: requests of HTTP, lines, TLS, HTTP/2, noise, and half a handshake.

Whoever sends it gets one error that says so, or nothing, and the end of the connection. Nobody else notices.
"""

from __future__ import annotations

import random
import re
import ssl
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, suppress
from pathlib import Path

import pytest
import trio

from replicad.config.settings import Address, ServerSettings
from replicad.postgres.bridge import Database
from tests.conftest import PATIENCE
from tests.daemons import Daemon

from .test_access_reload import Authority
from .test_http import ANY_PORT

Start = Callable[..., AbstractAsyncContextManager[Daemon]]
HEAD = b"Host: localhost\r\nContent-Type: text/plain\r\n"
LINES = b"REPLICATE events EARLIEST\nREMOTE_SERVER_UP evil.example\n"
_noise = random.Random(39)


def hello() -> bytes:
    """The ClientHello of a client of TLS."""
    sent = ssl.MemoryBIO()
    client = ssl.create_default_context().wrap_bio(ssl.MemoryBIO(), sent, server_hostname="localhost")
    with suppress(ssl.SSLWantReadError):
        client.do_handshake()
    return sent.read()


def record(kind: int, body: bytes, length: int | None = None) -> bytes:
    """A record of TLS (RFC 8446, 5.1)."""
    return bytes([kind, 3, 3]) + (len(body) if length is None else length).to_bytes(2) + body


GARBAGE = {
    "lines in the body of a request": b"POST / HTTP/1.1\r\n" + HEAD + b"Content-Length: 59\r\n\r\n" + LINES,
    "a request without a version": b"GET /livez\r\n\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9) * 5,
    "lines": LINES,
    "lines with NUL": b"PING \x00\nNAME a\x00b\n",
    "lines with control characters": b"NAME \x1b[2J\x07\nREMOTE_SERVER_UP \x85\x0b\n",
    "a ClientHello": hello(),
    "a ClientHello that is cut": hello()[:-20],
    "a ClientHello whose length is wrong": record(22, hello()[5:], 40),
    "a ClientHello twice": hello() * 2,
    "a handshake of zeros": record(22, bytes(600)),
    "an empty record": record(22, b""),
    "a record of 64 KiB": record(22, _noise.randbytes(65535)),
    "an alert": record(21, b"\x02\x28"),
    "application data": record(23, _noise.randbytes(64)),
    "SSL 2": b"\x80\x2e\x01\x00\x02\x00\x15\x00\x00\x00\x10" + _noise.randbytes(37),
    "zeros": bytes(20_000),
    "noise": _noise.randbytes(20_000),
    "line ends": b"\n" * 5000,
    "returns": b"\r" * 20_000,
    "a proxy's header": b"PROXY TCP4 10.0.0.1 10.0.0.2 1 2\r\n",
    "Redis": b"*3\r\n$3\r\nSET\r\n$1\r\na\r\n$1\r\nb\r\n",
    "SSH": b"SSH-2.0-OpenSSH_9.2\r\n",
    "the start of Postgres": b"\x00\x00\x00\x08\x04\xd2\x16\x2f",
}
# What is said in clear: lines of the protocol, an answer of HTTP. In TLS: alerts, and what comes in a handshake.
TOLD = {
    "lines": re.compile(rb"(?:SERVER|PING|ERROR|HELP)[^\n]*\n|PONG\n"),
    "http": re.compile(rb"HTTP/1\.1 (?:400|404|405|408|413|414|417|431|501|505) [^\r]+\r\n"),
}


@pytest.fixture
def settings() -> ServerSettings:
    return ServerSettings(listen=ANY_PORT, http=ANY_PORT, server_name="example.com")


async def told(address: Address, data: bytes) -> bytes:
    """What comes back until the end."""
    received = b""
    with trio.fail_after(PATIENCE), suppress(trio.BrokenResourceError):
        async with await trio.open_tcp_stream(address.host, address.port) as stream:
            await stream.send_all(data)
            await stream.send_eof()
            while more := await stream.receive_some(65536):
                received += more
    return received


def assert_plain(door: str, answer: bytes) -> None:
    """Each line of the protocol is one of those, or the answer is one of HTTP."""
    if door == "http":
        assert not answer or TOLD[door].match(answer), answer[:300]
    else:
        assert TOLD[door].sub(b"", answer) == b"", answer[:300]
    assert b"Traceback" not in answer
    assert b"RDATA" not in answer


@pytest.mark.parametrize("door", TOLD)
async def test_what_belongs_to_another_protocol_ends_its_own_connection_alone(
    door: str, events: Database, start_daemon: Start
) -> None:
    async with start_daemon() as daemon:
        assert daemon.http is not None
        address = daemon.http if door == "http" else daemon.addresses[0]
        async with await trio.open_tcp_stream(daemon.addresses[0].host, daemon.addresses[0].port) as bystander:
            for name, data in GARBAGE.items():
                if (door, name) != ("lines", "lines"):
                    assert_plain(door, await told(address, data))
            await bystander.send_all(b"NAME bystander\nSTREAMS\n")
            received = b""
            with trio.fail_after(PATIENCE):
                while b"STREAMS events" not in received:
                    received += await bystander.receive_some(65536)
            assert b"evil.example" not in received
        assert not daemon.troubles.counts


@pytest.mark.parametrize("door", TOLD)
async def test_noise_before_in_and_after_a_handshake_ends_its_own_connection_alone(
    door: str, events: Database, start_daemon: Start, tmp_path: Path
) -> None:
    authority = Authority(tmp_path, "authority")
    certificate, key = authority.certify("server", "IP:127.0.0.1")
    key.chmod(0o600)
    trusting = ssl.create_default_context(cafile=authority.certificate)
    async with start_daemon(tls_cert=certificate, tls_key=key) as daemon:
        assert daemon.http is not None
        address = daemon.http if door == "http" else daemon.addresses[0]
        for name, data in GARBAGE.items():
            answer = await told(address, data)
            assert not answer or answer[0] in (21, 22), f"{name}: only records of TLS: {answer[:50]!r}"
        for data in (_noise.randbytes(500), bytes(500), record(23, _noise.randbytes(400)), record(22, bytes(50))):
            plain = await trio.open_tcp_stream(address.host, address.port)
            secured = trio.SSLStream(plain, trusting, server_hostname="127.0.0.1", https_compatible=True)
            with trio.fail_after(PATIENCE), suppress(trio.BrokenResourceError):
                await secured.do_handshake()
                await plain.send_all(data)
                while await plain.receive_some(65536):
                    pass
            await trio.aclose_forcefully(secured)
        plain = await trio.open_tcp_stream(address.host, address.port)
        with trio.fail_after(PATIENCE):
            async with trio.SSLStream(plain, trusting, server_hostname="127.0.0.1", https_compatible=True) as polite:
                await polite.send_all(b"GET /livez HTTP/1.0\r\n\r\n" if door == "http" else b"NAME polite\nSTREAMS\n")
                received = b""
                while (b"ok\n" if door == "http" else b"STREAMS events") not in received:
                    received += await polite.receive_some(65536)
        assert not daemon.troubles.counts
