"""Finds the row that cannot be read, when a copy of a range fails, by trying parts of the range.

A part is tried with the same COPY that failed, and its rows are discarded; so the same values are evaluated, converted
to UTF-8 and measured. The search halves the range of ids, so it ends after at most 64 rounds of two tries each. Where
Postgres sends rows as it reads them, the first try finds the row.
"""

from __future__ import annotations

from collections.abc import Mapping
from shlex import quote

from replicad.errors import DatabaseError, RowTooLong, RowUnreadable
from replicad.postgres import failures
from replicad.streams.chunks import MAX_ROW, Chunk
from replicad.streams.row_text import Range
from replicad.streams.rows import Reads, RowSource

_REASON = 300  # characters of the message of Postgres, which can quote a whole row


def is_of_a_row(error: Exception) -> bool:
    """Whether one row's values may be the cause of the failure: not for outages, locks, rights and names."""
    return isinstance(error, RowTooLong) or (
        isinstance(error, DatabaseError) and failures.may_be_of_a_row(error.sqlstate)
    )


def unreadable(source: RowSource, row_id: int, error: Exception) -> RowUnreadable:
    """The error for one unreadable row: which, why, and the remedy."""
    name, table = source.stream, source.table
    skip = f"`replicad streams skip {quote(name)} {row_id} --yes` leaves it out"
    if isinstance(error, RowTooLong) or (isinstance(error, DatabaseError) and failures.is_too_large(error)):
        size = f"{source.max_row} bytes" if isinstance(error, RowTooLong) else "Postgres can hold (1 GB)"
        higher = f"raise the bound (`replicad streams alter {quote(name)} --max-row BYTES`), "
        return RowTooLong(
            f"stream {name} stops before id {row_id} of {table}: its line is longer than {size}; "
            f"make the row or the row expression shorter, {higher if source.max_row < MAX_ROW else ''}or {skip}",
            stream=name,
            row_id=row_id,
        )
    reason = failures.reason_of(error)[:_REASON].rstrip(". ")
    return RowUnreadable(
        f"stream {name} stops before id {row_id} of {table}, which cannot be read: {reason}; "
        f"mend the row or the row expression, or {skip}",
        stream=name,
        row_id=row_id,
    )


async def try_row(source: RowSource, db: Reads, row_id: int) -> RowUnreadable | None:
    """Read and discard the rows of one id; returns the error if they cannot be read.

    Raises DatabaseError if the row is not the cause.
    """
    failure, _ = await _try(source, db, (row_id - 1, row_id), None, (row_id - 1, row_id))
    return None if failure is None else unreadable(source, row_id, failure)


async def find_unreadable(
    source: RowSource, db: Reads, wanted: Range | Mapping[str, Range], others: Range | None = None
) -> RowUnreadable | None:
    """The first unreadable row in a range, or in a range per writer; None if all can be read now.

    `others`: the range of writers that are not named. Raises DatabaseError if a try fails and no row is the cause.
    """
    ranges = [wanted] if isinstance(wanted, tuple) else [*wanted.values(), *([others] if others else ())]
    if not ranges:
        return None
    low, high = min(after for after, _ in ranges), max(upto for _, upto in ranges)
    while (ends := await source.ends(db, low, high)) is not None:
        first, high = ends
        failure, _ = await _try(source, db, wanted, others, (first - 1, first))
        if failure is not None:
            return unreadable(source, first, failure)
        low = first
        middle = (low + high) // 2
        if middle == low:
            continue
        failure, seen = await _try(source, db, wanted, others, (low, middle))
        if failure is None:
            low = middle
        else:
            high, low = middle, max(low, seen)
    return None


async def _try(
    source: RowSource, db: Reads, wanted: Range | Mapping[str, Range], others: Range | None, part: Range
) -> tuple[Exception | None, int]:
    """Read the wanted rows of a part; returns the failure, and the id up to which rows were read."""
    low, high = part
    seen = low

    async def pass_over(chunk: Chunk) -> None:
        nonlocal seen
        seen = seen if chunk.token is None else chunk.token

    try:
        if isinstance(wanted, tuple):
            await source.copy_range(db, max(low, wanted[0]), min(high, wanted[1]), pass_over)
        else:
            # A named writer with an empty range stays named if there is a range for others: it must not count as one.
            clipped = {name: (max(low, after), min(high, upto)) for name, (after, upto) in wanted.items()}
            rest = None if others is None else (max(low, others[0]), min(high, others[1]))
            named = {name: span for name, span in clipped.items() if span[0] < span[1] or rest is not None}
            await source.copy_vector(db, named, pass_over, others=rest)
    except (DatabaseError, RowTooLong) as error:
        if not is_of_a_row(error):
            raise
        return error, seen
    return None, seen
