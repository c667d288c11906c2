"""`replicad sender`: turns options into settings and runs the sender until a signal ends it."""

from __future__ import annotations

import os
import re
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from replicad.config.settings import ClientSettings, DatabaseSettings, read_settings
from replicad.errors import EnvironmentRefused, UsageError
from replicad.sender.settings import Bounds, Delivery, Routing, SenderSettings
from replicad.terminal.command import ReplicadCommand, option, settings_options
from replicad.terminal.database import database_url

if TYPE_CHECKING:
    from replicad.sender.sender import Sender


@dataclass(frozen=True, slots=True)
class Program:
    """All settings of the command; one file may have them."""

    client: ClientSettings = ClientSettings()  # noqa: RUF009 - frozen, as all settings
    database: DatabaseSettings = DatabaseSettings()  # noqa: RUF009
    sender: SenderSettings = SenderSettings(facts="-")  # noqa: RUF009 - never used: reading settings makes its own


@click.command(
    "sender",
    cls=ReplicadCommand,
    log_level="info",
    short_help="Deliver the facts of a stream to many HTTP destinations.",
    epilog="""\b
Examples:
  replicad sender --facts orders --form webhook --destinations https://shop.example/hook
  replicad sender --facts events --origin us.example --route app.federation:route
  replicad sender --config sender.toml --sender-name s2 --senders s1,s2""",
)
@option(
    "--config",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="TOML file of settings: retry_first = '10s' for --retry-first 10s.",
)
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
def command(config: Path | None, moves: tuple[str, ...], **options: Any) -> None:
    """Deliver the facts of a stream, and updates, to many HTTP destinations, until SIGTERM or SIGINT.

    Each destination gets every fact that concerns it, in order, however long it or others are down. What is still to be
    delivered is in Postgres. So a sender may be killed at any moment: it continues where it was, and repeats a request
    with the same transaction id.

    It needs a daemon (--server) for the stream, and the same database. Several senders divide the destinations by name:
    give each its own --sender-name, and all of them the same --senders.
    """
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


def _move(text: str, facts: str) -> tuple[str, str]:
    """One value of --from: the stream and its token."""
    stream, _, token = text.rpartition("=")
    if not re.fullmatch(r"now|earliest|[0-9]{1,19}", token, re.IGNORECASE):
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
