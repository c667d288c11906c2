"""What the demonstration says: numbered steps, the commands that it runs, progress in place, figures in a table."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import click

_EVERY = 5.0  # seconds between two lines of progress where they cannot be written over each other


class Show:
    """Prints to stdout. Knows whether that is a terminal, where progress stays on one line."""

    def __init__(self) -> None:
        self._terminal = sys.stdout.isatty()
        self._progress_at = 0.0
        self._on_line = False
        self._step = 0

    def step(self, text: str) -> None:
        """Begin the next step."""
        self._step += 1
        self._end_line()
        click.secho(f"\n{self._step}. {text}", bold=True)

    def line(self, text: str) -> None:
        """Say something, indented."""
        self._end_line()
        for part in text.splitlines():
            click.echo(f"   {part}".rstrip())

    def command(self, *words: str) -> None:
        """Show a command that is run now, as a person would type it."""
        self._end_line()
        click.secho("   $ " + " ".join([program(), *words]), fg="cyan")

    def progress(self, text: str) -> None:
        """Show how far a long step is: in place on a terminal, now and then elsewhere."""
        now = time.monotonic()
        if self._terminal:
            width = shutil.get_terminal_size().columns - 4
            click.echo(f"\r   {text[:width]:<{width}}", nl=False)
            self._on_line = True
        elif now - self._progress_at >= _EVERY:
            self._progress_at = now
            click.echo(f"   {text}")

    def figures(self, rows: Iterable[tuple[str, int | float | str]]) -> None:
        """Counted figures, one a line, numbers to the right."""
        shown = [(name, value if isinstance(value, str) else f"{value:,}") for name, value in rows]
        width = max(len(name) for name, _ in shown)
        for name, value in shown:
            self.line(f"{name:<{width}}  {value:>12}")

    def _end_line(self) -> None:
        if self._on_line:
            click.echo()
            self._on_line = False


def program() -> str:
    """How to call `replicad` from this shell: by its name where it is on PATH, else by its path."""
    beside = Path(sys.executable).with_name("replicad")
    found = shutil.which("replicad")
    if found is not None and Path(found).resolve() == beside.resolve():
        return "replicad"
    if not beside.exists():
        return f"{near(Path(sys.executable))} -m replicad"
    return str(near(beside))


def near(path: Path) -> Path:
    """The path from the current folder where it lies below it."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path
