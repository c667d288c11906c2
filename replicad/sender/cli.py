"""`replicad sender`: turns options into settings and runs the sender until a signal ends it. Its commands print
secrets, list and replay parked items, and retire senders.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from replicad.config.declaring import WHOLE, load, read_file
from replicad.config.settings import ClientSettings, DatabaseSettings, read_settings
from replicad.errors import EnvironmentRefused, SenderRefused, UnknownStream, UsageError
from replicad.postgres.statements import statement
from replicad.protocol.words import MAX_INTEGER
from replicad.sender.settings import SIGNS, Delivery, Routing, Secrets, SenderBounds, SenderSettings
from replicad.sender.signing import derive, standard_secret
from replicad.terminal.command import (
    ReplicadCommand,
    ReplicadGroup,
    ValueType,
    database_options,
    json_option,
    option,
    settings_options,
)
from replicad.terminal.database import database_url, on_database
from replicad.terminal.output import echo, print_rows
from replicad.tracing import exported

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from replicad.config.settings import DatabaseSettings
    from replicad.postgres.bridge import Database
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
@settings_options(Routing)
@settings_options(Delivery)
@settings_options(SenderBounds)
@settings_options(ClientSettings)
@settings_options(DatabaseSettings)
@click.pass_context
def command(ctx: click.Context, /, config: Path | None, moves: tuple[str, ...], **options: Any) -> None:
    """Deliver the facts of a stream, and updates, to many HTTP destinations, until SIGTERM or SIGINT.

    Each destination gets every fact that concerns it, in order, however long it or others are down. Outstanding items
    are in Postgres. So a sender may be killed at any moment: it continues where it was, and repeats a request with the
    same transaction id.

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
    from replicad.sender.intake import client_upstream

    sys.path.insert(0, os.getcwd())  # --route finds modules in the current folder, as `python -m` does
    tls = program.client.ssl_context()
    program.sender.delivery.ssl_context()  # an unusable file is refused before anything starts
    with database_url(program.database) as url:
        sender = Sender(
            program.sender,
            url=url,
            schema=program.database.stream_schema,
            open_upstream=client_upstream(
                str(program.client.server),
                None,
                name=f"sender-{program.sender.sender_name}",
                token=program.client.token,
                tls=tls,
            ),
            moves=dict(_move(text, program.sender.facts) for text in moves),
        )
        with exported("replicad-sender"):
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
@option("--sign", "form", type=click.Choice(SIGNS[1:]), help="The form for this --sign. Default: that of the file.")
@click.pass_context
def secret(ctx: click.Context, /, name: str, config: Path | None, form: str | None) -> None:
    """Print the secret that the receiver of destination NAME needs, made from the sender's secret.

    NAME is written as in rows and in --destinations, letter by letter. The sender's secret is that of the file or of
    REPLICAD_FEDERATION_SECRET, and never leaves the machine. With federation_secret_previous a second line has the
    secret that was made from it, which the receiver still accepts. With --sign standard it is `whsec_...`, as the
    libraries of Standard Webhooks want it.
    """
    config = config or (ctx.parent.params["config"] if ctx.parent is not None else None)
    content = read_file(config, Program) if config else {}
    secrets = load(Secrets, {}, os.environ, content)
    form = form or content.get("sign")
    if secrets.federation_secret is None:
        raise UsageError("there is no secret: federation_secret in the file, or REPLICAD_FEDERATION_SECRET")
    try:
        for master in filter(None, (secrets.federation_secret, secrets.federation_secret_previous)):
            made = derive(master, name)
            echo(standard_secret(made) if form == "standard" else made)
    except UnicodeEncodeError:
        raise UsageError(f"{name!r} is not UTF-8, so it is not the name of a destination") from None


def _move(text: str, facts: str) -> tuple[str, str]:
    """One value of --from: the stream and its token."""
    stream, _, token = text.rpartition("=")
    known = re.fullmatch(r"now|earliest|[0-9]{1,19}", token, re.IGNORECASE)
    if not known or (token.isdecimal() and int(token) > MAX_INTEGER):
        raise UsageError(
            f"--from: {text!r} does not fit; give a token, now or earliest, with STREAM= before it if needed"
        )
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


_IDS = ValueType(WHOLE, 1, MAX_INTEGER)
_WIDEST = 60  # characters of a destination in the table: a name may have a thousand, and would move all columns
_COLUMNS = ["id", "parked_at", "stream", "destination", "kind", "token", "replaying", "reason"]


@command.group("parked", cls=ReplicadGroup, short_help="List, send again or drop what destinations refuse.")
def parked() -> None:
    """List what destinations refuse, send it again, or drop it.

    A fact or an update is parked when its destination refuses it (400, 413, 414, 415, 422, 431) and accepts what comes
    after it, or when a row names a destination to which nothing can be sent. It stays until it is sent again or
    dropped.
    """


def _choice(function: Callable[..., None]) -> Callable[..., None]:
    for decorate in (
        database_options,
        option("--destination", metavar="NAME", help="Only items for this destination."),
        option("--stream", metavar="STREAM", help="Only items that senders of this stream of facts have parked."),
    ):
        function = decorate(function)
    return function


