"""Configures the logs of the command line: events with fields on stderr, as text or JSON lines, with secrets masked.

The daemon and the commands log events with structlog (`log.info("session_closed", peer=name)`), the libraries for users
with the standard `logging` (see `eventlog`). Both go to the same place here.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import MutableMapping
from typing import Any, TextIO

import structlog

from replicad.config.recent import RECENT
from replicad.config.settings import LogSettings
from replicad.masking import mask_field, visible

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
