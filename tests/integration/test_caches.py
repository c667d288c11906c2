"""Cached functions before a real Postgres, kept from being stale by a real daemon, through races, cuts and kills."""

from __future__ import annotations

import json
import random
import re
import signal
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.lowlevel

from replicad.caches import async_invalidator
from replicad.caches import blocking_invalidator as blocking
from replicad.caches.cache import Guard, Ticket
from replicad.caches.registry import Caches, CachesStatistics
from replicad.caches.writing import invalidate, invalidate_many
from replicad.client.async_client import open_client
from replicad.client.blocking_client import BlockingClient
from replicad.errors import StreamRefused
from replicad.postgres import schema
from replicad.postgres.bridge import Database, open_database
from replicad.protocol.connection import Timing
from replicad.retry import Backoff
from replicad.streams.registry import Registry
from tests.commands import replicad_async
from tests.conftest import PATIENCE
from tests.daemons import Daemon
from tests.roles import as_daemon

from .clients.proxy import FaultProxy
from .conftest import Connect
from .test_faults_daemon import serving

KINDS = ["blocking", "trio"]
THINGS = 4
QUICK = Timing(0.2, 1.0)
Call = Callable[[int], Awaitable[int]]


class Watched(Caches):
    """Notes which versions the rows that were carried out told of: what is served later must not be older."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.told: defaultdict[int, int] = defaultdict(int)
        self.committed: dict[int, int] = {}  # before the connection was made that is going to be live
        self.lives = 0
        self.register_group("thing_changed", [("thing", lambda keys: keys[:1])])

    def apply(self, rows: Sequence[str]) -> None:
        super().apply(rows)
        for func, keys, _ in map(json.loads, rows):
            if func == "thing_changed":
                self.told[keys[0]] = max(self.told[keys[0]], keys[1])

    def stand(self, *, live: bool, problem: str | None = None) -> None:
        super().stand(live=live, problem=problem)
        if live:
            self.lives += 1
            for thing, version in self.committed.items():
                self.told[thing] = max(self.told[thing], version)


class BlockingWatched(Watched, blocking.BlockingCacheInvalidator):
    pass


class TrioWatched(Watched, async_invalidator.CacheInvalidator):
    pass


@asynccontextmanager
async def caching(
    kind: str, port: int, load: Callable[[int], Awaitable[int]], timing: Timing | None = None, **options: Any
) -> AsyncIterator[tuple[Any, Call]]:
    """An invalidator that follows the daemon, and a function `thing`, cached, that any task may call."""
    quickly = Backoff(first=0.02, cap=0.1)
    if kind == "trio":
        caches: Any = TrioWatched(**options)
        thing = caches.cached(name="thing")(load)
        async with (
            open_client("127.0.0.1", port, name="test", timing=timing, connect_timeout=1.0) as client,
            trio.open_nursery() as nursery,
        ):
            nursery.start_soon(lambda: caches.run(client, backoff=quickly))
            yield caches, thing
            nursery.cancel_scope.cancel()
        return
    caches = BlockingWatched(**options)

    @caches.cached(name="thing")  # type: ignore[untyped-decorator]
    def of_thread(number: int) -> int:
        return trio.from_thread.run(load, number)

    async def call(number: int) -> int:
        return await trio.to_thread.run_sync(of_thread, number)

    with BlockingClient("127.0.0.1", port, name="test", timing=timing, connect_timeout=1.0) as client:
        following = caches.following(client, backoff=quickly)
        await trio.to_thread.run_sync(following.__enter__)
        try:
            yield caches, call
        finally:
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(following.__exit__, None, None, None)


async def until(condition: Callable[[], bool], within: float = PATIENCE) -> None:
    with trio.fail_after(within):
        while not condition():
            await trio.sleep(0.005)


async def make_things(db: Database) -> None:
    await schema.install(db, "stream")
    await schema.install(db, "cache")
    await db.fetch_value("SELECT replicad.cache_enable()")
    await db.execute("CREATE TABLE things (id int PRIMARY KEY, version int NOT NULL)")
    await db.execute(f"INSERT INTO things SELECT n, 0 FROM generate_series(0, {THINGS - 1}) n")


async def change(db: Database, thing: int, pause: float = 0.0, commit: str = "COMMIT") -> int:
    """Raise a thing's version and invalidate it, in one transaction; the version."""
    async with db.connection() as connection:
        await connection.execute("BEGIN")
        version = await connection.fetch_value(
            "UPDATE things SET version = version + 1 WHERE id = $1 RETURNING version", thing
        )
        await invalidate(connection, "thing_changed", [thing, version])
        await trio.sleep(pause)
        await connection.execute(commit)
    return int(version)


