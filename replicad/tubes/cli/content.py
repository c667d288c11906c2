"""Commands of `replicad tubes` on the content of tubes: touch, insert, backfill, stats, parked."""

from __future__ import annotations

import itertools
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

import click

from replicad.errors import UnknownTube, UsageError
from replicad.protocol.words import MAX_INTEGER
from replicad.terminal.command import F, ReplicadCommand, ReplicadGroup, json_option, option
from replicad.terminal.failures import say
from replicad.terminal.output import echo, print_rows
from replicad.tubes.cli.islands import NoIndex, Tubes, island_options, on_islands, parse_shards, with_island
from replicad.tubes.cli.purging import purge

_IDS_PER_CALL = 100_000  # ids in one statement: 400 pods, about 1 MB
MOST_WITHOUT_INDEX = 1_000_000  # rows of a table that is read and sorted for each 100,000 of them
_PROGRESS_IDS = 100_000  # ids between two lines about progress
_OPERATIONS = click.Choice(["I", "U", "D", "T", "B"], case_sensitive=False)

_tube = click.argument("tube")
_shard = option("--shard", metavar="N", type=int, required=True, help="Shard of the ids.")
_numbers = click.argument("numbers", metavar="[NUMBER...]", nargs=-1, type=int)
_everything = option("--all", "everything", is_flag=True, help="Everything that is parked.")


def _op(default: str) -> Callable[[F], F]:
    return option(
        "--op",
        metavar="I|U|D|T|B",
        type=_OPERATIONS,
        default=default,
        show_default=True,
        help="Operation. Workers read B after all others.",
    )


@click.command(
    "touch",
    cls=ReplicadCommand,
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

    With - as ID, ids are read from stdin, separated by blanks, commas or line ends.
    """
    _check_json(payload)
    if not ids and payload is None:
        raise UsageError("nothing to touch; give ids, - to read them from stdin, or a --payload")
    if len(options.get("database") or ()) > 1:
        raise UsageError("--database is given several times; ids belong to one database")

    async def work(tubes: Tubes) -> tuple[int, int]:
        await tubes.value("tube_find", tube)
        name = await tubes.value("tube_object_name", tube, "_touch")
        pods = count = 0
        for chunk in _chunks(_read_ids(ids)) if ids else [[]]:
            pods += await tubes.value(name, shard, chunk, op.upper(), payload)
            count += len(chunk)
        return pods, count

    ((_, (pods, count)),) = on_islands(options, work)
    echo(f"{count:,} ids in {pods:,} pods")


@click.command(
    "insert",
    cls=ReplicadCommand,
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


@click.command("backfill", cls=ReplicadCommand)
@_tube
@option("--order-by", metavar="COLUMN", default="id", show_default=True, help="Order of the ids within a shard.")
@option("--shards", metavar="N|N-M|all", default="all", show_default=True, help="Which shards.")
@option("--cancel", is_flag=True, help="Cancel the backfills of these shards, scheduled or running.")
@option("--without-index", is_flag=True, help="Schedule it even if a very large table has no index on COLUMN.")
@island_options
def backfill(tube: str, order_by: str, shards: str, *, cancel: bool, without_index: bool, **options: Any) -> None:
    """Put every id of the attached tables into TUBE once.

    The daemon writes the pods, shard after shard, and workers read them after all others. A shard whose backfill is
    already running is skipped; a backfill in another order is replaced. `tubes list` shows the progress.

    An index on (COLUMN, id) makes a backfill cheap. Without one each 100,000 ids read and sort the whole table. For a
    table of more than a million rows that is refused without --without-index; the message has the index to create.
    """
    chosen = parse_shards(shards)
    if cancel:
        _cancel(tube, chosen.ranges, options)
        return

    async def work(tubes: Tubes) -> tuple[int, list[NoIndex]]:
        listed = [row for row in await tubes.rows("tube_list") if row["tube"] == tube and row["tbl"] is not None]
        slow = await tubes.without_index([(str(row["tbl"]), order_by) for row in listed if row["shard"] in chosen])
        refused = [] if without_index else [str(one) for one in slow if one.rows > MOST_WITHOUT_INDEX]
        if refused:
            more = f" The same is true of {len(refused) - 1:,} more tables." if refused[1:] else ""
            raise UsageError(f"{refused[0]}. To schedule it all the same: --without-index.{more}")
        counts = [
            await tubes.value("tube_backfill_schedule", tube, order_by, first, last) for first, last in chosen.ranges
        ]
        return sum(counts), slow

    for island, (count, slow) in on_islands(options, work):
        echo(f"{count:,} shards scheduled" + (f" on {island}" if island else ""))
        for one in slow[:3]:
            say(str(one))


def _cancel(tube: str, ranges: Sequence[tuple[int, int]], options: dict[str, Any]) -> None:
    async def work(tubes: Tubes) -> int:
        return sum([await tubes.value("tube_backfill_cancel", tube, first, last) for first, last in ranges])

    for island, count in on_islands(options, work):
        echo(f"{count:,} backfills cancelled" + (f" on {island}" if island else ""))


@click.command("stats", cls=ReplicadCommand)
@click.argument("tube", required=False)
@json_option
@island_options
def stats(tube: str | None, as_json: bool, **options: Any) -> None:
    """Show what is in each partition of each tube.

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


@click.group("parked", cls=ReplicadGroup, short_help="List, replay or drop ids that failed too often.")
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
        return await tubes.rows("tube_parked_list", tube)

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


def _read_ids(words: Iterable[str]) -> Iterator[int]:
    for word in words:
        if word == "-" and sys.stdin is None:
            raise UsageError("stdin is closed; give the ids, or a file as stdin")
        for text in sys.stdin if word == "-" else [word]:
            for piece in text.replace(",", " ").split():
                if not re.fullmatch(r"-?[0-9]{1,19}", piece) or not -MAX_INTEGER - 1 <= int(piece) <= MAX_INTEGER:
                    raise UsageError(f"{piece[:40]!r} is not an id; ids are whole numbers of 64 bits")
                yield int(piece)


def _chunks(ids: Iterator[int]) -> Iterator[list[int]]:
    while chunk := list(itertools.islice(ids, _IDS_PER_CALL)):
        yield chunk


CONTENT_COMMANDS: tuple[click.Command, ...] = (touch, insert, backfill, purge, stats, parked)
