"""Clients of the daemon: `blocking_client` needs only the standard library, `trio_client` is for trio programs.

What both do is written once, without I/O: `face` declares the requests, `requests` and `pods` understand answers about
tubes, `follower` and `pursuit` follow streams. The events that a follower hands over are exported here.
"""

from replicad.client.events import (
    Connected,
    Disconnected,
    Event,
    PositionMoved,
    Reset,
    RowBatch,
    StreamsChanged,
    StreamStopped,
    TakenUpto,
)

__all__ = [
    "Connected",
    "Disconnected",
    "Event",
    "PositionMoved",
    "Reset",
    "RowBatch",
    "StreamStopped",
    "StreamsChanged",
    "TakenUpto",
]
