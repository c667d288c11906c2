"""Sharded writers: the writers of one stream divide its keys among themselves (docs/sharding.md).

holdings.py decides which writer should own which slot, and keeps the slots of one writer; it has no connection and no
clock. keeper.py yields the queries that maintain the membership; writer.py runs them for programs on trio and asyncio,
blocking_writer.py for programs without async. admin.py is for the command line. Postgres enforces the rules
(sharding/sql, docs/leases.md). Nothing here knows the content of the writes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from replicad.exports import exported

if TYPE_CHECKING:
    from replicad.sharding.blocking_writer import BlockingShardedWriter
    from replicad.sharding.holdings import KeyOwner, ShardedWriterStatistics, slot_of
    from replicad.sharding.writer import ShardedWriter, open_sharded_writer

__all__ = [
    "BlockingShardedWriter",
    "KeyOwner",
    "ShardedWriter",
    "ShardedWriterStatistics",
    "open_sharded_writer",
    "slot_of",
]

__getattr__ = exported(
    __name__,
    {
        "BlockingShardedWriter": "blocking_writer",
        "KeyOwner": "holdings",
        "ShardedWriterStatistics": "holdings",
        "slot_of": "holdings",
        "ShardedWriter": "writer",
        "open_sharded_writer": "writer",
    },
)
