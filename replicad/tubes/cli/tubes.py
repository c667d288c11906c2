"""`replicad tubes`: create, list and drop tubes, attach and detach tables, and the commands on the pods of tubes."""

from __future__ import annotations

import itertools
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from shlex import quote
from typing import Any

import click

from replicad.config.declaring import WHOLE, one_of
from replicad.errors import TubeRefused, UnknownTube, UsageError
from replicad.terminal.command import F, ReplicadGroup, ValueType, json_option, option
from replicad.terminal.failures import say
from replicad.terminal.output import echo, print_rows
from replicad.tubes.cli.islands import (
    NoIndex,
    Tubes,
    is_pattern,
    island_options,
    matches,
    on_islands,
    parse_shards,
    with_island,
)
from replicad.tubes.cli.pg_tube import group as pg_tube
from replicad.tubes.keys import KINDS, TEXT, Key, parse_key
from replicad.tubes.shards import ShardSet

on_fork_option = option(
    "--on-fork",
    metavar="report|backfill",
    type=ValueType(one_of("report", "backfill")),
    help="What to do when a failover or a restore has made touches unknown that readers have passed on: only report it "
    "as a fault of the tube, or backfill its tables too. Default for a new tube: report.",
)


@click.group("tubes", cls=ReplicadGroup, short_help="Create, fill and inspect tubes.")
def command() -> None:
    """Create, fill and inspect tubes: queues of the ids of touched rows.

    \b
      replicad tubes create cities --partitions 4
      replicad tubes attach cities cities --shard all
      replicad tubes backfill cities
      replicad tubes stats
    """


@command.command("create")
@click.argument("tube")
@option(
    "--partitions",
    metavar="N",
    type=ValueType(WHOLE),
    default=1,
    show_default=True,
    help="How many workers can share the tube. Each shard belongs to one partition.",
)
@option(
    "--predicate",
    metavar="SQL",
    help="Record only rows for which this is true. It may use the columns of the attached tables.",
)
@option(
    "--keys",
    metavar="bigint|text",
    type=ValueType(one_of(*KINDS)),
    help="Kind of the ids: bigint for tables whose key is one integer column, text for tables with any keys. Default: "
    "the first attached table decides.",
)
@on_fork_option
@island_options
def create(
    tube: str, partitions: int, predicate: str | None, keys: str | None, on_fork: str | None, **options: Any
) -> None:
    """Create TUBE, or change an existing one to these options."""

    async def work(tubes: Tubes) -> None:
        await tubes.change(f"tube {tube}", "tube_ensure_exists", tube, partitions, predicate, keys)
        if on_fork is not None:
            await tubes.value("tube_on_fork", tube, on_fork)

    on_islands(options, work)
    echo(f"tube {tube}: {partitions} partition{'s' if partitions != 1 else ''}")


@command.command("alter")
@click.argument("tube")
@option(
    "--partitions", metavar="N", type=ValueType(WHOLE), help="The new number of partitions. Workers must claim again."
)
@option("--predicate", metavar="SQL", help="The new predicate.")
@option("--no-predicate", is_flag=True, help="Remove the predicate: record every row.")
@on_fork_option
@island_options
def alter(
    *, tube: str, partitions: int | None, predicate: str | None, no_predicate: bool, on_fork: str | None, **options: Any
) -> None:
    """Change the partitions or the predicate of TUBE, or what happens after a fork of its history.

    Pods and attached tables are kept.
    """
    if predicate is not None and no_predicate:
        raise UsageError("--predicate and --no-predicate are both given; give one of them")
    if partitions is None and predicate is None and not no_predicate and on_fork is None:
        raise UsageError("nothing to change; give --partitions, --predicate, --no-predicate or --on-fork")

    async def work(tubes: Tubes) -> int:
        before = await _row_of_tube(tubes, tube)
        wanted = before["partitions"] if partitions is None else partitions
        kept = None if no_predicate else predicate or before["predicate"]
        await tubes.change(f"tube {tube}", "tube_ensure_exists", tube, wanted, kept)
        if on_fork is not None:
            await tubes.value("tube_on_fork", tube, on_fork)
        return int(wanted)

    for _, wanted in on_islands(options, work):
        echo(f"tube {tube}: {wanted} partition{'s' if wanted != 1 else ''}")


