"""A stream with several writers whose history forks again and again, read over each transport by readers that are cut
off and come back with the token that they have last. Each does what it is told to (it discards what is void), and each
has every row in the end.
"""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from functools import partial
from itertools import count

import pytest
import trio

from replicad.client.async_client import AsyncClient, open_client
from replicad.client.events import Reset, RowBatch
from replicad.config.settings import ServerSettings
from replicad.postgres.bridge import Connection, Database
from replicad.streams.registry import Registry
from tests.conftest import PATIENCE
from tests.daemons import Daemon
from tests.redis_servers import ModelRedis
from tests.sse import event_source

from .test_http import ANY_PORT, ask
from .test_redis import SERVER, paces, redis_of, wait_publishing

__all__ = ["paces"]

Start = Callable[..., AbstractAsyncContextManager[Daemon]]
WRITERS = ("a", "b", "c")
INSERT = "INSERT INTO events (instance_name, body) VALUES ($1, '1')"
ROWS = 8  # in each generation


class Reader:
    """What one reader has: the writer of each row."""

    def __init__(self, daemon: Daemon, dice: random.Random) -> None:
        self.daemon = daemon
        self.dice = dice
        self.rows: dict[int, str] = {}

    def discard(self, instance: str | None, above: int | None) -> None:
        """Rows above a position are void: those of a writer, or of all."""
        self.rows = {
            id: writer
            for id, writer in self.rows.items()
            if (above is not None and id <= above) or instance not in (None, "*", writer)
        }

    def patience(self) -> int:
        """After how many events it is cut off."""
        return self.dice.choice((3, 30, 300))


async def read_events(reader: Reader, *, cut: bool = True) -> None:
    """As a browser does."""
    token = "EARLIEST"
    while True:
        async with event_source(reader.daemon.http, "/streams/events/live", token) as source:
            assert source.status == 200, await source.body()
            for _ in range(reader.patience()) if cut else count():
                try:
                    event = await source.next()
                except EOFError:
                    break
                token = event.id or token
                if event.name == "message":
                    reader.rows[event.data["token"]] = event.data["instance"]
                elif event.name == "reset":
                    reader.discard(event.data["instance"], event.data["discard_after"])


async def read_pages(reader: Reader) -> None:
    token = "EARLIEST"
    while True:
        page = await ask(reader.daemon.http, f"/streams/events/rows?after={token}&limit=5")
        if page.status == 409:
            found = json.loads(page.text)
            token = found["token"]
            reader.discard(None, int(found["discard_after"]))
            continue
        assert page.status == 200, page.text
        for line in page.text.splitlines():
            row = json.loads(line)
            reader.rows[row["token"]] = row["instance"]
        token = page.headers["replicad-next"]
        await trio.sleep(0.02)


def client_of(
    open: Callable[[Daemon], AbstractAsyncContextManager[AsyncClient]], *, linear: bool
) -> Callable[[Reader], Awaitable[None]]:
    """A reader with our client, which is made anew each time, as a process that is started again."""

    async def read(reader: Reader) -> None:
        token: str | None = "EARLIEST"
        while True:
            async with open(reader.daemon) as client, client.follow({"events": token}, linear=linear) as follower:
                left = reader.patience()
                async for event in follower:
                    match event:
                        case RowBatch(token=id, instance=instance):
                            reader.rows[id] = instance
                        case Reset(instance=instance, token=above):
                            reader.discard(instance, above)
                    token = follower.token("events")
                    left -= 1
                    if not left:
                        break

    return read


async def write(sessions: dict[str, Connection], dice: random.Random) -> None:
    """Rows of each writer, while one of them is held back by a transaction that stays open."""
    held = dice.choice(WRITERS)
    await sessions[held].execute("BEGIN")
    await sessions[held].execute(INSERT, held)
    for _ in range(ROWS):
        writer = dice.choice(WRITERS)
        await sessions[writer].execute(INSERT, writer)
        await trio.sleep(dice.random() * 0.01)


async def commit(sessions: dict[str, Connection]) -> None:
    for session in sessions.values():
        await session.execute("COMMIT")


async def wait_noted(database: Database) -> None:
    """Until the database has the position of a writer that is ahead of the others."""
    ahead = "SELECT count(*) FROM replicad.stream_position a JOIN replicad.stream_position b USING (stream)"
    with trio.fail_after(PATIENCE):
        while not await database.fetch_value(f"{ahead} WHERE b.writer = 0 AND a.position >= b.position + {ROWS // 2}"):
            await trio.sleep(0.02)


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


@pytest.mark.parametrize("seed", range(2))
async def test_every_reader_has_every_row_in_the_end(
    database: Database, start_daemon: Start, model: ModelRedis, seed: int
) -> None:
    dice = random.Random(seed)
    await database.execute("CREATE TABLE events (id bigserial PRIMARY KEY, instance_name text, body json)")

    def by_tcp(daemon: Daemon) -> AbstractAsyncContextManager[AsyncClient]:
        return open_client(daemon.addresses[0].host, daemon.addresses[0].port, name="tcp")

    def by_redis(daemon: Daemon) -> AbstractAsyncContextManager[AsyncClient]:
        return open_client(model.url, name="redis", server_name=SERVER, daemon=str(daemon.addresses[0]))

    kinds = {
        "events": partial(read_events, cut=False),
        "events that break off": read_events,
        "pages": read_pages,
        "tcp": client_of(by_tcp, linear=False),
        "linear": client_of(by_tcp, linear=True),
        "redis": client_of(by_redis, linear=False),
    }
    async with AsyncExitStack() as stack:
        sessions: dict[str, Connection] = {}
        for name in WRITERS:
            sessions[name] = await stack.enter_async_context(database.connection())
            await sessions[name].execute(f"SET application_name = '{name}'")
            await sessions[name].execute(INSERT, name)
        await Registry(database).add("events", "public.events", "id", instance_column="instance_name", row="body")
        daemon = await stack.enter_async_context(start_daemon(**redis_of(model.url)))
        await wait_publishing(daemon)
        nursery = await stack.enter_async_context(trio.open_nursery())
        readers = {kind: Reader(daemon, random.Random(seed)) for kind in kinds}
        for kind, reader in readers.items():
            nursery.start_soon(kinds[kind], reader)
        for _ in range(2):
            await write(sessions, dice)
            await wait_noted(database)
            await commit(sessions)
            await write(sessions, dice)  # mostly not noted any more, so it is not shared with the next generation
            await Registry(database).fork(await Registry(database).load_stream("events"), "restarted")
            await daemon.publisher.look_at("events")
            await commit(sessions)
        there = {row["id"]: row["instance_name"] for row in await database.fetch("SELECT * FROM events")}
        with trio.move_on_after(PATIENCE / 4):
            while any(reader.rows != there for reader in readers.values()):
                await trio.sleep(0.05)
        missing = {kind: sorted(there.keys() - reader.rows.keys()) for kind, reader in readers.items()}
        assert not any(missing.values()), missing
        nursery.cancel_scope.cancel()
