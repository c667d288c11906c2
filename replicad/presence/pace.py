"""The intervals and bounds of the presence service."""

from __future__ import annotations

from dataclasses import dataclass

from replicad.daemon.supervision import Restarts


@dataclass(frozen=True, slots=True)
class Pace:
    """Intervals and pauses in seconds, and bounds."""

    look: float = 1.0  # between two looks at the settings and at the other daemons' beats
    ips: float = 1.0  # between two writes of addresses
    sweep: float = 60.0  # between two looks for addresses that are too old
    retry: float = 0.2  # before a statement that failed is tried again; doubles up to `longest_retry`
    longest_retry: float = 5.0
    max_ips: int = 50_000  # places that wait for Postgres, some 30 MB
    restarts: Restarts = Restarts()
