"""Streams with very many writers, with none, and with retired ones: on a real Postgres, daemon and clients."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

import pytest
import trio

from replicad.client.async_client import open_client
from replicad.client.blocking_client import BlockingClient
from replicad.client.events import Reset, RowBatch
from replicad.postgres import schema
from replicad.postgres.bridge import Database
from replicad.streams.registry import Registry, StreamRefused
from replicad.streams.serving.intervals import StreamIntervals
from tests.daemons import Daemon, Paces

from .clients.both import InThread
from .conftest import Connect, Netcat, netcat_to

HANG = 60.0  # seconds; a limit for what hangs


@pytest.fixture
async def facts(database: Database) -> Database:
    """A stream `facts` that any number of writers write to."""
    await schema.install(database, "stream")
    await database.execute("CREATE TABLE facts (id bigserial PRIMARY KEY, who text, n int)")
    await Registry(database).add("facts", "public.facts", "id", instance_column="who", row="to_json(t.n)")
    return database


@asynccontextmanager
async def peer(daemon: Daemon) -> AsyncIterator[Netcat]:
    """Somebody with netcat, who does not wait for ever."""
    with trio.fail_after(HANG):
        async with netcat_to(daemon) as connected:
            yield connected


async def write(database: Database, first: int, last: int, rows: int = 1) -> None:
    """So many rows of each of the writers w<first> to w<last>, in one transaction."""
    await database.execute(
        "INSERT INTO facts (who, n) "
        "SELECT 'w' || w, w FROM generate_series(1, $3::int) r, generate_series($1::int, $2::int) w",
        first, last, rows,
    )  # fmt: skip


def follow(kind: Any, port: int, token: str, wanted: int) -> tuple[Counter[str], str | None]:
    """Rows by writer until there are as many as wanted, and the token to go on from."""
    found: Counter[str] = Counter()
    left = wanted
    with kind("127.0.0.1", port, name="a test") as client, client.follow({"facts": token}) as follower:
        for event in follower:
            assert isinstance(event, RowBatch), event
            found[event.instance] += len(event.rows)
            left -= len(event.rows)
            if left <= 0:
                return found, follower.token("facts")
    raise AssertionError("unreachable")


@pytest.mark.parametrize("writers", [1001, pytest.param(20_000, marks=pytest.mark.long)])
async def test_any_number_of_writers_is_followed_by_every_client_through_a_restart(
    facts: Database, start_daemon: Callable[..., Any], writers: int
) -> None:
    everybody = Counter({f"w{number}": 1 for number in range(1, writers + 1)})
    tokens: dict[Any, str | None] = {}
    async with start_daemon() as daemon:
        await daemon.publisher.find("facts")
        port = daemon.addresses[0].port
        async with peer(daemon) as plain:
            await plain.send("REPLICATE")
            await plain.expect("SERVER .*", "POSITION facts master 0 0")
            await write(facts, 1, writers)
            with trio.fail_after(HANG):
                await plain.until(f"RDATA facts w{writers} {writers} {writers}")
        for kind in (BlockingClient, partial(InThread, "trio"), partial(InThread, "asyncio")):
            with trio.fail_after(HANG):
                found, tokens[kind] = await trio.to_thread.run_sync(follow, kind, port, "EARLIEST", writers)
            assert found == everybody
        crowded = bool(daemon.troubles.of("stream", "facts"))
        assert crowded == (writers > StreamIntervals().max_listed)
    async with start_daemon() as daemon:
        port = daemon.addresses[0].port
        await write(facts, 1, writers)
        for kind, token in tokens.items():
            assert token is not None
            with trio.fail_after(HANG):
                found, _ = await trio.to_thread.run_sync(follow, kind, port, token, writers)
            assert found == everybody, "from its token each client gets what is new, and nothing again"
        async with peer(daemon) as nc:
            with trio.fail_after(HANG):
                await nc.send("REPLICATE facts EARLIEST")
                await nc.until(f"RDATA facts w{writers} {2 * writers} {writers}")
                await nc.send("REPLICATE facts")
                await nc.until("ERROR stream_refused: .*")


async def test_a_thousand_positions_and_more_are_told_to_who_asks_for_everything_again_and_again(
    facts: Database, start_daemon: Callable[..., Any]
) -> None:
    async with start_daemon() as daemon, peer(daemon) as nc:
        await daemon.publisher.find("facts")
        await write(facts, 1, 3000)
        await stands_at(daemon, 3000)
        with trio.fail_after(HANG):
            await nc.send("REPLICATE")
            await write(facts, 3000, 3000)
            lines = await nc.until("RDATA facts w3000 3001 3000")
            told = {line.split()[2] for line in lines if line.startswith("POSITION")}
            assert len(told & {f"w{n}" for n in range(1, 3001)}) == 3000
            await nc.send("REPLICATE", "REPLICATE")
            await nc.until("POSITION facts w999 .*")
            await write(facts, 1, 1)
            await nc.until("RDATA facts w1 3002 1")


async def test_a_stream_without_a_writer_answers_with_the_position_of_master(
    facts: Database, start_daemon: Callable[..., Any]
) -> None:
    await facts.execute("DELETE FROM replicad.stream_writer")
    async with start_daemon() as daemon, AsyncExitStack() as stack:
        await daemon.publisher.find("facts")
        while not daemon.publisher.served["facts"].channel.boundary.positions:
            await trio.sleep(0.01)
        for request in ("REPLICATE", "REPLICATE facts", "REPLICATE facts EARLIEST"):
            nc = await stack.enter_async_context(peer(daemon))
            await nc.send(request)
            lines = await nc.until("POSITION facts master 0 0")
            assert ("WRITERS" in "".join(lines)) == ("facts" in request)
        nc = await stack.enter_async_context(peer(daemon))
        await nc.send("REPLICATE facts linear")
        await nc.until("POSITION facts \\* 0 0")
    assert (await Registry(facts).load_stream("facts")).writers == {"master": 1}


async def test_where_there_is_no_stream_replicate_is_answered_by_a_ping_that_says_so(
    daemon: Daemon, netcat: Connect
) -> None:
    async with netcat() as nc:
        await nc.send("REPLICATE")
        await nc.until("PING no stream is served yet; .*")


async def test_many_streams_that_appear_at_once_cut_nobody_who_follows_all(
    facts: Database, start_daemon: Callable[..., Any]
) -> None:
    await write(facts, 1, 600)
    async with start_daemon() as daemon, peer(daemon) as nc:
        await daemon.publisher.find("facts")
        await nc.send("REPLICATE")
        for number in (1, 2):
            await facts.execute(f"CREATE TABLE more{number} (id bigserial PRIMARY KEY, who text)")
            await facts.execute(f"INSERT INTO more{number} (who) SELECT 'w' || n FROM generate_series(1, 900) n")
            await Registry(facts).add(f"more{number}", f"public.more{number}", "id", instance_column="who")
        with trio.fail_after(HANG):
            await nc.until("POSITION more1 w999? 900 900|POSITION more1 w99 .*")
            await nc.send("REPLICATE")
            await nc.until("POSITION more2 w99 .*")


@pytest.fixture
async def three(facts: Database, start_daemon: Callable[..., Any]) -> AsyncIterator[Daemon]:
    """A daemon on the stream `facts` with rows 1 to 3 of the writers w1 to w3, all of them known."""
    async with start_daemon() as daemon:
        await daemon.publisher.find("facts")
        await write(facts, 1, 3)
        await stands_at(daemon, 3)
        await retired_can_be(facts)
        yield daemon


async def stands_at(daemon: Daemon, position: int) -> None:
    with trio.fail_after(HANG):
        feed = await daemon.publisher.find("facts")
        while feed.sent_upto < position:
            await trio.sleep(0.01)


async def retired_can_be(facts: Database) -> None:
    """Until what was told is published, which a daemon does once a second."""
    with trio.fail_after(HANG):
        while True:
            known = (await Registry(facts).published()).get("facts")
            last = await facts.fetch_value("SELECT max(id) FROM facts")
            if known is not None and known.position >= last:
                return
            await trio.sleep(0.05)


async def listed(daemon: Daemon, *names: str) -> None:
    with trio.fail_after(HANG):
        while daemon.publisher.served["facts"].channel.boundary.positions.keys() != set(names):
            await trio.sleep(0.05)


async def test_a_retired_writer_is_told_to_nobody_until_it_writes_again(
    facts: Database, three: Daemon, start_daemon: Callable[..., Any]
) -> None:
    async with start_daemon() as other, peer(three) as nc:
        await other.publisher.find("facts")
        await nc.send("REPLICATE facts")
        await nc.until("POSITION facts w3 .*")
        await Registry(facts).retire_writers("facts", ["w2"], quiet=0)
        await nc.until("WRITERS facts [0-9a-f]+ master=1 w1=2 w3=4")
        await nc.expect("POSITION facts (w1|w3|master) 3 3")
        await listed(other, "master", "w1", "w3")
        async with peer(other) as late:
            await late.send("REPLICATE facts EARLIEST")
            lines = await late.until("RDATA facts w3 3 3")
            assert not [line for line in lines if line.startswith("POSITION facts w2")]
            assert "RDATA facts w2 2 2" in lines, "its rows are not lost"
        await write(facts, 2, 2)
        lines = await nc.until("RDATA facts w2 4 2")
        told = [line for line in lines if "w2" in line]
        assert told[0].startswith("WRITERS facts ")
        assert told[0].endswith(" master=1 w1=2 w2=3 w3=4"), "its number is its own"
        assert told[1].startswith("POSITION facts w2 ")
        [again] = [one for one in await Registry(facts).writers("facts") if one.name == "w2"]
        assert (again.number, again.retired) == (3, False)


async def test_a_token_that_names_a_retired_writer_resumes_without_missing_a_row(
    facts: Database, three: Daemon
) -> None:
    await Registry(facts).retire_writers("facts", ["w2", "w3"], quiet=0)
    await listed(three, "master", "w1")
    for token, needed in (("1~3.2", {3}), ("0~2.1~3.2", {3}), ("0~2.3~1.3", {2, 3}), ("2~4.3", set())):
        async with peer(three) as nc:
            await nc.send(f"REPLICATE facts {token}", "TAKEN facts")
            await write(facts, 1, 1)
            last = await facts.fetch_value("SELECT max(id) FROM facts")
            lines = await nc.until(f"RDATA facts w1 {last} 1")
            got = {int(line.split()[3]) for line in lines if line.startswith("RDATA")}
            assert needed <= got, (token, lines)


async def test_who_may_still_write_is_not_retired_nor_is_the_last_one(facts: Database, three: Daemon) -> None:
    refused = partial(pytest.raises, StreamRefused)
    with refused(match="nobody is known to be quiet"):
        await Registry(facts).retire_writers("facts", ["w1"], quiet=3600)
    await facts.execute("UPDATE replicad.stream_mark SET at = at - interval '2 hours', position = 1")
    with refused(match="writer w2 of stream facts has rows above 1, so it wrote not long ago"):
        await Registry(facts).retire_writers("facts", ["w1", "w2"], quiet=3600)
    with refused(match="has no writer 'nobody'"):
        await Registry(facts).retire_writers("facts", ["w1", "nobody"], quiet=0)
    with refused(match="without a writer"):
        await Registry(facts).retire_writers("facts", ["master", "w1", "w2", "w3"], quiet=0)
    async with facts.connection() as connection:
        await connection.execute("SET application_name = 'w1'; BEGIN")
        with refused(match="w1 .* has an open transaction"):
            await Registry(facts).retire_writers("facts", ["w1"], quiet=0)
        await connection.execute("ROLLBACK; RESET application_name")
    assert await Registry(facts).idle_writers("facts", 2) == ["master", "w1", "w2"]
    assert await Registry(facts).idle_writers("facts", 3) == ["w1", "w2", "w3"], "one is left"


@pytest.mark.parametrize(
    ("name", "ending", "undo", "holder"),
    [
        ("w2", "PREPARE TRANSACTION 'late'", "ROLLBACK PREPARED 'late'", "prepared transaction 'late'"),
        ("some pooler", "SELECT 1", "ROLLBACK", "session with pid .* .some pooler."),
    ],
)
async def test_a_writer_whose_row_may_still_come_is_not_retired(
    facts: Database, three: Daemon, name: str, ending: str, undo: str, holder: str
) -> None:
    """Neither a prepared transaction nor a session of another name tells whose rows it has."""
    async with facts.connection() as connection:
        await connection.execute(f"SET application_name = '{name}'; BEGIN; INSERT INTO facts (who) VALUES ('w2')")
        await connection.execute(ending)
        with pytest.raises(StreamRefused, match=holder):
            await Registry(facts).retire_writers("facts", ["w2"], quiet=0)
        await connection.execute(undo)
    assert await Registry(facts).retire_writers("facts", ["w2"], quiet=0) == 1


@pytest.mark.parametrize("linear", [False, pytest.param(True, marks=pytest.mark.long)])
async def test_no_row_is_missed_while_writers_join_are_retired_and_become_too_many(
    facts: Database, start_daemon: Callable[..., Any], linear: bool
) -> None:
    rows = 0
    found: Counter[tuple[str, int]] = Counter()

    async def change() -> None:
        nonlocal rows
        for round_ in range(12):
            first, last = (round_ % 3) * 15 + 1, (round_ % 3) * 15 + 15
            await write(facts, first, last, 2)
            rows += 30
            await trio.sleep(0.2)
            if round_ % 4 == 3:
                await retired_can_be(facts)
                token = await facts.fetch_value("SELECT max(id) - 30 FROM facts")
                idle = await Registry(facts).idle_writers("facts", token)
                await Registry(facts).retire_writers("facts", idle, quiet=0)
                await trio.sleep(1.5)

    async with (
        start_daemon(Paces(streams=StreamIntervals(max_listed=30))) as daemon,
        open_client("127.0.0.1", daemon.addresses[0].port, name="r") as client,
    ):
        await daemon.publisher.find("facts")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(change)
            with trio.fail_after(HANG):
                async with client.follow({"facts": "EARLIEST"}, linear) as follower:
                    async for event in follower:
                        assert not isinstance(event, Reset)
                        found[event.instance, event.token] += 1
                        if len(found) == 12 * 30:
                            break
        assert rows == 12 * 30
        assert max(found.values()) == 1, "one connection, so no row came twice"
        assert daemon.troubles.counts["stream", "writers", "too_many_writers"] > 0
