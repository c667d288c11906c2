"""The daemon's side of presence: writes the reports of workers to Postgres, in batches.

The settings are read every second. While Postgres is away the daemon goes on accepting reports and writes the result
when it is back. The daemons watch each other's beats (docs/leases.md). If a daemon's beat does not change for the time
to live and a grace period, the first daemon that sees it clears the users of that daemon. A daemon that was cleared
takes a new id and writes all its users again. SQL decides which users are online (presence/sql). While a dump is
restored presence looks as if it was not enabled, so reports are kept and taken for an hour then: workers do not send
them again.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from uuid import UUID

import structlog
import trio

from replicad.config.settings import ServerSettings
from replicad.daemon.relay import Relay
from replicad.daemon.service import Answers, Feature, Host, Job
from replicad.daemon.session import Session
from replicad.daemon.troubles import Restarts, Troubles, keep_running
from replicad.errors import DatabaseError, SchemaMissing, SchemaTooNew
from replicad.postgres.statements import write_in_pieces
from replicad.presence.commands import COMMANDS, ClearUserSync, UserIp, UserSync
from replicad.presence.repository import BATCH, PresenceRepository, PresenceSettings, Sightings, read
from replicad.presence.roster import Roster, RosterStatistics
from replicad.retry import Backoff


@dataclass(frozen=True, slots=True)
class PresenceIntervals:
    """Intervals and pauses in seconds, and bounds."""

    look: float = 1.0  # between two looks at the settings and at the other daemons' beats
    ips: float = 1.0  # between two writes of addresses
    sweep: float = 60.0  # between two looks for addresses that are too old
    retry: float = 0.2  # before a statement that failed is tried again; doubles up to `longest_retry`
    longest_retry: float = 5.0
    kept: float = 3600.0  # users in memory once presence is not enabled any more; a dump may be restored just then
    max_ips: int = 50_000  # places that wait for Postgres, some 30 MB
    restarts: Restarts = Restarts()


BEATS = 3  # beats in a time to live: one may be late
CLEARINGS = 10  # statements for the users of expired daemons at one look
SWEEPS = 100  # statements at one look
SERVICE = "presence"
JOBS = ("users", "beats", "addresses", "sweeps")  # the tasks that run while presence is enabled

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class PresenceStatistics:
    """A moment of the service; `roster` is None if presence is not enabled. `written`: users since the start."""

    roster: RosterStatistics | None
    ips_waiting: int
    written: int


class PresenceService:
    """Receives the reports of all sessions of one daemon. They have no effect before presence is enabled."""

    def __init__(
        self,
        book: PresenceRepository,
        settings: ServerSettings,
        troubles: Troubles,
        relay: Relay,
        pace: PresenceIntervals = PresenceIntervals(),
    ) -> None:
        self.book = book
        self._pace = pace
        self._troubles = troubles
        self._name = f"{settings.server_name} pid {os.getpid()}"
        self._limit = settings.limits.presence_devices
        self._roster: Roster | None = None  # None: not enabled, and not for the last `kept` seconds
        self._look: PresenceSettings | None = None  # None: not enabled
        self._ended = 0.0  # when presence was found not to be enabled any more
        self._checked: str | None = None  # the fingerprint under which all rows were found
        self._suspected: str | None = None  # a new fingerprint that was seen once
        self._me: UUID | None = None  # None: not enlisted, or cleared by another daemon
        self._beat = 0
        self._sightings = Sightings(self._pace.max_ips)
        self._sessions: set[int] = set()  # those whose end matters
        self._woken = trio.Event()
        self._ips_came = trio.Event()
        self._scope = trio.CancelScope()
        self._written = 0
        self._upgraded = False  # the installed part is of this version
        self._relay = relay
        relay.on(ClearUserSync, partial(self.clear, elsewhere=True))

    # --- `Service` ---

    def jobs(self) -> Sequence[Job]:
        """`Service.jobs`."""
        return [Job(SERVICE, self.run, announces=True)]

    def answers(self, peer: Session) -> Answers:
        """`Service.answers`."""

        async def user_sync(command: UserSync) -> None:
            self.user_sync(peer, command)

        async def clear(command: ClearUserSync) -> None:
            self.clear(command)
            self._relay.broadcast(command)

        async def user_ip(command: UserIp) -> None:
            self.user_ip(command)

        return Answers(at_once={UserSync: user_sync, ClearUserSync: clear, UserIp: user_ip})

    def summary(self) -> Mapping[str, object]:
        """`Service.summary`."""
        return {}

    # --- reports of workers ---

    def user_sync(self, session: Session, command: UserSync) -> None:
        """A user has started or stopped syncing. Raises PresenceRefused."""
        roster = self._roster
        if roster is None:
            return
        instance, user, device = command.instance_id, command.user_id, command.device_id
        if command.syncing:
            if session.number not in self._sessions:
                self._sessions.add(session.number)
                session.at_end(lambda: self._lose(session.number))
            roster.start(session.number, instance, user, device, command.last_sync_ms)
        else:
            roster.end(instance, user, device, trio.current_time(), command.last_sync_ms)
        self._woken.set()

    def clear(self, command: ClearUserSync, *, elsewhere: bool = False) -> None:
        """CLEAR_USER_SYNC: an instance has no users any more.

        `elsewhere`: another daemon got it. Then only users that no connection here reports are removed.
        """
        if self._roster is not None:
            self._roster.clear(command.instance_id, only_leaving=elsewhere)
            self._woken.set()

    def user_ip(self, command: UserIp) -> None:
        """USER_IP: an address of a user. Raises PresenceRefused."""
        if self._look is not None:
            self._sightings.add(read(command))
            self._ips_came.set()

    def _lose(self, connection: int) -> None:
        self._sessions.discard(connection)
        if self._roster is not None:
            self._roster.lose(connection, trio.current_time())
            self._woken.set()

    def statistics(self) -> PresenceStatistics:
        """Counts, as one frozen value."""
        roster = None if self._roster is None or self._look is None else self._roster.statistics()
        return PresenceStatistics(roster, len(self._sightings), self._written)

    # --- life ---

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Keep presence while it is enabled, until cancelled. `started` is called after the first look at the settings.

        May be run again after a failure; the users in memory are kept.
        """
        async with trio.open_nursery() as nursery:
            if self._look is not None:
                self._begin_serving(nursery)
            with self._troubles.contain("service", SERVICE, "settings"):
                await self._look_at_settings(nursery)
            task_status.started()
            while True:
                await trio.sleep(self._pace.look)
                with self._troubles.contain("service", SERVICE, "settings"):
                    await self._look_at_settings(nursery)
                if self._look is None:
                    continue
                with self._troubles.contain("service", SERVICE, "rows"):
                    await self._look_at_rows(self._look)
                with self._troubles.contain("service", SERVICE, "daemons"):
                    await self._look_at_daemons(self._look)

    async def _look_at_settings(self, nursery: trio.Nursery) -> None:
        look = await self.book.look() if self._look is not None or await self._is_usable() else None
        now = trio.current_time()
        if look is None:
            if self._look is not None:
                self._stop(now)
            elif now >= self._ended + self._pace.kept:
                self._roster = None
            return
        if self._roster is None:
            self._roster = Roster(self._limit, look.grace, look.lost_grace)
        self._roster.configure(look.grace, look.lost_grace, now)
        enabled, self._look = self._look is None, look
        if enabled:
            self._roster.write_anew()
            self._begin_serving(nursery)
            log.info("presence_enabled", grace=look.grace, lost_grace=look.lost_grace, ttl=look.ttl)

    def _begin_serving(self, nursery: trio.Nursery) -> None:
        self._scope = trio.CancelScope()
        nursery.start_soon(self._serve, self._scope)

    async def _is_usable(self) -> bool:
        """Whether presence is installed in this version. An older version is upgraded."""
        if not await self.book.is_installed():
            self._upgraded = False
        elif not self._upgraded:
            self._upgraded = await self._upgrade()
        return self._upgraded

    async def _upgrade(self) -> bool:
        try:
            await self.book.upgrade()
        except (SchemaMissing, SchemaTooNew) as error:
            self._troubles.fail("service", SERVICE, "schema", error)
            return False
        self._troubles.end("service", SERVICE, "schema")
        return True

    def _stop(self, now: float) -> None:
        self._scope.cancel()
        self._look = self._me = self._checked = self._suspected = None
        self._ended = now
        self._sightings.clear()
        for name in (SERVICE, *(f"{SERVICE}: {job}" for job in JOBS)):
            self._troubles.forget("service", name)
        log.info("presence_disabled")

    async def _serve(self, scope: trio.CancelScope) -> None:
        with scope:
            async with trio.open_nursery() as nursery:
                jobs = (self._write_forever, self._beat_forever, self._write_ips_forever, self._sweep_forever)
                for name, job in zip(JOBS, jobs, strict=True):
                    nursery.start_soon(
                        keep_running, job, "service", f"{SERVICE}: {name}", self._troubles, self._pace.restarts
                    )

    # --- users ---

    async def _write_forever(self) -> None:
        backoff = Backoff(self._pace.retry, self._pace.longest_retry, jitter=0.0)
        while True:
            roster = await self._wait_for_changes()
            try:
                await self._write(roster)
            except DatabaseError as error:
                self._troubles.fail("service", SERVICE, "users", error)
                await trio.sleep(backoff.next_delay())
            else:
                self._troubles.end("service", SERVICE, "users")
                backoff.reset()

    async def _wait_for_changes(self) -> Roster:
        while True:
            roster = self._roster
            assert roster is not None  # else our scope is cancelled
            self._woken = trio.Event()
            roster.expire(trio.current_time())
            if roster.has_changes:
                return roster
            with trio.move_on_at(roster.next_deadline()):
                await self._woken.wait()

    async def _write(self, roster: Roster) -> None:
        me = self._me
        if me is None:
            self._me, self._beat = await self.book.enlist(self._name), 1
            return
        changes = roster.take(BATCH)
        written = await write_in_pieces(changes, partial(self.book.apply, me), self._refused)
        if self._me != me:
            return  # it has begun again meanwhile
        if written:
            roster.confirm(changes)
            self._written += len(changes)
        else:
            self._begin_anew(roster)

    def _refused(self, error: DatabaseError) -> None:
        """Record a user or address that Postgres cannot store; the others are written."""
        self._troubles.record("service", SERVICE, "not_kept", error)

    def _begin_anew(self, roster: Roster) -> None:
        log.warning(
            "presence_begins_anew",
            reason="another daemon has cleared this one, or the database was restored to an earlier state",
        )
        self._me = None
        roster.write_anew()
        self._woken.set()

    async def _beat_forever(self) -> None:
        beaten_at = trio.current_time()
        while True:
            assert self._look is not None
            # The settings may change meanwhile: sleep no longer than until the next look at them.
            due = beaten_at + self._look.ttl / BEATS
            await trio.sleep(min(max(due - trio.current_time(), 0), self._pace.look))
            me, roster = self._me, self._roster
            if me is None or roster is None:
                beaten_at = trio.current_time()  # nothing to beat for: a daemon that enlists begins with a beat
                continue
            if trio.current_time() < due:
                continue
            beaten_at = trio.current_time()
            with self._troubles.contain("service", SERVICE, "beat"):
                beat = await self.book.beat(me, self._beat)
                if self._me != me:
                    continue
                if beat is None:
                    self._begin_anew(roster)
                else:
                    self._beat = beat

    # --- what every daemon does for all ---

    async def _look_at_daemons(self, look: PresenceSettings) -> None:
        """Clear the users of expired daemons. If there are many, the next look continues."""
        for beat in await self.book.beats():
            if beat.daemon == self._me or beat.silent < look.ttl + look.lost_grace:
                continue
            cleared = 0
            for _ in range(CLEARINGS):
                users = await self.book.clear_expired(beat)
                if not users:
                    break
                cleared += users
            log.warning("presence_daemon_dead", daemon=str(beat.daemon), silent=round(beat.silent, 1), users=cleared)

    async def _look_at_rows(self, look: PresenceSettings) -> None:
        """Write rows again that were trimmed or lost by a reset; one look later, when every daemon has noticed that."""
        if look.fingerprint == self._checked:
            return
        if look.fingerprint == self._suspected:
            await self.book.write_again()
            self._checked = look.fingerprint
        self._suspected = look.fingerprint

    # --- addresses ---

    async def _write_ips_forever(self) -> None:
        backoff = Backoff(self._pace.retry, self._pace.longest_retry, jitter=0.0)
        while True:
            while not len(self._sightings):
                self._ips_came = trio.Event()
                await self._ips_came.wait()
            await trio.sleep(self._pace.ips)
            try:
                while sightings := self._sightings.take(BATCH):
                    await write_in_pieces(sightings, self.book.write_ips, self._refused)
                    self._sightings.written(sightings)
            except DatabaseError as error:
                self._troubles.fail("service", SERVICE, "addresses", error)
                await trio.sleep(backoff.next_delay())
            else:
                self._troubles.end("service", SERVICE, "addresses")
                backoff.reset()

    async def _sweep_forever(self) -> None:
        while True:
            with self._troubles.contain("service", SERVICE, "sweep"):
                for _ in range(SWEEPS):
                    if await self.book.sweep_ips() < BATCH:
                        break
            await trio.sleep(self._pace.sweep)


def feature(pace: PresenceIntervals = PresenceIntervals()) -> Feature:
    """The feature `presence`."""

    def open_service(host: Host) -> PresenceService:
        book = PresenceRepository(host.pools.own, host.settings.database.stream_schema)
        return PresenceService(book, host.settings, host.troubles, host.relay, pace)

    return Feature("presence", COMMANDS, open_service)


FEATURE = feature()
