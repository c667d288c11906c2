"""Caches that cannot be stale: the stream `caches` and what workers do with it.

`keys` says what an entry is called, `guard` and `course` decide (no I/O, no clock), `storage` keeps values, `cache` and
`registry` put them together behind decorators, `following` minds a client's events; `blocking_invalidator` and
`trio_invalidator` drive it all. `writing` is for the other side: for who changes what is cached.
"""
