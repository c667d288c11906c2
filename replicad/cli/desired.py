"""What `apply`, `plan` and `export` share: the file, the database, and how differences are printed."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from replicad.config.settings import DatabaseSettings, colour_allowed
from replicad.errors import UsageError
from replicad.features import sections
from replicad.terminal.database import on_database
from replicad.terminal.failures import say
from replicad.terminal.output import as_json_line, echo

if TYPE_CHECKING:
    from replicad.postgres.bridge import Database
    from replicad.terminal.desired.changes import Difference
    from replicad.terminal.desired.section import Place
    from replicad.terminal.desired.toml import Wanted

T = TypeVar("T")

COLOURS = {"+": "green", "~": "yellow", "!": "red", "?": None}
file_argument = click.argument("file", type=click.Path(path_type=Path))


def read(file: Path) -> Wanted:
    """The objects of the file.

    Raises:
        UsageError: something in it is wrong. All mistakes are printed, a line each; this one is the last.
    """
    from replicad.terminal.desired.toml import read_file

    wanted, faults = read_file(file, sections())
    for fault in faults[:-1]:
        say(f"replicad: {fault}")
    if faults:
        raise UsageError(faults[-1])
    return wanted


def on_place(options: Mapping[str, str | None], work: Callable[[Place], Awaitable[T]]) -> T:
    """Run `work` on the database of the options. Tubes and streams must be installed."""

    async def run(db: Database, settings: DatabaseSettings) -> T:
        from replicad.postgres import schema
        from replicad.terminal.desired.section import Place

        await schema.require(db, "tube", settings.tube_schema)
        return await work(Place(db, settings))

    return on_database(options, run, part="stream")


def show(one: Difference, *, as_json: bool) -> None:
    """Print a difference: its mark, the object, and a line for each value."""
    if as_json:
        row: dict[str, Any] = {"section": one.section.name, "name": one.name, "action": one.action.name.lower()}
        echo(as_json_line({**row, "lines": list(one.lines)}))
        return
    mark = one.action.value
    colour = COLOURS[mark] if colour_allowed() else None
    if len(one.lines) == 1:
        echo(f"{mark} {one.label}: {one.lines[0]}", fg=colour)
        return
    echo(f"{mark} {one.label}", fg=colour)
    for line in one.lines:
        echo(f"    {line}")
