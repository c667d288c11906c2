"""Commands of `replicad streams` about single rows: leave one out, limit the length of rows."""

from __future__ import annotations

from shlex import quote
from typing import TYPE_CHECKING, Any

import click

from replicad.errors import UsageError
from replicad.terminal.command import Bytes, ReplicadCommand, database_options, json_option, option
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
@click.argument("token", required=False, type=int)
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


@click.command("alter", cls=ReplicadCommand, epilog="\b\nExample:\n  replicad streams alter events --max-row 16MiB")
@_name
@option("--max-row", type=Bytes(), required=True, metavar="BYTES", help=MAX_ROW_HELP)
@database_options
def alter(name: str, max_row: int, **options: Any) -> None:
    """Change the longest row that the stream NAME may have. Running daemons use the new limit within a second."""

    from replicad.streams import registry

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
