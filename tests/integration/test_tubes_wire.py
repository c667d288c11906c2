"""The conversation about tubes, by hand: every claim of protocol.md about them, on a real daemon and Postgres."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest
import trio

from replicad.postgres.bridge import Database
from replicad.tubes.commands import Part
from replicad.tubes.pods import PodBook
from tests.conftest import PATIENCE
from tests.daemons import Daemon
from tests.lengths import LONG

from .conftest import Connect, Netcat, netcat_to

HELLO = ("SERVER example\\.com",)


@pytest.fixture
async def cities(database: Database, daemon: Daemon) -> Database:
    """A tube `cities` of two partitions with two sharded tables attached."""
    await make_cities(database)
    return database


async def make_cities(database: Database) -> None:
    await database.execute("SELECT tube.tube_ensure_exists('cities', 2)")
    for shard in (0, 1):
        await database.execute(
            f"CREATE SCHEMA shard_{shard}; CREATE TABLE shard_{shard}.cities (id bigint PRIMARY KEY, name text);"
            f"SELECT tube.tube_table_ensure_attached('cities', 'shard_{shard}.cities')"
        )


@pytest.fixture
async def nc(netcat: Connect) -> AsyncIterator[Netcat]:
    async with netcat() as connected:
        await connected.expect(*HELLO)
        yield connected


async def insert(database: Database, shard: int, *ids: int) -> None:
    await database.execute(f"INSERT INTO shard_{shard}.cities SELECT id FROM unnest($1::bigint[]) AS id", list(ids))


async def claim(nc: Netcat, part: str, options: str = "") -> int:
    await nc.send(f"CLAIM cities {part} {options}".strip())
    [lease] = await nc.expect(f"LEASE cities {part} \\d+ [\\d.]+")
    return int(lease.split()[3])


async def read(nc: Netcat, request: str) -> tuple[list[dict[str, Any]], str, int]:
    """Pods, cursor and count of an answer to PODS."""
    await nc.send(f"PODS cities {request}")
    pods: list[dict[str, Any]] = []
    while True:
        [line] = await nc.expect("(RDATA|CURSOR) .*")
        words = line.split(" ", 4)
        if words[0] == "CURSOR":
            return pods, words[3], int(words[4])
        pods.append(json.loads(words[4]))
        assert int(words[3]) == pods[-1]["seq"]


async def test_claim_read_ack_release_by_hand(cities: Database, nc: Netcat) -> None:
    await insert(cities, 0, 1, 2, 3)
    await cities.execute("UPDATE shard_0.cities SET name = 'x' WHERE id = 2")
    await cities.execute("DELETE FROM shard_0.cities WHERE id = 3")
    await insert(cities, 1, 11)
    await nc.send("TUBE cities")
    await nc.expect_exactly("TUBE cities 2")
    made = await cities.fetch_value("SELECT (extract(epoch FROM created_at) * 1000000)::bigint FROM tube.tube_registry")
    await nc.send("TUBE cities made=1")
    await nc.expect_exactly(f"TUBE cities 2 made={made}")
    term = await claim(nc, "0/2")
    pods, cursor, count = await read(nc, f"0/2 {term} wait=5 limit=10")
    while count < 3:
        more, cursor, n = await read(nc, f"0/2 {term} wait=5 after={cursor}")
        pods, count = pods + more, count + n
    assert [(pod["op"], pod["shard"], pod["ids"]) for pod in pods] == [
        ("I", 0, [1, 2, 3]),
        ("U", 0, [2]),
        ("D", 0, [3]),
    ]
    await nc.send(f"ACK cities 0/2 {term} {pods[0]['seq']}")
    await nc.expect_exactly("ACKED cities 0/2 1")
    await nc.send(f"ACK cities 0/2 {term} upto={cursor}")
    await nc.expect_exactly("ACKED cities 0/2 2")
    assert (await read(nc, f"0/2 {term}"))[0] == []
    await nc.send(f"RELEASE cities 0/2 {term}", f"PODS cities 0/2 {term}")
    await nc.expect(f"RELEASE cities 0/2 {term}", "ERROR lease_lost: .*")
    assert await cities.fetch_value('SELECT array_agg(ids ORDER BY seq) FROM tube."cities"') == [[11]]


async def test_what_was_not_acked_comes_again_and_in_order_regular_before_backfill(
    cities: Database, nc: Netcat
) -> None:
    await cities.execute("SELECT tube.cities_touch(0, ARRAY[5,6], 'B'), tube.cities_touch(0, ARRAY[7], 'T')")
    await cities.execute("SELECT tube.cities_touch(0, ARRAY[8], 'B'), tube.cities_touch(0, ARRAY[9], 'T')")
    term = await claim(nc, "0/1")
    await until_position(nc, term, 4)
    for _ in range(2):
        pods, cursor, count = await read(nc, f"0/1 {term}")
        assert [pod["ids"] for pod in pods] == [[7], [9], [5, 6], [8]]
        assert (count, cursor) == (4, f"{pods[1]['seq']}.{pods[3]['seq']}")
    assert [pod["ids"] for pod in (await read(nc, f"0/1 {term} backfill=0"))[0]] == [[7], [9]]
    assert [pod["ids"] for pod in (await read(nc, f"0/1 {term} limit=3"))[0]] == [[7], [9], [5, 6]]
    assert [pod["ids"] for pod in (await read(nc, f"0/1 {term} ids=1"))[0]] == [[7]]
    _, first, _ = await read(nc, f"0/1 {term} limit=1")
    planned = await read(nc, f"0/1 {term} plan=1 after={first}")
    assert planned == ([], cursor, 3)
    assert [pod["ids"] for pod in (await read(nc, f"0/1 {term} after={first} upto={cursor}"))[0]] == [[9], [5, 6], [8]]


async def until_position(nc: Netcat, term: int, pods: int) -> None:
    """Until the daemon hands out that many pods."""
    with trio.fail_after(PATIENCE):
        while (await read(nc, f"0/1 {term} wait=1 limit=100000"))[2] < pods:
            await trio.sleep(0.01)


async def test_a_pod_that_commits_late_is_not_passed_over(cities: Database, nc: Netcat) -> None:
    term = await claim(nc, "0/1")
    async with cities.connection() as late:
        async with late.transaction():
            await late.execute("SELECT tube.cities_touch(0, ARRAY[1], 'T')")
            await cities.execute("SELECT tube.cities_touch(0, ARRAY[2], 'T')")
            assert (await read(nc, f"0/1 {term} wait=0.3"))[2] == 0
    pods, _, _ = await read(nc, f"0/1 {term} wait=5")
    assert [pod["ids"] for pod in pods] == [[1], [2]]


async def test_a_waiting_worker_is_woken_by_a_pod_of_its_own_partition(cities: Database, netcat: Connect) -> None:
    async with netcat() as mine, netcat() as other:
        for nc in (mine, other):
            await nc.expect(*HELLO)
        terms = [await claim(mine, "0/2"), await claim(other, "1/2")]
        await mine.send(f"PODS cities 0/2 {terms[0]} wait=300")  # longer than a line is waited for here
        await other.send(f"PODS cities 1/2 {terms[1]} wait=1")
        await cities.execute("SELECT tube.cities_touch(0, ARRAY[1], 'T')")
        await mine.expect('RDATA tube:cities 0/2 .*"ids":\\[1\\].*', "CURSOR cities 0/2 \\d+\\.0 1")
        await other.expect("CURSOR cities 1/2 0\\.0 0")


async def test_a_lease_that_is_held_is_refused_by_name_and_given_when_it_is_released(
    cities: Database, netcat: Connect
) -> None:
    async with netcat() as first, netcat() as second:
        for nc in (first, second):
            await nc.expect(*HELLO)
        await first.send("NAME alice")
        term = await claim(first, "0/2", "holder=alice")
        assert await claim(first, "0/2", "holder=alice") == term
        await second.send("CLAIM cities 0/1", "CLAIM cities 0/2", "CLAIM cities 0/3")
        await second.expect(
            "ERROR lease_held: .*alice.*", "ERROR lease_held: .*alice.*", "ERROR partitions_changed: .*2.*"
        )
        await second.send("CLAIM cities 0/2 wait=30")
        await first.send(f"RELEASE cities 0/2 {term}")
        [lease] = await second.expect("LEASE cities 0/2 \\d+ 30")
        assert int(lease.split()[3]) > term
        await first.expect_exactly(f"RELEASE cities 0/2 {term}")
        for request in (f"PODS cities 0/2 {term}", f"ACK cities 0/2 {term} 1", f"RENEW cities 0/2 {term}"):
            await first.send(request)
            await first.expect("ERROR lease_lost: .*")


async def test_a_silent_holder_loses_its_lease_to_another_daemon_and_its_late_ack_changes_nothing(
    cities: Database, nc: Netcat, start_daemon: Callable[..., Any]
) -> None:
    await insert(cities, 0, 1)
    term = await claim(nc, "0/2", "ttl=1")
    pods, _, _ = await read(nc, f"0/2 {term} wait=5")
    async with start_daemon() as other, netcat_to(other) as heir:
        await heir.expect(*HELLO)
        began = trio.current_time()
        inherited = await claim(heir, "0/2", "wait=300 ttl=30")
        assert trio.current_time() - began >= 0.9
        await nc.send(f"ACK cities 0/2 {term} {pods[0]['seq']}")
        await nc.expect("ERROR lease_lost: .*")
        assert (await read(heir, f"0/2 {inherited} wait=5"))[0] == pods


async def test_a_holder_that_speaks_keeps_its_lease_for_as_long_as_it_does(
    cities: Database, netcat: Connect, nc: Netcat
) -> None:
    term = await claim(nc, "0/2", "ttl=1")
    async with netcat() as rival:
        await rival.expect(*HELLO)
        await rival.send("CLAIM cities 0/2 wait=4")
        for _ in range(8):
            await nc.send(f"PODS cities 0/2 {term} wait=0.5")
            await nc.expect("CURSOR cities 0/2 0\\.0 0")
        await rival.expect("ERROR lease_held: .*")


async def test_what_a_reader_counts_is_kept_until_it_says_something_else(cities: Database, nc: Netcat) -> None:
    for lag in (2, 1):
        await nc.send(f'REPORT cities copy {{"lag": {lag}}}')
        await nc.expect_exactly("REPORT cities copy")
    await nc.send("REPORT nothing copy {}")
    await nc.expect("ERROR unknown_tube: .*")
    for number in range(105):  # names that never come again: only so many are kept
        await nc.send(f"REPORT cities once-{number} {{}}")
        await nc.expect_exactly(f"REPORT cities once-{number}")
    assert await cities.fetch_value("SELECT count(*) FROM tube.tube_report") == 100
    await nc.send('REPORT cities copy {"lag": 1}')
    await nc.expect_exactly("REPORT cities copy")
    assert await cities.fetch_value("SELECT counts ->> 'lag' FROM tube.tube_report WHERE reporter = 'copy'") == "1"
    await nc.send("REPORT cities copy [1]")
    await nc.expect("ERROR bad_line: .*a JSON object.*")


async def test_a_cursor_beyond_the_position_is_refused(cities: Database, nc: Netcat) -> None:
    term = await claim(nc, "0/1")
    await nc.send(f"PODS cities 0/1 {term} after=99.0", f"ACK cities 0/1 {term} upto=99.0")
    await nc.expect("ERROR cursor_ahead: .*", "ERROR cursor_ahead: .*")


async def test_an_id_that_keeps_failing_is_put_aside_and_the_rest_goes_on(cities: Database, nc: Netcat) -> None:
    await insert(cities, 0, 1, 2, 3)
    term = await claim(nc, "0/2")
    [pod], _, _ = await read(nc, f"0/2 {term} wait=5")
    await nc.send(f"PARK cities 0/2 {term} {pod['seq']} 2 5 no such column: naem")
    await nc.expect_exactly("PARKED cities 0/2 1")
    [rest], _, _ = await read(nc, f"0/2 {term}")
    assert rest["ids"] == [1, 3]
    [parked] = await cities.fetch("SELECT * FROM tube.tube_parked")
    assert (parked["tube"], parked["tries"], parked["error"]) == ("cities", 5, "no such column: naem")


async def test_requests_are_answered_in_order_and_no_more_than_the_bound_may_wait(
    cities: Database, start_daemon: Callable[..., Any]
) -> None:
    async with AsyncExitStack() as stack:
        daemon = await stack.enter_async_context(start_daemon(max_pending=5))
        nc = await stack.enter_async_context(netcat_to(daemon))
        await nc.expect(*HELLO)
        term = await claim(nc, "0/2")
        await nc.send(f"PODS cities 0/2 {term} wait=30", *["TUBE cities"] * 10)
        await nc.expect("ERROR too_many_requests: .*")
        await nc.expect_end()


@pytest.mark.parametrize("broken", [True, False])
async def test_what_was_asked_is_answered_before_a_broken_line_or_the_peers_end_closes_the_connection(
    cities: Database, netcat: Connect, broken: bool
) -> None:
    async with netcat() as nc:
        await nc.expect(*HELLO)
        term = await claim(nc, "0/2")
        lines = ["NAME program", f"RENEW cities 0/2 {term}", "TUBE cities", f"PODS cities 0/2 {term}"]
        await nc.send(*lines, *(["BLAH"] if broken else []))
        await nc.stream.send_eof()
        await nc.expect(f"LEASE cities 0/2 {term} 30", "TUBE cities 2", "CURSOR cities 0/2 .*")
        if broken:
            await nc.expect("ERROR bad_line: unknown command 'BLAH'.*")
        await nc.expect_end()


async def test_a_changed_number_of_partitions_loses_nothing(cities: Database, nc: Netcat) -> None:
    await insert(cities, 0, 1)
    await insert(cities, 1, 2)
    term = await claim(nc, "0/1")
    await until_position(nc, term, 2)
    _, cursor, _ = await read(nc, f"1/2 {term} plan=1")
    await cities.execute("SELECT tube.tube_ensure_exists('cities', 4)")
    await nc.send(f"PODS cities 1/2 {term}")
    await nc.expect("ERROR partitions_changed: .*4.*")
    pods, _, _ = await read(nc, f"1/2 {term} upto={cursor}")  # a batch that was planned before is read and acked
    assert [pod["ids"] for pod in pods] == [[2]]
    await nc.send(f"ACK cities 1/2 {term} upto={cursor}")
    await nc.expect_exactly("ACKED cities 1/2 1")
    await nc.send("TUBE cities")
    await nc.expect_exactly("TUBE cities 4")
    assert [pod["ids"] for pod in (await read(nc, f"0/4 {term}"))[0]] == [[1]]


MANY = 200 if LONG else 40  # partitions, each with a worker that waits


async def test_a_pod_wakes_its_own_partition_among_many_and_no_other(
    cities: Database, daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Part] = []

    def count(method: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def counted(self: PodBook, tube: str, part: Part, *args: Any, **named: Any) -> Any:
            read.append(part)
            return await method(self, tube, part, *args, **named)

        return counted

    monkeypatch.setattr(PodBook, "plan", count(PodBook.plan))
    monkeypatch.setattr(PodBook, "short", count(PodBook.short))
    await cities.execute(f"SELECT tube.tube_ensure_exists('cities', {MANY})")
    async with AsyncExitStack() as stack:
        workers = []
        for number in range(MANY):
            nc = await stack.enter_async_context(netcat_to(daemon))
            await nc.expect(*HELLO)
            term = await claim(nc, f"{number}/{MANY}", "ttl=600")
            await nc.send(f"PODS cities {number}/{MANY} {term} wait=60")
            workers.append(nc)
        with trio.fail_after(PATIENCE):
            while len(read) < MANY:
                await trio.sleep(0.01)
        await insert(cities, 1, 7)
        await workers[1].expect(f"RDATA tube:cities 1/{MANY} .*", f"CURSOR cities 1/{MANY} .* 1")
        assert read[MANY:] == [Part(1, MANY)]


async def test_a_tube_that_is_dropped_and_made_anew_at_once_is_served(cities: Database, nc: Netcat) -> None:
    await claim(nc, "0/1")
    async with cities.connection() as connection, connection.transaction():
        await connection.execute("SELECT tube.tube_ensure_absent('cities')")
        await connection.execute("SELECT tube.tube_ensure_exists('cities', 1)")
    term = await claim(nc, "0/1")
    await cities.execute("SELECT tube.cities_touch(0, ARRAY[5], 'T')")
    with trio.fail_after(PATIENCE):
        while not (found := await read(nc, f"0/1 {term} wait=1"))[0]:
            pass
    assert found[0][0]["ids"] == [5]
