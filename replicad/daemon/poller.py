"""Polls Postgres for the positions of all streams and tubes: often while something changes, seldom while nothing does.

While nothing does, a `Bell` tells when it is time; without one, the pauses grow up to `poll_max`. Where many clients
follow what moves, the pause is longer, so that more is sent to each of them at a time.

One round of statements serves all streams and tubes. An exception in the handler of one reading is reported as a
trouble of that stream or tube; the other readings are passed on. While Postgres cannot be reached, the poller tries
again with a growing pause. It logs the begin and the end of the outage; a poll without an answer for some seconds is
one too. Clients that wait for positions keep waiting.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass

import structlog
import trio

from replicad import sqlstates
from replicad.config.limits import Limits
from replicad.daemon.troubles import DATABASE, Troubles
from replicad.errors import DatabaseError, DatabaseUnavailable
from replicad.positions.bell import ANY, Bell, LastValues
from replicad.positions.horizon import FEW, Horizon, Reading, Source
from replicad.retry import Backoff
from replicad.sqlstates import means

CALM_GROWTH = 1.25  # factor by which the pause grows towards poll_max while nothing changes
QUICK = 4  # part of poll_min, where a transaction is about to commit: it ended a calm, or began to hold a position back
SENDING = 4  # part of the time in which lines are gathered that sending them takes at least; polls wait for it
BELL_PAUSE = 2.0  # seconds until the next poll where a bell is expected to ring much sooner
BELL_RETRY = 5.0  # seconds before a bell that failed is tried again
HANGS = 5.0  # seconds without an answer to a poll, twice as many at most, after which it counts as an outage
TUBE_PREFIX = "tube:"  # names of watched tubes begin with this; a stream's name has no colon

log = structlog.get_logger()

OnReading = Callable[[str, Reading], float | None]  # returns the seconds in which no next reading is wanted


@dataclass(frozen=True, slots=True)
class Outages:
    """Seconds before a failed poll is tried again."""

    first: float = 0.1  # before the second try; doubles up to `longest`
    longest: float = 5.0


@dataclass(frozen=True, slots=True)
class PollerStatistics:
    """Counts since the start. `outage_s`: seconds since a poll failed first, 0 if the last poll succeeded. `silent_s`:
    seconds since the last poll that succeeded (or since the start), also while a poll is under way and hangs.
    """

    polls: int
    failures: int
    outage_s: float
    silent_s: float


class Poller:
    """Calls `on_reading(name, reading)` for every watched table after every poll."""

    def __init__(
        self,
        horizon: Horizon,
        limits: Limits,
        troubles: Troubles,
        recover: Callable[[], Awaitable[None]] | None = None,
        outages: Outages = Outages(),
    ) -> None:
        """`recover` is called before each new try while Postgres cannot be reached (it restarts an embedded server)."""
        self._horizon = horizon
        self._limits = limits
        self._troubles = troubles
        self._recover = recover
        self._backoff = Backoff(outages.first, outages.longest, jitter=0.0)  # since the last poll that succeeded
        self._listeners: dict[str, OnReading] = {}
        self._bell = trio.Event()
        self._polls = 0
        self._failures = 0
        self._under_way = False  # a poll
        self._away_since: float | None = None
        self._answered_at: float | None = None
        self._pause = limits.poll_min
        self._gather = 0.0  # seconds in which the next poll is not wanted
        self._soon = False  # what holds a position back has just begun to
        self._at_rest: LastValues | None = None
        self._polled_at = float("-inf")  # when the last poll began
        self._rests = trio.Event()  # set while a bell may ring
        self._not_before = float("-inf")  # when its ring may begin a poll
        self._has_bell = False
        self._rings_at_once = False  # the bell hears WAL
        self._alarmed: dict[str, tuple[str, ...]] = {}
        self._last: Mapping[str, Reading] = {}

    def watch(
        self,
        name: str,
        source: Source,
        on_reading: OnReading,
        *,
        published: int | None = None,
        per_writer: Mapping[str, int] | None = None,
        writers: Iterable[str] = (),
        file: int | None = None,
    ) -> None:
        """Begin to watch a table; the first reading comes with the next poll. Arguments as of `Horizon.watch`."""
        self._horizon.watch(name, source, published=published, per_writer=per_writer, writers=writers, file=file)
        self._listeners[name] = on_reading
        self.ring()

    def before_polling(self, look: Callable[[], Awaitable[None]]) -> None:
        """Call `look` before anything is read from a new connection, as of `Horizon.before_polling`."""
        self._horizon.before_polling(look)

    def set_writers(self, name: str, writers: Iterable[str]) -> None:
        """Set the writers of a watched stream."""
        self._horizon.set_writers(name, writers)

    def unwatch(self, name: str) -> None:
        """Stop watching; unknown names are accepted."""
        self._listeners.pop(name, None)
        self._alarmed.pop(name, None)
        self._horizon.unwatch(name)

    def ring(self) -> None:
        """Poll now instead of at the end of the pause."""
        self._bell.set()

    def statistics(self) -> PollerStatistics:
        """Counts, as one frozen value."""
        now = trio.current_time()
        away = 0.0 if self._away_since is None else now - self._away_since
        silent = 0.0 if self._answered_at is None else now - self._answered_at
        return PollerStatistics(self._polls, self._failures, away, silent)

    async def run(self) -> None:
        """Poll until cancelled."""
        if self._answered_at is None:
            self._answered_at = trio.current_time()  # the pools were opened a moment ago
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._notice_silence)
            await self._poll_again_and_again()

    async def _notice_silence(self) -> None:
        """Report a poll that hangs: a suspended server, or a network that loses all packets, refuses nothing."""
        before = None
        while True:
            await trio.sleep(HANGS)
            now = self._polls + self._failures if self._under_way else None
            if now is not None and now == before and self._away_since is None:
                silent = self.statistics().silent_s
                error = DatabaseUnavailable(f"Postgres has not answered for {silent:.0f} s; the connection stands")
                self._begin_outage(error)
            before = now

    async def _poll_again_and_again(self) -> None:
        while True:
            self._bell = trio.Event()
            try:
                moved = await self._poll()
            except DatabaseError as error:
                await self._outage(error)
                continue
            except Exception as error:  # noqa: BLE001 - a defect must not stop all streams and tubes for good
                self._failures += 1
                self._troubles.fail("service", "poller", "poll", error)
                await self._sleep_longer()
                continue
            self._backoff.reset()
            self._set_pause(moved=moved)
            polled_at = trio.current_time()
            with trio.move_on_after(self._limits.poll_min / QUICK if self._soon else self._pause):
                await self._bell.wait()
            if self._gather:
                await trio.sleep_until(polled_at + self._gather)

    def _set_pause(self, *, moved: bool) -> None:
        """The pause until the next poll, and whether a bell is waited for."""
        limits = self._limits
        rested = self._at_rest is not None
        self._at_rest = None
        at_rest = self._horizon.at_rest() if self._has_bell else None
        usual = max(limits.poll_min + self._gather / SENDING, self._gather)
        if at_rest is not None and (not moved or (self._rings_at_once and len(at_rest) <= FEW)):
            self._at_rest = at_rest
            self._not_before = trio.current_time() + usual if moved else float("-inf")
            self._pause = BELL_PAUSE
            self._rests.set()
        elif moved and at_rest is None and rested:
            self._pause = limits.poll_min / QUICK
        elif moved and at_rest is None:
            self._pause = min(2 * self._pause, limits.poll_min)
            self._pause = max(self._pause + self._gather / SENDING, self._gather)
        elif moved:
            self._pause = usual
        else:
            self._pause = min(max(self._pause, limits.poll_min) * CALM_GROWTH, limits.poll_max)

    async def attend(self, bell: Bell) -> None:
        """Poll when the bell rings, until cancelled. While it does not work, the poller does without, more slowly."""
        while True:
            try:
                async with bell.waiting() as wait:
                    self._has_bell = True
                    while True:
                        await self._rests.wait()
                        moved: int | None = None
                        while moved is None and self._at_rest is not None:  # polls go on meanwhile, but seldom
                            self._rings_at_once = bell.hears()
                            moved = await wait(self._at_rest, self._polled_at)
                            self._troubles.end("service", "bell", "wait")
                        if moved is not None:
                            self._horizon.expect(None if moved == ANY else moved)
                            await trio.sleep_until(self._not_before)
                        self._rests = trio.Event()  # set again by the next poll
                        self.ring()
            except DatabaseError as error:
                if not means(error.sqlstate, sqlstates.LOCKED):  # who locks a sequence lets it go soon
                    self._troubles.fail("service", "bell", "wait", error)
            finally:
                self._has_bell = self._rings_at_once = False
            self.ring()
            await trio.sleep(BELL_RETRY)

    async def _poll(self) -> bool:
        """Poll once; True when a position moved or is held back."""
        self._under_way = True
        self._polled_at = trio.current_time()
        try:
            readings = await self._horizon.poll()
        finally:
            self._under_way = False
        self._polls += 1
        self._answered_at = trio.current_time()
        self._troubles.end("service", "poller", "poll")
        if self._away_since is not None:
            log.info("database_back", away_s=round(trio.current_time() - self._away_since, 1))
            self._away_since = None
            self._troubles.end(DATABASE, DATABASE, "poll")
            self._troubles.end(DATABASE, DATABASE, "recover")
        before, self._last = self._last, readings
        self._soon = False
        if readings is before:
            self._gather = 0.0
            return False
        pauses: list[float] = []  # of the streams that have moved
        for name, reading in list(readings.items()):  # a listener may call `unwatch` and `watch`
            old = before.get(name)
            if old is reading and reading.held_by is None:
                continue
            moved = old is None or old.last_value != reading.last_value or reading.held_by is not None
            self._log_alarms(name, reading.alarms)
            listener, pause = self._listeners.get(name), None
            if listener is not None:
                with self._troubles.contain(*thing_of(name), "reading"):
                    pause = listener(name, reading)
            if old is not None and (pause or 0.0) < self._limits.poll_min and _is_held_newly(old, reading):
                self._soon, pause = True, None  # nothing was sent, so nothing is gathered
            if moved:
                pauses.append(pause or 0.0)
        self._gather = min(pauses, default=0.0)
        return bool(pauses)

    def _log_alarms(self, name: str, alarms: tuple[str, ...]) -> None:
        """Log each new alarm, and when there are none any more."""
        known = self._alarmed.get(name, ())
        for alarm in alarms:
            if alarm not in known:
                log.warning("position_alarm", watched=name, alarm=alarm)
        if known and not alarms:
            log.info("position_alarms_over", watched=name)
        self._alarmed[name] = alarms

    async def _outage(self, error: DatabaseError) -> None:
        self._failures += 1
        if self._away_since is None:
            self._backoff.reset()
        self._begin_outage(error)
        await self._sleep_longer()
        if self._recover is not None and isinstance(error, DatabaseUnavailable):
            with self._troubles.contain(DATABASE, DATABASE, "recover"):  # may succeed later (the disk was full)
                await self._recover()

    def _begin_outage(self, error: DatabaseError) -> None:
        """Report it, or another reason for it."""
        self._troubles.begin(DATABASE, DATABASE, "poll", str(error), code=error.code)
        if self._away_since is None:
            self._away_since = trio.current_time()
            log.error("database_away", error=str(error), remedy="replicad keeps trying; clients stay connected")

    async def _sleep_longer(self) -> None:
        self._pause = self._backoff.next_delay()
        await trio.sleep(self._pause)


def thing_of(watched: str) -> tuple[str, str]:
    """The kind and the name under which troubles of this watch are reported."""
    return ("tube", watched.removeprefix(TUBE_PREFIX)) if watched.startswith(TUBE_PREFIX) else ("stream", watched)


def _is_held_newly(old: Reading, new: Reading) -> bool:
    """Whether ids were given out since, of which none may be read yet, while before all could.

    Mostly one short transaction is in flight. Without another look soon, all others would wait for a whole pause more.
    """
    shown = (old.position, old.per_writer) == (new.position, new.per_writer)
    return shown and old.position == old.last_value != new.last_value
