"""`replicad serve`: runs the daemon."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

import click

from replicad.config.limits import Limits
from replicad.config.settings import DatabaseSettings, ServerSettings, read_settings
from replicad.terminal.command import COMMON, ReplicadCommand, option, settings_options


@click.command(
    "serve",
    cls=ReplicadCommand,
    log_level="info",
    short_help="Serve the streams and tubes of a Postgres over TCP.",
    epilog="""\b
Examples:
  replicad serve
  replicad serve --database postgresql://replicad@db1/app \\
    --listen 0.0.0.0:9009 --token-file token
  replicad serve --config replicad.toml""",
)
@option(
    "--config",
    "config",
    metavar="FILE",
    type=click.Path(path_type=Path),
    section=COMMON,
    help="TOML file of settings, such as max_line = '2MiB'.",
)
@settings_options(DatabaseSettings)
@settings_options(ServerSettings)
@settings_options(Limits)
def command(config: Path | None, **options: Any) -> None:
    """Serve the streams and tubes of a Postgres over TCP, until SIGTERM or SIGINT.

    Without --database it starts an embedded Postgres. It installs or upgrades its SQL. Sizes are bytes (128KiB, 1MiB),
    times are seconds (0.5, 500ms, 2m, 7d). Every option is also a variable (--max-line: REPLICAD_MAX_LINE) and a key of
    the file; the command line counts before the environment, and this before the file. docs/commands.md says more of
    each option.
    """
    for number in (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):  # until the daemon handles them
        if signal.getsignal(number) is signal.SIG_DFL and not (
            number is signal.SIGHUP and sys.stderr is not None and sys.stderr.isatty()
        ):
            signal.signal(number, lambda *_: None)
    settings = read_settings(ServerSettings, options, file=config)

    from replicad.daemon.daemon import serve
    from replicad.features import served

    serve(settings, served())