@command.command("drop")
@click.argument("tube")
@option("--yes", is_flag=True, help="Drop it even if it has pods that were not acknowledged.")
@island_options
def drop(tube: str, yes: bool, **options: Any) -> None:
    """Detach all tables of TUBE and drop it.

    Its pods, its leases and its parked ids are lost.
    """

    async def work(tubes: Tubes) -> None:
        await _row_of_tube(tubes, tube)
        held = [
            (row["inc_count"] or 0) + (row["backfill_count"] or 0) for row in await tubes.rows("tube_stats_of", tube)
        ]
        if sum(held) and not yes:
            raise UsageError(f"tube {tube} holds {sum(held):,} pods that were not acknowledged; to lose them add --yes")
        for row in await tubes.rows("tube_list"):  # one at a time, so that no lock is kept while another is waited for
            if row["tube"] == tube and row["tbl"] is not None:
                await tubes.change(f"detach {row['tbl']}", "tube_table_ensure_detached", tube, row["tbl"])
        await tubes.change(f"drop {tube}", "tube_ensure_absent", tube)

    on_islands(options, work)
    echo(f"tube {tube} is dropped")


@command.command("pause")
@click.argument("tube")
@option("--reason", metavar="TEXT", help="Why, for those who see it: up to 200 characters.")
@island_options
def pause(tube: str, reason: str | None, **options: Any) -> None:
    """Give no reader the pods of TUBE until `resume`.

    Changes are recorded as before, workers keep their leases and wait, and pods that a worker has are acknowledged as
    usual, so nothing is lost. Daemons notice it within a second. The state of the tube is `paused` in all lists.
    Readers that do not go through a daemon (SQL, `pg-tube`) are not held.
    """

    async def work(tubes: Tubes) -> None:
        await tubes.value("tube_pause", tube, reason)

    on_islands(options, work)
    echo(f"tube {tube} is paused; it goes on with: replicad tubes resume {quote(tube)}")


@command.command("resume")
@click.argument("tube")
@island_options
def resume(tube: str, **options: Any) -> None:
    """Give readers the pods of a paused TUBE again."""

    async def work(tubes: Tubes) -> bool:
        return bool(await tubes.value("tube_resume", tube))

    paused = any(was for _, was in on_islands(options, work))
    echo(f"tube {tube} goes on" if paused else f"tube {tube} was not paused")


@command.command("list")
@click.argument("table", required=False)
@json_option
@island_options
def list_tubes(table: str | None, as_json: bool, **options: Any) -> None:
    """List the tubes and the tables attached to them.

    With TABLE (schema.table): only the tubes of that table. The state is ok, or a fault of the tube: its table was
    dropped or may not be read, or a fault that a running daemon reports.
    """

    async def work(tubes: Tubes) -> list[dict[str, Any]]:
        states = await tubes.states()
        found = await tubes.rows("tube_list", *([table] if table else []))
        running = await tubes.backfills()
        keys = {(row["tube"], str(row["tbl"])): row["key"] for row in found}
        slow = {
            (one.table, one.column): str(one)
            for one in await tubes.without_index(
                [(row["tbl"], row["order_col"], keys.get((row["tube"], row["tbl"]), [])) for row in running]
            )
        }
        backfills = {(row["tube"], row["tbl"]): _backfill(row, slow) for row in running}
        return [
            {
                **dict(row),
                "backfill": backfills.get((row["tube"], str(row["tbl"]))),
                "state": states.get(row["tube"], "ok"),
            }
            for row in found
        ]

    rows = with_island(on_islands(options, work))
    columns = [
        "tube",
        "partitions",
        "predicate",
        "tbl",
        "shard",
        "key",
        "table_predicate",
        "routing",
        "unattached",
        "backfill",
        "state",
    ]
    optional = {"predicate", "table_predicate", "routing", "unattached", "backfill"}
    shown = [name for name in columns if name not in optional or any(row[name] for row in rows)]
    if all(row["key"] in (None, ["id"]) for row in rows):
        shown.remove("key")
    nothing = "no tube has this table" if table else "there are no tubes; make one: replicad tubes create NAME"
    print_rows([*(["island"] if rows and "island" in rows[0] else []), *shown], rows, as_json=as_json, nothing=nothing)


