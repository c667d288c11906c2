"""The trio client behind the blocking client's interface, so that one suite of tests holds for both."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from types import TracebackType
from typing import Any, Self

import trio

from replicad.client.events import RowBatch
from replicad.client.trio_client import TrioClient, TrioFollower, open_client
from tests.conftest import PATIENCE


class TrioInThread:
    """A trio client in a thread of its own; its methods block."""

    def __init__(self, host: str, port: int, **options: Any) -> None:
        self._ready = threading.Event()
        self._over = trio.Event()
        self._thread = threading.Thread(
            target=trio.run, args=(self._main, partial(open_client, host, port, **options)), daemon=True
        )
        self._thread.start()
        assert self._ready.wait(PATIENCE)

    async def _main(self, make: Callable[[], Any]) -> None:
        self._trio = trio.lowlevel.current_trio_token()
        async with make() as client:
            self.client: TrioClient = client
            self._ready.set()
            await self._over.wait()

    def call(self, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        async def run() -> Any:
            return await function(*args, **options)

        return trio.from_thread.run(run, trio_token=self._trio)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return partial(self.call, getattr(self.client, name))

    def follow(
        self, streams: Mapping[str, str | None], linear: bool = False, *, also: Collection[type] = (), **options: Any
    ) -> FollowerInThread:
        follower = self.call(_make, self.client.follow, streams, linear, also=also, **options)
        return FollowerInThread(self, follower)

    def close(self) -> None:
        if self._thread.is_alive():
            trio.from_thread.run_sync(self._over.set, trio_token=self._trio)
            self._thread.join(PATIENCE)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


async def _make(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    return function(*args, **options)


class FollowerInThread(Iterator[Any]):
    """A trio follower that is iterated over from another thread."""

    def __init__(self, client: TrioInThread, follower: TrioFollower) -> None:
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
        trio.from_thread.run_sync(self._follower.close, trio_token=self._client._trio)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
