"""A Redis that lies, by a seed: it answers many commands as it should, and the others by anything; on channels it says
whatever comes to its mind, but no row that a follower would have to believe.
"""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import hiredis

ODD = (
    b"*1000000000\r\n", b">1000000000\r\n", b"%1000000000\r\n", b"~1000000000\r\n", b"$500000000\r\n",
    b"*1\r\n" * 50_000,
    b"~1\r\n" * 50_000, b"*-1\r\n", b"$-1\r\n", b"*0\r\n", b":1\r\n", b"+OK\r\n", b"-ERR no\r\n", b"-LOADING\r\n",
    b"-\xff\x1b[2J\r\n", b"$2\r\n\xff\xfe\r\n", b"*3\r\n*0\r\n*0\r\n*0\r\n", b"%1\r\n*0\r\n+a\r\n", b"#t\r\n",
    b",nan\r\n",
    b"(" + b"9" * 5000 + b"\r\n", b"$-7\r\n", b"*3\r\n$7\r\nmess", b"HTTP/1.1 400 Bad Request\r\n\r\n",
    b"\x00" * 100, b"",
    b"$9\r\n127.0.0.1\r\n", b"$13\r\n169.254.0.1:x\r\n", b"$11\r\n127.0.0.1:1\r\n", b"$5\r\n\xf0\x9f\x98\x80:\r\n",
)  # fmt: skip
LINES = (
    b"", b"\xff", b"\x00", b"RDATA events master x {}", b"RDATA events master 1_0 {}", b"RDATA other master 9 {}",
    b"RDATA events master 99999999999999999999999 {}", b"POSITION events master 9 9", b"POSITION events master a b",
    b"BATCH events master 5", b"WRITERS events x y=z", b"PING", b"ERROR not_authorised: go", b"SERVER another",
    b"RDATA events master 9 {}\nERROR stream_forked: x", b"REMOTE_SERVER_UP \xff", b"USER_SYNC a b c", b"REPLICATE",
    b"FEDERATION_ACK x 99999999999999999999", b"LOCK_RELEASED " + b"[" * 5000, b"x" * 100_000, b"*99", b">1", b"\r\n",
)  # fmt: skip


class LyingRedis:
    """Listens on a free port of the loopback until `close`. `address`: of the daemon, which it names now and then."""

    def __init__(self, seed: int, address: Callable[[], str]) -> None:
        self._chance = random.Random(seed)
        self._address = address
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.lies = 0
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                one, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(one,), daemon=True).start()

    def _serve(self, one: socket.socket) -> None:
        reader, channels, until = hiredis.Reader(), list[bytes](), time.monotonic() + self._chance.choice((0.2, 2, 10))
        one.settimeout(0.05)
        with suppress(OSError), one:
            while time.monotonic() < until:
                with suppress(TimeoutError):
                    data = one.recv(1 << 16)
                    if not data:
                        return
                    reader.feed(data)
                    while isinstance(words := reader.gets(), list):
                        one.sendall(self._answer(words, channels))
                if channels and self._chance.random() < 0.3:
                    line = self._chance.choice((*LINES, self._chance.randbytes(50)))
                    one.sendall(b"*3\r\n" + _bulk(b"message") + _bulk(self._chance.choice(channels)) + _bulk(line))

    def _answer(self, words: list[bytes], channels: list[bytes]) -> bytes:
        name = words[0].upper()
        if self._chance.random() < 0.15:
            self.lies += 1
            return self._chance.choice((*ODD, self._chance.randbytes(30)))
        if name == b"SUBSCRIBE":
            channels += words[1:]
            return b"".join(b"*3\r\n" + _bulk(b"subscribe") + _bulk(one) + b":1\r\n" for one in words[1:])
        if name == b"HGET":
            return _bulk(self._address().encode())
        if name == b"PING":
            return b"*2\r\n" + _bulk(b"pong") + _bulk(b"")
        return b":1\r\n" if name == b"EVALSHA" else b"+OK\r\n"


def _bulk(text: bytes) -> bytes:
    return b"$%d\r\n%s\r\n" % (len(text), text)
