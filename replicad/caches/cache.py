"""One cache: a storage with values, and a guard that says which loaded values may be stored.

It is used under the lock of its registry. The registry says whether caches may be used at all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from replicad.caches.emptying import RETRY, Emptying
from replicad.caches.guard import Guard, Ticket
from replicad.caches.keys import Key, freeze
from replicad.caches.storage import MISSING, Storage
from replicad.eventlog import get_logger

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class CacheStatistics:
    """One cache, counted since the start. `emptied`: how often all entries were removed.

    `refused`: values that were read before an invalidation and not stored. `bypassed`: calls while the caches were not
    live. `invalidated`: entries that an invalidation named, whether or not the cache had them. `problem`: why this one
    is not used, although the caches are live: its storage could not be emptied.
    """

    entries: int
    hits: int
    misses: int
    refused: int
    bypassed: int
    invalidated: int
    emptied: int
    problem: str | None = None


class Member(Protocol):
    """Something with a name that can be invalidated. All its methods are called under the lock."""

    def forget(self, keys: Sequence[Any]) -> None: ...

    def forget_all(self, entries: Sequence[Sequence[Any]]) -> int: ...

    def empty(self) -> None: ...

    def void(self) -> None: ...

    def forked(self) -> None: ...

    def statistics(self) -> CacheStatistics: ...


class Owner(Protocol):
    """What a cache needs of its registry."""

    live: bool
    now: Callable[[], float]

    @property
    def lock(self) -> AbstractContextManager[Any]: ...

    def answers(self) -> bool: ...


class Cache:
    """One cache, made by `Caches.cache` and by the decorator. Any thread may use it.

    By hand: call `get`. If it returns MISSING, `begin` a load *before* reading, then `store` the value or `abandon` it.

    Errors of the storage are not raised. One that cannot forget an entry is emptied; while it cannot be emptied, the
    cache is not used (`emptying`).
    """

    def __init__(self, caches: Owner, name: str, storage: Storage) -> None:
        self.name = name
        self._caches = caches
        self._storage = storage
        self._guard = Guard()
        self._emptying = Emptying(name, storage.clear, caches.now)
        self._logged_at = -RETRY
        self._hits = self._misses = self._refused = self._bypassed = self._invalidated = self._emptied = 0

    def get(self, key: Key) -> Any:
        """The value of a frozen key (`keys.freeze`), or MISSING."""
        caches = self._caches
        with caches.lock:
            if not (caches.answers() and self._emptying.usable()):
                self._bypassed += 1
                return MISSING
            try:
                value = self._storage.get(key, MISSING)
            except Exception as error:  # noqa: BLE001 - of the user
                self._failed("get", error)
                value = MISSING
            if value is MISSING:
                self._misses += 1
            else:
                self._hits += 1
            return value

    def begin(self, key: Key) -> Ticket:
        """Begin a load. Call it before the value is read, in a transaction that begins later."""
        with self._caches.lock:
            used = self._caches.live and self._emptying.usable()
            return self._guard.issue(key) if used else Ticket(key, valid=False)

    def store(self, ticket: Ticket, value: Any) -> bool:
        """Store the value unless it may be stale; returns whether it was stored. The ticket is used up."""
        with self._caches.lock:
            if not self._guard.give_back(ticket):
                self._refused += 1
                return False
            try:
                self._storage[ticket.key] = value
            except ValueError:  # too large for a storage of cachetools
                return False
            except Exception as error:  # noqa: BLE001 - of the user
                self._failed("__setitem__", error)
                return False
            return True

    def abandon(self, ticket: Ticket) -> None:
        """End a load without a value."""
        with self._caches.lock:
            self._guard.give_back(ticket)

    # --- for the registry, under its lock ---

    def forget(self, keys: Sequence[Any]) -> None:
        """One entry is invalid."""
        key = freeze(keys)
        self._guard.void(key)
        try:
            self._storage.pop(key, None)
        except BaseException as error:  # noqa: BLE001 - of the user
            self._pop_failed(error)
        self._invalidated += 1

    def forget_all(self, entries: Sequence[Sequence[Any]]) -> int:
        """These entries are invalid. Returns how many of them have keys that are no JSON values; they are left out."""
        guard, pop, bad = self._guard, self._storage.pop, 0
        try:
            for keys in entries:
                try:
                    key = freeze(keys)
                except TypeError:
                    bad += 1
                    continue
                if guard.out:
                    guard.void(key)
                pop(key, None)
        except BaseException as error:  # noqa: BLE001 - of the user
            self._pop_failed(error)
        self._invalidated += len(entries) - bad
        return bad

    def empty(self) -> None:
        """All entries are invalid."""
        self._guard.void_all()
        self._emptying.run()
        self._emptied += 1

    def void(self) -> None:
        """Values whose load is under way must not be stored."""
        self._guard.void_all()

    def forked(self) -> None:
        """This is a forked process."""
        self.empty()

    def statistics(self) -> CacheStatistics:
        """Counts, as one frozen value."""
        try:
            entries = len(self._storage)
        except Exception:  # noqa: BLE001 - of the user
            entries = 0
        return CacheStatistics(
            entries, self._hits, self._misses, self._refused, self._bypassed, self._invalidated, self._emptied,
            self._emptying.problem,
        )  # fmt: skip

    # --- errors of the storage ---

    def _pop_failed(self, error: BaseException) -> None:
        """Raises the error again if it is no `Exception`: somebody interrupts the process."""
        self.empty()  # the entry may still be there
        if not isinstance(error, Exception):
            raise error
        self._failed("pop", error)

    def _failed(self, method: str, error: Exception) -> None:
        now = self._caches.now()
        if now - self._logged_at < RETRY:  # every call may fail
            return
        self._logged_at = now
        log.warning("cache_storage_failed", cache=self.name, method=method, error=repr(error))
