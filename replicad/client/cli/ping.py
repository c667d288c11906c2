"""`replicad ping`: does a daemon answer? For health checks; plain sockets, so that it costs next to nothing."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from typing import Any

import click

from replicad.config.declaring import SECONDS
from replicad.config.settings import Address, ClientSettings, read_settings
from replicad.errors import ConnectionLost, NotAuthorised, RemoteError, UsageError
from replicad.terminal.command import ReplicadCommand, ValueType, option, settings_options
from replicad.terminal.output import echo

_LONGEST_GREETING = 4096  # bytes; SERVER and a name
_LONGEST_ANSWER = 65536  # bytes; HELP, or an ERROR


@click.command("ping", cls=ReplicadCommand, short_help="Check that a daemon answers; for health checks.")
@click.argument("address", required=False, metavar="[HOST[:PORT]]")
@settings_options(ClientSettings)
@option(
    "--timeout",
    type=ValueType(SECONDS),
    default="5",
    show_default=True,
    help="How long to wait for the answer.",
)
def command(address: str | None, timeout: float, **options: Any) -> None:
    """Connect to a daemon, wait for its SERVER line and print its name.

    The exit status is 0 if it came, 4 if nothing answers, 5 if the daemon does not accept us, 1 if it is no replicad.

    With a token (--token-file, REPLICAD_TOKEN) or a client certificate the daemon must also answer a request, which it
    does only if it knows them. Without, it is enough that it answers at all.

    HOST:PORT is short for --server HOST:PORT; the variable REPLICAD_SERVER does as well. Without a port it is 9009.
    """
    if address is not None:
        if options["server"] is not None:
            raise UsageError("HOST:PORT and --server are both given; give one of them")
        options["server"] = address
    settings = read_settings(ClientSettings, options)
    if settings.server.others:
        raise UsageError(f"{settings.server} names several daemons; ping one of them")
    started = time.monotonic()
    name = greet(settings, timeout)
    echo(f"{name} at {settings.server} answered in {(time.monotonic() - started) * 1000:.1f} ms")


def greet(settings: ClientSettings, timeout: float) -> str:
    """Connect, and return the server's name. `timeout` in seconds is for all of it together.

    Raises:
        ConnectionLost: no connection, or no answer within the time.
        NotAuthorised: the daemon does not accept the token or the certificate.
        RemoteError: something else than a replicad answers there, or it answers with an ERROR.
    """
    server, context = settings.server, settings.ssl_context()
    deadline = time.monotonic() + timeout
    try:
        with socket.create_connection((server.host, server.port), timeout) as plain:
            stream = context.wrap_socket(plain, server_hostname=server.host) if context else plain
            lines = _lines(stream, deadline)
            first = next(lines, "")
            name = _server_name(first, server)
            if settings.token is not None or settings.tls_client_cert is not None:
                auth = f"AUTH {settings.token}\n" if settings.token is not None else ""
                stream.sendall(f"{auth}HELP PING\n".encode())  # it is always answered, if AUTH was accepted
                _wait_accepted(lines, server)
    except TimeoutError as error:
        raise ConnectionLost(f"no answer from {server} within {timeout:g} s; is replicad listening there?") from error
    except OSError as error:
        if context is not None:
            import ssl

            if isinstance(error, ssl.SSLError):
                raise ConnectionLost(f"no TLS connection to {server}: {error.reason or error}; see --tls-ca") from error
        why = error.strerror or str(error)
        raise ConnectionLost(f"no connection to {server}: {why}; is `replicad serve` running there?") from error
    return name


def _lines(stream: socket.socket, deadline: float) -> Iterator[str]:
    """The lines that come, the last one perhaps without its end. Raises TimeoutError at the deadline."""
    received = b""
    longest = _LONGEST_GREETING
    while True:
        while b"\n" not in received and len(received) < longest:
            stream.settimeout(max(deadline - time.monotonic(), 0.001))
            chunk = stream.recv(65536)
            if not chunk:
                break
            received += chunk
        if not received:
            return
        line, _, received = received.partition(b"\n")
        yield line.decode("utf-8", "replace").strip()
        longest = _LONGEST_ANSWER


def _server_name(line: str, server: Address) -> str:
    command_name, _, rest = line.partition(" ")
    if command_name == "ERROR":
        raise RemoteError(f"{server} answered: {rest[:200]}")
    if command_name != "SERVER" or not rest:
        raise RemoteError(f"{server} is no replicad: it began with {line[:80]!r} where SERVER was expected")
    return rest


def _wait_accepted(lines: Iterator[str], server: Address) -> None:
    """Wait for the answer to HELP. An ERROR other than `not_authorised` shows as well that the daemon is alive."""
    for line in lines:
        command_name, _, rest = line.partition(" ")
        if command_name == "ERROR" and rest.startswith(f"{NotAuthorised.code}: "):
            raise NotAuthorised(f"{server} answered: {rest[:200]}")
        if command_name in ("HELP", "ERROR"):
            return
    raise ConnectionLost(f"{server} closed the connection and did not answer")
