"""Tests of the client that hold on both event loops. (pytest-trio runs the other tests, on trio alone.)"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import anyio
import pytest
import trio
from anyio.abc import ByteStream
from trio.testing import memory_stream_pair

LOOPS = ("trio", "asyncio")
OPTIONS: dict[str, dict[str, Any]] = {
    "trio": {},
    # trio-asyncio, which the daemon needs in this process, replaces the loop that asyncio would make by itself.
    "asyncio": {"loop_factory": asyncio.SelectorEventLoop},
}


def run_on(loop: str, function: Callable[[], Awaitable[None]]) -> None:
    """Run the function on that loop, until it returns."""
    anyio.run(function, backend=loop, backend_options=OPTIONS[loop])


def on_both_loops(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run the test's coroutine on trio and on asyncio. Its fixtures must be plain ones."""

    def run(loop: str, **fixtures: Any) -> None:
        run_on(loop, partial(test, **fixtures))

    run.__name__, run.__doc__, run.__module__ = test.__name__, test.__doc__, test.__module__
    own = inspect.signature(test).parameters.values()
    loop = inspect.Parameter("loop", inspect.Parameter.KEYWORD_ONLY)
    run.__signature__ = inspect.Signature([*own, loop])  # type: ignore[attr-defined]
    run.pytestmark = list(getattr(test, "pytestmark", []))  # type: ignore[attr-defined]
    return pytest.mark.parametrize("loop", LOOPS)(run)


class TrioBytes(ByteStream):
    """A stream of trio, for instance one in memory, as the client wants it."""

    def __init__(self, stream: trio.abc.Stream) -> None:
        self._stream = stream

    async def receive(self, max_bytes: int = 65536) -> bytes:
        try:
            data = bytes(await self._stream.receive_some(max_bytes))
        except trio.ClosedResourceError:
            raise anyio.ClosedResourceError from None
        if not data:
            raise anyio.EndOfStream
        return data

    async def send(self, item: bytes) -> None:
        try:
            await self._stream.send_all(item)
        except trio.BrokenResourceError as error:
            raise anyio.BrokenResourceError from error
        except trio.ClosedResourceError:
            raise anyio.ClosedResourceError from None

    async def send_eof(self) -> None:
        raise NotImplementedError

    async def aclose(self) -> None:
        await self._stream.aclose()


def memory_bytes_pair() -> tuple[TrioBytes, Any]:
    """A stream in memory as the client wants it, and its far end as a stream of trio."""
    ours, theirs = memory_stream_pair()
    return TrioBytes(ours), theirs
