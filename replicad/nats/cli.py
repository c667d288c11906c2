"""`replicad nats`: publishes the rows of a stream to NATS JetStream, each of them once."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import click

from replicad.config.settings import ClientSettings, read_settings
from replicad.errors import EnvironmentRefused, UsageError
from replicad.terminal.command import ReplicadCommand, option, settings_options


@click.command(
    "nats",
    cls=ReplicadCommand,
    short_help="Publish the rows of a stream to NATS JetStream.",
    epilog="""\b
Examples:
  replicad nats events --subject shop.events --jetstream EVENTS --create
  replicad nats events --subject shop.events --jetstream EVENTS \\
    --nats nats://n1:4222,nats://n2:4222""",
)
@click.argument("stream", metavar="STREAM")
@option("--subject", metavar="SUBJECT", required=True, help="The subject of the messages.")
@option(
    "--jetstream",
    metavar="NAME",
    required=True,
    help="The stream of JetStream that stores the subject. Nothing else may publish into it.",
)
@option(
    "--nats",
    "servers",
    metavar="URLS",
    default="nats://127.0.0.1:4222",
    show_default=True,
    help="Servers of NATS, separated by commas. tls:// uses TLS.",
)
@option(
    "--credentials", metavar="FILE", type=click.Path(path_type=Path), help="Credentials of a user of NATS (.creds)."
)
@option(
    "--from",
    "begin",
    metavar="TOKEN",
    default="EARLIEST",
    show_default=True,
    help="Where to begin if the stream of JetStream is empty.",
)
@option("--create", is_flag=True, help="Make the stream of JetStream if it is absent.")
@settings_options(ClientSettings)
def command(
    *,
    stream: str,
    subject: str,
    jetstream: str,
    servers: str,
    credentials: Path | None,
    begin: str,
    create: bool,
    **options: Any,
) -> None:
    """Publish the rows of STREAM to NATS JetStream, in order and each of them once, until SIGTERM or Ctrl-C.

    It keeps its place in JetStream: after any end it continues behind the last message that is stored there. A second
    such command for the same stream of JetStream publishes nothing twice; it takes over when the first one ends.
    """
    if begin.upper() == "NOW":
        raise UsageError("--from NOW would leave rows out after a restart; give EARLIEST or a token")
    try:
        from replicad.nats.relay import JetStreamRelay, RelaySettings, connect_nats
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "nats":
            raise
        raise EnvironmentRefused("`replicad nats` needs the extra `nats`: pip install 'replicad[nats]'") from error
    from functools import partial

    import anyio

    from replicad.client.async_client import open_client
    from replicad.loops import open_plain_tasks, run_on_asyncio

    settings = read_settings(ClientSettings, options)
    access = {} if credentials is None else {"user_credentials": str(credentials)}
    relay = JetStreamRelay(
        partial(
            open_client,
            str(settings.server),
            name=f"replicad nats {stream}",
            token=settings.token,
            tls=settings.ssl_context(),
        ),
        partial(connect_nats, [server.strip() for server in servers.split(",")], **access),
        RelaySettings(stream, jetstream, subject, begin if begin.upper() != "EARLIEST" else "EARLIEST", create),
    )

    async def until_signal() -> None:
        async with open_plain_tasks() as tasks:
            tasks.start_soon(relay.run)
            with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
                async for _ in signals:
                    return

    run_on_asyncio(until_signal)
