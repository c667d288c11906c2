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
from replicad.tubes.shards import ALL_SHARDS, ShardSet

RESERVED = "_"  # the first character of replicad's own columns: _shard, _seq
UNHELD = "_unheld"
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

    `unheld` is SQL for a text that says what Arrow cannot hold in a row; NULL for a row that it holds. Empty: it holds
    every row.
    """

    rule: TableRule
    expressions: Mapping[str, str]
    unheld: str = ""


@dataclass(frozen=True, slots=True)
class Layout:
    """The sources of rows and their schema: the id column first, then the others.

    `types`: the types that the columns have in Postgres, as format_type() writes them, where the values come unchanged
    or as their text, and where all tables have the same.
    """

    id: str
    schema: pa.Schema
    sources: tuple[Source, ...]
    types: Mapping[str, str] = field(default_factory=dict)

    def query(self, shard: int) -> tuple[str | None, str] | None:
        """The database of a shard (see `TableRule.database`), and SQL that selects the rows with the ids in `$1`.

        A row that Arrow cannot hold has the reason in the column `_unheld`. None if no rule covers the shard.
        """
        for source in self.sources:
            if shard in source.rule.shards:
                columns = ", ".join(f"{text} AS {quote(name)}" for name, text in source.expressions.items())
                columns += f", {source.unheld} AS {quote(UNHELD)}" if source.unheld else ""
                sql = f"SELECT {columns} FROM {source.rule.of(shard)} WHERE {quote(self.id)} = ANY($1)"
                return source.rule.database, sql
        return None


def find_layout(
    url: str, rules: Sequence[TableRule], id_column: str, columns: Sequence[str] | None, reading: Reading
) -> Layout:
    """Look up the tables and choose the columns. `columns` None: all columns of any of the tables.

    `url` is the database of the rules without one. `reading` has the rules for the values.

    Raises:
        UsageError: a table or column is missing or cannot be used; the message lists those that exist.
        DatabaseError: Postgres cannot be used.
    """
    found: list[tuple[TableRule, dict[str, Column]]] = []
    listed: dict[str, list[tuple[str, str, bool]]] = {}
    for rule in rules:
        where = rule.database or url
        if where not in listed:
            listed[where] = patiently(where, _list_tables, patience=10)
        table = _example_of(rule, listed[where])
        look = functools.partial(read_columns, table=table, reading=reading)
        found.append((rule, patiently(where, look, patience=10)))
        _check_id(found[-1][1], id_column, table)
    kinds: dict[str, pa.DataType] = {id_column: pa.int64()}
    types: dict[str, set[str | None]] = {}
    for rule, there in found:
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
    _check_columns(columns, kinds, {name for _, there in found for name in there}, rules)
    order = [id_column, *(name for name in columns or kinds if name != id_column)]
    sources = tuple(_source(rule, {name: there[name] for name in order if name in there}) for rule, there in found)
    same = {name: next(iter(of)) for name, of in types.items() if len(of) == 1}
    known = {name: type for name, type in same.items() if type is not None}
    return Layout(id_column, pa.schema([(name, kinds[name]) for name in order]), sources, known)


def _source(rule: TableRule, columns: Mapping[str, Column]) -> Source:
    reasons = [column.unheld for column in columns.values() if column.unheld]
    unheld = f"COALESCE({', '.join(reasons)})" if reasons else ""
    return Source(rule, {name: column.expression for name, column in columns.items()}, unheld)


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


def _example_of(rule: TableRule, listed: Sequence[tuple[str, str, bool]]) -> str:
    """The rule's table of the lowest shard that has one."""
    names = {full for full, _, _ in listed} | {short for _, short, visible in listed if visible}
    if "{" not in rule.table and rule.table in names:
        return rule.table
    shards = [shard for shard in map(rule.shard_of, names) if shard is not None]
    if shards:
        return rule.of(min(shards))
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
