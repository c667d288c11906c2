"""Functions with a cache of their own that can only be cleared as a whole, such as `functools.lru_cache`.

Such a cache stores what its function returns, even if it was cleared in between. So after an invalidation it is not
used until every call that was under way has returned. Then it is cleared once more and used again.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

from replicad.caches.cache import CacheStatistics, Owner
from replicad.caches.emptying import Emptying
from replicad.errors import UsageError

P = ParamSpec("P")
R = TypeVar("R")


class Adopted:
    """One such function. A call counts as a hit if its own cache was used, whether or not that had the value."""

    def __init__(self, caches: Owner, function: Callable[..., Any], name: str | None = None) -> None:
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
