"""When caches may be trusted: what a follower's events mean for whoever caches what a stream invalidates.

Pure. Caches are *live* while a connection stands on which every invalidation that is still to come will come, and all
that came before it have been applied:

- On a first connection nothing is cached, so they are live at once: what is read from now on is invalidated by rows
  that are still to come.
- Entries that outlived a lost connection are good only when the rows in between have been applied. Positions do not say
  how many there are, since an open transaction may hold them back; so the client asks on every connection up to where
  ids have been given out (TAKEN), and is live again when every writer has got there.
- It asks again and again. When every writer has got where ids were at `fresh_at`, whatever was committed by then has
  been applied: a proof against a daemon that is deaf, or is held back, and says nothing wrong.
- Where the token resumes nothing (there is none yet, or the server no longer takes it), everything is emptied. With
  nothing cached one is live at once, as on a first connection.
"""

from __future__ import annotations

from collections.abc import Mapping

_NO_TOKENS = frozenset({None, "NOW", "EARLIEST"})  # with these a subscription begins somewhere, and resumes nothing


class Course:
    """The standing of one worker. `live` is to be looked at after every event; rows are applied first.

    Times are of one clock, in seconds.
    """

    __slots__ = ("_asked_at", "_connected", "_goal", "_kept", "fresh_at", "live")

    def __init__(self) -> None:
        self.live = False
        self.fresh_at = 0.0  # whatever was committed by then has been applied to what is cached
        self._connected = False
        self._kept = False  # there may be entries from before the present connection
        self._goal: int | None = None  # where every writer has to get
        self._asked_at = 0.0

    @property
    def waits(self) -> bool:
        """Whether `moved` wants to know of positions."""
        return self._goal is not None

    def connected(self, now: float) -> None:
        """A connection stands."""
        self._connected = True
        self._become_live(now)

    def taken(self, upto: int, at: float) -> None:
        """Ids had been given out up to there, as was asked at that time. The last goal is to be reached before.

        Unless ids went back meanwhile, and nobody will ever get there.
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
        """What was known of the stream no longer holds; everything is to be emptied."""
        self._kept = False
        self._goal = None
        if self._connected:
            self._become_live(now)

    def lost(self, token: str | None) -> bool:
        """The connection is gone, or could not be made; the next one begins with `token`. True: empty everything."""
        had = self.live or self._kept
        self._kept = had and token not in _NO_TOKENS
        self._connected = self.live = False
        self._goal = None
        return had and not self._kept

    def _become_live(self, now: float) -> None:
        """Where nothing is cached."""
        if not self._kept:
            self.live = True
            self.fresh_at = now