@command.command(
    "attach",
    epilog="""\b
Examples:
  replicad tubes attach films public.film
  replicad tubes attach films public.film --key film_id
  replicad tubes attach shop 'public.*' --exclude 'public.audit_*'
  replicad tubes attach cities public.cities --shard 7
  replicad tubes attach cities cities --shard 1-100
  replicad tubes attach cities public.towns --routing 'region_id' \\
    --predicate 'population > 0'""",
)
@click.argument("tube")
@click.argument("tables", metavar="TABLE...", nargs=-1, required=True)
@option(
    "--shard",
    metavar="N|N-M|all",
    help="Shard of the rows. For a TABLE without a schema: use the table of that name in every schema whose name ends "
    "in any of these numbers, if there are such tables. Default: the number at the end of the name of the table's "
    "schema, or the present shard, or the lowest number that no other table of TUBE has.",
)
@option(
    "--predicate",
    metavar="SQL",
    help="Record only rows for which this is true, in addition to the tube's own predicate.",
)
@option(
    "--routing", metavar="SQL", help="Expression on a row that yields its shard, in place of one shard for the table."
)
@option(
    "--key",
    metavar="COLUMN,...",
    help="The columns that name a row. Default: the present key of an attached table, or the primary key, or `id`.",
)
@option(
    "--exclude",
    metavar="PATTERN",
    multiple=True,
    help="Leave out tables that a pattern in TABLE names. May be given several times.",
)
@island_options
def attach(
    *, tube: str, tables: tuple[str, ...], shard: str | None, predicate: str | None, routing: str | None,
    key: str | None, exclude: tuple[str, ...], **settings: Any,
) -> None:  # fmt: skip
    """Record changes of TABLE in TUBE from now on.

    TABLE may be a pattern such as 'public.*'. Then each table that it names gets a shard of its own, which says of
    which table an id is, so TUBE carries many tables. A table keeps its shard when it is attached again.

    A key that is one integer column becomes ids of kind bigint. Any other key, of any types, becomes texts; then TUBE
    must have keys of kind text, which the first table of a tube decides. Existing rows are not recorded; use `backfill`
    for them.
    """
    chosen = None if shard is None else parse_shards(shard)
    wanted = None if key is None else key.split(",")
    several = len(settings.get("database") or ()) > 1
    many = any(map(is_pattern, tables))
    given = [name for name, value in (("--shard", shard), ("--routing", routing), ("--key", key)) if value is not None]
    if many and given:
        raise UsageError(
            f"{given[0]} cannot be given with a pattern: each table gets a shard of its own, and has its key"
        )
    if many and several:
        raise UsageError("--database is given several times; the tables of a pattern are of one database")
    if exclude and not many:
        raise UsageError("--exclude needs a pattern such as 'public.*' as TABLE")

    async def work(tubes: Tubes) -> tuple[list[str], str | None]:
        if many:
            return await attach_many(tubes, tube, tables, exclude, predicate), None
        named = await tubes.find_tables(tables, chosen)
        for one in named:
            if several and one.shard is None and routing is None:
                await _refuse_unknown_shard(tubes, one.name)
            options = one.shard, predicate, routing, wanted
            await tubes.change(f"attach {one.name}", "tube_table_ensure_attached", tube, one.name, *options)
        return [one.name for one in named], warning_of_mixed(await tubes.rows("tube_list"), tube)

    for island, (done, mixed) in on_islands(settings, work):
        _print_each("attached to", tube, island, done)
        if mixed is not None:
            say(mixed)


