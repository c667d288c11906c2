"""The tables of a local pipeline: their shards, layouts, shapes and sinks, and new tables by rule.

All SQL here runs in the database of the source, through ADBC (replicad/spark/database.py).
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from replicad.errors import DatabaseError, TubeRefused, UsageError
from replicad.eventlog import get_logger
from replicad.spark.checkpoint import LocalCheckpoint
from replicad.spark.columns import TEXT, ColumnType
from replicad.spark.database import literal, patiently, quote
from replicad.spark.enrich import KEYS, Enricher
from replicad.spark.local.config import LocalConfig, TableOptions, in_one_transaction
from replicad.spark.pipeline_config import ALL_COLUMNS
from replicad.spark.pipeline_config import KEY as KEY_COLUMN
from replicad.spark.sinks.base import Shape, Sink
from replicad.spark.tables import FOLLOW, IGNORE, STOP, Known, TableRule, WantedColumns, find_layout
from replicad.sqlstates import LOCKED, MISSING, means
from replicad.tubes.keys import BIGINT
from replicad.tubes.shards import ALL_SHARDS, ShardSet

KEY_TEXT = "_key"  # the column with the text of the key, in files; beside it the columns of the key are as any others
_TRIES = 60  # to get the locks for an attachment, each a second

log = get_logger("replicad.spark")

_TABLES = "SELECT shard, tbl, key::text[], attached, relation::bigint FROM {schema}.tube_tables_of({tube})"
_CANDIDATES = """
SELECT n.nspname::text, c.relname::text, format('%I.%I', n.nspname, c.relname),
  {schema}.tube_key_default(c.oid, NULL) IS NOT NULL,
  NOT coalesce({schema}.tube_key_kind({schema}.tube_key_types(c.oid,
    {schema}.tube_key_default(c.oid, NULL))) = 'bigint', false)
FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
WHERE c.relkind IN ('r', 'p') AND c.relpersistence <> 't' AND NOT c.relispartition
  AND n.nspname !~ '^pg_' AND n.nspname NOT IN ('information_schema', 'replicad', {schema_text})
  AND NOT EXISTS (SELECT FROM pg_catalog.pg_depend d
    WHERE d.classid = 'pg_catalog.pg_class'::pg_catalog.regclass AND d.objid = c.oid AND d.deptype = 'e')
