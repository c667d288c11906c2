"""The bounds of one destination, and for how long it is left alone after failures. No I/O, no clock, no random."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from replicad.retry import Backoff
from replicad.sender.items import MAX_EDUS, MAX_PDUS

JITTER = 0.2  # the largest part of a pause that is randomly left off
GIVEN_UP = 28  # failures in a row with the longest pause (a week of them, if it is six hours)


@dataclass(frozen=True, slots=True)
class Terms:
    """The bounds of a destination: counts, bytes and seconds."""

    pdus: int = MAX_PDUS  # in a transaction
    edus: int = MAX_EDUS  # in a transaction
    transaction_bytes: int = 4 << 20  # bodies in a transaction; a larger body is sent alone
    queue_pdus: int = 500  # held in memory; ten transactions, so that a busy destination seldom reads from the store
    queue_edus: int = 200  # held in memory; two transactions
    catch_up_after: float = 3600.0  # back-off in seconds above which catch-up takes over; Synapse's figure
    supersede: bool = True  # False: catch-up delivers every fact, not only the latest of a room
    backoff: Backoff = field(default_factory=lambda: Backoff(5.0, 6 * 3600.0, jitter=JITTER))
    idle: float = 7 * 86400.0  # the longest pause of a destination that is given up and for which nothing new comes

    @property
    def longest(self) -> float:
        """The longest pause of a destination that something new is sent to."""
        return self.backoff.cap

    def catches_up(self, failures: int) -> bool:
        """Whether the pause after so many failures in a row is one for catch-up."""
        return failures > 0 and self.backoff.whole(failures - 1) > self.catch_up_after

    def away(self, failures: int) -> bool:
        """Whether a destination with so many failures in a row is away for long: it is not expected to answer."""
        at_most = failures > 0 and self.backoff.whole(failures - 1) >= self.backoff.cap
        return at_most or self.catches_up(failures)

    def pause(self, failures: int, chance: float, *, at_least: float, idle: bool) -> float:
        """How long to wait after so many failures in a row; `chance` is as for `Backoff.delay`.

        `at_least` is what the destination asks for. `idle`: nothing new has come for it since the last try.
        """
        before = failures - 1 - GIVEN_UP
        if idle and before >= 0 and self.backoff.whole(before) >= self.backoff.cap:
            most = max(self.idle, self.longest)
            return replace(self.backoff, first=most, cap=most).delay(0, chance)
        return min(self.longest, max(self.backoff.delay(failures - 1, chance), at_least))