async def attach_many(
    tubes: Tubes, tube: str, patterns: Sequence[str], exclude: Sequence[str], predicate: str | None = None
) -> list[str]:
    """Attach all tables that the patterns name, each with a shard of its own; returns them.

    Raises:
        TubeRefused: nothing matches, or a table has no key. Then no table was attached.
    """
    found = await tubes.match_tables(patterns, exclude)
    row = await _row_of_tube(tubes, tube)
    if row["tbl"] is None and row["keys"] != TEXT and any(one.needs_text for one in found):
        await tubes.change(f"tube {tube}", "tube_ensure_exists", tube, row["partitions"], row["predicate"], TEXT)
    for one in found:
        shard = await tubes.value("tube_shard_ensure", tube, one.tbl)
        await tubes.change(f"attach {one.tbl}", "tube_table_ensure_attached", tube, one.tbl, shard, predicate)
    return [one.tbl for one in found]


async def _refuse_unknown_shard(tubes: Tubes, table: str) -> None:
    """On several databases each table needs a shard that no table of another database has."""
    if await tubes.value("tube_infer_shard", table) is None:
        raise TubeRefused(
            f"no number ends the name of the schema of {table}, and tables of several databases must have different "
            "shards: attach it with one --database and --shard N at a time"
        )


@command.command("detach")
@click.argument("tube")
@click.argument("tables", metavar="TABLE...", nargs=-1, required=True)
@option(
    "--shard",
    metavar="N|N-M|all",
    help="Use the table TABLE in every schema whose name ends in any of these numbers.",
)
@island_options
def detach(tube: str, tables: tuple[str, ...], shard: str | None, **options: Any) -> None:
    """Stop recording changes of TABLE in TUBE.

    TABLE may be a pattern such as 'public.*'. Pods that are in the tube stay.
    """
    chosen = None if shard is None else parse_shards(shard)

    async def work(tubes: Tubes) -> list[str]:
        await _row_of_tube(tubes, tube)
        if any(map(is_pattern, tables)):
            attached = [row for row in await tubes.rows("tube_tables_of", tube) if row["attached"]]
            named = [row["tbl"] for row in attached if matches(row["tbl"], tables)]
        else:
            named = [one.name for one in await tubes.find_tables(tables, chosen)]
        for table in named:
            await tubes.change(f"detach {table}", "tube_table_ensure_detached", tube, table)
        return named

    for island, named in on_islands(options, work):
        _print_each("detached from", tube, island, named)


def _backfill(row: Any, slow: Mapping[tuple[str, str], str]) -> str:
    """The progress of a backfill. If it has no index: the consequence, and the index to create."""
    warning = slow.get((row["tbl"], row["order_col"]))
    return _progress(row) if warning is None else f"{_progress(row)} ({warning})"


def _progress(row: Any) -> str:
    if row["state"] == "scheduled":
        return f"scheduled by {row['order_col']}"
    about = "" if row["approx_ids"] is None else f" of about {row['approx_ids']:,}"
    return f"{row['ids']:,}{about} ids by {row['order_col']}"


async def _row_of_tube(tubes: Tubes, tube: str) -> Any:
    """The tube's row in tube_list. Raises UnknownTube."""
    for row in await tubes.rows("tube_list"):
        if row["tube"] == tube:
            return row
    raise UnknownTube(f"there is no tube {tube!r}; `replicad tubes list` shows the tubes")


def _print_each(what: str, tube: str, island: str | None, tables: list[str]) -> None:
    for table in tables:
        echo(f"{table} {what} {tube}" + (f" on {island}" if island else ""))


