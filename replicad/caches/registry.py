"""The caches of one process: declared by decorators, invalidated by name, used only while they are live.

One lock protects everything, so any thread may call cached functions. No function of the user is called under the lock.
`following` says when the caches are live and what was invalidated; there are no connections here.
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
from replicad.caches.keys import Entry, Invalidation, freeze, listed, parse_rows
from replicad.caches.storage import LruStorage, Storage
from replicad.caches.uses import name_of, seconds, storage_of
from replicad.errors import UsageError

P = ParamSpec("P")
R = TypeVar("R")
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
    `trio_invalidator`).

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
        self.problem: str | None = "nobody follows the stream"
        self.max_staleness = seconds(max_staleness, "max_staleness", lowest=0.001)
        self.fresh_at = 0.0  # everything committed by then has been applied
        self.now = now
        self._tolerate = seconds(tolerate, "tolerate", lowest=0)
        self._followed = False
        self._lost_at: float | None = None
        self._members: dict[str, Member] = {}
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

        The function must read what is committed when it is called, in a transaction that it begins. If it has no value
        it must raise, because everything that it returns is stored.

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

    def _add(self, name: str, member: Member) -> None:
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
            for told in parsed:
                if told is None:
                    self._malformed += 1
                    self.empty()
                elif told.func in self._groups:
                    of_groups.append(told)
                elif told.keys is not None:
                    entries.setdefault(told.func, []).append(told.keys)
                elif (member := self._members.get(told.func)) is not None:
                    member.empty()
            for func, several in entries.items():
                if (member := self._members.get(func)) is not None and (bad := member.forget_all(several)):
                    self._malformed += bad  # keys that none of our values can have
                    self.empty()
        for told in of_groups:
            self._carry_out(self._effects(told))

    def _effects(self, told: Invalidation) -> list[tuple[str, Sequence[Any] | None]]:
        """The keys that an invalidation removes from each cache. Calls functions of the user, so not under the lock."""
        found: list[tuple[str, Sequence[Any] | None]] = [(told.func, told.keys)]
        for member, rekey in tuple(self._groups.get(told.func, ())):
            keys: Sequence[Any] | None = told.keys
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
