"""A world, a fake daemon that serves it, and clients of both kinds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest

from replicad.client.blocking_client import BlockingClient
from tests.conftest import PATIENCE
from tests.loops import LOOPS

from .both import InThread
from .fake import FakeDaemon
from .world import FakeStream, FakeTube, World

MakeClient = Callable[..., Any]


@pytest.fixture
def world() -> World:
    """Streams `events` and `caches`, tube `cities` of two partitions; all empty."""
    made = World()
    made.streams = {"events": FakeStream(), "caches": FakeStream()}
    made.tubes = {"cities": FakeTube(partitions=2)}
    return made


@pytest.fixture
def fake(world: World) -> Iterator[FakeDaemon]:
    """A running fake daemon."""
    daemon = FakeDaemon(world)
    daemon.start()
    yield daemon
    daemon.kill()


@pytest.fixture(params=["blocking", *LOOPS])
def make_client(request: pytest.FixtureRequest) -> Iterator[MakeClient]:
    """Makes clients of a port; tests that use it hold for the blocking client, and for the async one on both loops."""
    make: MakeClient = BlockingClient if request.param == "blocking" else partial(InThread, request.param)
    with ExitStack() as stack:
        yield lambda port, **options: stack.enter_context(make("127.0.0.1", port, **{"name": "a test", **options}))


@pytest.fixture
def client(make_client: MakeClient, fake: FakeDaemon) -> Any:
    """A client of the fake daemon."""
    return make_client(fake.port)


def wait_until(condition: Callable[[], object], what: str) -> None:
    """Look again and again until the condition holds."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain until {what}"
        time.sleep(0.005)