def warning_of_mixed(rows: Iterable[Mapping[str, Any]], tube: str) -> str | None:
    """A warning if several tables of a tube have one shard, from rows of `tube_list`; else None.

    The ids of such tables cannot be distinguished in the tube. A table with a routing computes its shards itself.
    """
    tables: dict[int, list[str]] = {}
    for row in rows:
        if row["tube"] == tube and row["tbl"] is not None and row["routing"] is None:
            tables.setdefault(row["shard"], []).append(str(row["tbl"]))
    for shard, names in tables.items():
        if len(names) > 1:
            return (
                f"shard {shard} of {tube} has the tables {', '.join(names)}: an id may be of each of them, and a "
                "pipeline reads one table for a shard; give each a shard of its own (--shard), or a tube of its own"
            )
    return None


@command.command("purge")
@click.argument("tube")
@option("--shard", metavar="N", type=ValueType(WHOLE), required=True, help="Shard whose table was dropped.")
@island_options
def purge(tube: str, shard: int, **options: Any) -> None:
    """Let the readers of TUBE delete the rows of a shard downstream, after its table was dropped.

    Puts a control pod into TUBE, behind everything that waits. A pipeline asks its downstream for the ids of the shard
    and deletes the ids without a row. If there is a table for the shard after all, its rows stay. The command is
    refused while a table is attached with this shard.
    """
    if len(options.get("database") or ()) > 1:
        raise UsageError("--database is given several times; a shard belongs to one database")

    async def work(tubes: Tubes) -> None:
        await tubes.value("tube_find", tube)
        there = [row["tbl"] for row in await tubes.rows("tube_list") if row["tube"] == tube and row["shard"] == shard]
        if there:
            raise TubeRefused(
                f"table {there[0]} is attached to {tube} with shard {shard}, so nothing is purged; drop or detach it "
                "first, or remove the surplus rows downstream by: "
                f"replicad tubes backfill {quote(tube)} --shard {shard}"
            )
        start = await tubes.value("tube_backfill_step1")
        await tubes.value("tube_backfill_step2")  # until no pod with a lower seq can appear any more
        name = await tubes.value("tube_object_name", tube, "_touch")
        payload = json.dumps({"type": "backfill_end", "start_seq": start, "purge": True})
        await tubes.value(name, shard, [], "B", payload)

    on_islands(options, work, statement_timeout=None)
    echo(f"shard {shard} of {tube} will be purged downstream")


_IDS_PER_CALL = 100_000  # ids in one statement: 400 pods, about 1 MB
MOST_WITHOUT_INDEX = 1_000_000  # rows; a larger table is not read and sorted for each 100,000 ids
_PROGRESS_IDS = 100_000  # ids between two lines about progress
_OPERATIONS = ValueType(one_of("I", "U", "D", "T", "B", any_case=True))

_tube = click.argument("tube")
_shard = option("--shard", metavar="N", type=ValueType(WHOLE), required=True, help="Shard of the ids.")
_numbers = click.argument("numbers", metavar="[NUMBER...]", nargs=-1, type=ValueType(WHOLE))
_everything = option("--all", "everything", is_flag=True, help="All parked ids.")


def _op(default: str) -> Callable[[F], F]:
    return option(
        "--op",
        metavar="I|U|D|T|B",
        type=_OPERATIONS,
        default=default,
        show_default=True,
        help="Operation. Workers read B after all others.",
    )


@command.command(
    "touch",
    epilog="""\b
Examples:
  replicad tubes touch cities --shard 3 2988507 2643743
  psql -qtAc 'SELECT id FROM stale' app \\
    | replicad tubes touch cities --shard 3 -""",
)
@_tube
@click.argument("ids", metavar="ID...|-", nargs=-1)
@_shard
@_op("T")
@option("--payload", metavar="JSON", help="Payload of every pod. Without ids: make one control pod.")
@island_options
def touch(tube: str, ids: tuple[str, ...], shard: int, op: str, payload: str | None, **options: Any) -> None:
    """Put ids into TUBE by hand.

    With - as ID, ids are read from stdin, separated by blanks, commas or line ends. If TUBE has keys of kind text, each
    ID and each line of stdin is one key, as Postgres writes it; several columns are a JSON array of texts.
    """
    _check_json(payload)
    if not ids and payload is None:
        raise UsageError("nothing to touch; give ids, - to read them from stdin, or a --payload")
    if len(options.get("database") or ()) > 1:
        raise UsageError("--database is given several times; ids belong to one database")

    async def work(tubes: Tubes) -> tuple[int, int]:
        keys = (await _row_of_tube(tubes, tube))["keys"]
        name = await tubes.value("tube_object_name", tube, "_touch")
        pods = count = 0
        for chunk in _chunks(_read_ids(ids, keys)) if ids else [[]]:
            pods += await tubes.value(name, shard, chunk, op.upper(), payload)
            count += len(chunk)
        return pods, count

    ((_, (pods, count)),) = on_islands(options, work)
    echo(f"{count:,} ids in {pods:,} pods")


