"""The poller over a horizon in memory, and the relay over a database in memory: pauses, outages, numbers, nonsense."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any, cast

import pytest
import trio
from trio.testing import MockClock

from replicad.config.limits import Limits
from replicad.daemon.poller import Outages, Poller
from replicad.daemon.relay import MAX_LINE, Relay, RelayIntervals
from replicad.daemon.troubles import Troubles
from replicad.errors import DatabaseError, DatabaseUnavailable, RelayRefused
from replicad.positions.bell import Bell, Wait
from replicad.positions.horizon import Holder, HolderKind, Horizon, LockSource, Reading, Source
from replicad.protocol.commands import LockReleased, RemoteServerUp
from tests.daemons import relay_key, relayed
from tests.vocabulary import EVERY

from .conftest import settle

SOURCE = LockSource(1, 2)


class MemoryHorizon:
    """A horizon whose readings the test sets; polls are noted by time."""

    def __init__(self) -> None:
        self.readings: dict[str, Reading] = {}
        self.polls: list[float] = []
        self.raises: Exception | None = None
        self.answers = trio.Event()
        self.answers.set()
        self.calls: list[tuple[object, ...]] = []
        self.rest: dict[int, int | None] | None = None

    async def poll(self) -> Mapping[str, Reading]:
        await trio.lowlevel.checkpoint()
        self.polls.append(trio.current_time())
        await self.answers.wait()
        if self.raises is not None:
            raise self.raises
        return dict(self.readings) if self.rest is None else self.readings  # another one as long as somebody writes

    def before_polling(self, look: Callable[[], Awaitable[None]]) -> None:
        self.calls.append(("before",))

    def watch(
        self,
        name: str,
        source: Source,
        *,
        published: int | None = None,
        per_writer: Mapping[str, int] | None = None,
        writers: Iterable[str] = (),
        file: int | None = None,
    ) -> None:
        self.calls.append(("watch", name))

    def set_writers(self, name: str, writers: Iterable[str]) -> None:
        self.calls.append(("writers", name, *writers))

    def unwatch(self, name: str) -> None:
        self.calls.append(("unwatch", name))

    def at_rest(self) -> Mapping[int, int | None] | None:
        return self.rest

    def expect(self, sequence: int) -> None:
        self.calls.append(("expect", sequence))

    def move(self, **values: int) -> None:
        self.readings = {name: Reading(position=at, last_value=at) for name, at in values.items()}


@asynccontextmanager
async def polling(**recover: Any) -> AsyncIterator[tuple[Poller, MemoryHorizon, Troubles]]:
    horizon, troubles = MemoryHorizon(), Troubles()
    limits = Limits(poll_min=0.01, poll_max=1.0)
    async with trio.open_nursery() as nursery:
        poller = Poller(cast(Horizon, horizon), limits, troubles, outages=Outages(first=0.1, longest=5.0), **recover)
        nursery.start_soon(poller.run)
        yield poller, horizon, troubles
        nursery.cancel_scope.cancel()


class MemoryBell:
    """Rings when the test says so, or after half a second."""

    def __init__(self) -> None:
        self.waits: list[Mapping[int, int | None]] = []
        self.rung = trio.Event()
        self.fails = False
        self.told = False

    def hears(self) -> bool:
        """Whether it is told of what is written."""
        return self.told

    @asynccontextmanager
    async def waiting(self) -> AsyncIterator[Wait]:
        async def wait(values: Mapping[int, int | None], since: float) -> int | None:
            self.waits.append(values)
            self.rung = rung = trio.Event()
            with trio.move_on_after(0.5):
                await rung.wait()
            if self.fails:
                raise DatabaseUnavailable("gone")
            return next(iter(values)) if rung.is_set() else None

        if self.fails:
            raise DatabaseUnavailable("away")
        yield wait


@asynccontextmanager
async def attended() -> AsyncIterator[tuple[Poller, MemoryHorizon, MemoryBell]]:
    """A poller at rest with a bell."""
    async with polling() as (poller, horizon, _), trio.open_nursery() as nursery:
        bell = MemoryBell()
        horizon.rest = {2: 7}
        nursery.start_soon(poller.attend, cast(Bell, bell))
        await trio.sleep(10)
        yield poller, horizon, bell
        nursery.cancel_scope.cancel()


def pauses(horizon: MemoryHorizon, since: int = 0) -> list[float]:
    return [round(b - a, 6) for a, b in pairwise(horizon.polls[since:])]


async def test_it_polls_often_while_something_moves_and_ever_more_seldom_while_nothing_does(
    autojump_clock: MockClock,
) -> None:
    async with polling() as (poller, horizon, _):
        await trio.sleep(30)
        calm = pauses(horizon)
        assert calm == sorted(calm)
        assert (calm[0], calm[-1]) == (0.0125, 1.0)
        seen: list[int | None] = []
        poller.watch("s", SOURCE, lambda name, reading: seen.append(reading.position))
        horizon.move(s=5)
        began = len(horizon.polls)
        await trio.sleep(0.001)
        assert (len(horizon.polls), seen) == (began + 1, [5]), "a watch rings"
        for at in range(6, 10):
            horizon.move(s=at)
            poller.ring()
            await trio.sleep(0.001)
        assert seen == [5, 6, 7, 8, 9]
        holder = Holder(HolderKind.TRANSACTION, pid=1)
        began = len(horizon.polls)
        for _ in range(20):  # held back: it may be over any moment
            horizon.readings = {"s": Reading(position=9, last_value=9, held_by=holder)}
            await trio.sleep(0.01)
        assert max(pauses(horizon, began)) <= 0.0125
        poller.set_writers("s", ["a"])
        poller.before_polling(trio.lowlevel.checkpoint)
        poller.unwatch("s")
        assert horizon.calls == [("watch", "s"), ("writers", "s", "a"), ("before",), ("unwatch", "s")]
        count = len(seen)
        horizon.move(s=10)
        poller.ring()
        await trio.sleep(1)
        assert len(seen) == count


async def test_an_outage_is_one_trouble_and_each_try_waits_longer_until_it_is_over(
    autojump_clock: MockClock, logs: list[Any]
) -> None:
    recoveries = 0

    async def recover() -> None:
        nonlocal recoveries
        recoveries += 1
        if recoveries > 6:
            horizon.raises = None

    async with polling(recover=recover) as (poller, horizon, troubles):
        await trio.sleep(1)
        horizon.raises = DatabaseUnavailable("connection refused")
        began = len(horizon.polls)
        await trio.sleep(10)
        statistics = poller.statistics()
        assert pauses(horizon, began)[:5] == [0.1, 0.2, 0.4, 0.8, 1.6]
        assert 8 < statistics.outage_s < 10
        assert [one.reason for one in troubles.current()] == ["connection refused"]
        await trio.sleep(20)
        assert (troubles.current(), poller.statistics().outage_s, recoveries) == ([], 0.0, 7)
    events = [log["event"] for log in logs]
    assert (events.count("database_away"), events.count("database_back")) == (1, 1)


@pytest.mark.parametrize("end", [None, DatabaseUnavailable("the connection broke")])
async def test_a_poll_that_hangs_is_an_outage_too_and_the_only_trouble(
    end: Exception | None, autojump_clock: MockClock, logs: list[Any]
) -> None:
    async with polling() as (poller, horizon, troubles):
        await trio.sleep(1)
        assert not troubles.current()
        horizon.answers = trio.Event()
        await trio.sleep(5)
        troubles.fail("service", "beats", "write", DatabaseUnavailable("no answer for 60 s"))
        await trio.sleep(7)
        troubles.fail("service", "beats", "write", DatabaseUnavailable("no answer for 60 s"))
        assert [one.place.kind for one in troubles.current()] == ["database"]
        assert "has not answered for" in troubles.current()[0].reason
        assert 0 < poller.statistics().outage_s < 10
        horizon.raises = end
        horizon.answers.set()
        await trio.sleep(0.05)
        assert [one.reason for one in troubles.current()] == ([] if end is None else [str(end)])
        horizon.raises = None
        await trio.sleep(10)
        assert not troubles.current()
    events = [log["event"] for log in logs]
    assert (events.count("database_away"), events.count("database_back")) == (1, 1)


async def test_each_alarm_is_logged_once_and_so_is_that_all_are_over(
    autojump_clock: MockClock, logs: list[Any]
) -> None:
    async with polling() as (_, horizon, _troubles):
        for alarms in (("a",), ("a",), ("a", "b"), (), ()):
            horizon.readings = {"s": Reading(position=1, alarms=alarms)}
            await trio.sleep(2)
    told = [log.get("alarm", "over") for log in logs if log["event"].startswith("position_alarm")]
    assert told == ["a", "b", "over"]


# --- relay ---


async def test_while_nothing_moves_it_polls_when_the_bell_rings(autojump_clock: MockClock) -> None:
    async with attended() as (_, horizon, bell):
        since = len(horizon.polls)
        await trio.sleep(5)
        assert pauses(horizon, since) == [2.0] * 2, "a poll is made now and then, whatever the bell says"
        await trio.sleep(0.1)
        rung_at = trio.current_time()
        bell.rung.set()
        await settle()
        assert horizon.polls[-1] == rung_at
        assert bell.waits[-1] == {2: 7}


async def test_with_a_bell_that_is_told_each_ring_is_one_poll_and_no_sooner_than_the_shortest_pause(
    autojump_clock: MockClock,
) -> None:
    async with attended() as (_, horizon, bell):
        bell.told = True
        await trio.sleep(5)
        since = len(horizon.polls)
        began = trio.current_time()
        for step, pause in enumerate((0.3, 0.002, 0.3)):
            horizon.move(s=step)
            bell.rung.set()
            await trio.sleep(pause)
        rings = [round(at - began, 6) for at in horizon.polls[since:]]
        assert rings == [0.0, 0.3, 0.31], "two are 2 ms apart, poll_min is 10"
        await trio.sleep(1.5)
        assert len(horizon.polls) == since + 3, "nothing moves and nothing rings"


async def test_after_the_bell_it_polls_soon_again_if_the_position_is_held_back(autojump_clock: MockClock) -> None:
    async with attended() as (_, horizon, bell):
        await trio.sleep(0.6)
        horizon.rest = None
        horizon.readings = {
            "s": Reading(position=1, last_value=2, held_by=Holder(HolderKind.TRANSACTION, pid=1, application_name="x"))
        }
        since = len(horizon.polls)
        bell.rung.set()
        await trio.sleep(0.1)
        assert pauses(horizon, since)[:4] == [0.0025, 0.005, 0.01, 0.01]


async def test_it_polls_soon_again_when_a_position_begins_to_be_held_back_and_then_as_before(
    autojump_clock: MockClock,
) -> None:
    async with polling() as (poller, horizon, _):
        poller.watch("s", SOURCE, lambda name, reading: 0.005)
        for at in range(20):
            horizon.move(s=at)
            await trio.sleep(0.01)
        holder = Holder(HolderKind.TRANSACTION, pid=1)
        since = len(horizon.polls)
        for at in range(20, 40):
            horizon.readings = {"s": Reading(position=19, last_value=at, held_by=holder)}
            await trio.sleep(0.01)
        assert pauses(horizon, since)[:4] == [0.0025, 0.01125, 0.01125, 0.01125], "and a quarter of what it gathers"


async def test_a_bell_that_fails_is_done_without_and_tried_again(autojump_clock: MockClock) -> None:
    async with attended() as (poller, horizon, bell):
        bell.fails = True
        await trio.sleep(4)
        since = len(horizon.polls)
        await trio.sleep(20)
        assert max(pauses(horizon, since)) == 1.0, "poll_max"
        assert poller._troubles.why("service", "bell") == "away"
        bell.fails = False
        await trio.sleep(10)
        since = len(horizon.polls)
        await trio.sleep(9)
        assert pauses(horizon, since) == [2.0] * 3
        assert poller._troubles.current() == []


async def test_where_many_readers_follow_a_poll_is_not_made_sooner_than_wanted(autojump_clock: MockClock) -> None:
    async with polling() as (poller, horizon, _):
        poller.watch("many", SOURCE, lambda *_: 0.03)
        await trio.sleep(5)
        for step in range(1, 21):  # it moves all the time, and doorbells ring
            horizon.move(many=step)
            poller.ring()
            await trio.sleep(0.005)
        assert min(pauses(horizon)[-3:]) >= 0.03
        poller.watch("few", SOURCE, lambda *_: None)
        await trio.sleep(5)
        since = len(horizon.polls)
        for step in range(1, 21):
            horizon.move(many=100 + step, few=step)
            poller.ring()
            await trio.sleep(0.005)
        assert min(pauses(horizon, since)) <= 0.01, "what few follow does not wait for the others"


class Bus:
    """NOTIFY in memory, between all databases of one bus."""

    def __init__(self) -> None:
        self.listening: list[trio.MemorySendChannel[str]] = []
        self.raises: list[Exception] = []
        self.deaf: list[Exception] = []
        self.messages: list[str] = []

    async def fetch(self, sql: str, *args: object) -> list[Any]:
        await trio.lowlevel.checkpoint()
        if self.raises:
            raise self.raises.pop(0)
        channel, messages = args
        assert channel == "relay"
        assert isinstance(messages, list)
        for message in messages:
            self.say(message)
        return []

    def say(self, message: str) -> None:
        self.messages.append(message)
        for each in self.listening:
            each.send_nowait(message)

    @asynccontextmanager
    async def listen(self, channel: str) -> AsyncIterator[Notices]:
        await trio.lowlevel.checkpoint()
        if self.deaf:
            raise self.deaf.pop(0)
        send, receive = trio.open_memory_channel[str](10_000)
        self.listening.append(send)
        try:
            yield Notices(receive)
        finally:
            self.listening.remove(send)


class Notices:
    """What comes in."""

    def __init__(self, channel: trio.MemoryReceiveChannel[str]) -> None:
        self._channel = channel

    async def next(self, patience: float) -> str:
        return await self._channel.receive()


class Daemon:
    """One relay on the bus, and what it heard."""

    def __init__(self, bus: Bus, nursery: trio.Nursery, pace: RelayIntervals = RelayIntervals()) -> None:
        self.troubles = Troubles()
        self.relay = Relay(bus, relay_key, EVERY, self.troubles, pace)
        self.heard: list[str] = []
        self.relay.on(RemoteServerUp, self._receive)
        nursery.start_soon(self.relay.run)

    def _receive(self, command: RemoteServerUp) -> None:
        if command.server_name == "defect":
            raise KeyError("defect")
        self.heard.append(command.server_name)


async def test_what_one_daemon_tells_all_others_hear_once_and_in_order(autojump_clock: MockClock) -> None:
    async with trio.open_nursery() as nursery:
        bus = Bus()
        one, two, three = (Daemon(bus, nursery) for _ in range(3))
        await settle()
        names = [f"server{number:04}" for number in range(2000)]
        for name in names:
            one.relay.broadcast(RemoteServerUp(name))
        await settle(10)
        assert (one.heard, two.heard, three.heard) == ([], names, names)
        assert len(bus.messages) < 20, "many lines go in one message"
        assert (one.relay.statistics().sent, two.relay.statistics().received) == (2000, 2000)
        with pytest.raises(RelayRefused):
            one.relay.broadcast(LockReleased(json.dumps(["i", "n", "x" * MAX_LINE])))
        nursery.cancel_scope.cancel()


async def test_only_what_a_daemon_has_signed_just_now_is_taken_and_nonsense_ends_with_itself(
    autojump_clock: MockClock,
) -> None:
    async with trio.open_nursery() as nursery:
        bus = Bus()
        daemon = Daemon(bus, nursery)
        await settle()
        good = relayed("a", 1, "REMOTE_SERVER_UP one")
        for message in (
            good,
            good,
            relayed("a", 1, "REMOTE_SERVER_UP again"),
            "no head",
            "a 9\nREMOTE_SERVER_UP unsigned",
            "a 9 1\nREMOTE_SERVER_UP unsigned",
            good.replace("one", "two").replace("a 1 ", "a 2 "),
            good.replace("a 1 ", "b 1 "),
            good.replace("a 1 ", "a 3 "),
            f"{good}\nREMOTE_SERVER_UP more",
            good.replace(good.split()[3], "0" * 64),
            relayed("c", 1, "REMOTE_SERVER_UP old", age=61),
            relayed("b", 7, "REMOTE_SERVER_UP two", age=50),
            relayed("a", 5, "REMOTE_SERVER_UP three", "FROB x", "RDATA s a 1 []", "REMOTE_SERVER_UP defect", "PING"),
            relayed("a", 4, "REMOTE_SERVER_UP late"),
            relayed("a", 6, "REMOTE_SERVER_UP four"),
        ):
            bus.say(message)
        await settle(1)
        assert daemon.heard == ["one", "two", "three", "four"]
        statistics = daemon.relay.statistics()
        assert dict(statistics.reasons) == {"unsigned": 3, "forged": 5, "repeated": 3, "old": 1, "line": 3}
        assert statistics.missed == 3
        assert daemon.troubles.counts["service", "message", "KeyError"] == 1
        for number in range(1100):
            bus.say(relayed(f"daemon{number}", 1))
        await settle(3)
        assert len(daemon.relay._numbers) == 1000
        nursery.cancel_scope.cancel()


async def test_every_message_fits_into_a_notification(autojump_clock: MockClock) -> None:
    async with trio.open_nursery() as nursery:
        bus = Bus()
        one, two = Daemon(bus, nursery), Daemon(bus, nursery)
        await settle()
        names = [f"{number}{'x' * (number % 1000)}" for number in range(500)]
        longest = LockReleased(json.dumps(["i", "n", "x" * (MAX_LINE - len('LOCK_RELEASED ["i", "n", ""]'))]))
        for name in names:
            one.relay.broadcast(RemoteServerUp(name))
        one.relay.broadcast(longest)
        await settle(10)
        assert two.heard == names
        assert two.relay.statistics().received == len(names) + 1
        assert max(len(message.encode()) for message in bus.messages) < 8000
        nursery.cancel_scope.cancel()


async def test_an_outage_loses_nothing_that_waits_and_a_refusal_loses_only_its_own_messages(
    autojump_clock: MockClock,
) -> None:
    async with trio.open_nursery() as nursery:
        bus = Bus()
        bus.deaf = [DatabaseUnavailable("away")] * 3
        one, two = Daemon(bus, nursery, RelayIntervals(max_waiting=100)), Daemon(bus, nursery)
        await settle(5)
        assert two.troubles.why("service", "relay") is None
        bus.raises = [DatabaseUnavailable("away")] * 3
        one.relay.broadcast(RemoteServerUp("kept"))
        await settle(5)
        assert two.heard == ["kept"]
        bus.raises = [DatabaseError("the queue is full")]
        one.relay.broadcast(RemoteServerUp("lost"))
        await settle()
        assert one.troubles.why("service", "relay") == "the queue is full"
        for number in range(10):
            one.relay.broadcast(RemoteServerUp(f"number{number}"))
        await settle()
        assert two.heard == ["kept", "number6", "number7", "number8", "number9"]
        assert one.relay.statistics().dropped == 1 + 6
        assert one.troubles.current() == []
        nursery.cancel_scope.cancel()
