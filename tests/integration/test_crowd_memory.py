"""What a crowd of clients took goes back to the system when the crowd has gone, not only to Python's own lists.

`make bench BENCH_ARGS=isolation` has the figures.
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path

import psutil
import pytest
import trio

from replicad.daemon.process import allocator_of_this_process
from replicad.postgres.bridge import open_database

from .test_process_bounds import HANG, Served, add_things, serving

CROWD = 1500
LEFT = 0.5  # of what the crowd took, at most; a third is usual here, and all of it with Python's own allocator


@pytest.mark.skipif(allocator_of_this_process() is None, reason="needs glibc 2.33 or newer")
@pytest.mark.long
async def test_the_memory_of_a_crowd_goes_back_to_the_system(
    database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONMALLOC", "malloc")  # as in deploy/
    async with open_database(database_url, size=1, application_name="test") as database:
        await add_things(database)
        await database.execute(
            "INSERT INTO events (body) SELECT to_jsonb(repeat('x', 100)) FROM generate_series(2, 5000)"
        )
        with serving(Served(tmp_path, database_url)) as served:
            await served.wait_ready()
            process = psutil.Process(served.process.pid)

            async def follow(stack: AsyncExitStack) -> None:
                nc = await stack.enter_async_context(served.connect())
                await nc.send("REPLICATE events EARLIEST")
                await nc.until("RDATA events master 100 .*")  # and reads no further

            async with AsyncExitStack() as alone:
                await follow(alone)
            before = most = process.memory_info().rss
            async with AsyncExitStack() as crowd:
                for _ in range(CROWD // 50):
                    async with trio.open_nursery() as nursery:
                        for _ in range(50):
                            nursery.start_soon(follow, crowd)
                    most = max(most, process.memory_info().rss)  # a slow machine cuts the first before the last come
            assert most > 1.5 * before
            with trio.fail_after(HANG):
                while process.memory_info().rss > before + LEFT * (most - before):
                    await trio.sleep(0.1)