@command.command(
    "insert",
    epilog="""\b
Example:
  replicad tubes insert cities --shard 3 \\
    'SELECT id, row_number() OVER (ORDER BY id) FROM shard_0003.cities'""",
)
@_tube
@click.argument("query")
@_shard
@_op("B")
@island_options
def insert(tube: str, query: str, shard: int, op: str, **options: Any) -> None:
    """Put every id that QUERY returns into TUBE.

    QUERY must return the columns id and row_number. It runs in one transaction. Progress is printed on stderr.
    """

    async def work(tubes: Tubes) -> int:
        expected = None  # the number of ids that a query returns is unknown before it ends
        count = await tubes.value_with_progress(
            "tube_pods_insert", tube, query, shard, op.upper(), expected, _PROGRESS_IDS
        )
        return int(count)

    for island, count in on_islands(options, work, statement_timeout=None):
        echo(f"{count:,} ids" + (f" on {island}" if island else ""))


@command.command("backfill")
@_tube
@option("--order-by", metavar="COLUMN", help="Order of the ids within a shard. Default: the first column of the key.")
@option("--shard", metavar="N|N-M|all", default="all", show_default=True, help="Which shards.")
@option(
    "--table", "tables", metavar="PATTERN", multiple=True, help="Only tables such as public.film or 'public.film*'."
)
@option("--cancel", is_flag=True, help="Cancel the backfills of these shards, scheduled or running.")
@option("--without-index", is_flag=True, help="Schedule it even if a very large table has no index on COLUMN.")
@island_options
def backfill(
    tube: str,
    order_by: str | None,
    shard: str,
    *,
    tables: tuple[str, ...],
    cancel: bool,
    without_index: bool,
    **options: Any,
) -> None:
    """Put every id of the attached tables into TUBE once.

    The daemon writes the pods, shard after shard, and workers read them after all others. Behind a backfill that runs,
    or whose pods are still in the tube, another one is queued: it reads the table anew. A backfill in another order is
    replaced. `tubes list` shows the progress.

    An index on COLUMN and the key makes a backfill cheap. Without one each 100,000 ids read and sort the whole table.
    For a table of more than a million rows that is refused without --without-index; the message has the index to
    create.
    """
    chosen = parse_shards(shard)
    if cancel:
        _cancel(tube, chosen, tables, options)
        return

    async def work(tubes: Tubes) -> tuple[Counter[str], list[NoIndex]]:
        ranges = await _ranges_of(tubes, tube, chosen, tables)
        listed = [row for row in await tubes.rows("tube_list") if row["tube"] == tube and row["tbl"] is not None]
        slow = await tubes.without_index(
            [
                (str(row["tbl"]), order_by or row["key"][0], row["key"])
                for row in listed
                if any(low <= row["shard"] <= high for low, high in ranges)
            ]
        )
        refused = [] if without_index else [str(one) for one in slow if one.rows > MOST_WITHOUT_INDEX]
        if refused:
            more = f" The same is true of {len(refused) - 1:,} more tables." if refused[1:] else ""
            raise UsageError(f"{refused[0]}. To schedule it all the same: --without-index.{more}")
        states = Counter[str]()
        for first, last in ranges:
            states.update(
                row["state"] for row in await tubes.rows("tube_backfill_request", tube, order_by, first, last)
            )
        return states, slow

    done = on_islands(options, work)
    if not any(states for _, (states, _) in done):
        raise UsageError(f"no table with a shard of {shard} is attached to {tube}; `replicad tubes list` shows them")
    for island, (states, slow) in done:
        echo(_scheduled(states) + (f" on {island}" if island else ""))
        for one in slow[:3]:
            say(str(one))


