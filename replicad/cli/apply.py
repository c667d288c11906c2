"""`replicad apply`: makes streams, tubes and the rest as a file says."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from replicad.cli.desired import file_argument, on_place, read, show
from replicad.errors import StreamRefused
from replicad.features import sections
from replicad.terminal.command import ReplicadCommand, database_options, json_option
from replicad.terminal.output import echo
from replicad.terminal.progress import progress

if TYPE_CHECKING:
    from replicad.terminal.desired.changes import Difference
    from replicad.terminal.desired.section import Place


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
def command(file: Path, as_json: bool, **options: Any) -> None:
    """Make the streams, tubes, attached tables, presence, caches and sharding as FILE says; print what is changed.

    A second time it changes nothing. It removes nothing: what is in the database and not in the file is printed with
    the command that removes it. If something is there and cannot be changed to what the file says, or a table is
    missing, nothing is changed at all. Changes are made one after the other; if one fails, repeat the command when its
    reason is gone. `replicad plan` shows the differences first. docs/operating.md describes the file.
    """
    from replicad.terminal.desired.changes import Action, compare, make

    wanted = read(file)

    async def work(place: Place) -> Sequence[Difference]:
        with progress() as report:
            found = await compare(place, sections(), wanted, report)
        for one in found:
            if one.action in (Action.REFUSE, Action.EXTRA):
                show(one, as_json=as_json)
        if any(one.action is Action.REFUSE for one in found):
            raise StreamRefused("nothing was changed: what is marked with ! cannot be made as the file says")
        await make(place, found, lambda one: show(one, as_json=as_json))
        return found

    found = on_place(options, work)
    if not as_json and not any(one.action in (Action.MAKE, Action.CHANGE) for one in found):
        echo("nothing to do: the database is as the file says")
