"""The last events of this process, kept in memory for people who look at a running daemon (`serve --http`).

They are what the log has: the same level, with secrets masked. Bounded in number and in length.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, MutableMapping
from itertools import count
from typing import Any, NamedTuple

from replicad.keeping import Newest

KEPT = 200  # events
MOST_FIELDS = 24  # of an event
LONGEST = 500  # characters of a field; a traceback is longer, and the log has it
_ELSEWHERE = frozenset({"event", "level", "timestamp", "exception"})  # not shown as fields


class Recent(NamedTuple):
    """An event. `number` grows by one with each; `at`: seconds since 1970."""

    number: int
    at: float
    level: str
    event: str
    fields: dict[str, Any]


class RecentEvents:
    """Keeps the last events. `note` is a structlog processor; it must come after `logs.mask_event`, whose values JSON
    can have.
    """

    def __init__(self, kept: int = KEPT, now: Callable[[], float] = time.time) -> None:
        self._events = Newest(kept, Recent)
        self._now = now
        self._numbers = count(1)

    def note(self, _logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        """Keep an event, and pass it on as it is."""
        names = [name for name in event if name not in _ELSEWHERE][:MOST_FIELDS]
        fields = {name: _short(event[name]) for name in names}
        level, text = str(event.get("level", "info")), _short(str(event.get("event", "")))
        self._events.append(Recent(next(self._numbers), self._now(), level, text, fields))
        return event

    def after(self, number: int) -> list[Recent]:
        """The events that are kept and came after that number, the oldest first."""
        return [one for one in self._events if one.number > number]


def _short(value: Any) -> Any:
    """The value for JSON: numbers as they are, anything else as a text of bounded length."""
    if value is None or isinstance(value, (bool, int)) or (isinstance(value, float) and math.isfinite(value)):
        return value
    text = value if isinstance(value, str) else str(value)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."


RECENT = RecentEvents()
"""Those of this process, as its log is the process's."""
