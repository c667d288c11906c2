"""Caches that are never stale: the stream `caches`, and what workers do with it (docs/caches.md).

`keys` makes dictionary keys of JSON. `guard` decides which values may be stored, `course` when caches may be used; both
have no I/O and no clock. `storage` keeps values. `cache` and `registry` combine these behind decorators. `following`
takes a client's events. `blocking_invalidator` and `trio_invalidator` run it. `writing` is for programs that
invalidate.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from replicad.exports import exported

if TYPE_CHECKING:
    from replicad.caches.blocking_invalidator import CacheInvalidator as BlockingCacheInvalidator
    from replicad.caches.cache import Cache, CacheStatistics
    from replicad.caches.registry import CachesStatistics
    from replicad.caches.storage import Storage
    from replicad.caches.trio_invalidator import CacheInvalidator
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
        "Storage": "storage",
        "CacheInvalidator": "trio_invalidator",
        **dict.fromkeys(
            ("blocking_invalidate", "blocking_invalidate_many", "invalidate", "invalidate_many"), "writing"
        ),
        "BlockingCacheInvalidator": "blocking_invalidator:CacheInvalidator",
    },
)
