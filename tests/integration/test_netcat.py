"""What somebody with netcat sees of streams: every claim of protocol.md about them, on a real daemon and Postgres."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any
from unittest.mock import Mock

import pytest
import trio

from replicad import features
from replicad.config.settings import ServerSettings
from replicad.daemon import daemon as daemon_module
from replicad.postgres.bridge import Database
from replicad.protocol.connection import CloseReason
from replicad.streams.registry import Registry
from replicad.streams.serving.intervals import StreamIntervals
from tests.conftest import PATIENCE
from tests.daemons import Daemon, Paces
from tests.roles import as_daemon
from tests.vocabulary import EVERY, Side

from .conftest import Connect, Netcat, netcat_to

HELLO = ("SERVER example\\.com",)


async def insert(database: Database, *bodies: str, table: str = "events", instance: str | None = None) -> None:
    for body in bodies:
        await database.execute(f"INSERT INTO {table} (instance_name, body) VALUES ($1, $2::jsonb)", instance, body)


async def seen(netcat: Connect, position: int, stream: str = "events") -> None:
    """Until the daemon stands at that position of the stream: a token that is ahead is waited for."""
    async with netcat() as other:
        await other.expect(*HELLO)
        await other.send(f"REPLICATE {stream} {position}")
        await other.until(f"POSITION {stream} .* {position} {position}")


@pytest.fixture
async def many(database: Database, daemon: Daemon) -> Database:
    """A table `many` that several writers write to, as the stream `many`."""
    await database.execute("CREATE TABLE many (id bigserial PRIMARY KEY, instance_name text, body jsonb)")
    await Registry(database).add("many", "public.many", "id", instance_column="instance_name", row="body")
    await daemon.publisher.find("many")
    return database


@pytest.fixture
async def nc(netcat: Connect) -> AsyncIterator[Netcat]:
    async with netcat() as connected:
        await connected.expect(*HELLO)
        yield connected


async def test_the_first_lines_are_server_and_ping(netcat: Connect) -> None:
    async with netcat() as nc:
        assert await nc.line() == "SERVER example.com"
        assert (await nc.line()).startswith("PING ")


async def test_replicate_tells_every_position_and_then_every_row_as_it_is_committed(
    events: Database, nc: Netcat
) -> None:
    await insert(events, '["a"]', '["b"]')
    await nc.send("", "  ", "REPLICATE ")
    await nc.expect("POSITION events master [012] \\d")
    await insert(events, '{"c": "two words"}')
    line = await nc.line()
    while "two words" not in line:
        line = await nc.line()
    assert line == 'RDATA events master 3 {"c": "two words"}'


async def test_a_stream_that_is_added_while_the_daemon_runs_reaches_who_follows_all(
    database: Database, daemon: Daemon, nc: Netcat
) -> None:
    await nc.send("REPLICATE")
    await database.execute("CREATE TABLE later (id bigserial PRIMARY KEY, n int)")
    await Registry(database).add("later", "public.later", "id")
    await nc.expect("POSITION later master 0 0")
    await database.execute("INSERT INTO later (n) VALUES (7)")
    await nc.expect_exactly('RDATA later master 1 {"id":1,"n":7}')
    await Registry(database).remove("later")
    await nc.expect("ERROR stream_refused: stream later is no longer served: it was removed")
    await nc.expect_end()


@pytest.mark.parametrize(
    ("token", "rows"),
    [("EARLIEST", [1, 2, 3, 4]), ("0", [1, 2, 3, 4]), ("2", [3, 4]), ("4", []), ("NOW", []), ("", [])],
)
async def test_one_stream_from_any_token_joins_the_live_rows_without_gap_or_repeat(
    events: Database, netcat: Connect, nc: Netcat, token: str, rows: list[int]
) -> None:
    await insert(events, "1", "2", "3", "4")
    await seen(netcat, 4)
    await nc.send(f"REPLICATE events {token}".strip())
    await nc.expect("WRITERS events [0-9a-f]+ master=1", "POSITION events master (\\d) \\1")
    await nc.expect_exactly(*(f"RDATA events master {row} {row}" for row in rows))
    await insert(events, "5")
    await nc.expect_exactly("RDATA events master 5 5")


async def test_rows_of_one_token_are_one_batch_also_for_who_catches_up(database: Database, netcat: Connect) -> None:
    await database.execute(
        "CREATE SEQUENCE batches_seq; CREATE TABLE batches (id bigint DEFAULT nextval('batches_seq'), n int)"
    )
    await database.execute("ALTER SEQUENCE batches_seq OWNED BY batches.id; CREATE INDEX ON batches (id)")
    await Registry(database).add("batches", "public.batches", "id", row="to_json(n)")
    expected = [
        "RDATA batches master batch 1", "RDATA batches master batch 2", "RDATA batches master 1 3",
        "RDATA batches master 2 4",
    ]  # fmt: skip
    async with netcat() as live:
        await live.expect(*HELLO)
        await live.send("REPLICATE batches EARLIEST")
        await live.expect("WRITERS .*", "POSITION batches master 0 0")
        await database.execute(
            "WITH one AS (SELECT nextval('batches_seq') AS id) "
            "INSERT INTO batches SELECT id, n FROM one, generate_series(1, 3) n"
        )
        await database.execute("INSERT INTO batches (n) VALUES (4)")
        await live.expect_exactly(*expected)
        async with netcat() as late:
            await late.expect(*HELLO)
            await late.send("REPLICATE batches 0")
            await late.expect("WRITERS .*", "POSITION batches master 0 0")
            await late.expect_exactly(*expected)


async def test_ids_that_were_rolled_back_move_the_position_without_rows(events: Database, nc: Netcat) -> None:
    await insert(events, "1")
    await nc.send("REPLICATE events EARLIEST")
    await nc.expect("WRITERS .*", "POSITION events master 0 0", "RDATA events master 1 1")
    async with events.connection() as connection:
        await connection.execute("BEGIN; INSERT INTO events (body) SELECT '0' FROM generate_series(1, 5); ROLLBACK")
    await nc.expect("POSITION events master 1 6")
    await insert(events, "7")
    await nc.expect("RDATA events master 7 7")


async def test_an_open_transaction_holds_its_stream_back_and_no_other(
    events: Database, many: Database, nc: Netcat
) -> None:
    await nc.send("REPLICATE events", "REPLICATE many")
    await nc.expect("WRITERS events .*", "POSITION events master 0 0", "WRITERS many .*")
    async with events.connection() as connection:
        async with connection.transaction():
            await connection.execute("INSERT INTO events (body) VALUES ('1')")
            await insert(events, "2")
            await insert(many, "3", table="many", instance="a")
            await nc.expect("POSITION many master 0 0", "WRITERS many .* master=1 a=2", "POSITION many a 0 0")
            assert not [line for line in await nc.until("RDATA many a 1 3") if line.startswith("RDATA events")]
    await nc.until("RDATA events master 1 1")
    await nc.until("RDATA events master 2 2")


async def test_writers_that_join_are_numbered_told_and_resumed_from_a_vector(many: Database, netcat: Connect) -> None:
    async with netcat() as nc:
        await nc.expect(*HELLO)
        await nc.send("REPLICATE many EARLIEST")
        await nc.expect("WRITERS many [0-9a-f]+ master=1", "POSITION many master 0 0")
        await insert(many, "1", "2", table="many", instance="a")
        await nc.expect("WRITERS many .* master=1 a=2", "POSITION many a 0 0")
        await nc.until("RDATA many a 2 2")
        await insert(many, "3", table="many", instance="b c")
        await nc.until("WRITERS many .* master=1 a=2 b_c=3")
        await nc.until("POSITION many b_c (\\d) \\1")
        await nc.until("RDATA many b_c 3 3")
    async with netcat() as nc:
        await nc.expect(*HELLO)
        await nc.send("REPLICATE many 1~3.3")
        await nc.expect("WRITERS many .* master=1 a=2 b_c=3", "POSITION many a 1 1", "POSITION many b_c 3 3")
        await nc.expect("POSITION many master 1 1", "RDATA many a 2 2")


async def test_a_writer_known_by_its_application_name_holds_back_itself_alone(
    many: Database, database_url: str, netcat: Connect, nc: Netcat
) -> None:
    from replicad.postgres.bridge import open_database

    await insert(many, "1", table="many", instance="a")
    await insert(many, "2", table="many", instance="b")
    await seen(netcat, 2, "many")
    await nc.send("REPLICATE many EARLIEST")
    await nc.until("RDATA many b 2 2")
    async with netcat_linear(nc) as linear, open_database(database_url, size=1, application_name="a") as db:
        async with db.connection() as connection, connection.transaction():
            await connection.execute("INSERT INTO many (instance_name, body) VALUES ('a', '3')")
            await insert(many, "4", table="many", instance="b")
            assert not [line for line in await nc.until("RDATA many b 4 4") if line.startswith("RDATA many a")]
        await linear.expect_exactly("RDATA many a 1 1", "RDATA many b 2 2", "RDATA many a 3 3", "RDATA many b 4 4")


def netcat_linear(nc: Netcat) -> AbstractAsyncContextManager[Netcat]:
    """A second connection, subscribed to `many` from the start in linear order."""
    from contextlib import asynccontextmanager

    host, port = nc.stream.socket.getpeername()[:2]

    @asynccontextmanager
    async def connect() -> AsyncIterator[Netcat]:
        async with await trio.open_tcp_stream(host, port) as stream:
            other = Netcat(stream)
            await other.expect(*HELLO)
            await other.send("REPLICATE many 0 linear")
            await other.expect("WRITERS many [0-9a-f]+ .*", "POSITION many \\* 0 0")
            yield other

    return connect()


@pytest.mark.parametrize(
    ("asked", "error"),
    [
        ("REPLICATE nope", "unknown_stream: there is no stream 'nope'; the streams are: events"),
        ("REPLICATE events abc", "bad_token: 'abc' is not a token.*"),
        ("REPLICATE events 0123456789abcdef!1", "bad_token: the token is of generation .*EARLIEST"),
        ("REPLICATE events 1~9.5", "bad_token: the token names writers \\[9\\].*"),
        ("PODS nope 0/1 1", "unknown_tube: there is no tube 'nope'.*"),
    ],
)
async def test_what_cannot_be_done_is_said_and_the_connection_stays(
    events: Database, nc: Netcat, asked: str, error: str
) -> None:
    await nc.send(asked)
    await nc.expect(f"ERROR {error}")
    await nc.send("STREAMS")
    await nc.expect("STREAMS events")


async def test_a_token_beyond_the_position_is_refused(events: Database, start_daemon: Callable[..., Any]) -> None:
    async with start_daemon(Paces(streams=StreamIntervals(ahead=0.1))) as other, netcat_to(other) as nc:
        await nc.expect(*HELLO)
        await nc.send("REPLICATE events 99")
        await nc.expect("ERROR token_ahead: token 99 is ahead of stream events, whose position is 0; .*")


async def test_relays_go_to_all_others(netcat: Connect) -> None:
    async with netcat() as one, netcat() as two, netcat() as three:
        for nc in (one, two, three):
            await nc.expect(*HELLO)
        await one.send("REMOTE_SERVER_UP example.org", 'LOCK_RELEASED ["i","n","k"]')
        for nc in (two, three):
            await nc.expect_exactly("REMOTE_SERVER_UP example.org", 'LOCK_RELEASED ["i","n","k"]')
        await one.send("STREAMS")
        await one.expect("STREAMS")


async def test_stopping_says_so_to_everybody(start_daemon: Callable[..., Any]) -> None:
    async with start_daemon() as daemon:
        async with netcat_to(daemon) as one, netcat_to(daemon) as two:
            for nc in (one, two):
                await nc.expect(*HELLO)
            for session in list(daemon.hub):
                session.hang_up(CloseReason.SERVER_STOPPING, "server stopping")
            for nc in (one, two):
                await nc.expect_exactly("ERROR server stopping")
                await nc.expect_end()


async def test_one_connection_too_many_is_told_and_the_others_live_on(start_daemon: Callable[..., Any]) -> None:
    async with start_daemon(max_connections=2) as daemon:
        async with netcat_to(daemon) as one, netcat_to(daemon) as two:
            for nc in (one, two):
                await nc.expect(*HELLO)
                await nc.send("STREAMS")  # a client that has sent nothing gives way to a new one
                await nc.expect("STREAMS")
            for _ in range(50):
                async with netcat_to(daemon) as three:
                    await three.expect(*HELLO, "ERROR too_many_connections: .*")
                    await three.expect_end()
            await one.send("STREAMS")
            await one.expect("STREAMS")
        assert daemon.hub.statistics().refused == 50


async def test_a_row_of_any_content_is_one_valid_line(events: Database, nc: Netcat) -> None:
    import json

    nasty = "line\nfeed\r\0".replace("\0", "") + '\u2028\u0085\x1f\x7f\t\\ " \U0001f600 \ufeff' + "x" * 300_000
    await nc.send("REPLICATE events")
    await nc.expect("WRITERS .*", "POSITION .*")
    await events.execute("INSERT INTO events (body) VALUES ($1::jsonb)", json.dumps([nasty]))
    line = await nc.line()
    while line.startswith("PING"):
        line = await nc.line()
    assert json.loads(line.removeprefix("RDATA events master 1 ")) == [nasty]


@pytest.mark.parametrize("paces", [Paces(streams=StreamIntervals(late_look=0.1))])
async def test_a_row_that_turns_up_below_the_position_is_an_alarm(events: Database, daemon: Daemon) -> None:
    """Its id was taken in another transaction than its insert, which only a reservation covers."""
    early = await events.fetch_value("SELECT nextval('events_id_seq')")
    await insert(events, "2")
    feed = daemon.publisher.served["events"]
    with trio.fail_after(PATIENCE):
        seen = daemon.publisher.audit._seen
        while "events" not in seen or seen["events"].window.upto < 2:
            await trio.sleep(0.05)
        await events.execute("INSERT INTO events (id, body) VALUES ($1, '1')", early)
        while not feed.late_rows:
            await trio.sleep(0.05)
    assert feed.late_rows == 1
    assert "ids 1:" in (daemon.troubles.why("stream", "events") or "")


async def test_every_command_of_a_client_is_answered_by_one_service(
    settings: ServerSettings, database: Database, database_url: str
) -> None:
    async with daemon_module.open_daemon(settings, as_daemon(database_url), features.served()) as running:
        answers = [service.answers(Mock()) for service in running.services.values()]
    found = Counter(kind for each in answers for kind in (*each.at_once, *each.in_turn))
    by_the_session, by_the_relay = {"PING", "NAME", "AUTH", "HELP", "ERROR"}, {"REMOTE_SERVER_UP", "LOCK_RELEASED"}
    wanted = {kind.NAME for kind in EVERY if kind.SENDER & Side.CLIENT} - by_the_session - by_the_relay
    assert Counter(kind.NAME for kind in found.elements()) == Counter(wanted)
