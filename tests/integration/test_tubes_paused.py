"""A paused tube: readers keep still and keep their leases, changes are recorded, and nothing is lost."""

from __future__ import annotations

import json

import pytest
import trio

from replicad.config.settings import ServerSettings
from replicad.postgres.bridge import Database
from replicad.tubes.serving.waiting import TubeIntervals
from tests.commands import replicad_async
from tests.conftest import PATIENCE
from tests.daemons import Daemon, Paces

from .conftest import Connect, Netcat
from .test_http import ANY_PORT, ask, ask_until
from .test_tubes_wire import HELLO, claim, insert, make_cities, read


@pytest.fixture
def settings() -> ServerSettings:
    return ServerSettings(listen=ANY_PORT, http=ANY_PORT, server_name="example.com")


@pytest.fixture
def paces() -> Paces:
    return Paces(tubes=TubeIntervals(look=0.02))


async def run(database_url: str, *words: str) -> str:
    done = await replicad_async("tubes", *words, "--database", database_url)
    assert done.returncode == 0, done.stderr
    return done.stdout


async def until_state(daemon: Daemon, state: str) -> None:
    """Until the daemon has noticed."""
    wanted = f'replicad_tube_state{{state="{state}",tube="cities"}} 1.0'
    await ask_until(daemon.http, "/metrics", lambda one: wanted in one)


async def all_pods(nc: Netcat, term: int, number: int) -> list[int]:
    """The ids of so many pods of partition 0/2, in their order."""
    found: list[int] = []
    cursor = "0.0"
    with trio.fail_after(PATIENCE):
        while len(found) < number:
            pods, cursor, _ = await read(nc, f"0/2 {term} wait=5 after={cursor}")
            found += [one for pod in pods for one in pod["ids"]]
    return found


async def test_a_paused_tube_gives_no_pods_keeps_leases_and_loses_nothing(
    database: Database, database_url: str, daemon: Daemon, netcat: Connect
) -> None:
    await make_cities(database)
    async with netcat() as nc, netcat() as waiting:
        await nc.expect(*HELLO)
        await waiting.expect(*HELLO)
        term = await claim(nc, "0/2", "ttl=2")
        other = await claim(waiting, "1/2")
        await insert(database, 0, 1)
        (first,) = (await read(nc, f"0/2 {term} wait=5"))[0]
        await waiting.send(f"PODS cities 1/2 {other} wait=50", "TUBE cities")
        assert "goes on with: replicad tubes resume cities" in await run(
            database_url, "pause", "cities", "--reason", "a migration"
        )
        await until_state(daemon, "paused")
        await insert(database, 0, 2)
        await insert(database, 1, 11)
        assert await read(nc, f"0/2 {term} wait=0.3 after={first['seq']}.0") == ([], f"{first['seq']}.0", 0)
        await nc.send(f"ACK cities 0/2 {term} {first['seq']}", f"RENEW cities 0/2 {term}")
        await nc.expect("ACKED cities 0/2 1", f"LEASE cities 0/2 {term} .*")
        await insert(database, 0, 3)
        assert (await read(nc, f"0/2 {term}"))[2] == 0
        assert waiting.lines == [], "the request that waits is not answered"
        shown = await run(database_url, "list")
        assert "a migration; no reader gets its pods until `replicad tubes resume cities`" in shown
        status = json.loads((await ask(daemon.http, "/status")).text)["tubes"][0]
        assert (status["state"], status["paused_at"] is None) == ("paused", False)
        assert (await ask(daemon.http, "/readyz")).status == 200, "it is on purpose"
        figures = await ask(daemon.http, "/metrics")
        assert figures.value('replicad_tube_paused_seconds{tube="cities"}') > 0
        assert await run(database_url, "resume", "cities") == "tube cities goes on\n"
        assert await all_pods(nc, term, 2) == [2, 3]
        (row, *_) = await waiting.expect("RDATA tube:cities 1/2 .*", "CURSOR cities 1/2 .*", "TUBE cities 2")
        assert json.loads(row.split(" ", 4)[4])["ids"] == [11]
        await until_state(daemon, "ok")
        assert await run(database_url, "resume", "cities") == "tube cities was not paused\n"


