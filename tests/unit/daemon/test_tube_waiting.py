"""What waits for a lease or for pods costs no statements: it is woken, or sent READY."""

from __future__ import annotations

from dataclasses import replace

import pytest
import trio
from trio.testing import MockClock

from replicad.errors import DatabaseUnavailable
from replicad.tubes.commands import Lease, Part

from .conftest import settle
from .test_tube_service import TUBE, MemoryBooks, open_tubes

MANY = 32


def books(**more: int) -> MemoryBooks:
    """A tube of 64 partitions; another daemon has given the leases of some."""
    made = MemoryBooks(infos={"t": replace(TUBE, partitions=MANY)})
    for number in range(more.get("held", 0)):
        made.held[1000 + number] = Lease("t", Part(number, MANY), 1000 + number, 30)
    return made


@pytest.mark.parametrize("ready", ["", " ready=1"])
async def test_waiting_costs_no_statements_but_for_one_that_keeps_all_leases(
    autojump_clock: MockClock, ready: str
) -> None:
    async with open_tubes(books(held=MANY)) as world:
        for number in range(MANY):
            held = await world.desk.connect().say(f"CLAIM t {number}/{MANY} wait=55{ready}")
            assert [line.partition(": ")[0] for line in held] == (["ERROR lease_held"] if ready else [])
            reader = world.desk.connect()
            came = await reader.say(f"PODS t {number}/{MANY} {1000 + number} wait=55{ready}")
            assert len(came) == (1 if ready else 0)
        await settle(2)
        world.books.asked.clear()
        await settle(30)
        asked = world.books.asked
        assert (asked["claim"], asked["plan"]) == (0, 0)
        assert asked["renew"] <= (0 if ready else 12), "the leases of all requests that wait are renewed together"


async def test_a_claim_that_waits_is_tried_when_its_partition_is_released_or_expires(
    autojump_clock: MockClock,
) -> None:
    async with open_tubes(books(held=3)) as world:
        here, there, dead = (world.desk.connect() for _ in range(3))
        holder = world.desk.connect()
        for number, client in enumerate((here, there, dead)):
            await client.say(f"CLAIM t {number}/{MANY} wait=60 ready=1")
            await client.say(f"CLAIM t {number}/{MANY} wait=60 ready=1")  # in place of the first, not beside it
        await holder.say(f"RELEASE t 0/{MANY} 1000")
        assert await here.lines() == [f"READY t 0/{MANY}"], "at once, as it was released here"
        del world.books.held[1001]
        assert await there.lines(2) == [f"READY t 1/{MANY}"]
        assert await dead.lines(2) == []
        world.books.silent = 30
        assert await dead.lines(2) == [f"READY t 2/{MANY}"]
        assert await here.lines(3) == []
        assert (await here.say(f"CLAIM t 0/{MANY} wait=60 ready=1"))[0].startswith(f"LEASE t 0/{MANY}")


async def test_ready_is_sent_once_for_the_partition_that_got_pods_and_within_its_time(
    autojump_clock: MockClock,
) -> None:
    async with open_tubes(books(held=MANY)) as world:
        client = world.desk.connect()
        for number in (3, 4, 5):
            lines = await client.say(f"PODS t {number}/{MANY} {1000 + number} wait=20 ready=1")
            assert lines == [f"CURSOR t {number}/{MANY} 0.0 0"]
        world.put((1, 3), (2, 4 + MANY), (3, 9))
        assert sorted(await client.lines()) == [f"READY t 3/{MANY}", f"READY t 4/{MANY}"]
        world.put((4, 3), (5, 4))
        assert await client.lines() == []
        assert len(await client.say(f"PODS t 3/{MANY} 1003 wait=20 ready=1")) == 3, "two pods and CURSOR"
        await settle(25)
        world.put((6, 5), (7, 3))
        assert await client.lines() == [], "it came too late for 5, and for 3 there were pods"


async def test_a_changed_number_of_partitions_wakes_all_and_a_database_that_is_away_is_not_waited_for(
    autojump_clock: MockClock,
) -> None:
    async with open_tubes(books(held=2)) as world:
        client, other = world.desk.connect(), world.desk.connect()
        await client.say(f"CLAIM t 0/{MANY} wait=60 ready=1")
        await client.say(f"PODS t 1/{MANY} 1001 wait=60 ready=1")
        world.books.infos["t"] = replace(TUBE, partitions=3)
        assert sorted(await client.lines(2)) == [f"READY t 0/{MANY}", f"READY t 1/{MANY}"]
        world.books.infos["t"] = replace(TUBE, partitions=MANY)
        await settle(2)
        began = trio.current_time()
        assert await other.say(f"CLAIM t 0/{MANY} wait=60") == []
        world.books.fails = dict.fromkeys(("look", "claim"), DatabaseUnavailable("away"))
        assert (await other.lines(3))[0].startswith("ERROR database_unavailable")
        assert trio.current_time() < began + 10


async def test_keep_renews_many_leases_and_says_which_are_held(autojump_clock: MockClock) -> None:
    async with open_tubes(books(held=2)) as world:
        client = world.desk.connect()
        assert await client.say("KEEP t 1000,77,1001") == ["KEPT t 1000,1001"]
        assert await client.say("KEEP t 77") == ["KEPT t"]
        assert (await client.say("KEEP nothing 77"))[0].startswith("ERROR unknown_tube")
        lines = await client.say("KEEP t " + ",".join(map(str, range(1001))))
        assert lines[0].startswith("ERROR tube_refused: 1001 terms in one KEEP are too many")
        for line in ("PODS t 0/1 1 ready=1", "CLAIM t 0/1 ready=1"):
            assert "ready needs wait" in (await world.desk.connect().say(line))[-1]
