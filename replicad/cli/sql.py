"""`replicad sql up|down|roles`: prints replicad's SQL as a script for psql."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from replicad.config.declaring import one_of
from replicad.errors import UsageError
from replicad.postgres.schema_text import declarations
from replicad.terminal.command import ReplicadGroup, ValueType, option
from replicad.terminal.output import echo

if TYPE_CHECKING:
    from replicad.postgres.schema_text import Direction

PARTS = tuple(declarations())

_parts = click.argument("parts", nargs=-1, type=ValueType(one_of(*PARTS)))
_schema = option(
    "--schema", metavar="SCHEMA", help="Schema to work in. Default: tube for tubes, replicad for the others."
)
_current = option("--current-schema", is_flag=True, help="Work in the schema that is first in psql's search_path.")


@click.group(
    "sql",
    cls=ReplicadGroup,
    short_help="Print the SQL that replicad installs, that removes it, or that makes its roles.",
)
def command() -> None:
    """Print the SQL that replicad installs in a database, or the SQL that removes it, as scripts for psql.

    The daemon installs what it needs by itself. Use this to read the SQL first, or if the daemon may not create
    objects. PART is a part of the list in the usage; without it all parts are printed. Each part is one transaction.
    Both scripts may be run several times.
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
    """Print the script that installs or upgrades. All data are kept."""
    _print(parts or PARTS, schema, "up", current=current_schema)


@command.command(
    "down",
    epilog="""\b
Example:
  replicad sql down tube | less
  replicad sql down tube | psql -v ON_ERROR_STOP=1 -d DATABASE""",
)
@_parts
@_schema
@_current
def down(parts: tuple[str, ...], schema: str | None, current_schema: bool) -> None:
    """Print the script that removes everything that `up` installs.

    It removes replicad's own data too: tubes with their pods, the registry of streams. Your tables stay.
    """
    _print(tuple(reversed(parts or PARTS)), schema, "down", current=current_schema)


@command.command(
    "roles",
    epilog="""\b
Examples:
  replicad sql roles --table-owner app_owner | psql -v ON_ERROR_STOP=1 -d app
  replicad sql roles --table-owner app_owner --writer app --operator ops \\
    | psql -v ON_ERROR_STOP=1 -d app""",
)
@option("--daemon", metavar="ROLE", default="replicad", show_default=True, help="The role of `replicad serve`.")
@option("--table-owner", "owners", metavar="ROLE", multiple=True, help="A role that owns tables of streams or tubes.")
@option("--writer", "writers", metavar="ROLE", multiple=True, help="A role that writes to such tables.")
@option(
    "--operator",
    "operators",
    metavar="ROLE",
    multiple=True,
    help="A role that looks (status, top), and changes nothing.",
)
@option(
    "--replication",
    is_flag=True,
    help="Let the daemon hear of commits at once, from the server's WAL (it may then read all of it).",
)
@option("--stream-schema", metavar="SCHEMA", default="replicad", show_default=True, help="Schema of the streams.")
@option("--tube-schema", metavar="SCHEMA", default="tube", show_default=True, help="Schema of the tubes.")
def roles(
    *,
    daemon: str,
    owners: tuple[str, ...],
    writers: tuple[str, ...],
    operators: tuple[str, ...],
    replication: bool,
    stream_schema: str,
    tube_schema: str,
) -> None:
    """Print the script that creates the least roles, or grants to existing ones what they lack.

    --table-owner, --writer and --operator may be given several times. Nothing is granted to PUBLIC, and nothing is
    revoked. New roles have no password. docs/access.md says what each right is for.

    Run the script before the first start of the daemon, and again after it and after each upgrade: it grants rights on
    objects that did not exist before.
    """
    from replicad.postgres.schema_text import Roles, script

    try:
        echo(script(Roles(daemon, owners, writers, operators, replication), stream_schema, tube_schema))
    except ValueError as error:
        raise UsageError(f"a name of a role or schema: {error}") from None


def _print(parts: tuple[str, ...], schema: str | None, direction: Direction, *, current: bool) -> None:
    from replicad.postgres.schema import script

    if current and schema is not None:
        raise UsageError("--schema and --current-schema are both given; give one of them")
    for part in parts:
        echo(script(part, None if current else schema or declarations()[part].schema, direction))
