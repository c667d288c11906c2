"""Caches that are never stale: the stream `caches`, and what workers do with it (docs/caches.md).

`keys` makes dictionary keys of JSON. `guard` decides which values may be stored, `course` when caches may be used; both
have no I/O and no clock. `storage` keeps values. `cache` and `registry` combine these behind decorators. `following`
takes a client's events. `blocking_invalidator` and `trio_invalidator` run it. `writing` is for programs that
invalidate.
"""
