"""Caches of a program without async: a thread follows the stream. Needs threads and no trio."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

from replicad.caches.following import (
    ALSO,
    ENDED,
    RETRY_CAP,
    RETRY_FIRST,
    STREAM,
    Also,
    InvalidationFollower,
    wishes,
)
from replicad.caches.registry import Caches
from replicad.client.blocking_client import BlockingClient, BlockingFollower
from replicad.client.events import Connected, Reset, RowBatch
from replicad.errors import ConnectionLost
from replicad.retry import Backoff

_JOIN = 10.0  # seconds for the thread to end; closing its connection ends every wait in it


class BlockingCacheInvalidator(Caches):
    """The caches of a program, kept up to date by a thread. Make it at the top of the module that declares the caches.

    `registry.Caches` has the same arguments.
    """

    @contextmanager
    def following(
        self, client: BlockingClient, *, stream: str = STREAM, backoff: Backoff | None = None
    ) -> Iterator[Self]:
        """Follow the stream in a thread for the length of the block. The caches are live soon after it begins.

        Errors of the thread are not raised here. While the stream cannot be followed, functions are called as if they
        were not cached, and `problem` has the reason. `backoff` is as for `BlockingClient.follow`.

        Raises:
            UsageError: the caches are followed already.
        """
        with self.follower():
            thread = _Thread(self, client, stream, backoff)
            thread.start()
            try:
                yield self
            finally:
                thread.close()

    def wait_live(self, timeout: float) -> None:
        """Wait until the caches are live. Raises ConnectionLost, with the reason, after `timeout` seconds."""
        if not self._is_live.wait(timeout):
            raise ConnectionLost(f"the caches are not live after {timeout:g} s: {self.problem}")


class _Thread:
    """Runs the thread that follows the stream, until it is closed."""

    def __init__(self, caches: Caches, client: BlockingClient, stream: str, backoff: Backoff | None) -> None:
        self._caches = caches
        self._following = InvalidationFollower(caches, stream)
        self._client = client
        self._stream = stream
        self._backoff = backoff
        self._pid = os.getpid()
        self._stop = threading.Event()
        self._follower: BlockingFollower[RowBatch | Reset | Also] | None = None
        self._thread = threading.Thread(target=self._run, name="replicad-caches", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """End the thread. When this returns the caches are empty and not live."""
        if os.getpid() != self._pid:
            return  # in a forked child: thread and connection are the parent's
        self._stop.set()
        if self._follower is not None:
            self._follower.close()
        self._thread.join(_JOIN)
        self._following.stop(ENDED)

    def _run(self) -> None:
        pause = Backoff(RETRY_FIRST, RETRY_CAP)
        while not self._stop.is_set():
            with self._following.session():
                self._follow(pause)
            self._stop.wait(pause.next_delay())

    def _follow(self, pause: Backoff) -> None:
        how = wishes(self._caches, self._backoff)
        with self._client.follow({self._stream: "NOW"}, also=ALSO, **how) as follower:
            self._follower = follower
            if self._stop.is_set():  # it was closed before the connection was made
                return
            while events := follower.together():
                if any(isinstance(event, Connected) for event in events):
                    pause.reset()
                self._following.take(events, follower)
