"""How often the service of tubes does what, and how long it waits for what."""

from __future__ import annotations

from dataclasses import dataclass

from replicad.daemon.supervision import Restarts
from replicad.tubes import backfill, bulk


@dataclass(frozen=True, slots=True)
class Pace:
    """Intervals and pauses in seconds."""

    look: float = 1.0  # between two looks at all leases and all tubes; a time to live is some of them
    first_reading: float = 2.0  # to wait for the first position of a tube; only an open transaction takes longer
    waking: float = 1.0  # that a look at what came may take before all are woken
    look_again: float = 1.0  # before a look at what came that failed is repeated
    backfills: backfill.Pace = backfill.Pace()
    blocks: bulk.Sizes = bulk.Sizes()
    restarts: Restarts = Restarts()
