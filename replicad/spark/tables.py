"""The tables of a pipeline, their columns, and the SQL that reads them.

`find_layout` runs on the driver before a query starts. Tasks get a `Layout`. A migration goes from shard to shard, so
all tables are looked at: of the types of a column the widest counts, a column that was renamed in some tables is read
under both names, and a new column is NULL in tables that do not have it yet.

A pipeline may follow ADD COLUMN (`[enrich] new_columns`). The checkpoint keeps the names of the columns that every
table had once; a new checkpoint takes the columns of the first table. A table that lacks a later column was not
reached yet, and its rows have NULL. A table that lacks a kept column was changed in another way (RENAME,
DROP), which must not go unnoticed: its rows cannot be read, and are parked.

A name without a schema is looked up once, by the search_path of the first start, and read with its schema from then on:
another search_path, a lost right or a temporary table must not put another table in its place. A materialized view and
a foreign table are refused, also below a view or as a partition: a row that is missing in them may exist.
"""

from __future__ import annotations

import functools
import json
import re
import string
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa

from replicad.errors import UsageError
from replicad.spark.checkpoint import Checkpoint
from replicad.spark.columns import Column, ColumnForms, ColumnType, read_types
from replicad.spark.database import literal, patiently, quote
from replicad.tubes.keys import BIGINT
from replicad.tubes.shards import ALL_SHARDS, ShardSet

FOLLOW, STOP, IGNORE = "follow", "stop", "ignore"
NEW_COLUMN_FORMS = {
    FOLLOW: "it is added downstream",
    STOP: "the run ends",
    IGNORE: "it is left out",
}
WIDER_TYPE_FORMS = {
    FOLLOW: "the column downstream gets it too",
    STOP: "the run ends",
}
FILE = "replicad-columns"  # in the checkpoint

_COLUMNS = """
SELECT pg_catalog.array_agg(name ORDER BY number) FROM (
  SELECT t.name, min(t.number) AS number, pg_catalog.array_agg(a.attname::text ORDER BY a.attnum) AS named,
    pg_catalog.array_agg(pg_catalog.format_type(a.atttypid, a.atttypmod) ORDER BY a.attnum) AS types
  FROM ROWS FROM (pg_catalog.unnest($1::text[])) WITH ORDINALITY AS t(name, number)
  JOIN pg_catalog.pg_attribute a ON a.attrelid = t.name::pg_catalog.regclass
  WHERE a.attnum > 0 AND NOT a.attisdropped GROUP BY t.name) every_table
GROUP BY named, types ORDER BY min(number)"""
_NOT_OF_NOW = """
WITH RECURSIVE read (name, rel) AS (
  SELECT t.name, t.name::pg_catalog.regclass::oid FROM pg_catalog.unnest($1::text[]) t(name)
  UNION
  SELECT read.name, below.rel FROM read CROSS JOIN LATERAL (
    SELECT i.inhrelid FROM pg_catalog.pg_inherits i WHERE i.inhparent = read.rel
    UNION ALL
    SELECT d.refobjid FROM pg_catalog.pg_rewrite r JOIN pg_catalog.pg_depend d ON d.objid = r.oid
    WHERE r.ev_class = read.rel AND d.classid = 'pg_catalog.pg_rewrite'::pg_catalog.regclass
      AND d.refclassid = 'pg_catalog.pg_class'::pg_catalog.regclass) AS below (rel))
SELECT read.name, CASE WHEN c.oid <> read.name::pg_catalog.regclass THEN c.oid::pg_catalog.regclass::text END,
  c.relkind::text FROM read JOIN pg_catalog.pg_class c ON c.oid = read.rel
WHERE c.relkind IN ('m', 'f') ORDER BY 1, 2 LIMIT 1"""
_NEW = """
(SELECT pg_catalog.string_agg(attname, ', ' ORDER BY attnum) FROM pg_catalog.pg_attribute
WHERE attrelid = {table}::pg_catalog.regclass AND attnum > 0 AND NOT attisdropped
  AND attname <> ALL ({known}::name[]))"""


