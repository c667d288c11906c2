"""`replicad sender`: turns options into settings and runs the sender until a signal ends it. Prints secrets."""

from __future__ import annotations

import os
import re
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from replicad.config.declaring import load, read_file
from replicad.config.settings import ClientSettings, DatabaseSettings, read_settings
from replicad.errors import EnvironmentRefused, UsageError
from replicad.protocol.words import MAX_INTEGER
from replicad.sender import parked_cli, retire_cli
from replicad.sender.settings import Bounds, Delivery, Routing, Secrets, SenderSettings
from replicad.sender.signing import derive
from replicad.terminal.command import ReplicadCommand, ReplicadGroup, option, settings_options
from replicad.terminal.database import database_url
from replicad.terminal.output import echo

if TYPE_CHECKING:
    from replicad.sender.sender import Sender


@dataclass(frozen=True, slots=True)
class Program:
    """All settings of the command; one file may have them."""

    client: ClientSettings = ClientSettings()  # noqa: RUF009 - frozen, as all settings
    database: DatabaseSettings = DatabaseSettings()  # noqa: RUF009
    sender: SenderSettings = SenderSettings(facts="-")  # noqa: RUF009 - never used: reading settings makes its own


class SenderGroup(ReplicadCommand, ReplicadGroup):
    """A command that runs by itself, and has other commands."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options section by section, then the commands."""
        super().format_options(ctx, formatter)
        self.format_commands(ctx, formatter)


_config_option = option(
    "--config",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="TOML file of settings: retry_first = '10s' for --retry-first 10s.",
)


@click.group(
    "sender",
    cls=SenderGroup,
    invoke_without_command=True,
    subcommand_metavar="[secret NAME | parked COMMAND | retire NAME...]",
    log_level="info",
    short_help="Deliver the facts of a stream to many HTTP destinations.",
    epilog="""\b
Examples:
  replicad sender --facts orders --destinations https://shop.example/hook
  replicad sender --facts events --form matrix --origin us.example \\
    --route app.federation:route
  replicad sender --config sender.toml --sender-name s2 --senders s1,s2
  replicad sender secret --config sender.toml https://shop.example/hook""",
)
@_config_option
@option(
    "--from",
    "moves",
    metavar="[STREAM=]TOKEN",
    multiple=True,
    help="Continue at this place and not where it ended: a token, now or earliest. Facts after it are sent (again).",
)
@settings_options(SenderSettings)
@settings_options(Routing, "Routing")
@settings_options(Delivery, "Delivery")
@settings_options(Bounds, "Bounds")
@settings_options(ClientSettings, "Daemon")
@settings_options(DatabaseSettings, "Database")
@click.pass_context
def command(ctx: click.Context, /, config: Path | None, moves: tuple[str, ...], **options: Any) -> None:
    """Deliver the facts of a stream, and updates, to many HTTP destinations, until SIGTERM or SIGINT.

    Each destination gets every fact that concerns it, in order, however long it or others are down. What is still to be
    delivered is in Postgres. So a sender may be killed at any moment: it continues where it was, and repeats a request
    with the same transaction id.

    It needs a daemon (--server) for the stream, and the same database. Several senders divide the destinations by name:
    give each its own --sender-name, and all of them the same --senders.
    """
    if ctx.invoked_subcommand is not None:
        return
    program = read_settings(Program, options, file=config)
    try:
        from replicad.sender.sender import Sender
    except ModuleNotFoundError as error:
        if error.name not in {"httpx", "httpcore", "h11", "anyio"}:
            raise
        raise EnvironmentRefused("the sender needs httpx: pip install 'replicad[federation]'") from error
    from replicad.sender.upstream import client_upstream

    sys.path.insert(0, os.getcwd())  # --route finds modules in the current folder, as `python -m` does
    tls = program.client.ssl_context()
    program.sender.delivery.ssl_context()  # an unusable file is refused before anything starts
    with database_url(program.database) as url:
        sender = Sender(
            program.sender,
            url=url,
            schema=program.database.stream_schema,
            open_upstream=client_upstream(
                program.client.server.host,
                program.client.server.port,
                name=f"sender-{program.sender.sender_name}",
                token=program.client.token,
                tls=tls,
            ),
            moves=dict(_move(text, program.sender.facts) for text in moves),
        )
        _run(sender)


@command.command(
    "secret",
    short_help="Print the secret of a destination.",
    epilog="""\b
Examples:
  replicad sender secret --config sender.toml https://shop.example/hook
  REPLICAD_FEDERATION_SECRET=$(cat new) replicad sender secret a.example""",
)
@click.argument("name")
@_config_option
@click.pass_context
def secret(ctx: click.Context, /, name: str, config: Path | None) -> None:
    """Print the secret that the receiver of destination NAME needs, made from the sender's secret.

    NAME is written as in rows and in --destinations, letter by letter. The sender's secret is that of the file or of
    REPLICAD_FEDERATION_SECRET, and never leaves the machine. With federation_secret_previous a second line has the
    secret that was made from it, which the receiver still accepts.
    """
    config = config or (ctx.parent.params["config"] if ctx.parent is not None else None)
    secrets = load(Secrets, {}, os.environ, read_file(config, Program) if config else {})
    if secrets.federation_secret is None:
        raise UsageError("there is no secret: federation_secret in the file, or REPLICAD_FEDERATION_SECRET")
    try:
        for master in filter(None, (secrets.federation_secret, secrets.federation_secret_previous)):
            echo(derive(master, name))
    except UnicodeEncodeError:
        raise UsageError(f"{name!r} is not UTF-8, so it is not the name of a destination") from None


command.add_command(parked_cli.command)
command.add_command(retire_cli.command)


def _move(text: str, facts: str) -> tuple[str, str]:
    """One value of --from: the stream and its token."""
    stream, _, token = text.rpartition("=")
    known = re.fullmatch(r"now|earliest|[0-9]{1,19}", token, re.IGNORECASE)
    if not known or (token.isdecimal() and int(token) > MAX_INTEGER):
        raise UsageError(f"--from: {text!r} does not fit; give a token, now or earliest, or STREAM= and one of these")
    return stream or facts, token.upper()


def _run(sender: Sender) -> None:
    import trio

    async def until_signal() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_stop_on_signal, sender)
            await sender.run()
            nursery.cancel_scope.cancel()

    trio.run(until_signal)


async def _stop_on_signal(sender: Sender) -> None:
    """The first signal ends the sender in an orderly way, the second at once."""
    import structlog
    import trio

    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async for number in signals:
            if sender.stopping:
                raise KeyboardInterrupt
            structlog.get_logger().info("stopping", signal=signal.Signals(number).name)
            sender.stop()
