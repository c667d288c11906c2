"""Streams: tables whose rows are sent in order, their registry, and how daemons serve them.

Programs that write a stream use the names exported here. They are imported when first used, so that clients of the
daemon, which share this folder's commands, need neither Postgres nor trio.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from replicad.exports import exported

if TYPE_CHECKING:
    from replicad.streams.blocking_writer import BlockingWriter
    from replicad.streams.writer import Positions, Writer, next_id, next_ids, open_writer

__all__ = ["BlockingWriter", "Positions", "Writer", "next_id", "next_ids", "open_writer"]


__getattr__ = exported(
    __name__,
    {
        "BlockingWriter": "blocking_writer",
        **dict.fromkeys(("Positions", "Writer", "next_id", "next_ids", "open_writer"), "writer"),
    },
)
