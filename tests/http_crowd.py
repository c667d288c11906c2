"""Requests of strangers over HTTP, as fast as they are answered: `python -m tests.http_crowd HOST PORT REQUESTS`.

A process of its own, on plain sockets, because a client on trio takes as much of the processor as the daemon.
"""

from __future__ import annotations

import os
import selectors
import socket
import sys
from contextlib import suppress
from itertools import cycle

AT_ONCE = 40  # connections
WAIT = 60.0  # seconds without an answer to any of them, after which it gives up
EVENTS = "/streams/events"
HEAD = "HTTP/1.1\r\nhost: localhost\r\n"
KINDS = {
    "probe": f"GET /livez {HEAD}connection: close\r\n\r\n",
    "readiness, three times": f"GET /readyz {HEAD}\r\n" * 2 + f"GET /readyz {HEAD}connection: close\r\n\r\n",
    "no page": f"GET /nothing {HEAD}connection: close\r\n\r\n",
    "no stream": f"GET /streams/absent/rows {HEAD}connection: close\r\n\r\n",
    "rows": f"GET {EVENTS}/rows?limit=5 {HEAD}connection: close\r\n\r\n",
    "live, and away": f"GET {EVENTS}/live {HEAD}\r\n",
    "no live": f"GET /streams/absent/live {HEAD}\r\n",
    "another name": "GET /status HTTP/1.1\r\nhost: evil.example\r\nconnection: close\r\n\r\n",
    "no HTTP": "REPLICATE events NOW\r\n\r\n",
    "half a head, and away": f"GET / {HEAD}x: " + "y" * 8000,
    "a body that is too long": f"POST /replay {HEAD}content-type: application/json\r\ncontent-length: 99999\r\n\r\n",
}
"""Each is a connection, which the server closes, or the client where it goes `away`."""


def make_requests(host: str, port: int, count: int) -> None:
    """Make so many connections, of all kinds in turn, and wait for their ends.

    Raises:
        TimeoutError: the server does not answer.
    """
    watch, kinds, left = selectors.DefaultSelector(), cycle(KINDS.items()), count
    while left or watch.get_map():
        while left and len(watch.get_map()) < AT_ONCE:
            left -= 1
            name, text = next(kinds)
            link = socket.create_connection((host, port), WAIT)
            with suppress(OSError):
                link.sendall(text.encode())  # fits into the buffer of a new socket
            if "half" in name:
                link.close()
            else:
                watch.register(link, selectors.EVENT_READ, name)
        found = watch.select(WAIT)
        if not found and watch.get_map():
            raise TimeoutError(f"no answer to {sorted({key.data for key in watch.get_map().values()})}")
        for key, _ in found:
            link = key.fileobj  # type: ignore[assignment]
            data = b""
            with suppress(ConnectionError):
                data = link.recv(1 << 16)
            if not data or "away" in key.data:
                watch.unregister(link)
                link.close()


if __name__ == "__main__":
    os.nice(10)  # real strangers have processors of their own
    make_requests(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
