"""`replicad streams writers`: list the writers of a stream, and retire writers that no longer write."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from replicad.config.declaring import SECONDS, WHOLE
from replicad.errors import UsageError
from replicad.terminal.command import ReplicadCommand, ValueType, database_options, json_option, option
from replicad.terminal.database import on_streams
from replicad.terminal.output import echo, print_rows

if TYPE_CHECKING:
    from replicad.postgres.bridge import Database
    from replicad.streams.stream_writers import StreamWriter


@click.command(
    "writers",
    cls=ReplicadCommand,
    epilog="""\b
Examples:
  replicad streams writers events
  replicad streams writers NAME --retire INSTANCE --retire INSTANCE
  replicad streams writers NAME --retire-idle-since TOKEN""",
)
@click.argument("name")
@option("--retire", multiple=True, metavar="INSTANCE", help="Retire this writer. May be given several times.")
@option(
    "--retire-idle-since",
    type=ValueType(WHOLE),
    metavar="TOKEN",
    help="Retire all writers that have no row above this token.",
)
@option(
    "--quiet-for",
    type=ValueType(SECONDS),
    default="60",  # as streams.stream_writers.QUIET
    show_default=True,
    help="Retire only writers that have written nothing for this time.",
)
@json_option
@database_options
def command(
    *,
    name: str,
    retire: tuple[str, ...],
    retire_idle_since: int | None,
    quiet_for: float,
    as_json: bool,
    **options: Any,
) -> None:
    """List the writers of the stream NAME, or retire some of them.

    The daemon no longer lists a retired writer to readers. The writer keeps its number, so tokens stay valid. When it
    writes again, it is listed again.
    """
    if retire and retire_idle_since is not None:
        raise UsageError("give --retire or --retire-idle-since, one of them")

    async def work(db: Database, schema: str) -> tuple[int | None, list[StreamWriter]]:
        from replicad.streams import stream_writers

        names = list(retire)
        if retire_idle_since is not None:
            names = await stream_writers.idle_since(db, name, retire_idle_since, schema=schema)
        done = None
        if names or retire_idle_since is not None:
            done = await stream_writers.retire(db, name, names, quiet=quiet_for, schema=schema)
        return done, await stream_writers.load(db, name, schema=schema)

    done, found = on_streams(options, work)
    if done is not None and not as_json:
        echo(f"{done:,} writers retired; running daemons do the same within about a second")
        return
    rows = [_line(writer) for writer in found]
    columns = ["number", "writer", "position", "state", "retired_at"]
    print_rows(columns, rows, as_json=as_json, nothing=f"stream {name} has no writers yet")


def _line(writer: StreamWriter) -> dict[str, Any]:
    return {
        "number": writer.number,
        "writer": writer.name,
        "position": writer.position,
        "state": "retired" if writer.retired else "listed",
        "retired_at": writer.retired_at,
    }
