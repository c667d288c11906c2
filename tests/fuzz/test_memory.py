"""Hostile lines against the services in memory, bounded: nothing ends, all answers parse, a bystander is served."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from contextlib import closing
from dataclasses import replace
from itertools import islice

import pytest
import trio
from trio.testing import MockClock

from replicad.errors import RedisRefused, RedisUnavailable
from replicad.protocol.command import Command
from replicad.protocol.words import Side
from replicad.redis.link import open_redis, parse_redis
from replicad.streams import commands as stream_commands
from replicad.tubes import commands as tube_commands
from tests.fuzz import hostile, live, web
from tests.fuzz.lying_redis import LyingRedis
from tests.lengths import LONG
from tests.strategies import KINDS
from tests.unit.daemon.conftest import Client, Desk, open_streams, settle
from tests.unit.daemon.test_tube_service import MemoryBooks, open_tubes
from tests.vocabulary import COMMANDS, parse

LINES = 300  # for each seed


async def shoot(desk: Desk, kinds: Iterable[type[Command]], seed: int, *names: str) -> set[str]:
    """Send lines on one connection after another; returns the names of the commands that were answered."""
    only = {kind.NAME for kind in kinds} | {"PING", "NAME"}  # of the services that are open
    answered: set[str] = set()
    client: Client | None = None
    for line in islice(hostile.lines(seed, names, only), LINES):
        client = client or desk.connect()
        for answer in await client.say(line):
            answered.add(parse(answer, Side.SERVER).NAME)
        assert client.reason is None, f"seed {seed}: {line[:300]!r} ended the connection"
        assert desk.troubles.counts.total() == 0, f"seed {seed}: {line[:300]!r} made {desk.troubles.counts}"
    return answered


def test_every_kind_of_argument_has_hostile_values_and_every_command_is_sent() -> None:
    assert hostile.VALUES.keys() >= KINDS.keys()
    sent = {line.split(" ")[0] for line in islice(hostile.lines(0, ["t"]), 2000)}
    assert sent == {name for name, kind in COMMANDS.items() if Side.CLIENT in kind.SENDER}
    assert list(islice(hostile.lines(3, ["t"]), 50)) == list(islice(hostile.lines(3, ["t"]), 50))


@pytest.mark.parametrize("line", ["RDATA", "LEASE t 0/1 x 1", "ERROR internal: x", "nonsense"])
def test_the_live_fuzzer_reports_an_answer_that_is_no_line_of_the_protocol(line: str) -> None:
    class Answers:
        def answers(self) -> list[str]:
            return ["STREAMS a", line, "STREAMS b"]

    findings: list[str] = []
    live._check(Answers(), Counter(), findings, 7)  # type: ignore[arg-type]
    assert len(findings) == 1
    assert findings[0].startswith("seed 7: ")


@pytest.mark.parametrize("seed", range(4))
async def test_hostile_lines_stop_no_stream(seed: int, autojump_clock: MockClock) -> None:
    async with open_streams("events", "other") as streams:
        bystander = streams.connect()
        await bystander.say("REPLICATE events NOW")
        answered = await shoot(streams.desk, stream_commands.COMMANDS, seed, "events", "other")
        assert "ERROR" in answered
        for number in (1, 2):
            await streams.write("events", number)
            await settle()
            assert any(line.startswith(f"RDATA events master {number} ") for line in await bystander.lines())
        assert bystander.reason is None


@pytest.mark.parametrize("seed", range(4))
async def test_hostile_lines_stop_no_tube(seed: int, autojump_clock: MockClock) -> None:
    books = MemoryBooks()
    books.infos["quiet"] = replace(books.infos["t"], name="quiet")
    books.pods_of["quiet"] = []
    async with open_tubes(books) as world:
        world.positions.tell("tube:quiet", 0)
        bystander = world.desk.connect()
        (lease,) = await bystander.say("CLAIM quiet 0/1 ttl=3600")
        assert lease.startswith("LEASE quiet 0/1 1 "), lease
        await shoot(world.desk, tube_commands.COMMANDS, seed, "t")
        world.put((1, 0), (2, 0), tube="quiet")
        answer = await bystander.say("PODS quiet 0/1 1")
        assert [line.split(" ")[0] for line in answer] == ["RDATA", "RDATA", "CURSOR"], answer


def test_requests_are_the_same_for_a_seed_and_answers_are_judged() -> None:
    assert [web.request(random.Random(seed)) for seed in range(200)] == [
        web.request(random.Random(seed)) for seed in range(200)
    ]
    for fine in (b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"HTTP/1.0 200 OK\r\n\r\nok"):
        assert web.fault_in(fine) is None
    for fault in (b"HTTP/1.1 500 \r\n", b"what", b"HTTP/1.1 503 \r\nx/.s.PGSQL.5432", b"HTTP/1.1 200 \r\nTraceback"):
        assert web.fault_in(fault) is not None


TRIES = 60 if LONG else 25


async def test_a_redis_that_lies_is_refused_in_one_way() -> None:
    with closing(LyingRedis(7, lambda: "127.0.0.1:1")) as redis:
        refused = 0
        for _ in range(TRIES):
            try:
                link = await open_redis(parse_redis(redis.url), name="x", timeout=0.1)
                await link.call_text("HGET", "key", "address")
                await link.subscribe(["a"])
                for _ in range(3):
                    with trio.move_on_after(0.05):
                        await link.messages()
            except (RedisUnavailable, RedisRefused):
                refused += 1
            else:
                await link.aclose()
        assert 0 < refused < TRIES
        assert redis.lies > 0
