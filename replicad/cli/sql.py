"""`replicad sql up|down`: our SQL as a script for plain psql, for those who install nothing that they have not read."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from replicad.errors import UsageError
from replicad.postgres.schema_text import declarations
from replicad.terminal.command import ReplicadGroup, option

if TYPE_CHECKING:
    from replicad.postgres.schema_text import Direction

PARTS = tuple(declarations())

_parts = click.argument("parts", nargs=-1, type=click.Choice(PARTS))
_schema = option(
    "--schema", metavar="SCHEMA", help="Schema to work in. Default: tube for tubes, replicad for the others."
)
_current = option(
    "--current-schema", is_flag=True, help="Work in whatever schema is first in psql's search_path, whatever its name."
)


@click.group("sql", cls=ReplicadGroup, short_help="Print the SQL that replicad installs, and its opposite.")
def command() -> None:
    """Print the SQL that replicad installs in a database, and its opposite, as scripts for psql.

    The daemon installs what it needs by itself; this is for those who read first, or whose daemon may not create
    anything. PART is one of those in the usage; without one it is all of them. Each part is a transaction of its
    own, and both scripts may be run again and again.
    """


@command.command(
    "up",
    epilog="""\b
Examples:
  replicad sql up | psql -v ON_ERROR_STOP=1 -d app
  replicad sql up tube --schema my_tubes | psql -v ON_ERROR_STOP=1 -d app""",
)
@_parts
@_schema
@_current
def up(parts: tuple[str, ...], schema: str | None, current_schema: bool) -> None:
    """Print the script that installs, or upgrades without loss."""
    _print(parts or PARTS, schema, "up", current=current_schema)


@command.command(
    "down",
    epilog="""\b
Example:
  replicad sql down tube | psql -v ON_ERROR_STOP=1 -d app""",
)
@_parts
@_schema
@_current
def down(parts: tuple[str, ...], schema: str | None, current_schema: bool) -> None:
    """Print the script that removes everything again.

    Data of replicad's own goes as well: tubes with their pods, the marks of streams. Your tables stay.
    """
    _print(tuple(reversed(parts or PARTS)), schema, "down", current=current_schema)


def _print(parts: tuple[str, ...], schema: str | None, direction: Direction, *, current: bool) -> None:
    from replicad.postgres.schema import script

    if current and schema is not None:
        raise UsageError("--schema and --current-schema are both given; give one of them")
    for part in parts:
        click.echo(script(part, None if current else schema or declarations()[part].schema, direction))
