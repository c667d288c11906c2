"""`replicad clients`: the connected clients of a daemon, their streams and delays, and clients that were cut."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import click

from replicad.errors import UsageError
from replicad.operations.asking import ask, http_options
from replicad.terminal.command import ReplicadCommand, json_option
from replicad.terminal.output import as_json_line, echo, table

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
