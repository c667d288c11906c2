"""How often the services of streams do what, how long they wait for what, and a few bounds."""

from __future__ import annotations

from dataclasses import dataclass

from replicad.daemon.supervision import Restarts


@dataclass(frozen=True, slots=True)
class Pace:
    """Intervals and pauses in seconds, and bounds."""

    look: float = 1.0  # between two looks at the registry, and between two notes of what was published
    look_pause: float = 0.1  # between two looks at least, however many troubles begin
    last_note: float = 2.0  # to note what was published when the daemon ends
    first_reading: float = 2.0  # to wait for the first position of a stream; only an open transaction takes longer
    stall_grace: float = 1.5  # in which a look finds new names of the table, and a try may succeed
    follow_retry: float = 0.2  # before a position that could not be taken over is tried again
    copy_retry: float = 0.2  # before a copy that failed is tried again; doubles up to `longest_copy_retry`
    longest_copy_retry: float = 5.0
    position: float = 0.1  # between two POSITIONs without rows; rows are never held up
    ahead: float = 5.0  # for us to get where another daemon, which a token came from, is already
    stopped: float = 10.0  # before plain REPLICATE tries again to read old rows, of which one cannot be read
    acks: float = 1.0  # in which acks are gathered
    troubles: float = 0.5  # between two writes of troubles at least: they may come in hundreds
    refresh: float = 5.0  # between two writes while there are troubles
    late_look: float = 5.0  # between two looks for late rows
    late_lasts: float = 3600.0  # after the last late row, in which the trouble is shown
    late_rows: int = 40_000  # rows of a window that are read; where ids have more rows, the window is narrower
    max_listed: int = 10_000  # writers; every poll and every token costs a few milliseconds with so many
    restarts: Restarts = Restarts()
