"""Which tables of a rule have which columns: a migration reaches one shard after the other, and perhaps not all.

A pipeline may follow ADD COLUMN (`[enrich] new_columns`). The checkpoint keeps the names of the columns that every
table had once; to a new one it is those of the first table. A table that lacks another one was not reached yet, and its
rows have NULL. A table that lacks one of those was changed in another way (RENAME, DROP), which must not go unnoticed:
its rows cannot be read, and are parked.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from replicad.spark.checkpoint import Checkpoint
from replicad.spark.column_types import ColumnType
from replicad.spark.database import literal

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
_NEW = """
(SELECT pg_catalog.string_agg(attname, ', ' ORDER BY attnum) FROM pg_catalog.pg_attribute
WHERE attrelid = {table}::pg_catalog.regclass AND attnum > 0 AND NOT attisdropped
  AND attname <> ALL ({known}::name[]))"""


@dataclass(frozen=True, slots=True)
class Known:
    """What a checkpoint knows: all columns that were carried, in their order, and those that every table had once.

    `types` are the types that the columns had in Postgres, as format_type() writes them.
    """

    columns: tuple[str, ...] = ()
    whole: frozenset[str] = frozenset()
    types: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, checkpoint: Checkpoint) -> Known:
        """From the checkpoint; nothing is known to a new one."""
        text = checkpoint.read(FILE)
        if not text:
            return cls()
        found = json.loads(text)
        return cls(tuple(found["columns"]), frozenset(found["whole"]), found["types"])

    def write(self, checkpoint: Checkpoint) -> None:
        """Keep it."""
        text = json.dumps({"columns": list(self.columns), "whole": sorted(self.whole), "types": dict(self.types)})
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
        DatabaseError: one was dropped meanwhile.
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
