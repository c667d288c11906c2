"""`replicad sql up|down`: our SQL as a script for plain psql, for those who install nothing that they have not read."""

from __future__ import annotations

from typing import Literal

import click

from replicad.cli.command import ReplicadGroup, option

_part = option(
    "--part",
    type=click.Choice(["tube", "stream"]),
    default="tube",
    show_default=True,
    help="The tubes' functions, or the registry of streams.",
)
_schema = option(
    "--schema", metavar="SCHEMA", help="Schema to install into, made where missing. Default: the current one."
)


@click.group("sql", cls=ReplicadGroup, short_help="Print the SQL that replicad installs, and its opposite.")
def command() -> None:
    """Print the SQL that replicad installs in a database, and its opposite, as scripts for psql.

    The daemon installs what it needs by itself; this is for those who read first, or whose daemon may not create
    anything. Both scripts may be run again and again.
    """


@command.command(
    "up",
    epilog="""\b
Examples:
  replicad sql up --schema tube | psql -1 -d app
  PGOPTIONS='-c search_path=my_tubes' psql -1 -d app -f <(replicad sql up)""",
)
@_part
@_schema
def up(part: Literal["tube", "stream"], schema: str | None) -> None:
    """Print the script that installs, or brings an older version up to date without loss."""
    _print(part, schema, "up")


@command.command(
    "down",
    epilog="""\b
Example:
  replicad sql down --schema tube | psql -1 -d app""",
)
@_part
@_schema
def down(part: Literal["tube", "stream"], schema: str | None) -> None:
    """Print the script that removes everything again, its data included: the pods of tubes, the marks of streams."""
    _print(part, schema, "down")


def _print(part: Literal["tube", "stream"], schema: str | None, direction: Literal["up", "down"]) -> None:
    from replicad.postgres.schema import script

    click.echo(script(part, schema, direction), nl=False)
