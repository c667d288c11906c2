"""`replicad streams writers`: list the writers of a stream, and retire those that no longer write."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from replicad.config.declaring import seconds
from replicad.config.settings import DatabaseSettings
from replicad.errors import UsageError
from replicad.terminal.command import ReplicadCommand, option, settings_options
from replicad.terminal.database import on_database
from replicad.terminal.output import JSON_HELP, print_rows

if TYPE_CHECKING:
    from replicad.postgres.bridge import Database
    from replicad.streams.stream_writers import StreamWriter

_QUIET = 60.0  # seconds, as streams.stream_writers.QUIET


@click.command(
    "writers",
    cls=ReplicadCommand,
    epilog="""\b
Examples:
  replicad streams writers events
  replicad streams writers events --retire worker7 --retire worker8
  replicad streams writers events --retire-idle-since 120000""",
)
@click.argument("name")
@option("--retire", multiple=True, metavar="INSTANCE", help="Retire this writer. May be given several times.")
@option("--retire-idle-since", type=int, metavar="TOKEN", help="Retire all writers that have no row above this token.")
@option(
    "--quiet-for",
    metavar="SECONDS",
    help=f"Retire only writers that have written nothing for this time. [default: {_QUIET:g}]",
)
@option("--json", "as_json", is_flag=True, help=JSON_HELP)
@settings_options(DatabaseSettings, "Database")
def command(
    *,
    name: str,
    retire: tuple[str, ...],
    retire_idle_since: int | None,
    quiet_for: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """List the writers of the stream NAME, or retire some of them.

    The daemon no longer lists a retired writer to readers. The writer keeps its number, so tokens stay valid. When it
    writes again, it is listed again.
    """
    if retire and retire_idle_since is not None:
        raise UsageError("give --retire or --retire-idle-since, one of them")
    quiet = _QUIET if quiet_for is None else _seconds(quiet_for)

    async def work(db: Database, settings: DatabaseSettings) -> tuple[int | None, list[StreamWriter]]:
        from replicad.streams import stream_writers

        schema, names = settings.stream_schema, list(retire)
        if retire_idle_since is not None:
            names = await stream_writers.idle_since(db, name, retire_idle_since, schema=schema)
        done = None
        if names or retire_idle_since is not None:
            done = await stream_writers.retire(db, name, names, quiet=quiet, schema=schema)
        return done, await stream_writers.load(db, name, schema=schema)

    done, found = on_database(options, work, part="stream")
    if done is not None and not as_json:
        click.echo(f"{done:,} writers retired; running daemons do the same within about a second")
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


def _seconds(text: str) -> float:
    try:
        return seconds(text)
    except ValueError as error:
        raise UsageError(f"--quiet-for: {text!r} does not fit; {error}") from None
