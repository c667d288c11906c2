"""How well one reader of a full journal keeps up. Each reader is judged by itself, by what its peer takes.

The writer waits when the journal is full and a reader still needs the oldest chunk. A reader is *dispensable*, and may
be dropped, in two cases:

- Its peer has taken nothing for `patience` seconds, though the socket had something for it.
- It owes `patience` seconds: each second in which the writer waits is a second owed, and each `pace` bytes that the
  peer takes pay for a second. A reader that reaches the head owes nothing.

Only what the peer takes counts. A reader whose session did not get its turn yet, because this machine is slow, is not
blocked by its socket. This time does not count. All readers that lag are examined, and not only the readers that the
writer waits for. So readers that stop together are dispensable together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

LOOKS: Final = 20  # in the time of `patience`: more cost time, fewer find out late

Progress = Callable[[], int | None]  # bytes that the peer has taken so far; None: no send is blocked by the socket


class ReaderLag:
    """The progress of one reader."""

    __slots__ = ("_owed", "_progress", "_seen", "_stirred_at")

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._seen: int | None = None  # the progress at the last look
        self._stirred_at = float("inf")  # when something was last seen to be taken; inf: not looked at since the head
        self._owed = 0.0

    def reach_head(self) -> None:
        """It has nothing left to take."""
        self._seen = None
        self._stirred_at = float("inf")
        self._owed = 0.0

    def look(self, now: float, waited: float, pace: float) -> None:
        """It lags. `waited`: how long the writer has waited, for whomever, since the last look."""
        at = self._progress()
        if at is None or self._seen is None:
            self._stirred_at = now
        else:
            if at != self._seen:
                self._stirred_at = now
            self._owed = max(0.0, self._owed + waited - max(0, at - self._seen) / pace)
        self._seen = at

    def idle(self, now: float, patience: float) -> bool:
        """Whether its peer has taken nothing for `patience` seconds."""
        return now - self._stirred_at >= patience

    def owes(self, patience: float) -> bool:
        """Whether it takes too little: it owes `patience` seconds."""
        return self._owed >= patience
