"""`replicad presence`: enable and disable presence, list online users and the addresses of users."""

from __future__ import annotations

from typing import Any

import click

from replicad.config.declaring import SECONDS, WHOLE
from replicad.errors import UsageError
from replicad.terminal.command import ReplicadGroup, ValueType, database_options, json_option, option
from replicad.terminal.database import on_streams
from replicad.terminal.output import echo, print_rows

_limit_option = option(
    "--limit", type=ValueType(WHOLE, 1, 1_000_000), default=1000, show_default=True, help="Most rows."
)
_GRACE = ValueType(SECONDS, 0, 86_400)


@click.group("presence", cls=ReplicadGroup, short_help="Online users, as workers report them by USER_SYNC.")
def command() -> None:
    """Online users: a stream `presence`, written from the workers' USER_SYNC and CLEAR_USER_SYNC.

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
    "--grace",
    type=_GRACE,
    help="Time from the end of the last device until the user is offline. [default: 30s]",
)
@option(
    "--lost-grace",
    type=_GRACE,
    help="Time from the loss of the worker's connection until its users are offline; 0: at once. [default: 30s]",
)
@option(
    "--ttl",
    type=ValueType(SECONDS, 0.3, 3_600),
    help="A daemon without a beat for this time counts as ended. [default: 15s]",
)
@option(
    "--ip-retention",
    type=ValueType(SECONDS, 1, 10 * 366 * 86_400),
    help="How long USER_IP is kept. [default: 28d]",
)
@database_options
def enable(
    grace: float | None, lost_grace: float | None, ttl: float | None, ip_retention: float | None, **options: Any
) -> None:
    """Let all daemons of the database keep presence. Running daemons begin within a second.

    If presence is enabled already, the settings that are given are changed.
    """
    wanted = {"grace": grace, "lost_grace": lost_grace, "ttl": ttl, "ip_retention": ip_retention}
    from replicad.presence.repository import PresenceRepository

    new = on_streams(options, lambda db, schema: PresenceRepository(db, schema).enable(**wanted), install=True)
    echo(
        "presence is enabled: running daemons write the stream presence within 1 s"
        if new
        else "presence was enabled already; running daemons use the settings within 1 s"
    )


@command.command("disable")
@option("--yes", is_flag=True, help="Do it. The stream, its rows and the addresses of users are lost.")
@database_options
def disable(yes: bool, **options: Any) -> None:
    """Let no daemon keep presence any more, and remove all its data."""
    if not yes:
        raise UsageError("the stream presence, its rows and the addresses of users would be lost; to do it add --yes")

    from replicad.presence.repository import PresenceRepository

    removed = on_streams(options, lambda db, schema: PresenceRepository(db, schema).disable())
    echo("presence is disabled and its data is removed" if removed else "presence was not enabled")


@command.command("list")
@option("--all", "offline", is_flag=True, help="List users who are offline too, if the stream still has a row of them.")
@_limit_option
@json_option
@database_options
def list_users(offline: bool, limit: int, as_json: bool, **options: Any) -> None:
    """List the online users, since when, and how many daemons have devices of them."""

    from replicad.presence.repository import PresenceRepository

    rows = on_streams(options, lambda db, schema: PresenceRepository(db, schema).users(limit, offline=offline))
    columns = ["user", "state", "since", "last_sync", "daemons"]
    print_rows(columns, rows, as_json=as_json, nothing="no user is known" if offline else "no user is online")


@command.command("ips")
@click.argument("user", required=False)
@_limit_option
@json_option
@database_options
def ips(user: str | None, limit: int, as_json: bool, **options: Any) -> None:
    """List the addresses, devices and user agents of all users, or of USER, the latest first.

    Workers report them by USER_IP. Access tokens are kept as hashes and are not shown.
    """

    from replicad.presence.repository import PresenceRepository

    rows = on_streams(options, lambda db, schema: PresenceRepository(db, schema).ips(user, limit))
    columns = ["user", "ip", "device", "last_seen", "user_agent"]
    print_rows(columns, rows, as_json=as_json, nothing="no address is kept" + (f" of {user}" if user else ""))
