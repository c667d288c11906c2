"""Asks a daemon over HTTP (`serve --http`) for the commands of operators. Plain sockets: no package is needed."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from replicad.config.settings import ClientSettings, parse_address, read_settings
from replicad.errors import ConnectionLost, Forbidden, NotAuthorised, RemoteError, UsageError
from replicad.terminal.command import option, settings_options

F = TypeVar("F", bound=Callable[..., Any])

TIMEOUT = 15.0  # seconds; the daemon answers within 10
LONGEST = 64 << 20  # bytes of an answer

_LATER = ("server",)  # settings of ClientSettings that are about the port of the protocol


def http_options(function: F) -> F:
    """The options of a command that asks a daemon over HTTP."""
    function = settings_options(ClientSettings, without=_LATER)(function)
    return option(
        "--http",
        metavar="HOST:PORT",
        section="Daemon",
        envvar="REPLICAD_HTTP",
        help="Address of the daemon's `serve --http`. Also REPLICAD_HTTP.",
    )(function)


def ask(address: str, options: Mapping[str, str | None], path: str) -> Mapping[str, Any]:
    """The JSON that a daemon answers. `options`: those of ClientSettings.

    Raises:
        UsageError: the address is none.
        ConnectionLost: no answer.
        NotAuthorised, Forbidden: the daemon does not accept the token, or the client lacks the right.
        RemoteError: it is no replicad, or it cannot answer.
    """
    try:
        server = parse_address(address)
    except ValueError as error:
        raise UsageError(f"--http: {address!r} is not valid; {error}") from None
    settings = read_settings(ClientSettings, {**options, "server": address})
    context = settings.ssl_context()
    connection = (
        http.client.HTTPConnection(server.host, server.port, timeout=TIMEOUT)
        if context is None
        else http.client.HTTPSConnection(server.host, server.port, timeout=TIMEOUT, context=context)
    )
    headers = {} if settings.token is None else {"Authorization": f"Bearer {settings.token}"}
    try:
        connection.request("GET", path, headers=headers)
        response = connection.getresponse()
        body = response.read(LONGEST).decode("utf-8", "replace")
    except (OSError, http.client.HTTPException) as error:
        why = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise ConnectionLost(f"no answer over HTTP from {server}: {why}; does `serve --http` listen there?") from error
    finally:
        connection.close()
    said = " ".join(body.split())[:300]
    if response.status == 401:
        raise NotAuthorised(f"{server} requires a secret: {said} (--token-file)")
    if response.status == 403:
        raise Forbidden(f"{server} answered: {said}")
    try:
        found = json.loads(body) if response.status == 200 else None
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise RemoteError(f"{server} answered {response.status} to {path}, and no JSON: {said}")
    return found
