"""The progress of a long command: one line on stderr that is written anew, and removed at the end.

Nothing is written in the first second, nor where stderr is no terminal that can rewrite a line.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator

from replicad.masking import visible

_SILENT = 1.0  # seconds without a line: most commands are over by then
_EVERY = 0.1  # seconds between two lines

Report = Callable[[str], None]


def silently(text: str) -> None:
    """A Report that shows nothing."""


@contextlib.contextmanager
def progress(now: Callable[[], float] = time.monotonic) -> Iterator[Report]:
    """A function that shows what the command does at present. `now` is a monotonic clock in seconds."""
    if not sys.stderr.isatty() or os.environ.get("TERM", "dumb") == "dumb":
        yield silently
        return
    due, width = now() + _SILENT, 0

    def report(text: str) -> None:
        nonlocal due, width
        if now() < due:
            return
        line = f"replicad: {visible(text)}"[: shutil.get_terminal_size().columns - 1]
        _write(f"\r{line:<{width}}")
        due, width = now() + _EVERY, len(line)

    try:
        yield report
    finally:
        if width:
            _write(f"\r{'':<{width}}\r")


def _write(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # a closed stderr is not a failure
        sys.stderr.write(text)
        sys.stderr.flush()
