"""Sharded writers: what owning the key of every write costs, and how long keys take to change hands.

The same transactions (BEGIN, one INSERT, COMMIT) by four tasks on the same pool, with the fence in front and without,
in turns. Then a second writer comes, goes, and another one dies, while the tasks go on writing.
"""

from __future__ import annotations

import random
import time
from collections.abc import Awaitable, Callable

import trio

from bench.report import Figure, Spread, latency, rates
from bench.system import Options, system
from replicad.errors import NotOwner
from replicad.postgres.bridge import Database, open_database
from replicad.sharding import ShardedWriter, open_sharded_writer

TASKS = 4
SECONDS = 3.0  # for each measurement of the rate
KEYS = [f"!room{number}:example.org" for number in range(200)]
TTL = 2.0  # of the writer that dies
INSERT = "INSERT INTO bench (key, body) VALUES ($1, 'hello')"

Write = Callable[[str], Awaitable[None]]


def run(options: Options) -> list[Figure]:
    """The cost of the fence, and the times of hand-overs."""
    with system() as ours:
        ours.install()
        ours.sql("CREATE TABLE bench (id bigserial PRIMARY KEY, key text NOT NULL, body text NOT NULL)")
        ours.replicad("streams", "add", "bench", "--table", "public.bench", "--id", "id")
        ours.replicad("sharding", "enable", "bench")
        return trio.run(_measure, options, ours.url)


async def _measure(options: Options, url: str) -> list[Figure]:
    async with open_database(url, size=TASKS + 4, application_name="bench") as db:
        async with open_sharded_writer(db, "bench", "a", address="a", ttl=30) as writer:
            cost = await _cost(options, db, writer)
            return [cost, *await _hand_overs(options, db, writer)]


async def _cost(options: Options, db: Database, writer: ShardedWriter) -> Figure:
    async def plainly(key: str) -> None:
        async with db.connection() as connection, connection.transaction():
            await connection.execute(INSERT, key)

    async def owning(key: str) -> None:
        async with writer.owning(key) as connection:
            await connection.execute(INSERT, key)

    ours, theirs = [], []
    for _ in range(options.runs):
        theirs.append(await _rate(plainly, SECONDS * min(1.0, options.scale)))
        ours.append(await _rate(owning, SECONDS * min(1.0, options.scale)))
    return Figure(
        f"writes of {TASKS} tasks, each owning its key",
        rates(ours, "/s"),
        f"without {rates(theirs, '/s')}",
        Spread.of_ratios(ours, theirs),
        at_least=0.8,
    )


async def _rate(write: Write, seconds: float) -> float:
    done = 0

    async def work() -> None:
        nonlocal done
        while True:
            await write(random.choice(KEYS))
            done += 1

    began = trio.current_time()
    with trio.move_on_after(seconds):
        async with trio.open_nursery() as nursery:
            for _ in range(TASKS):
                nursery.start_soon(work)
    return done / (trio.current_time() - began)


async def _hand_overs(options: Options, db: Database, first: ShardedWriter) -> list[Figure]:
    took: dict[str, list[float]] = {"joins": [], "leaves": [], "dies": []}
    waits: list[float] = []
    async with trio.open_nursery() as nursery:
        sites = {"a": first}
        for _ in range(TASKS):
            nursery.start_soon(_write_anywhere, sites, waits)
        for _ in range(options.runs):
            began = time.monotonic()
            async with open_sharded_writer(db, "bench", "b", address="b", ttl=30) as second:
                sites["b"] = second
                await _until(lambda second=second: second.statistics().owned == 128)
                took["joins"].append(time.monotonic() - began)
                began = time.monotonic()
            sites["b"] = first
            await _until(lambda: first.statistics().owned == 256)
            took["leaves"].append(time.monotonic() - began)
        nursery.cancel_scope.cancel()
    for _ in range(options.runs):
        await db.execute(f"SELECT replicad.writer_join('bench', 'dead', '{TTL} s')")  # and never a beat
        began = time.monotonic()
        await _until(lambda: first.statistics().owned < 256)
        await _until(lambda: first.statistics().owned == 256)
        took["dies"].append(time.monotonic() - began - TTL)
    return [
        Figure("a second writer joins: until it has half", f"{Spread.of(took['joins'])} s"),
        Figure("it leaves: until the first has all", f"{Spread.of(took['leaves'])} s"),
        Figure("  a write meanwhile, p50 / p99", latency(waits), f"longest {max(waits):.2f} s"),
        Figure(f"it dies: beyond its time to live of {TTL:g} s", f"{Spread.of(took['dies'])} s"),
    ]


async def _write_anywhere(sites: dict[str, ShardedWriter], waits: list[float]) -> None:
    """Write keys wherever they belong, as an application does that sends each write to the owner."""
    at = "a"
    while True:
        key = random.choice(KEYS)
        began = trio.current_time()
        while True:
            try:
                async with sites[at].owning(key, wait=10) as connection:
                    await connection.execute(INSERT, key)
                break
            except NotOwner as refused:
                at = refused.owner if refused.owner in sites else "a"
        waits.append(trio.current_time() - began)


async def _until(condition: Callable[[], bool]) -> None:
    with trio.fail_after(30):
        while not condition():
            await trio.sleep(0.002)