ORDER BY 1, 2"""


@dataclass(frozen=True, slots=True)
class TubeTable:
    """A table of a tube of many tables. `name` as SQL writes it; `plain` without quotes."""

    shard: int
    name: str
    key: tuple[str, ...]
    attached: bool

    @property
    def parts(self) -> tuple[str, str]:
        """The schema and the name, without quotes."""
        found = re.fullmatch(r'("(?:[^"]|"")+"|[^".]+)\.("(?:[^"]|"")+"|[^".]+)', self.name)
        assert found is not None
        schema, table = (part[1:-1].replace('""', '"') if part[0] == '"' else part for part in found.groups())
        return schema, table

    @property
    def plain(self) -> str:
        """`schema.table`, without quotes."""
        return ".".join(self.parts)


@dataclass(frozen=True, slots=True)
class TableWork:
    """A table for one downstream. `shards`: of the tube, whose ids are of this table."""

    name: str
    shards: ShardSet
    enricher: Enricher
    shape: Shape
    sink: Sink


def tables_of(config: LocalConfig) -> dict[int, TubeTable]:
    """The tables of the tube, by shard."""
    sql = _TABLES.format(schema=quote(config.tube_schema), tube=literal(config.tube))

    def work(driver: Any) -> list[tuple[Any, ...]]:
        with driver.cursor() as cursor:
            cursor.execute(sql)
            return list(cursor.fetchall())

    rows = patiently(config.database, work, patience=10)
    return {shard: TubeTable(shard, name, tuple(key), attached) for shard, name, key, attached, _ in rows}


def make_work(
    config: LocalConfig, downstream: str, table: TubeTable | None, keys: str, *, prepare: bool = True
) -> TableWork:
    """Look up a table (None: those of the rules) for a downstream, and prepare its sink. `keys`: the kind of ids.

    `prepare` False: nothing is made or changed, for a caller that only reads.

    Raises:
        UsageError, EnvironmentRefused, DatabaseError: it cannot be read or written so.
    """
    maker = config.downstreams[downstream]
    if table is None:
        rules, options, place = config.rules, TableOptions(None, config.renamed), "all"
        if config.columns != ALL_COLUMNS:
            options = replace(options, columns=list(config.columns))
        sink = maker.make("", "")
    else:
        escaped = table.name.replace("{", "{{").replace("}", "}}")
        rules = (TableRule(escaped, ShardSet.parse(str(table.shard))),)
        assert config.tables is not None
        options = config.tables.options.get(table.plain, TableOptions())
        place = str(table.shard)
        sink = maker.make(*table.parts)
    checkpoint = LocalCheckpoint(config.checkpoint / "columns" / downstream / place)
    known = Known.read(checkpoint) if prepare else Known()
    columns, following = options.columns, False
    if columns is None and config.new_columns != IGNORE:
        following = prepare
    elif columns is None and known.columns:
        columns = list(known.columns)
    wanted = _wanted(config, table, keys, sink)
    layout = find_layout(
        config.database,
        rules,
        replace(wanted, columns=columns, known=known, renamed=options.renamed, following=following),
    )
    new = [name for name in layout.known.columns if known.columns and name not in known.columns]
    if new and options.columns is None and config.new_columns == STOP:
        raise UsageError(
            f"{layout.id}: the table has new columns ({', '.join(new)}), and new_columns is `{STOP}`; set it to "
            f"`{FOLLOW}` or `{IGNORE}`"
        )
    wider = known.widened(layout.known.types)
    if wider and config.wider_types == STOP:
        raise UsageError(f"columns have got wider types ({', '.join(sorted(wider))}), and wider_types is `{STOP}`")
    tube = f"{quote(config.tube_schema)}.{quote(config.tube)}"
    enricher = Enricher(config.database, layout, tube, traceparent=config.traceparent)
    types = dict(layout.types)
    if config.numeric == TEXT and not sink.casts:  # whatever could make a number of it must not
        types = {name: type for name, type in types.items() if ColumnType.parse(type).name != "numeric"}
    key: tuple[str, ...] = ()
    if table is not None and in_one_transaction(sink):
        key = table.key
    if layout.id in key:
        types[layout.id] = layout.known.types[layout.id]  # an integer comes as a bigint, and goes back into its type
    added = frozenset(layout.known.columns).difference(known.columns) if known.columns else frozenset()
    shape = Shape(enricher.schema, layout.id, types, added=added, widened=wider, key=key)
    if prepare:
        sink.check_columns([*layout.schema.names, *KEYS.names])
        sink.prepare(shape)
        checkpoint.make()
        layout.known.write(checkpoint)
    name, shards = ("*", ALL_SHARDS) if table is None else (table.name, rules[0].shards)
    return TableWork(name, shards, enricher, shape, sink)


def _wanted(config: LocalConfig, table: TubeTable | None, keys: str, sink: Sink) -> WantedColumns:
    reading = config.reading(sink)
    if table is None:
        several = config.key if len(config.key) > 1 else ()
        return WantedColumns(KEY_COLUMN if several else config.key[0], reading=reading, keys=keys, key=several)
    if keys == BIGINT:
        return WantedColumns(table.key[0], reading=reading, keys=keys)
    return WantedColumns(KEY_TEXT, reading=reading, keys=keys, key=table.key)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A table that the selection of a file chooses: its name with and without quotes."""

    name: str
    plain: str
    has_key: bool
    needs_text: bool


