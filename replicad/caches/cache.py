"""One cache: values in a storage, and the tickets that say which of them may be put there.

It is used under the lock of the registry that it belongs to, which says whether caches may be trusted at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from replicad.caches.guard import Guard, Ticket
from replicad.caches.keys import Key, freeze
from replicad.caches.storage import MISSING, Storage


@dataclass(frozen=True, slots=True)
class CacheStatistics:
    """One cache, counted since the start. `emptied` counts the times that all entries went.

    `refused`: values that were read before an invalidation and not kept. `bypassed`: calls while the caches were not
    live. `invalidated`: entries that were named, whether they were there or not.
    """

    entries: int
    hits: int
    misses: int
    refused: int
    bypassed: int
    invalidated: int
    emptied: int


class Member(Protocol):
    """What bears a name and can be invalidated; all of it under the lock."""

    def forget(self, keys: Sequence[Any]) -> None: ...

    def empty(self) -> None: ...

    def void(self) -> None: ...

    def forked(self) -> None: ...

    def statistics(self) -> CacheStatistics: ...


class Owner(Protocol):
    """What a cache asks of its registry."""

    live: bool

    @property
    def lock(self) -> AbstractContextManager[Any]: ...

    def answers(self) -> bool: ...


class Cache:
    """One cache; made by `Caches.cache` and, behind the scenes, by the decorator. Any thread may use it.

    By hand: `get`, and where that is MISSING, `begin` a load *before* reading, then `store` or `abandon` it.
    """

    def __init__(self, caches: Owner, name: str, storage: Storage) -> None:
        self.name = name
        self._caches = caches
        self._storage = storage
        self._guard = Guard()
        self._hits = self._misses = self._refused = self._bypassed = self._invalidated = self._emptied = 0

    def get(self, key: Key) -> Any:
        """The value of a frozen key (`keys.freeze`), or MISSING."""
        caches = self._caches
        with caches.lock:
            if not caches.answers():
                self._bypassed += 1
                return MISSING
            value = self._storage.get(key, MISSING)
            if value is MISSING:
                self._misses += 1
            else:
                self._hits += 1
            return value

    def begin(self, key: Key) -> Ticket:
        """To be called before the value is read, in a transaction that begins later."""
        with self._caches.lock:
            return self._guard.issue(key) if self._caches.live else Ticket(key, valid=False)

    def store(self, ticket: Ticket, value: Any) -> bool:
        """Keep the value unless it may be old; says whether it was kept. The ticket is used up."""
        with self._caches.lock:
            if not self._guard.give_back(ticket):
                self._refused += 1
                return False
            try:
                self._storage[ticket.key] = value
            except ValueError:  # too large for a storage of cachetools
                return False
            return True

    def abandon(self, ticket: Ticket) -> None:
        """The load came to nothing."""
        with self._caches.lock:
            self._guard.give_back(ticket)

    # --- for the registry, under its lock ---

    def forget(self, keys: Sequence[Any]) -> None:
        """One entry is no longer good."""
        key = freeze(keys)
        self._guard.void(key)
        self._storage.pop(key, None)
        self._invalidated += 1

    def empty(self) -> None:
        """No entry is good any more."""
        self._guard.void_all()
        self._storage.clear()
        self._emptied += 1

    def void(self) -> None:
        """What is being loaded must not be kept."""
        self._guard.void_all()

    def forked(self) -> None:
        """This is another process now."""
        self.empty()

    def statistics(self) -> CacheStatistics:
        """Counts, as one frozen value."""
        return CacheStatistics(
            len(self._storage), self._hits, self._misses, self._refused, self._bypassed, self._invalidated,
            self._emptied,
        )  # fmt: skip
