"""The output of commands: tables for people, JSON for programs, and one line of progress.

Commands print with `echo` only. The texts of clients and rows may contain characters that a terminal obeys.
"""

from __future__ import annotations

import contextlib
import datetime
import decimal
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import click

from replicad.masking import visible


def echo(text: str = "", *, nl: bool = True, fg: str | None = None, bold: bool = False) -> None:
    """Print text with its control characters made visible (see `visible`). `fg`, `bold`: as of `click.style`."""
    shown = visible(text)
    click.echo(click.style(shown, fg=fg, bold=bold or None) if fg or bold else shown, nl=nl)  # noqa: TID251


def plain_value(value: Any) -> Any:
    """The value for JSON: times as ISO text, decimals as numbers."""
    if isinstance(value, datetime.datetime):
        return value.isoformat()
    if isinstance(value, datetime.timedelta):
        return value.total_seconds()
    if isinstance(value, decimal.Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    return value


def cell(value: Any) -> str:
    """The value as text in a table: empty for None, lists with commas, numbers with separators, times in UTC."""
    if isinstance(value, datetime.datetime):
        return value.astimezone(datetime.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    value = plain_value(value)
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return f"{value:,}" if isinstance(value, int) else f"{value:,.1f}"
    if isinstance(value, (list, tuple)):
        return visible(",".join(map(str, value)))
    return visible(" ".join(str(value).split()))


def table(columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> str:
    """Aligned columns under a heading, numbers to the right. The end of the last column is not padded."""
    kept = list(rows)
    cells = [[cell(row.get(column)) for column in columns] for row in kept]
    right = [
        any(isinstance(plain_value(row.get(column)), (int, float)) for row in kept)
        and not any(isinstance(row.get(column), bool) for row in kept)
        for column in columns
    ]
    titles = [column.replace("_", " ") for column in columns]
    widths = [max(len(title), *(len(line[i]) for line in cells), 0) for i, title in enumerate(titles)]
    lines = [titles, *cells]
    return "\n".join(
        "  ".join(
            text.rjust(w) if r else text.ljust(w) for text, w, r in zip(line, widths, right, strict=True)
        ).rstrip()
        for line in lines
    )


def as_json_line(row: Mapping[str, Any]) -> str:
    """One JSON object on one line."""
    return json.dumps({name: plain_value(value) for name, value in row.items()}, ensure_ascii=False)


def print_rows(columns: Sequence[str], rows: Iterable[Mapping[str, Any]], *, as_json: bool, nothing: str) -> None:
    """Print the rows as a table, or one JSON object per line; `nothing` is printed if there are none."""
    kept = list(rows)
    if as_json:
        for row in kept:
            echo(as_json_line(row))
    elif kept:
        echo(table(columns, kept))
    else:
        echo(nothing)


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
