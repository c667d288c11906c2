"""Caches and presence of an async program, on both loops."""

from __future__ import annotations

import json

import anyio

from replicad.caches.async_invalidator import CacheInvalidator
from replicad.client.async_client import open_client
from replicad.presence.reporter import open_presence
from replicad.retry import Backoff
from tests import vocabulary as c
from tests.conftest import PATIENCE
from tests.loops import on_both_loops

from .fake import FakeDaemon
from .world import World


def sent(fake: FakeDaemon, kind: type) -> list[object]:
    return [command for command in fake.received if isinstance(command, kind)]


@on_both_loops
async def test_caches_are_invalidated_also_for_rows_of_an_outage_and_end_with_the_client(
    fake: FakeDaemon, world: World
) -> None:
    caches = CacheInvalidator()
    stored = {1: "one", 2: "two"}
    loads: list[int] = []

    @caches.cached(name="thing")
    async def thing(number: int) -> str:
        loads.append(number)
        return stored[number]

    async def change(number: int, value: str) -> None:
        stored[number] = value
        world.commit("caches", "w1", json.dumps(["thing", [number], None]))

    async def comes(number: int, value: str) -> None:
        with anyio.fail_after(PATIENCE):
            while await thing(number) != value:
                await anyio.sleep(0.005)

    async with open_client("127.0.0.1", fake.port, name="a test") as client, anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: caches.run(client, backoff=Backoff(first=0.02, cap=0.1)))
        with anyio.fail_after(PATIENCE):
            await caches.wait_live()
        assert [await thing(1), await thing(1), await thing(2)] == ["one", "one", "two"]
        assert loads == [1, 2]
        await change(1, "uno")
        await comes(1, "uno")
        assert await thing(2) == "two"
        await anyio.to_thread.run_sync(fake.stop)
        await change(2, "due")
        await anyio.to_thread.run_sync(fake.start)
        with anyio.fail_after(PATIENCE):
            await comes(2, "due")
            await caches.wait_live()
        client.close()  # ends `run`, and so the group
    assert not caches.live


@on_both_loops
async def test_a_reporter_reports_everything_again_after_a_loss_and_clears_at_its_end(fake: FakeDaemon) -> None:
    async def until(number: int, kind: type) -> None:
        with anyio.fail_after(PATIENCE):
            while len(sent(fake, kind)) < number:
                await anyio.sleep(0.005)

    async with open_presence("127.0.0.1", fake.port, instance="w1") as worker:
        worker.start("@a:b", "P", at_ms=1)
        worker.start("@b:b", at_ms=2)
        await until(2, c.UserSync)
        await anyio.to_thread.run_sync(fake.stop)
        worker.end("@b:b", at_ms=3)
        await anyio.to_thread.run_sync(fake.start)
        with anyio.fail_after(PATIENCE):
            while worker.statistics().connections < 2:
                await anyio.sleep(0.005)
        await until(3, c.UserSync)
        assert sent(fake, c.UserSync)[-1] == c.UserSync("w1", "@a:b", "P", True, 1)
        assert sent(fake, c.ClearUserSync) == []
    await until(1, c.ClearUserSync)
