"""Client x verb x object on the wire, from random access files, against an oracle; again after a reload in mid-stream.

And two tenants of one daemon, of whom one tries what it can against the other.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import replace
from hashlib import sha256
from itertools import islice
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import MockClock

from replicad.streams import commands as stream_commands
from tests.fuzz import hostile
from tests.unit.test_access_file import LINES as RULES
from tests.unit.test_access_file import NAMES, oracle

from .conftest import Client, Desk, on_a_jumping_clock, open_streams
from .test_access import control, rewrite
from .test_tube_service import MemoryBooks, open_tubes

Rights = tuple[list[str], list[str]]  # allow, deny
FILES = st.fixed_dictionaries(
    {name: st.tuples(st.lists(RULES, max_size=4), st.lists(RULES, max_size=2)) for name in ("ann", "bob")}
)
OBJECTS = st.lists(NAMES, min_size=1, max_size=4, unique=True)
STREAM_LINES = {"read": "TAKEN {}", "ack": "FEDERATION_ACK {client} 0 {}"}
TUBE_LINES = {
    "list": "TUBE {}", "work": "CLAIM {} 0/1 ttl=0.2", "park": "PARK {} 0/1 1 1 * 1 x", "report": "REPORT {} me {{}}"
}  # fmt: skip


def secret(name: str) -> str:
    return f"a-secret-of-enough-characters-{name}"


def text_of(file: Mapping[str, Rights], more: str = "") -> str:
    made = ""
    for name, (allow, deny) in file.items():
        made += f'[client.{name}]\ntoken_sha256 = "{sha256(secret(name).encode()).hexdigest()}"\n{more}'
        made += "".join(f"{key} = {rules!r}\n" for key, rules in (("allow", allow), ("deny", deny)) if rules)
    return made


async def enter(desk: Desk, name: str) -> Client:
    client = desk.connect("10.0.0.1:5000")
    assert await client.say(f"AUTH {name}.{secret(name)}") == []
    return client


def verdict(answer: list[str]) -> str:
    """`forbidden`, `unknown`, or `allowed`: whatever the service then says."""
    first = answer[0] if answer else ""
    if first.startswith("ERROR forbidden: "):
        return "forbidden"
    unknown = first.startswith(("ERROR unknown_", "ERROR stream_refused: stream ")) and "forbidden" not in first
    return "unknown" if unknown else "allowed"


def expected(rights: Rights, verb: str, name: str) -> set[str]:
    """What may be answered. A name that `deny` keeps from the lists may count as unknown, whatever else is allowed."""
    may, lists = oracle(*rights, verb, name), oracle(*rights, "list", name)
    if may:
        return {"allowed"} if lists else {"allowed", "unknown"}
    return {"forbidden"} if lists else {"unknown"}


async def check(
    clients: Mapping[str, Client], file: Mapping[str, Rights], lines: dict[str, str], names: list[str]
) -> None:
    for name, client in clients.items():
        for verb, line in lines.items():
            for each in names:
                answer = await client.say(line.format(each, client=name))
                assert verdict(answer) in expected(file[name], verb, each), (name, verb, each, file[name], answer)


async def run(
    desk: Desk, lines: dict[str, str], names: list[str], files: list[dict[str, Rights]], folder: Path
) -> None:
    """The matrix, with the same connections after each reload."""
    desk.access = control(folder, text_of(files[0]))
    clients = {name: await enter(desk, name) for name in files[0]}
    for file in files:
        rewrite(folder, desk.access, text_of(file))
        for client in clients.values():
            await client.lines()  # what the reload itself has to say
        await check(clients, file, lines, names)
        if "read" in lines:
            for name, client in clients.items():
                listed = {each for each in names if oracle(*file[name], "list", each)}
                assert await client.say("STREAMS") == [" ".join(["STREAMS", *sorted(listed)])]


@given(OBJECTS, st.lists(FILES, min_size=2, max_size=2))
@settings(max_examples=12, deadline=None)
def test_streams_answer_each_client_as_the_oracle_says(names: list[str], files: list[dict[str, Rights]]) -> None:
    async def scenario() -> None:
        with tempfile.TemporaryDirectory() as folder:
            async with open_streams(*names) as streams:
                await run(streams.desk, STREAM_LINES, names, files, Path(folder))

    on_a_jumping_clock(scenario)


@given(OBJECTS, st.lists(FILES, min_size=2, max_size=2))
@settings(max_examples=12, deadline=None)
def test_tubes_answer_each_client_as_the_oracle_says(names: list[str], files: list[dict[str, Rights]]) -> None:
    async def scenario() -> None:
        books = MemoryBooks()
        info = books.infos.pop("t")
        books.infos |= {name: replace(info, name=name) for name in names}
        with tempfile.TemporaryDirectory() as folder:
            async with open_tubes(books) as world:
                await run(world.desk, TUBE_LINES, names, files, Path(folder))

    on_a_jumping_clock(scenario)


TENANTS: dict[str, Rights] = {name: ([f"read {name}_*", f"ack {name}_*"], []) for name in ("ann", "bob")}


async def test_a_tenant_can_neither_read_nor_ack_nor_speak_for_nor_starve_another(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_streams("ann_orders", "bob_orders") as streams:
        streams.desk.access = control(tmp_path, text_of(TENANTS, "connections = 3\n"))
        ann = await enter(streams.desk, "ann")
        assert (await ann.say("REPLICATE ann_orders NOW"))[-1].startswith("POSITION ann_orders ")
        bobs = [await enter(streams.desk, "bob") for _ in range(3)]
        for line in ("TAKEN {}", "REPLICATE {} NOW", "REPLICATE {} EARLIEST", "FEDERATION_ACK bob 0 {}"):
            (hidden,) = await bobs[0].say(line.format("ann_orders"))
            (absent,) = await bobs[0].say(line.format("ann_absent"))
            assert hidden == absent.replace("ann_absent", "ann_orders"), "bob learns that the stream exists"
        for instance in ("ann", "ann-1"):
            (refused,) = await bobs[0].say(f"FEDERATION_ACK {instance} 0 bob_orders")
            assert refused.startswith(f"ERROR forbidden: client bob may not speak for instance {instance}; ")
        assert await bobs[0].say("STREAMS") == ["STREAMS bob_orders"]
        only = {kind.NAME for kind in stream_commands.COMMANDS} | {"PING", "NAME"}
        names = ["ann_orders", "bob_orders"]
        for lines in islice(zip(*(hostile.lines(number, names, only) for number in range(3)), strict=True), 60):
            for bob, line in zip(bobs, lines, strict=True):  # in turn, so that none falls silent
                assert not [each for each in await bob.say(line) if "ann_orders" in each and "ERROR" not in each]
            await ann.say("PING 1")
        fourth = streams.connect("10.0.0.1:5000")
        assert [bob.reason for bob in bobs] == [None] * 3
        (refused,) = await fourth.say(f"AUTH bob.{secret('bob')}")
        assert refused.startswith("ERROR too_many_connections: client bob has 3 connections already; ")
        assert (await enter(streams.desk, "ann")).reason is None
        await streams.write("ann_orders", 1)
        assert any(line.startswith("RDATA ann_orders master 1 ") for line in await ann.lines())
