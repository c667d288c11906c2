"""`replicad caches`: switch the stream of cache invalidations on and off, look at it, and empty caches by hand."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from replicad.config.settings import DatabaseSettings
from replicad.errors import UsageError
from replicad.terminal.command import ReplicadGroup, option, settings_options
from replicad.terminal.database import install_part, on_database
from replicad.terminal.output import JSON_HELP, print_rows

if TYPE_CHECKING:
    from replicad.postgres.bridge import Database

T = TypeVar("T")

_database_options = settings_options(DatabaseSettings, "Database")


@click.group("caches", cls=ReplicadGroup, short_help="Have workers forget what is no longer good.")
def command() -> None:
    """Have the caches of all workers forget what is no longer good, by a stream that any writer adds to.

    \b
      replicad caches enable
      SELECT replicad.invalidate_cache('get_user', '["@bob:example.com"]')
      replicad tail caches
    """


@command.command("enable")
@option(
    "--writer",
    "writers",
    multiple=True,
    metavar="NAME",
    help="Make sessions of this application_name a writer of their own, whose open transactions hold back nobody "
    "else's invalidations. Several times: each. All other sessions are one writer, master.",
)
@_database_options
def enable(writers: tuple[str, ...], **options: Any) -> None:
    """Install what writers call and make the stream `caches`; run it again to add writers.

    Daemons serve it within a second. It waits for open transactions that have invalidated something.
    """

    async def work(db: Database, schema: str) -> bool:
        return bool(await db.fetch_value(f"SELECT {schema}.cache_enable($1)", list(writers)))

    if _on_caches(options, work, install=True):
        click.echo("stream caches: daemons serve it from now on")
    else:
        click.echo("stream caches: it was there already")


@command.command("disable")
@_database_options
def disable(**options: Any) -> None:
    """Remove the stream with its rows; invalidations write nothing from then on.

    Workers that follow it empty their caches and go without.
    """

    async def work(db: Database, schema: str) -> bool:
        return bool(await db.fetch_value(f"SELECT {schema}.cache_disable()"))

    found = _on_caches(options, work)
    click.echo("stream caches is gone; invalidations write nothing" if found else "there was no stream caches")


@command.command(
    "invalidate",
    epilog="""\b
Examples:
  replicad caches invalidate get_user '"@bob:example.com"'
  replicad caches invalidate get_user""",
)
@click.argument("name")
@click.argument("keys", nargs=-1)
@_database_options
def invalidate(name: str, keys: tuple[str, ...], **options: Any) -> None:
    """Have all workers forget the entry KEYS of the cache or group NAME, without keys all of it.

    A key is a JSON value; what is none, as @bob:example.com, is taken for a string.
    """

    async def work(db: Database, schema: str) -> int:
        entry = json.dumps([_value(key) for key in keys]) if keys else None
        return int(await db.fetch_value(f"SELECT {schema}.invalidate_cache($1, $2::text::jsonb)", name, entry))

    if not _on_caches(options, work):
        raise UsageError("there is no stream caches, so nobody would be told; run `replicad caches enable` first")
    click.echo(f"{name}: one entry is forgotten everywhere" if keys else f"{name}: all of it is forgotten everywhere")


@command.command("names")
@option("--json", "as_json", is_flag=True, help=JSON_HELP)
@_database_options
def names(as_json: bool, **options: Any) -> None:
    """List the caches that the newest 100,000 invalidations were about."""

    async def work(db: Database, schema: str) -> list[Any]:
        return await db.fetch(f"SELECT * FROM {schema}.cache_names()")

    rows = [dict(row) for row in _on_caches(options, work)]
    columns = ["cache_func", "invalidations", "whole", "last"]
    print_rows(columns, rows, as_json=as_json, nothing="nothing was invalidated yet, or it was trimmed")


def _on_caches(options: dict[str, Any], work: Callable[[Database, str], Awaitable[T]], *, install: bool = False) -> T:
    """Run `work` with the quoted schema, where the part is installed (or, `install`, has just been)."""
    from replicad.postgres.bridge import quote_ident

    async def run(db: Database, settings: DatabaseSettings) -> T:
        if install:
            await install_part(db, "cache", settings.stream_schema)
        return await work(db, quote_ident(settings.stream_schema))

    return on_database(options, run, part="stream" if install else "cache", install=install)


def _value(text: str) -> object:
    try:
        return json.loads(text, parse_constant=_no_constant)
    except ValueError:
        return text


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
