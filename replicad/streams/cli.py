"""`replicad streams`: register tables as streams, show them, trim them. replicad.streams decides what can be one.

`skip` and `alter` are about the content of a stream: skip a row, limit the length of rows, change the table.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import timedelta
from shlex import quote
from typing import TYPE_CHECKING, Any, TypeVar

import click

from replicad.config.declaring import BYTES, SECONDS, WHOLE, one_of, parsed, seconds
from replicad.daemon.figures import StateView
from replicad.errors import UsageError
from replicad.terminal.command import ReplicadCommand, ReplicadGroup, ValueType, database_options, json_option, option
from replicad.terminal.database import on_streams
from replicad.terminal.failures import say
from replicad.terminal.output import as_json_line, echo, print_rows

if TYPE_CHECKING:
    from replicad.postgres.bridge import Database
    from replicad.streams.lineage import Generation
    from replicad.streams.registry import Added, RecordedChanges, Registry, SenderAck, StreamWriter

_GENERATIONS = 5  # that `show` prints

_name = click.argument("name")

T = TypeVar("T")


def on_registry(options: dict[str, Any], work: Callable[[Registry], Awaitable[T]]) -> T:
    """`on_streams`, for work on the registry alone."""

    async def with_registry(db: Database, schema: str) -> T:
        from replicad.streams.registry import Registry

        return await work(Registry(db, schema))

    return on_streams(options, with_registry)


SHOWN = 2.0  # seconds between two lines of progress
OTHERS = 0.2  # seconds until the next look where another process is at the snapshot
FOREVER = float("inf")  # --keep forever
KEEP = parsed("keep", f"forever, or {SECONDS.expected}", lambda text: FOREVER if text == "forever" else seconds(text))

keep_option = option(
    "--keep",
    type=ValueType(KEEP),
    metavar="TIME|forever",
    help="Let daemons remove rows that were published longer ago than this, such as 7d; never rows that a known sender "
    "(`streams acks`) has not acknowledged. Default for a new stream: forever.",
)
keep_rows_option = option(
    "--keep-rows",
    type=ValueType(WHOLE),
    metavar="N",
    help="The same for rows that are not among the N newest. With --keep, rows stay that either of the two keeps.",
)

MAX_ROW_HELP = "Longest line that the stream may send, in bytes; it stops before a longer row. Default: 64 MiB."


@click.command(
    "skip",
    cls=ReplicadCommand,
    epilog="""\b
Examples:
  replicad streams skip events 120034
  replicad streams skip NAME TOKEN --yes --reason 'body is not UTF-8'
  replicad streams skip events --list
  replicad streams skip events 120034 --undo""",
)
@_name
@click.argument("token", required=False, type=ValueType(WHOLE))
@option("--yes", is_flag=True, help="Do it. Without it the command only prints what it would do.")
@option("--reason", metavar="TEXT", help="The reason. Default: what the daemons report about the row.")
@option("--undo", is_flag=True, help="Put the row back into the stream, for readers that have not passed it.")
@option("--list", "as_list", is_flag=True, help="List the skipped ids: by whom, when and why.")
@json_option
@database_options
def skip(
    *, name: str, token: int | None, yes: bool, reason: str | None, undo: bool, as_list: bool, as_json: bool,
    **options: Any,
) -> None:  # fmt: skip
    """Leave the row with the id TOKEN out of the stream NAME. Running daemons do so within about a second.

    Use it for a row that cannot be read, or is too long, and cannot be mended. The row stays in its table.
    """
    if as_list + undo + yes > 1:
        raise UsageError("--yes, --undo and --list exclude each other; give one of them")
    if as_json and not as_list:
        raise UsageError("--json belongs to --list")
    if as_list:
        if token is not None:
            raise UsageError("--list shows all skipped ids; leave TOKEN out")
        _list(name, as_json, options)
    elif token is None:
        raise UsageError("give the id of the row as TOKEN; `replicad streams show` says where the stream stops")
    elif undo:
        _undo(name, token, options)
    elif not yes:
        published = on_registry(options, _position_of(name))
        raise UsageError(
            f"rows with id {token} would be left out of stream {name}: no reader gets them from now on. "
            f"{_consequence(token, published)} To do it, add --yes"
        )
    else:
        published = on_streams(options, _skip(name, token, reason))
        echo(f"stream {name}: id {token} is skipped. {_consequence(token, published)}")


@click.command(
    "alter",
    cls=ReplicadCommand,
    epilog="""\b
