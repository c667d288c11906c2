"""Writers of one stream that share its keys: who owns which, how that changes hands, and what makes it safe.

planning.py decides who should own what, without connection and clock; holdings.py holds what one member owns; keeper.py
says which queries keep the membership up. writer.py runs these queries for programs on trio, blocking.py for those
without async; admin.py is for the command line. The rules are kept in Postgres (`sql/`). Nothing here knows what
is written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from replicad.exports import exported

if TYPE_CHECKING:
    from replicad.sharding.blocking_writer import BlockingShardedWriter
    from replicad.sharding.holdings import Owner, WriterStatistics
    from replicad.sharding.planning import slot_of
    from replicad.sharding.writer import ShardedWriter, open_sharded_writer

__all__ = [
    "BlockingShardedWriter",
    "Owner",
    "ShardedWriter",
    "WriterStatistics",
    "open_sharded_writer",
    "slot_of",
]

__getattr__ = exported(
    __name__,
    {
        "BlockingShardedWriter": "blocking_writer",
        "Owner": "holdings",
        "WriterStatistics": "holdings",
        "slot_of": "planning",
        "ShardedWriter": "writer",
        "open_sharded_writer": "writer",
    },
)
