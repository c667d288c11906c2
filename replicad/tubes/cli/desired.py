"""The tubes of a file for `replicad apply`, with their tables."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from replicad.config.declaring import NAMES, TABLES, TEXT, WHOLE, one_of, parsed
from replicad.errors import TubeRefused
from replicad.postgres.statements import HOW, call_value, find_relation, load_sql, statement
from replicad.terminal.desired import Section, SectionKey, TargetDatabase, Values
from replicad.tubes.cli.changing import change_with_locks
from replicad.tubes.cli.islands import Tubes, parse_shards
from replicad.tubes.keys import BIGINT, KINDS
from replicad.tubes.keys import TEXT as TEXTS
from replicad.tubes.shards import MAX_SHARD, ShardSet, shard_of_schema

if TYPE_CHECKING:
    from replicad.postgres.bridge import Connection

Run = Callable[..., Awaitable[Any]]  # a function of tubes by name, with its arguments
_MOST_PARTITIONS = 32_768
_OF_TUBE = ("partitions", "predicate")
_FIXED_KEYS = "the ids of a tube keep their kind: drop the tube and apply again, or make another one"


async def present(place: TargetDatabase) -> dict[str, Values]:
    """The tubes with the tables that are attached to them."""
    found: dict[str, dict[str, Any]] = {}
    for row in await place.db.fetch(statement("tube_desired", place.settings.tube_schema)):
        own = {name: row[name] for name in (*_OF_TUBE, "on_fork")}
        tube = found.setdefault(row["tube"], {**own, "keys": row["own_keys"], "tables": {}})
        if row["tbl"] is not None:
            tube["tables"][row["tbl"]] = {
                "shard": row["shard"],
                "predicate": row["table_predicate"],
                "routing": row["routing"],
                "key": row["key"],
            }
    return dict(found)


async def normal(place: TargetDatabase, name: str, values: Values) -> Values:
    """Each table by schema and name, with its shard; one entry with `shards` becomes one for each table of them."""
    found: dict[str, dict[str, Any]] = {}
    for named, attachment in values["tables"].items():
        shards = attachment["shards"]
        if shards is None:
            relations = [named]
        elif attachment["shard"] is not None:
            raise TubeRefused(f"table {named} has shard and shards: give one of them")
        else:
            tubes = Tubes(place.db, place.settings.tube_schema, place.settings.stream_schema)
            relations = [one.name for one in await tubes.find_tables([named], parse_shards(shards))]
        for relation in relations:
            qualified, schema = await _names(place, relation)
            if qualified in found:
                raise TubeRefused(f"table {qualified} is named twice")
            shard = attachment["shard"] if attachment["shard"] is not None else shard_of_schema(schema)
            found[qualified] = {**attachment, "shard": shard, "shards": None}
    await _choose_shards(place, name, found)
    return {**values, "tables": found}


async def _choose_shards(place: TargetDatabase, tube: str, tables: dict[str, dict[str, Any]]) -> None:
    """Give each table without a shard the shard that attaching would choose, table after table."""
    if all(values["shard"] is not None for values in tables.values()):
        return
    attached = {
        row["tbl"]: row["shard"]
        for row in await place.db.fetch(statement("tube_desired", place.settings.tube_schema))
        if row["tube"] == tube and row["tbl"] is not None
    }
    for table, values in sorted(tables.items()):
        if values["shard"] is None:
            values["shard"] = attached.get(table, 0 if values["routing"] is not None else None)
    taken = {shard for table, shard in attached.items() if table not in tables}
    taken |= {values["shard"] for values in tables.values()}
    for _, values in sorted(tables.items()):
        if values["shard"] is None:
            values["shard"] = next(shard for shard in itertools.count() if shard not in taken)
            taken.add(values["shard"])


async def _names(place: TargetDatabase, relation: str) -> tuple[str, str]:
    oid = await find_relation(place.db, relation)
    if oid is None:
        raise TubeRefused(f"there is no table {relation} in this database: {HOW}")
    (row,) = await place.db.fetch(load_sql("tube_relation"), oid)
    return row["name"], row["schema"]


async def change(place: TargetDatabase, name: str, before: Values | None, wanted: Values) -> None:
    """Make the tube, or give it other partitions or another predicate; then attach the tables that differ."""
    if before is None or any(before[key] != wanted[key] for key in _OF_TUBE):
        values = [wanted[key] for key in _OF_TUBE]

        async def work(run: Run) -> None:
            keys = wanted["keys"] or (await _kind_for(run, wanted["tables"]) if before is None else None)
            await run("tube_ensure_exists", name, *values, keys)

        await _locked(place, f"tube {name}", work)
    if (before or {"on_fork": "report"})["on_fork"] != wanted["on_fork"]:
        await _locked(place, f"tube {name}", lambda run: run("tube_on_fork", name, wanted["on_fork"]))
    for table in _differing(before, wanted):
        await _attach(place, name, table, wanted["tables"][table], new=before is None or table not in before["tables"])


async def _kind_for(run: Run, tables: Mapping[str, Values]) -> str:
    """The kind of keys that a tube needs for these tables."""
    for table, values in tables.items():
        key = values["key"] or await run("tube_key_default", table, None)
        if await run("tube_key_kind", await run("tube_key_types", table, key)) == TEXTS:
            return TEXTS
    return BIGINT


def parts(before: Values | None, wanted: Values) -> Iterator[Values]:
    """The tube with each of the tables that differ, so that a trial locks one table at a time."""
    differing = _differing(before, wanted)
    for table in differing:
        yield {**wanted, "tables": {table: wanted["tables"][table]}}
    if not differing:
        yield {**wanted, "tables": {}}


def _differing(before: Values | None, wanted: Values) -> list[str]:
    """The tables that are not attached as in the file."""
    attached = {} if before is None else before["tables"]
    return [
        table
        for table, values in sorted(wanted["tables"].items())
        if table not in attached or any(attached[table][key] != values[key] for key in attached[table])
    ]


async def _attach(place: TargetDatabase, tube: str, table: str, values: Values, *, new: bool) -> None:
    """Attach the table; with `backfill` and a new attachment its ids are scheduled in the same transaction."""

    async def work(run: Run) -> None:
        key = values["key"] or await run("tube_key_default", table, None)
        options = values["shard"], values["predicate"], values["routing"], key
        await run("tube_table_ensure_attached", tube, table, *options)
        if new and values["backfill"] is not None:
            await run("tube_backfill_request", tube, values["backfill"], values["shard"], values["shard"])

    await _locked(place, f"attach {table}", work)


async def _locked(place: TargetDatabase, what: str, work: Callable[[Run], Awaitable[Any]]) -> None:
    """Run functions of tubes that lock tables, in one transaction; a trial waits for no lock."""

    async def within(connection: Connection) -> None:
        await work(partial(call_value, connection, place.settings.tube_schema))

    if place.on_trial:
        async with place.db.connection() as connection:
            await within(connection)
    else:
        await change_with_locks(place.db, within, what=what)


def _shards(text: str) -> str:
    try:
        return ShardSet.parse(text).text
    except ValueError:
        raise ValueError(f"give {_SHARDS.expected}") from None


_SHARDS = parsed("shards", 'shards such as "all", "7", "0-15" or "0-15,32"', _shards)
_TABLE = (
    SectionKey("shard", WHOLE, minimum=0, maximum=MAX_SHARD),
    SectionKey("predicate", TEXT),
    SectionKey("routing", TEXT),
    SectionKey("key", NAMES),
    SectionKey("shards", _SHARDS, once=True),
    SectionKey("backfill", TEXT, once=True),
)

SECTION = Section(
    name="tubes",
    one="tube",
    keys=(
        SectionKey("partitions", WHOLE, 1, minimum=1, maximum=_MOST_PARTITIONS),
        SectionKey("predicate", TEXT),
        SectionKey("on_fork", one_of("report", "backfill"), "report"),
        SectionKey("keys", one_of(*KINDS), fixed=_FIXED_KEYS),
        SectionKey("tables", TABLES, {}, inner=_TABLE),
    ),
    present=present,
    normal=normal,
    change=change,
    parts=parts,
    removal=lambda name: f"to drop it: replicad tubes drop {name}",
    lists="to detach it: replicad tubes detach {name} {one}",
)
