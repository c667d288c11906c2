"""`replicad export`: prints the streams, tubes and the rest of a database as a file for `replicad apply`."""

from __future__ import annotations

from typing import Any

import click

from replicad.cli.desired import on_place
from replicad.features import sections
from replicad.terminal.command import ReplicadCommand, database_options
from replicad.terminal.output import echo


@click.command("export", cls=ReplicadCommand, short_help="Print what there is as a file for `replicad apply`.")
@database_options
def command(**options: Any) -> None:
    """Print the streams, tubes, attached tables, presence, caches and sharding of a database as TOML.

    `replicad apply` makes the same in another database that has the same tables. Positions, pods and leases are not in
    it, nor are backfills.
    """
    from replicad.terminal.desired.changes import present_objects
    from replicad.terminal.desired.toml import render

    found = on_place(options, lambda place: present_objects(place, sections()))
    echo(render(found, sections()), nl=False)
