"""Logs of what a user's program imports: events with fields, through the standard `logging`.

A library prints nothing by itself: its events go to loggers below `replicad`, which has a NullHandler (see
`replicad/__init__.py`). A program that wants to see them configures `logging`. The command line does so in
`config/logs.py`, where the fields stay fields.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from replicad.masking import mask_field


class EventLogger:
    """Logs events to one logger of the standard library.

    Each record's message is `event name=value ...`. Values are masked and made visible as in the daemon's log
    (`masking.mask_value`), so every handler can write them. It has the attributes `event` (a str) and `fields` (a dict)
    too, for handlers that render them in another form.
    """

    def __init__(self, logger: logging.Logger, bound: Mapping[str, Any] | None = None) -> None:
        self._logger = logger
        self._bound = dict(bound or {})

    def bind(self, **fields: Any) -> EventLogger:
        """A logger that adds these fields to each event."""
        return EventLogger(self._logger, {**self._bound, **fields})

    def debug(self, event: str, /, **fields: Any) -> None:
        """For who looks for the cause of something."""
        self._log(logging.DEBUG, event, fields)

    def info(self, event: str, /, **fields: Any) -> None:
        """What an operator may want to know."""
        self._log(logging.INFO, event, fields)

    def warning(self, event: str, /, **fields: Any) -> None:
        """Something fails and is tried again, or is left out."""
        self._log(logging.WARNING, event, fields)

    def error(self, event: str, /, **fields: Any) -> None:
        """Something has failed for good."""
        self._log(logging.ERROR, event, fields)

    def exception(self, event: str, /, **fields: Any) -> None:
        """As `error`, with the traceback of the exception that is being handled."""
        self._log(logging.ERROR, event, fields, exc_info=True)

    def _log(self, level: int, event: str, fields: dict[str, Any], *, exc_info: bool = False) -> None:
        if not self._logger.isEnabledFor(level):
            return
        fields = {name: mask_field(name, value) for name, value in {**self._bound, **fields}.items()}
        form = " ".join([event, *(f"{name}=%s" for name in fields)])
        extra = {"event": event, "fields": fields}
        self._logger.log(level, form, *fields.values(), exc_info=exc_info, extra=extra, stacklevel=3)


def get_logger(name: str) -> EventLogger:
    """The event logger of a module: `log = get_logger(__name__)`."""
    return EventLogger(logging.getLogger(name))