Examples:
  replicad streams alter events --max-row 16MiB
  replicad streams alter NAME --table SCHEMA.TABLE --same-rows
  replicad streams alter NAME --sequence-changed same""",
)
@_name
@option("--max-row", type=ValueType(BYTES), metavar="BYTES", help=MAX_ROW_HELP)
@keep_option
@keep_rows_option
@option(
    "--table",
    metavar="SCHEMA.TABLE",
    help="Go on with this table: readers get all of its rows. If it is the table that the stream has already, note its "
    "present name, and that its sequence feeds what it feeds now.",
)
@option(
    "--same-rows",
    is_flag=True,
    help="The new table has the rows of the old table, up to the published position: readers continue there. Refused "
    "if the ids in the two tables differ.",
)
@option(
    "--sequence",
    metavar="SCHEMA.NAME",
    help="With --table: the sequence of the ids, if no column default draws from it.",
)
@option(
    "--positions-table",
    metavar="SCHEMA.TABLE",
    help="With --table, for positions_table: where the writers publish from now on.",
)
@option(
    "--sequence-changed",
    type=ValueType(one_of("same", "restarted")),
    help="What a change of the sequence did, where the stream asks for it. same: every row has the id that it had, as "
    "after ALTER COLUMN ... TYPE; readers go on where they are. restarted: ids began again; readers get all rows.",
)
@database_options
def alter(
    *,
    name: str,
    max_row: int | None,
    keep: float | None,
    keep_rows: int | None,
    table: str | None,
    same_rows: bool,
    sequence: str | None,
    positions_table: str | None,
    sequence_changed: str | None,
    **options: Any,
) -> None:
    """Change the table of the stream NAME, or the longest row that it may have, or say what happened to its sequence.
    Running daemons take it over within a second.
    """
    if (max_row, table, sequence_changed, keep, keep_rows) == (None,) * 5:
        raise UsageError(
            "give --max-row, --keep, --keep-rows, --table or --sequence-changed; `replicad streams show` prints the "
            "present values"
        )
    if table is None and (same_rows or sequence is not None or positions_table is not None):
        raise UsageError("--same-rows, --sequence and --positions-table belong to --table")

    if table is not None:
        notes = on_registry(
            options,
            lambda registry: registry.alter_table(
                name, table, same_rows=same_rows, sequence=sequence, positions_table=positions_table
            ),
        )
        echo(f"stream {name}: its table is {table}")
        for note in notes:
            echo(f"note: {note}")
    if sequence_changed is not None:
        on_registry(options, lambda registry: registry.sequence_changed(name, sequence_changed))
        goes = "readers go on where they are" if sequence_changed == "same" else "readers get all rows anew"
        echo(f"stream {name}: {goes}")
    if max_row is not None:
        on_registry(options, lambda registry: registry.set_max_row(name, max_row))
        echo(f"stream {name}: rows have at most {max_row} bytes")
    if keep is not None or keep_rows is not None:
        echo(on_registry(options, _keep(name, keep, keep_rows)))


def _keep(name: str, keep: float | None, keep_rows: int | None) -> Callable[[Registry], Awaitable[str]]:
    from replicad.streams.picture import kept_words

    async def work(registry: Registry) -> str:
        age = None if keep in (None, FOREVER) else timedelta(seconds=keep or 0)
        await registry.set_keep(name, keep_for=age, keep_rows=keep_rows)
        rules = kept_words(age, keep_rows)
        return f"stream {name}: daemons remove no rows" if rules is None else f"stream {name}: daemons keep {rules}"

    return work


def _position_of(name: str) -> Any:
    async def work(registry: Registry) -> int | None:
        await registry.load_stream(name)
        found = (await registry.published()).get(name)
        return None if found is None else found.position

    return work


def _skip(name: str, token: int, reason: str | None) -> Any:
    async def work(db: Database, schema: str) -> int | None:
        from replicad.streams.daemons import DaemonReports
        from replicad.streams.registry import Registry

        why = reason
        if why is None:
            known = await DaemonReports(db, schema).troubles()
            about = (one for one in known if (one.kind, one.name) == ("stream", name) and f" id {token} " in one.reason)
            why = next((one.reason for one in about), "")
        return await Registry(db, schema).skip(name, token, why)

    return work


def _undo(name: str, token: int, options: dict[str, Any]) -> None:
    if on_registry(options, lambda registry: registry.unskip(name, token)):
        echo(f"stream {name}: id {token} belongs to it again; readers that have passed it do not get it")
    else:
        echo(f"stream {name}: id {token} is not skipped; `replicad streams skip {quote(name)} --list` shows what is")


def _list(name: str, as_json: bool, options: dict[str, Any]) -> None:
    found = on_registry(options, lambda registry: registry.skips(name))
    rows = [{"id": one.id, "by": one.by, "at": one.at, "reason": one.reason} for one in found]
    print_rows(["id", "by", "at", "reason"], rows, as_json=as_json, nothing=f"no id of stream {name} is skipped")


def _consequence(token: int, published: int | None) -> str:
    if published is not None and token <= published:
        return f"The stream was published up to {published}: readers that have passed {token} may have got the row."
    return "The stream has not reached it yet, so no reader has got the row."


def _names(words: str | None) -> tuple[str, ...] | None:
    """The columns in a list with commas. Raises UsageError for an empty name."""
    if words is None:
        return None
    found = tuple(word.strip() for word in words.split(","))
    if "" in found:
        raise UsageError(f"{words!r} has an empty name; write the columns with commas between them: a,b")
    return found


def _recorded(
    *,
    key: str | None,
    columns: str | None,
    where: str | None,
    old: bool,
    unchanged: str | None,
    filters: tuple[str, ...],
) -> RecordedChanges:
    """What `streams add --changes` records, from its options."""
    from replicad.streams.registry import RecordedChanges

    by = tuple(name for words in filters for name in _names(words) or ())
    return RecordedChanges(_names(key), _names(columns), where, old, unchanged == "omit", by)


async def _send_snapshots(registry: Registry, name: str, first: int) -> int:
    """Send the snapshots of a stream from this one on, or wait until other processes have; returns their rows."""
    import trio

    stream = await registry.load_stream(name)
    shown = trio.current_time()
    while True:
        known = [one for one in await registry.snapshots() if one.stream == stream.number and one.number >= first]
        rows = sum(one.rows for one in known)
        if all(one.finished_at is not None for one in known):
            return rows
        if trio.current_time() - shown >= SHOWN:
            shown = trio.current_time()
            say(f"{rows:,} rows")
        step = await registry.snapshot_step(stream.number)
        if step is None:
            await trio.sleep(OTHERS)
        elif step.waits_for:
            waits = ", ".join(step.waits_for)
            say(f"replicad: waiting for open transactions that have written to {stream.source} or lock it: {waits}")


@click.command(
    "snapshot",
    cls=ReplicadCommand,
    epilog="""\b
