"""Storages of values: a bounded one of replicad, and the interface of others (caches of cachetools have it).

A storage is used only under the registry's lock; invalidation is not its task.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Protocol

from replicad.caches.keys import Key
from replicad.errors import UsageError

MISSING: Any = object()  # there is no value


class Storage(Protocol):
    """A mutable mapping that may drop entries at any time. It may refuse a value with ValueError."""

    def get(self, key: Any, default: Any = None, /) -> Any: ...

    def __setitem__(self, key: Any, value: Any, /) -> None: ...

    def pop(self, key: Any, default: Any = None, /) -> Any: ...

    def clear(self) -> None: ...

    def __len__(self) -> int: ...


class LruStorage:
    """At most `max_entries` values. The least recently used one is removed first."""

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
