"""`replicad status`: the database, the daemons, streams and tubes at this moment, on one page."""

from __future__ import annotations

from typing import Any

import click

from replicad.config.settings import DatabaseSettings, read_settings
from replicad.operations.island import Island
from replicad.operations.top import show
from replicad.terminal.command import ReplicadCommand, database_options, json_option
from replicad.terminal.database import database_url, run_async
from replicad.terminal.failures import DONE, exit_of
from replicad.terminal.output import as_json_line, echo


@click.command("status", cls=ReplicadCommand, short_help="Show the database, daemons, streams and tubes once.")
@json_option
@database_options
def command(as_json: bool, **options: Any) -> int:
    """Show the name of the database, the daemons that serve it, and all streams and tubes with their problems.

    It is `replicad top --once` with the server's version. `replicad doctor` checks more, and says what to do. If the
    database cannot be used, the exit status says why (docs/operating.md). --json prints one object.
    """
    settings = read_settings(DatabaseSettings, options)
    with database_url(settings) as url:
        picture = run_async(Island(settings, 60.0, url=url).look)
    if picture.unusable is not None:
        raise picture.unusable
    if as_json:
        fields = {
            "database": picture.name,
            "version": picture.server or None,
            "connected": picture.connected,
            "daemons": list(picture.daemons),
            "remarks": list(picture.remarks),
            "streams": list(picture.streams),
            "tubes": list(picture.tubes),
        }
        echo(as_json_line(fields))
    else:
        version = f" (PostgreSQL {picture.server})" if picture.server else ""
        show([picture], live=False, heading=[f"database: {picture.name}{version}", ""])
    return DONE.status if picture.error is None else exit_of(type(picture.error)).status