@dataclass(frozen=True, slots=True)
class Known:
    """The record of a checkpoint: all columns that were carried, in their order, and the columns that every table had
    once.

    `types` are the types that the columns had in Postgres, as format_type() writes them. `schemas` has the schema in
    which the tables of a rule without a schema were found, by the rule's text.
    """

    columns: tuple[str, ...] = ()
    whole: frozenset[str] = frozenset()
    types: Mapping[str, str] = field(default_factory=dict)
    schemas: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, checkpoint: Checkpoint) -> Known:
        """From the checkpoint; nothing is known to a new one."""
        text = checkpoint.read(FILE)
        if not text:
            return cls()
        found = json.loads(text)
        return cls(tuple(found["columns"]), frozenset(found["whole"]), found["types"], found["schemas"])

    def write(self, checkpoint: Checkpoint) -> None:
        """Keep it."""
        text = json.dumps(
            {
                "columns": list(self.columns),
                "whole": sorted(self.whole),
                "types": dict(self.types),
                "schemas": dict(self.schemas),
            }
        )
        if checkpoint.read(FILE) != text:
            checkpoint.write(FILE, text)

    def widened(self, types: Mapping[str, str]) -> frozenset[str]:
        """The columns whose types hold all values of the types that are known, and are others."""
        return frozenset(
            name
            for name, type in types.items()
            if self.types.get(name, type) != type
            and ColumnType.parse(type).holds(ColumnType.parse(self.types.get(name, type)))
        )


def survey_tables(driver: Any, tables: Iterable[str]) -> list[tuple[str, ...]]:
    """The tables in groups that have the same columns of the same types, in the order of the first table of each.

    Raises:
        DatabaseError: a table was dropped meanwhile.
    """
    import pyarrow as pa  # noqa: PLC0415 - with the driver

    names = pa.array([list(tables)], pa.list_(pa.string()))
    with driver.cursor() as cursor:
        cursor.execute(_COLUMNS, parameters=pa.record_batch([names], names=["0"]))
        return [tuple(alike) for (alike,) in cursor.fetchall()]


def new_columns(table: str, known: Iterable[str]) -> str:
    """SQL for the names of the columns of a table that are not in `known`; NULL if there are none.

    It sees the table as the query sees it of which it is a part.
    """
    listed = ", ".join(literal(name) for name in sorted(known))
    return _NEW.format(table=literal(table), known=f"ARRAY[{listed}]")


UNHELD, ADDED = "_replicad_unheld", "_replicad_added"


@dataclass(frozen=True, slots=True)
class TableRule:
    """The table of some shards: an SQL name in which `{shard}` stands for the number, e.g. `shard_{shard:04d}.cities`.

    `database` is the URL of its Postgres; None: that of the pipeline.
    """

    table: str
    shards: ShardSet = ALL_SHARDS
    database: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        try:
            fields = {name for _, name, _, _ in string.Formatter().parse(self.table) if name is not None}
            self.table.format(shard=0)
        except (ValueError, KeyError, IndexError) as error:
            raise UsageError(f"table {self.table!r} is not a template: {error}; write it like {_EXAMPLE}") from None
        if fields - {"shard"} or not self.table.strip() or ";" in self.table:
            raise UsageError(f"table {self.table!r} is not a template; write it like {_EXAMPLE}")

    def of(self, shard: int) -> str:
        """The SQL name of the table of a shard."""
        return self.table.format(shard=shard)

    def shard_of(self, table: str) -> int | None:
        """The shard of a table; None if the rule does not cover the table."""
        before, marker, _ = self.table.partition("{shard")
        number = re.match("[0-9]{1,9}", table[len(before) :]) if marker and table.startswith(before) else None
        if number is None or self.of(int(number[0])) != table:
            return None
        return int(number[0]) if int(number[0]) in self.shards else None


_EXAMPLE = "`shard_{shard:04d}.cities`, where {shard} is the number of the shard"


