"""Which devices sync at one daemon, and which users must be written to the database. No I/O; time is an argument.

A user has a *stay* at an instance (a worker) while any of its devices syncs there, and for a grace period after the
last device ended. There are two grace periods: one after an `end`, one after a lost connection. What an instance
reports on a new connection replaces what it reported on an old one. A user is online here while it has any stay.
Whether the user is online at all is decided in Postgres, where all daemons write.
"""

from __future__ import annotations

import enum
import itertools
import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from replicad.errors import PresenceRefused

MAX_NAME = 255  # bytes of a user's, instance's or device's name, as Matrix has it; Postgres indexes no more than 2,700

Key = tuple[str, str]  # user, instance


class Leaving(enum.Enum):
    """Why no device of a user syncs at an instance any more."""

    ENDED = "ended"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class OnlineChange:
    """A user to be written: whether any of its devices syncs here. `last_sync` is in ms since 1970."""

    user: str
    online: bool
    last_sync: int


@dataclass(frozen=True, slots=True)
class RosterStatistics:
    """A moment of a roster; `places` is the number that its limit bounds."""

    users: int
    devices: int
    leaving: int
    unwritten: int
    places: int


@dataclass(slots=True)
class _Stay:
    devices: dict[str | None, int] = field(default_factory=dict)  # the connection that reported it last
    leaving: Leaving | None = None


@dataclass(slots=True)
class _User:
    written: bool | None = False  # the state in the database; None: a write is under way or its result is unknown
    stays: int = 0
    last_sync: int = 0


