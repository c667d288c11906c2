"""The tables with the rows of each shard, and the SQL that reads them.

`layouts.find_layout` finds out what they are, on the driver. Tasks get a `Layout`.
"""

from __future__ import annotations

import re
import string
from collections.abc import Mapping
from dataclasses import dataclass, field

import pyarrow as pa

from replicad.errors import UsageError
from replicad.spark.database import quote
from replicad.spark.reading_columns import Column
from replicad.spark.survey import Known, new_columns
from replicad.tubes.shards import ALL_SHARDS, ShardSet

UNHELD, ADDED = "_unheld", "_added"


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
    """How to read the tables of some shards: their columns by the names that they have downstream, and their id column.

    A column of the layout that is not in `columns` is NULL. `known` are the names of all columns that the tables have;
    empty: it does not matter whether one gets another.
    """

    id: str
    columns: Mapping[str, Column]
    known: frozenset[str] = frozenset()

    def query(self, table: str) -> str:
        """SQL that selects the rows of a table with the ids in `$1`, see `Layout.query`."""
        chosen = {name: column.expression for name, column in self.columns.items()}
        reasons = [column.unheld for column in self.columns.values() if column.unheld]
        if reasons:
            chosen[UNHELD] = f"COALESCE({', '.join(reasons)})"
        if self.known:
            chosen[ADDED] = new_columns(table, self.known)
        columns = ", ".join(f"{text} AS {quote(name)}" for name, text in chosen.items())
        return f"SELECT {columns} FROM {table} WHERE {quote(self.id)} = ANY($1)"


@dataclass(frozen=True, slots=True)
class Source:
    """The tables of one rule: `form` is what they all shall have, `others` has the shards whose tables are different.

    `examples` are some shards, one of each form, to try out what can be read.
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
    or as their text. Of different types in several tables it is the one that holds the values of all. `known` is what
    the checkpoint will know.
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
                form = source.others.get(shard, source.form)
                return source.rule.database, form.query(source.rule.of(shard))
        return None
