"""`replicad caches`: enable and disable the stream of invalidations, list it, invalidate by hand, and who else may."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from replicad.config.settings import DatabaseSettings
from replicad.errors import UsageError
from replicad.terminal.command import ReplicadGroup, database_options, json_option, option
from replicad.terminal.database import install_part, on_database
from replicad.terminal.output import echo, print_rows

if TYPE_CHECKING:
    from replicad.postgres.bridge import Database

T = TypeVar("T")

_roles = click.argument("roles", nargs=-1, required=True, metavar="ROLE...")


@click.group("caches", cls=ReplicadGroup, short_help="Invalidate cache entries of all workers.")
def command() -> None:
    """Invalidate entries in the caches of all workers, by a stream that writers add to.

    \b
      replicad caches enable
      replicad caches grant app
      SELECT replicad.invalidate_cache('get_user', '["@bob:example.com"]')
      replicad tail caches
    """


@command.command("enable")
@option(
    "--writer",
    "writers",
    multiple=True,
    metavar="NAME",
    help="Make sessions with this application_name a writer of their own. Its open transactions do not hold back the "
    "invalidations of others. May be given several times. All other sessions are one writer, master.",
)
@database_options
def enable(writers: tuple[str, ...], **options: Any) -> None:
    """Install the SQL functions that writers call, and make the stream `caches`. Run it again to add writers.

    Running daemons serve it within a second. The command waits for open transactions that have invalidated something.
    """

    async def work(db: Database, schema: str) -> bool:
        return bool(await db.fetch_value(f"SELECT {schema}.cache_enable($1)", list(writers)))

    if _on_caches(options, work, install=True):
        echo("stream caches is registered; running daemons serve it within 1 s")
    else:
        echo("stream caches was registered already")


@command.command("disable")
@database_options
def disable(**options: Any) -> None:
    """Remove the stream with its rows. Later invalidations write nothing.

    Workers that follow it empty their caches and do not use them any more.
    """

    async def work(db: Database, settings: DatabaseSettings) -> bool:
        from replicad.postgres import schema as schemas
        from replicad.postgres.statements import call_value

        if await schemas.read_installed(db, "cache", settings.stream_schema) is None:
            return False
        await schemas.require(db, "cache", settings.stream_schema)
        return bool(await call_value(db, settings.stream_schema, "cache_disable"))

    found = on_database(options, work, part="stream")
    echo("stream caches is removed; invalidations write nothing" if found else "there was no stream caches")


@command.command(
    "invalidate",
    epilog="""\b
Examples:
  replicad caches invalidate get_user '"@bob:example.com"'
  replicad caches invalidate get_user""",
)
@click.argument("name")
@click.argument("keys", nargs=-1)
@database_options
def invalidate(name: str, keys: tuple[str, ...], **options: Any) -> None:
    """Invalidate the entry KEYS of the cache or group NAME at all workers; without KEYS all its entries.

    A key is a JSON value. Text that is not JSON, such as @bob:example.com, is a string.
    """

    async def work(db: Database, schema: str) -> int:
        entry = json.dumps([_value(key) for key in keys]) if keys else None
        return int(await db.fetch_value(f"SELECT {schema}.invalidate_cache($1, $2::text::jsonb)", name, entry))

    if not _on_caches(options, work):
        raise UsageError("there is no stream caches, so no worker would get it; run `replicad caches enable` first")
    echo(f"{name}: one entry is invalidated" if keys else f"{name}: all entries are invalidated")


@command.command("grant")
@_roles
@database_options
def grant(roles: tuple[str, ...], **options: Any) -> None:
    """Let these ROLEs invalidate caches. PUBLIC means every role.

    Without it only the owner of the functions and superusers may. In a function of another owner (SECURITY DEFINER) the
    right of that owner counts.
    """
    _set_right(options, roles, may=True)
    echo(f"may invalidate caches: {', '.join(roles)}")


@command.command("revoke")
@_roles
@database_options
def revoke(roles: tuple[str, ...], **options: Any) -> None:
    """Take the right to invalidate caches from these ROLEs. PUBLIC means the right that every role has."""
    _set_right(options, roles, may=False)
    echo(f"may not invalidate caches by a right of their own: {', '.join(roles)}")


@command.command("names")
@json_option
@database_options
def names(as_json: bool, **options: Any) -> None:
    """List the caches that the newest 100,000 invalidations name."""

    async def work(db: Database, schema: str) -> list[Any]:
        return await db.fetch(f"SELECT * FROM {schema}.cache_names()")

    rows = [dict(row) for row in _on_caches(options, work)]
    columns = ["cache_func", "invalidations", "whole", "last"]
    print_rows(columns, rows, as_json=as_json, nothing="there are no invalidations, or they were trimmed")


def _set_right(options: dict[str, Any], roles: tuple[str, ...], *, may: bool) -> None:
    async def work(db: Database, settings: DatabaseSettings) -> None:
        from replicad.caches.desired import set_right

        await set_right(db, settings.stream_schema, roles, may=may)

    on_database(options, work, part="cache")


def _on_caches(options: dict[str, Any], work: Callable[[Database, str], Awaitable[T]], *, install: bool = False) -> T:
    """Run `work` with the quoted schema. `install`: install the part first; otherwise it must be there."""
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