@pytest.fixture
async def things(database: Database) -> Database:
    await make_things(database)
    return database


class Race:
    """Writers that change things and readers that check what they are served, all at once, until told to stop."""

    def __init__(self, db: Database, caches: Watched, thing: Call) -> None:
        self.db, self.caches, self.thing = db, caches, thing
        self.committed = dict.fromkeys(range(THINGS), 0)
        self.turn = trio.Lock()  # held to see that no transaction is open
        self.stopped = False

    async def write(self, seed: int) -> None:
        chance = random.Random(seed)
        while not self.stopped:
            number = chance.randrange(THINGS)
            async with self.turn:
                if chance.random() < 0.2:
                    await change(self.db, number, commit="ROLLBACK")
                else:
                    self.committed[number] = await change(self.db, number, chance.random() / 200)
            await trio.sleep(chance.random() / 50)

    async def read(self, seed: int) -> None:
        chance = random.Random(seed)
        while not self.stopped:
            number = chance.randrange(THINGS)
            told = self.caches.told[number]
            version = await self.thing(number)
            assert version >= told, f"version {version} of {number} was served after {told} was told of"
            await trio.sleep(0.001)  # writers need their turn, on a busy machine too

    def lived(self, times: int) -> bool:
        """Whether the caches have become live that often."""
        return self.caches.lives >= times

    def wrote(self, versions: int) -> bool:
        """Whether so many versions are committed."""
        return sum(self.committed.values()) >= versions

    async def no_transaction_is_open(self) -> None:
        """Notes what is committed, for the next connection that gets live."""
        async with self.turn:
            self.caches.committed = dict(self.committed)


def slow_load(db: Database) -> Callable[[int], Awaitable[int]]:
    """Reads a thing, and now and then is late with what it read."""
    chance = random.Random(5)

    async def load(number: int) -> int:
        version = await db.fetch_value("SELECT version FROM things WHERE id = $1", number)
        await trio.sleep(chance.choice([0, 0, 0.002, 0.03]))
        return int(version)

    return load


@pytest.mark.parametrize("kind", [pytest.param("blocking", marks=pytest.mark.long), "trio"])
async def test_nothing_stale_is_served_through_races_cuts_and_killed_daemons(
    kind: str, things: Database, database_url: str, tmp_path: Path
) -> None:
    chance = random.Random(11)
    cuts = [chance.randint(200, 3000) for _ in range(25)]
    with FaultProxy(0, cuts, seed=1) as proxy:
        async with caching(kind, proxy.port, slow_load(things)) as (caches, thing):
            race = Race(things, caches, thing)
            async with trio.open_nursery() as nursery:
                for seed in range(3):
                    nursery.start_soon(race.write, seed)
                for seed in range(6):
                    nursery.start_soon(race.read, seed)
                for times in (3, 1):  # the first daemon's connections are cut again and again
                    with serving(tmp_path, "--database", database_url) as daemon:
                        proxy.target = (await daemon.wait_ready())[1]
                        await until(partial(race.lived, caches.lives + times))
                        await until(lambda: proxy.cuts > 3)
                        await trio.sleep(0.3)  # races without faults
                        daemon.end(signal.SIGKILL)
                        await until(lambda: not caches.live)
                    await until(partial(race.wrote, sum(race.committed.values()) + 20))
                    await race.no_transaction_is_open()
                with serving(tmp_path, "--database", database_url) as daemon:
                    proxy.target = (await daemon.wait_ready())[1]
                    await until(lambda: caches.live)
                    race.stopped = True
                    await until(lambda: len(nursery.child_tasks) == 0)
                    await until(lambda: all(caches.told[n] >= v for n, v in race.committed.items()))
                    for number, version in race.committed.items():
                        assert await thing(number) == await thing(number) == version
            statistics = caches.statistics().caches["thing"]
    assert statistics.hits > 100
    assert statistics.refused > 0, "no value was late: the race that tickets are for never happened"
    assert statistics.bypassed > 0


