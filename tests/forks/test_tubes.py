"""The history of a tube forks while a worker has pods: no pod is lost, and what is unknown is told and mended.

The worker's downstream keeps each row with the seq of the touch for which it was written, so it can name stale ids.
"""

from __future__ import annotations

import random
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest
import trio

from replicad.client.async_client import open_client
from replicad.client.worker import Batch, Worker, WorkerSettings
from replicad.client.worker_history import TubeFork
from replicad.config.settings import Address, ServerSettings
from tests.conftest import PATIENCE, psql
from tests.daemons import Daemon, open_daemon

from .cluster import Cluster
from .world import long

QUICK = WorkerSettings(
    batch_ids=5, lease_ttl=6.0, poll=20.0, tries=50, backoff_first=0.05, backoff_cap=0.2, garbage_settle=0.1
)
SETUP = (
    "SELECT tube.tube_ensure_exists('items')",
    "CREATE TABLE items (id bigint PRIMARY KEY, value text)",
    "SELECT tube.tube_table_ensure_attached('items', 'items', 0)",
)


class World:
    """A cluster, a daemon, a tube of the table `items`, and a worker that copies its rows."""

    def __init__(self, cluster: Cluster, daemon: Daemon) -> None:
        self.cluster, self.daemon = cluster, daemon
        self.downstream: dict[int, tuple[str, int]] = {}  # id: value, seq
        self.handled: list[int] = []
        self.busy: set[int] = set()
        self.forks: list[TubeFork] = []
        self.gate: set[int] = set()  # these ids are not finished before `opened`
        self.gated = trio.Event()
        self.opened = trio.Event()
        address = daemon.addresses[0]
        self.worker = Worker(
            lambda: open_client(address.host, address.port, name="worker"),
            "items",
            self.handle,
            stale_ids=self.stale_ids,
            on_fork=self.on_fork,
            settings=QUICK,
        )

    async def sql(self, *text: str) -> str:
        return await trio.to_thread.run_sync(psql, self.cluster.url, *text)

    async def handle(self, batch: Batch) -> None:
        ids = {int(touch.id): touch.seq for touch in batch.touches}
        assert not self.busy & ids.keys(), "an id is at work twice at once"
        self.busy |= ids.keys()
        try:
            await self.copy(ids)
        finally:
            self.busy -= ids.keys()

    async def copy(self, ids: dict[int, int]) -> None:
        rows = await self.sql(f"SELECT id, value FROM items WHERE id IN ({','.join(map(str, ids))})")
        found = {int(row.split("|")[0]): row.split("|")[1] for row in rows.splitlines()}
        if self.gate & ids.keys():
            self.gated.set()
            await self.opened.wait()
        for id, seq in ids.items():
            self.downstream.pop(id, None)
            if id in found:
                self.downstream[id] = found[id], seq
        self.handled += ids

    async def stale_ids(self, shard: int, before: int, limit: int) -> list[int]:
        await trio.lowlevel.checkpoint()
        return [id for id, (_, seq) in self.downstream.items() if seq < before][:limit]

    async def on_fork(self, fork: TubeFork) -> None:
        await trio.lowlevel.checkpoint()
        self.forks.append(fork)

    async def until(self, condition: Callable[[], Awaitable[bool]], what: str) -> None:
        with trio.move_on_after(PATIENCE) as scope:
            while not await condition():
                await trio.sleep(0.05)
        if scope.cancelled_caught:
            print("SOURCE", await self.sql("SELECT string_agg(id || ':' || value, ' ' ORDER BY id) FROM items"))
            print("DOWN", sorted(self.downstream.items()))
            print("MISSED", await self.sql("SELECT * FROM tube.tube_missed"))
            print(
                "GEN",
                await self.sql("SELECT number, id, reason, shared, shared_at, created_at FROM tube.tube_generation"),
            )
            print("BACK", await self.sql("SELECT * FROM tube.tube_backfill"))
            print("TUBE", await self.sql("SELECT * FROM tube.items"))
        assert not scope.cancelled_caught, (
            f"waited in vain until {what}: {self.downstream}, {self.daemon.troubles.current()}"
        )

    async def until_empty(self) -> None:
        async def empty() -> bool:
            return await self.sql("SELECT count(*) FROM tube.items") == "0"

        await self.until(empty, "the tube is empty")

    async def equal(self) -> bool:
        rows = await self.sql("SELECT id, value FROM items ORDER BY id")
        return rows.splitlines() == [f"{id}|{value}" for id, (value, _) in sorted(self.downstream.items())]

    async def until_equal(self) -> None:
        await self.until(self.equal, "the downstream is equal to the source")

    async def until_noted(self) -> None:
        """The last position is in the database."""

        async def noted() -> bool:
            at = (
                "SELECT (positions ->> 'items')::bigint >= pg_sequence_last_value('tube.tube_seq') FROM tube.tube_noted"
            )
            return await self.sql(at) == "t"

        await self.until(noted, "the position is noted")

    def state(self) -> str:
        return self.daemon.troubles.why("tube", "items") or "ok"