Examples:
  replicad streams snapshot orders
  replicad streams snapshot orders --where "t.customer_id = 42"
  replicad streams snapshot orders --anew""",
)
@click.argument("name")
@option("--where", metavar="SQL", help="Only the rows that meet this condition on the table, which is called t.")
@option(
    "--anew",
    is_flag=True,
    help="Send a TRUNCATE first, so that readers drop what they have. Enables the triggers, if they were off.",
)
@database_options
def snapshot(name: str, where: str | None, anew: bool, **options: Any) -> None:
    """Send the rows that the table has now, in the stream of changes NAME, beside its writers.

    They come as changes with the operation r (read), in the order of the key. A reader that applies all changes in
    their order has the table's rows afterwards. If the command is interrupted, a running daemon goes on, or the command
    when it is called again.
    """

    async def work(db: Database, schema: str) -> tuple[int, bool]:
        from replicad.streams.registry import Registry

        registry = Registry(db, schema)
        stream = await registry.load_stream(name)
        known = [one for one in await registry.snapshots() if one.stream == stream.number]
        left = [one.number for one in known if one.finished_at is None]
        if left and where is None and not anew:
            return await _send_snapshots(registry, name, left[0]), True
        number = await registry.request_snapshot(name, where=where, anew=anew)
        return await _send_snapshots(registry, name, number), False

    rows, resumed = on_streams(options, work)
    echo(f"stream {name}: {'the unfinished snapshot went on and' if resumed else 'the snapshot'} has {rows:,} rows")


@click.group("streams", cls=ReplicadGroup, short_help="Register tables as streams, show and trim them.")
def command() -> None:
    """Register tables as streams, show and trim them. A stream is a table whose id comes from a sequence.

    \b
      replicad streams add events --table public.events --id stream_ordering
      replicad streams list
      replicad tail events
    """


command.add_command(skip)
command.add_command(alter)
command.add_command(snapshot)


@command.command(
    "add",
    epilog="""\b