@dataclass(frozen=True, slots=True)
class TableForm:
    """How to read the tables of some shards: their columns by the names that they have downstream, and `found`, SQL for
    whether the id of a row is in `$1`.

    A column of the layout that is not in `columns` is NULL. `known` are the names of all columns that the tables have;
    empty: it does not matter whether one gets another.
    """

    found: str
    columns: Mapping[str, Column]
    known: frozenset[str] = frozenset()

    def query(self, table: str) -> str:
        """SQL that selects the rows of a table with the ids in `$1`, see `Layout.query`."""
        return self.select(table, self.found)

    def select(self, table: str, condition: str) -> str:
        """SQL that selects the rows of a table that fulfil a condition."""
        chosen = {name: column.expression for name, column in self.columns.items()}
        reasons = [column.unheld for column in self.columns.values() if column.unheld]
        if reasons:
            chosen[UNHELD] = f"COALESCE({', '.join(reasons)})"
        if self.known:
            chosen[ADDED] = new_columns(table, self.known)
        columns = ", ".join(f"{text} AS {quote(name)}" for name, text in chosen.items())
        return f"SELECT {columns} FROM {table} WHERE {condition}"


@dataclass(frozen=True, slots=True)
class ShardTable:
    """The tables of one rule: `form` is what they all shall have, `others` has the shards whose tables are different.

    `examples` are some shards, one for each form, to find out what can be read.
    """

    rule: TableRule
    form: TableForm
    others: Mapping[int, TableForm] = field(default_factory=dict)
    examples: tuple[int, ...] = ()

    @property
    def lacking(self) -> dict[int, frozenset[str]]:
        """The columns that are NULL in the rows of some shards, by shard."""
        found = {shard: frozenset(self.form.columns) - set(form.columns) for shard, form in self.others.items()}
        return {shard: names for shard, names in found.items() if names}


@dataclass(frozen=True, slots=True)
class Layout:
    """The sources of rows and their schema: the id column first, then the others.

    `types`: the types that the columns have in Postgres, as format_type() writes them, where the values come unchanged
    or as their text. Of different types in several tables it is the type that holds the values of all. `known` is the
    record for the checkpoint.
    """

    id: str
    schema: pa.Schema
    sources: tuple[ShardTable, ...]
    types: Mapping[str, str] = field(default_factory=dict)
    known: Known = field(default_factory=Known)

    @property
    def ids(self) -> pa.DataType:
        """The type of the ids: int64, or string (tubes/keys.py)."""
        return self.schema.field(self.id).type

    def query(self, shard: int) -> tuple[str | None, str] | None:
        """The database of a shard (see `TableRule.database`), and SQL that selects the rows with the ids in `$1`.

        A row that Arrow cannot hold has the reason in the column UNHELD. ADDED has the names of columns that are
        in the table but not in the layout. None if no rule covers the shard.
        """
        located = self.located(shard)
        return None if located is None else (located[0], located[2].query(located[1]))

    def located(self, shard: int) -> tuple[str | None, str, TableForm] | None:
        """The database of a shard (see `TableRule.database`), its table, and how that is read."""
        for source in self.sources:
            if shard in source.rule.shards:
                return source.rule.database, source.rule.of(shard), source.others.get(shard, source.form)
        return None


RESERVED = ("_shard", "_seq")  # replicad's own columns downstream
_OURS = "_replicad_"  # what names of columns of replicad's begin with while rows are on their way
_LIST_TABLES = """
SELECT format('%I.%I', n.nspname, c.relname), format('%I', c.relname), pg_catalog.pg_table_is_visible(c.oid)
FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
WHERE c.relkind IN ('r', 'p', 'v', 'm', 'f') AND n.nspname !~ '^pg_' AND n.nspname <> 'information_schema'
"""


@dataclass(frozen=True, slots=True)
class WantedColumns:
    """What a pipeline wants of its tables: the id column, and `columns` (None: all of any table).

    `keys` is the kind of the tube's ids (tubes/keys.py). `key` has the columns of a key of several columns; `id` is
    then the name of its text downstream. Empty: the column `id` is the key.

    `reading` has the rules for values. `known` is what the checkpoint knows of the columns. `renamed` has the new names
    of columns that are being renamed in the tables, by the names that they keep downstream. `following`: a column that
    a table gets later must be noticed.
    """

    id: str
    columns: Sequence[str] | None = None
    reading: ColumnForms = field(default_factory=ColumnForms)
    known: Known = field(default_factory=Known)
    renamed: Mapping[str, str] = field(default_factory=dict)
    following: bool = False
    keys: str = BIGINT
    key: tuple[str, ...] = ()

    @property
    def key_columns(self) -> tuple[str, ...]:
        """The columns of the key, by the names that they have downstream."""
        return self.key or (self.id,)


