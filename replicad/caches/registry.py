"""The caches of one process: declared by decorators, invalidated by name, trusted only while they are live.

Everything happens under one lock, so that any thread may call cached functions, and no user's function is called under
it. It knows nothing of connections: `following` says when caches are live and what was invalidated.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, ParamSpec, TypeVar

from replicad.caches.adopted import Adopted
from replicad.caches.cache import Cache, CacheStatistics, Member
from replicad.caches.functions import cached_function
from replicad.caches.keys import Invalidation, freeze, parse_row
from replicad.caches.storage import LruStorage, Storage
from replicad.errors import UsageError

P = ParamSpec("P")
R = TypeVar("R")
Rekey = Callable[[Sequence[Any]], Iterable[Any] | None]

MAX_STALENESS = 60.0  # seconds; well above the 5 s that may lie between two PINGs of a server
MAX_ENTRIES = 10_000  # of a cache unless it is told otherwise

_UNPROVEN = (
    "for {:.0f} s nothing has proven that all invalidations have come: a transaction may be open for long, or the "
    "daemon without Postgres"
)


@dataclass(frozen=True, slots=True)
class CachesStatistics:
    """All caches of a process. `problem`: why they are not live.

    `malformed`: rows, or answers of groups' functions, that nobody could understand; they empty more than they should.
    """

    live: bool
    problem: str | None
    rows: int
    malformed: int
    caches: Mapping[str, CacheStatistics]


class _Share(NamedTuple):
    member: str
    rekey: Rekey | None


class Caches:
    """Declares caches and invalidates them. Use a CacheInvalidator (of `blocking_invalidator` or `trio_invalidator`),
    which is one.

    `max_staleness`: seconds after which an entry is not given out any more unless it was proven that every invalidation
    committed before that has been carried out. Proofs come all the time (a few in that time, no more than one for each
    PING of the server); without faults invalidations take milliseconds. `tolerate`: for so many seconds after the
    connection was lost the caches still answer with what they hold; nothing is added. 0: they are bypassed at once.
    `now` is a monotonic clock in seconds.
    """

    def __init__(
        self,
        *,
        max_staleness: float = MAX_STALENESS,
        tolerate: float = 0.0,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.lock = threading.RLock()  # a storage's own code may come back to us
        self.live = False
        self.problem: str | None = "nobody follows the stream"
        self.max_staleness = max_staleness
        self.fresh_at = 0.0  # whatever was committed by then has been applied
        self.now = now
        self._tolerate = tolerate
        self._followed = False
        self._lost_at: float | None = None
        self._members: dict[str, Member] = {}
        self._groups: dict[str, list[_Share]] = {"cs_cache_fake": []}
        self._rows = self._malformed = 0
        _every.add(self)

    # --- declaring ---

    def cached(
        self,
        *,
        name: str | None = None,
        max_entries: int = MAX_ENTRIES,
        key: Callable[..., Iterable[Any]] | None = None,
        storage: Storage | None = None,
    ) -> Callable[[Callable[P, R]], Callable[P, R]]:
        """Decorate a function, plain or async: its values are kept until they are invalidated under its name.

        The keys of an entry are the arguments in the order of the signature, defaults filled in; they are JSON values.
        Where they are not (a method's `self`), `key` is called with the arguments and returns the keys. `storage` keeps
        the values instead of the `max_entries` that were asked for last: any cache of cachetools, say, and nobody
        else's.

        The function must read what is committed when it is called, in a transaction that it begins. One that has no
        value raises, since whatever it returns is kept.

        Raises:
            UsageError: the name is taken. TypeError: the signature leaves the keys open.
        """

        def decorate(function: Callable[P, R]) -> Callable[P, R]:
            cache = self.cache(name or function.__name__, max_entries=max_entries, storage=storage)
            return cached_function(cache, function, key)

        return decorate

    def cache(self, name: str, *, max_entries: int = MAX_ENTRIES, storage: Storage | None = None) -> Cache:
        """A cache for use by hand. Raises UsageError where the name is taken."""
        made = Cache(self, name, LruStorage(max_entries) if storage is None else storage)
        self._add(name, made)
        return made

    def adopt(self, function: Callable[P, R], *, name: str | None = None) -> Callable[P, R]:
        """Take over a function that caches by itself and has `cache_clear`, such as one of `functools.lru_cache`.

        Call what is returned, in place of the function. Such a cache forgets everything or nothing, so any
        invalidation under the name empties it.

        Raises:
            UsageError: the name is taken, or it is no such function.
        """
        made = Adopted(self, function)
        self._add(name or made.name, made)
        return made.caller(function)

    def register_group(self, name: str, members: Iterable[str | tuple[str, Rekey]]) -> None:
        """Have what is invalidated under `name` invalidate the entries of the same keys in all these caches too.

        A member that is keyed otherwise comes with a function from the keys to its own, or to None: all of it. A group
        may be added to; its members are names of caches (also of those that are declared later), not of groups.
        """
        shares = [_Share(m, None) if isinstance(m, str) else _Share(*m) for m in members]
        with self.lock:
            self._groups.setdefault(name, []).extend(shares)

    def _add(self, name: str, member: Member) -> None:
        with self.lock:
            if name in self._members:
                raise UsageError(f"there is a cache {name} already: give this one another name=")
            self._members[name] = member

    # --- invalidating ---

    def invalidate(self, func: str, keys: Sequence[Any] | None = None) -> None:
        """Forget an entry, or all, of a cache or group in this process, now: for who has just committed a change.

        The stream does it everywhere, and here too, some milliseconds later. Raises TypeError as `keys.freeze`.
        """
        if keys is not None:
            freeze(keys)
        self._carry_out(self._effects(Invalidation(func, None if keys is None else list(keys))))

    def empty(self) -> None:
        """Forget everything in this process."""
        with self.lock:
            for member in self._members.values():
                member.empty()

    def apply(self, rows: Sequence[str]) -> None:
        """Carry out rows of the stream, JSON as it came. What cannot be understood empties everything."""
        of_groups: list[Invalidation] = []
        with self.lock:
            self._rows += len(rows)
            for row in rows:
                try:
                    told = parse_row(row)
                except ValueError:
                    self._malformed += 1
                    self.empty()
                    continue
                if told.func in self._groups:
                    of_groups.append(told)
                elif (member := self._members.get(told.func)) is not None:
                    if told.keys is None:
                        member.empty()
                    else:
                        member.forget(told.keys)
        for told in of_groups:
            self._carry_out(self._effects(told))

    def _effects(self, told: Invalidation) -> list[tuple[str, Sequence[Any] | None]]:
        """What it means for each cache; outside of the lock, since functions of the user's have their say."""
        found: list[tuple[str, Sequence[Any] | None]] = [(told.func, told.keys)]
        for member, rekey in tuple(self._groups.get(told.func, ())):
            keys: Sequence[Any] | None = told.keys
            if keys is not None and rekey is not None:
                try:
                    own = rekey(tuple(keys))
                    keys = None if own is None else tuple(own)
                    freeze(keys or ())
                except Exception:  # noqa: BLE001 - the user's function; rather too much is forgotten than too little
                    self._malformed += 1
                    keys = None
            found.append((member, keys))
        return found

    def _carry_out(self, effects: Iterable[tuple[str, Sequence[Any] | None]]) -> None:
        with self.lock:
            for name, keys in effects:
                member = self._members.get(name)
                if member is None:
                    continue
                if keys is None:
                    member.empty()
                else:
                    member.forget(keys)

    # --- standing ---

    @contextmanager
    def follower(self) -> Iterator[None]:
        """Whoever says when the caches are live, for the length of the block. Raises UsageError where somebody does."""
        with self.lock:
            if self._followed:
                raise UsageError("these caches follow a stream already; for another one make other caches")
            self._followed = True
        try:
            yield
        finally:
            self._followed = False

    def answers(self) -> bool:
        """Whether values that are kept may be given out now; under the lock."""
        if self.live:
            return self.now() - self.fresh_at <= self.max_staleness
        return self._lost_at is not None and self.now() - self._lost_at < self._tolerate

    def stand(self, *, live: bool, problem: str | None = None) -> None:
        """Caches may be trusted from now on, or (with the reason) no longer."""
        with self.lock:
            if self.live and not live:
                self._lost_at = self.now()
                for member in self._members.values():
                    member.void()
            self.problem = None if live else problem
            self.live = live

    def statistics(self) -> CachesStatistics:
        """Counts, as one frozen value."""
        with self.lock:
            caches = {name: member.statistics() for name, member in self._members.items()}
            live, problem = self.live, self.problem
            if live and not self.answers():
                live, problem = False, _UNPROVEN.format(self.now() - self.fresh_at)
            return CachesStatistics(live, problem, self._rows, self._malformed, caches)

    def forked(self) -> None:
        """In a child process nobody follows the stream, whatever was so in its parent."""
        self.lock = threading.RLock()  # the old one may be held by a thread that is not here
        if self.live or self._followed:
            self.problem = "this process was forked from one that follows the stream; follow it here as well"
        self.live = self._followed = False
        self._lost_at = None
        for member in self._members.values():
            member.forked()


_every: weakref.WeakSet[Caches] = weakref.WeakSet()


def _after_fork() -> None:
    for caches in tuple(_every):
        caches.forked()


os.register_at_fork(after_in_child=_after_fork)
