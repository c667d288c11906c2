"""Generations of a stream, without Postgres: what readers are told when history forks, and what tokens of before are
good for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any
from unittest.mock import AsyncMock

import pytest
import trio
from trio.testing import MockClock

from replicad.daemon.journal import JournalLimits
from replicad.errors import TableReplaced
from replicad.positions.horizon import Fork, Reading, Source
from replicad.streams.registry import Published, Stream
from replicad.streams.serving.served_stream import ServedStream
from tests.unit.daemon.conftest import Streams, open_streams, settle
from tests.unit.daemon.memory_streams import BEGAN

G0, G1, G2 = (f"0001000{number}" for number in range(3))  # the generations of the first stream


def fork(streams: Streams, reason: str, *, noted: int | None = None) -> None:
    """The horizon finds a fork; `noted`: the database has this position, as one that was restored does."""
    if noted is not None:
        streams.store.notes["s"] = Published(noted, {"master": noted}, BEGAN)
    streams.positions.say("s", Reading(fork=Fork(reason)))


def put(streams: Streams, *ids: int) -> None:
    """The rows that there are."""
    streams.store.tables["s"].rows = [(id, "master", "1") for id in ids]


async def test_a_fork_takes_readers_back_to_what_was_noted_whatever_was_read_meanwhile(
    autojump_clock: MockClock,
) -> None:
    async with open_streams("s") as streams:
        await streams.write("s", 1, 2, 3, 4)
        by_name, plain, linear = streams.connect(), streams.connect(), streams.connect()
        await by_name.say("REPLICATE s NOW")
        await plain.say("REPLICATE")
        await linear.say("REPLICATE s NOW linear")
        put(streams, 1, 2, 3)
        fork(streams, "restored", noted=2)
        streams.positions.tell("s", 9)  # an answer that was under way
        named = [f"WRITERS s {G1} master=1", "POSITION s master 2 2"]
        assert await by_name.lines() == ["POSITION s master 4 2", *named]
        assert await plain.lines() == ["POSITION s master 4 2"]
        assert await linear.lines() == ["POSITION s * 4 2", f"WRITERS s {G1}", "POSITION s * 2 2"]
        assert streams.positions.published["s"] == (2, {"master": 2})
        streams.positions.tell("s", 3)
        for client in (by_name, plain, linear):
            assert await client.lines() == ["RDATA s master 3 1"]


async def test_ids_that_went_back_share_nothing_though_another_daemon_began_a_generation_for_something_else_meanwhile(
    autojump_clock: MockClock,
) -> None:
    async with open_streams("s") as streams:
        await streams.write("s", 1, 2, 3, 4)
        client = streams.connect()
        await client.say("REPLICATE s NOW")
        await settle(1.5)
        await streams.store.fork(streams.store.streams["s"], "promoted")
        put(streams, 1, 2)
        fork(streams, "ids_went_back")
        assert await client.lines(2) == ["POSITION s master 4 0", f"WRITERS s {G2} master=1", "POSITION s master 0 0"]
        streams.positions.tell("s", 2)
        assert await client.lines() == ["RDATA s master 1 1", "RDATA s master 2 1"]


async def test_a_token_of_before_is_good_up_to_where_history_is_shared(autojump_clock: MockClock) -> None:
    async with open_streams("s") as streams:
        await streams.write("s", 1, 2, 3, 4)
        put(streams, 1, 2)
        fork(streams, "restored", noted=2)
        await settle()
        streams.positions.tell("s", 2)
        await streams.write("s", 3)
        [refused] = await streams.connect().say(f"REPLICATE s {G0}!4")
        assert refused == (f"ERROR bad_token: stream s forked after 2: discard the rows after 2 and resume from {G1}!2")
        named = f"WRITERS s {G1} master=1"
        assert await streams.connect().say(f"REPLICATE s {G1}!2") == [
            named,
            "POSITION s master 2 2",
            "RDATA s master 3 1",
        ]
        assert (await streams.connect().say(f"REPLICATE s {G0}!2"))[-1] == "RDATA s master 3 1", "all of it is shared"
        assert (await streams.connect().say(f"REPLICATE s {G0}!1"))[-2:] == ["RDATA s master 2 1", "RDATA s master 3 1"]
        assert f"resume from {G1}!2" in (await streams.connect().say(f"REPLICATE s {G0}!3 linear"))[0]
        [unknown] = await streams.connect().say("REPLICATE s 0001beef!1")
        assert unknown.startswith("ERROR bad_token: the token is of generation 0001beef")
        assert "EARLIEST" in unknown


async def test_a_fork_that_another_daemon_saw_first_is_taken_over_before_anything_more_is_sent(
    autojump_clock: MockClock,
) -> None:
    async with open_streams("s") as streams:
        await streams.write("s", *range(1, 9))
        client = streams.connect()
        await client.say("REPLICATE s NOW")
        put(streams, 1, 2, 3, 40)
        for noted in (5, 3):  # two of them
            streams.store.notes["s"] = Published(noted, {"master": noted}, BEGAN)
            await streams.store.fork(streams.store.streams["s"], "restored")
        moved = streams.connect()  # that was told of the last one by the other daemon
        assert (await moved.say(f"REPLICATE s {G2}!3"))[:1] == [f"WRITERS s {G2} master=1"]
        streams.positions.tell("s", 40)
        named = [f"WRITERS s {G2} master=1", "POSITION s master 3 3"]
        assert await client.lines(2) == ["POSITION s master 8 3", *named, "RDATA s master 40 1"]
        assert await moved.lines() == ["RDATA s master 40 1"]
        assert (
            f"discard the rows after 3 and resume from {G2}!3"
            in (await streams.connect().say(f"REPLICATE s {G0}!8"))[0]
        )


async def test_a_server_that_was_restarted_takes_nobody_back_beyond_what_was_noted(autojump_clock: MockClock) -> None:
    async with open_streams("s") as streams:
        await streams.write("s", 1, 2, 3)
        client, behind = streams.connect(), streams.connect()
        await client.say("REPLICATE s NOW")
        await settle(1.5)
        assert streams.store.notes["s"].position == 3
        await streams.write("s", 4)
        await client.lines()
        streams.store.change("s", continues=False)
        [look] = streams.positions.before
        await look()  # as on a new connection
        assert "s" not in streams.positions.listeners, "not watched before it is known from where"
        assert await client.lines() == ["POSITION s master 4 3", f"WRITERS s {G1} master=1", "POSITION s master 3 3"]
        assert streams.positions.published["s"] == (3, {"master": 3})
        streams.positions.tell("s", 4)
        assert await client.lines() == ["RDATA s master 4 1"]
        assert (await behind.say(f"REPLICATE s {G0}!3"))[-1] == "RDATA s master 4 1"


async def test_a_registry_that_was_restored_to_a_time_before_the_last_generation_takes_readers_back_to_the_beginning(
    autojump_clock: MockClock,
) -> None:
    async with open_streams("s") as streams:
        await streams.write("s", 1, 2, 3)
        before = streams.store.streams["s"]
        fork(streams, "restored", noted=2)
        await settle()
        streams.positions.tell("s", 2)
        client = streams.connect()
        await client.say("REPLICATE s NOW")
        streams.store.streams["s"] = before
        streams.store.generations.clear()
        put(streams, 1)
        assert await client.lines(2) == ["POSITION s master 2 0", f"WRITERS s {G2} master=1", "POSITION s master 0 0"]


async def test_a_note_that_is_not_there_any_more_is_a_fork(autojump_clock: MockClock) -> None:
    async with open_streams("s") as streams:
        await streams.write("s", 1, 2, 3)
        await settle(1.5)
        client = streams.connect()
        await client.say("REPLICATE s NOW")
        note = streams.store.notes["s"]
        streams.store.notes["s"] = type(note)(1, {"master": 1}, note.at)
        streams.store.change("s", noted=1)
        assert await client.lines(2) == ["POSITION s master 3 1", f"WRITERS s {G1} master=1", "POSITION s master 1 1"]


async def test_one_who_catches_up_while_history_forks_is_taken_back_too(autojump_clock: MockClock) -> None:
    limits = JournalLimits(max_bytes=60)
    async with open_streams("s", limits=limits) as streams:
        await streams.write("s", *range(1, 9))
        rows, entered, go_on = streams.store.rows(streams.store.streams["s"]), trio.Event(), trio.Event()
        copy = rows.copy_range

        async def slow(*args: object, **named: object) -> int:
            entered.set()
            await go_on.wait()
            return await copy(*args, **named)  # type: ignore[arg-type]

        rows.copy_range = slow  # type: ignore[method-assign]
        streams.store.catchup_rows = lambda stream: rows  # type: ignore[method-assign, assignment]
        client = streams.connect()
        await client.say("REPLICATE s 5")
        await entered.wait()
        put(streams, 1, 2, 3, 4, 5, 6)
        fork(streams, "restored", noted=4)
        await settle()
        put(streams, 1, 2, 3, 4, 5, 6, *range(10, 30))
        streams.positions.tell("s", 9)
        await settle()
        await streams.write("s", *range(10, 30))  # until the journal has lost what took readers back
        go_on.set()
        held: set[int] = set()
        for line in await client.lines(2):
            words = line.split()
            if words[0] == "RDATA":
                held.add(int(words[3]))
            elif words[0] == "POSITION":
                held = {id for id in held if id <= int(words[4])}
        assert sorted(held - {5}) == [6, *range(10, 30)], "those after 4, which is shared"


async def test_rows_of_a_writer_that_is_listed_no_more_are_taken_back_too(autojump_clock: MockClock) -> None:
    async with open_streams("s", by_writer=True) as streams:
        streams.store.insert("s", 1, writer="a")
        await streams.write("s", 2, writer="b", upto=2)
        plain = streams.connect()
        await plain.say("REPLICATE")
        await settle(1.5)
        streams.store.tables["s"].retired.add("b")
        writers = {name: number for name, number in streams.store.streams["s"].writers.items() if name != "b"}
        every = streams.store.streams["s"].writers
        streams.store.change("s", writers=writers)
        await settle(1.5)
        assert "b" not in streams.publisher.served["s"].numbers
        streams.store.change("s", writers=every)
        fork(streams, "restored", noted=1)
        lines = await plain.lines()
        assert "POSITION s b 2 1" in lines


async def test_a_restart_that_a_copy_sees_first_sends_nothing_and_ends_no_reader(autojump_clock: MockClock) -> None:
    async with open_streams("s") as streams:
        await streams.write("s", *range(1, 6))
        rows, restarted = streams.store.rows(streams.store.streams["s"]), TableReplaced("its sequence was restarted")
        rows.copy_range = AsyncMock(side_effect=restarted)  # type: ignore[method-assign]
        honest = streams.store.catchup_rows
        streams.store.catchup_rows = lambda stream: rows  # type: ignore[method-assign, assignment]
        client = streams.connect()
        assert (await client.say(f"REPLICATE s {G0}!2"))[-1] == "POSITION s master 2 2"
        streams.store.catchup_rows = honest  # type: ignore[method-assign]
        put(streams, 1)
        fork(streams, "sequence_restarted")
        await settle()
        streams.positions.tell("s", 1)
        lines = await client.lines(2)
        assert "POSITION s master 2 0" in lines
        assert lines[-1] == "RDATA s master 1 1"


async def test_who_comes_when_a_stream_ends_is_refused_and_may_come_again(autojump_clock: MockClock) -> None:
    async with open_streams("s", "t") as streams:
        feed, entry = streams.publisher.served["s"], streams.store.streams["s"]
        await streams.write("s", 1, 2, 3)
        client = streams.connect()
        find = streams.publisher.find

        async def find_late(name: str, *_: object) -> ServedStream:
            found = await find(name)
            if name == "s":
                del streams.store.streams["s"]
                await settle(1.5)
            return found

        streams.publisher.find = find_late  # type: ignore[method-assign]
        await client.say("REPLICATE s NOW")
        assert "stream_refused: stream s is no longer served" in (await client.lines(3))[-1]
        assert feed.channel.ended is not None
        streams.publisher.find = find  # type: ignore[method-assign]
        streams.store.streams["s"] = entry
        await settle(1.5)
        streams.positions.tell("s", 3)
        await settle()
        assert (await client.say("REPLICATE s NOW"))[-1] == "POSITION s master 3 3"


async def test_a_client_that_comes_before_the_registry_was_looked_at_waits_for_the_look_and_is_not_refused(
    autojump_clock: MockClock,
) -> None:
    async with open_streams("s") as streams:
        await streams.write("s", 1, 2, 3)
        client, feed = streams.connect(), streams.publisher.served["s"]
        replaced, honest = TableReplaced("the ids of stream s begin anew"), feed.retained
        feed.retained = AsyncMock(side_effect=[replaced, replaced, await honest()])  # type: ignore[method-assign]
        lines = await client.say("REPLICATE s EARLIEST")
        assert [line for line in lines if line.startswith("ERROR")] == []
        assert lines[-1] == "RDATA s master 3 1"


async def test_a_table_that_stays_replaced_while_a_client_comes_is_a_refusal_after_which_it_may_come_again(
    autojump_clock: MockClock,
) -> None:
    async with open_streams("s") as streams:
        await streams.write("s", 1, 2, 3)
        client, feed = streams.connect(), streams.publisher.served["s"]
        honest = feed.retained
        feed.retained = AsyncMock(side_effect=TableReplaced("another table has its name"))  # type: ignore[method-assign]
        refused = "".join(await client.say("REPLICATE s EARLIEST") + await client.lines(10))
        assert refused.startswith("ERROR stream_refused: stream s cannot be served now: another table")
        feed.retained = honest  # type: ignore[method-assign]
        assert (await client.say("REPLICATE s EARLIEST"))[-1] == "RDATA s master 3 1"


async def test_a_look_that_is_older_than_what_was_taken_over_begins_no_generation(autojump_clock: MockClock) -> None:
    async with open_streams("s") as streams:
        await streams.write("s", 1, 2, 3, 4)
        client = streams.connect()
        await client.say("REPLICATE s NOW")
        load, stale, late = streams.store.look, dict(streams.store.streams), trio.Event()

        async def load_late(_: object = ()) -> dict[str, Stream]:
            streams.store.look = load  # type: ignore[method-assign]
            await late.wait()
            return stale

        streams.store.look = load_late  # type: ignore[method-assign]
        await settle(1.5)
        put(streams, 1, 2, 3)
        fork(streams, "restored", noted=2)
        await settle()
        streams.positions.tell("s", 3)
        assert (await client.lines())[-1] == "RDATA s master 3 1"
        late.set()
        await settle(1.5)
        assert [one.reason for one in (await streams.store.lineages())["s"].generations] == ["added", "restored"]
        assert streams.positions.published["s"] == (3, {})
        await streams.write("s", 4)
        assert await client.lines() == ["RDATA s master 4 1"]


async def test_a_stream_that_ends_while_a_generation_is_taken_over_is_watched_by_its_successor_alone(
    autojump_clock: MockClock,
) -> None:
    """A restored database gives reasons for both at once. What has ended must not end the watch of its successor."""
    async with open_streams("s") as streams:
        await streams.write("s", 1, 2, 3)
        load, watch, old = streams.store.look, streams.positions.watch, streams.publisher.streams["s"]
        watching: list[object] = []

        async def load_and_end(_: object = ()) -> dict[str, Stream]:
            found = await load()
            if old.forked:
                streams.store.look = load  # type: ignore[method-assign]
                old.over = "its table was replaced"
                await streams.publisher._look_once()  # ends it and begins its successor, after our last wait
            return found

        def note(name: str, source: Source, on_reading: Callable[[str, Reading], None], **more: Any) -> None:
            watching.append(on_reading.__self__)  # type: ignore[attr-defined]
            watch(name, source, on_reading, **more)

        streams.store.look = load_and_end  # type: ignore[method-assign]
        streams.positions.watch = note  # type: ignore[method-assign, assignment]
        fork(streams, "restored", noted=2)
        await settle(1.5)
        assert watching == [streams.publisher.streams["s"]]
        assert old not in watching
        streams.positions.tell("s", 3)
        await settle()
        assert (await streams.connect().say("REPLICATE s NOW"))[-1].startswith("POSITION s master 3")


def restore_registry(streams: Streams, **writers: int) -> None:
    """The registry is that of a dump: with these writers, and no row of the stream."""
    put(streams)
    streams.store.change("s", writers={"master": 1, **writers})


def told_numbers(lines: list[str]) -> list[dict[str, int]]:
    """What each line of WRITERS says."""
    pairs = [[word.split("=") for word in line.split()[3:]] for line in lines if line.startswith("WRITERS")]
    return [{name: int(number) for name, number in some} for some in pairs]


async def test_a_restored_registry_that_gives_the_number_of_one_writer_to_another_is_never_told_to_readers(
    autojump_clock: MockClock,
) -> None:
    async with open_streams("s", by_writer=True) as streams:
        client = streams.connect()
        await client.say("REPLICATE s NOW")
        await streams.write("s", 1, writer="a")
        await streams.write("s", 2, writer="a")
        assert "RDATA s a 2 1" in await client.lines()
        restore_registry(streams, b=2)  # another daemon has seen b first
        await streams.write("s", 5, writer="b")  # before the fork is found
        fork(streams, "restored", noted=0)
        await settle(3)
        streams.positions.tell("s", 5)
        await settle(3)
        lines = await client.lines()
        assert all(len(set(told.values())) == len(told) for told in told_numbers(lines)), lines
        assert any(line.startswith("ERROR") for line in lines), "the client begins anew"
        again = await streams.connect().say(f"REPLICATE s {streams.store.streams['s'].epoch}!0")
        assert told_numbers(again) == [{"master": 1, "b": 2}]
        assert "RDATA s b 5 1" in again


async def test_a_number_that_was_answered_by_the_database_before_it_was_restored_is_asked_for_again(
    autojump_clock: MockClock,
) -> None:
    async with open_streams("s", by_writer=True) as streams:
        client, answered, may_arrive = streams.connect(), trio.Event(), trio.Event()
        await client.say("REPLICATE s NOW")
        honest = streams.store.ensure_writers

        async def late(stream: Stream, names: Iterable[str]) -> dict[str, int]:
            found = await honest(stream, names)
            if not answered.is_set():
                answered.set()
                await may_arrive.wait()
            return found

        streams.store.ensure_writers = late  # type: ignore[method-assign]
        await streams.write("s", 1, writer="a")
        assert answered.is_set()
        restore_registry(streams, b=2)
        fork(streams, "restored", noted=0)
        await settle(3)
        may_arrive.set()
        streams.store.insert("s", 1, writer="a")
        streams.positions.tell("s", 1)
        await settle(3)
        assert told_numbers(await client.lines())[-1] == {"master": 1, "a": 3}
        streams.store.insert("s", 2, writer="b")
        streams.positions.tell("s", 2)
        assert told_numbers(await client.lines(2))[-1] == {"master": 1, "a": 3, "b": 2}


@pytest.mark.parametrize("found_by", ["another server", "a note that is missing"])
async def test_writers_that_a_restored_registry_does_not_know_are_not_taken_for_retired_ones(
    found_by: str, autojump_clock: MockClock
) -> None:
    """Rows of a retired writer may come again from the lowest position on: here they would be those of the new
    history, before readers are told of it.
    """
    async with open_streams("s", by_writer=True) as streams:
        client = streams.connect()
        await client.say("REPLICATE")
        await streams.write("s", 1, writer="a")
        await streams.write("s", 2, writer="b")
        streams.positions.tell("s", 2, b=5, master=5)
        await settle(3)
        assert "POSITION s b 2 5" in await client.lines()
        streams.store.tables["s"].rows = [(3, "b", "1")]
        streams.store.notes.pop("s")
        streams.store.change("s", writers={"master": 1}, continues=found_by != "another server", noted=None)
        lines = await client.lines(3)
        told = [line.split()[0] for line in lines if not line.startswith("POSITION")]
        assert told == ["ERROR"], lines
