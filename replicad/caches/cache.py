"""One cache: the storage of its values, the tickets of its loads, and the functions that are cached.

A load takes a ticket *before* it reads. An invalidation voids all tickets of its entry. A value whose ticket is void is
not stored. This is enough: if the value was read after the change was committed, it is up to date; if it was read
before, its ticket existed when the invalidation arrived.

A cache is used under the lock of its registry. The registry decides whether caches may be used at all.
"""

from __future__ import annotations

import functools
import inspect
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar, cast

from replicad.caches.keys import Entry, Key, freeze
from replicad.errors import UsageError
from replicad.eventlog import get_logger

if TYPE_CHECKING:
    from replicad.caches.registry import Caches


class Ticket:
    """A ticket for one load of one entry. It must be given back exactly once, with a value or without."""

    __slots__ = ("key", "valid")

    def __init__(self, key: Key, *, valid: bool) -> None:
        self.key = key
        self.valid = valid


class Guard:
    """The valid tickets of one cache, in `out` by key. There are at most as many as loads under way."""

    __slots__ = ("out",)

    def __init__(self) -> None:
        self.out: dict[Key, list[Ticket]] = {}

    def issue(self, key: Key) -> Ticket:
        """A ticket for a load that begins now."""
        ticket = Ticket(key, valid=True)
        self.out.setdefault(key, []).append(ticket)
        return ticket

    def give_back(self, ticket: Ticket) -> bool:
        """Whether the value that was read under the ticket may be stored. The ticket is void afterwards."""
        good, ticket.valid = ticket.valid, False
        if good:
            rest = self.out[ticket.key]
            rest.remove(ticket)
            if not rest:
                del self.out[ticket.key]
        return good

    def void(self, key: Key) -> None:
        """The entry was invalidated: void the tickets of its loads."""
        for ticket in self.out.pop(key, ()):
            ticket.valid = False

    def void_all(self) -> None:
        """The whole cache was invalidated: void all tickets."""
        for tickets in self.out.values():
            for ticket in tickets:
                ticket.valid = False
        self.out.clear()

    def __len__(self) -> int:
        return sum(map(len, self.out.values()))


MISSING: Any = object()  # there is no value


class Storage(Protocol):
    """A mutable mapping that may drop entries at any time. It may refuse a value with ValueError."""

    def get(self, key: Any, default: Any = None, /) -> Any: ...

    def __setitem__(self, key: Any, value: Any, /) -> None: ...

    def pop(self, key: Any, default: Any = None, /) -> Any: ...

    def clear(self) -> None: ...

    def __len__(self) -> int: ...


class LruStorage:
    """At most `max_entries` values. The least recently used value is removed first."""

    __slots__ = ("_entries", "_max", "pop")

    def __init__(self, max_entries: int) -> None:
        """Raises UsageError if `max_entries` is below 1."""
        if not isinstance(max_entries, int):
            raise TypeError(f"max_entries is a whole number, not {max_entries!r}")
        if max_entries < 1:
            raise UsageError(f"a cache of {max_entries} entries caches nothing; leave the decorator out instead")
        self._max = max_entries
        self._entries: OrderedDict[Key, Any] = OrderedDict()
        self.pop: Any = self._entries.pop  # called for each invalidation: without a function in between

    def get(self, key: Key, default: Any = None, /) -> Any:
        """The value; it is now the most recently used one."""
        value = self._entries.get(key, MISSING)
        if value is MISSING:
            return default
        self._entries.move_to_end(key)
        return value

    def __setitem__(self, key: Key, value: Any, /) -> None:
        self._entries[key] = value
        self._entries.move_to_end(key)
        if len(self._entries) > self._max:
            self._entries.popitem(last=False)

    def clear(self) -> None:
        """Remove all values."""
        self._entries.clear()

    def __len__(self) -> int:
        return len(self._entries)


RETRY = 1.0  # seconds; a call of a cached function waits while it is tried

log = get_logger(__name__)


class Emptying:
    """Empties a storage, or the cache of an adopted function. The user's code that does it may raise.

    A cache that could not be emptied may have stale values. So it is not used until it has been emptied. Each use
    tries that again, at most once in RETRY seconds, and so does the next invalidation.

    `problem`: why the cache cannot be used now, or None. All methods are called under the registry's lock.
    """

    __slots__ = ("_clear", "_name", "_now", "_tried_at", "problem")

    def __init__(self, name: str, clear: Callable[[], object], now: Callable[[], float]) -> None:
        self.problem: str | None = None
        self._name = name
        self._clear = clear
        self._now = now
        self._tried_at = 0.0

    def run(self) -> bool:
        """Empty the cache now; returns whether it may be used."""
        before, self.problem = self.problem, "its storage was being emptied and was interrupted"  # by a signal, say
        self._tried_at = self._now()
        try:
            self._clear()
        except Exception as error:  # noqa: BLE001 - of the user
            self.problem = f"its storage cannot be emptied: {error!r}"
            if before is None:
                log.warning("cache_not_emptied", cache=self._name, error=repr(error), retry_in=RETRY)
            return False
        self.problem = None
        if before is not None:
            log.info("cache_usable", cache=self._name)
        return True

    def usable(self) -> bool:
        """Whether the cache may be used; tries again to empty it if that is due."""
        return self.problem is None or (self._now() - self._tried_at >= RETRY and self.run())


