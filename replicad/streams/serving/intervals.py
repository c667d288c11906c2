"""The intervals, pauses and some bounds of the stream services."""

from __future__ import annotations

from dataclasses import dataclass

from replicad.daemon.troubles import Restarts


@dataclass(frozen=True, slots=True)
class StreamIntervals:
    """Intervals and pauses in seconds, and bounds."""

    look: float = 1.0  # between two looks at the registry (longer with many streams), and two notes of positions
    look_pause: float = 0.1  # at least, between two looks that troubles cause
    last_note: float = 10.0  # at most, for noting the published positions when the daemon ends
    first_reading: float = 2.0  # to wait for the first position of a stream; only an open transaction takes longer
    stall_grace: float = 1.5  # before a failing stream counts as an obstacle; a look or a retry may mend it sooner
    follow_retry: float = 0.2  # before a position that could not be taken over is tried again
    copy_retry: float = 0.2  # before a copy that failed is tried again; doubles up to `longest_copy_retry`
    longest_copy_retry: float = 5.0
    position: float = 0.1  # between two POSITIONs without rows; rows are never held up
    held: float = 0.5  # after which a copy of new rows ends that would wait for readers: it holds a snapshot
    seal: float = 0.1  # between two boundaries in one copy, where readers can join; most copies are shorter
    gather: float = 20e-6  # between two reads of new rows, for each reader: two to four times what a send to it takes
    longest_gather: float = 0.1
    ahead: float = 5.0  # for this daemon to reach the position of the daemon that a token came from
    stopped: float = 10.0  # before plain REPLICATE tries again to read old rows, of which one cannot be read
    acks: float = 1.0  # between two writes of acks
    filtered: float = 5.0  # between two POSITIONs of a reader of a part of a stream that has no rows
    changes: float = 1.0  # between two looks at the tables whose changes are streams, and for snapshots
    troubles: float = 0.5  # at least, between two writes of troubles: hundreds may begin at once
    refresh: float = 5.0  # between two writes while there are troubles
    late_look: float = 1.0  # between two rounds of the audit; how long a look takes makes a stream miss some
    audit_after: float = 1.0  # before sent rows are compared with the table
    kept_look: float = 60.0  # between two notes of the lowest id of a stream
    keep: float = 30.0  # between two removals of rows that a stream's rules do not keep
    late_lasts: float = 3600.0  # for which the trouble is shown after the last late row
    late_rows: int = 40_000  # rows of a window that are read; where ids have more rows, the window is narrower
    max_listed: int = 10_000  # writers; every poll and every token costs a few milliseconds with so many
    restarts: Restarts = Restarts()