class Roster:
    """The users at one daemon. `limit` bounds devices, plus users that are leaving or whose end is not written yet.

    `grace` and `lost_grace` are seconds. Every method that ends something takes `now`, seconds of one monotonic clock.
    """

    def __init__(self, limit: int, grace: float, lost_grace: float) -> None:
        self.limit = limit
        self._grace = {Leaving.ENDED: grace, Leaving.LOST: lost_grace}
        self._users: dict[str, _User] = {}
        self._stays: dict[Key, _Stay] = {}
        self._instances: defaultdict[str, dict[str, None]] = defaultdict(dict)  # users by instance
        self._reported_on: defaultdict[int, dict[tuple[Key, str | None], None]] = defaultdict(dict)
        self._until: dict[Leaving, dict[Key, float]] = {kind: {} for kind in Leaving}  # ascending
        self._changed: dict[str, None] = {}  # users to be written
        self._devices = 0
        self._vacant = 0  # users without a stay, kept until that is written

    # --- reports of workers ---

    def start(self, connection: int, instance: str, user: str, device: str | None, last_sync: int = 0) -> None:
        """A device syncs at an instance, as reported on this connection.

        Raises:
            PresenceRefused: a name is too long, or the limit is reached. Nothing has changed.
        """
        for name in (instance, user, device or ""):
            if len(name.encode()) > MAX_NAME:
                raise PresenceRefused(f"a name of more than {MAX_NAME} bytes is not kept: {name[:40]!r}...")
        key = (user, instance)
        stay = self._stays.get(key)
        if not self._has_place(user, stay, device) and self._places() >= self.limit:
            raise PresenceRefused(
                f"{self.limit} devices are all that this server keeps (--presence-devices); user {user} is not shown"
            )
        if stay is None:
            stay = self._stays[key] = _Stay()
            self._instances[instance][user] = None
            self._arrive(user)
        elif stay.leaving is not None:
            del self._until[stay.leaving][key]
            stay.leaving = None
        self._report(key, stay, device, connection)
        self._users[user].last_sync = max(self._users[user].last_sync, last_sync)

    def end(self, instance: str, user: str, device: str | None, now: float, last_sync: int = 0) -> None:
        """A device has stopped syncing at an instance; any connection may report it. Unknown devices are ignored."""
        key = (user, instance)
        if user in self._users:
            self._users[user].last_sync = max(self._users[user].last_sync, last_sync)
        stay = self._stays.get(key)
        if stay is not None and device in stay.devices:
            self._forget_device(key, stay, device)
            self._leave_if_empty(key, stay, Leaving.ENDED, now)

    def clear(self, instance: str, *, only_leaving: bool = False) -> None:
        """End all stays at an instance at once, or (`only_leaving`) only those in a grace period."""
        for user in list(self._instances.get(instance, ())):
            stay = self._stays[user, instance]
            if stay.devices and only_leaving:
                continue
            for device in list(stay.devices):
                self._forget_device((user, instance), stay, device)
            self._end_stay((user, instance))

    def lose(self, connection: int, now: float) -> None:
        """A connection has ended. Devices that no other connection has reported since stay for the grace period."""
        for key, device in list(self._reported_on.get(connection, ())):
            stay = self._stays[key]
            self._forget_device(key, stay, device)
            self._leave_if_empty(key, stay, Leaving.LOST, now)

    # --- time ---

    def configure(self, grace: float, lost_grace: float, now: float) -> None:
        """Change the grace periods. Stays that are ending already are shortened, never prolonged."""
        wanted = {Leaving.ENDED: grace, Leaving.LOST: lost_grace}
        if wanted == self._grace:
            return
        self._grace = wanted
        for kind, until in self._until.items():
            latest = now + self._grace[kind]
            self._until[kind] = {key: min(at, latest) for key, at in until.items()}

    def next_deadline(self) -> float:
        """When `expire` must be called; infinity if no stay is ending."""
        return min((next(iter(until.values()), math.inf) for until in self._until.values()), default=math.inf)

    def expire(self, now: float) -> None:
        """End the stays whose grace period is over."""
        for until in self._until.values():
            over = [key for key, _ in itertools.takewhile(lambda item: item[1] <= now, until.items())]
            for key in over:
                self._end_stay(key)

    # --- rows ---

    @property
    def has_changes(self) -> bool:
        """Whether `take` would return anything."""
        return bool(self._changed)

    def take(self, limit: int) -> list[OnlineChange]:
        """Up to `limit` changes, the oldest first. They are returned again until `confirm` is called with them."""
        taken = []
        for name in itertools.islice(self._changed, limit):
            user = self._users[name]
            user.written = None
            taken.append(OnlineChange(name, user.stays > 0, user.last_sync))
        return taken

    def confirm(self, changes: Iterable[OnlineChange]) -> None:
        """These changes, which `take` returned, are written."""
        for change in changes:
            self._users[change.user].written = change.online
            self._settle(change.user)

    def write_anew(self) -> None:
        """The database has nothing of this daemon any more: all users must be written again."""
        for name, user in list(self._users.items()):
            user.written = False
            self._settle(name)

    def statistics(self) -> RosterStatistics:
        """Counts, as one frozen value."""
        leaving = sum(map(len, self._until.values()))
        return RosterStatistics(len(self._users), self._devices, leaving, len(self._changed), self._places())

    # --- how ---

    def _has_place(self, user: str, stay: _Stay | None, device: str | None) -> bool:
        """Whether there is room: the device is known, or it replaces an ending stay or a user without a stay."""
        if stay is None:
            return user in self._users and not self._users[user].stays
        return stay.leaving is not None or device in stay.devices

    def _places(self) -> int:
        return self._devices + self._vacant + sum(map(len, self._until.values()))

    def _report(self, key: Key, stay: _Stay, device: str | None, connection: int) -> None:
        before = stay.devices.get(device)
        if before is None:
            self._devices += 1
        elif before != connection:
            self._withdraw(before, key, device)
        stay.devices[device] = connection
        self._reported_on[connection][key, device] = None

    def _forget_device(self, key: Key, stay: _Stay, device: str | None) -> None:
        self._withdraw(stay.devices.pop(device), key, device)
        self._devices -= 1

    def _withdraw(self, connection: int, key: Key, device: str | None) -> None:
        reported = self._reported_on[connection]
        del reported[key, device]
        if not reported:
            del self._reported_on[connection]

    def _leave_if_empty(self, key: Key, stay: _Stay, kind: Leaving, now: float) -> None:
        if stay.devices:
            return
        if self._grace[kind] <= 0:
            self._end_stay(key)
            return
        stay.leaving = kind
        self._until[kind][key] = now + self._grace[kind]

    def _end_stay(self, key: Key) -> None:
        stay = self._stays.pop(key)
        if stay.leaving is not None:
            del self._until[stay.leaving][key]
        name, instance = key
        users = self._instances[instance]
        del users[name]
        if not users:
            del self._instances[instance]
        user = self._users[name]
        user.stays -= 1
        if not user.stays:
            self._vacant += 1
            self._settle(name)

    def _arrive(self, name: str) -> None:
        user = self._users.get(name)
        if user is None:
            user = self._users[name] = _User()
        elif not user.stays:
            self._vacant -= 1
        user.stays += 1
        self._settle(name)

    def _settle(self, name: str) -> None:
        """Note whether this user must be written. Forget a user without a stay whose end is written."""
        user = self._users[name]
        online = user.stays > 0
        if user.written != online:
            self._changed[name] = None
            return
        self._changed.pop(name, None)
        if not online:
            self._vacant -= 1
            del self._users[name]
