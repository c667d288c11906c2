"""What goes wrong in one session ends that session and nothing else, and is logged and counted."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import trio
import trio.testing
from structlog.testing import capture_logs

from replicad.config.settings import ServerSettings
from replicad.daemon.hub import Hub
from replicad.daemon.outbox import QUEUED_BYTES
from replicad.daemon.session import Session
from replicad.daemon.troubles import QUIET, Troubles
from replicad.errors import LocalProtocolError, TubeRefused
from replicad.protocol.command import Command
from replicad.protocol.commands import RemoteServerUp
from replicad.protocol.connection import CloseReason
from replicad.tubes.commands import Part, Release
from tests.vocabulary import EVERY

Handler = Callable[[Session, Command], Awaitable[None]]
UNSENDABLE = Release("a\rb", Part(0, 1), 1)


async def ignore(command: Command) -> None:
    pass


class Bench:
    """Sessions of one hub, on memory streams."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self.hub = Hub(10)
        self.ended: list[CloseReason] = []
        self._nursery = nursery
        nursery.start_soon(self.hub.run)

    def open(self, handle: Handler = ignore) -> tuple[Session, trio.abc.Stream]:
        ours, theirs = trio.testing.memory_stream_pair()
        session = Session(ours, "memory", ServerSettings(server_name="example.com"), self.hub, EVERY)
        assert self.hub.admit(session)

        async def run() -> None:
            self.ended.append(await session.run(handle))

        self._nursery.start_soon(run)
        return session, theirs


@pytest.fixture
def bench(nursery: trio.Nursery) -> Bench:
    return Bench(nursery)


async def received(peer: trio.abc.Stream) -> str:
    await trio.testing.wait_all_tasks_blocked()
    return bytes(await peer.receive_some(1 << 20)).decode()


async def test_an_answer_that_cannot_be_rendered_ends_its_session_with_a_word(
    bench: Bench, autojump_clock: object
) -> None:
    session, peer = bench.open()
    await received(peer)
    with capture_logs() as logs:
        session.post(UNSENDABLE)
        assert await received(peer) == "ERROR internal error; the server's log has it\n"
    await peer.aclose()
    await trio.testing.wait_all_tasks_blocked()
    assert bench.ended == [CloseReason.INTERNAL_ERROR]
    assert bench.hub.statistics().closed == {"internal_error": 1}
    assert bench.hub.troubles.counts["session", "run", "local_protocol"] == 1
    assert "failure_contained" in {entry["event"] for entry in logs}


async def test_what_cannot_be_relayed_concerns_its_sender_alone(bench: Bench, autojump_clock: object) -> None:
    async def relay(command: Command) -> None:
        bench.hub.relay(UNSENDABLE, None)

    _, sender = bench.open(relay)
    _, other = bench.open()
    await received(other)
    await sender.send_all(b"REMOTE_SERVER_UP x\n")
    assert (await received(sender)).endswith("ERROR internal error; the server's log has it\n")
    await sender.aclose()
    await trio.testing.wait_all_tasks_blocked()
    assert len(bench.hub) == 1
    bench.hub.relay(RemoteServerUp("x"), None)
    assert await received(other) == "REMOTE_SERVER_UP x\n"
    with pytest.raises(LocalProtocolError):
        bench.hub.relay(UNSENDABLE, None)


async def test_a_callback_at_the_end_that_raises_keeps_no_other_from_being_called(
    bench: Bench, autojump_clock: object
) -> None:
    session, peer = bench.open()
    await received(peer)
    called = []
    session.at_end(lambda: 1 // 0)  # type: ignore[arg-type, return-value]
    session.at_end(lambda: called.append(1))
    await peer.aclose()
    await trio.testing.wait_all_tasks_blocked()
    assert called == [1]
    assert bench.ended == [CloseReason.PEER_CLOSED]
    assert len(bench.hub) == 0
    assert bench.hub.troubles.counts["session", "end", "ZeroDivisionError"] == 1


@pytest.mark.parametrize("error", [OSError("x"), MemoryError(), AssertionError(), ExceptionGroup("", [ValueError()])])
async def test_a_handler_that_raises_ends_its_own_session(
    bench: Bench, error: Exception, autojump_clock: object
) -> None:
    async def fail(command: Command) -> None:
        raise error

    _, peer = bench.open(fail)
    _, other = bench.open()
    await peer.send_all(b"REMOTE_SERVER_UP x\n")
    assert "ERROR internal error" in await received(peer)
    await peer.aclose()
    await trio.testing.wait_all_tasks_blocked()
    assert bench.ended == [CloseReason.INTERNAL_ERROR]
    assert len(bench.hub) == 1
    assert (await received(other)).startswith("SERVER")


async def test_a_failure_at_the_moment_of_a_cancellation_ends_nothing_else(autojump_clock: object) -> None:
    """A task of the session that raises while it is cancelled must not raise out of `run`."""
    ours, peer = trio.testing.memory_stream_pair()
    session = Session(ours, "memory", ServerSettings(server_name="example.com"), Hub(1), EVERY)

    async def fail_when_cancelled(command: Command) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.sleep_forever)
            try:
                await trio.sleep_forever()
            finally:
                raise ValueError

    async with trio.open_nursery() as nursery:
        nursery.start_soon(session.run, fail_when_cancelled)
        await peer.send_all(b"REMOTE_SERVER_UP x\n")
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()


async def test_a_session_that_has_ended_takes_no_tasks_and_does_not_mind(bench: Bench, autojump_clock: object) -> None:
    session, peer = bench.open()
    await received(peer)
    await peer.aclose()
    await trio.testing.wait_all_tasks_blocked()
    assert bench.ended
    session.start(trio.sleep_forever)


async def test_the_text_of_an_error_is_put_on_one_line_whatever_it_quotes(bench: Bench, autojump_clock: object) -> None:
    session, peer = bench.open()
    await received(peer)
    session.refuse(TubeRefused("a\r\nb\0c\x1bd\x85e\ud800f" + "x" * 100_000))
    line = await received(peer)
    assert line.startswith("ERROR tube_refused: a  b c d e f")
    assert len(line) < 5000
    session.hang_up(CloseReason.BAD_LINE, "what\never")
    assert await received(peer) == "ERROR what ever\n"


async def test_many_short_answers_may_wait_and_their_bytes_are_bounded(bench: Bench, autojump_clock: object) -> None:
    session, peer = bench.open()
    line = b"x" * 50 + b"\n"
    for _ in range(QUEUED_BYTES // len(line)):
        session.post_line(line)
    assert (await received(peer)).count("\n") > 20_000
    for _ in range(QUEUED_BYTES // len(line) + 2):
        session.post_line(line)
    await peer.aclose()
    await trio.testing.wait_all_tasks_blocked()
    assert bench.ended == [CloseReason.SLOW_READER]


def test_failures_of_one_kind_do_not_fill_the_log() -> None:
    now = 0.0
    troubles = Troubles(lambda: now)
    with capture_logs() as logs:
        for _ in range(1000):
            troubles.record("session", "a", "run", ValueError("x"))
        troubles.record("session", "a", "end", ValueError("x"))
        now = QUIET
        troubles.record("session", "b", "run", ValueError("x"))
    seen: list[tuple[Any, ...]] = [(entry["cause"], entry["left_out"]) for entry in logs]
    assert seen == [("run", 0), ("end", 0), ("run", 999)]
    assert troubles.counts["session", "run", "ValueError"] == 1001
    assert troubles.current() == []
