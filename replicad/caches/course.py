"""Decides when caches may be used ("live"), from the events of the client that follows the stream.

Pure: no I/O, no clock. Caches are *live* while two things are true. There is a connection on which all later
invalidations will come. All invalidations before it have been applied.

- On the first connection nothing is cached, so the caches are live at once. Later invalidations come on the connection.
- Entries from before a lost connection are valid only when the rows in between have been applied. Positions do not say
  up to where these go, because an open transaction may hold the positions back. So on every connection the client asks
  up to which id there are rows (TAKEN). The caches are live again when every writer has reached that id.
- The client asks again and again. When every writer has reached the id of a TAKEN that was sent at `fresh_at`,
  everything that was committed by then has been applied. So a daemon that is cut off from Postgres, or whose
  positions are held back, is noticed although it reports no error.
- If the token cannot resume (there is none yet, or the server refuses it), the caches are emptied. Empty caches are
  live at once, as on a first connection.
"""

from __future__ import annotations

from collections.abc import Mapping

_NO_TOKENS = frozenset({None, "NOW", "EARLIEST"})  # a subscription with one of these does not resume


class Course:
    """The state of one worker. Look at `live` after every event. Apply rows before.

    Times are seconds of one clock.
    """

    __slots__ = ("_asked_at", "_connected", "_goal", "_kept", "fresh_at", "live")

    def __init__(self) -> None:
        self.live = False
        self.fresh_at = 0.0  # everything committed by then has been applied to the caches
        self._connected = False
        self._kept = False  # there may be entries from before the present connection
        self._goal: int | None = None  # the id that every writer must reach
        self._asked_at = 0.0

    @property
    def waits(self) -> bool:
        """Whether `moved` must be called with positions."""
        return self._goal is not None

    def connected(self, now: float) -> None:
        """A connection was made."""
        self._connected = True
        self._become_live(now)

    def taken(self, upto: int, at: float) -> None:
        """The answer to a TAKEN that was sent at `asked_at`: ids were given out up to there. An earlier goal comes
        first.

        If the ids went back meanwhile, the new goal replaces the earlier one, which would never be reached.
        """
        if self._connected and (self._goal is None or upto < self._goal):
            self._goal, self._asked_at = upto, at

    def moved(self, positions: Mapping[str, int]) -> None:
        """Everything up to these positions, by writer, has been applied."""
        if self._goal is not None and min(positions.values(), default=self._goal - 1) >= self._goal:
            self._goal = None
            self._kept = False
            self.live = True
            self.fresh_at = self._asked_at

    def reset(self, now: float) -> None:
        """The stream was reset: the caches must be emptied."""
        self._kept = False
        self._goal = None
        if self._connected:
            self._become_live(now)

    def lost(self, token: str | None) -> bool:
        """The connection was lost, or not made. The next one begins with `token`. True: the caches must be emptied."""
        had = self.live or self._kept
        self._kept = had and token not in _NO_TOKENS
        self._connected = self.live = False
        self._goal = None
        return had and not self._kept

    def _become_live(self, now: float) -> None:
        """Become live at once, because nothing is cached."""
        if not self._kept:
            self.live = True
            self.fresh_at = now
