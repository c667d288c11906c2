"""What a connection may cost before its client is known: short lines, a deadline, a cap; and lines of all together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import trio
import trio.testing

from replicad.config.settings import ServerSettings
from replicad.daemon.hub import Allowance, Hub
from replicad.daemon.session import Session
from replicad.protocol.command import Command
from replicad.protocol.connection import CloseReason
from tests.vocabulary import EVERY


class Door:
    """A hub, and clients that connect to it in memory."""

    def __init__(self, nursery: trio.Nursery, *, room: int = 100, token: str | None = None, **limits: Any) -> None:
        settings = ServerSettings(server_name="example.com", token=token)
        self.settings = replace(settings, limits=replace(settings.limits, **limits))
        self.hub = Hub(room, limits=self.settings.limits)
        self.nursery = nursery
        nursery.start_soon(self.hub.run)

    def connect(self) -> Guest:
        ours, theirs = trio.testing.memory_stream_pair()
        session = Session(ours, "memory", self.settings, self.hub, EVERY)
        guest = Guest(session, theirs, admitted=self.hub.admit(session))
        if guest.admitted:
            self.nursery.start_soon(guest.run)
        return guest


class Guest:
    """One client."""

    def __init__(self, session: Session, stream: trio.abc.Stream, *, admitted: bool) -> None:
        self.session = session
        self.stream = stream
        self.admitted = admitted
        self.reason: CloseReason | None = None
        self.commands: list[Command] = []

    async def run(self) -> None:
        async def note(command: Command) -> None:
            self.commands.append(command)

        self.reason = await self.session.run(note)

    async def say(self, data: bytes) -> None:
        await self.stream.send_all(data)
        await settle()

    async def last_line(self) -> str:
        """The last line that it is sent; it closes its side then, as clients do."""
        data = b""
        while received := await self.stream.receive_some(1 << 16):
            data += received
        await self.stream.aclose()
        await settle()
        return data.decode().splitlines()[-1]


async def settle(seconds: float = 0.1) -> None:
    """Let everything that is due happen; the clock jumps when nothing else can run."""
    await trio.sleep(seconds)


Open = Callable[..., Door]


@pytest.fixture
def door(nursery: trio.Nursery) -> Open:
    return lambda **settings: Door(nursery, **settings)


async def test_lines_are_short_until_the_first_command(door: Open, autojump_clock: object) -> None:
    at = door()
    early, late = at.connect(), at.connect()
    await early.say(b"NAME " + b"x" * 5000)
    assert await early.last_line() == "ERROR line_too_long: a line may have at most 4096 bytes before the first command"
    assert early.reason is CloseReason.BAD_LINE
    await late.say(b"NAME x\n")
    await late.say(b"REMOTE_SERVER_UP " + b"x" * 1000 + b"\nPARK t 0/1 1 1 * 1 " + b"x" * 100_000 + b"\n")
    assert [command.NAME for command in late.commands] == ["REMOTE_SERVER_UP", "PARK"]
    await late.say(b"x" * ((1 << 20) + 1))
    assert await late.last_line() == "ERROR line_too_long: a line may have at most 1048576 bytes (--max-line)"


async def test_where_a_token_is_set_lines_are_short_until_the_right_one_came(
    door: Open, autojump_clock: object
) -> None:
    at = door(token="secret")
    named, known = at.connect(), at.connect()
    await named.say(b"NAME x\nPING 1\n")
    assert len(at.hub.newcomers) == 2
    await named.say(b"x" * 5000)
    assert (await named.last_line()).endswith("a line may have at most 4096 bytes before AUTH")
    await known.say(b"AUTH secret\n")
    assert len(at.hub.newcomers) == 0
    await known.say(b"PARK t 0/1 1 1 * 1 " + b"x" * 100_000 + b"\n")
    assert [command.NAME for command in known.commands] == ["PARK"]
    await known.say(b"AUTH guess\n")
    assert (await known.last_line()).startswith("ERROR not_authorised: the token is wrong")


async def test_who_says_nothing_has_a_deadline_and_who_has_said_something_has_none(
    door: Open, autojump_clock: object
) -> None:
    at = door(first_command_timeout=60)
    silent, spoke = at.connect(), at.connect()
    await spoke.say(b"NAME x\n")
    began = trio.current_time()
    assert (await silent.last_line()).endswith("within 60 s")
    assert trio.current_time() - began == pytest.approx(60)
    assert silent.reason is CloseReason.NO_COMMAND
    await trio.sleep(1000)
    assert spoke.reason is None


async def test_one_newcomer_too_many_and_the_oldest_gives_way(door: Open, autojump_clock: object) -> None:
    at = door(max_newcomers=3)
    known = at.connect()
    await known.say(b"NAME x\n")
    guests = []
    for _ in range(5):
        guests.append(at.connect())
        await settle(2)
    assert [guest.reason for guest in guests] == [CloseReason.TOO_MANY_NEWCOMERS] * 2 + [None] * 3
    assert known.reason is None
    await guests[-1].say(b"REMOTE_SERVER_UP x\n")
    assert len(guests[-1].commands) == 1
    statistics = at.hub.statistics()
    assert (statistics.newcomers, statistics.newcomers_cut) == (2, 2)
    assert statistics.closed == {"too_many_newcomers": 2}


async def test_when_the_server_is_full_newcomers_give_way_and_known_clients_do_not(
    door: Open, autojump_clock: object
) -> None:
    at = door(room=3)
    guests = [at.connect() for _ in range(3)]
    for guest in guests[:2]:
        await guest.say(b"NAME x\n")
    for _ in range(10):
        newest = at.connect()
        await settle(2)
        assert newest.admitted
        assert len(at.hub) == 3
    assert guests[2].reason is CloseReason.TOO_MANY_NEWCOMERS
    await newest.say(b"NAME x\n")
    assert not at.connect().admitted
    assert [guest.reason for guest in [*guests[:2], newest]] == [None] * 3
    assert at.hub.statistics().refused == 1


async def test_handshakes_count_as_connections_and_give_way_first(door: Open, autojump_clock: object) -> None:
    at = door(room=3, tls_handshakes=2)
    cut: list[str] = []
    for name in "abc":
        assert at.hub.admit_handshake(name, lambda name=name: cut.append(name))
    assert cut == ["a"]
    guests = [at.connect() for _ in range(2)]
    await trio.testing.wait_all_tasks_blocked()
    assert cut == ["a", "b"]
    assert [guest.reason for guest in guests] == [None, None]
    assert (at.hub.statistics().connected, at.hub.statistics().handshakes) == (2, 1)
    at.hub.handshakes.leave("c")
    at.hub.handshakes.leave("c")
    assert at.hub.statistics().handshakes == 0


async def test_unfinished_lines_of_all_have_a_bound_and_the_oldest_is_cut(door: Open, autojump_clock: object) -> None:
    at = door(unfinished_bytes=1 << 20)
    guests = [at.connect() for _ in range(4)]
    for guest in guests:
        await guest.say(b"NAME x\n")
        await guest.say(b"PARK t 0/1 1 1 * 1 " + b"x" * 300_000)
    assert len(at.hub.unfinished) == 3
    assert "may have 1048576 bytes of unfinished lines" in await guests[0].last_line()
    assert guests[0].reason is CloseReason.UNFINISHED_LINE
    assert at.hub.statistics().unfinished < 1 << 20
    for guest in guests[1:]:
        await guest.say(b"\n")
        assert len(guest.commands) == 1
    assert at.hub.statistics().unfinished == 0


async def test_short_unfinished_lines_do_not_count(door: Open, autojump_clock: object) -> None:
    at = door(unfinished_bytes=1 << 20)
    guest = at.connect()
    await guest.say(b"NAME x\nNAME y")
    assert at.hub.statistics().unfinished == 0


async def test_a_crowd_from_one_address_takes_no_place_from_another() -> None:
    allowance = Allowance(5)
    cut: list[str] = []

    def hold(name: str, address: str) -> None:
        allowance.hold(name, lambda: cut.append(name), address=address)

    hold("polite", "here")
    for number in range(20):
        hold(f"crowd {number}", "there")
    assert cut == [f"crowd {number}" for number in range(16)]
    allowance.leave("polite")
    assert (allowance.used, len(allowance), allowance.cut) == (4, 4, 16)


async def test_where_each_has_its_own_address_the_oldest_is_cut() -> None:
    allowance = Allowance(3)
    cut: list[int] = []
    for number in range(5):
        allowance.hold(number, lambda number=number: cut.append(number), address=f"host {number}")  # type: ignore[misc]
    assert cut == [0, 1]
