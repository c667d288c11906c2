"""Clients of the daemon: `blocking_client` needs only the standard library, `trio_client` is for trio programs.

What both do is written once, without I/O: `face` declares the requests, `requests` and `pods` understand answers about
tubes, `follower` and `pursuit` follow streams. The events that a follower hands over are exported here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from replicad.exports import exported

if TYPE_CHECKING:
    from replicad.client.blocking_client import Answer, BlockingClient, BlockingFollower, Endpoint
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
    from replicad.client.pods import Pod
    from replicad.client.trio_client import PodBatch, TrioClient, TrioFollower, open_client
    from replicad.client.worker import Batch, Worker, WorkerSettings, WorkerStatistics

__all__ = [
    "Answer",
    "Batch",
    "BlockingClient",
    "BlockingFollower",
    "Connected",
    "Disconnected",
    "Endpoint",
    "Event",
    "GenerationBegan",
    "Pod",
    "PodBatch",
    "PositionMoved",
    "Reset",
    "RowBatch",
    "StreamStopped",
    "StreamsChanged",
    "TakenUpto",
    "Touch",
    "TrioClient",
    "TrioFollower",
    "Worker",
    "WorkerSettings",
    "WorkerStatistics",
    "open_client",
]

__getattr__ = exported(
    __name__,
    {
        **dict.fromkeys(("Answer", "BlockingClient", "BlockingFollower", "Endpoint"), "blocking_client"),
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
        "Pod": "pods",
        **dict.fromkeys(("PodBatch", "TrioClient", "TrioFollower", "open_client"), "trio_client"),
        **dict.fromkeys(("Batch", "Worker", "WorkerSettings", "WorkerStatistics"), "worker"),
    },
)
