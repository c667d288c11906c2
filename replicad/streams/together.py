"""Asks about many tables in one statement, where one table that cannot be read must not hide the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from replicad.errors import DatabaseUnavailable, ReplicadError
from replicad.streams.queries import Impatient

TOGETHER = 100  # tables in one statement

Take = Callable[[Sequence[str], Sequence[Any] | None], None]


async def fetch_together(db: Impatient, branches: Mapping[str, str], take: Take) -> None:
    """Run queries with the same columns, joined by UNION ALL. `take(names, rows)` gets the rows of some of them.

    A query that fails (its table is locked, replaced, denied) costs the others a few statements more, because the list
    is then divided until it stands alone: `take([name], None)`.

    Raises:
        DatabaseUnavailable: Postgres cannot be reached.
    """
    names = list(branches)
    for at in range(0, len(names), TOGETHER):
        await _fetch(db, branches, names[at : at + TOGETHER], take)


async def _fetch(db: Impatient, branches: Mapping[str, str], names: Sequence[str], take: Take) -> None:
    try:
        rows = await db.fetch(union_all(branches[name] for name in names))
    except DatabaseUnavailable:
        raise
    except ReplicadError:
        if len(names) == 1:
            take(names, None)
            return
        middle = len(names) // 2
        await _fetch(db, branches, names[:middle], take)
        await _fetch(db, branches, names[middle:], take)
    else:
        take(names, rows)


def union_all(queries: Iterable[str]) -> str:
    """One query of several."""
    return " UNION ALL ".join(f"({query})" for query in queries)
