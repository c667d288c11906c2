"""The output of the demonstration: numbered steps, the commands that it runs, progress, figures."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import click

from replicad.terminal.output import echo

_EVERY = 5.0  # seconds between two lines of progress if stdout is not a terminal


class Show:
    """Prints to stdout. On a terminal progress stays on one line."""

    def __init__(self) -> None:
        self._terminal = sys.stdout.isatty()
        self._progress_at = 0.0
        self._on_line = False
        self._step = 0

    def step(self, text: str) -> None:
        """Print the heading of the next step."""
        self._step += 1
        self._end_line()
        echo(f"\n{self._step}. {text}", bold=True)

    def line(self, text: str) -> None:
        """Print text, indented."""
        self._end_line()
        for part in text.splitlines():
            echo(f"   {part}".rstrip())

    def command(self, *words: str) -> None:
        """Print the command that is run now, as people type it."""
        self._end_line()
        echo("   $ " + " ".join([program(), *words]), fg="cyan")

    def progress(self, text: str) -> None:
        """Print the progress of a long step: in place on a terminal, otherwise every `_EVERY` seconds."""
        now = time.monotonic()
        if self._terminal:
            width = shutil.get_terminal_size().columns - 4
            click.echo("\r", nl=False)  # noqa: TID251 - to the beginning of the line
            echo(f"   {text[:width]:<{width}}", nl=False)
            self._on_line = True
        elif now - self._progress_at >= _EVERY:
            self._progress_at = now
            echo(f"   {text}")

    def figures(self, rows: Iterable[tuple[str, int | float | str]]) -> None:
        """Print figures, one per line, numbers to the right."""
        shown = [(name, value if isinstance(value, str) else f"{value:,}") for name, value in rows]
        width = max(len(name) for name, _ in shown)
        for name, value in shown:
            self.line(f"{name:<{width}}  {value:>12}")

    def _end_line(self) -> None:
        if self._on_line:
            echo()
            self._on_line = False


def program() -> str:
    """How to call `replicad` from this shell: by its name if it is on PATH, otherwise by its path."""
    beside = Path(sys.executable).with_name("replicad")
    found = shutil.which("replicad")
    if found is not None and Path(found).resolve() == beside.resolve():
        return "replicad"
    if not beside.exists():
        return f"{near(Path(sys.executable))} -m replicad"
    return str(near(beside))


def near(path: Path) -> Path:
    """The path relative to the current folder if it lies below it."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path