@dataclass(frozen=True, slots=True)
class _Form:
    """Tables of one rule that have the same columns: `names` has those in the tables by those downstream."""

    tables: tuple[str, ...]
    names: Mapping[str, str]
    types: Mapping[str, str]  # by the names in the tables


def find_layout(url: str, rules: Sequence[TableRule], wanted: WantedColumns) -> Layout:
    """Look up the tables and choose the columns. `url` is the database of the rules without one.

    Raises:
        UsageError: a table or column is missing or cannot be used; the message lists the existing names.
        DatabaseError: Postgres cannot be used.
    """
    looked = [_look(rule.database or url, rule, wanted) for rule in rules]
    forms = [form for _, _, found in looked for form in found]
    there = list(dict.fromkeys(name for form in forms for name in form.names))
    _check_columns(wanted.columns, there, rules)
    before = [name for name in wanted.known.columns if name in there]  # columns keep their places downstream
    order = list(dict.fromkeys([wanted.id, *before, *(there if wanted.columns is None else wanted.columns)]))
    by_rule = [(rule, found) for rule, _, found in looked]
    if wanted.key and wanted.id in there:
        raise UsageError(
            f"the tables have a column {wanted.id!r}, which is the name of their key downstream; rename it in a view"
        )
    widest = {
        name: _widest(name, by_rule, wanted.reading, wanted.known.types.get(name)) for name in order if name in there
    }
    ids = pa.int64() if wanted.keys == BIGINT else pa.string()
    schema = pa.schema([(name, ids if name == wanted.id else widest[name][1].kind) for name in order])
    sources, whole = [], set(wanted.known.whole)
    for rule, first, found in looked:
        strict = wanted.known.whole if wanted.known.columns else first | set(wanted.columns or ())
        whole |= strict | frozenset(there).intersection(*(form.names for form in found))
        sources.append(_source(rule, found, order, {name: type for name, (type, _) in widest.items()}, strict, wanted))
    schemas = {
        rule.table: found.table.removesuffix(rule.table)
        for rule, (found, _, _) in zip(rules, looked, strict=True)
        if found.table != rule.table
    }
    known = Known(tuple(order), frozenset(whole), {name: type for name, (type, _) in widest.items()}, schemas)
    types = {name: column.type for name, (_, column) in widest.items() if column.type is not None and name != wanted.id}
    return Layout(wanted.id, schema, tuple(sources), types, known)


def _look(url: str, rule: TableRule, wanted: WantedColumns) -> tuple[TableRule, frozenset[str], list[_Form]]:
    """The rule with the schema of its tables, the columns of its first table, and the forms that its tables have."""
    listed = patiently(url, list_tables, patience=10)
    rule = _with_schema(rule, _tables_of(rule, listed), listed, wanted.known.schemas)
    tables = _tables_of(rule, listed)
    patiently(url, functools.partial(_check_kinds, tables=tables), patience=10)
    found = []
    for alike in patiently(url, functools.partial(survey_tables, tables=tables), patience=10):
        types = patiently(url, functools.partial(read_types, table=alike[0]), patience=10)
        names = _named(types, wanted.renamed)
        _check_key(types, names, wanted, alike[0])
        found.append(_Form(alike, names, types))
    return rule, frozenset(found[0].names) if found else frozenset(), found


