"""`replicad plan`: shows how a database differs from a file, and changes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from replicad.cli.desired import file_argument, on_place, read, show
from replicad.features import sections
from replicad.terminal.command import ReplicadCommand, database_options, json_option, option
from replicad.terminal.output import echo
from replicad.terminal.progress import progress

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
def command(file: Path, strict: bool, as_json: bool, **options: Any) -> int:
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
    from replicad.terminal.desired.changes import Action, compare

    wanted = read(file)
    with progress() as report:
        found = on_place(options, lambda place: compare(place, sections(), wanted, report))
    for one in found:
        show(one, as_json=as_json)
    drifted = any(strict or one.action is not Action.EXTRA for one in found)
    if not as_json and not drifted:
        echo("the database is as the file says")
    return DRIFT if drifted else 0