def _scheduled(states: Mapping[str, int]) -> str:
    """What became of the requests for backfills, by their number in each state."""
    parts = [f"{_shards(states['scheduled'])} scheduled"] if states["scheduled"] else []
    if states["queued"]:
        parts.append(f"{_shards(states['queued'])} queued behind an earlier backfill, until it has left the tube")
    if states["present"]:
        parts.append(f"{_shards(states['present'])} scheduled before, where the backfill has not begun")
    return "; ".join(parts) or "0 shards scheduled"


def _shards(number: int) -> str:
    return f"{number:,} shard{'' if number == 1 else 's'}"


async def _ranges_of(tubes: Tubes, tube: str, chosen: ShardSet, tables: Sequence[str]) -> Sequence[tuple[int, int]]:
    """The ranges of shards, or those shards whose table a pattern names. Raises UsageError if there is none."""
    if not tables:
        return chosen.ranges
    named = [row["shard"] for row in await tubes.rows("tube_tables_of", tube) if matches(row["tbl"], tables)]
    found = [(one, one) for one in named if one in chosen]
    if not found:
        raise UsageError(f"no table of {tube} with a shard of {chosen.text} is called {', '.join(tables)}")
    return found


def _cancel(tube: str, chosen: ShardSet, tables: Sequence[str], options: dict[str, Any]) -> None:
    async def work(tubes: Tubes) -> int:
        ranges = await _ranges_of(tubes, tube, chosen, tables)
        return sum([await tubes.value("tube_backfill_cancel", tube, first, last) for first, last in ranges])

    for island, count in on_islands(options, work):
        echo(f"{count:,} backfills cancelled" + (f" on {island}" if island else ""))


@command.command("stats")
@click.argument("tube", required=False)
@json_option
@island_options
def stats(tube: str | None, as_json: bool, **options: Any) -> None:
    """Show the pods of each partition of each tube.

    Pods, their ids, and the age of the oldest in seconds. ~ marks estimates: if the table of a tube is larger than
    20 MB, the numbers of pods and ids come from a sample of its pages. If the table cannot be read, the numbers are
    empty and the state gives the reason.
    """

    async def work(tubes: Tubes) -> list[dict[str, Any]]:
        if tube is not None:
            await tubes.value("tube_find", tube)
        states = await tubes.states()
        try:
            found = await (tubes.rows("tube_stats") if tube is None else tubes.rows("tube_stats_of", tube))
        except UnknownTube:  # another of the databases may have it
            found = []
        return [{**dict(row), "state": states.get(row["tube"], "ok")} for row in found]

    rows = with_island(on_islands(options, work))
    if as_json:
        print_rows([], rows, as_json=True, nothing="")
        return
    now = datetime.now(UTC)
    shown = [_stats_row(row, now) for row in rows]
    print_rows(list(shown[0]) if shown else [], shown, as_json=False, nothing="there are no tubes")


def _stats_row(row: dict[str, Any], now: datetime) -> dict[str, Any]:
    """The columns of the table for people, in their order."""
    oldest = row["inc_min_ts"]
    about = "~" if row["estimated"] else ""
    return {
        **{name: row[name] for name in ("island", "tube", "partition") if name in row},
        "shards": _ranges(row["shards"]),
        "pods": _about(about, row["inc_count"]),
        "ids": _about(about, row["inc_ids"]),
        "age_s": None if oldest is None else max(0.0, (now - oldest).total_seconds()),
        "backfill_pods": _about(about, row["backfill_count"]),
        "backfill_ids": _about(about, row["backfill_ids"]),
        "control": row["control_count"],
        "state": row["state"],
    }


