"""When caches may be trusted: what a follower's events mean for whoever caches what a stream invalidates.

Pure. Caches are *live* while a connection stands on which every invalidation that is still to come will come, and all
that came before it have been applied:

- On a first connection nothing is cached, so they are live at once: what is read from now on is invalidated by rows
  that are still to come.
- Entries that outlived a lost connection are good only when the rows in between have been applied. Positions do not say
  how many there are, since an open transaction may hold them back; so the client asks on every connection up to where
  ids have been given out (TAKEN), and is live again when every writer has got there.
- Where the token resumes nothing (there is none yet, or the server no longer takes it), everything is emptied. With
  nothing cached one is live at once, as on a first connection.
"""

from __future__ import annotations

from collections.abc import Mapping

_NO_TOKENS = frozenset({None, "NOW", "EARLIEST"})  # with these a subscription begins somewhere, and resumes nothing


class Course:
    """The standing of one worker. `live` is to be looked at after every event; rows are applied first.

    `reset` and `lost` return whether everything has to be emptied.
    """

    __slots__ = ("_connected", "_kept", "_taken", "live")

    def __init__(self) -> None:
        self.live = False
        self._connected = False
        self._kept = False  # there may be entries from before the present connection
        self._taken: int | None = None  # where every writer has to get

    @property
    def waits(self) -> bool:
        """Whether `moved` wants to know of positions."""
        return self._taken is not None

    def connected(self) -> None:
        """A connection stands."""
        self._connected = True
        self.live = not self._kept

    def taken(self, upto: int) -> None:
        """After the connection was made ids had been given out up to there."""
        if self._connected and self._kept:
            self._taken = upto

    def moved(self, positions: Mapping[str, int]) -> None:
        """Everything up to these positions, by writer, has been applied."""
        if self._taken is not None and min(positions.values(), default=self._taken - 1) >= self._taken:
            self._taken = None
            self._kept = False
            self.live = True

    def reset(self) -> bool:
        """What was known of the stream no longer holds."""
        self._kept = False
        self._taken = None
        self.live = self._connected
        return True

    def lost(self, token: str | None) -> bool:
        """The connection is gone, or could not be made; the next one begins with `token`."""
        had = self.live or self._kept
        self._kept = had and token not in _NO_TOKENS
        self._connected = self.live = False
        self._taken = None
        return had and not self._kept
