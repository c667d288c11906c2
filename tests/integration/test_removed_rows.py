"""Rows that were removed without a trim, by DELETE: each kind of reader that comes back with an older token is told so,
by its own words, and none goes on as if nothing was missing. A reader that was past them goes on.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace

import pytest
import trio

from replicad.client.async_client import open_client
from replicad.client.events import Reset, RowBatch
from replicad.config.settings import ServerSettings
from replicad.errors import DataLoss, TokenExpired
from replicad.postgres.bridge import Database
from replicad.protocol.tokens import Vector
from replicad.spark.offsets import StreamOffset
from replicad.streams.registry import Registry
from replicad.streams.serving.intervals import StreamIntervals
from tests.commands import replicad_async
from tests.conftest import PATIENCE
from tests.daemons import Daemon, Paces
from tests.lengths import first
from tests.redis_servers import ModelRedis
from tests.spark.harness import make_source, read_tasks, struct
from tests.sse import event_source

from .test_http import ANY_PORT, ask
from .test_redis import QUICK, SERVER, redis_of, wait_publishing

Start = Callable[..., AbstractAsyncContextManager[Daemon]]
Told = tuple[str, list[int]]  # what a reader was told of rows that are gone, and the ids that it got at last

ROWS, REMOVED = 20, 10


@pytest.fixture
def paces() -> Paces:
    streams = StreamIntervals(late_look=0.1, audit_after=0.2, look=0.1, kept_look=0.0)
    return replace(Paces(streams=streams), redis=QUICK)


@pytest.fixture
def settings() -> ServerSettings:
    return ServerSettings(listen=ANY_PORT, http=ANY_PORT, server_name=SERVER)


@pytest.fixture
async def model() -> AsyncIterator[ModelRedis]:
    async with trio.open_nursery() as nursery:
        redis = ModelRedis(nursery)
        await redis.start()
        yield redis
        nursery.cancel_scope.cancel()


async def pages(daemon: Daemon, model: ModelRedis, token: int) -> Told:
    """A client of pages that begins again where it is told to."""
    page = await ask(daemon.http, f"/streams/events/rows?after={token}")
    said = ""
    if page.status == 410:
        said = page.text
        page = await ask(daemon.http, f"/streams/events/rows?after={json.loads(said)['token']}")
    assert page.status == 200, page.text
    return said, [json.loads(line)["token"] for line in page.text.splitlines()]


async def events(daemon: Daemon, model: ModelRedis, token: int) -> Told:
    """A browser, whose EventSource sends the id of the last event that it has."""
    said, last = "", str(token)
    async with event_source(daemon.http, "/streams/events/live", last) as source:
        if source.status == 410:
            problem = await source.body()
            said, last = json.dumps(problem), problem["token"]
    found: list[int] = []
    async with event_source(daemon.http, "/streams/events/live", last) as source:
        assert source.status == 200, await source.body()
        while ROWS not in found and token < ROWS:
            event = await source.next()
            if event.name == "message":
                found.append(event.data["token"])
    return said, found


async def tail(daemon: Daemon, model: ModelRedis, token: int) -> Told:
    """`replicad tail` ends with the reason, and is run again from the beginning."""
    words = ["--server", str(daemon.addresses[0]), "--json", "--count", str(ROWS - REMOVED)]
    said = ""
    done = await replicad_async("tail", "events", "--from", str(token), *words)
    if done.returncode:
        said = done.stderr
        done = await replicad_async("tail", "events", "--from", "EARLIEST", *words)
    assert done.returncode == 0, done.stderr
    return said, [json.loads(line)["token"] for line in done.stdout.splitlines()]


async def redis(daemon: Daemon, model: ModelRedis, token: int) -> Told:
    """Our client with rows over Redis, made anew."""
    said, start = "", str(token)
    for _ in range(2):
        found: list[int] = []
        async with open_client(model.url, name="redis", server_name=SERVER, daemon=str(daemon.addresses[0])) as client:
            try:
                async with client.follow({"events": start}) as follower:
                    while ROWS not in found and token < ROWS:
                        event = await anext(follower)
                        if isinstance(event, RowBatch):
                            found.append(event.token)
                        elif isinstance(event, Reset):
                            return f"{event.reason}", found
            except TokenExpired as error:
                said, start = str(error), "EARLIEST"
                continue
        return said, found
    raise AssertionError("refused again")


async def spark(daemon: Daemon, model: ModelRedis, token: int) -> Told:
    """A query with a checkpoint of before. It fails, and its user gives it another checkpoint."""
    address = daemon.addresses[0]
    source = make_source({"host": address.host, "port": str(address.port), "stream": "events", "pollTimeout": "0"})

    def batch(start: dict[str, object] | None) -> list[int]:
        reader = source.streamReader(struct(source))
        begin = reader.initialOffset() if start is None else start
        end = reader.latestOffset(begin, reader.getDefaultReadLimit())
        return sorted(row["token"] for row in read_tasks(source, reader.partitions(begin, end)))

    epoch = (await ask(daemon.http, "/streams/events/rows?after=EARLIEST&limit=1")).headers["replicad-next"]
    checkpoint = StreamOffset(Vector(token, epoch=epoch.partition("!")[0])).to_json()
    try:
        return "", await trio.to_thread.run_sync(batch, checkpoint)
    except DataLoss as error:
        return str(error), await trio.to_thread.run_sync(batch, None)


KINDS = {one.__name__: one for one in (pages, events, tail, redis, spark)}


@pytest.mark.parametrize("kind", first(3, KINDS))
async def test_a_reader_of_each_kind_that_comes_back_after_rows_were_removed_is_told(
    database: Database, start_daemon: Start, model: ModelRedis, kind: str
) -> None:
    reader: Callable[[Daemon, ModelRedis, int], Awaitable[Told]] = KINDS[kind]
    await database.execute("CREATE TABLE events (id bigserial PRIMARY KEY, body json)")
    await Registry(database).add("events", "public.events", "id", row="body")
    async with start_daemon(**redis_of(model.url)) as daemon:
        await wait_publishing(daemon)
        await daemon.publisher.find("events")
        await database.execute("INSERT INTO events (body) SELECT '1' FROM generate_series(1, $1)", ROWS)
        with trio.fail_after(PATIENCE):
            while await database.fetch_value("SELECT lowest FROM replicad.stream_kept") != 1:
                await trio.sleep(0.05)
        await database.execute("DELETE FROM events WHERE id <= $1", REMOVED)
        with trio.fail_after(PATIENCE):
            while (await Registry(database).load_stream("events")).trimmed_upto != REMOVED:
                await trio.sleep(0.05)
        with trio.fail_after(PATIENCE):
            said, found = await reader(daemon, model, 5)
        assert f"no rows of events up to {REMOVED} are left" in said or "token_expired" in said, said
        assert found == list(range(REMOVED + 1, ROWS + 1))
        with trio.fail_after(PATIENCE):
            said, found = await reader(daemon, model, REMOVED)
        assert (said, found) == ("", list(range(REMOVED + 1, ROWS + 1)))
