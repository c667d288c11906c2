"""Clients of HTTP that misbehave, each kind in a process of its own until told to stop. They use plain sockets only."""

from __future__ import annotations

import select
import selectors
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import count as count_from
from itertools import cycle
from multiprocessing.connection import Connection

from bench.attackers import Attack, Target, _begin_again, _connect, handshakes, hellos
from bench.system import STREAM

SLOW_BODIES, BODY_PAUSE = 300, 0.5  # connections whose bodies come a byte at a time, and seconds between two bytes
FLOODS = 16  # connections that make requests as fast as they are answered
GUESSES = 50  # connections that send wrong secrets
UNREAD = 150  # readers of events that do not read
LITTLE = 4096  # bytes that the system keeps for those
NAME = "polite"  # the client of the access file whose secret is guessed
_HEAD = "HTTP/1.1\r\nHost: localhost\r\n"
_BODY = f"POST /replay {_HEAD}Content-Type: application/json\r\nContent-Length: 900\r\n\r\n{{".encode()
_REQUESTS = tuple(
    text.encode()
    for text in (
        f"GET /livez {_HEAD}\r\n",
        f"GET /readyz {_HEAD}\r\n",
        f"GET /metrics {_HEAD}\r\n",
        f"GET /status {_HEAD}\r\n",
        f"GET /clients {_HEAD}\r\n",
        f"GET /streams/{STREAM}/rows?limit=100 {_HEAD}\r\n",
        f"GET /streams/absent/rows {_HEAD}\r\n",
        f"GET /{'x' * 8000} {_HEAD}\r\n",
        f"POST /replay {_HEAD}Content-Type: application/json\r\nContent-Length: 2\r\n\r\n[]",
        "GET /livez HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
    )
)


def _at_http(attack: Attack, pipe: Connection, target: Target) -> None:
    """The same attack on the port of HTTP."""
    attack(pipe, replace(target, port=target.http))


def silent(pipe: Connection, target: Target) -> None:
    """Many connections that send nothing; closed ones are opened again."""
    _begin_again(pipe, target, b"")


def half_requests(pipe: Connection, target: Target) -> None:
    """The same with the half of a head."""
    _begin_again(pipe, target, f"GET /status {_HEAD}X: y".encode())


def slow_bodies(pipe: Connection, target: Target) -> None:
    """Requests whose bodies come a byte at a time; closed connections are opened again."""
    links: list[socket.socket] = []
    pipe.send("ready")
    while not pipe.poll():
        for _ in range(min(50, SLOW_BODIES - len(links))):
            with suppress(OSError):
                links.append(_connect(target, _BODY))
        for link in [*links]:
            try:
                link.send(b" ", socket.MSG_DONTWAIT)
            except BlockingIOError:
                pass
            except OSError:
                links.remove(link)
                link.close()
        time.sleep(BODY_PAUSE)
    pipe.poll(None)


def floods(pipe: Connection, target: Target) -> None:
    """Requests of ten kinds, one after another on each connection, as fast as they are answered."""
    requests = cycle(_REQUESTS)
    _ask(pipe, target, FLOODS, lambda: next(requests))


def wrong_secrets(pipe: Connection, target: Target) -> None:
    """Requests with a secret that is wrong, half of them under the name of a client that exists."""
    numbers = count_from()

    def request() -> bytes:
        number = next(numbers)
        word = f"{NAME if number % 2 else f'nobody{number}'}.{number:032}"
        return f"GET /status {_HEAD}Authorization: Bearer {word}\r\n\r\n".encode()

    _ask(pipe, target, GUESSES, request)


def _ask(pipe: Connection, target: Target, clients: int, request: Callable[[], bytes]) -> None:
    """Connections that send a request when something of the answer to the one before has come."""
    watch = selectors.DefaultSelector()
    pipe.send("ready")
    while not pipe.poll():
        for _ in range(clients - len(watch.get_map())):
            with suppress(OSError):
                link = _connect(target, request())
                link.setblocking(False)
                watch.register(link, selectors.EVENT_READ)
        for key, _ in watch.select(0.1):
            link = key.fileobj  # type: ignore[assignment]
            try:
                if not link.recv(1 << 18):
                    raise ConnectionError
                link.send(request())
            except BlockingIOError:
                pass
            except OSError:
                watch.unregister(link)
                link.close()
    pipe.poll(None)


def unread_events(pipe: Connection, target: Target) -> None:
    """Readers of old and new rows as server-sent events that do not read; those that were cut off come again."""
    request = f"GET /streams/{STREAM}/live?after=EARLIEST {_HEAD}\r\n".encode()
    watch = select.poll()
    links: dict[int, socket.socket] = {}
    pipe.send("ready")
    while not pipe.poll(0.1):
        for _ in range(min(20, UNREAD - len(links))):
            with suppress(OSError):
                link = _connect(target)
                link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, LITTLE)
                link.sendall(request)
                links[link.fileno()] = link
                watch.register(link, select.POLLRDHUP)
        for number, _ in watch.poll(0):
            watch.unregister(number)
            links.pop(number).close()
    pipe.poll(None)


WEB: dict[str, Attack] = {
    "HTTP: silent sockets": partial(_at_http, silent),
    "HTTP: half requests": partial(_at_http, half_requests),
    f"HTTP: {SLOW_BODIES} slow bodies": partial(_at_http, slow_bodies),
    "HTTP: floods of ten kinds": partial(_at_http, floods),
}
WEB_ROWS: dict[str, Attack] = {f"HTTP: {UNREAD} readers of events that do not read": partial(_at_http, unread_events)}
WEB_SECRETS: dict[str, Attack] = {"HTTP: wrong secrets": partial(_at_http, wrong_secrets)}
WEB_SECURED: dict[str, Attack] = {
    "HTTP: half handshakes": partial(_at_http, handshakes),
    "HTTP: ClientHellos and no more": partial(_at_http, hellos),
}
