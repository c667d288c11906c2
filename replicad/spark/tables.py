"""Find the tables with the rows of each shard, and their columns. Runs on the driver before a query starts."""

from __future__ import annotations

import functools
import re
import string
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from replicad.errors import UsageError
from replicad.spark.database import patiently, quote
from replicad.spark.reading_columns import Column, Reading, read_columns
from replicad.spark.survey import Known, Survey, new_columns, survey_tables
from replicad.tubes.shards import ALL_SHARDS, ShardSet

RESERVED = "_"  # the first character of replicad's own columns: _shard, _seq
UNHELD, ADDED = "_unheld", "_added"
_LIST_TABLES = """
SELECT format('%I.%I', n.nspname, c.relname), format('%I', c.relname), pg_catalog.pg_table_is_visible(c.oid)
FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
WHERE c.relkind IN ('r', 'p', 'v', 'm', 'f') AND n.nspname !~ '^pg_' AND n.nspname <> 'information_schema'
"""


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
class Source:
    """How to select the rows of one rule's shards: SQL expressions by column. A column without expression is NULL.

    `unheld` has, for columns of which Arrow cannot hold every value, SQL for a text that says which one; NULL for a
    value that it holds. `lacking` are the columns that a shard's table does not have, by shard: they are NULL.
    `all_columns` are those of all its tables; empty: it does not matter whether one gets another column.
    """

    rule: TableRule
    expressions: Mapping[str, str]
    unheld: Mapping[str, str] = field(default_factory=dict)
    lacking: Mapping[int, frozenset[str]] = field(default_factory=dict)
    all_columns: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Layout:
    """The sources of rows and their schema: the id column first, then the others.

    `types`: the types that the columns have in Postgres, as format_type() writes them, where the values come unchanged
    or as their text, and where all tables have the same. `known` is what the checkpoint will know.
    """

    id: str
    schema: pa.Schema
    sources: tuple[Source, ...]
    types: Mapping[str, str] = field(default_factory=dict)
    known: Known = field(default_factory=Known)

    def query(self, shard: int) -> tuple[str | None, str] | None:
        """The database of a shard (see `TableRule.database`), and SQL that selects the rows with the ids in `$1`.

        A row that Arrow cannot hold has the reason in the column `_unheld`. `_added` has the names of columns that are
        in the table but not in the layout. None if no rule covers the shard.
        """
        for source in self.sources:
            if shard in source.rule.shards:
                table, lacking = source.rule.of(shard), source.lacking.get(shard, frozenset())
                chosen = {name: text for name, text in source.expressions.items() if name not in lacking}
                reasons = [text for name, text in source.unheld.items() if name in chosen]
                if reasons:
                    chosen[UNHELD] = f"COALESCE({', '.join(reasons)})"
                if source.all_columns:
                    chosen[ADDED] = new_columns(table, source.all_columns - lacking)
                columns = ", ".join(f"{text} AS {quote(name)}" for name, text in chosen.items())
                sql = f"SELECT {columns} FROM {table} WHERE {quote(self.id)} = ANY($1)"
                return source.rule.database, sql
        return None


