"""Compare the tables in Postgres with their Parquet copy, row by row and value by value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from replicad.demo.data import COLUMNS

Rows = Mapping[int, tuple[Any, ...]]

_EXAMPLES = 5


@dataclass(frozen=True, slots=True)
class Comparison:
    """The counts of rows on both sides, and the ids of rows that are on one side only or differ."""

    left: int
    right: int
    equal: int
    missing: tuple[int, ...]
    superfluous: tuple[int, ...]
    different: tuple[int, ...]

    @property
    def is_equal(self) -> bool:
        """Whether both sides have the same rows with the same values."""
        return not (self.missing or self.superfluous or self.different)

    def describe(self) -> str:
        """The differences, with some ids, for people."""
        kinds = (("missing", self.missing), ("superfluous", self.superfluous), ("different", self.different))
        return "; ".join(
            f"{len(ids):,} {what} downstream, e.g. {', '.join(map(str, ids[:_EXAMPLES]))}" for what, ids in kinds if ids
        )


def compare(left: Rows, right: Rows) -> Comparison:
    """Compare rows by id; `right` is the downstream."""
    both = left.keys() & right.keys()
    different = sorted(i for i in both if left[i] != right[i])
    return Comparison(
        left=len(left),
        right=len(right),
        equal=len(both) - len(different),
        missing=tuple(sorted(left.keys() - both)),
        superfluous=tuple(sorted(right.keys() - both)),
        different=tuple(different),
    )


def read_downstream(folder: Path) -> dict[int, tuple[Any, ...]]:
    """All rows of the Parquet copy, by id, in the order of COLUMNS.

    Raises:
        UsageError: there is no copy in that folder.
        ValueError: an id is in it twice.
    """
    from replicad.spark.sinks import parquet  # noqa: PLC0415 - pyarrow is slow to import

    table = parquet.table(folder).select(list(COLUMNS))
    rows = dict(zip(table.column("id").to_pylist(), zip(*table.to_pydict().values(), strict=True), strict=True))
    if len(rows) != len(table):
        raise ValueError(f"{len(table) - len(rows)} ids are in {folder} more than once")
    return rows
