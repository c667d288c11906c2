"""Caches that are never stale: the stream `caches`, and how workers apply it (docs/caches.md).

`keys` makes dictionary keys of JSON. `cache` keeps the values of one cache, `registry` all caches of a process behind
decorators. `following` decides when caches may be used and applies a client's events; it has no I/O and no clock of its
own. `blocking_invalidator` and `async_invalidator` run it. `writing` is for programs that invalidate.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from replicad.exports import exported

if TYPE_CHECKING:
    from replicad.caches.async_invalidator import CacheInvalidator
    from replicad.caches.blocking_invalidator import BlockingCacheInvalidator
    from replicad.caches.cache import Cache, CacheStatistics, Storage
    from replicad.caches.registry import CachesStatistics
    from replicad.caches.writing import blocking_invalidate, blocking_invalidate_many, invalidate, invalidate_many

__all__ = [
    "BlockingCacheInvalidator",
    "Cache",
    "CacheInvalidator",
    "CacheStatistics",
    "CachesStatistics",
    "Storage",
    "blocking_invalidate",
    "blocking_invalidate_many",
    "invalidate",
    "invalidate_many",
]

__getattr__ = exported(
    __name__,
    {
        **dict.fromkeys(("Cache", "CacheStatistics"), "cache"),
        "CachesStatistics": "registry",
        "Storage": "cache",
        "CacheInvalidator": "async_invalidator",
        **dict.fromkeys(
            ("blocking_invalidate", "blocking_invalidate_many", "invalidate", "invalidate_many"), "writing"
        ),
        "BlockingCacheInvalidator": "blocking_invalidator",
    },
)
