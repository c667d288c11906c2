"""A single error leaves what users call as itself, whichever task it comes from: no exception group."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from functools import partial

import anyio
import pytest

from replicad.client.async_client import AsyncClient, open_client
from replicad.client.worker import Batch, Worker
from replicad.errors import LeaseLost, NotAuthorised, UnknownTube
from replicad.presence.reporter import open_presence
from tests import vocabulary as c
from tests.conftest import PATIENCE
from tests.loops import on_both_loops

from .fake import FakeDaemon


async def ignore(_: Batch) -> None:
    pass


def worker_of(fake: FakeDaemon, **options: object) -> Worker:
    connect = partial(open_client, "127.0.0.1", fake.port, name="a worker")
    return Worker(connect, "cities", ignore, partitions=[1], **options)  # type: ignore[arg-type]


@on_both_loops
async def test_a_worker_whose_tube_is_removed_says_so(fake: FakeDaemon) -> None:
    gone = b"ERROR unknown_tube: tube cities was removed\n"
    fake.hook = lambda _, command: gone if isinstance(command, c.Claim) else None
    with pytest.raises(UnknownTube, match="was removed"), anyio.fail_after(PATIENCE):
        await worker_of(fake).run()


@on_both_loops
async def test_what_the_users_function_that_opens_clients_raises_ends_the_worker_as_it_is(fake: FakeDaemon) -> None:
    opened = 0

    def connect() -> AbstractAsyncContextManager[AsyncClient]:
        nonlocal opened
        opened += 1
        if opened > 1:
            raise ZeroDivisionError
        return open_client("127.0.0.1", fake.port, name="a worker")

    with pytest.raises(ZeroDivisionError), anyio.fail_after(PATIENCE):
        await Worker(connect, "cities", ignore).run()


@on_both_loops
async def test_a_lost_connection_and_a_refusal_come_out_of_nested_clients(fake: FakeDaemon) -> None:
    lost = b"ERROR lease_lost: another has it\n"
    fake.hook = lambda _, command: lost if isinstance(command, c.Renew) else None
    connect = partial(open_client, "127.0.0.1", fake.port, name="a test")
    with pytest.raises(LeaseLost):
        async with connect() as one, connect() as two, two.follow({"events": None}):
            await one.renew("cities", c.Part(0, 2), 1)


@on_both_loops
async def test_a_reporter_that_is_refused_says_so(fake: FakeDaemon) -> None:
    fake.token = "s3cret"
    with pytest.raises(NotAuthorised), anyio.fail_after(PATIENCE):
        async with open_presence("127.0.0.1", fake.port, instance="w1", token="guess"):
            await anyio.sleep_forever()
