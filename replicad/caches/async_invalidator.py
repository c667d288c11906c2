"""Caches of a program on trio or asyncio: a task follows the stream. As `blocking_invalidator`, with a task."""

from __future__ import annotations

import anyio
from anyio.abc import TaskStatus

from replicad.caches.following import (
    ALSO,
    RETRY_CAP,
    RETRY_FIRST,
    STREAM,
    InvalidationFollower,
    wishes,
)
from replicad.caches.registry import Caches
from replicad.client.async_client import AsyncClient
from replicad.client.events import Connected
from replicad.retry import Backoff


class CacheInvalidator(Caches):
    """The caches of a program, kept up to date by a task. Make it at the top of the module that declares the caches.

    Cached functions, plain or async, may be called from any task and any thread. `registry.Caches` has the same
    arguments.
    """

    _new_event = staticmethod(anyio.Event)

    async def run(
        self,
        client: AsyncClient,
        *,
        stream: str = STREAM,
        backoff: Backoff | None = None,
        task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED,
    ) -> None:
        """Follow the stream until cancelled, or until the client is closed.

        `start` of a nursery of trio or a task group of anyio returns when the caches are live for the first time.

        Errors of the connection are not raised. While the stream cannot be followed, functions are called as if they
        were not cached, and `problem` has the reason. `backoff` is as for `AsyncClient.follow`.

        Raises:
            UsageError: the caches are followed already.
        """
        with self.follower():
            await self._run(client, stream, backoff, task_status)

    async def _run(
        self, client: AsyncClient, stream: str, backoff: Backoff | None, task_status: TaskStatus[None]
    ) -> None:
        following = InvalidationFollower(self, stream)
        pause = Backoff(RETRY_FIRST, RETRY_CAP)
        started = False
        while True:
            with following.session():
                async with client.follow({stream: "NOW"}, also=ALSO, **wishes(self, backoff)) as follower:
                    while events := await follower.together():
                        if any(isinstance(event, Connected) for event in events):
                            pause.reset()
                        following.take(events, follower)
                        if self.live and not started:
                            started = True
                            task_status.started()
                    return  # the client was closed
            await anyio.sleep(pause.next_delay())

    async def wait_live(self) -> None:
        """Wait until the caches are live."""
        while not self.live:
            await self._is_live.wait()
