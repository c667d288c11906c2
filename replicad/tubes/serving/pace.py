"""Intervals and limits of waits of the service of tubes."""

from __future__ import annotations

from dataclasses import dataclass

from replicad.daemon.supervision import Restarts
from replicad.tubes import backfill, bulk


@dataclass(frozen=True, slots=True)
class Pace:
    """Times in seconds."""

    look: float = 1.0  # between two looks at all leases and all tubes; leases live for several of them
    first_reading: float = 2.0  # to wait for the first position of a tube; only an open transaction takes longer
    waking: float = 1.0  # that the query for new pods may take; then all requests that wait for the tube are woken
    look_again: float = 1.0  # before a query for new pods that failed is repeated
    backfills: backfill.Pace = backfill.Pace()
    blocks: bulk.Sizes = bulk.Sizes()
    restarts: Restarts = Restarts()