@parked.command("list")
@option("--limit", type=ValueType(WHOLE, 1, 1_000_000), default=1000, help="The oldest, so many. Default: 1000.")
@json_option
@_choice
def list_parked(stream: str | None, destination: str | None, limit: int, as_json: bool, **options: Any) -> None:
    """List the parked items, the oldest first; with --json also the bodies, and names in full."""

    async def work(db: Database, settings: DatabaseSettings) -> list[Any]:
        query = statement("federation_parked", settings.stream_schema)
        return await db.fetch(query, [], stream, destination, limit)

    rows = [dict(row) for row in on_database(options, work, part="federation")]
    columns = [*_COLUMNS, "body"] if as_json else _COLUMNS
    if not as_json:
        for row in rows:  # ids and tokens as other commands take them, without separators
            name = row["destination"]
            short = name if len(name) <= _WIDEST else f"{name[: _WIDEST - 3]}..."
            row.update(id=str(row["id"]), token=row["token"] and str(row["token"]), destination=short)
    print_rows(columns, rows, as_json=as_json, nothing="nothing that senders deliver is parked")


@parked.command("replay")
@click.argument("ids", type=_IDS, nargs=-1)
@option("--all", "everything", is_flag=True, help="All that is parked.")
@_choice
def replay(ids: tuple[int, ...], everything: bool, **options: Any) -> None:
    """Send parked items again: the items with these IDS, or the items that the options choose.

    The sender of a destination does it within its --sweep-interval (a minute), or when it starts. It delivers them
    after the outstanding items, in new transactions. An item that is refused again is parked again.
    """
    count = _change("federation_parked_want", ids, everything, options)
    echo(f"{count} to be sent again")


@parked.command("drop")
@click.argument("ids", type=_IDS, nargs=-1)
@option("--all", "everything", is_flag=True, help="All that is parked.")
@_choice
def drop(ids: tuple[int, ...], everything: bool, **options: Any) -> None:
    """Remove parked items for good: the items with these IDS, or the items that the options choose."""
    echo(f"{_change('federation_parked_drop', ids, everything, options)} dropped")


def _change(query: str, ids: tuple[int, ...], everything: bool, options: dict[str, Any]) -> int:
    stream, destination = options.pop("stream"), options.pop("destination")
    if not (ids or everything or stream or destination):
        raise UsageError("say which: IDS as `replicad sender parked list` shows them, --destination, --stream or --all")

    async def work(db: Database, settings: DatabaseSettings) -> int:
        found: int = await db.fetch_value(statement(query, settings.stream_schema), list(ids), stream, destination)
        return found

    return on_database(options, work, part="federation")


@command.command(
    "retire",
    short_help="Forget senders that are not meant to run any more.",
    epilog="""\b
Examples:
  replicad sender retire s1 --facts orders
  replicad sender retire SENDER... --facts STREAM --yes""",
)
@click.argument("names", metavar="NAME...", nargs=-1, required=True)
@option("--facts", "source", metavar="STREAM", required=True, help="Their stream of facts, or the first of --updates.")
@option("--yes", is_flag=True, help="Do it. Their waiting and parked items are lost.")
@database_options
def retire(names: tuple[str, ...], source: str, yes: bool, **options: Any) -> None:
    """Forget the senders NAME... of a stream, stopped for good, with all that they have stored.

    NAME... must be all senders of the stream, as in its --senders. To remove a sender and keep others, start the others
    with a --senders without it; they take over its destinations, and nothing is lost.
    """

    async def work(db: Database, settings: DatabaseSettings) -> str:
        return await retire_senders(db, settings.stream_schema, source, names, yes=yes)

    lost = on_database(options, work, part="federation", statement_timeout=None)
    echo(f"stream {source} has no sender any more; {lost} are forgotten")


async def retire_senders(db: Database, schema: str, source: str, names: Collection[str], *, yes: bool) -> str:
    """Forget the senders of a source (see SenderStore). `names` must be all of them. Returns the losses in words.

    Raises:
        UnknownStream: the source has no senders.
        SenderRefused: a sender is running, or other senders share the destinations with them.
        UsageError: it would be done, but for `yes`.
    """
    async with db.connection() as connection, connection.transaction():
        found = await connection.fetch(statement("federation_retire_hold", schema), source)
        _check_retired(source, set(names), {row["name"]: row["free"] for row in found})
        (row,) = await connection.fetch(statement("federation_retire_loses", schema), source)
        lost = f"{row['facts']:,} facts and {row['updates']:,} updates that wait, and {row['parked']:,} parked items"
        if not yes:
            raise UsageError(f"{lost} would be lost, and up to where {source} was read; to do it add --yes")
        await connection.execute(statement("federation_retire", schema), source)
    return lost


def _check_retired(source: str, wanted: set[str], known: Mapping[str, bool]) -> None:
    """Raises as `retire`. `known`: for each sender whether it is stopped."""
    if not known:
        raise UnknownStream(f"no sender of stream {source} is known")
    running = sorted(name for name, free in known.items() if not free)
    if running:
        raise SenderRefused(f"sender {', '.join(running)} of stream {source} is running; stop it first")
    if wanted != known.keys():
        others = sorted(known.keys() - wanted)
        if wanted < known.keys():
            raise SenderRefused(
                f"{', '.join(others)} shares the destinations of stream {source}: start it with --senders "
                f"{','.join(others)}, and it takes the others' place; or retire all of them: {', '.join(sorted(known))}"
            )
        raise SenderRefused(f"the senders of stream {source} are {', '.join(sorted(known))}")
