"""Connections to daemons that a process keeps between reads: a Python worker of Spark runs one task after another.

A connection that the daemon has closed meanwhile is opened again by the next request; its keep-alive thread notices a
silent daemon. After a failure a connection is closed and not kept. A forked process has none of its parent's.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from replicad.client.blocking_client import BlockingClient, Endpoint

MOST_IDLE = 64  # kept connections of a process; a worker needs one for each daemon, a driver one for each query

_Key = tuple[Endpoint, str]


class _KeptClients:
    """Idle connections, the least recently used first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[tuple[_Key, BlockingClient]] = []

    def take(self, key: _Key) -> BlockingClient | None:
        with self._lock:
            for at in range(len(self._idle) - 1, -1, -1):
                if self._idle[at][0] == key:
                    return self._idle.pop(at)[1]
        return None

    def put_back(self, key: _Key, client: BlockingClient) -> None:
        with self._lock:
            self._idle.append((key, client))
            dropped = self._idle.pop(0)[1] if len(self._idle) > MOST_IDLE else None
        if dropped is not None:
            dropped.close()


_kept = _KeptClients()


def _begin_anew() -> None:
    global _kept  # noqa: PLW0603 - a child must not use the sockets of its parent, nor a lock that another thread had
    _kept = _KeptClients()


os.register_at_fork(after_in_child=_begin_anew)


@contextmanager
def kept_client(endpoint: Endpoint, name: str) -> Iterator[BlockingClient]:
    """A client that calls itself `name`, for one caller at a time. It connects with its first request, and stays
    connected for the next caller if the block ends without an exception.
    """
    key = (endpoint, name)
    client = _kept.take(key) or endpoint.connect(name)
    try:
        yield client
    except BaseException:
        client.close()
        raise
    _kept.put_back(key, client)