@contextmanager
def open_cluster(folder: Path, template: Path) -> Iterator[Cluster]:
    cluster = Cluster(folder, template)
    try:
        psql(cluster.url, *SETUP)
        yield cluster
    finally:
        cluster.close()


@asynccontextmanager
async def serving(cluster: Cluster) -> AsyncIterator[World]:
    settings = ServerSettings(listen=Address("127.0.0.1", 0), server_name="forks")
    async with open_daemon(settings, cluster.url) as daemon:
        world = World(cluster, daemon)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(world.worker.run)
            yield world
            nursery.cancel_scope.cancel()


@asynccontextmanager
async def open_world(folder: Path, template: Path) -> AsyncIterator[World]:
    with open_cluster(folder, template) as cluster:
        async with serving(cluster) as world:
            yield world


async def insert(world: World, first: int, last: int, value: str) -> None:
    """One transaction, and so one pod, for each id."""
    await world.sql(*(f"INSERT INTO items VALUES ({id}, '{value}')" for id in range(first, last + 1)))


Back = Callable[[], Awaitable[None]]


async def prepare(world: World, how: str) -> Back:
    """What brings the cluster back to the state of now."""
    cluster = world.cluster
    if how == "promotion":
        standby = await trio.to_thread.run_sync(cluster.make_standby)
        await trio.to_thread.run_sync(cluster.cut, standby)

        async def promote() -> None:
            await trio.to_thread.run_sync(cluster.promote, standby)

        return promote
    if how == "copy":
        await trio.to_thread.run_sync(cluster.stop, signal.SIGINT)
        copy = await trio.to_thread.run_sync(cluster.copy)
        await trio.to_thread.run_sync(cluster.start)

        async def put_back() -> None:
            await trio.to_thread.run_sync(cluster.stop)
            await trio.to_thread.run_sync(cluster.put_back, copy)
            await trio.to_thread.run_sync(cluster.start)

        return put_back
    if how == "reload":  # the rows of a dump, over the tables as they are
        kept = await world.sql("SELECT pg_sequence_last_value('tube.tube_seq')")

        async def reload() -> None:
            await world.sql(
                f"BEGIN; DELETE FROM tube.items; SELECT setval('tube.tube_seq', {kept});"
                "SET LOCAL session_replication_role = replica; DELETE FROM items WHERE id > 5; COMMIT"
            )

        return reload
    dump = await trio.to_thread.run_sync(cluster.dump)

    async def restore() -> None:
        await trio.to_thread.run_sync(lambda: cluster.restore(dump, one_transaction=how == "dump_at_once"))

    return restore


@pytest.mark.parametrize(
    ("how", "policy"),
    [
        ("copy", "backfill"),
        long("promotion", "report"),
        long("dump", "report"),
        long("dump_at_once", "backfill"),
        long("reload", "report"),
        long("promotion", "backfill"),
        long("copy", "report"),
        long("dump", "backfill"),
        long("dump_at_once", "report"),
        long("reload", "backfill"),
    ],
)
async def test_pods_with_the_numbers_of_lost_pods_are_not_lost_and_what_was_passed_on_is_mended(
    postgres_folder: Path, fork_template: Path, how: str, policy: str
) -> None:
    async with open_world(postgres_folder, fork_template) as world:
        await world.sql(f"SELECT tube.tube_on_fork('items', '{policy}')")
        await insert(world, 1, 5, "shared")
        await world.until_empty()
        await world.until_noted()
        go_back = await prepare(world, how)
        await insert(world, 6, 10, "lost")
        await world.sql("UPDATE items SET value = 'lost' WHERE id = 1")
        await world.until_empty()
        assert world.downstream.keys() == set(range(1, 11))
        world.gate = {11, 12, 13}
        await insert(world, 11, 13, "lost")
        with trio.fail_after(PATIENCE):
            await world.gated.wait()
        held = int(await world.sql("SELECT max(seq) FROM tube.items"))
        await go_back()
        await insert(world, 101, 112, "new")
        world.opened.set()  # the worker's ACK names pods 11, 12 and 13, whose numbers pods of 101 to 112 may have
        await world.until_empty()
        assert set(range(101, 113)) <= set(world.handled)
        assert world.worker.statistics.parked == 0

        async def told() -> bool:
            return bool(world.forks)

        await world.until(told, "the worker is told")
        fork = world.forks[0]
        assert (fork.tube, fork.after < fork.upto, fork.upto <= held) == ("items", True, True)
        if policy == "report":
            assert fork.state == "unknown"

            async def reported() -> bool:
                return "replicad tubes backfill items --shard 0" in world.state()

            await world.until(reported, "the state names the remedy")
            await world.sql("SELECT tube.tube_backfill_schedule('items', 'id', 0, 0)")
        await world.until_equal()

        async def ended() -> bool:
            return world.state() == "ok"

        await world.until(ended, "the trouble is over")
        await world.until_empty()


