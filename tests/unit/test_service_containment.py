"""A defect in one service, or in what one reading leads to, stops nothing else; the service finds its work again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any
from unittest.mock import Mock

import pytest
import trio
from structlog.testing import capture_logs
from trio.testing import MockClock

from replicad.config.limits import Limits
from replicad.daemon.poller import Outages, Poller
from replicad.daemon.relay import Relay
from replicad.daemon.troubles import Restarts, Troubles, keep_running
from replicad.errors import DatabaseError, DatabaseUnavailable, EnvironmentRefused, TokenAhead
from replicad.positions.watched import Reading
from replicad.postgres.statements import write_in_pieces
from replicad.protocol.commands import CORE, RemoteServerUp
from replicad.streams.commands import FederationAck
from replicad.streams.registry import ReaderAck
from replicad.streams.serving.service import AckService
from tests.daemons import relay_key

FEEDS: Any = {
    "s": Mock(followed=Mock(position=100), stream=Mock(epoch="e"), lineage=Mock(shared_by_all=60))
}  # one stream that stands at 100, and whose history has forked at 60
FEEDS["s"].name = "s"
LIMITS = Limits(poll_min=0.05, poll_max=0.05)
DEFECTS = [OSError("x"), MemoryError(), ValueError("x"), AssertionError(), KeyError("x")]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Tracebacks are not rendered, which would take most of the time."""
    with capture_logs():
        yield


class FakeHorizon:
    """Gives a new reading of each watched table at every poll, or raises what it is told to."""

    def __init__(self, *names: str) -> None:
        self.names = names
        self.raises: Exception | None = None
        self.polls = 0

    async def poll(self) -> Mapping[str, Reading]:
        await trio.lowlevel.checkpoint()
        self.polls += 1
        if self.raises is not None:
            raise self.raises
        return dict.fromkeys(self.names, Reading(self.polls, {"w": self.polls}, self.polls))

    def watch(self, *args: Any, **named: Any) -> None:
        pass


@pytest.mark.parametrize("error", DEFECTS, ids=repr)
async def test_a_reading_that_cannot_be_used_concerns_its_stream_alone(
    error: Exception, autojump_clock: MockClock
) -> None:
    troubles, raised, others = Troubles(), 0, []
    poller = Poller(FakeHorizon("a", "tube:b", "c"), LIMITS, troubles)  # type: ignore[arg-type]

    def fail(name: str, reading: Reading) -> None:
        nonlocal raised
        raised += 1
        if raised <= 10:
            raise error

    poller.watch("a", Mock(), fail)
    poller.watch("tube:b", Mock(), fail)
    poller.watch("c", Mock(), lambda name, reading: others.append(name))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(poller.run)
        while raised < 10:
            await trio.sleep(0.001)
        places = {trouble.place for trouble in troubles.current()}
        assert places == {("stream", "a", "reading"), ("tube", "b", "reading")}
        await trio.sleep(1)
        assert troubles.current() == []
        assert len(others) > 10
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("error", DEFECTS, ids=repr)
async def test_a_poll_that_raises_is_a_trouble_and_is_tried_again(error: Exception, autojump_clock: MockClock) -> None:
    troubles, horizon = Troubles(), FakeHorizon("a")
    poller = Poller(horizon, LIMITS, troubles)  # type: ignore[arg-type]
    horizon.raises = error
    async with trio.open_nursery() as nursery:
        nursery.start_soon(poller.run)
        await trio.sleep(100)
        assert 100 / Outages().longest < horizon.polls < 40  # with a pause that grows
        assert [trouble.place for trouble in troubles.current()] == [("service", "poller", "poll")]
        horizon.raises = None
        await trio.sleep(2 * Outages().longest)
        assert troubles.current() == []
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("error", [*DEFECTS, EnvironmentRefused("the disk is full")], ids=repr)
async def test_an_embedded_server_that_cannot_be_started_is_tried_again(
    error: Exception, autojump_clock: MockClock
) -> None:
    troubles, horizon, tries = Troubles(), FakeHorizon("a"), 0

    async def recover() -> None:
        nonlocal tries
        tries += 1
        if tries < 5:
            raise error
        horizon.raises = None

    horizon.raises = DatabaseUnavailable("away")
    poller = Poller(horizon, LIMITS, troubles, recover)  # type: ignore[arg-type]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(poller.run)
        await trio.sleep(1)
        assert {trouble.place.cause for trouble in troubles.current()} == {"poll", "recover"}
        await trio.sleep(60)
        assert troubles.current() == []
        nursery.cancel_scope.cancel()


# --- acks ---


