"""A Redis that misbehaves, to a daemon that publishes there: each kind in a process of its own until told to stop.

It listens where the daemon expects Redis, and is ready when the daemon has connected. Before, nobody listens there.
"""

from __future__ import annotations

import random
import selectors
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection

import hiredis

from bench.attackers import RESET, Attack, Target

COMES = 30.0  # seconds in which the daemon must have connected
SLOW = 1.0  # seconds until an answer
BURST = 2000  # messages that are sent at once
_ODD = (
    b"*1000000000\r\n", b"%1000000000\r\n", b"$500000000\r\n", b"*1\r\n" * 50_000, b"~1\r\n" * 50_000, b"*-1\r\n",
    b"$2\r\n\xff\xfe\r\n", b"*3\r\n*0\r\n*0\r\n*0\r\n", b"(" + b"9" * 5000 + b"\r\n", b"$-7\r\n",
    b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\x00" * 100, b"+" + b"x" * (1 << 20),
)  # fmt: skip
_LINES = (
    b"REMOTE_SERVER_UP example.org", b"LOCK_RELEASED w1 [\"a\"]", b"USER_SYNC w1 @u:example.com start 1",
    b"REPLICATE", b"RDATA bench master 1 {}", b"nonsense", b"\xff", b"FEDERATION_ACK w1 99999999999",
)  # fmt: skip

Answer = Callable[[list[bytes]], bytes | None]  # None: the connection is reset


def drops(pipe: Connection, target: Target) -> None:
    """Accepts, and resets when it is asked something."""
    _serve(pipe, target, lambda _: None)


def nonsense(pipe: Connection, target: Target) -> None:
    """Answers by what is no answer, and then is closed by the daemon."""
    _serve(pipe, target, lambda _: random.choice(_ODD))


def lies(pipe: Connection, target: Target) -> None:
    """Answers as it should, but for one answer in five."""
    _serve(pipe, target, lambda words: random.choice(_ODD) if random.random() < 0.2 else _answer(words))


def slow(pipe: Connection, target: Target) -> None:
    """Answers as it should, a second later."""
    _serve(pipe, target, _answer, SLOW)


def messages(pipe: Connection, target: Target) -> None:
    """Answers as it should, and sends commands and nonsense to subscribers as fast as they are taken."""
    _serve(pipe, target, _answer, burst=True)


def _serve(pipe: Connection, target: Target, answer: Answer, pause: float = 0.0, *, burst: bool = False) -> None:
    watch = selectors.DefaultSelector()
    links: list[_Link] = []
    with socket.create_server((target.host, target.redis)) as listener:
        listener.setblocking(False)
        watch.register(listener, selectors.EVENT_READ)
        deadline, told = time.monotonic() + COMES, False
        while not pipe.poll():
            for key, _ in watch.select(0.02):
                if key.fileobj is listener:
                    one, _ = listener.accept()
                    one.setblocking(False)
                    links.append(_Link(one))
                    watch.register(one, selectors.EVENT_READ, links[-1])
                elif not key.data.take(answer, pause):
                    watch.unregister(key.fileobj)
                    links.remove(key.data)
                    key.data.close()
            for link in links:
                link.give(burst=burst)
            if not told and (links or time.monotonic() > deadline):
                pipe.send("ready")
                told = True
        for link in links:
            link.close()
    pipe.poll(None)


class _Link:
    """One connection of the daemon."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._reader = hiredis.Reader()
        self._waiting: list[tuple[float, bytes]] = []  # answers, and when they are sent
        self._left = b""
        self._channel: bytes | None = None
        self._burst = b""

    def take(self, answer: Answer, pause: float) -> bool:
        """Read commands. False: the connection is over."""
        try:
            data = self._link.recv(1 << 16)
            self._reader.feed(data)
            while isinstance(words := self._reader.gets(), list):
                found = answer(words)
                if found is None:
                    return False
                self._waiting.append((time.monotonic() + pause, found))
                if words[0].upper() == b"SUBSCRIBE":
                    self._channel = words[1]
                    head = b"*3\r\n" + _bulk(b"message") + _bulk(self._channel)
                    self._burst = b"".join(head + _bulk(line) for line in _LINES) * (BURST // len(_LINES))
        except (OSError, hiredis.ProtocolError):
            return False
        return bool(data)

    def give(self, *, burst: bool) -> None:
        """Send what is due, as far as it is taken."""
        while self._waiting and self._waiting[0][0] <= time.monotonic():
            self._left += self._waiting.pop(0)[1]
        if burst and not self._left and not self._waiting:
            self._left = self._burst
        with suppress(OSError):
            if self._left:
                self._left = self._left[self._link.send(self._left) :]

    def close(self) -> None:
        """Reset the connection."""
        self._link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        self._link.close()


def _answer(words: list[bytes]) -> bytes:
    match words[0].upper():
        case b"SUBSCRIBE":
            return b"".join(b"*3\r\n" + _bulk(b"subscribe") + _bulk(one) + b":1\r\n" for one in words[1:])
        case b"PING":
            return b"*2\r\n" + _bulk(b"pong") + _bulk(b"")
        case b"HGET":
            return b"$-1\r\n"
        case b"EVALSHA":
            return b":1\r\n"
    return b"+OK\r\n"


def _bulk(text: bytes) -> bytes:
    return b"$%d\r\n%s\r\n" % (len(text), text)


REDIS: dict[str, Attack] = {
    "Redis that drops": drops,
    "Redis that answers nonsense": nonsense,
    "Redis that lies": lies,
    "Redis that is slow": slow,
    "Redis that floods": messages,
}
