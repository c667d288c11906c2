"""`replicad sender parked`: what destinations refuse, and how it is sent again or dropped."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from replicad.errors import UsageError
from replicad.postgres.statements import statement
from replicad.protocol.words import MAX_INTEGER
from replicad.terminal.command import ReplicadGroup, database_options, json_option, option
from replicad.terminal.database import on_database
from replicad.terminal.output import echo, print_rows

if TYPE_CHECKING:
    from replicad.config.settings import DatabaseSettings
    from replicad.postgres.bridge import Database

_IDS = click.IntRange(1, MAX_INTEGER)
_WIDEST = 60  # characters of a destination in the table: a name may have a thousand, and would move all columns
_COLUMNS = ["id", "parked_at", "stream", "destination", "kind", "token", "replaying", "reason"]


@click.group("parked", cls=ReplicadGroup, short_help="List, send again or drop what destinations refuse.")
def command() -> None:
    """List what destinations refuse, send it again, or drop it.

    A fact or an update is parked when its destination refuses it (400, 413, 414, 415, 422, 431) and accepts what comes
    after it, or when a row names a destination to which nothing can be sent. It stays until it is sent again or
    dropped.
    """


def _choice(function: Callable[..., None]) -> Callable[..., None]:
    for decorate in (
        database_options,
        option("--destination", metavar="NAME", help="Only what is for this destination."),
        option("--stream", metavar="STREAM", help="Only what senders of this stream of facts have parked."),
    ):
        function = decorate(function)
    return function


@command.command("list")
@option("--limit", type=click.IntRange(1, 1_000_000), default=1000, help="The oldest, so many. Default: 1000.")
@json_option
@_choice
def list_parked(stream: str | None, destination: str | None, limit: int, as_json: bool, **options: Any) -> None:
    """List what is parked, the oldest first; with --json also the bodies, and names in full."""

    async def work(db: Database, settings: DatabaseSettings) -> list[Any]:
        query = statement("federation_parked", settings.stream_schema)
        return await db.fetch(query, [], stream, destination, limit)

    rows = [dict(row) for row in on_database(options, work, part="federation")]
    columns = [*_COLUMNS, "body"] if as_json else _COLUMNS
    if not as_json:
        for row in rows:  # ids and tokens as other commands take them, without separators
            name = row["destination"]
            short = name if len(name) <= _WIDEST else f"{name[: _WIDEST - 3]}..."
            row.update(id=str(row["id"]), token=row["token"] and str(row["token"]), destination=short)
    print_rows(columns, rows, as_json=as_json, nothing="nothing that senders deliver is parked")


@command.command("replay")
@click.argument("ids", type=_IDS, nargs=-1)
@option("--all", "everything", is_flag=True, help="All that is parked.")
@_choice
def replay(ids: tuple[int, ...], everything: bool, **options: Any) -> None:
    """Send what is parked again: the entries with these IDS, or those that the options choose.

    The sender of a destination does it within its --sweep-interval (a minute), or when it starts. It delivers them
    after what is outstanding already, in new transactions. What is refused again is parked again.
    """
    count = _change("federation_parked_want", ids, everything, options)
    echo(f"{count} to be sent again")


@command.command("drop")
@click.argument("ids", type=_IDS, nargs=-1)
@option("--all", "everything", is_flag=True, help="All that is parked.")
@_choice
def drop(ids: tuple[int, ...], everything: bool, **options: Any) -> None:
    """Remove what is parked for good: the entries with these IDS, or those that the options choose."""
    echo(f"{_change('federation_parked_drop', ids, everything, options)} dropped")


def _change(query: str, ids: tuple[int, ...], everything: bool, options: dict[str, Any]) -> int:
    stream, destination = options.pop("stream"), options.pop("destination")
    if not (ids or everything or stream or destination):
        raise UsageError("say which: IDS as `replicad sender parked list` shows them, --destination, --stream or --all")

    async def work(db: Database, settings: DatabaseSettings) -> int:
        found: int = await db.fetch_value(statement(query, settings.stream_schema), list(ids), stream, destination)
        return found

    return on_database(options, work, part="federation")