async def test_a_range_that_was_planned_before_the_pause_is_read_to_its_end(
    database: Database, daemon: Daemon, netcat: Connect
) -> None:
    await make_cities(database)
    async with netcat() as nc:
        await nc.expect(*HELLO)
        term = await claim(nc, "0/2")
        await insert(database, 0, 1)
        _, cursor, number = await read(nc, f"0/2 {term} wait=5 plan=1")
        assert number == 1
        await database.execute("SELECT tube.tube_pause('cities')")
        await until_state(daemon, "paused")
        pods, _, _ = await read(nc, f"0/2 {term} upto={cursor}")
        assert [pod["ids"] for pod in pods] == [[1]]


async def test_a_tube_that_is_dropped_while_paused_is_not_paused_when_it_is_made_again(
    database: Database, daemon: Daemon, netcat: Connect
) -> None:
    await make_cities(database)
    await database.execute("SELECT tube.tube_pause('cities')")
    await until_state(daemon, "paused")
    await database.execute("SELECT tube.tube_ensure_absent('cities')")
    await ask_until(daemon.http, "/status", lambda one: "tubes" not in json.loads(one.text))
    await database.execute("DROP SCHEMA shard_0, shard_1 CASCADE")
    await make_cities(database)
    await until_state(daemon, "ok")
    async with netcat() as nc:
        await nc.expect(*HELLO)
        term = await claim(nc, "0/2")
        await insert(database, 0, 7)
        assert await all_pods(nc, term, 1) == [7]


async def test_the_time_from_touch_to_ack_and_from_id_to_client_are_histograms(
    database: Database, daemon: Daemon, netcat: Connect
) -> None:
    """Of pods each once, and none of a backfill; of rows once for each client."""
    await make_cities(database)
    await database.execute("CREATE TABLE events (id bigserial PRIMARY KEY, body text)")
    await database.execute("SELECT replicad.stream_add('events', 'events', 'id')")
    await daemon.publisher.find("events")
    async with netcat() as nc, netcat() as reader, netcat() as second:
        for one in (nc, reader, second):
            await one.expect(*HELLO)
        for one in (reader, second):
            await one.send("REPLICATE events NOW")
            await one.until("POSITION .*")
        await database.execute("INSERT INTO events (body) VALUES ('a'), ('b')")
        for one in (reader, second):
            await one.expect("RDATA events .*", "RDATA events .*")
        term = await claim(nc, "0/2")
        await database.execute("SELECT tube.cities_touch(0, ARRAY[5], 'B')")
        await database.execute(
            "INSERT INTO tube.cities (op, shard, ids, ts) VALUES ('U', 0, '{1}', clock_timestamp() - interval '20 s'),"
            " ('U', 0, '{2}', clock_timestamp())"
        )
        ids: list[int] = []
        while len(ids) < 3:
            pods, cursor, _ = await read(nc, f"0/2 {term} wait=5")
            ids = [one for pod in pods for one in pod["ids"]]
        await nc.send(f"ACK cities 0/2 {term} upto={cursor}")
        await nc.expect("ACKED cities 0/2 3")
        wanted = 'replicad_tube_ack_delay_seconds_count{tube="cities"} 2.0'
        found = await ask_until(daemon.http, "/metrics", lambda one: wanted in one)
        of_tube = 'replicad_tube_ack_delay_seconds_bucket{le="%s",tube="cities"}'
        assert (found.value(of_tube % "10.0"), found.value(of_tube % "30.0")) == (1, 2)
        assert 20 <= found.value('replicad_tube_ack_delay_seconds_sum{tube="cities"}') < 20 + PATIENCE
        of_stream = 'replicad_stream_delay_seconds_%s{order="per_writer",stream="events"}'
        assert found.value(of_stream % "count") == 4
        assert 0 < found.value(of_stream % "sum") < 4 * PATIENCE