@pytest.mark.parametrize("tickets", [True, False], ids=["tickets", "without"])
@pytest.mark.parametrize("kind", KINDS)
async def test_a_value_read_before_and_stored_after_an_invalidation_is_not_kept(
    kind: str, tickets: bool, things: Database, daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And without tickets the same race leaves it there for good, so this is what keeps it out."""
    read, go_on = trio.Event(), trio.Event()

    async def load(number: int) -> int:
        version = await things.fetch_value("SELECT version FROM things WHERE id = $1", number)
        if version == 0:
            read.set()
            await go_on.wait()
        return int(version)

    def give_back(self: Guard, ticket: Ticket) -> bool:
        return True

    if not tickets:
        monkeypatch.setattr(Guard, "give_back", give_back)
    async with caching(kind, daemon.addresses[0].port, load) as (caches, thing):
        await until(lambda: caches.live)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(thing, 1)
            await read.wait()
            await change(things, 1)
            await until(lambda: caches.told[1] == 1)
            go_on.set()
        assert await thing(1) == (1 if tickets else 0)


@pytest.mark.parametrize("kind", KINDS)
async def test_entries_outlive_a_lost_connection_and_what_was_missed_is_caught_up_with_first(
    kind: str, things: Database, start_daemon: Callable[..., AbstractAsyncContextManager[Daemon]]
) -> None:
    loads: defaultdict[int, int] = defaultdict(int)

    async def load(number: int) -> int:
        loads[number] += 1
        return int(await things.fetch_value("SELECT version FROM things WHERE id = $1", number))

    async with start_daemon(ping_interval=0.2) as daemon:
        with FaultProxy(daemon.addresses[0].port) as proxy:
            async with caching(kind, proxy.port, load, QUICK) as (caches, thing):
                await until(lambda: caches.live)
                await change(things, 3)
                await until(lambda: caches.told[3] == 1)
                assert [await thing(n) for n in (0, 1, 2, 0, 1, 2)] == [0] * 6
                assert loads == {0: 1, 1: 1, 2: 1}
                proxy.frozen = True
                await until(lambda: not caches.live)
                assert await thing(1) == 0, "answered by Postgres"
                assert loads == {0: 1, 1: 2, 2: 1}
                await change(things, 0)
                async with things.connection() as open_one:
                    # Nothing behind its row is published before it ends, though that was committed while we were away.
                    await open_one.execute("BEGIN")
                    await invalidate(open_one, "other", [])
                    await change(things, 1)
                    proxy.frozen = False
                    await until(lambda: "still missing" in (caches.problem or ""))
                    assert await thing(1) == 1, "not live before all of what was committed has come"
                    await open_one.execute("ROLLBACK")
                await until(lambda: caches.live)
                assert (caches.told[0], caches.told[1]) == (1, 1)
                kept = dict(loads)
                assert [await thing(n) for n in (0, 1, 2)] == [1, 1, 0]
                assert loads == {0: kept[0] + 1, 1: kept[1] + 1, 2: 1}
                assert caches.statistics().caches["thing"].emptied == 0


async def test_where_the_token_resumes_nothing_everything_is_emptied(
    things: Database, database_url: str, start_daemon: Callable[..., AbstractAsyncContextManager[Daemon]]
) -> None:
    """What came after it was trimmed while nobody listened."""
    async with start_daemon(ping_interval=0.2) as daemon:
        with FaultProxy(daemon.addresses[0].port) as proxy:
            async with caching("trio", proxy.port, slow_load(things), QUICK) as (caches, thing):
                await until(lambda: caches.live)
                await change(things, 3)
                await until(lambda: caches.told[3] == 1)
                assert await thing(0) == 0
                proxy.frozen = True
                await until(lambda: not caches.live)
                for _ in range(3):
                    await change(things, 0)
                last = int(await things.fetch_value("SELECT max(id) FROM replicad.cache_invalidation"))
                await trim(database_url, last)
                proxy.frozen = False
                await until(lambda: caches.live)
                assert caches.told[0] == 0, "the rows are gone"
                assert await thing(0) == 3
                assert caches.statistics().caches["thing"].emptied == 1


async def trim(url: str, upto: int) -> None:
    """Trim the stream as its owner, once the daemon has noted that it published all of it (every second)."""
    async with open_database(as_daemon(url), size=1, application_name="owner") as owner:
        with trio.fail_after(PATIENCE):
            while True:
                with suppress(StreamRefused):
                    await Registry(owner).trim("caches", before=upto)
                    return
                await trio.sleep(0.05)


async def test_no_entry_is_given_out_longer_than_it_is_proven_to_be_good(
    things: Database, start_daemon: Callable[..., AbstractAsyncContextManager[Daemon]]
) -> None:
    """Connected all the time, while an open transaction holds back what others have invalidated."""
    async with start_daemon(ping_interval=0.1) as daemon:
        port = daemon.addresses[0].port
        async with caching("blocking", port, slow_load(things), max_staleness=1.0) as (caches, thing):
            await until(lambda: caches.live)
            assert await thing(1) == 0
            async with things.connection() as open_one:
                await open_one.execute("BEGIN")
                await invalidate(open_one, "other", [])
                await change(things, 1)
                with trio.fail_after(PATIENCE):
                    while await thing(1) == 0:
                        await trio.sleep(0.01)
                assert (caches.live, caches.told[1]) == (True, 0)
                await open_one.execute("ROLLBACK")
            await until(lambda: caches.told[1] == 1)
            with trio.fail_after(PATIENCE):
                hits = caches.statistics().caches["thing"].hits
                while caches.statistics().caches["thing"].hits == hits:
                    assert await thing(1) == 1
                    await trio.sleep(0.01)


async def test_an_open_transaction_of_a_writer_of_its_own_holds_back_nobody_else(
    things: Database, daemon: Daemon
) -> None:
    await things.fetch_value("SELECT replicad.cache_enable(ARRAY['slow'])")
    async with caching("trio", daemon.addresses[0].port, slow_load(things)) as (caches, _):
        await until(lambda: caches.live)
        async with things.connection() as slow:
            await slow.execute("SET application_name = 'slow'")
            for version in (1, 2):  # daemons know it from its first row on
                await slow.execute("BEGIN")
                await invalidate(slow, "thing_changed", [0, version])
                if version == 2:
                    await change(things, 1)
                    await until(lambda: caches.told[1] == 1)
                    assert caches.told[0] == 1
                await slow.execute("COMMIT")
                await until(lambda: caches.told[0] == version)  # noqa: B023 - it is over before the next
            await slow.execute("RESET application_name")


async def test_a_writer_that_gives_a_text_in_the_place_of_keys_is_refused_and_writes_nothing(things: Database) -> None:
    async with things.connection() as connection:
        await connection.execute("BEGIN")
        for ask in (
            lambda: invalidate(connection, "thing", "abc"),  # type: ignore[arg-type]
            lambda: invalidate_many(connection, "thing", "abc"),  # type: ignore[arg-type]
            lambda: invalidate_many(connection, "thing", ["abc", "def"]),  # type: ignore[list-item]
            lambda: invalidate_many(connection, "thing", [[1], b"abc"]),  # type: ignore[list-item]
        ):
            with pytest.raises(TypeError, match="the keys of an entry are a list, also if there is one key"):
                await ask()
        await connection.execute("COMMIT")
    assert await things.fetch_value("SELECT count(*) FROM replicad.cache_invalidation") == 0


async def test_streams_say_up_to_where_there_are_rows(things: Database, netcat: Connect) -> None:
    """Of those that are committed: whoever waits for that id gets there, though an id may lie above it for ever."""
    async with netcat() as nc, things.connection() as connection:
        await nc.expect("SERVER .*")
        await nc.send("TAKEN caches")
        await nc.expect("TAKEN caches 0")
        await connection.execute("BEGIN")
        await invalidate_many(connection, "thing", [[1], [2]])
        await nc.send("TAKEN caches", "TAKEN nothing")
        await nc.expect("TAKEN caches 0", "ERROR unknown_stream: .*")
        await connection.execute("COMMIT")
        await nc.send("TAKEN caches")
        await nc.expect("TAKEN caches 2")
        await nc.send("REPLICATE caches EARLIEST")
        await nc.until(r'RDATA caches master 2 \["thing", \[2\], [0-9]+\]')


async def test_what_the_page_shows_works_as_it_stands_there(things: Database, daemon: Daemon) -> None:
    page = (Path(__file__).parents[2] / "docs" / "caches.md").read_text(encoding="utf-8")
    [worker] = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    [writer] = re.findall(r"```sql\n(.*?)```", page, re.DOTALL)
    served: list[CachesStatistics] = []

    def serve() -> None:
        caches, get_user = names["caches"], names["get_user"]
        caches.wait_live(10)
        for _ in range(2):
            get_user("@bob:example.com")
        trio.from_thread.run(things.execute, writer)
        trio.from_thread.run(until, lambda: caches.statistics().caches["get_user"].entries == 0)
        served.append(caches.statistics())

    names: dict[str, Any] = {"User": str, "serve": serve}
    await things.execute("CREATE TABLE users (id text PRIMARY KEY, name text)")
    await trio.to_thread.run_sync(exec, worker.replace("9009", str(daemon.addresses[0].port)), names)
    assert served[0].caches["get_user"].hits == served[0].caches["get_user"].invalidated == 1
    assert not names["caches"].live


async def test_a_command_line_enables_invalidates_and_tells(
    database: Database, database_url: str, daemon: Daemon
) -> None:
    async def replicad(*words: str, fails: bool = False) -> str:
        done = await replicad_async("caches", *words, "--database", database_url)
        assert (done.returncode != 0) == fails, done.stderr
        return done.stderr if fails else done.stdout

    loads = []

    async def load(number: int) -> int:
        loads.append(number)
        return number

    async with caching("trio", daemon.addresses[0].port, load) as (caches, thing):
        assert await thing(1) == await thing(1) == 1
        assert len(loads) == 2, "not enabled, not cached"
        assert "serve it within 1 s" in await replicad("enable", "--writer", "w1", "--writer", "w2")
        await until(lambda: caches.live)
        assert await thing(1) == await thing(1) == 1
        assert len(loads) == 3
        assert await thing(2) == 2
        await replicad("invalidate", "thing", "1")
        await until(lambda: caches.statistics().caches["thing"].entries == 1)
        await replicad("invalidate", "thing")
        await until(lambda: caches.statistics().caches["thing"].emptied == 1)
        assert '{"cache_func": "thing", "invalidations": 2, "whole": 1, ' in await replicad("names", "--json")
        await thing(1)
        await replicad("disable")
        await until(lambda: not caches.live)
        await until(lambda: caches.statistics().caches["thing"].entries == 0)
        assert "so no worker would get it" in await replicad("invalidate", "thing", fails=True)
