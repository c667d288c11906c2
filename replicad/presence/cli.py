"""`replicad presence`: enable and disable presence, list users who are online and their addresses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from replicad.config.declaring import seconds
from replicad.config.settings import DatabaseSettings
from replicad.errors import UsageError
from replicad.terminal.command import ReplicadGroup, option, settings_options
from replicad.terminal.database import on_database
from replicad.terminal.output import JSON_HELP, print_rows

if TYPE_CHECKING:
    from replicad.postgres.bridge import Database

_database_options = settings_options(DatabaseSettings, "Database")
_json_option = option("--json", "as_json", is_flag=True, help=JSON_HELP)
_limit_option = option("--limit", type=click.IntRange(1, 1_000_000), default=1000, show_default=True, help="Most rows.")


@click.group("presence", cls=ReplicadGroup, short_help="Who is online, as workers report by USER_SYNC.")
def command() -> None:
    """Who is online: a stream `presence`, made of the workers' USER_SYNC and CLEAR_USER_SYNC.

    \b
      replicad presence enable
      replicad presence list
      replicad tail presence
    """


@command.command(
    "enable",
    epilog="""\b
Examples:
  replicad presence enable
  replicad presence enable --grace 1m --lost-grace 10s""",
)
@option(
    "--grace", metavar="SECONDS", help="Time from the end of the last device until the user is offline. [default: 30s]"
)
@option(
    "--lost-grace",
    metavar="SECONDS",
    help="Time from the loss of the worker's connection until its users are offline; 0: at once. [default: 30s]",
)
@option("--ttl", metavar="SECONDS", help="A daemon without a beat for this time counts as ended. [default: 15s]")
@option("--ip-retention", metavar="SECONDS", help="How long USER_IP is kept. [default: 672h]")
@_database_options
def enable(
    grace: str | None, lost_grace: str | None, ttl: str | None, ip_retention: str | None, **options: Any
) -> None:
    """Let all daemons of the database keep presence. Running daemons begin within a second.

    If presence is enabled already, the settings that are given are changed.
    """
    wanted = {
        "grace": _seconds("--grace", grace, 0, 86_400),
        "lost_grace": _seconds("--lost-grace", lost_grace, 0, 86_400),
        "ttl": _seconds("--ttl", ttl, 0.3, 3_600),
        "ip_retention": _seconds("--ip-retention", ip_retention, 1, 10 * 366 * 86_400),
    }

    async def work(db: Database, settings: DatabaseSettings) -> bool:
        from replicad.presence.book import PresenceBook

        return await PresenceBook(db, settings.stream_schema).enable(**wanted)

    new = on_database(options, work, part="stream", install=True)
    click.echo(
        "presence is enabled: running daemons write the stream presence within 1 s"
        if new
        else "presence was enabled already; running daemons use the settings within 1 s"
    )


@command.command("disable")
@option("--yes", is_flag=True, help="Do it. The stream, its rows and the addresses of users are lost.")
@_database_options
def disable(yes: bool, **options: Any) -> None:
    """Let no daemon keep presence any more, and remove all its data."""
    if not yes:
        raise UsageError("the stream presence, its rows and the addresses of users would be lost; to do it add --yes")

    async def work(db: Database, settings: DatabaseSettings) -> bool:
        from replicad.presence.book import PresenceBook

        return await PresenceBook(db, settings.stream_schema).disable()

    gone = on_database(options, work, part="stream")
    click.echo("presence is disabled and its data is removed" if gone else "presence was not enabled")


@command.command("list")
@option("--all", "offline", is_flag=True, help="List users who are offline too, if the stream still has a row of them.")
@_limit_option
@_json_option
@_database_options
def list_users(offline: bool, limit: int, as_json: bool, **options: Any) -> None:
    """List the users who are online, since when, and how many daemons have devices of them."""

    async def work(db: Database, settings: DatabaseSettings) -> list[dict[str, Any]]:
        from replicad.presence.book import PresenceBook

        return await PresenceBook(db, settings.stream_schema).users(limit, offline=offline)

    rows = on_database(options, work, part="stream")
    columns = ["user", "state", "since", "last_sync", "daemons"]
    print_rows(columns, rows, as_json=as_json, nothing="no user is known" if offline else "no user is online")


@command.command("ips")
@click.argument("user", required=False)
@_limit_option
@_json_option
@_database_options
def ips(user: str | None, limit: int, as_json: bool, **options: Any) -> None:
    """List the addresses, devices and user agents of all users, or of USER, the latest first.

    Workers report them by USER_IP. Access tokens are kept as hashes and are not shown.
    """

    async def work(db: Database, settings: DatabaseSettings) -> list[dict[str, Any]]:
        from replicad.presence.book import PresenceBook

        return await PresenceBook(db, settings.stream_schema).ips(user, limit)

    rows = on_database(options, work, part="stream")
    columns = ["user", "ip", "device", "last_seen", "user_agent"]
    print_rows(columns, rows, as_json=as_json, nothing="no address is kept" + (f" of {user}" if user else ""))


def _seconds(name: str, text: str | None, low: float, high: float) -> float | None:
    if text is None:
        return None
    try:
        value = seconds(text)
    except ValueError as error:
        raise UsageError(f"{name}: {text!r} does not fit; {error}") from None
    if not low <= value <= high:
        raise UsageError(f"{name}: {text!r} does not fit; give {low:g} to {high:g} seconds")
    return value
