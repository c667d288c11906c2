"""`replicad ping`: does a daemon answer? For health checks; plain sockets, so that it costs next to nothing."""

from __future__ import annotations

import socket
import ssl
import time
from typing import Any

import click

from replicad.config.settings import ClientSettings, read_settings
from replicad.errors import ConnectionLost, RemoteError, UsageError
from replicad.terminal.command import ReplicadCommand, Seconds, option, settings_options
from replicad.terminal.output import echo

_LONGEST_GREETING = 4096  # bytes; SERVER and a name


@click.command("ping", cls=ReplicadCommand, short_help="Check that a daemon answers; for health checks.")
@click.argument("address", required=False, metavar="[HOST:PORT]")
@settings_options(ClientSettings)
@option(
    "--timeout",
    type=Seconds(),
    default="5",
    show_default=True,
    help="How long to wait for the answer.",
)
def command(address: str | None, timeout: float, **options: Any) -> None:
    """Connect to a daemon, wait for its SERVER line and print its name. Exit status 0 if it came, 1 if not.

    HOST:PORT is short for --server HOST:PORT; the variable REPLICAD_SERVER does as well.
    """
    if address is not None:
        if options["server"] is not None:
            raise UsageError("HOST:PORT and --server are both given; give one of them")
        options["server"] = address
    settings = read_settings(ClientSettings, options)
    started = time.monotonic()
    name = greet(settings, timeout)
    echo(f"{name} at {settings.server} answered in {(time.monotonic() - started) * 1000:.1f} ms")


def greet(settings: ClientSettings, timeout: float) -> str:
    """Connect, and return the server's name. `timeout` in seconds is for all of it together.

    Raises:
        ConnectionLost: no connection, or no SERVER line within the time.
        RemoteError: something else than a replicad answers there, or it answers with an ERROR.
    """
    server, context = settings.server, settings.ssl_context()
    deadline = time.monotonic() + timeout
    received = b""
    try:
        with socket.create_connection((server.host, server.port), timeout) as plain:
            stream = context.wrap_socket(plain, server_hostname=server.host) if context else plain
            while b"\n" not in received and len(received) < _LONGEST_GREETING:
                stream.settimeout(max(deadline - time.monotonic(), 0.001))
                chunk = stream.recv(_LONGEST_GREETING)
                if not chunk:
                    break
                received += chunk
    except ssl.SSLError as error:
        raise ConnectionLost(f"no TLS connection to {server}: {error.reason or error}; see --tls-ca") from error
    except TimeoutError as error:
        raise ConnectionLost(f"no answer from {server} within {timeout:g} s; is replicad listening there?") from error
    except OSError as error:
        why = error.strerror or str(error)
        raise ConnectionLost(f"no connection to {server}: {why}; is `replicad serve` running there?") from error
    line = received.partition(b"\n")[0].decode("utf-8", "replace").strip()
    command_name, _, rest = line.partition(" ")
    if command_name == "ERROR":
        raise RemoteError(f"{server} answered: {rest[:200]}")
    if command_name != "SERVER" or not rest:
        raise RemoteError(f"{server} is no replicad: it began with {line[:80]!r} where SERVER was expected")
    return rest
