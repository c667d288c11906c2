"""Counts the rows that wait in many streams, in one statement: for figures, where a bounded number is enough."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

from replicad.postgres.bridge import quote_literal
from replicad.streams.queries import Impatient
from replicad.streams.rows import RowSource
from replicad.streams.together import fetch_together

MOST = 10_000  # rows of a stream that are counted; more cost time and tell an operator nothing new


async def count_waiting(
    db: Impatient, sources: Mapping[str, tuple[RowSource, int]], found: MutableMapping[str, int | None]
) -> None:
    """Put into `found` how many rows each stream has above its position: (source, position) by name, at most MOST.

    A stream that cannot be counted gets None. Results are in `found` also if the caller's time is over meanwhile.
    Raises what `fetch_together` raises.
    """
    branches = {
        name: f"SELECT {quote_literal(name)} AS name, ({source.count_above(position, MOST)}) AS rows"
        for name, (source, position) in sources.items()
    }

    def take(names: Sequence[str], rows: Sequence[Any] | None) -> None:
        found.update(dict.fromkeys(names) if rows is None else ((row["name"], row["rows"]) for row in rows))

    await fetch_together(db, branches, take)
