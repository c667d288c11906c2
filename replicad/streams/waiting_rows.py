"""Counts the rows that wait in many streams, in one statement: for figures, where a bounded number is enough."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence

from replicad.errors import DatabaseUnavailable, ReplicadError
from replicad.postgres.bridge import quote_literal
from replicad.streams.queries import Impatient
from replicad.streams.rows import RowSource

MOST = 10_000  # rows of a stream that are counted; more cost time and tell an operator nothing new
TOGETHER = 100  # streams in one statement


async def count_waiting(
    db: Impatient, sources: Mapping[str, tuple[RowSource, int]], found: MutableMapping[str, int | None]
) -> None:
    """Put into `found` how many rows each stream has above its position: (source, position) by name, at most MOST.

    A stream that cannot be counted (locked, replaced, denied) gets None. It costs the others a few statements more,
    because the list is then divided. What was found is in `found` also if the caller's time is over meanwhile.

    Raises:
        DatabaseUnavailable: Postgres cannot be reached.
    """
    names = list(sources)
    for at in range(0, len(names), TOGETHER):
        await _count(db, sources, names[at : at + TOGETHER], found)


async def _count(
    db: Impatient,
    sources: Mapping[str, tuple[RowSource, int]],
    names: Sequence[str],
    found: MutableMapping[str, int | None],
) -> None:
    branches = (
        f"SELECT {quote_literal(name)} AS name, ({sources[name][0].count_above(sources[name][1], MOST)}) AS rows"
        for name in names
    )
    try:
        rows = await db.fetch(" UNION ALL ".join(branches))
    except DatabaseUnavailable:
        raise
    except ReplicadError:
        if len(names) == 1:
            found[names[0]] = None
            return
        middle = len(names) // 2
        await _count(db, sources, names[:middle], found)
        await _count(db, sources, names[middle:], found)
    else:
        found.update((row["name"], row["rows"]) for row in rows)
