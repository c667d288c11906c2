"""`replicad apply`, `plan` and `export`: the streams, tubes and the rest of a database as a file."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from replicad.config.settings import DatabaseSettings, colour_allowed
from replicad.errors import StreamRefused, UsageError
from replicad.features import sections
from replicad.terminal.command import ReplicadCommand, database_options, json_option, option
from replicad.terminal.database import on_database
from replicad.terminal.failures import say
from replicad.terminal.output import as_json_line, echo, progress

if TYPE_CHECKING:
    from replicad.postgres.bridge import Database
    from replicad.terminal.desired import Difference, TargetDatabase, Wanted

T = TypeVar("T")

COLOURS = {"+": "green", "~": "yellow", "!": "red", "?": None}
file_argument = click.argument("file", type=click.Path(path_type=Path))


def read(file: Path) -> Wanted:
    """The objects of the file.

    Raises:
        UsageError: something in it is wrong. All mistakes are printed, a line each; the error is the last of them.
    """
    from replicad.terminal.desired import read_file

    wanted, faults = read_file(file, sections())
    for fault in faults[:-1]:
        say(f"replicad: {fault}")
    if faults:
        raise UsageError(faults[-1])
    return wanted


def on_place(options: Mapping[str, str | None], work: Callable[[TargetDatabase], Awaitable[T]]) -> T:
    """Run `work` on the database of the options. Tubes and streams must be installed."""

    async def run(db: Database, settings: DatabaseSettings) -> T:
        from replicad.postgres import schema
        from replicad.terminal.desired import TargetDatabase

        await schema.require(db, "tube", settings.tube_schema)
        return await work(TargetDatabase(db, settings))

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


@click.command(
    "apply",
    cls=ReplicadCommand,
    short_help="Make streams, tubes and the rest as a file says.",
    epilog="""\b
Examples:
  replicad export > replicad.toml
  replicad apply replicad.toml""",
)
@file_argument
@json_option
@database_options
def apply(file: Path, as_json: bool, **options: Any) -> None:
    """Make the streams, tubes, attached tables, presence, caches and sharding as FILE says; print each change.

    A second time it changes nothing. It removes nothing: objects of the database that are not in the file are printed
    with the command that removes them. If something is there and cannot be changed to what the file says, or a table is
    missing, nothing is changed at all. Changes are made one after the other; if one fails, repeat the command when its
    reason is removed. `replicad plan` shows the differences first. docs/command-line.md describes the file.
    """
    from replicad.terminal.desired import Action, compare, make

    wanted = read(file)

    async def work(place: TargetDatabase) -> Sequence[Difference]:
        with progress() as report:
            found = await compare(place, sections(), wanted, report)
        for one in found:
            if one.action in (Action.REFUSE, Action.EXTRA):
                show(one, as_json=as_json)
        if any(one.action is Action.REFUSE for one in found):
            raise StreamRefused("nothing was changed: lines with ! cannot be made as the file says")
        await make(place, found, lambda one: show(one, as_json=as_json))
        return found

    found = on_place(options, work)
    if not as_json and not any(one.action in (Action.MAKE, Action.CHANGE) for one in found):
        echo("nothing to do: the database is as the file says")


DRIFT = 2  # the exit status


@click.command(
    "plan",
    cls=ReplicadCommand,
    short_help="Show how the database differs from a file of streams and tubes.",
    epilog="""\b
Examples:
  replicad plan replicad.toml
  replicad plan replicad.toml --strict --context production""",
)
@file_argument
@option("--strict", is_flag=True, help="Objects of the database that are not in the file count as a difference too.")
@json_option
@database_options
def plan(file: Path, strict: bool, as_json: bool, **options: Any) -> int:
    """Show what `replicad apply FILE` would do, and change nothing.

    \b
      +  is missing, and would be made
      ~  is there with other values, and would be changed
      !  cannot be made as the file says; the line says why, and what to do
      ?  is in the database and not in the file; apply leaves it alone

    All of it is tried in transactions that are rolled back, so what apply would refuse has a !.

    The exit status is 0 if the database is as the file says, and 2 if not. Lines with ? count only with --strict. The
    file says nothing of a part (streams, tubes, ...) that it does not have at all.
    """
    from replicad.terminal.desired import Action, compare

    wanted = read(file)
    with progress() as report:
        found = on_place(options, lambda place: compare(place, sections(), wanted, report))
    for one in found:
        show(one, as_json=as_json)
    drifted = any(strict or one.action is not Action.EXTRA for one in found)
    if not as_json and not drifted:
        echo("the database is as the file says")
    return DRIFT if drifted else 0


@click.command("export", cls=ReplicadCommand, short_help="Print what there is as a file for `replicad apply`.")
@database_options
def export(**options: Any) -> None:
    """Print the streams, tubes, attached tables, presence, caches and sharding of a database as TOML.

    `replicad apply` makes the same in another database that has the same tables. Positions, pods and leases are not in
    it, nor are backfills.
    """
    from replicad.terminal.desired import present_objects, render

    found = on_place(options, lambda place: present_objects(place, sections()))
    echo(render(found, sections()), nl=False)