class FakeNotes:
    """Keeps acks, or raises what `refuse` raises of them."""

    def __init__(self, refuse: Callable[[Sequence[ReaderAck]], None]) -> None:
        self.refuse = refuse
        self.written: list[ReaderAck] = []

    async def note_acks(self, some: Sequence[ReaderAck]) -> None:
        await trio.lowlevel.checkpoint()
        self.refuse(some)
        self.written += some

    async def write_troubles(self, daemon: str, rows: Sequence[object]) -> None:
        raise NotImplementedError


@pytest.mark.parametrize("error", [*DEFECTS, DatabaseError("no"), DatabaseUnavailable("away")], ids=repr)
async def test_acks_wait_until_they_can_be_written_whatever_happened(
    error: Exception, autojump_clock: MockClock
) -> None:
    fails = 3

    def refuse(some: Sequence[ReaderAck]) -> None:
        nonlocal fails
        fails -= 1
        if fails >= 0:
            raise error

    notes, troubles = FakeNotes(refuse), Troubles()
    service = AckService(notes, FEEDS, troubles)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(keep_running, service.run, "service", "acks", troubles)
        assert service.note(FederationAck("w", 7, "s"), None, lambda _: False)
        await trio.sleep(2.5)
        if not isinstance(error, DatabaseUnavailable):  # of which the poller tells
            assert [trouble.place for trouble in troubles.current()] == [("service", "acks", "write")]
        await trio.sleep(10)
        assert notes.written == [ReaderAck("s", "e", "w", 7)]
        assert troubles.current() == []
        nursery.cancel_scope.cancel()


async def test_one_ack_that_cannot_be_kept_does_not_hold_back_the_others(autojump_clock: MockClock) -> None:
    def refuse(some: Sequence[ReaderAck]) -> None:
        if any(ack.instance == "bad" for ack in some):
            raise DatabaseError("a letter that the encoding lacks", sqlstate="22P05")

    notes, troubles = FakeNotes(refuse), Troubles()
    service = AckService(notes, FEEDS, troubles)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(service.run)
        for instance in ("a", "b", "bad", "c", "d"):
            service.note(FederationAck(instance, 7, "s"), None, lambda _: False)
        await trio.sleep(5)
        assert sorted(ack.instance for ack in notes.written) == ["a", "b", "c", "d"]
        assert troubles.counts["service", "ack", "database"] == 1
        assert troubles.current() == []
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("token", "reads", "refused"),
    [(60, False, None), (61, False, "ahead of 60, where .* forked"), (61, True, None), (100, True, None),
        (101, True, "whose position is 100"), (101, False, "whose position is 100"), (1 << 62, True, "is 100")],
)  # fmt: skip
def test_an_ack_counts_up_to_what_its_connection_can_know(token: int, reads: bool, refused: str | None) -> None:
    service = AckService(FakeNotes(lambda some: None), FEEDS, Troubles())
    with pytest.raises(TokenAhead, match=refused) if refused else nullcontext():
        service.note(FederationAck("w", token, "s"), None, lambda _: reads)


@pytest.mark.parametrize("bad", [set(), {0}, {3, 4}, set(range(7))])
async def test_writing_in_pieces_leaves_out_what_is_refused_and_nothing_else(bad: set[int]) -> None:
    written: list[int] = []
    refused: list[DatabaseError] = []

    async def write(some: Any) -> bool:
        if bad & set(some):
            raise DatabaseError("no", sqlstate="22021")
        written.extend(some)
        return True

    assert await write_in_pieces(range(7), write, refused.append)
    assert written == sorted(set(range(7)) - bad)
    assert len(refused) == len(bad)


# --- relay ---


class FakePostgres:
    """Takes messages, and raises what it is told to; nobody can listen."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.messages: list[str] = []

    async def fetch(self, sql: str, channel: str, messages: list[str]) -> None:
        await trio.lowlevel.checkpoint()
        if self.errors:
            raise self.errors.pop(0)
        self.messages += messages

    def listen(self, channel: str) -> Any:
        raise ValueError("listening is broken")


@pytest.mark.parametrize("error", DEFECTS, ids=repr)
async def test_a_relay_that_cannot_listen_still_sends_and_one_that_failed_to_send_goes_on(
    error: Exception, autojump_clock: MockClock
) -> None:
    postgres, troubles = FakePostgres(error), Troubles()
    relay = Relay(postgres, relay_key, CORE, troubles)  # type: ignore[arg-type]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(keep_running, relay.run, "service", "relay", troubles)
        relay.broadcast(RemoteServerUp("lost"))
        await trio.sleep(0.01)
        relay.broadcast(RemoteServerUp("sent"))
        await trio.sleep(Restarts().steady / 2)
        assert [message.split("\n")[1:] for message in postgres.messages] == [["REMOTE_SERVER_UP sent"]]
        statistics = relay.statistics()
        assert (statistics.sent, statistics.dropped) == (1, 1)
        assert {trouble.place.name for trouble in troubles.current()} == {"relay: send", "relay: listen"}
        nursery.cancel_scope.cancel()
