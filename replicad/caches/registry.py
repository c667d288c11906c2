"""The caches of one process: declared by decorators, invalidated by name, used only while they are live.

One lock protects everything, so any thread may call cached functions. No function of the user is called under the lock.
`following` decides when the caches are live and passes on the invalidations. This file has no connections.
"""

from __future__ import annotations

import functools
import inspect
import math
import os
import reprlib
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, ParamSpec, TypeVar

from replicad.caches.cache import (
    Cache,
    CacheStatistics,
    Emptying,
    LruStorage,
    ManagedCache,
    Storage,
    cached_function,
)
from replicad.caches.keys import Entry, Invalidation, freeze, listed, parse_rows
from replicad.errors import UsageError

LONGEST_NAME = 200  # characters, as of SQL's invalidate_cache()


def name_of(found: object, what: str = "a cache") -> str:
    """The name of a cache or group. Raises TypeError: it is none, but perhaps the function itself."""
    if not isinstance(found, str) or not 0 < len(found) <= LONGEST_NAME:
        hint = f': its name "{found.__name__}" is meant' if hasattr(found, "__name__") else ""
        raise TypeError(f"{what} is named by a text of 1 to {LONGEST_NAME} characters, not {reprlib.repr(found)}{hint}")
    return found


def seconds(found: object, name: str, *, lowest: float) -> float:
    """A number of seconds, infinite too. Raises TypeError: it is none, or below `lowest`."""
    if not isinstance(found, int | float) or isinstance(found, bool) or math.isnan(found) or found < lowest:
        raise TypeError(f"{name} is a number of seconds, at least {lowest:g}, not {reprlib.repr(found)}")
    return float(found)


def storage_of(found: object) -> Storage:
    """A storage. Raises TypeError: it lacks a method of a mapping."""
    methods = ("get", "__setitem__", "pop", "clear", "__len__")
    if isinstance(found, type) or not all(callable(getattr(found, name, None)) for name in methods):
        raise TypeError(f"storage= is an object like a dict or a cache of cachetools, not {reprlib.repr(found)}")
    return found  # type: ignore[return-value]


P = ParamSpec("P")
R = TypeVar("R")


class Adopted:
    """A function with a cache of its own that can only be cleared as a whole, such as `functools.lru_cache`.

    Such a cache stores what its function returns, even if it was cleared in between. So after an invalidation it is not
    used until every call that was under way has returned. Then it is cleared once more and used again. A call counts as
    a hit if its own cache was used, whether or not that had the value.
    """

    def __init__(self, caches: Caches, function: Callable[..., Any], name: str | None = None) -> None:
        """`name` None: that of the function. Raises UsageError if that has no `cache_clear`."""
        inner = getattr(function, "__wrapped__", None)
        clear = getattr(function, "cache_clear", None)
        if not callable(inner) or not callable(clear):
            raise UsageError(
                "only a function with cache_clear() and __wrapped__ can be adopted, as functools.lru_cache makes "
                "them; for others use cached(storage=...)"
            )
        if inspect.iscoroutinefunction(inner):
            raise UsageError("lru_cache keeps coroutines, which can be awaited once: decorate with cached() instead")
        self.name: str = name or inner.__name__
        self._caches = caches
        self._inner = inner
        self._emptying = Emptying(self.name, clear, caches.now)
        self._info = getattr(function, "cache_info", None)
        self._under_way: set[object] = set()  # calls that began after the last invalidation
        self._old: set[object] = set()  # calls that began before it; while there are any, the cache is not used
        self._hits = self._bypassed = self._emptied = 0

    def caller(self, function: Callable[P, R]) -> Callable[P, R]:
        """The function to call in place of the original one."""

        @functools.wraps(self._inner)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            with self._caches.lock:
                if self._old or not (self._caches.live and self._caches.answers() and self._emptying.usable()):
                    self._bypassed += 1
                    ticket = None
                else:
                    self._hits += 1
                    ticket = object()
                    self._under_way.add(ticket)
            if ticket is None:
                value: R = self._inner(*args, **kwargs)
                return value
            try:
                return function(*args, **kwargs)
            finally:
                self._leave(ticket)

        return call

    def _leave(self, ticket: object) -> None:
        with self._caches.lock:
            self._under_way.discard(ticket)
            if ticket in self._old:
                self._old.remove(ticket)
                if not self._old:
                    self._emptying.run()

    # --- for the registry, under its lock ---

    def forget(self, keys: Sequence[Any]) -> None:  # noqa: ARG002 - it cannot forget one entry
        """One entry is invalid."""
        self.empty()

    def forget_all(self, entries: Sequence[Sequence[Any]]) -> int:  # noqa: ARG002
        """These entries are invalid."""
        self.empty()
        return 0

    def empty(self) -> None:
        """All entries are invalid."""
        self.void()
        self._emptying.run()
        self._emptied += 1

    def void(self) -> None:
        """Values whose load is under way must not be stored."""
        self._old |= self._under_way
        self._under_way.clear()

    def forked(self) -> None:
        """This is a forked process; the threads whose calls were under way are not in it."""
        self._under_way.clear()
        self._old.clear()
        self._emptying.run()

    def statistics(self) -> CacheStatistics:
        """Counts, as one frozen value."""
        entries = self._info().currsize if callable(self._info) else 0
        return CacheStatistics(entries, self._hits, 0, 0, self._bypassed, 0, self._emptied, self._emptying.problem)


