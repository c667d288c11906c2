"""The streams of a file for `replicad apply`."""

from __future__ import annotations

from datetime import timedelta

from replicad.config.declaring import BYTES, SECONDS, TEXT, WHOLE, one_of
from replicad.errors import StreamRefused
from replicad.postgres.statements import HOW, find_relation, statement
from replicad.streams.chunks import MAX_ROW
from replicad.streams.registry import Method, Registry
from replicad.terminal.desired import Section, SectionKey, TargetDatabase, Values

_FIXED = "only a new stream can have another one: replicad streams remove NAME, then apply; its readers begin again"
_RULES = ("keep", "keep_rows")
_MIN_ROW = 1024  # bytes; a constraint of the registry


async def present(place: TargetDatabase) -> dict[str, Values]:
    """The streams of users' tables. The streams of presence and caches belong to these features."""
    schema = place.settings.stream_schema
    found: dict[str, Values] = {}
    own = {row["name"]: row for row in await place.db.fetch(statement("stream_desired", schema))}
    for name, stream in (await Registry(place.db, schema).load_streams()).items():
        if not own[name]["ours"]:
            found[name] = {
                "table": stream.table,
                "id": stream.id_column,
                "instance_column": stream.instance_column,
                "row": stream.row,
                "method": str(stream.method),
                "positions_table": stream.positions_table,
                "sequence": None if own[name]["fed"] else stream.sequence,
                "max_row": stream.max_row,
                "keep": None if stream.keep_for is None else stream.keep_for.total_seconds(),
                "keep_rows": stream.keep_rows,
            }
    return found


async def normal(place: TargetDatabase, name: str, values: Values) -> Values:  # noqa: ARG001
    """Relations by schema and name, in quotes where SQL needs them. The sequence that feeds the column is not named."""
    schema = place.settings.stream_schema
    named, feeding = dict(values), None
    for key in ("table", "positions_table", "sequence"):
        if values[key] is not None:
            oid = await find_relation(place.db, values[key])
            if oid is None:
                raise StreamRefused(f"there is no table or sequence {values[key]} in this database: {HOW}.")
            (row,) = await place.db.fetch(statement("stream_relation", schema), oid, named["id"])
            named[key] = row["name"]
            if key == "table":
                feeding = row["feeding"]
    return named | {"sequence": None if named["sequence"] == feeding else named["sequence"]}


async def change(place: TargetDatabase, name: str, before: Values | None, wanted: Values) -> None:
    """Register the stream, or set the bound of its rows and the rules of its removal: nothing else can be changed."""
    registry = Registry(place.db, place.settings.stream_schema)
    if before is not None:
        await registry.set_max_row(name, wanted["max_row"])
        if any(before[key] != wanted[key] for key in _RULES):
            await registry.set_keep(name, keep_for=_age(wanted["keep"]), keep_rows=wanted["keep_rows"])
        return
    others = {
        key: wanted[key] for key in ("instance_column", "row", "method", "positions_table", "sequence", "max_row")
    }
    await registry.add(name, wanted["table"], wanted["id"], **others)
    if any(wanted[key] is not None for key in _RULES):
        await registry.set_keep(name, keep_for=_age(wanted["keep"]), keep_rows=wanted["keep_rows"])


def _age(seconds: float | None) -> timedelta | None:
    return None if seconds is None else timedelta(seconds=seconds)


SECTION = Section(
    name="streams",
    one="stream",
    keys=(
        SectionKey("table", TEXT, required=True, fixed=_FIXED),
        SectionKey("id", TEXT, required=True, fixed=_FIXED),
        SectionKey("instance_column", TEXT, fixed=_FIXED),
        SectionKey("row", TEXT, fixed=_FIXED),
        SectionKey("method", one_of(*Method), str(Method.LOCK_WATCH), fixed=_FIXED),
        SectionKey("positions_table", TEXT, fixed=_FIXED),
        SectionKey("sequence", TEXT, fixed=_FIXED),
        SectionKey("max_row", BYTES, MAX_ROW, minimum=_MIN_ROW, maximum=MAX_ROW),
        SectionKey("keep", SECONDS, minimum=1),
        SectionKey("keep_rows", WHOLE, minimum=1),
    ),
    present=present,
    normal=normal,
    change=change,
    removal=lambda name: f"to remove it: replicad streams remove {name}",
)
