"""Empties what is the user's: a storage, or the cache of an adopted function. Its code may raise.

What could not be emptied may have stale values. So it is not used until it has been emptied. That is tried again when
somebody wants to use it, at most once in RETRY seconds, and with the next invalidation.
"""

from __future__ import annotations

from collections.abc import Callable

from replicad.eventlog import get_logger

RETRY = 1.0  # seconds; a call of a cached function waits while it is tried

log = get_logger(__name__)


class Emptying:
    """One of them. `problem`: why it cannot be used now, or None. All methods are called under the registry's lock."""

    __slots__ = ("_clear", "_name", "_now", "_tried_at", "problem")

    def __init__(self, name: str, clear: Callable[[], object], now: Callable[[], float]) -> None:
        self.problem: str | None = None
        self._name = name
        self._clear = clear
        self._now = now
        self._tried_at = 0.0

    def run(self) -> bool:
        """Empty it now; returns whether it may be used."""
        before, self.problem = self.problem, "its storage was being emptied and was interrupted"  # by a signal, say
        self._tried_at = self._now()
        try:
            self._clear()
        except Exception as error:  # noqa: BLE001 - of the user
            self.problem = f"its storage cannot be emptied: {error!r}"
            if before is None:
                log.warning("cache_not_emptied", cache=self._name, error=repr(error), retry_in=RETRY)
            return False
        self.problem = None
        if before is not None:
            log.info("cache_usable", cache=self._name)
        return True

    def usable(self) -> bool:
        """Whether it may be used; tries again to empty it if that is due."""
        return self.problem is None or (self._now() - self._tried_at >= RETRY and self.run())
