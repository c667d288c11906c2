"""Clients of an access file and tubes: what they are refused, and names that they may not know."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from trio.testing import MockClock

from .conftest import settle
from .test_access import control, enter, rewrite
from .test_tube_service import MemoryBooks, World, open_tubes

RIGHTS = '[client.billing]\nSECRET\nallow = ["work t"]\n'
LINES = [
    "TUBE {}", "CLAIM {} 0/1", "RENEW {} 0/1 1", "KEEP {} 1", "RELEASE {} 0/1 1", "PODS {} 0/1 1", "ACK {} 0/1 1 1",
    "ACK {} 0/1 1 upto=0.0", "PARK {} 0/1 1 1 * 1 x", "REPORT {} me {{}}",
]  # fmt: skip


def books() -> MemoryBooks:
    made = MemoryBooks()
    made.infos["hidden"] = replace(made.infos["t"], name="hidden")
    return made


@pytest.mark.parametrize("line", LINES)
async def test_a_tube_that_may_not_be_known_gets_word_for_word_what_an_unknown_one_gets(
    tmp_path: Path, autojump_clock: MockClock, line: str
) -> None:
    async with open_tubes(books()) as world:
        world.desk.access = control(tmp_path, RIGHTS)
        client = await enter(world.desk, "billing")
        (unknown,) = await client.say(line.format("absent"))
        (hidden,) = await client.say(line.format("hidden"))
        assert unknown == "ERROR unknown_tube: there is no tube 'absent'; the tubes are: t"
        assert hidden == unknown.replace("absent", "hidden")


async def test_what_a_client_may_not_do_with_a_tube_is_named(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with open_tubes() as world:
        world.desk.access = control(tmp_path, RIGHTS)
        client = await enter(world.desk, "billing")
        assert await client.say("CLAIM t 0/1 ttl=20") == ["LEASE t 0/1 1 20"]
        assert await client.say("PARK t 0/1 1 1 * 1 x", "RENEW t 0/1 1") == [
            "ERROR forbidden: client billing may not park tube t; "
            'the operator can add "park t" to [client.billing]',
            "LEASE t 0/1 1 20",
        ]  # fmt: skip
        assert (await client.say("REPORT t me {}"))[0].startswith(
            "ERROR forbidden: client billing may not report tube t"
        )


async def test_who_waits_for_pods_gets_none_after_the_right_was_withdrawn(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_tubes() as world:
        world.desk.access = control(tmp_path, RIGHTS)
        client = await enter(world.desk, "billing")
        await client.say("CLAIM t 0/1")
        assert await client.say("PODS t 0/1 1 wait=60") == []
        rewrite(tmp_path, world.desk.access, RIGHTS.replace("work t", "list t"))
        await put_a_pod(world)
        (refused,) = await client.lines()
        assert refused.startswith("ERROR forbidden: client billing may not work tube t; ")


async def put_a_pod(world: World) -> None:
    world.put((1, 0))
    await settle()
