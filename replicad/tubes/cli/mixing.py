"""Tables whose ids cannot be told apart in a tube, because they were attached with one shard."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


def warning_of_mixed(rows: Iterable[Mapping[str, Any]], tube: str) -> str | None:
    """A sentence about the first shard of a tube with several tables, from rows of `tube_list`; None if there is none.

    Tables with a routing say themselves what their shard is.
    """
    tables: dict[int, list[str]] = {}
    for row in rows:
        if row["tube"] == tube and row["tbl"] is not None and row["routing"] is None:
            tables.setdefault(row["shard"], []).append(str(row["tbl"]))
    for shard, names in tables.items():
        if len(names) > 1:
            return (
                f"shard {shard} of {tube} has the tables {', '.join(names)}: an id may be of each of them, and a "
                "pipeline reads one table for a shard; give each a shard of its own (--shard), or a tube of its own"
            )
    return None
