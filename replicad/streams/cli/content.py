"""Commands of `replicad streams` about what a stream has: skip a row, limit the length of rows, change the table."""

from __future__ import annotations

from functools import partial
from shlex import quote
from typing import TYPE_CHECKING, Any

import click

from replicad.config.declaring import BYTES, WHOLE, one_of
from replicad.errors import UsageError
from replicad.terminal.command import ReplicadCommand, ValueType, database_options, json_option, option
from replicad.terminal.database import on_streams
from replicad.terminal.output import echo, print_rows

if TYPE_CHECKING:
    from replicad.postgres.bridge import Database

MAX_ROW_HELP = "Longest line that the stream may send, in bytes; it stops before a longer row. Default: 64 MiB."

_name = click.argument("name")


@click.command(
    "skip",
    cls=ReplicadCommand,
    epilog="""\b
Examples:
  replicad streams skip events 120034 --yes --reason 'body is not UTF-8'
  replicad streams skip events --list
  replicad streams skip events 120034 --undo""",
)
@_name
@click.argument("token", required=False, type=ValueType(WHOLE))
@option("--yes", is_flag=True, help="Do it. Without it the command only prints what it would do.")
@option("--reason", metavar="TEXT", help="The reason. Default: what the daemons report about the row.")
@option("--undo", is_flag=True, help="Put the row back into the stream, for readers that have not passed it.")
@option("--list", "as_list", is_flag=True, help="List the skipped ids: by whom, when and why.")
@json_option
@database_options
def skip(
    *, name: str, token: int | None, yes: bool, reason: str | None, undo: bool, as_list: bool, as_json: bool,
    **options: Any,
) -> None:  # fmt: skip
    """Leave the row with the id TOKEN out of the stream NAME. Running daemons do so within about a second.

    Use it for a row that cannot be read, or is too long, and cannot be mended. The row stays in its table.
    """
    if as_list + undo + yes > 1:
        raise UsageError("--yes, --undo and --list exclude each other; give one of them")
    if as_json and not as_list:
        raise UsageError("--json belongs to --list")
    if as_list:
        if token is not None:
            raise UsageError("--list shows all skipped ids; leave TOKEN out")
        _list(name, as_json, options)
    elif token is None:
        raise UsageError("give the id of the row as TOKEN; `replicad streams show` says where the stream stops")
    elif undo:
        _undo(name, token, options)
    elif not yes:
        published = on_streams(options, _position_of(name))
        raise UsageError(
            f"rows with id {token} would be left out of stream {name}: no reader gets them from now on. "
            f"{_consequence(token, published)} To do it, add --yes"
        )
    else:
        published = on_streams(options, _skip(name, token, reason))
        echo(f"stream {name}: id {token} is skipped. {_consequence(token, published)}")


@click.command(
    "alter",
    cls=ReplicadCommand,
    epilog="""\b
Examples:
  replicad streams alter events --max-row 16MiB
  replicad streams alter events --table public.events --same-rows
  replicad streams alter events --sequence-changed same""",
)
@_name
@option("--max-row", type=ValueType(BYTES), metavar="BYTES", help=MAX_ROW_HELP)
@option(
    "--table",
    metavar="SCHEMA.TABLE",
    help="Go on with this table: readers get all of its rows. If it is the table that the stream has already, note its "
    "present name, and that its sequence feeds what it feeds now.",
)
@option(
    "--same-rows",
    is_flag=True,
    help="The new table has the rows of the old table, up to the published position: readers continue there. Refused "
    "if the ids in the two tables differ.",
)
@option(
    "--sequence",
    metavar="SCHEMA.NAME",
    help="With --table: the sequence of the ids, if no column default draws from it.",
)
@option(
    "--positions-table",
    metavar="SCHEMA.TABLE",
    help="With --table, for positions_table: where the writers publish from now on.",
)
@option(
    "--sequence-changed",
    type=ValueType(one_of("same", "restarted")),
    help="What a change of the sequence did, where the stream asks for it. same: every row has the id that it had, as "
    "after ALTER COLUMN ... TYPE; readers go on where they are. restarted: ids began again; readers get all rows.",
)
@database_options
def alter(
    *,
    name: str,
    max_row: int | None,
    table: str | None,
    same_rows: bool,
    sequence: str | None,
    positions_table: str | None,
    sequence_changed: str | None,
    **options: Any,
) -> None:
    """Change the table of the stream NAME, or the longest row that it may have, or say what happened to its sequence.
    Running daemons take it over within a second.
    """
    if max_row is None and table is None and sequence_changed is None:
        raise UsageError("give --max-row, --table or --sequence-changed; `replicad streams show` prints the first two")
    if table is None and (same_rows or sequence is not None or positions_table is not None):
        raise UsageError("--same-rows, --sequence and --positions-table belong to --table")

    from replicad.streams import registry

    if table is not None:
        change = partial(registry.alter_table, name=name, table=table, same_rows=same_rows, sequence=sequence)
        notes = on_streams(options, lambda db, schema: change(db, positions_table=positions_table, schema=schema))
        echo(f"stream {name}: its table is {table}")
        for note in notes:
            echo(f"note: {note}")
    if sequence_changed is not None:
        say = partial(registry.sequence_changed, name=name, what=sequence_changed)
        on_streams(options, lambda db, schema: say(db, schema=schema))
        goes = "readers go on where they are" if sequence_changed == "same" else "readers get all rows anew"
        echo(f"stream {name}: {goes}")
    if max_row is not None:
        on_streams(options, lambda db, schema: registry.set_max_row(db, name, max_row, schema=schema))
        echo(f"stream {name}: rows have at most {max_row} bytes")


def _position_of(name: str) -> Any:
    async def work(db: Database, schema: str) -> int | None:
        from replicad.streams import registry

        await registry.load_stream(db, name, schema=schema)
        found = (await registry.published(db, schema=schema)).get(name)
        return None if found is None else found.position

    return work


def _skip(name: str, token: int, reason: str | None) -> Any:
    async def work(db: Database, schema: str) -> int | None:
        from replicad.streams import skips, troubles

        why = reason
        if why is None:
            known = await troubles.load(db, schema=schema)
            about = (one for one in known if (one.kind, one.name) == ("stream", name) and f" id {token} " in one.reason)
            why = next((one.reason for one in about), "")
        return await skips.skip(db, name, token, why, schema=schema)

    return work


def _undo(name: str, token: int, options: dict[str, Any]) -> None:
    from replicad.streams import skips

    if on_streams(options, lambda db, schema: skips.unskip(db, name, token, schema=schema)):
        echo(f"stream {name}: id {token} belongs to it again; readers that have passed it do not get it")
    else:
        echo(f"stream {name}: id {token} is not skipped; `replicad streams skip {quote(name)} --list` shows what is")


def _list(name: str, as_json: bool, options: dict[str, Any]) -> None:
    from replicad.streams import skips

    found = on_streams(options, lambda db, schema: skips.listed(db, name, schema=schema))
    rows = [{"id": one.id, "by": one.by, "at": one.at, "reason": one.reason} for one in found]
    print_rows(["id", "by", "at", "reason"], rows, as_json=as_json, nothing=f"no id of stream {name} is skipped")


def _consequence(token: int, published: int | None) -> str:
    if published is not None and token <= published:
        return f"The stream was published up to {published}: readers that have passed {token} may have got the row."
    return "The stream has not reached it yet, so no reader has got the row."


CONTENT_COMMANDS: tuple[click.Command, ...] = (skip, alter)