def _with_schema(
    rule: TableRule, tables: Sequence[str], listed: Sequence[tuple[str, str, bool]], known: Mapping[str, str]
) -> TableRule:
    """The rule with the schema in which its `tables` are found. `known` is from the checkpoint.

    Raises:
        UsageError: they are in several schemas, or in another one than before.
    """
    if not set(tables).isdisjoint(full for full, _, _ in listed):
        return rule
    visible = {short: full.removesuffix(short) for full, short, seen in listed if seen}
    schemas = {visible[table].replace("{", "{{").replace("}", "}}") for table in tables}
    before = known.get(rule.table)
    if len(schemas) > 1:
        raise UsageError(
            f"the tables {rule.table} are in several schemas ({', '.join(sorted(schemas))}); write the schema, or a "
            "rule for each"
        )
    [schema] = schemas
    if before is not None and before != schema:
        raise UsageError(
            f"table {rule.table} was {before}{rule.table} when the checkpoint was made, and is {schema}{rule.table} "
            "now: the role has another search_path, or lost a right; write the schema of the table that you mean"
        )
    return replace(rule, table=f"{schema}{rule.table}")


def _check_kinds(driver: Any, tables: Sequence[str]) -> None:
    """Raise UsageError if a table shows rows of another time or server: no row there does not mean no row."""
    names = pa.array([list(tables)], pa.list_(pa.string()))
    with driver.cursor() as cursor:
        cursor.execute(_NOT_OF_NOW, parameters=pa.record_batch([names], names=["0"]))
        found = cursor.fetchone()
    if found is None:
        return
    name, below, kind = found
    what = "is a materialized view, whose rows are of its last REFRESH" if kind == "m" else "is a foreign table"
    raise UsageError(
        f"table {name}{f' reads {below}, which' if below else ''} {what}, so a row that is missing in it may not have "
        "been deleted; read the tables themselves, or a view of them"
    )


def _named(types: Iterable[str], renamed: Mapping[str, str]) -> dict[str, str]:
    """The names in a table by those downstream. Of a column that is there under both its names, the old one counts."""
    found = {name: name for name in types}
    for name, newer in renamed.items():
        if newer in found:
            del found[newer]
            found.setdefault(name, newer)
    return found


def _widest(
    name: str, looked: Iterable[tuple[TableRule, Sequence[_Form]]], reading: ColumnForms, known: str | None
) -> tuple[str, Column]:
    """Of the types of a column, and its `known` type, the type that holds the values of all; and how it is read.

    If none does, the first of a rule counts: values that fit are converted. Two rules must agree.
    """
    found: tuple[str, Column] | None = None
    for rule, forms in looked:
        types = [form.types[form.names[name]] for form in forms if name in form.names]
        of_rule: tuple[str, Column] | None = None
        for type in types:
            column = reading.column(name, type)
            if of_rule is None or column.is_wider(of_rule[1]):
                of_rule = type, column
        if found is None or of_rule is None:
            found = found or of_rule
        elif of_rule[1].is_wider(found[1]):
            found = of_rule
        elif of_rule[1].kind != found[1].kind and not found[1].is_wider(of_rule[1]):
            raise UsageError(
                f"column {name} is {found[0]} in one table and {of_rule[0]} in {rule.table}; "
                "list the columns that you need, or cast it in a view"
            )
    assert found is not None
    if known is not None:
        before = reading.column(name, known)
        if before.is_wider(found[1]) and not found[1].is_wider(before):
            return known, before
    return found


def _source(  # noqa: PLR0917 - all of it is known to the caller alone
    rule: TableRule,
    forms: Sequence[_Form],
    order: Sequence[str],
    types: Mapping[str, str],
    strict: Collection[str],
    wanted: WantedColumns,
) -> ShardTable:
    """How each table of a rule is read. A table that lacks a column of `strict` must not give NULL for it."""

    every = dict(item for form in reversed(forms) for item in form.types.items())
    of_rule = _named(every, wanted.renamed)

    def read(form: _Form) -> TableForm:
        must = {name for name in strict if name in of_rule}
        names = {name: form.names.get(name, name) for name in order if name in form.names or name in must}
        columns = {name: wanted.reading.column(in_table, types[name]) for name, in_table in names.items()}
        known = frozenset(form.types) | set(names.values()) if wanted.following else frozenset()
        if wanted.keys == BIGINT:
            return TableForm(f"{quote(names[wanted.id])} = ANY($1)", columns, known)
        key = [form.names.get(name, name) for name in wanted.key_columns]
        text = Column(key_as_text(key), pa.string(), None)
        return TableForm(key_among(key, form.types or every), {wanted.id: text, **_without(columns, wanted.id)}, known)

    whole = read(_Form((), of_rule, every))
    others = {}
    for form in forms:
        made = read(form)
        if (made.found, made.columns, made.known) != (whole.found, whole.columns, whole.known):
            others.update({shard: made for shard in map(rule.shard_of, form.tables) if shard is not None})
    examples = [shard for form in forms if (shard := rule.shard_of(form.tables[0])) is not None]
    return ShardTable(rule, whole, others, tuple(examples))


