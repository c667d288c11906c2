"""REPLICATE over a store in memory: from NOW, from EARLIEST, from a token, and what becomes of a stream that stops."""

from __future__ import annotations

import pytest
import trio
from trio.testing import MockClock

from replicad.errors import DatabaseError
from replicad.positions.horizon import Reading
from replicad.streams.serving.intervals import StreamIntervals

from .conftest import open_streams, settle
from .memory_streams import MemoryRows


async def test_now_earliest_and_a_token_begin_where_they_say_and_all_go_on_live(autojump_clock: MockClock) -> None:
    async with open_streams("s") as streams:
        await streams.write("s", 1, 2, 3, 4)
        starts = {"NOW": [], "EARLIEST": [1, 2, 3, 4], "2": [3, 4], "00010000!4": []}
        clients = {token: streams.connect() for token in starts}
        for token, rows in starts.items():
            lines = await clients[token].say(f"REPLICATE s {token}")
            assert lines[0] == "WRITERS s 00010000 master=1"
            assert [line for line in lines if line.startswith("RDATA")] == [f"RDATA s master {n} 1" for n in rows]
        await streams.write("s", 5, 7)
        for client in clients.values():
            assert await client.lines() == ["RDATA s master 5 1", "RDATA s master 7 1"]


async def test_a_crowd_that_asks_for_old_rows_shares_what_is_looked_up_and_gets_what_was_trimmed_last(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[float] = []
    earliest = MemoryRows.earliest

    async def look_slowly(rows: MemoryRows) -> int | None:
        looked.append(trio.current_time())
        found = await earliest(rows)
        await trio.sleep(1)
        return found

    monkeypatch.setattr(MemoryRows, "earliest", look_slowly)
    async with open_streams("s") as streams:
        await streams.write("s", 1, 2, 3)
        clients = [streams.connect() for _ in range(50)]
        for client in clients:
            await client.send("REPLICATE s EARLIEST")
        for client in clients:
            assert [line for line in await client.lines(3) if "RDATA" in line] == [
                f"RDATA s master {n} 1" for n in (1, 2, 3)
            ]
        assert len(looked) <= 2
        await streams.connect().send("REPLICATE s EARLIEST")
        await trio.sleep(0.5)  # that look is under way when rows are trimmed
        streams.store.tables["s"].trimmed_upto = 2
        late = streams.connect()
        await late.send("REPLICATE s EARLIEST")
        assert [line for line in await late.lines(3) if "RDATA" in line] == ["RDATA s master 3 1"]


async def test_a_linear_subscription_has_all_writers_in_the_order_of_ids_and_waits_for_the_slowest(
    autojump_clock: MockClock,
) -> None:
    async with open_streams("s", by_writer=True) as streams:
        streams.store.insert("s", 1, 3, writer="a")
        streams.store.insert("s", 2, writer="b")
        streams.positions.tell("s", 3)
        await settle()
        client = streams.connect()
        lines = await client.say("REPLICATE s 0 linear")
        assert [line.split()[:4] for line in lines if "RDATA" in line] == [
            ["RDATA", "s", "a", "1"],
            ["RDATA", "s", "b", "2"],
            ["RDATA", "s", "a", "3"],
        ]
        streams.store.insert("s", 5, writer="a")
        streams.positions.tell("s", 3, a=5)
        assert await client.lines() == []
        streams.positions.tell("s", 5)
        assert await client.lines() == ["RDATA s a 5 1"]
        assert "bad_token" in (await streams.connect().say("REPLICATE s 1~1.2 linear"))[0]


async def test_a_linear_subscription_is_not_taken_back_by_a_reading_whose_writers_were_still_being_listed(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first linear subscriber comes while one reading waits for Postgres and a newer one is there already."""
    look = MemoryRows.last_tokens

    async def look_slowly(rows: MemoryRows, after: int, upto: int) -> dict[str, int]:
        await trio.sleep(1)
        return await look(rows, after, upto)

    async with open_streams("s", by_writer=True) as streams:
        await streams.write("s", 1, writer="a")
        monkeypatch.setattr(MemoryRows, "last_tokens", look_slowly)
        await streams.write("s", 2, writer="a")
        await streams.write("s", 3, writer="a")
        client = streams.connect()
        lines = await client.say("REPLICATE s 0 linear") + await client.lines(5)
        assert [line for line in lines if line.startswith("RDATA")] == [f"RDATA s a {n} 1" for n in (1, 2, 3)]
        assert [line for line in lines if line.startswith("POSITION")] == ["POSITION s * 0 0"]


@pytest.mark.parametrize(
    ("token", "answer"),
    [
        ("99", "ERROR token_ahead: token 99 is ahead of stream s, whose position is 10"),
        ("2", "ERROR token_expired: no rows of s up to 5 are left"),
        ("ffffffff!7", "ERROR bad_token: the token is of generation ffffffff, stream s is in 00010000"),
        ("7~9.8", "ERROR bad_token: the token names writers [9]"),
        ("x", "ERROR bad_token: 'x' is not a token"),
    ],
)
async def test_a_token_that_cannot_be_followed_is_refused_and_the_connection_stays(
    token: str, answer: str, autojump_clock: MockClock
) -> None:
    async with open_streams("s", pace=StreamIntervals(ahead=2.0)) as streams:
        await streams.write("s", *range(6, 11))
        streams.store.tables["s"].trimmed_upto = 5
        client = streams.connect()
        lines = await client.say(f"REPLICATE s {token}") + await client.lines(3)
        assert lines[0].startswith(answer)
        assert (await client.say("REPLICATE s NOW"))[-1] == "POSITION s master 10 10"


async def test_a_token_from_a_daemon_that_is_further_is_waited_for(autojump_clock: MockClock) -> None:
    async with open_streams("s", pace=StreamIntervals(ahead=5.0)) as streams:
        client = streams.connect()
        streams.store.insert("s", 1, 2, 3)
        assert "RDATA" not in " ".join(await client.say("REPLICATE s 2"))
        streams.positions.tell("s", 3)
        assert [line for line in await client.lines() if "RDATA" in line] == ["RDATA s master 3 1"]


async def test_plain_replicate_follows_every_stream_and_those_that_are_added_later(autojump_clock: MockClock) -> None:
    async with open_streams("a", "b") as streams:
        client = streams.connect()
        assert await client.say("REPLICATE") == ["POSITION a master 0 0", "POSITION b master 0 0"]
        streams.store.add("c")
        await settle(1.5)
        streams.positions.tell("c", 0)
        assert await client.lines() == ["POSITION c master 0 0"]
        await streams.write("c", 1)
        assert await client.lines() == ["RDATA c master 1 1"]
        assert await client.say("REPLICATE") == [
            "POSITION a master 0 0",
            "POSITION b master 0 0",
            "POSITION c master 1 1",
        ]
        assert "stream_refused" in (await client.say("REPLICATE a NOW"))[0]
        by_name = streams.connect()
        await by_name.say("REPLICATE a NOW")
        for again in ("REPLICATE a NOW", "REPLICATE"):
            assert (await by_name.say(again))[0].startswith("ERROR stream_refused")
        await client.leave()
        streams.store.add("d")
        await settle(1.5)
        streams.positions.tell("d", 0)
        await settle()
        assert "d" in streams.publisher.served
        assert not streams.publisher._context.followers


async def test_before_there_is_a_stream_plain_replicate_says_so_in_a_ping(autojump_clock: MockClock) -> None:
    async with open_streams() as streams:
        assert (await streams.connect().say("REPLICATE"))[0].startswith("PING no stream is served yet")


@pytest.mark.parametrize("plain", [True, False])
async def test_a_row_that_cannot_be_read_ends_the_subscription_and_plain_replicate_comes_back(
    plain: bool, autojump_clock: MockClock
) -> None:
    async with open_streams("s") as streams:
        client = streams.connect()
        await client.say("REPLICATE" if plain else "REPLICATE s NOW")
        streams.store.tables["s"].poison.add(3)
        await streams.write("s", 1, 2, 3, 4)
        lines = await client.lines()
        assert [line for line in lines if "RDATA" in line] == ["RDATA s master 1 1", "RDATA s master 2 1"]
        assert lines[-1].startswith("ERROR row_unreadable: stream s stops before id 3")
        assert "stops before id 3" in streams.why("s")
        late = streams.connect()
        assert (await late.say("REPLICATE s 2"))[0].startswith("ERROR row_unreadable")
        before = await late.say("REPLICATE s 1")
        assert before[-2] == "RDATA s master 2 1"
        assert before[-1].startswith("ERROR row_unreadable")
        streams.store.tables["s"].poison.clear()
        await settle(12)
        rows = [line for line in await client.lines() if "RDATA" in line]
        assert rows == (["RDATA s master 3 1", "RDATA s master 4 1"] if plain else [])
        assert streams.why("s") == ""
        assert [line for line in await late.say("REPLICATE s 2") if "RDATA" in line] == [
            "RDATA s master 3 1",
            "RDATA s master 4 1",
        ]


async def test_old_rows_that_cannot_be_read_stop_a_catch_up_alone_and_plain_replicate_tries_again(
    autojump_clock: MockClock,
) -> None:
    async with open_streams("s", pace=StreamIntervals(stopped=10.0)) as streams:
        await streams.write("s", *range(1, 10))
        streams.store.tables["s"].poison.add(5)
        client = streams.connect()
        lines = await client.say("REPLICATE s EARLIEST")
        assert [line.split()[3] for line in lines if "RDATA" in line] == ["1", "2", "3", "4"]
        assert lines[-1].startswith("ERROR row_unreadable: stream s stops before id 5")
        assert streams.why("s") == "", "the stream itself goes on"
        assert (await client.say("REPLICATE s 5"))[-1] == "RDATA s master 9 1"


async def test_a_database_that_fails_while_a_client_catches_up_ends_that_session(autojump_clock: MockClock) -> None:
    async with open_streams("s") as streams:
        await streams.write("s", *range(1, 10))
        other, client = streams.connect(), streams.connect()
        await other.say("REPLICATE s NOW")
        rows = streams.store.rows(streams.store.streams["s"])

        async def fail(*args: object, **named: object) -> int:
            raise DatabaseError("broken", sqlstate="57014")

        rows.copy_range = fail  # type: ignore[method-assign]
        streams.store.catchup_rows = lambda stream: rows  # type: ignore[method-assign, assignment]
        assert "ERROR database: catching up with s broke off; resume later" in await client.say("REPLICATE s 3")
        await streams.write("s", 10)
        assert await other.lines() == ["RDATA s master 10 1"]


async def test_taken_streams_and_doorbell_are_answered(autojump_clock: MockClock) -> None:
    async with open_streams("a", "b") as streams:
        streams.store.insert("a", 17)
        client = streams.connect()
        assert await client.say("STREAMS") == ["STREAMS a b"]
        assert await client.say("TAKEN a") == ["TAKEN a 17"]
        assert (await client.say("TAKEN nothing"))[0].startswith(
            "ERROR unknown_stream: there is no stream 'nothing'; the streams are: a, b"
        )
        assert await client.say("DOORBELL") == []
        assert streams.positions.rings == 1
        assert streams.service.summary() == {"streams": ["a", "b"]}


async def test_a_stream_that_is_held_back_says_why_to_who_waits_for_it(autojump_clock: MockClock) -> None:
    async with open_streams("s") as streams:
        streams.store.add("new")
        client = streams.connect()
        await client.say("REPLICATE new NOW")
        [line] = await client.lines(3)
        assert line.startswith("ERROR stream_refused: stream new cannot be served: it was added just now; try again")
        streams.positions.say("new", Reading())
        await client.say("REPLICATE new NOW")
        [line] = await client.lines(3)
        assert "it has no position yet" in line
