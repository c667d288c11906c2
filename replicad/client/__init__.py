"""Clients of the daemon: `blocking_client` needs only the standard library, `async_client` is for trio and asyncio.

The logic of both is written once, without I/O: `requests` declares the requests and understands their answers,
`follower` and `follow_loop` follow streams. The events that a follower returns are exported here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from replicad.exports import exported

if TYPE_CHECKING:
    from replicad.client.async_client import AsyncClient, AsyncFollower, open_client
    from replicad.client.blocking_client import BlockingClient, BlockingFollower, Endpoint
    from replicad.client.blocking_worker import BlockingWorker
    from replicad.client.changes import Change, ChangeOp, TableCopy, apply_changes, read_changes
    from replicad.client.events import (
        Connected,
        Disconnected,
        Event,
        GenerationBegan,
        PositionMoved,
        Reset,
        RowBatch,
        StreamsChanged,
        StreamStopped,
        TakenUpto,
    )
    from replicad.client.ledger import Touch
    from replicad.client.requests import Pod, PodAnswer, PodBatch
    from replicad.client.worker import Batch, Worker, WorkerSettings, WorkerStatistics
    from replicad.client.worker_history import TubeFork

__all__ = [
    "AsyncClient",
    "AsyncFollower",
    "Batch",
    "BlockingClient",
    "BlockingFollower",
    "BlockingWorker",
    "Change",
    "ChangeOp",
    "Connected",
    "Disconnected",
    "Endpoint",
    "Event",
    "GenerationBegan",
    "Pod",
    "PodAnswer",
    "PodBatch",
    "PositionMoved",
    "Reset",
    "RowBatch",
    "StreamStopped",
    "StreamsChanged",
    "TableCopy",
    "TakenUpto",
    "Touch",
    "TubeFork",
    "Worker",
    "WorkerSettings",
    "WorkerStatistics",
    "apply_changes",
    "open_client",
    "read_changes",
]

__getattr__ = exported(
    __name__,
    {
        **dict.fromkeys(("BlockingClient", "BlockingFollower", "Endpoint"), "blocking_client"),
        "BlockingWorker": "blocking_worker",
        **dict.fromkeys(("Change", "ChangeOp", "TableCopy", "apply_changes", "read_changes"), "changes"),
        **dict.fromkeys(
            (
                "Connected",
                "Disconnected",
                "Event",
                "GenerationBegan",
                "PositionMoved",
                "Reset",
                "RowBatch",
                "StreamStopped",
                "StreamsChanged",
                "TakenUpto",
            ),
            "events",
        ),
        "Touch": "ledger",
        **dict.fromkeys(("Pod", "PodAnswer", "PodBatch"), "requests"),
        **dict.fromkeys(("AsyncClient", "AsyncFollower", "open_client"), "async_client"),
        **dict.fromkeys(("Batch", "Worker", "WorkerSettings", "WorkerStatistics"), "worker"),
        "TubeFork": "worker_history",
    },
)
