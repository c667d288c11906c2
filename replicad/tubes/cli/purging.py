"""`replicad tubes purge`: let downstreams delete the rows of a shard whose table was dropped."""

from __future__ import annotations

import json
from shlex import quote
from typing import Any

import click

from replicad.errors import TubeRefused, UsageError
from replicad.terminal.command import ReplicadCommand, option
from replicad.terminal.output import echo
from replicad.tubes.cli.islands import Tubes, island_options, on_islands


@click.command("purge", cls=ReplicadCommand)
@click.argument("tube")
@option("--shard", metavar="N", type=int, required=True, help="Shard whose table was dropped.")
@island_options
def purge(tube: str, shard: int, **options: Any) -> None:
    """Let the readers of TUBE delete the rows of a shard downstream, after its table was dropped.

    Puts a control pod into TUBE, behind everything that waits. A pipeline asks its downstream for the ids of the shard
    and deletes those that have no row. If there is a table for the shard after all, its rows stay. It is refused while
    a table is attached with this shard.
    """
    if len(options.get("database") or ()) > 1:
        raise UsageError("--database is given several times; a shard belongs to one database")

    async def work(tubes: Tubes) -> None:
        await tubes.value("tube_find", tube)
        there = [row["tbl"] for row in await tubes.rows("tube_list") if row["tube"] == tube and row["shard"] == shard]
        if there:
            raise TubeRefused(
                f"table {there[0]} is attached to {tube} with shard {shard}, so nothing is purged; drop or detach it "
                "first, or remove what is too much downstream by: "
                f"replicad tubes backfill {quote(tube)} --shards {shard}"
            )
        start = await tubes.value("tube_backfill_step1")
        await tubes.value("tube_backfill_step2")  # until no pod with a lower seq can appear any more
        name = await tubes.value("tube_object_name", tube, "_touch")
        payload = json.dumps({"type": "backfill_end", "start_seq": start, "purge": True})
        await tubes.value(name, shard, [], "B", payload)

    on_islands(options, work, statement_timeout=None)
    echo(f"shard {shard} of {tube} will be purged downstream")