Examples:
  replicad streams add events --table public.events --id stream_ordering
  replicad streams add events --table public.events --id id \\
    --instance-column writer --row 'json_build_array(t.event_id, t.room_id)'
  replicad streams add orders --table public.orders --changes --snapshot""",
)
@_name
@option("--table", required=True, metavar="SCHEMA.TABLE", help="Table that holds the rows, named as in SQL.")
@option("--id", "id_column", metavar="COLUMN", help="Bigint column whose values come from a sequence.")
@option(
    "--changes",
    is_flag=True,
    help="Send each INSERT, UPDATE, DELETE and TRUNCATE of the table, with its rows. Makes triggers on the table, and "
    "needs no --id.",
)
@option("--key", metavar="COLUMNS", help="With --changes: the columns that name a row. Default: the primary key.")
@option("--columns", metavar="COLUMNS", help="With --changes: send only these columns and the key. Default: all.")
@option("--where", metavar="SQL", help="With --changes: only rows that meet this condition on the table, called t.")
@option("--old", is_flag=True, help="With --changes: send the row before an UPDATE or DELETE too.")
@option(
    "--unchanged",
    type=ValueType(one_of("send", "omit")),
    help="With --changes: omit leaves large columns out of an UPDATE that did not change them. Default: send.",
)
@option(
    "--filter",
    "filters",
    multiple=True,
    metavar="COLUMNS",
    help="With --changes: readers may ask for the rows with one value of this column.",
)
@option("--snapshot", is_flag=True, help="With --changes: send the rows that the table has already.")
@option("--instance-column", metavar="COLUMN", help="Column that names the writer of a row. Default: one writer.")
@option(
    "--row",
    metavar="SQL",
    help="Expression over the table, called t, that yields the row as JSON. Default: all columns.",
)
@option(
    "--method",
    type=ValueType(one_of("lock_watch", "reservation", "positions_table")),
    default="lock_watch",
    show_default=True,
    metavar="METHOD",
    help="How positions are found. lock_watch needs no change in the writers. reservation is for ids that are taken "
    "before their rows are inserted. positions_table reads what the writers publish.",
)
@option("--positions-table", metavar="SCHEMA.TABLE", help="With positions_table: where the writers publish.")
@option("--sequence", metavar="SCHEMA.NAME", help="Sequence of the ids, where it does not belong to the column.")
@option("--max-row", type=ValueType(BYTES), default=64 << 20, metavar="BYTES", help=MAX_ROW_HELP)
@keep_option
@keep_rows_option
@database_options
def add(
    *, name: str, table: str, id_column: str | None, instance_column: str | None, row: str | None, method: str,
    positions_table: str | None, sequence: str | None, max_row: int, changes: bool, key: str | None,
    columns: str | None, where: str | None, old: bool, unchanged: str | None, filters: tuple[str, ...], snapshot: bool,
    keep: float | None, keep_rows: int | None,
    **options: Any,
) -> None:  # fmt: skip
    """Make a table the stream NAME, with no change to the application that writes it.

    Without --changes each row is sent once, after its INSERT; an UPDATE or DELETE of it sends nothing. If the stream is
    registered already with the same arguments, nothing is changed.
    """
    if changes:
        if (id_column, instance_column, row, positions_table, sequence) != (None,) * 5 or method != "lock_watch":
            raise UsageError(
                "--id, --instance-column, --row, --method, --positions-table and --sequence do not go with --changes: "
                "the changes are recorded in a table of replicad"
            )
    elif id_column is None:
        raise UsageError(
            "give --id, the column whose values come from a sequence, to send the rows that are inserted; or --changes "
            "to send each INSERT, UPDATE and DELETE"
        )
    elif key or columns or where or old or unchanged or filters or snapshot:
        raise UsageError("--key, --columns, --where, --old, --unchanged, --filter and --snapshot belong to --changes")

    async def work(registry: Registry) -> tuple[Added, bool]:
        if id_column is None:
            wanted = _recorded(key=key, columns=columns, where=where, old=old, unchanged=unchanged, filters=filters)
            added = await registry.add_changes(name, table, wanted, max_row=max_row)
            if snapshot and added.new:
                await registry.request_snapshot(name)
            return added, await registry.daemon_connected()
        added = await registry.add(
            name, table, id_column, instance_column=instance_column, row=row, method=method,
            positions_table=positions_table, sequence=sequence, max_row=max_row,
        )  # fmt: skip
        return added, await registry.daemon_connected()

    added, daemon = on_registry(options, work)
    kept = None if keep is None and keep_rows is None else on_registry(options, _keep(name, keep, keep_rows))
    done = f"stream {added.stream.name} {'registered' if added.new else 'is registered already, just so'}"
    if daemon:
        echo(f"{done}; the daemons that are running serve it within 1 s")
    else:
        echo(f"{done}; no daemon is connected to this database: start `replicad serve`")
    if kept is not None:
        echo(kept)
    for note in added.notes:
        echo(f"note: {note}")
    if not changes and added.new:
        echo(
            "note: each row is sent once, after its INSERT. UPDATE and DELETE send nothing; --changes would record them"
        )
    if snapshot and added.new:
        rows = on_registry(options, lambda registry: _send_snapshots(registry, name, 1))
        echo(f"the snapshot has {rows:,} rows")


@command.command("list")
@json_option
@database_options
def list_streams(as_json: bool, **options: Any) -> None:
    """List the streams: published position, lag, the transaction that holds it back, and the problem.

    The state is ok or a short code. The problem names the fault and the remedy. The position is the id up to which the
    running daemons have published. The lag is the number of committed rows above it.
    """

    from replicad.streams import status
    from replicad.streams.picture import COLUMNS

    found = on_streams(options, lambda db, schema: status.overview(db, schema=schema))
    if as_json:
        rows = [COLUMNS.fields(StateView.SHOW, one) for one in found.streams]
    else:
        rows = [COLUMNS.texts(StateView.LIST, one) for one in found.streams]
    columns = [] if as_json else COLUMNS.headings(StateView.LIST, rows)
    nothing = "there are no streams; make one: replicad streams add NAME --table SCHEMA.TABLE --id COLUMN"
    print_rows(columns, rows, as_json=as_json, nothing=nothing)
    for note in found.notes if rows else ():
        say(f"note: {note}")


@command.command("show")
@_name
@json_option
@database_options
def show(name: str, as_json: bool, **options: Any) -> None:
    """Show all details of the stream NAME.

    The generations are the stretches of its history, the present one first: the start of each, its reason, and the
    position up to which its rows are the same as in the generation before (a token; docs/positions.md).
    """

    from replicad.streams import status
    from replicad.streams.picture import COLUMNS, StreamPicture
    from replicad.streams.registry import Registry

    async def look(db: Database, schema: str) -> tuple[StreamPicture, tuple[Generation, ...]]:
        found = await status.show(db, name, schema=schema)
        lineages = await Registry(db, schema).lineages(name)
        return found, lineages[name].generations[::-1] if name in lineages else ()

    found, generations = on_streams(options, look)
    details = COLUMNS.fields(StateView.SHOW, found)
    if as_json:
        echo(as_json_line({**details, "generations": [_generation(one) for one in generations]}))
        return
    for key, value in details.items():
        if value not in (None, {}, []):
            shown = "  ".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else value
            echo(f"{key.replace('_', ' '):<16}{shown}")
    for number, one in enumerate(generations[:_GENERATIONS]):
        began = f"{one.id} since {one.created_at:%Y-%m-%d %H:%M:%S} ({one.reason}), shared up to {one.began}"
        echo(f"{'' if number else 'generations':<16}{began}")
    if len(generations) > _GENERATIONS:
        echo(f"{'':<16}and {len(generations) - _GENERATIONS:,} before; --json shows all")


@command.command("remove")
@_name
@option("--yes", is_flag=True, help="Do it. Without it the command only prints what it would do.")
@database_options
def remove(name: str, yes: bool, **options: Any) -> None:
    """Unregister the stream NAME. Its table and rows stay; of a stream of changes, triggers and recorded changes go.

    Its readers are disconnected, and their tokens are of no use for a stream that is added under this name later.
    """

    if not yes:
        published = on_registry(options, _position_of(name))
        upto = "" if published is None else f", which is published up to {published}"
        raise UsageError(
            f"stream {name}{upto}, would be unregistered: readers are disconnected, their tokens and what senders have "
            "acknowledged are lost, and after another `streams add` readers get all rows again. Its table and rows "
            "stay. To do it, add --yes"
        )

    async def work(registry: Registry) -> str | None:
        stream = await registry.load_stream(name)
        await registry.remove(name)
        return stream.source

    source = on_registry(options, work)
    if source is None:
        echo(f"stream {name} is removed; no table was changed")
    else:
        echo(f"stream {name} is removed, with its triggers on {source} and the changes that it had recorded")


@command.command(
    "trim",
    epilog="""\b
