"""`replicad tubes`: create, list and drop tubes, attach and detach tables. content.py has the commands on pods."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from replicad.errors import UnknownTube, UsageError
from replicad.terminal.command import ReplicadGroup, json_option, option
from replicad.terminal.failures import say
from replicad.terminal.output import echo, print_rows
from replicad.tubes.cli.content import CONTENT_COMMANDS
from replicad.tubes.cli.islands import Tubes, island_options, on_islands, parse_shards, with_island
from replicad.tubes.cli.mixing import warning_of_mixed

shards_option = option(
    "--shards",
    metavar="N|N-M|all",
    help="Use the table TABLE in every schema whose name ends in one of these numbers.",
)


@click.group("tubes", cls=ReplicadGroup, short_help="Create, fill and inspect tubes.")
def command() -> None:
    """Create, fill and inspect tubes: queues of the ids of touched rows.

    \b
      replicad tubes create cities --partitions 4
      replicad tubes attach cities cities --shards all
      replicad tubes backfill cities --order-by id --shards all
      replicad tubes stats
    """


@command.command("create")
@click.argument("tube")
@option(
    "--partitions",
    metavar="N",
    type=int,
    default=1,
    show_default=True,
    help="How many workers can share the tube. Each shard belongs to one partition.",
)
@option(
    "--predicate",
    metavar="SQL",
    help="Record only rows for which this is true. It may use the columns of the attached tables.",
)
@island_options
def create(tube: str, partitions: int, predicate: str | None, **options: Any) -> None:
    """Create TUBE, or change an existing one to these options."""
    on_islands(options, lambda tubes: tubes.change(f"tube {tube}", "tube_ensure_exists", tube, partitions, predicate))
    echo(f"tube {tube}: {partitions} partition{'s' if partitions != 1 else ''}")


@command.command("alter")
@click.argument("tube")
@option("--partitions", metavar="N", type=int, help="The new number of partitions. Workers must claim again.")
@option("--predicate", metavar="SQL", help="The new predicate.")
@option("--no-predicate", is_flag=True, help="Remove the predicate: record every row.")
@island_options
def alter(tube: str, partitions: int | None, predicate: str | None, no_predicate: bool, **options: Any) -> None:
    """Change the partitions or the predicate of TUBE.

    Pods and attached tables are kept.
    """
    if predicate is not None and no_predicate:
        raise UsageError("--predicate and --no-predicate are both given; give one of them")
    if partitions is None and predicate is None and not no_predicate:
        raise UsageError("nothing to change; give --partitions, --predicate or --no-predicate")

    async def work(tubes: Tubes) -> int:
        before = await _tube(tubes, tube)
        wanted = before["partitions"] if partitions is None else partitions
        kept = None if no_predicate else predicate or before["predicate"]
        await tubes.change(f"tube {tube}", "tube_ensure_exists", tube, wanted, kept)
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
        await _tube(tubes, tube)
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


@command.command("list")
@click.argument("table", required=False)
@json_option
@island_options
def list_tubes(table: str | None, as_json: bool, **options: Any) -> None:
    """List the tubes and the tables attached to them.

    With TABLE (schema.table): only the tubes of that table. The state is ok, or what is wrong with the tube: its table
    was dropped or may not be read, or what a running daemon reports.
    """

    async def work(tubes: Tubes) -> list[dict[str, Any]]:
        states = await tubes.states()
        found = await tubes.rows("tube_list", *([table] if table else []))
        running = await tubes.backfills()
        slow = {
            (one.table, one.column): str(one)
            for one in await tubes.without_index([(row["tbl"], row["order_col"]) for row in running])
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
        "table_predicate",
        "routing",
        "unattached",
        "backfill",
        "state",
    ]
    optional = {"predicate", "table_predicate", "routing", "unattached", "backfill"}
    shown = [name for name in columns if name not in optional or any(row[name] for row in rows)]
    nothing = "no tube has this table" if table else "there are no tubes; make one: replicad tubes create NAME"
    print_rows([*(["island"] if rows and "island" in rows[0] else []), *shown], rows, as_json=as_json, nothing=nothing)


@command.command(
    "attach",
    epilog="""\b
Examples:
  replicad tubes attach cities public.cities --shard 0
  replicad tubes attach cities cities --shards 1-100
  replicad tubes attach cities public.towns --routing 'region_id' \\
    --predicate 'population > 0'""",
)
@click.argument("tube")
@click.argument("tables", metavar="TABLE...", nargs=-1, required=True)
@option(
    "--shard",
    metavar="N",
    type=int,
    help="Shard of the rows. Default: the number at the end of the name of the table's schema.",
)
@shards_option
@option(
    "--predicate",
    metavar="SQL",
    help="Record only rows for which this is true, in addition to the tube's own predicate.",
)
@option(
    "--routing", metavar="SQL", help="Expression on a row that yields its shard, in place of one shard for the table."
)
@island_options
def attach(
    *, tube: str, tables: tuple[str, ...], shard: int | None, shards: str | None, predicate: str | None,
    routing: str | None, **options: Any,
) -> None:  # fmt: skip
    """Record changes of TABLE in TUBE from now on.

    The table must have a column `id`, bigint or smaller. Existing rows are not recorded; use `backfill` for them.
    """
    chosen = None if shards is None else parse_shards(shards)

    async def work(tubes: Tubes) -> tuple[list[str], str | None]:
        named = await tubes.find_tables(tables, chosen)
        for table in named:
            await tubes.change(f"attach {table}", "tube_table_ensure_attached", tube, table, shard, predicate, routing)
        return named, warning_of_mixed(await tubes.rows("tube_list"), tube)

    for island, (named, mixed) in on_islands(options, work):
        _print_each("attached to", tube, island, named)
        if mixed is not None:
            say(mixed)


@command.command("detach")
@click.argument("tube")
@click.argument("tables", metavar="TABLE...", nargs=-1, required=True)
@shards_option
@island_options
def detach(tube: str, tables: tuple[str, ...], shards: str | None, **options: Any) -> None:
    """Stop recording changes of TABLE in TUBE.

    Pods that are in the tube stay.
    """
    chosen = None if shards is None else parse_shards(shards)

    async def work(tubes: Tubes) -> list[str]:
        await _tube(tubes, tube)
        named = await tubes.find_tables(tables, chosen)
        for table in named:
            await tubes.change(f"detach {table}", "tube_table_ensure_detached", tube, table)
        return named

    for island, named in on_islands(options, work):
        _print_each("detached from", tube, island, named)


def _backfill(row: Any, slow: Mapping[tuple[str, str], str]) -> str:
    """How far a backfill is; for one without an index what that means, and the index to create."""
    warning = slow.get((row["tbl"], row["order_col"]))
    return _progress(row) if warning is None else f"{_progress(row)} ({warning})"


def _progress(row: Any) -> str:
    if row["state"] == "scheduled":
        return f"scheduled by {row['order_col']}"
    about = "" if row["approx_ids"] is None else f" of about {row['approx_ids']:,}"
    return f"{row['ids']:,}{about} ids by {row['order_col']}"


async def _tube(tubes: Tubes, tube: str) -> Any:
    """The tube's row in tube_list. Raises UnknownTube."""
    for row in await tubes.rows("tube_list"):
        if row["tube"] == tube:
            return row
    raise UnknownTube(f"there is no tube {tube!r}; `replicad tubes list` shows the tubes")


def _print_each(what: str, tube: str, island: str | None, tables: list[str]) -> None:
    for table in tables:
        echo(f"{table} {what} {tube}" + (f" on {island}" if island else ""))


for content in CONTENT_COMMANDS:
    command.add_command(content)