Rekey = Callable[[Sequence[Any]], Entry | None]

MAX_STALENESS = 60.0  # seconds; well above the 5 s that may lie between two PINGs of a server
MAX_ENTRIES = 10_000  # default for one cache

_UNPROVEN = (
    "for {:.0f} s nothing has proven that all invalidations have come: a transaction may be open for long, or the "
    "daemon without Postgres"
)


@dataclass(frozen=True, slots=True)
class CachesStatistics:
    """All caches of a process. `problem`: why they are not live.

    `malformed`: rows, or results of functions of groups, that could not be parsed; they empty more than necessary.
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
    """Declares caches and invalidates them. Use its subclass CacheInvalidator (`blocking_invalidator`,
    `async_invalidator`).

    `max_staleness`: seconds. An entry is used only if all invalidations that were committed up to that long ago are
    known to have been applied. Proofs of that come all the time (a few in `max_staleness`, at most one for each PING of
    the server). Without faults an invalidation takes milliseconds. `tolerate`: for so many seconds after a lost
    connection the caches still answer; nothing is added to them. 0: they are not used at once. `now` is a monotonic
    clock in seconds.
    """

    _new_event: Any = staticmethod(threading.Event)

    def __init__(
        self,
        *,
        max_staleness: float = MAX_STALENESS,
        tolerate: float = 0.0,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.lock = threading.RLock()  # reentrant: the code of a storage may call a cached function
        self.live = False
        self.problem: str | None = "no client follows the stream"
        self.max_staleness = seconds(max_staleness, "max_staleness", lowest=0.001)
        self.fresh_at = 0.0  # everything committed by then has been applied
        self.now = now
        self._tolerate = seconds(tolerate, "tolerate", lowest=0)
        self._followed = False
        self._lost_at: float | None = None
        self._members: dict[str, ManagedCache] = {}
        self._groups: dict[str, list[_Share]] = {"cs_cache_fake": []}
        self._rows = self._malformed = 0
        self._is_live = self._new_event()  # set while the caches are live; replaced when they are no longer
        _every.add(self)

    # --- declaring ---

    def cached(
        self,
        *,
        name: str | None = None,
        max_entries: int = MAX_ENTRIES,
        key: Callable[..., Entry] | None = None,
        storage: Storage | None = None,
    ) -> Callable[[Callable[P, R]], Callable[P, R]]:
        """Decorate a function, plain or async: its values are kept until they are invalidated under its name.

        The keys of an entry are the arguments in the order of the signature, with defaults filled in. They must be JSON
        values. If they are not (a method's `self`), give `key`: it is called with the arguments and returns the list of
        the keys.
        `storage` keeps the values, in place of a store of the `max_entries` last used ones: for example a cache of
        cachetools. Nothing else may use that storage.

        The function must read the data that are committed when it is called, in a transaction that it begins. If it has
        no value it must raise, because everything that it returns is stored.

        Raises:
            UsageError: the name is in use. TypeError: the signature does not determine the keys, or the function makes
            generators. A call raises TypeError if a key is no JSON value, or if the value can be used only once.
        """

        def decorate(function: Callable[P, R]) -> Callable[P, R]:
            cache = self.cache(name or function.__name__, max_entries=max_entries, storage=storage)
            return cached_function(cache, function, key)

        return decorate

    def cache(self, name: str, *, max_entries: int = MAX_ENTRIES, storage: Storage | None = None) -> Cache:
        """A cache for use by hand. Raises UsageError if the name is in use."""
        made = Cache(self, name_of(name), LruStorage(max_entries) if storage is None else storage_of(storage))
        self._add(name, made)
        return made

    def adopt(self, function: Callable[P, R], *, name: str | None = None) -> Callable[P, R]:
        """Manage a function that has a cache and `cache_clear`, such as one decorated by `functools.lru_cache`.

        Call the returned function in place of the original one. Such a cache can only be cleared as a whole, so every
        invalidation of the name empties it.

        Raises:
            UsageError: the name is in use, or the function has no `cache_clear`.
        """
        made = Adopted(self, function, name and name_of(name))
        self._add(name_of(made.name), made)
        return made.caller(function)

    def register_group(self, name: str, members: Iterable[str | tuple[str, Rekey]]) -> None:
        """Let an invalidation of `name` also invalidate the entries with the same keys in all these caches.

        A member with other keys comes with a function from the keys to its own keys, or to None: all entries. Calling
        it again adds members. Members are names of caches, also of caches that are declared later, but not of groups.

        Raises:
            TypeError: a member is neither of both, or `members` is one name alone.
            UsageError: a member is a group, or this group is a member of one: it would be stale in silence.
        """
        name_of(name, "a group")
        if isinstance(members, str):
            raise TypeError(f"the members of a group are a list, also if there is one: [{members!r}], not {members!r}")
        shares = [_share(member) for member in members]
        with self.lock:
            nested = sorted({one.member for one in shares} & {name, *self._groups})
            around = sorted(group for group, known in self._groups.items() if any(one.member == name for one in known))
            if nested or around:
                inner, outer = (nested[0], name) if nested else (name, around[0])
                raise UsageError(f"{inner} is a group and cannot be a member of group {outer}: name its caches there")
            self._groups.setdefault(name, []).extend(shares)

    def _add(self, name: str, member: ManagedCache) -> None:
        with self.lock:
            if name in self._members:
                raise UsageError(f"there is a cache {name} already: give this one another name=")
            self._members[name] = member

    # --- invalidating ---

    def invalidate(self, func: str, keys: Entry | None = None) -> None:
        """Invalidate an entry, or all, of a cache or group in this process. Call it after you have committed a change.

        The stream does the same at all workers, some milliseconds later. Raises TypeError as `keys.freeze`, and
        if `func` is no name.
        """
        name_of(func)
        found = None if keys is None else list(listed(keys))
        freeze(found or ())
        self._carry_out(self._effects(Invalidation(func, found)))

    def empty(self) -> None:
        """Empty all caches of this process."""
        with self.lock:
            for member in self._members.values():
                member.empty()

    def apply(self, rows: Sequence[str]) -> None:
        """Apply rows of the stream, JSON text as received. A row that cannot be parsed empties all caches."""
        of_groups: list[Invalidation] = []
        entries: dict[str, list[list[Any]]] = {}
        parsed = parse_rows(rows)
        with self.lock:
            self._rows += len(rows)
            for invalidation in parsed:
                if invalidation is None:
                    self._malformed += 1
                    self.empty()
                elif invalidation.func in self._groups:
                    of_groups.append(invalidation)
                elif invalidation.keys is not None:
                    entries.setdefault(invalidation.func, []).append(invalidation.keys)
                elif (member := self._members.get(invalidation.func)) is not None:
                    member.empty()
            for func, several in entries.items():
                if (member := self._members.get(func)) is not None and (bad := member.forget_all(several)):
                    self._malformed += bad  # keys that none of our values can have
                    self.empty()
        for invalidation in of_groups:
            self._carry_out(self._effects(invalidation))

    def _effects(self, invalidation: Invalidation) -> list[tuple[str, Sequence[Any] | None]]:
        """The keys that an invalidation removes from each cache. Calls functions of the user, so not under the lock."""
        found: list[tuple[str, Sequence[Any] | None]] = [(invalidation.func, invalidation.keys)]
        for member, rekey in tuple(self._groups.get(invalidation.func, ())):
            keys: Sequence[Any] | None = invalidation.keys
            if keys is not None and rekey is not None:
                try:
                    own = rekey(tuple(keys))
                    keys = None if own is None else listed(own)
                    freeze(keys or ())
                except Exception:  # noqa: BLE001 - of the user: then all entries are removed
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

    # --- state ---

    @contextmanager
    def follower(self) -> Iterator[None]:
        """Register the one driver that follows the stream, for the length of the block. Raises UsageError if there is
        one.
        """
        with self.lock:
            if self._followed:
                raise UsageError("these caches follow a stream already; for another one make other caches")
            self._followed = True
        try:
            yield
        finally:
            self._followed = False

    def answers(self) -> bool:
        """Whether stored values may be returned now. Call it under the lock."""
        if self.live:
            return self.now() - self.fresh_at <= self.max_staleness
        return self._lost_at is not None and self.now() - self._lost_at < self._tolerate

    def stand(self, *, live: bool, problem: str | None = None) -> None:
        """The caches are live from now on, or (with `problem`) no longer."""
        with self.lock:
            if self.live and not live:
                self._lost_at = self.now()
                for member in self._members.values():
                    member.void()
            self.problem = None if live else problem
            self.live = live
            if live:
                self._is_live.set()
            elif self._is_live.is_set():
                self._is_live = self._new_event()

    def statistics(self) -> CachesStatistics:
        """Counts, as one frozen value."""
        with self.lock:
            caches = {name: member.statistics() for name, member in self._members.items()}
            live, problem = self.live, self.problem
            if live and not self.answers():
                live, problem = False, _UNPROVEN.format(self.now() - self.fresh_at)
            return CachesStatistics(live, problem, self._rows, self._malformed, caches)

    def forked(self) -> None:
        """This is a forked process: no driver follows the stream in it."""
        self.lock = threading.RLock()  # a thread of the parent may hold the old one
        if self.live or self._followed:
            self.problem = "this process was forked from one that follows the stream; follow it here as well"
        self.live = self._followed = False
        self._is_live = self._new_event()
        self._lost_at = None
        for member in self._members.values():
            member.forked()


def _share(member: object) -> _Share:
    if isinstance(member, str):
        return _Share(member, None)
    if isinstance(member, tuple | list) and len(member) == 2 and isinstance(member[0], str) and callable(member[1]):
        return _Share(member[0], member[1])
    raise TypeError(
        'a member of a group is the name of a cache, or a pair of it and a function of the keys: ["get_user", '
        f'("get_room", lambda keys: [keys[0]])], not {member!r}'
    )


_every: weakref.WeakSet[Caches] = weakref.WeakSet()


def _after_fork() -> None:
    for caches in tuple(_every):
        caches.forked()


os.register_at_fork(after_in_child=_after_fork)
