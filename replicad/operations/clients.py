"""`replicad clients`: the connected clients of a daemon, their streams and delays, and clients that were cut."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import click

from replicad.config.settings import ClientSettings, parse_address, read_settings
from replicad.errors import ConnectionLost, Forbidden, NotAuthorised, RemoteError, UsageError
from replicad.terminal.command import ReplicadCommand, json_option, option, settings_options
from replicad.terminal.output import as_json_line, echo, table

# Asks a daemon over HTTP (`serve --http`) for the commands of operators. Plain sockets: no package is needed.

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


COLUMNS = ("number", "name", "peer", "client", "connected_s", "sent_mb", "follows", "behind_s")
CUT_COLUMNS = ("ago_s", "name", "peer", "client", "reason", "why")


@click.command(
    "clients",
    cls=ReplicadCommand,
    short_help="List the clients of a daemon, and clients that were cut, with the reason.",
)
@json_option
@http_options
def command(http: str | None, as_json: bool, **options: Any) -> None:
    """List the connected clients of a daemon, their streams and delays, then clients that were cut.

    The daemon must run with `serve --http`; --http names that address. A client is behind by the time that its next
    rows have waited for it in memory. For a client that catches up with old rows of a stream the number of ids to go is
    shown instead. With --json each line is a client, or a cut (`"cut": true`).
    """
    if http is None:
        raise UsageError(
            "only a daemon knows its clients; give --http HOST:PORT (or REPLICAD_HTTP) of its `serve --http`"
        )
    found = ask(http, options, "/clients")
    clients, cuts = list(map(_client, found["clients"])), list(map(_cut, found["cuts"]))
    if as_json:
        for row in found["clients"]:
            echo(as_json_line({**row, "cut": False}))
        for row in found["cuts"]:
            echo(as_json_line({**row, "cut": True}))
        return
    echo(table(COLUMNS, clients) if clients else "no client is connected")
    if found["connected"] > len(clients):
        echo(f"and {found['connected'] - len(clients):,} more")
    if cuts:
        echo("\ncut:")
        echo(table(CUT_COLUMNS, cuts))
    echo("\nended since the start: " + (", ".join(_counts(found["closed"])) or "none"))


def _client(row: Mapping[str, Any]) -> dict[str, Any]:
    following = row["following"]
    return {
        **row,
        "client": row["access"] or None,
        "connected_s": float(row["connected_s"]),
        "sent_mb": row["sent"] / 1e6,
        "follows": ", ".join(sorted(set(map(_followed, following)))) or (None if row["known"] else "(newcomer)"),
        "behind_s": max((one["behind_s"] for one in following if one["behind_s"] is not None), default=None),
    }


def _followed(one: Mapping[str, Any]) -> str:
    left = one.get("ids_left")
    return str(one["stream"]) if left is None else f"{one['stream']} (catches up, {left:,} ids to go)"


def _cut(row: Mapping[str, Any]) -> dict[str, Any]:
    return {**row, "client": row["access"] or None, "ago_s": float(row["ago_s"])}


def _counts(closed: Mapping[str, int]) -> Iterator[str]:
    return (f"{reason} {number:,}" for reason, number in sorted(closed.items()))
