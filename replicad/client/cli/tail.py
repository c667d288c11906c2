"""`replicad tail`: prints the rows of streams as they come, and goes on where it was after any loss."""

from __future__ import annotations

import json
from collections.abc import Sequence
from shlex import quote
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from replicad.config.declaring import WHOLE
from replicad.config.settings import ClientSettings, read_settings
from replicad.errors import UsageError
from replicad.terminal.command import CommandRun, ReplicadCommand, ValueType, option, settings_options
from replicad.terminal.failures import one_line, say
from replicad.terminal.output import echo

if TYPE_CHECKING:
    from replicad.client.blocking_client import BlockingClient
    from replicad.client.events import Reset, RowBatch

_WORDS = ("NOW", "EARLIEST")
_NOT_AGAIN = ("token", "count")  # options that are of this run only


@click.command(
    "tail",
    cls=ReplicadCommand,
    short_help="Print the rows of streams as they come.",
    epilog="""\b
Examples:
  replicad tail
  replicad tail events --from EARLIEST
  replicad tail events --from 58~2.61 --json | jq .row""",
)
@click.argument("streams", metavar="[STREAM...]", nargs=-1)
@option(
    "--from",
    "token",
    metavar="TOKEN",
    default="NOW",
    show_default=True,
    help="Where to begin: behind a token, NOW or EARLIEST.",
)
@option(
    "--linear", is_flag=True, help="In ascending order over all writers, each row as soon as none can come before it."
)
@option("--count", metavar="N", type=ValueType(WHOLE, 1), help="End after N rows.")
@option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print an object per row (stream, instance, token, row) and per reset (stream, instance, token, reset).",
)
@settings_options(ClientSettings)
def command(
    *, streams: tuple[str, ...], token: str, linear: bool, count: int | None, as_json: bool, **options: Any
) -> None:  # fmt: skip
    """Print the rows of STREAMs as they come, one per line; without any STREAM, of all there are or will be.

    A line is stream, writer, token and the row as JSON. It survives restarts of the daemon and lost connections
    without missing a row; Ctrl-C ends it, and prints the command that goes on from there.

    Where the history of a stream forked (a restored backup, a promoted standby), a line on stderr says which rows to
    discard. With --json there is also an object on stdout: discard the rows of `instance` (null: of all writers) above
    `token` (null: all rows).
    """
    token = token.upper() if token.upper() in _WORDS else token
    if len(streams) != 1 and token not in _WORDS:
        raise UsageError(f"--from {token}: a token belongs to one stream; name it: replicad tail STREAM --from {token}")
    settings = read_settings(ClientSettings, options)

    from replicad.client.blocking_client import BlockingClient

    again = options_again(click.get_current_context())
    with BlockingClient(
        str(settings.server), name="replicad tail", token=settings.token,
        tls=settings.ssl_context(), keepalive=False,
    ) as client:  # fmt: skip
        _follow(client, streams, token, linear=linear, left=count, as_json=as_json, again=again)


def options_again(ctx: click.Context) -> str:
    """The options of this command line that a command which goes on from another token needs too, as in a shell."""
    session = ctx.find_object(CommandRun)
    context = session.context if session is not None else None
    words = ["--context", quote(context)] if context else []
    for param in ctx.command.params:
        name = param.name or ""
        given = ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE
        if not given or not isinstance(param, click.Option) or not param.expose_value or name in _NOT_AGAIN:
            continue
        value = ctx.params.get(name)
        words += [param.opts[0]] if isinstance(value, bool) else [param.opts[0], quote(str(value))]
    return "".join(f" {word}" for word in words)


def _follow(
    client: BlockingClient,
    names: Sequence[str],
    token: str,
    *,
    linear: bool,
    left: int | None,
    as_json: bool,
    again: str,
) -> None:
    from replicad.client.events import Connected, Disconnected, Reset, RowBatch, StreamsChanged, StreamStopped

    wanted = dict.fromkeys(names, token) if names else None
    begin = "NOW" if names else token
    with client.follow(
        wanted, linear, begin=begin, also=(Connected, Disconnected, StreamsChanged, StreamStopped)
    ) as events:
        try:
            for event in events:
                match event:
                    case RowBatch():
                        rows = event.rows[:left]
                        echo("\n".join(render(event, rows, as_json=as_json)))
                        left = None if left is None else left - len(rows)
                        if left == 0:
                            return
                    case Reset():
                        _report(event, as_json=as_json)
                    case Connected():
                        followed = ", ".join(sorted(events.tokens())) or "every stream; there is none yet"
                        say(f"replicad: following {followed} at {event.server_name}")
                    case StreamsChanged():
                        for what, changed in (("now follows", event.added), ("no longer there:", event.removed)):
                            if changed:
                                say(f"replicad: {what} {', '.join(changed)}")
                    case Disconnected() | StreamStopped():
                        one = (
                            f"stream {event.stream} stopped, the others go on: "
                            if isinstance(event, StreamStopped)
                            else ""
                        )
                        say(f"replicad: {one}{one_line(str(event.error))}; trying again in {event.retry_in:.1f} s")
        except KeyboardInterrupt:
            for name, reached in events.tokens().items():
                if reached not in (None, *_WORDS):
                    say(f"replicad: to go on: replicad tail {quote(name)} --from {reached}{again}")
            raise


def render(batch: RowBatch, rows: Sequence[str], *, as_json: bool) -> list[str]:
    """A line per row. The row's own JSON is passed on as it came."""
    if not as_json:
        return [f"{batch.stream} {batch.instance} {batch.token} {row}" for row in rows]
    head = f'{{"stream":{json.dumps(batch.stream)},"instance":{json.dumps(batch.instance)},"token":{batch.token},"row":'
    return [f"{head}{row}}}" for row in rows]


def _report(event: Reset, *, as_json: bool) -> None:
    if as_json:
        echo(render_reset(event))
    say(f"replicad: {explain_reset(event)}")


def render_reset(event: Reset) -> str:
    """What to discard, for programs."""
    found = {"stream": event.stream, "instance": event.instance, "token": event.token, "reset": event.reason}
    return json.dumps(found, separators=(",", ":"))


def explain_reset(event: Reset) -> str:
    """What to discard, for people."""
    rows = "all rows" if event.instance in (None, "*") else f"the rows of {event.instance}"
    above = "" if event.token is None else f" after {event.token}"
    return f"stream {event.stream} was reset ({event.reason}): discard {rows}{above}; the present rows follow"
