"""Writers of one stream that share its keys: who owns which, how that changes hands, and what makes it safe.

planning.py decides, without connection and clock; keeper.py keeps the membership up; book.py asks Postgres, where the
rules are kept (sql/ownership); writer.py is what programs on trio use, blocking.py what those without async use. It
knows nothing of what is written.
"""

from replicad.streams.ownership.blocking import BlockingShardedWriter
from replicad.streams.ownership.holdings import Owner, WriterStatistics
from replicad.streams.ownership.planning import slot_of
from replicad.streams.ownership.writer import ShardedWriter, open_sharded_writer

__all__ = [
    "BlockingShardedWriter",
    "Owner",
    "ShardedWriter",
    "WriterStatistics",
    "open_sharded_writer",
    "slot_of",
]
