"""One session over streams in memory, on a clock that jumps: time-outs, refusals, and a named reason for every end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import structlog
import trio
import trio.testing

from replicad.config.settings import ServerSettings
from replicad.daemon.hub import EARLY, Hub
from replicad.daemon.journal import Channel, JournalLimits
from replicad.daemon.session import Session
from replicad.errors import UnknownStream
from replicad.protocol.command import Command
from replicad.protocol.commands import RemoteServerUp
from replicad.protocol.connection import CloseReason
from replicad.protocol.words import Side
from tests.vocabulary import EVERY

Start = Callable[..., "Bench"]


class Peer:
    """The other end: reads lines, remembers what it did not expect."""

    def __init__(self, stream: trio.abc.Stream) -> None:
        self.stream = stream
        self.received = b""

    async def read_to_end(self) -> list[str]:
        while data := await self.stream.receive_some(1 << 16):
            self.received += data
        return self.received.decode().splitlines()

    async def lines(self, count: int) -> list[str]:
        while self.received.count(b"\n") < count:
            data = await self.stream.receive_some(1 << 16)
            assert data, f"closed after {self.received!r}"
            self.received += data
        *lines, rest = self.received.split(b"\n", count)
        self.received = rest
        return [line.decode() for line in lines]


class Bench:
    """A session under test, its peer, and how it ended."""

    def __init__(self, settings: ServerSettings, small_pipe: bool) -> None:
        if small_pipe:
            ours, theirs = trio.testing.lockstep_stream_pair()
        else:
            ours, theirs = trio.testing.memory_stream_pair()
        self.hub = Hub(10, limits=settings.limits)
        self.peer = Peer(theirs)
        self.session = Session(ours, "memory", settings, self.hub, EVERY)
        self.hub.admit(self.session)
        self.commands: list[Command] = []
        self.reason: CloseReason | None = None

    async def run(self, handle: Callable[..., Any] | None = None) -> None:
        async def note(command: Command) -> None:
            self.commands.append(command)

        self.reason = await self.session.run(handle or note)


@pytest.fixture
def start(nursery: trio.Nursery) -> Start:
    def make(
        handle: Callable[..., Any] | None = None, *, token: str | None = None, small_pipe: bool = False, **limits: Any
    ) -> Bench:
        settings = ServerSettings(server_name="example.com", token=token)
        bench = Bench(replace(settings, limits=replace(settings.limits, **limits)), small_pipe)
        nursery.start_soon(bench.hub.run)
        nursery.start_soon(bench.run, handle)
        return bench

    return make


async def test_it_names_itself_and_pings_first_and_every_five_seconds(start: Start, autojump_clock: object) -> None:
    bench = start()
    first, ping = await bench.peer.lines(2)
    assert first == "SERVER example.com"
    assert ping.startswith("PING ")
    began = trio.current_time()
    for tick in (1, 2, 3):
        assert (await bench.peer.lines(1))[0].startswith("PING ")
        assert 5 * tick - EARLY * tick <= trio.current_time() - began <= 5 * tick + 1e-6


async def test_a_person_gets_the_list_of_commands_for_three_unknown_words_and_goes_on(
    start: Start, autojump_clock: object
) -> None:
    bench = start()
    await bench.peer.lines(2)
    for typed, hint in (("help", "did you mean HELP?"), ("replicat events", "did you mean REPLICATE?"), ("xyzzy", "")):
        await bench.peer.stream.send_all(f"{typed}\n".encode())
        word = typed.partition(" ")[0]
        (error,) = await bench.peer.lines(1)
        assert error.startswith(f"ERROR unknown_command: there is no command '{word}'; {hint}")
        listed = await bench.peer.lines(len(EVERY.of(Side.CLIENT)) + 1)
        assert [line.partition(" ")[0] for line in listed] == ["HELP"] * len(listed)
        assert "**" not in "".join(listed), "a terminal shows no Markdown"
        assert any(
            line.startswith("HELP REPLICATE [stream_name] [token|NOW|EARLIEST] [linear] [where=column=value]: ")
            for line in listed
        )
        assert listed[-1] == "HELP"
    await bench.peer.stream.send_all(b"TAKEN events\nHELP TAKEN\n")
    one, end = await bench.peer.lines(2)
    assert (one.startswith("HELP TAKEN stream_name [id]: "), end) == (True, "HELP")
    assert [command.NAME for command in bench.commands] == ["TAKEN"]
    await bench.peer.stream.send_all(b"again\n")
    assert (await bench.peer.read_to_end())[-1].startswith("ERROR bad_line: unknown command 'again'")


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (b"NAME program\nFROB 1\n", "bad_line"),
        (b"PING 1\nFROB 1\n", "bad_line"),
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\nREMOTE_SERVER_UP x\n", "bad_line"),
        (b"Host: x\r\n", "bad_line"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "bad_line"),
        (b"FROB " + b"x" * 300 + b"\n", "bad_line"),
        (b"SERVER x\n", "bad_line"),
    ],
)
async def test_programs_and_other_protocols_are_disconnected_with_their_first_unknown_word(
    start: Start, autojump_clock: object, sent: bytes, code: str
) -> None:
    bench = start()
    await bench.peer.stream.send_all(sent)
    lines = await bench.peer.read_to_end()
    assert lines[-1].startswith(f"ERROR {code}: ")
    assert not any(line.startswith("HELP") for line in lines)
    assert bench.commands == []


async def test_before_auth_a_stranger_gets_no_list(start: Start, autojump_clock: object) -> None:
    for sent in (b"xyzzy\n", b"HELP\n"):
        bench = start(token="secret")
        await bench.peer.stream.send_all(sent)
        assert not any(line.startswith("HELP") for line in await bench.peer.read_to_end())


@pytest.mark.parametrize(
    ("sent", "token", "logged"),
    [
        (b"", None, []),
        (b"NAME check\nAUTH secret\nHELP PING\n", "secret", []),
        (b"TAKEN a\nTAKEN b\n", None, ["session_opened", "session_closed"]),
        (b"FROB \x01\n", None, ["session_closed"]),
        (b"AUTH guess\n", "secret", ["session_closed"]),
    ],
)
async def test_health_checks_do_not_fill_the_log(
    start: Start, autojump_clock: object, sent: bytes, token: str | None, logged: list[str]
) -> None:
    with structlog.testing.capture_logs() as events:
        bench = start(token=token)
        await bench.peer.lines(2)
        if sent:
            await bench.peer.stream.send_all(sent)
        await trio.testing.wait_all_tasks_blocked()
        await bench.peer.stream.aclose()
        while bench.reason is None:
            await trio.sleep(1)
    assert [one["event"] for one in events if one["log_level"] != "debug"] == logged


async def test_only_a_peer_that_pinged_is_timed_out(start: Start, autojump_clock: object) -> None:
    silent, pinging = start(), start()
    await silent.peer.stream.send_all(b"NAME silent\n")
    began = trio.current_time()
    await pinging.peer.stream.send_all(b"PING 1\n")
    lines = await pinging.peer.read_to_end()
    assert trio.current_time() - began == pytest.approx(15)
    assert lines[-1].startswith("ERROR peer_silent: ")
    await trio.sleep(100)
    assert (pinging.reason, silent.reason) == (CloseReason.PEER_SILENT, None)


async def test_any_command_keeps_a_pinging_peer_alive(start: Start, autojump_clock: object) -> None:
    bench = start()
    await bench.peer.stream.send_all(b"PING 1\n")
    for _ in range(10):
        await trio.sleep(14)
        await bench.peer.stream.send_all(b"REMOTE_SERVER_UP x\n")
    await trio.testing.wait_all_tasks_blocked()
    assert bench.reason is None
    assert len(bench.commands) == 10


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (b"FROB x\n", "bad_line: unknown command 'FROB'"),
        (b"RDATA a b 1 []\n", "bad_line: RDATA is not a client's command"),
        (b"TAKEN\n", "bad_line: TAKEN: the form is"),
        (b"NAME \xff\n", "bad_line: a line is not valid UTF-8"),
        (b"NAME a\0b\n", "bad_line: a line has the control character U+0000 (character 7"),
        (b"NAME " + b"x" * 5000 + b"\n", "line_too_long: "),
        (b"x" * 5000, "line_too_long: "),
    ],
)
async def test_a_broken_line_gets_an_error_that_says_so_and_the_end(
    start: Start, autojump_clock: object, sent: bytes, code: str
) -> None:
    bench = start(max_line=4096)
    await bench.peer.stream.send_all(b"\n \r\nNAME somebody\r\n" + sent)
    lines = await bench.peer.read_to_end()
    assert lines[-1].startswith(f"ERROR {code}"), lines
    assert bench.session.name == "somebody"
    assert bench.hub.statistics().closed == {"bad_line": 1}


async def test_a_line_that_trickles_in_has_a_deadline(start: Start, autojump_clock: object) -> None:
    bench = start(line_timeout=30)
    began = trio.current_time()

    async def trickle() -> None:
        for byte in b"NAME " + b"x" * 1000:
            try:
                await bench.peer.stream.send_all(bytes([byte]))
            except trio.BrokenResourceError:
                return
            await trio.sleep(1)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(trickle)
        lines = await bench.peer.read_to_end()
        nursery.cancel_scope.cancel()
    assert lines[-1].startswith("ERROR unfinished_line: ")
    assert 30 <= trio.current_time() - began <= 36


async def test_where_a_token_is_wanted_nothing_is_answered_before_it(start: Start, autojump_clock: object) -> None:
    wrong, early, late, right = (start(token="secret", auth_timeout=10) for _ in range(4))
    await wrong.peer.stream.send_all(b"AUTH guess\n")
    assert (await wrong.peer.read_to_end())[-1].startswith("ERROR not_authorised: the token is wrong")
    await early.peer.stream.send_all(b"NAME me\nREPLICATE\n")
    assert (await early.peer.read_to_end())[-1].startswith("ERROR not_authorised: REPLICATE before AUTH")
    await right.peer.stream.send_all(b"AUTH secret\nREPLICATE\n")
    began = trio.current_time()
    assert (await late.peer.read_to_end())[-1].startswith("ERROR not_authorised: no AUTH")
    assert trio.current_time() - began == pytest.approx(10)
    await trio.sleep(20)
    assert [command.NAME for command in right.commands] == ["REPLICATE"]
    assert right.reason is None


async def test_a_refused_request_leaves_the_connection_open(start: Start, autojump_clock: object) -> None:
    bench = start()
    await bench.peer.lines(2)
    bench.session.refuse(UnknownStream("there is no stream 'x'\nindeed"))
    assert await bench.peer.lines(1) == ["ERROR unknown_stream: there is no stream 'x' indeed"]
    assert bench.reason is None


async def test_a_defect_of_ours_ends_one_session_with_a_word(start: Start, autojump_clock: object) -> None:
    async def fail(command: Command) -> None:
        raise ZeroDivisionError

    bench = start(fail)
    await bench.peer.stream.send_all(b"REPLICATE\n")
    assert (await bench.peer.read_to_end())[-1].startswith("ERROR internal error")
    await bench.peer.stream.aclose()
    await trio.testing.wait_all_tasks_blocked()
    assert bench.reason is CloseReason.INTERNAL_ERROR


async def test_what_is_posted_comes_before_the_journal_that_is_joined_after_it(
    start: Start, autojump_clock: object
) -> None:
    bench = start()
    channel = Channel("s", {"master": 0})
    await channel.append(b"RDATA s master 1 []\n")
    bench.session.post(RemoteServerUp("x"))
    bench.session.outbox.read(channel, 0, extended=False)
    assert (await bench.peer.lines(4))[2:] == ["REMOTE_SERVER_UP x", "RDATA s master 1 []"]


async def test_a_peer_that_takes_nothing_is_cut_off_and_holds_one_chunk_at_most(
    start: Start, autojump_clock: object
) -> None:
    bench = start(small_pipe=True, stall_timeout=60)
    channel = Channel("s", {}, JournalLimits(max_bytes=1000))
    bench.session.outbox.read(channel, 0, extended=False)
    await bench.peer.lines(2)
    for _ in range(100):
        await channel.append(b"x" * 99 + b"\n")
        assert channel.statistics().bytes <= 1000
    await trio.sleep(70)
    assert bench.reason is CloseReason.SLOW_READER


async def test_relays_to_a_peer_that_reads_nothing_are_bounded(start: Start, autojump_clock: object) -> None:
    bench = start(small_pipe=True)
    for _ in range(100_000):
        bench.session.post(RemoteServerUp("x"))
        if bench.session._end is not None:
            break
    await trio.sleep(10)
    assert bench.reason is CloseReason.SLOW_READER


async def test_stopping_tells_every_client(start: Start, autojump_clock: object) -> None:
    benches = [start() for _ in range(3)]
    await trio.testing.wait_all_tasks_blocked()
    for bench in benches:
        bench.session.hang_up(CloseReason.SERVER_STOPPING, "server stopping")
    for bench in benches:
        assert (await bench.peer.read_to_end())[-1] == "ERROR server stopping"
    assert len(benches[0].hub) == 0


async def test_a_peer_that_breaks_off_while_commands_wait_ends_its_own_session_only(start: Start) -> None:
    bench = start(small_pipe=True)
    await trio.testing.wait_all_tasks_blocked()  # the greeting is on its way and nobody reads it
    bench.session.post(RemoteServerUp("x"))
    await bench.peer.stream.aclose()
    await trio.testing.wait_all_tasks_blocked()
    assert bench.reason in (CloseReason.PEER_LOST, CloseReason.PEER_CLOSED)


async def test_a_session_whose_reader_falls_ends_at_once_though_its_peer_takes_nothing(
    start: Start, autojump_clock: object
) -> None:
    bench = start(small_pipe=True)
    await bench.peer.lines(2)
    channel = Channel("s", {}, JournalLimits(max_bytes=100, patience=1.0))
    quick = channel.subscribe(0, lambda: None, extended=False)
    bench.session.outbox.read(channel, 0, extended=False)
    began = trio.current_time()
    while bench.reason is None and trio.current_time() < began + 30:
        await channel.append(b"x" * 30 + b"\n")
        quick.take_nowait()
        await trio.sleep(0.5)
    assert bench.reason is CloseReason.SLOW_READER
    assert trio.current_time() - began <= 5
