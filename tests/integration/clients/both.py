"""The async client behind the blocking client's interface, so that one suite of tests holds for both, on both loops."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from types import TracebackType
from typing import Any, Self

from anyio.from_thread import start_blocking_portal

from replicad.client.async_client import AsyncClient, AsyncFollower, open_client
from replicad.client.events import RowBatch
from tests.loops import OPTIONS


class InThread:
    """An async client in a thread with an event loop of its own; its methods block."""

    def __init__(self, loop: str, host: str, port: int | None, **options: Any) -> None:
        self._stack = ExitStack()
        self._portal = self._stack.enter_context(start_blocking_portal(loop, OPTIONS[loop]))
        opened = self._portal.wrap_async_context_manager(open_client(host, port, **options))
        self.client: AsyncClient = self._stack.enter_context(opened)

    def call(self, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        return self._portal.call(partial(function, *args, **options))

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return partial(self.call, getattr(self.client, name))

    def follow(
        self, streams: Mapping[str, str | None], linear: bool = False, *, also: Collection[type] = (), **options: Any
    ) -> FollowerInThread:
        return FollowerInThread(self, self.call(self.client.follow, streams, linear, also=also, **options))

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class FollowerInThread(Iterator[Any]):
    """An async follower that is iterated over from another thread."""

    def __init__(self, client: InThread, follower: AsyncFollower[Any]) -> None:
        self._client = client
        self._follower = follower

    def __next__(self) -> RowBatch | Any:
        try:
            return self._client.call(self._follower.__anext__)
        except StopAsyncIteration:
            raise StopIteration from None

    def token(self, stream: str) -> str | None:
        return self._follower.token(stream)

    def tokens(self) -> dict[str, str | None]:
        return self._follower.tokens()

    def close(self) -> None:
        self._client.call(self._follower.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
