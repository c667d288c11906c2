"""Workers and daemons that come, go and are killed at random, and a reader who checks every word of the stream."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import trio

from replicad.postgres.bridge import Database
from tests.conftest import PATIENCE
from tests.daemons import Daemon

from .conftest import netcat_to
from .test_faults_daemon import ServeProcess, serving
from .test_presence import enable

SECONDS = 5.0
STEADY = "@steady:b"  # always syncs, at a worker that loses its daemon now and then
GONE = (OSError, trio.BrokenResourceError, trio.ClosedResourceError)


class Worker:
    """An instance with users. It says all of them again on each new connection, to any daemon that it reaches."""

    def __init__(self, name: str, chance: Random, addresses: Callable[[], list[tuple[str, int]]]) -> None:
        self.name = name
        self.users: set[str] = set()
        self._chance = chance
        self._addresses = addresses
        self._stream: trio.SocketStream | None = None
        self._turn = trio.Lock()

    async def run(self) -> None:
        while True:
            with suppress(*GONE):
                self._stream = await trio.open_tcp_stream(*self._chance.choice(self._addresses()))
                await self.say(*(f"USER_SYNC {self.name} {user} P start 1" for user in sorted(self.users)))
                while await self._stream.receive_some(65536):
                    pass
            self._stream = None
            await trio.sleep(0.05)

    async def say(self, *lines: str) -> None:
        async with self._turn:
            if self._stream is not None:
                with suppress(*GONE):
                    await self._stream.send_all("".join(f"{line}\n" for line in lines).encode())

    async def lose_connection(self) -> None:
        if self._stream is not None:
            await self._stream.aclose()

    async def live(self) -> None:
        """Change something every now and then. What is said while there is no connection is said on the next one."""
        while True:
            await trio.sleep(self._chance.uniform(0.01, 0.06))
            with trio.CancelScope(shield=True):  # what has changed is also said
                await self._change_something()

    async def _change_something(self) -> None:
        user = f"@{self._chance.randrange(8)}:b"
        match self._chance.randrange(20):
            case 0:
                self.users.clear()
                await self.say(f"CLEAR_USER_SYNC {self.name}")
            case 1:
                await self.lose_connection()
            case number if number % 3 == 0:
                self.users.add(user)
                await self.say(f"USER_SYNC {self.name} {user} P start 1")
            case _:
                self.users.discard(user)
                await self.say(f"USER_SYNC {self.name} {user} P end 1")


async def test_through_kills_of_daemons_and_workers_every_word_is_a_change_and_the_last_ones_are_true(
    database: Database, database_url: str, daemon: Daemon, tmp_path: Path
) -> None:
    chance = Random(5)
    book = await enable(database, daemon, grace=0.2, lost_grace=1.5, ttl=1.0)
    rows: list[tuple[str, str]] = []
    living: dict[str, tuple[str, int]] = {}
    address = (daemon.addresses[0].host, daemon.addresses[0].port)
    workers = [Worker(f"w{number}", chance, lambda: [*living.values()] or [address]) for number in range(4)]
    workers[0].users.add(STEADY)

    async def read() -> None:
        async with netcat_to(daemon) as nc:
            await daemon.publisher.find("presence")
            await nc.send("REPLICATE presence EARLIEST")
            while True:
                *_, line = await nc.until("RDATA presence .*")
                user, state, *_ = json.loads(line.split(" ", 4)[4])
                rows.append((user, state))

    async def be_killed(name: str, kills: list[ServeProcess]) -> None:
        folder = tmp_path / name
        folder.mkdir()
        while True:
            with serving(folder, "--database", database_url) as process:
                living[name] = await process.wait_ready()
                await trio.sleep(chance.uniform(0.3, 1.5))
                del living[name]
                process.end(signal.SIGKILL)
                kills.append(process)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(read)
        for worker in workers:
            nursery.start_soon(worker.run)
        async with trio.open_nursery() as trouble:
            kills: list[ServeProcess] = []
            for name in ("x", "y"):
                trouble.start_soon(be_killed, name, kills)
            for worker in workers[1:]:
                trouble.start_soon(worker.live)
            for _ in range(10):
                await trio.sleep(SECONDS / 10)
                await workers[0].lose_connection()
            with trio.fail_after(PATIENCE):
                while len(kills) < 3:
                    await trio.sleep(0.1)
            trouble.cancel_scope.cancel()
        living.clear()  # from now on all are at the daemon that nobody kills
        expected = set().union(*(worker.users for worker in workers))
        with trio.fail_after(PATIENCE):
            while {user["user"] for user in await book.users(100)} != expected or len(rows) < await told(database):
                await trio.sleep(0.1)
        nursery.cancel_scope.cancel()

    state: dict[str, str] = {}
    for user, told_state in rows:
        assert state.get(user, "offline") != told_state, f"{user} was {told_state} already"
        state[user] = told_state
    assert {user for user, last in state.items() if last == "online"} == expected
    assert rows.count((STEADY, "online")) == 1
    assert (STEADY, "offline") not in rows
    assert len(rows) > 20


async def told(database: Database) -> Any:
    return await database.fetch_value("SELECT count(*) FROM replicad.presence_stream")