Examples:
  replicad streams trim NAME --older-than 7d
  replicad streams trim NAME --before 120000
  replicad streams trim NAME --acked""",
)
@_name
@option("--before", metavar="TOKEN", help="Remove the rows up to this token.")
@option(
    "--older-than",
    type=ValueType(SECONDS),
    help="Remove rows that were published longer ago than this, such as 90m or 7d.",
)
@option(
    "--acked",
    is_flag=True,
    help="Remove rows that every known sender has acknowledged; `streams acks` lists the senders.",
)
@database_options
def trim(name: str, before: str | None, older_than: float | None, acked: bool, **options: Any) -> None:
    """Delete the oldest rows of the stream NAME from its table, in small transactions.

    A reader that subscribes with an older token afterwards is refused with token_expired.
    """
    age = None if older_than is None else timedelta(seconds=older_than)
    if sum((before is not None, age is not None, acked)) != 1:
        raise UsageError("give --before, --older-than or --acked, one of them")

    async def work(registry: Registry) -> tuple[int, int | None, list[SenderAck]]:
        senders = await registry.acks(name) if acked else []
        done = await registry.trim(name, before=before, older_than=age, acked=acked)
        return done.rows, done.upto, senders

    rows, upto, senders = on_registry(options, work)
    echo(f"{rows:,} rows removed" + ("" if upto is None else f"; the stream begins after {upto}"))
    if acked:
        echo(_held_back(name, senders))


@command.command(
    "acks",
    epilog="""\b