async def test_an_idle_workers_cursor_hides_no_pod_after_a_fork(postgres_folder: Path, fork_template: Path) -> None:
    """It is told at once, though its lease lives on, and its cursor lies above the numbers of the new pods."""
    async with open_world(postgres_folder, fork_template) as world:
        await insert(world, 1, 5, "shared")
        await world.until_empty()
        go_back = await prepare(world, "promotion")
        await insert(world, 6, 30, "lost")
        await world.until_empty()
        await go_back()
        began = trio.current_time()
        await insert(world, 101, 105, "new")
        await world.until_empty()
        assert set(range(101, 106)) <= set(world.handled)
        assert trio.current_time() - began < QUICK.lease_ttl / 2, "the worker was told at once"


async def test_after_a_restart_that_loses_nothing_no_touch_is_unknown(
    postgres_folder: Path, fork_template: Path
) -> None:
    async with open_world(postgres_folder, fork_template) as world:
        await world.sql("SELECT tube.tube_on_fork('items', 'backfill')")
        await insert(world, 1, 5, "shared")
        await world.until_empty()
        await world.until_noted()
        await trio.to_thread.run_sync(world.cluster.restart, signal.SIGINT)
        await insert(world, 6, 10, "later")
        await world.until_equal()
        await world.until_empty()
        assert (world.forks, world.state()) == ([], "ok")
        assert await world.sql("SELECT count(*) FROM tube.tube_missed") == "0"
        assert (
            await world.sql("SELECT string_agg(reason, ' ' ORDER BY number) FROM tube.tube_generation")
            == "first restarted"
        )


@pytest.mark.long
async def test_after_a_promotion_that_no_process_lived_through_all_touches_since_the_note_are_unknown(
    postgres_folder: Path, fork_template: Path
) -> None:
    with open_cluster(postgres_folder, fork_template) as cluster:
        async with serving(cluster) as world:
            await insert(world, 1, 5, "shared")
            await world.until_empty()
            go_back = await prepare(world, "promotion")
            await insert(world, 6, 10, "lost")
            await world.until_empty()
            downstream = world.downstream
        await go_back()
        async with serving(cluster) as world:
            world.downstream = downstream

            async def reported() -> bool:
                return "replicad tubes backfill items --shard 0" in world.state()

            await world.until(reported, "the state names the remedy")
            await world.sql("SELECT tube.tube_backfill_schedule('items', NULL, 0, 0)")
            await world.until_equal()

            async def ended() -> bool:
                return world.state() == "ok"

            await world.until(ended, "the trouble is over")


async def write(world: World, chance: random.Random) -> None:
    """A few transactions; one in ten is made while the triggers are off."""
    for _ in range(chance.randint(1, 8)):
        first = chance.randrange(1, 60)
        value = f"v{chance.randrange(1000)}"
        text = chance.choice(
            [
                f"INSERT INTO items SELECT i, '{value}' FROM generate_series({first}, {first + 4}) i"
                " ON CONFLICT (id) DO UPDATE SET value = excluded.value",
                f"UPDATE items SET value = '{value}' WHERE id BETWEEN {first} AND {first + 9}",
                f"DELETE FROM items WHERE id BETWEEN {first} AND {first + 2}",
            ]
        )
        if chance.random() < 0.1:
            text = f"ALTER TABLE items DISABLE TRIGGER USER; {text}; ALTER TABLE items ENABLE TRIGGER USER"
        await world.sql(f"BEGIN; {text}; COMMIT")


async def mended(world: World) -> bool:
    """Do what the state of the tube asks for; whether it asks for nothing and the downstream is equal to the source.

    Triggers that were off may be noticed later than this first looks, so both must be true at once.
    """
    if "Run a backfill" in world.state():
        await world.sql("SELECT tube.tube_backfill_request('items', NULL, 0, 0)")
    await trio.sleep(0.3)
    return world.state() == "ok" and await world.equal()


@pytest.mark.parametrize("seed", [1, *map(long, range(2, 20))])
async def test_whatever_happens_to_the_history_of_a_tube_the_downstream_ends_equal_to_the_source(
    postgres_folder: Path, fork_template: Path, seed: int
) -> None:
    chance = random.Random(seed)
    async with open_world(postgres_folder, fork_template) as world:
        await world.sql(f"SELECT tube.tube_on_fork('items', '{chance.choice(['report', 'backfill'])}')")
        for _ in range(3):
            await write(world, chance)
            await trio.sleep(chance.random())
            how = chance.choice(["promotion", "copy", "dump", "dump_at_once", "crash", "restart"])
            if how in {"crash", "restart"}:
                await trio.to_thread.run_sync(
                    world.cluster.restart, signal.SIGQUIT if how == "crash" else signal.SIGINT
                )
            else:
                go_back = await prepare(world, how)
                await write(world, chance)
                await trio.sleep(chance.random())
                await write(world, chance)
                await go_back()
            await write(world, chance)
        await world.until(lambda: mended(world), "nothing is missed, and the downstream is equal to the source")
        await world.until_empty()
