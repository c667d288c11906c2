"""`replicad tubes`: which tubes there are and which tables are attached to them. Their contents: content.py."""

from __future__ import annotations

from typing import Any

import click

from replicad.errors import UnknownTube, UsageError
from replicad.terminal.command import ReplicadGroup, option
from replicad.terminal.output import print_rows
from replicad.tubes.cli.content import CONTENT_COMMANDS
from replicad.tubes.cli.islands import Tubes, island_options, json_option, on_islands, with_island
from replicad.tubes.cli.shards import parse_shards

shards_option = option(
    "--shards",
    metavar="N|N-M|all",
    help="Take TABLE from these shards' schemas: those whose names end in the number.",
)


@click.group("tubes", cls=ReplicadGroup, short_help="Create, fill, watch and mend tubes.")
def command() -> None:
    """Create, fill, watch and mend tubes: queues of the ids of touched rows.

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
    help="Workers that can share it; a shard is in one.",
)
@option("--predicate", metavar="SQL", help="Only rows for which this is true; over the columns of attached tables.")
@island_options
def create(tube: str, partitions: int, predicate: str | None, **options: Any) -> None:
    """Create TUBE, or make one that exists be as asked."""
    on_islands(options, lambda tubes: tubes.value("tube_ensure_exists", tube, partitions, predicate))
    click.echo(f"tube {tube}: {partitions} partition{'s' if partitions != 1 else ''}")


@command.command("alter")
@click.argument("tube")
@option("--partitions", metavar="N", type=int, help="The new number of partitions; workers claim anew.")
@option("--predicate", metavar="SQL", help="The new predicate.")
@option("--no-predicate", is_flag=True, help="From now on every row.")
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
        await tubes.value("tube_ensure_exists", tube, wanted, kept)
        return int(wanted)

    for _, wanted in on_islands(options, work):
        click.echo(f"tube {tube}: {wanted} partition{'s' if wanted != 1 else ''}")


@command.command("drop")
@click.argument("tube")
@option("--yes", is_flag=True, help="Drop it even where it holds pods that nobody has read.")
@island_options
def drop(tube: str, yes: bool, **options: Any) -> None:
    """Detach all tables of TUBE and drop it.

    Its pods, its leases and what is parked go with it.
    """

    async def work(tubes: Tubes) -> None:
        await _tube(tubes, tube)
        held = [
            (row["inc_count"] or 0) + (row["backfill_count"] or 0)
            for row in await tubes.rows("tube_stats")
            if row["tube"] == tube
        ]
        if sum(held) and not yes:
            raise UsageError(f"tube {tube} holds {sum(held):,} pods that nobody has read; to lose them add --yes")
        await tubes.value("tube_ensure_absent", tube)

    on_islands(options, work)
    click.echo(f"tube {tube} is gone")


@command.command("list")
@click.argument("table", required=False)
@json_option
@island_options
def list_tubes(table: str | None, as_json: bool, **options: Any) -> None:
    """List the tubes and the tables attached to them.

    With TABLE (schema.table), the tubes of that one. The state is ok, or says what is wrong with the tube: its table
    is gone or may not be read, or what a running daemon reports of it.
    """

    async def work(tubes: Tubes) -> list[dict[str, Any]]:
        states = await tubes.states()
        found = await tubes.rows("tube_list", *([table] if table else []))
        return [{**dict(row), "state": states.get(row["tube"], "ok")} for row in found]

    rows = with_island(on_islands(options, work))
    columns = ["tube", "partitions", "predicate", "tbl", "shard", "table_predicate", "routing", "unattached", "state"]
    optional = {"predicate", "table_predicate", "routing", "unattached"}
    shown = [name for name in columns if name not in optional or any(row[name] for row in rows)]
    nothing = "no tube has this table" if table else "there are no tubes; make one: replicad tubes create NAME"
    print_rows([*(["island"] if rows and "island" in rows[0] else []), *shown], rows, as_json=as_json, nothing=nothing)


@command.command(
    "attach",
    epilog="""\b
Examples:
  replicad tubes attach cities public.cities --shard 0
  replicad tubes attach cities cities --shards 1-100
  replicad tubes attach cities public.towns --routing 'region_id' --predicate 'population > 0'""",
)
@click.argument("tube")
@click.argument("tables", metavar="TABLE...", nargs=-1, required=True)
@option(
    "--shard",
    metavar="N",
    type=int,
    help="Shard of the rows. Default: the number that ends the name of the table's schema.",
)
@shards_option
@option("--predicate", metavar="SQL", help="Only rows for which this is true, on top of the tube's own predicate.")
@option("--routing", metavar="SQL", help="Expression on a row that yields its shard, instead of one for the table.")
@island_options
def attach(
    *, tube: str, tables: tuple[str, ...], shard: int | None, shards: str | None, predicate: str | None,
    routing: str | None, **options: Any,
) -> None:  # fmt: skip
    """Have what is written to TABLE touch TUBE.

    The table has a column `id`, bigint or smaller. Rows that are there already are not touched: see `backfill`.
    """
    ranges = parse_shards(shards) if shards is not None else None

    async def work(tubes: Tubes) -> list[str]:
        named = await tubes.find_tables(tables, ranges)
        for table in named:
            await tubes.value("tube_table_ensure_attached", tube, table, shard, predicate, routing)
        return named

    for island, named in on_islands(options, work):
        _tell("attached to", tube, island, named)


@command.command("detach")
@click.argument("tube")
@click.argument("tables", metavar="TABLE...", nargs=-1, required=True)
@shards_option
@island_options
def detach(tube: str, tables: tuple[str, ...], shards: str | None, **options: Any) -> None:
    """Have what is written to TABLE no longer touch TUBE.

    Pods that are there stay.
    """
    ranges = parse_shards(shards) if shards is not None else None

    async def work(tubes: Tubes) -> list[str]:
        await _tube(tubes, tube)
        named = await tubes.find_tables(tables, ranges)
        for table in named:
            await tubes.value("tube_table_ensure_detached", tube, table)
        return named

    for island, named in on_islands(options, work):
        _tell("detached from", tube, island, named)


async def _tube(tubes: Tubes, tube: str) -> Any:
    """The tube's row in tube_list. Raises UnknownTube."""
    for row in await tubes.rows("tube_list"):
        if row["tube"] == tube:
            return row
    raise UnknownTube(f"there is no tube {tube!r}; `replicad tubes list` shows those that there are")


def _tell(what: str, tube: str, island: str | None, tables: list[str]) -> None:
    for table in tables:
        click.echo(f"{table} {what} {tube}" + (f" on {island}" if island else ""))


for content in CONTENT_COMMANDS:
    command.add_command(content)