def find_layout(  # noqa: PLR0917 - one after the other, as a pipeline has them
    url: str,
    rules: Sequence[TableRule],
    id_column: str,
    columns: Sequence[str] | None,
    reading: Reading,
    known: Known | None = None,
    *,
    following: bool = False,
) -> Layout:
    """Look up the tables and choose the columns. `columns` None: all columns of any of the tables.

    `url` is the database of the rules without one. `reading` has the rules for the values. `known` is what the
    checkpoint knows of the columns. `following`: a column that a table gets later must be noticed.

    Raises:
        UsageError: a table or column is missing or cannot be used; the message lists those that exist.
        DatabaseError: Postgres cannot be used.
    """
    known = known or Known()
    looked = _look(url, rules, id_column, reading)
    kinds: dict[str, pa.DataType] = {id_column: pa.int64()}
    types: dict[str, set[str | None]] = {}
    for rule, _, there in looked:
        for name in columns if columns is not None else there:
            if name == id_column or name not in there:
                continue
            kind = there[name].kind
            if kinds.setdefault(name, kind) != kind:
                raise UsageError(
                    f"column {name} is {kinds[name]} in one table and {kind} in {rule.table}; "
                    "list the columns that you need, or cast it in a view"
                )
            types.setdefault(name, set()).add(there[name].type)
    _check_columns(columns, kinds, {name for _, _, there in looked for name in there}, rules)
    before = [name for name in known.columns if name in kinds]  # columns keep their places downstream
    order = list(dict.fromkeys([id_column, *before, *(columns or kinds)]))
    sources, whole = [], set(known.whole)
    for rule, survey, there in looked:
        strict = known.whole if known.columns else survey.first | set(columns or ())
        lacking = {table: names - strict for table, names in survey.lacking.items()}
        by_shard = {shard: lacking[table] for table in lacking if (shard := rule.shard_of(table)) is not None}
        whole |= strict | survey.whole
        chosen = {name: there[name] for name in order if name in there}
        sources.append(_source(rule, chosen, by_shard, survey.columns if following else frozenset()))
    same = {name: next(iter(of)) for name, of in types.items() if len(of) == 1}
    of_one = {name: type for name, type in same.items() if type is not None}
    schema = pa.schema([(name, kinds[name]) for name in order])
    return Layout(id_column, schema, tuple(sources), of_one, Known(tuple(order), frozenset(whole)))


def _look(
    url: str, rules: Sequence[TableRule], id_column: str, reading: Reading
) -> list[tuple[TableRule, Survey, dict[str, Column]]]:
    """Each rule with its tables, and their columns. Of the types of a column, that which holds all values counts."""
    found = []
    listed: dict[str, list[tuple[str, str, bool]]] = {}
    for rule in rules:
        where = rule.database or url
        if where not in listed:
            listed[where] = patiently(where, _list_tables, patience=10)
        tables = _tables_of(rule, listed[where])
        survey = patiently(where, functools.partial(survey_tables, tables=tables), patience=10)
        columns: dict[str, Column] = {}
        for table in survey.examples:
            look = functools.partial(read_columns, table=table, reading=reading)
            for name, column in patiently(where, look, patience=10).items():
                if column.is_wider(columns.setdefault(name, column)):
                    columns[name] = column
        _check_id(columns, id_column, tables[0])
        found.append((rule, survey, columns))
    return found


def _source(
    rule: TableRule, columns: Mapping[str, Column], lacking: Mapping[int, frozenset[str]], all_columns: frozenset[str]
) -> Source:
    reasons = {name: column.unheld for name, column in columns.items() if column.unheld}
    expressions = {name: column.expression for name, column in columns.items()}
    return Source(rule, expressions, reasons, {at: names for at, names in lacking.items() if names}, all_columns)


def _check_id(columns: Mapping[str, Column], id_column: str, table: str) -> None:
    if id_column not in columns:
        raise UsageError(f"table {table} has no column {id_column!r}; its columns are {', '.join(columns)}")
    if not pa.types.is_integer(columns[id_column].kind):
        raise UsageError(f"column {id_column} of {table} is not an integer; ids of a tube are bigint")


def _check_columns(
    columns: Sequence[str] | None, types: Iterable[str], there: Collection[str], rules: Sequence[TableRule]
) -> None:
    missing = [name for name in columns or () if name not in there]
    if missing:
        tables = ", ".join(rule.table for rule in rules)
        raise UsageError(f"no column {missing[0]!r} in {tables}; there are {', '.join(sorted(there))}")
    ours = [name for name in types if name.startswith(RESERVED)]
    if ours:
        raise UsageError(
            f"column {ours[0]!r}: names that begin with {RESERVED!r} are reserved for replicad's own columns; "
            "list the columns that you need without it, or rename it in a view"
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


def _list_tables(driver: Any) -> list[tuple[str, str, bool]]:
    with driver.cursor() as cursor:
        cursor.execute(_LIST_TABLES)
        return list(cursor.fetchall())
