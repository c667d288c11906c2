"""replicad: changes out of Postgres to the processes that need them.

What most programs need is exported here; `replicad.client`, `replicad.streams` and the features export the rest. A
name is imported when it is first used, so that `import replicad` costs neither trio nor asyncpg nor PySpark.

What a program imports logs through the standard `logging`, to loggers below `replicad` (see `eventlog`). Nothing is
printed before the program configures them.
"""

from __future__ import annotations

import logging
from importlib.metadata import version
from typing import TYPE_CHECKING

from replicad.exports import exported

if TYPE_CHECKING:
    from replicad.caches import BlockingCacheInvalidator, CacheInvalidator
    from replicad.client import (
        Batch,
        BlockingClient,
        Connected,
        Disconnected,
        Endpoint,
        Event,
        GenerationBegan,
        Pod,
        PositionMoved,
        Reset,
        RowBatch,
        StreamsChanged,
        StreamStopped,
        TakenUpto,
        Touch,
        TrioClient,
        Worker,
        WorkerSettings,
        open_client,
    )
    from replicad.errors import (
        BadToken,
        ConnectionLost,
        DatabaseError,
        DatabaseRefused,
        DatabaseUnavailable,
        DownstreamError,
        InstanceTaken,
        LeaseHeld,
        LeaseLost,
        NotAuthorised,
        NotOwner,
        PartitionsChanged,
        RemoteError,
        RemoteProtocolError,
        ReplicadError,
        RowUnreadable,
        SchemaMissing,
        ServerStopping,
        SlowReader,
        StreamError,
        StreamRefused,
        TokenAhead,
        TokenExpired,
        TubeError,
        TubeRefused,
        UnknownStream,
        UnknownTube,
        UsageError,
        WriterExpelled,
        WrongServer,
    )
    from replicad.postgres import Database, embedded_postgres, open_database
    from replicad.presence import PresenceReporter, open_presence
    from replicad.protocol.tokens import Cursor
    from replicad.sharding import BlockingShardedWriter, ShardedWriter, open_sharded_writer
    from replicad.streams import BlockingWriter, Writer, open_writer
    from replicad.tubes import Part

__all__ = [
    "BadToken",
    "Batch",
    "BlockingCacheInvalidator",
    "BlockingClient",
    "BlockingShardedWriter",
    "BlockingWriter",
    "CacheInvalidator",
    "Connected",
    "ConnectionLost",
    "Cursor",
    "Database",
    "DatabaseError",
    "DatabaseRefused",
    "DatabaseUnavailable",
    "Disconnected",
    "DownstreamError",
    "Endpoint",
    "Event",
    "GenerationBegan",
    "InstanceTaken",
    "LeaseHeld",
    "LeaseLost",
    "NotAuthorised",
    "NotOwner",
    "Part",
    "PartitionsChanged",
    "Pod",
    "PositionMoved",
    "PresenceReporter",
    "RemoteError",
    "RemoteProtocolError",
    "ReplicadError",
    "Reset",
    "RowBatch",
    "RowUnreadable",
    "SchemaMissing",
    "ServerStopping",
    "ShardedWriter",
    "SlowReader",
    "StreamError",
    "StreamRefused",
    "StreamStopped",
    "StreamsChanged",
    "TakenUpto",
    "TokenAhead",
    "TokenExpired",
    "Touch",
    "TrioClient",
    "TubeError",
    "TubeRefused",
    "UnknownStream",
    "UnknownTube",
    "UsageError",
    "Worker",
    "WorkerSettings",
    "Writer",
    "WriterExpelled",
    "WrongServer",
    "embedded_postgres",
    "open_client",
    "open_database",
    "open_presence",
    "open_sharded_writer",
    "open_writer",
]

__getattr__ = exported(
    __name__,
    {
        **dict.fromkeys(("BlockingCacheInvalidator", "CacheInvalidator"), "caches"),
        **dict.fromkeys(
            (
                "Batch",
                "BlockingClient",
                "Connected",
                "Disconnected",
                "Endpoint",
                "Event",
                "Pod",
                "GenerationBegan",
                "PositionMoved",
                "Reset",
                "RowBatch",
                "StreamStopped",
                "StreamsChanged",
                "TakenUpto",
                "Touch",
                "TrioClient",
                "Worker",
                "WorkerSettings",
                "open_client",
            ),
            "client",
        ),
        **dict.fromkeys(
            (
                "BadToken",
                "ConnectionLost",
                "DatabaseError",
                "DatabaseRefused",
                "DatabaseUnavailable",
                "DownstreamError",
                "InstanceTaken",
                "LeaseHeld",
                "LeaseLost",
                "NotAuthorised",
                "NotOwner",
                "PartitionsChanged",
                "RemoteError",
                "RemoteProtocolError",
                "ReplicadError",
                "RowUnreadable",
                "SchemaMissing",
                "ServerStopping",
                "SlowReader",
                "StreamError",
                "StreamRefused",
                "TokenAhead",
                "TokenExpired",
                "TubeError",
                "TubeRefused",
                "UnknownStream",
                "UnknownTube",
                "UsageError",
                "WriterExpelled",
                "WrongServer",
            ),
            "errors",
        ),
        **dict.fromkeys(("Database", "embedded_postgres", "open_database"), "postgres"),
        **dict.fromkeys(("PresenceReporter", "open_presence"), "presence"),
        "Cursor": "protocol.tokens",
        **dict.fromkeys(("BlockingShardedWriter", "ShardedWriter", "open_sharded_writer"), "sharding"),
        **dict.fromkeys(("BlockingWriter", "Writer", "open_writer"), "streams"),
        "Part": "tubes",
    },
)

__version__: str = version("replicad")

logging.getLogger("replicad").addHandler(logging.NullHandler())