def candidates(config: LocalConfig) -> list[Candidate]:
    """The tables of the database that the file chooses."""
    assert config.tables is not None
    schema = config.tube_schema
    sql = _CANDIDATES.format(schema=quote(schema), schema_text=literal(schema))

    def work(driver: Any) -> list[tuple[Any, ...]]:
        with driver.cursor() as cursor:
            cursor.execute(sql)
            return list(cursor.fetchall())

    chosen = config.tables
    try:
        rows = patiently(config.database, work, patience=10)
    except DatabaseError as error:
        if not means(error.sqlstate, MISSING):
            raise
        raise UsageError(
            f"the database has no schema {schema} of tubes; start a daemon with it once: replicad serve --database URL"
        ) from error
    return [
        Candidate(name, f"{space}.{table}", has_key, needs_text)
        for space, table, name, has_key, needs_text in rows
        if chosen.chooses(f"{space}.{table}")
    ]


def attach_new(config: LocalConfig, *, create: bool = False, backfill: bool = True) -> list[str]:
    """Attach the tables of the file that are not attached, each with a shard of its own, and ask for their backfill.

    `create`: make the tube, if there is none. Returns the names of the tables.

    Raises:
        UsageError: a table has no key. TubeRefused: a lock was not got in a minute. DatabaseError: a right is missing.
    """
    found = candidates(config)
    without = [one.plain for one in found if not one.has_key]
    if without and create:
        raise UsageError(
            f"{len(without)} tables have no primary key and no column id, for example {', '.join(without[:5])}: make "
            "one, or leave them out by `exclude` in [tables]"
        )
    schema, tube = quote(config.tube_schema), literal(config.tube)
    if create:
        keys = "text" if any(one.needs_text for one in found) else "bigint"
        _run(
            config,
            f"SELECT {schema}.tube_ensure_exists({tube}, keys => '{keys}') WHERE NOT EXISTS "
            f"(SELECT FROM {schema}.tube_registry WHERE tube = {tube})",
        )
    there = {one.name for one in tables_of(config).values() if one.attached}
    new = [one for one in found if one.has_key and one.name not in there]
    for one in new:
        table = literal(one.name)
        _with_locks(
            config,
            one.name,
            [
                "SET LOCAL lock_timeout = '400ms'",
                f"SELECT {schema}.tube_table_ensure_attached({tube}, {table}::regclass, "
                f"{schema}.tube_shard_ensure({tube}, {table}::regclass))",
            ],
        )
    if new and backfill:
        shards = {one.name: shard for shard, one in tables_of(config).items()}
        for one in new:
            shard = shards[one.name]
            _run(config, f"SELECT count(*) FROM {schema}.tube_backfill_request({tube}, NULL, {shard}, {shard})")
    return [one.name for one in new]


def _run(config: LocalConfig, *statements: str) -> None:
    def work(driver: Any) -> None:
        with driver.cursor() as cursor:
            for statement in statements:
                cursor.execute(statement)
                cursor.fetchall() if statement.startswith("SELECT") else None
        driver.commit()

    patiently(config.database, work, transactional=True, patience=10)


def _with_locks(
    config: LocalConfig, name: str, statements: list[str], *, sleep: Callable[[float], None] = time.sleep
) -> None:
    """Run a change that locks tables, again and again, so that no writer waits for long behind it."""
    for _ in range(_TRIES):
        try:
            _run(config, *statements)
        except DatabaseError as error:
            if not means(error.sqlstate, LOCKED):
                raise
            sleep(0.6)
        else:
            return
    raise TubeRefused(f"table {name} could not be attached: a transaction has locked it for a minute; end it")


def touches_of(works: Mapping[str, TableWork], name: str, ids: pa.Array, seq: int) -> pa.Table:
    """Touches of more ids of a table, as of a pod of the batch."""
    work = works[name]
    [(shard, _)] = work.shards.ranges[:1]
    wanted = ids.cast(work.shape.ids)
    return pa.table(
        {
            "shard": pa.repeat(pa.scalar(shard, pa.int32()), len(wanted)),
            "id": wanted,
            "seq": pa.repeat(pa.scalar(seq, pa.int64()), len(wanted)),
        }
    ).sort_by("id")
