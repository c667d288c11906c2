"""Streams: which tables are streams, how far each was published, and the library for those who write to them.

Writers need no more than what is named here. Sits on the Postgres floor; knows nothing of sockets, sessions or Spark.
"""

from replicad.streams.blocking import BlockingWriter
from replicad.streams.writers import Positions, Writer, next_id, next_ids, open_writer

__all__ = ["BlockingWriter", "Positions", "Writer", "next_id", "next_ids", "open_writer"]
