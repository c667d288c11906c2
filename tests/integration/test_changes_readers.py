"""Readers of a stream of changes through daemons that end and are killed: each ends equal to the table, or to its part.

The long form plays 60 seeds, with daemons in processes of their own that are killed.
"""

from __future__ import annotations

import random
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, contextmanager
from hashlib import sha256
from pathlib import Path

import pytest
import trio

from replicad.client.async_client import open_client
from replicad.client.events import PositionMoved
from replicad.config.settings import Address, ServerSettings
from replicad.postgres.bridge import Database
from replicad.streams.serving.intervals import StreamIntervals
from tests.changes_checker import FORMS, STREAM, VALUES, Reader, World
from tests.conftest import PATIENCE
from tests.daemons import Paces, open_daemon
from tests.lengths import LONG
from tests.roles import as_daemon

SECRET = "a-secret-of-enough-characters"
FILTERED = [number for number, form in enumerate(FORMS) if "n" in form.recorded.filters]
Begin = Callable[[], AbstractAsyncContextManager[object]]


@pytest.fixture
def port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@pytest.fixture
def access(tmp_path: Path) -> Path:
    """An access file with a client that reads all, and one for each value."""
    rights = {"all": f"read {STREAM}", **{f"n{value}": f"read {STREAM} n={value}" for value in VALUES}}
    file = tmp_path / "access.toml"
    file.write_text(
        "".join(
            f'[client.{name}]\ntoken_sha256 = "{sha256(f"{name}-{SECRET}".encode()).hexdigest()}"\nallow = "{line}"\n'
            for name, line in rights.items()
        )
    )
    return file


@contextmanager
def process(url: str, port: int, access: Path) -> Iterator[None]:
    """A daemon in a process of its own, which is killed at the end."""
    command = (sys.executable, "-m", "replicad", "serve", "--listen", f"127.0.0.1:{port}", "--database", as_daemon(url))
    log = access.with_name("serve.log").open("ab")
    with log, subprocess.Popen([*command, "--access-file", str(access)], stdout=log, stderr=log) as served:
        try:
            yield
        finally:
            served.kill()


async def keep_daemons(begin: Begin, done: trio.Event, chance: random.Random) -> None:
    """One daemon after another, each for a while; the last one stays."""
    for _ in range(3):
        async with begin():
            with trio.move_on_after(chance.uniform(1, 8 if LONG else 2)):
                await done.wait()
    async with begin():
        await trio.sleep_forever()


async def follow(reader: Reader, port: int) -> None:
    """Read for ever; the client connects again by itself."""
    async with (
        open_client("127.0.0.1", port, name=reader.name, token=f"{reader.name}.{reader.name}-{SECRET}") as client,
        client.follow({STREAM: "EARLIEST"}, also=(PositionMoved,), first_patience=None) as follower,
    ):
        async for event in follower:
            reader.take(event)


@pytest.mark.parametrize("seed", range(60) if LONG else FILTERED[-1:])
async def test_readers_of_all_and_of_parts_end_equal_to_the_table(
    database: Database, database_url: str, seed: int, port: int, access: Path
) -> None:
    chance, done = random.Random(seed), trio.Event()
    world = World(seed, database)
    await world.begin()
    readers = [Reader("all")]
    if "n" in world.form.recorded.filters:
        readers += [Reader(f"n{value}", value) for value in VALUES]
    settings = ServerSettings(listen=Address("127.0.0.1", port), server_name="example.com", access_file=access)
    paces = Paces(streams=StreamIntervals(changes=0.05, filtered=0.1))

    def begin() -> AbstractAsyncContextManager[object]:
        if not LONG:
            return open_daemon(settings, database_url, paces=paces)
        stack = AsyncExitStack()
        stack.enter_context(process(database_url, port, access))
        return stack

    async with trio.open_nursery() as nursery:
        nursery.start_soon(keep_daemons, begin, done, chance)
        for reader in readers:
            nursery.start_soon(follow, reader, port)
        assert await world.play(transactions=40 if LONG else 10) is None
        done.set()
        last = await world.last_id()
        with trio.fail_after(3 * PATIENCE):
            while not all(reader.position >= last for reader in readers):
                await trio.sleep(0.05)
        nursery.cancel_scope.cancel()
    assert [why for reader in readers if (why := await reader.difference(world))] == []