def _without(columns: Mapping[str, Column], name: str) -> dict[str, Column]:
    return {other: column for other, column in columns.items() if other != name}


def key_as_text(key: Sequence[str]) -> str:
    """SQL for the id of a row in a tube with ids of kind text, as `tube_key_sql` of tubes/sql/keys.sql."""
    texts = [f"{quote(name)}::text" for name in key]
    return texts[0] if len(texts) == 1 else f"json_build_array({', '.join(texts)})::text"


def key_among(key: Sequence[str], types: Mapping[str, str]) -> str:
    """SQL for whether the id of a row is in `$1`, an array of text; an index on the columns of the key serves it."""
    if len(key) == 1:
        return f"{quote(key[0])} = ANY($1::text[]::{types[key[0]]}[])"
    values = ", ".join(f"(given_key::json ->> {number})::{types[name]}" for number, name in enumerate(key))
    return f"({', '.join(map(quote, key))}) IN (SELECT {values} FROM unnest($1::text[]) AS given_key)"


def _check_key(types: Mapping[str, str], names: Mapping[str, str], wanted: WantedColumns, table: str) -> None:
    for column in wanted.key_columns:
        if column not in names:
            raise UsageError(f"table {table} has no column {column!r}; its columns are {', '.join(types)}")
    if wanted.keys == BIGINT:
        (column,) = wanted.key_columns
        if not pa.types.is_integer(ColumnForms().column(column, types[names[column]]).kind):
            raise UsageError(
                f"column {column} of {table} is not an integer, and ids of kind bigint are expected; for a tube with "
                'ids of kind text: keys = "text" in [source]'
            )


def _check_columns(columns: Sequence[str] | None, there: Collection[str], rules: Sequence[TableRule]) -> None:
    missing = [name for name in columns or () if name not in there]
    if missing:
        tables = ", ".join(rule.table for rule in rules)
        raise UsageError(f"no column {missing[0]!r} in {tables}; there are {', '.join(sorted(there))}")
    ours = [name for name in (there if columns is None else columns) if name in RESERVED or name.startswith(_OURS)]
    if ours:
        raise UsageError(
            f"column {ours[0]!r}: {', '.join(RESERVED)} and names that begin with {_OURS} are reserved for replicad's "
            "own columns; list the columns that you need without it, or rename it in a view"
        )


def _tables_of(rule: TableRule, listed: Sequence[tuple[str, str, bool]]) -> list[str]:
    """The rule's tables, in the order of their shards."""
    names = {full for full, _, _ in listed} | {short for _, short, visible in listed if visible}
    if "{" not in rule.table and rule.table in names:
        return [rule.table]
    shards = [shard for shard in map(rule.shard_of, names) if shard is not None]
    if shards:
        return [rule.of(shard) for shard in sorted(shards)]
    base = rule.table.rpartition(".")[2].strip('"')
    near = sorted(full for full, _, _ in listed if base in full)[:5]
    raise UsageError(
        f"no table matches {rule.table} for shards {rule.shards.text}; "
        + (f"there are {', '.join(near)}" if near else "is it the right database, and may this user see it?")
    )


def list_tables(driver: Any) -> list[tuple[str, str, bool]]:
    """The tables and views of a database: name with schema, name alone, and whether that is enough to find it."""
    with driver.cursor() as cursor:
        cursor.execute(_LIST_TABLES)
        return list(cursor.fetchall())