Examples:
  replicad streams acks events
  replicad streams acks NAME --forget INSTANCE""",
)
@_name
@option(
    "--forget",
    metavar="INSTANCE",
    help="Remove this sender from the list, so that it no longer holds `trim --acked` back.",
)
@json_option
@database_options
def list_acks(name: str, forget: str | None, as_json: bool, **options: Any) -> None:
    """List the senders of the stream NAME, and up to which token each has acknowledged it by FEDERATION_ACK."""

    async def work(registry: Registry) -> tuple[bool, list[SenderAck]]:
        forgotten = forget is not None and await registry.forget_acks(name, forget)
        return forgotten, await registry.acks(name)

    forgotten, senders = on_registry(options, work)
    if forget is not None and not forgotten:
        say(f"replicad: {forget!r} has acknowledged nothing of {name}, so there is nothing to forget")
    rows = [{"instance": one.instance, "token": one.token, "acked_at": one.acked_at} for one in senders]
    print_rows(["instance", "token", "acked_at"], rows, as_json=as_json, nothing=f"no sender has acknowledged {name}")


@command.command(
    "writers",
    epilog="""\b
Examples:
  replicad streams writers events
  replicad streams writers NAME --retire INSTANCE --retire INSTANCE
  replicad streams writers NAME --retire-idle-since TOKEN""",
)
@_name
@option("--retire", multiple=True, metavar="INSTANCE", help="Retire this writer. May be given several times.")
@option(
    "--retire-idle-since",
    type=ValueType(WHOLE),
    metavar="TOKEN",
    help="Retire all writers that have no row above this token.",
)
@option(
    "--quiet-for",
    type=ValueType(SECONDS),
    default="60",  # as QUIET of the registry
    show_default=True,
    help="Retire only writers that have written nothing for this time.",
)
@json_option
@database_options
def list_writers(
    *,
    name: str,
    retire: tuple[str, ...],
    retire_idle_since: int | None,
    quiet_for: float,
    as_json: bool,
    **options: Any,
) -> None:
    """List the writers of the stream NAME, or retire some of them.

    The daemon no longer lists a retired writer to readers. The writer keeps its number, so tokens stay valid. When it
    writes again, it is listed again.
    """
    if retire and retire_idle_since is not None:
        raise UsageError("give --retire or --retire-idle-since, one of them")

    async def work(registry: Registry) -> tuple[int | None, list[StreamWriter]]:
        names = list(retire)
        if retire_idle_since is not None:
            names = await registry.idle_writers(name, retire_idle_since)
        done = None
        if names or retire_idle_since is not None:
            done = await registry.retire_writers(name, names, quiet=quiet_for)
        return done, await registry.writers(name)

    done, found = on_registry(options, work)
    if done is not None and not as_json:
        echo(f"{done:,} writers retired; running daemons do the same within about a second")
        return
    rows = [_writer(writer) for writer in found]
    columns = ["number", "writer", "position", "state", "retired_at"]
    print_rows(columns, rows, as_json=as_json, nothing=f"stream {name} has no writers yet")


def _writer(writer: StreamWriter) -> dict[str, Any]:
    return {
        "number": writer.number,
        "writer": writer.name,
        "position": writer.position,
        "state": "retired" if writer.retired else "listed",
        "retired_at": writer.retired_at,
    }


def _held_back(name: str, senders: list[SenderAck]) -> str:
    """The sender that kept more rows from being removed: the sender that is furthest behind."""
    if not senders:
        return f"no sender has acknowledged {name} yet"
    last = senders[0]
    if last.token is None:
        return f"{last.instance} has acknowledged nothing, so nothing is removed"
    return f"{last.instance} is the furthest behind: it has acknowledged {last.token:,}, at {last.acked_at:%F %T} UTC"


def _generation(one: Generation) -> dict[str, Any]:
    return {
        "id": one.id,
        "began_at": one.created_at.isoformat(),
        "reason": one.reason,
        "shared_upto": str(one.began),
    }
