"""Configures the logs of the command line: events with fields on stderr, as text or JSON lines, with secrets masked.

The daemon and the commands log events with structlog (`log.info("session_closed", peer=name)`), the libraries for users
with the standard `logging` (see `eventlog`). Both go to the same place here. The last events are also kept in memory,
for people who look at a running daemon (`serve --http`): the events of the log, with the same level and with secrets
masked, bounded in number and in length.
"""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Callable, MutableMapping
from itertools import count
from typing import Any, NamedTuple, TextIO

import structlog

from replicad.config.settings import LogSettings
from replicad.keeping import Newest
from replicad.masking import mask_field, visible

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

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        self._events = Newest(KEPT, Recent)
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
"""The last events of this process."""


_FIRST = ("timestamp", "level", "event")


class QuietStream:
    """A logger that writes lines to a text stream and ignores its errors.

    The reader of stderr may close it (`replicad serve 2>&1 | head`); that must not end a session of the daemon.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, line: str) -> None:
        """Write one line and flush. Errors are ignored, because there is no other place to report them."""
        try:
            self._stream.write(line + "\n")
            self._stream.flush()
        except (OSError, ValueError):
            pass

    debug = info = warning = error = critical = exception = msg = write


def mask_event(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """The structlog processor that makes everything in an event fit to be shown (`masking.mask_value`), for the log and
    for the console; and puts time, level and event first.
    """
    names = [*(name for name in _FIRST if name in event), *(name for name in event if name not in _FIRST)]
    return {visible(name): mask_field(name, event[name]) for name in names}


class FromLibraries(logging.Handler):
    """Passes records of the standard `logging` to structlog, so that all logs have one form.

    Events of replicad's libraries keep their names and fields. Records of others become the event `library_message`.
    """

    def emit(self, record: logging.LogRecord) -> None:
        """Log the record as an event."""
        fields = getattr(record, "fields", None)
        if isinstance(fields, dict):
            log = structlog.get_logger().bind(**fields)
            log.log(record.levelno, getattr(record, "event", record.msg), exc_info=record.exc_info)
        else:
            log = structlog.get_logger()
            log.log(record.levelno, "library_message", library=record.name, message=record.getMessage())


def configure_logs(settings: LogSettings, stream: TextIO | None = None, *, colour: bool = True) -> None:
    """Send all events of this process to `stream` (default: stderr) in the form and at the level of the settings.

    `colour=False` forbids colours even on a terminal. Call it once, at the start. Other libraries log warnings and
    errors only, except at level debug.
    """
    out = sys.stderr if stream is None else stream
    level = logging.getLevelNamesMapping()[settings.log_level.upper()]
    terminal = out.isatty()
    as_text = settings.log_format == "text" or (settings.log_format == "auto" and terminal)
    renderer: Any = (
        structlog.dev.ConsoleRenderer(
            colors=terminal and colour,
            exception_formatter=structlog.dev.plain_traceback,  # prettier ones print local variables: secrets
            sort_keys=False,
            pad_event_to=0,
        )
        if as_text
        else structlog.processors.JSONRenderer(ensure_ascii=False)
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="%H:%M:%S.%f" if as_text else "iso", utc=not as_text),
            structlog.processors.format_exc_info,
            mask_event,
            RECENT.note,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=lambda *_: QuietStream(out),
        cache_logger_on_first_use=True,
    )
    root = logging.getLogger()
    root.handlers[:] = [FromLibraries()]
    root.setLevel(level if level == logging.DEBUG else max(level, logging.WARNING))
    logging.getLogger("replicad").setLevel(level)
