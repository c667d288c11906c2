"""Streams: which tables are streams, how far each was published, and how daemons serve them.

Programs that write a stream need no more than what is named here; the names are imported when they are first used, so
that clients of the daemon, which share this folder's commands, need neither Postgres nor trio.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from replicad.streams.writing.blocking_writer import BlockingWriter
    from replicad.streams.writing.writer import Positions, Writer, next_id, next_ids, open_writer

__all__ = ["BlockingWriter", "Positions", "Writer", "next_id", "next_ids", "open_writer"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "blocking_writer" if name == "BlockingWriter" else "writer"
    return getattr(importlib.import_module(f"replicad.streams.writing.{module}"), name)
