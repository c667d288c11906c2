"""Which streams are served: they appear, change and vanish; what is wrong is reported, and is over when it is over."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from trio.testing import MockClock

from replicad.daemon.troubles import DATABASE
from replicad.errors import DatabaseError, DatabaseUnavailable, SchemaMissing, StreamRefused
from replicad.positions.horizon import Reading
from replicad.streams.registry import Published
from replicad.streams.serving.intervals import StreamIntervals
from replicad.streams.serving.windows import Attached

from .conftest import open_streams, settle
from .memory_streams import BEGAN, MemoryStore


async def test_a_stream_appears_is_renewed_and_vanishes_and_no_other_notices(autojump_clock: MockClock) -> None:
    async with open_streams("other", "s") as streams:
        client, bystander = streams.connect(), streams.connect()
        await client.say("REPLICATE s NOW")
        await bystander.say("REPLICATE other NOW")
        feed = streams.publisher.served["s"]
        streams.store.change("s", table="public.renamed", row="other")
        await settle(1.5)
        assert streams.publisher.served["s"] is feed, "new names end no feed"
        assert feed.stream.table == "public.renamed"
        await streams.write("s", 1)
        assert await client.lines() == ["RDATA s master 1 1"]
        streams.store.change("s", table_oid=77)
        await settle(1.5)
        assert "table was replaced (changed: table_oid)" in (await client.lines())[-1]
        assert client.reason is not None
        assert "s" not in streams.publisher.served
        streams.positions.tell("s", 1)
        await settle()
        assert streams.publisher.served["s"] is not feed
        del streams.store.streams["s"]
        await settle(1.5)
        assert sorted(streams.publisher.served) == ["other"]
        assert sorted(streams.positions.listeners) == ["other"]
        await streams.write("other", 1)
        assert await bystander.lines() == ["RDATA other master 1 1"]


@pytest.mark.parametrize(
    ("changes", "why"),
    [({"fault": "its table is gone"}, "its table is gone"), ({"denied": "GRANT SELECT"}, "GRANT SELECT")],
)
async def test_what_the_registry_says_against_a_stream_is_its_trouble_until_it_is_mended(
    changes: dict[str, Any], why: str, autojump_clock: MockClock
) -> None:
    async with open_streams("s") as streams:
        follower = streams.connect()
        await follower.say("REPLICATE")
        streams.store.change("s", **changes)
        await settle(1.5)
        assert why in streams.why("s")
        assert why in " ".join(await follower.lines())
        assert why in " ".join(await streams.connect().say("REPLICATE s NOW"))
        assert why in str(streams.publisher.waiting()["s"])
        assert why in " ".join(await streams.connect().say("REPLICATE"))
        streams.store.change("s", fault=None, denied=None)
        await settle(1.5)
        streams.positions.tell("s", 0)
        await settle()
        assert streams.why("s") == ""
        assert streams.publisher.waiting() == {}
        assert (await streams.connect().say("REPLICATE s NOW"))[-1] == "POSITION s master 0 0"


async def test_a_position_that_is_refused_is_an_obstacle_and_ends_no_subscription(autojump_clock: MockClock) -> None:
    async with open_streams("s") as streams:
        client = streams.connect()
        await client.say("REPLICATE s NOW")
        streams.positions.say("s", Reading(position=0, refused=StreamRefused("the sequence has a cache")))
        [line] = await client.lines()
        assert line.startswith("ERROR stream_waits: stream s does not move: the sequence has a cache; the subscription")
        assert [one.place.cause for one in streams.troubles.of("stream", "s")] == ["position"]
        streams.store.insert("s", 1)
        streams.positions.tell("s", 1)
        assert await client.lines() == ["RDATA s master 1 1"]
        assert streams.why("s") == ""


async def test_a_registry_that_is_missing_blinds_all_streams_and_rows_go_on(autojump_clock: MockClock) -> None:
    async with open_streams("s") as streams:
        client = streams.connect()
        await client.say("REPLICATE s NOW")
        streams.store.fails["registry"] = SchemaMissing("streams are not installed")
        await settle(1.5)
        assert "streams are not installed" in " ".join(await client.lines())
        assert "streams are not installed" in (await streams.connect().say("REPLICATE s NOW"))[0]
        assert "streams are not installed" in " ".join(await streams.connect().say("REPLICATE t NOW"))
        assert streams.troubles.why("service", "registry")
        await streams.write("s", 1)
        assert await client.lines() == ["RDATA s master 1 1"]
        streams.store.fails["registry"] = DatabaseError("busy")
        assert "cannot be looked up now: busy" in (await streams.connect().say("REPLICATE t NOW"))[0]
        streams.store.fails.clear()
        await settle(1.5)
        assert streams.troubles.current() == []


async def test_a_new_connection_to_postgres_has_the_registry_looked_at_before_anything_is_read(
    autojump_clock: MockClock,
) -> None:
    async with open_streams("s") as streams:
        [look] = streams.positions.before
        streams.store.fails["registry"] = DatabaseUnavailable("away")
        with pytest.raises(DatabaseUnavailable):
            await look()
        assert "s" in streams.publisher.served
        streams.store.fails["registry"] = DatabaseError("another server, without our tables")
        await look()
        assert streams.publisher.served == {}, "who knows what this server has"
        streams.store.fails.clear()
        await look()
        await settle()
        assert "s" in streams.positions.listeners


async def test_a_daemon_that_starts_goes_on_where_the_last_one_has_noted_and_notes_again_when_it_ends(
    autojump_clock: MockClock,
) -> None:
    store = MemoryStore()
    store.notes["kept"] = Published(7, {}, BEGAN)
    async with open_streams("s", "kept", store=store) as streams:
        assert streams.positions.published == {"s": (None, None), "kept": (7, {})}
        await streams.write("s", 1, 2)
    assert store.notes["s"].position == 2, "within the second in which nothing is noted"


@pytest.mark.parametrize(("seconds", "noted"), [(9, True), (11, False)])
async def test_a_daemon_that_ends_waits_for_a_slow_database_and_says_when_nothing_was_noted(
    autojump_clock: MockClock, logs: list[Any], seconds: float, noted: bool
) -> None:
    store = MemoryStore()
    async with open_streams("s", store=store) as streams:
        await streams.write("s", 1, 2)
        publish = store.publish

        async def slowly(*note: Any) -> bool:
            await trio.sleep(seconds)
            return await publish(*note)

        store.publish = slowly  # type: ignore[method-assign]
    assert (store.notes["s"].position == 2) == noted
    said = [event for event in logs if event["event"] == "positions_not_noted"]
    assert [event["waited_s"] for event in said] == ([] if noted else [10.0])


async def test_what_is_published_is_noted_once_a_second_and_again_after_a_failure(autojump_clock: MockClock) -> None:
    async with open_streams("s", by_writer=True) as streams:
        streams.store.insert("s", 1, writer="a")
        streams.store.insert("s", 2, writer="b")
        streams.positions.tell("s", 2)
        await settle(1.5)
        assert streams.store.notes["s"].position == 2
        streams.store.insert("s", 9, writer="a")
        streams.store.fails["publish"] = DatabaseError("full")
        streams.positions.tell("s", 3, a=9)
        await settle(1.5)
        assert streams.why("s") == "full"
        del streams.store.fails["publish"]
        await settle(1.5)
        assert (streams.store.notes["s"].position, dict(streams.store.notes["s"].per_writer)) == (3, {"a": 9})
        assert streams.why("s") == ""


async def test_a_feed_that_cannot_follow_is_an_obstacle_after_a_grace_and_goes_on_by_itself(
    autojump_clock: MockClock,
) -> None:
    async with open_streams("s", by_writer=True) as streams:
        client = streams.connect()
        await client.say("REPLICATE s NOW")
        streams.store.fails["rows"] = DatabaseError("permission denied", sqlstate="42501")
        streams.store.insert("s", 1, writer="a")
        streams.positions.tell("s", 1)
        await settle(4)
        assert "permission denied" in streams.why("s")
        assert "stream_waits: stream s does not move: permission denied" in " ".join(await client.lines())
        streams.store.fails.clear()
        await settle(6)
        assert "RDATA s a 1 1" in await client.lines()
        assert streams.troubles.current() == []


async def test_a_database_that_is_not_the_right_one_holds_all_streams_back_and_an_outage_does_not(
    autojump_clock: MockClock,
) -> None:
    async with open_streams("s") as streams:
        streams.troubles.begin(DATABASE, DATABASE, "poll", "away", code=DatabaseUnavailable.code)
        assert streams.publisher.waiting() == {}
        streams.troubles.begin(DATABASE, DATABASE, "poll", "this is a standby", code="standby_refused")
        assert "this is a standby" in str(streams.publisher.waiting()["s"])


async def test_a_service_that_is_begun_again_serves_the_same_streams(autojump_clock: MockClock) -> None:
    async with open_streams("s") as streams:
        feed = streams.publisher.served["s"]

        def fail() -> None:
            raise OSError("defect")

        feed.tidy = fail  # type: ignore[method-assign]
        await settle(5)
        streams.positions.tell("s", 0)
        await settle(2)
        assert streams.publisher.served["s"] is not feed
        assert streams.troubles.counts["service", "run", "OSError"] == 1


async def test_rows_that_turn_up_below_the_position_are_an_alarm_for_a_while(autojump_clock: MockClock) -> None:
    async with open_streams("s", pace=StreamIntervals(late_look=5.0, late_lasts=100.0)) as streams:
        await streams.write("s", 1, 3)
        await settle(6)
        streams.store.insert("s", 2)
        streams.store.tables["s"].attached[55] = ("public.old", Attached(2, 1, 2))
        await settle(6)
        why = streams.why("s")
        assert "1 row turned up at or below position 3 of stream s, with the ids 2" in why
        assert "public.old was attached to the table of stream s with 2 rows" in why
        assert streams.publisher.served["s"].tally.skipped == 3
        await settle(120)
        assert streams.why("s") == ""
        streams.store.fails["windows"] = DatabaseError("no")
        await settle(6)
        assert streams.why("s") == "no"
        del streams.store.streams["s"]
        await settle(10)
        assert streams.publisher.audit._seen == {}


async def test_troubles_are_written_while_they_last_and_removed_at_the_end(autojump_clock: MockClock) -> None:
    async with open_streams("s") as streams:
        assert streams.store.troubles == {}
        streams.troubles.begin("tube", "t", "look", "broken", code="tube_refused")
        await settle(1)
        [(daemon, rows)] = streams.store.troubles.items()
        assert daemon.startswith("example.com pid ")
        assert [(row.name, row.reason) for row in rows] == [("t", "broken")]
        first = rows[0].age
        await settle(6)
        assert streams.store.troubles[daemon][0].age >= first + 5, "refreshed, so that readers know that we live"
        streams.store.fails["troubles"] = DatabaseError("no")
        streams.troubles.begin("tube", "u", "look", "broken", code="tube_refused")
        await settle(1)
        assert streams.troubles.why("service", "troubles") == "no"
        streams.store.fails.clear()
        await settle(6)
        assert len(streams.store.troubles[daemon]) == 2
    assert streams.store.troubles[daemon] == []


async def test_acks_are_of_the_stream_that_they_name_or_that_is_followed_and_are_bounded(
    autojump_clock: MockClock,
) -> None:
    async with open_streams("federation", "s") as streams:
        await streams.write("s", 1, 2, 3)
        await streams.write("federation", 1, 2)
        one, every = streams.connect(), streams.connect()
        await one.say("REPLICATE s NOW")
        await every.say("REPLICATE")
        assert await one.say("FEDERATION_ACK w 3", "FEDERATION_ACK w 2") == []
        assert await every.say("FEDERATION_ACK w 1") == []
        assert (await one.say("FEDERATION_ACK w 4 s"))[0].startswith("ERROR token_ahead: FEDERATION_ACK 4 is ahead of")
        assert (await one.say("FEDERATION_ACK w 1 nothing"))[0].startswith("ERROR stream_refused")
        assert await streams.connect().say("FEDERATION_ACK w 1") == [], "of no stream"
        await settle(1.5)
        assert {(ack.stream, ack.token) for ack in streams.store.acks} == {("s", 3), ("federation", 1)}
        streams.store.fails["acks"] = DatabaseError("no")
        acks = streams.service._acks
        acks._waiting = dict.fromkeys([("x", str(n)) for n in range(10_000)])  # type: ignore[arg-type]
        assert "wait for Postgres already" in (await one.say("FEDERATION_ACK w 3 s"))[0]


async def test_a_stream_is_found_while_its_first_reading_is_on_its_way(autojump_clock: MockClock) -> None:
    async with open_streams() as streams:
        streams.store.add("s")

        async def read_soon() -> None:
            await trio.sleep(1)
            streams.positions.tell("s", 5)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(read_soon)
            assert (await streams.publisher.find("s")).reading.position == 5