def _about(mark: str, number: int) -> object:
    return f"{mark}{number:,}" if mark else number


def _ranges(shards: Sequence[int]) -> str:
    """Sorted numbers in short form (1-3,7). A long list is truncated."""
    parts = []
    for _, group in itertools.groupby(enumerate(shards), key=lambda pair: pair[1] - pair[0]):
        run = [shard for _, shard in group]
        parts.append(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}")
    return ",".join(parts) if len(parts) <= 8 else f"{','.join(parts[:7])},... ({len(shards)})"


command.add_command(pg_tube)


@command.group("parked", cls=ReplicadGroup, short_help="List, replay or drop ids that failed too often.")
def parked() -> None:
    """List, replay or drop parked ids: a worker took them out of the tube because they failed too often."""


@parked.command("list")
@_tube
@json_option
@island_options
def parked_list(tube: str, as_json: bool, **options: Any) -> None:
    """List the parked ids of TUBE: since when, how often they were tried, and the error."""

    async def work(tubes: Tubes) -> list[Any]:
        await tubes.value("tube_find", tube)
        rows = await tubes.rows("tube_parked_list", tube)
        return [{**dict(row), "ids": row["ids"] if row["keys"] is None else row["keys"]} for row in rows]

    rows = with_island(on_islands(options, work))
    columns = ["parked", "shard", "op", "ids", "tries", "parked_at", "error"]
    print_rows(
        [*(["island"] if rows and "island" in rows[0] else []), *columns],
        rows,
        as_json=as_json,
        nothing=f"nothing is parked in {tube}",
    )


@parked.command("replay")
@_tube
@_numbers
@_everything
@island_options
def parked_replay(tube: str, numbers: tuple[int, ...], everything: bool, **options: Any) -> None:
    """Put the parked ids with these NUMBERs back into TUBE."""
    _parked("tube_parked_replay", "put back", tube, numbers, everything=everything, options=options)


@parked.command("drop")
@_tube
@_numbers
@_everything
@island_options
def parked_drop(tube: str, numbers: tuple[int, ...], everything: bool, **options: Any) -> None:
    """Delete the parked ids with these NUMBERs."""
    _parked("tube_parked_drop", "dropped", tube, numbers, everything=everything, options=options)


def _parked(
    function: str, what: str, tube: str, numbers: tuple[int, ...], *, everything: bool, options: dict[str, Any]
) -> None:
    if bool(numbers) == everything:
        raise UsageError("give the numbers that `replicad tubes parked list` shows, or --all")
    if numbers and len(options.get("database") or ()) > 1:
        raise UsageError("--database is given several times; numbers belong to one database")
    chosen = None if everything else list(numbers)

    async def work(tubes: Tubes) -> int:
        await tubes.value("tube_find", tube)
        return int(await tubes.value(function, tube, chosen))

    for island, count in on_islands(options, work):
        echo(f"{count:,} {what}" + (f" on {island}" if island else ""))


def _check_json(payload: str | None) -> None:
    try:
        json.loads(payload or "null")
    except ValueError as error:
        raise UsageError(f"--payload is not JSON: {error}") from None


def _read_ids(words: Iterable[str], keys: str) -> Iterator[Key]:
    for word in words:
        if word == "-" and sys.stdin is None:
            raise UsageError("stdin is closed; give the ids, or a file as stdin")
        for text in sys.stdin if word == "-" else [word]:
            for piece in [text.rstrip("\r\n")] if keys == TEXT else text.replace(",", " ").split():
                try:
                    yield parse_key(keys, piece)
                except ValueError as error:
                    raise UsageError(f"{piece[:40]!r} is not an id; {error}") from None


def _chunks(ids: Iterator[Key]) -> Iterator[list[Key]]:
    while chunk := list(itertools.islice(ids, _IDS_PER_CALL)):
        yield chunk
