"""`replicad sender retire`: forgets senders that are not meant to run any more, with all that they have stored."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from replicad.errors import SenderRefused, UnknownStream, UsageError
from replicad.postgres.statements import statement
from replicad.terminal.command import database_options, option
from replicad.terminal.database import on_database
from replicad.terminal.output import echo

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from replicad.config.settings import DatabaseSettings
    from replicad.postgres.bridge import Database


@click.command(
    "retire",
    short_help="Forget senders that are not meant to run any more.",
    epilog="""\b
Examples:
  replicad sender retire s1 --facts orders --yes
  replicad sender retire s1 s2 --facts orders --yes""",
)
@click.argument("names", metavar="NAME...", nargs=-1, required=True)
@option("--facts", "source", metavar="STREAM", required=True, help="Their stream of facts, or the first of --updates.")
@option("--yes", is_flag=True, help="Do it. What waits for their destinations and what is parked is lost.")
@database_options
def command(names: tuple[str, ...], source: str, yes: bool, **options: Any) -> None:
    """Forget the senders NAME... of a stream, stopped for good, with all that they have stored.

    They are all senders of the stream: those of its --senders. To take one of several out, start the others with a
    --senders without it; they go on with its destinations, and nothing is lost.
    """

    async def work(db: Database, settings: DatabaseSettings) -> str:
        return await retire(db, settings.stream_schema, source, names, yes=yes)

    lost = on_database(options, work, part="federation", statement_timeout=None)
    echo(f"stream {source} has no sender any more; {lost} are forgotten")


async def retire(db: Database, schema: str, source: str, names: Collection[str], *, yes: bool) -> str:
    """Forget all senders of a source (see Store), which are those of these names; returns in words what was lost.

    Raises:
        UnknownStream: the source has no senders.
        SenderRefused: one is running, or others share the destinations with them.
        UsageError: it would be done, but for `yes`.
    """
    async with db.connection() as connection, connection.transaction():
        found = await connection.fetch(statement("federation_retire_hold", schema), source)
        _check(source, set(names), {row["name"]: row["free"] for row in found})
        (row,) = await connection.fetch(statement("federation_retire_loses", schema), source)
        lost = f"{row['facts']:,} facts and {row['updates']:,} updates that wait, and {row['parked']:,} parked items"
        if not yes:
            raise UsageError(f"{lost} would be lost, and up to where {source} was read; to do it add --yes")
        await connection.execute(statement("federation_retire", schema), source)
    return lost


def _check(source: str, wanted: set[str], known: Mapping[str, bool]) -> None:
    """Raises as `retire`. `known`: for each sender whether it is stopped."""
    if not known:
        raise UnknownStream(f"no sender of stream {source} is known")
    running = sorted(name for name, free in known.items() if not free)
    if running:
        raise SenderRefused(f"sender {', '.join(running)} of stream {source} is running; stop it first")
    if wanted != known.keys():
        others = sorted(known.keys() - wanted)
        if wanted < known.keys():
            raise SenderRefused(
                f"{', '.join(others)} shares the destinations of stream {source}: start it with --senders "
                f"{','.join(others)}, and it takes the others' place; or retire all of them: {', '.join(sorted(known))}"
            )
        raise SenderRefused(f"the senders of stream {source} are {', '.join(sorted(known))}")