@dataclass(frozen=True, slots=True)
class CacheStatistics:
    """One cache, counted since the start. `emptied`: how often all entries were removed.

    `refused`: values that were read before an invalidation and not stored. `bypassed`: calls while the caches were not
    live. `invalidated`: entries that an invalidation named, whether or not the cache had them. `problem`: why this
    cache is not used, although the caches are live: its storage could not be emptied.
    """

    entries: int
    hits: int
    misses: int
    refused: int
    bypassed: int
    invalidated: int
    emptied: int
    problem: str | None = None


class ManagedCache(Protocol):
    """A cache that the registry invalidates: a `Cache`, or an adopted function. Call its methods under the lock."""

    def forget(self, keys: Sequence[Any]) -> None: ...

    def forget_all(self, entries: Sequence[Sequence[Any]]) -> int: ...

    def empty(self) -> None: ...

    def void(self) -> None: ...

    def forked(self) -> None: ...

    def statistics(self) -> CacheStatistics: ...


class Cache:
    """One cache, made by `Caches.cache` and by the decorator. Any thread may use it.

    By hand: call `get`. If it returns MISSING, `begin` a load *before* reading, then `store` the value or `abandon` it.

    Errors of the storage are not raised. A storage that cannot remove an entry is emptied. While it cannot be emptied,
    the cache is not used.
    """

    def __init__(self, caches: Caches, name: str, storage: Storage) -> None:
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
        """Raises the error again if it is no `Exception`: the process is being interrupted."""
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


P = ParamSpec("P")
R = TypeVar("R")

_OPEN = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def cached_function(cache: Cache, function: Callable[P, R], key: Callable[..., Entry] | None) -> Callable[P, R]:
    """The function with the cache in front.

    Raises TypeError if its signature does not determine the keys, or if it makes generators.
    """
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise TypeError(f"{function.__qualname__} makes generators, which can be used once: return a list instead")
    key_of = key_maker(function) if key is None else lambda args, kwargs: freeze(key(*args, **kwargs))
    if inspect.iscoroutinefunction(function):
        return cast("Callable[P, R]", _async(cache, function, key_of))

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        entry = key_of(args, kwargs)
        value = cache.get(entry)
        if value is not MISSING:
            return cast("R", value)
        ticket = cache.begin(entry)
        try:
            value = _lasting(function, function(*args, **kwargs))
        except BaseException:
            cache.abandon(ticket)
            raise
        cache.store(ticket, value)
        return value

    return call


def _async(
    cache: Cache, function: Callable[..., Any], key_of: Callable[[tuple[Any, ...], dict[str, Any]], Key]
) -> Callable[..., Any]:
    @functools.wraps(function)
    async def call(*args: Any, **kwargs: Any) -> Any:
        entry = key_of(args, kwargs)
        value = cache.get(entry)
        if value is not MISSING:
            return value
        ticket = cache.begin(entry)
        try:
            value = _lasting(function, await function(*args, **kwargs))
        except BaseException:
            cache.abandon(ticket)
            raise
        cache.store(ticket, value)
        return value

    return call


def _lasting(function: Callable[..., Any], value: R) -> R:
    """The value, if it can be used more than once. Raises TypeError."""
    if not isinstance(value, Awaitable | Iterator | AsyncIterator):
        return value
    if isinstance(value, Coroutine):
        value.close()
    name = getattr(function, "__qualname__", None) or repr(function)
    remedy = "decorate an async function" if isinstance(value, Awaitable) else "return a list or a tuple"
    raise TypeError(f"{name} returned a {type(value).__name__}, which can be used once and not be kept: {remedy}")


def key_maker(function: Callable[..., Any]) -> Callable[[tuple[Any, ...], dict[str, Any]], Key]:
    """From the arguments of a call to the key of the entry: all of them in the order of the signature, defaults filled
    in.

    Raises:
        TypeError: the function takes any number of arguments, so the number of keys is not known.
    """
    signature = inspect.signature(function)
    if any(parameter.kind in _OPEN for parameter in signature.parameters.values()):
        raise TypeError(
            f"{function.__qualname__}{signature} takes any number of arguments: give key=, which names keys"
        )
    count = len(signature.parameters)
    positional = all(p.kind is not inspect.Parameter.KEYWORD_ONLY for p in signature.parameters.values())

    def key_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Key:
        if positional and not kwargs and len(args) == count:
            return freeze(args)
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return freeze(tuple(bound.arguments.values()))

    return key_of
