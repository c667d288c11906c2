"""Presence over a book in memory: who is online is written, again after an outage, and anew after a clearing."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast
from uuid import UUID, uuid4

import trio
from trio.testing import MockClock

from replicad.daemon.relay import Relay
from replicad.daemon.troubles import Troubles
from replicad.errors import DatabaseError, DatabaseUnavailable, SchemaTooNew
from replicad.presence.commands import ClearUserSync
from replicad.presence.repository import Beat, PresenceRepository, PresenceSettings, Sighting
from replicad.presence.roster import OnlineChange
from replicad.presence.service import PresenceIntervals, PresenceService

from .conftest import Desk, settle

LOOK = PresenceSettings(grace=2.0, lost_grace=4.0, ttl=6.0, ip_retention=60.0, fingerprint="f")


@dataclass
class MemoryRepository(PresenceRepository):
    """What Postgres would hold: who is online at which daemon. `fails[method]` is raised."""

    settings: PresenceSettings | None = LOOK
    installed: bool = True
    upgrades: int = 0
    online: dict[UUID, set[str]] = field(default_factory=dict)
    beats_of: dict[UUID, int] = field(default_factory=dict)
    silent: dict[UUID, float] = field(default_factory=dict)
    cleared: list[UUID] = field(default_factory=list)
    retold: int = 0
    ips: list[Sighting] = field(default_factory=list)
    sweeps: int = 0
    fails: dict[str, Exception] = field(default_factory=dict)

    async def _answer(self, what: str) -> None:
        await trio.lowlevel.checkpoint()
        if what in self.fails:
            raise self.fails[what]

    async def is_installed(self) -> bool:
        await self._answer("is_installed")
        return self.installed

    async def look(self) -> PresenceSettings | None:
        await self._answer("look")
        return self.settings

    async def upgrade(self) -> None:
        await self._answer("upgrade")
        self.upgrades += 1

    async def enlist(self, name: str) -> UUID:
        await self._answer("enlist")
        daemon = uuid4()
        self.online[daemon], self.beats_of[daemon] = set(), 1
        return daemon

    async def beat(self, daemon: UUID, beat: int) -> int | None:
        await self._answer("beat")
        if daemon not in self.beats_of:
            return None
        self.beats_of[daemon] += 1
        return self.beats_of[daemon]

    async def beats(self) -> list[Beat]:
        await self._answer("beats")
        return [Beat(daemon, beat, self.silent.get(daemon, 0.0)) for daemon, beat in self.beats_of.items()]

    async def clear_expired(self, beat: Beat) -> int | None:
        users = len(self.online.pop(beat.daemon, ()))
        self.beats_of.pop(beat.daemon, None)
        self.cleared.append(beat.daemon)
        return users

    async def apply(self, daemon: UUID, changes: Sequence[OnlineChange]) -> bool:
        await self._answer("apply")
        if any("bad" in change.user for change in changes):
            raise DatabaseError("a letter that the encoding lacks", sqlstate="22P05")
        if daemon not in self.online:
            return False
        for change in changes:
            (self.online[daemon].add if change.online else self.online[daemon].discard)(change.user)
        return True

    async def write_again(self) -> None:
        self.retold += 1

    async def write_ips(self, sightings: Sequence[Sighting]) -> bool:
        await self._answer("ips")
        self.ips += sightings
        return True

    async def sweep_ips(self) -> int:
        await self._answer("sweep")
        self.sweeps += 1
        return 0

    @property
    def users(self) -> set[str]:
        return {user for users in self.online.values() for user in users}


class Broadcaster:
    """A relay that remembers what it was told."""

    def __init__(self) -> None:
        self.told: list[object] = []
        self.handlers: dict[object, Any] = {}

    def on(self, kind: object, handler: Any) -> None:
        self.handlers[kind] = handler

    def broadcast(self, command: object) -> None:
        self.told.append(command)


class World:
    def __init__(self, desk: Desk, book: MemoryRepository) -> None:
        self.book, self.telling, self.troubles = book, Broadcaster(), desk.troubles
        self.service = PresenceService(
            book, desk.settings, desk.troubles, cast(Relay, self.telling), PresenceIntervals()
        )
        self.connect = desk.connect

    def causes(self) -> set[str]:
        return {trouble.place.cause for trouble in self.troubles.current()}


@asynccontextmanager
async def open_presence(book: MemoryRepository | None = None, **limits: Any) -> AsyncIterator[World]:
    async with trio.open_nursery() as nursery:
        desk = Desk(nursery, Troubles(), **limits)
        world = World(desk, book or MemoryRepository())
        await desk.open(world.service)
        yield world
        nursery.cancel_scope.cancel()


async def test_users_are_online_while_a_device_syncs_and_for_the_grace_period_after(
    autojump_clock: MockClock,
) -> None:
    async with open_presence() as world:
        client = world.connect()
        await client.say(
            "USER_SYNC w @a:x None start 1", "USER_SYNC w @b:x phone start 1", "USER_SYNC w @c:x None start 1"
        )
        await settle()
        assert world.book.users == {"@a:x", "@b:x", "@c:x"}
        await client.say("USER_SYNC w @a:x None end 2")
        await settle(1)
        assert "@a:x" in world.book.users, "within the grace period"
        await settle(1.5)
        assert world.book.users == {"@b:x", "@c:x"}
        await client.leave()
        await settle(3)
        assert world.book.users == {"@b:x", "@c:x"}, "a lost connection has a longer one"
        await settle(2)
        assert world.book.users == set()
        assert world.service.statistics().written == 6
        assert world.service.summary() == {}


async def test_clear_ends_an_instance_at_once_here_and_only_what_is_leaving_elsewhere(
    autojump_clock: MockClock,
) -> None:
    async with open_presence() as world:
        client = world.connect()
        await client.say(
            "USER_SYNC w @a:x None start 1", "USER_SYNC w @b:x None start 1", "USER_SYNC w @b:x None end 1"
        )
        world.telling.handlers[ClearUserSync](ClearUserSync("w"))
        await settle()
        assert world.book.users == {"@a:x"}, "another daemon's clearing leaves what syncs here"
        await client.say("CLEAR_USER_SYNC w")
        await settle()
        assert world.book.users == set()
        assert world.telling.told == [ClearUserSync("w")]


async def test_reports_are_taken_during_an_outage_and_the_result_is_written_after_it(
    autojump_clock: MockClock,
) -> None:
    async with open_presence() as world:
        world.book.fails = dict.fromkeys(
            ["apply", "enlist", "beat", "beats", "look", "ips", "sweep"], DatabaseUnavailable("away")
        )
        client = world.connect()
        await client.say(
            "USER_SYNC w @a:x None start 1", "USER_SYNC w @b:x None start 1", "USER_SYNC w @b:x None end 1"
        )
        await client.say('USER_IP @a:x ["token", "1.1.1.1", "agent", null, 1]')
        await settle(20)
        assert world.book.users == set()
        assert {"users", "addresses"} <= world.causes()
        world.book.fails.clear()
        await settle(10)
        assert world.book.users == {"@a:x"}
        assert [sighting.ip for sighting in world.book.ips] == ["1.1.1.1"]
        assert world.causes() == set()


async def test_a_daemon_that_was_cleared_by_another_writes_all_its_users_again(autojump_clock: MockClock) -> None:
    async with open_presence() as world:
        client = world.connect()
        await client.say("USER_SYNC w @a:x None start 1")
        await settle()
        for forget in (world.book.online.clear, world.book.beats_of.clear):
            [before] = world.book.online
            world.book.online.clear()
            forget()
            world.book.beats_of.clear()
            await settle(8)
            assert world.book.users == {"@a:x"}
            assert before not in world.book.online


async def test_one_user_that_cannot_be_stored_keeps_no_other_from_being_written(autojump_clock: MockClock) -> None:
    async with open_presence() as world:
        await world.connect().say(*(f"USER_SYNC w @{name}:x None start 1" for name in ("a", "bad", "c", "d")))
        await settle(2)
        assert world.book.users == {"@a:x", "@c:x", "@d:x"}
        assert world.troubles.counts["service", "not_kept", "database"] == 1


async def test_daemons_whose_beat_stopped_are_cleared_and_a_beating_one_is_not(autojump_clock: MockClock) -> None:
    async with open_presence() as world:
        dead, alive = uuid4(), uuid4()
        world.book.beats_of = {dead: 3, alive: 3}
        world.book.online = {dead: {"@z:x"}, alive: {"@y:x"}}
        world.book.silent = {dead: LOOK.ttl + LOOK.lost_grace, alive: LOOK.ttl}
        await settle(2)
        assert set(world.book.cleared) == {dead}
        assert world.book.users == {"@y:x"}
        client = world.connect()
        await client.say("USER_SYNC w @a:x None start 1")
        await settle(20)
        assert max(beat for daemon, beat in world.book.beats_of.items() if daemon != alive) >= 8, "three in a ttl"


async def test_rows_are_written_again_one_look_after_the_fingerprint_changed(autojump_clock: MockClock) -> None:
    async with open_presence() as world:
        await settle(5)
        assert world.book.retold == 1
        world.book.settings = replace(LOOK, fingerprint="g")
        await settle(1)
        assert world.book.retold == 1, "the other daemons may not have noticed yet"
        await settle(5)
        assert world.book.retold == 2


async def test_presence_is_enabled_and_disabled_while_the_daemon_runs(autojump_clock: MockClock) -> None:
    async with open_presence(MemoryRepository(settings=None, installed=False)) as world:
        client = world.connect()
        assert await client.say("USER_SYNC w @a:x None start 1", 'USER_IP @a:x ["t", "1.1.1.1", "a", null, 1]') == []
        assert world.service.statistics().roster is None
        world.book.installed = True
        world.book.fails["upgrade"] = SchemaTooNew("of a newer replicad")
        await settle(2)
        assert world.causes() == {"schema"}
        world.book.fails.clear()
        world.book.settings = LOOK
        await settle(2)
        assert world.book.upgrades == 1
        await client.say("USER_SYNC w @a:x None start 1")
        await settle()
        assert world.book.users == {"@a:x"}
        world.book.settings = replace(LOOK, grace=0.5)
        await settle(2)
        world.book.settings = None
        await settle(2)
        assert world.service.statistics().roster is None
        assert world.causes() == set()


async def test_users_are_written_again_after_a_restore_that_took_the_settings_away_for_a_while(
    autojump_clock: MockClock,
) -> None:
    """Workers know nothing of it, and send no report again; what they report meanwhile counts too."""
    async with open_presence() as world:
        client = world.connect()
        await client.say("USER_SYNC w @a:x None start 1", "USER_SYNC w @b:x None start 1")
        await settle()
        world.book.settings = None
        await settle(100)
        assert world.service.statistics().roster is None
        await client.say("USER_SYNC w @c:x None start 1", "USER_SYNC w @b:x None end 1")
        world.book.online.clear()
        world.book.beats_of.clear()
        world.book.settings = LOOK
        await settle(10)
        assert world.book.users == {"@a:x", "@c:x"}
        world.book.settings = None
        await settle(4000)
        world.book.online.clear()
        world.book.settings = LOOK
        await settle(10)
        assert world.book.users == set(), "it was disabled for good, and forgot them"


async def test_more_devices_than_there_may_be_are_refused_and_the_connection_stays(autojump_clock: MockClock) -> None:
    async with open_presence(presence_devices=1) as world:
        client = world.connect()
        lines = await client.say("USER_SYNC w @a:x None start 1", "USER_SYNC w @b:x None start 1")
        assert lines[0].startswith("ERROR presence_refused: 1 devices are all that this server keeps")
        long = f"USER_SYNC w @{300 * 'a'}:x None start 1"
        assert (await client.say(long))[0].startswith("ERROR presence_refused: a name of more than 255 bytes")
        await settle(130)
        assert world.book.sweeps >= 2


async def test_a_service_that_failed_keeps_the_users_in_memory(autojump_clock: MockClock) -> None:
    async with open_presence() as world:
        client = world.connect()
        await client.say("USER_SYNC w @a:x None start 1")
        await settle()
        daemon, online = next(iter(world.book.online.items()))
        troubles, world.service._troubles = world.service._troubles, None  # type: ignore[assignment]
        await settle(2)
        world.service._troubles = troubles
        await settle(40)
        assert world.book.online == {daemon: online}
        await client.say("USER_SYNC w @b:x None start 1")
        await settle(2)
        assert world.book.users == {"@a:x", "@b:x"}
