"""The rows of one stream on the pools that read them, and the search for the row that cannot be read.

When a copy of a range fails, parts of the range are tried with the same COPY, and their rows are discarded; so the same
values are evaluated, converted to UTF-8 and measured. The search halves the range of ids, so it ends after at most 64
rounds of two tries each. Where Postgres sends rows as it reads them, the first try finds the row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from shlex import quote

from replicad.errors import DatabaseError, RowTooLong, RowUnreadable
from replicad.postgres import failures
from replicad.postgres.statements import Queries
from replicad.streams.chunks import MAX_ROW, Chunk
from replicad.streams.row_text import Range
from replicad.streams.rows import ChunkSink, RowSource

_REASON = 300  # characters of the message of Postgres, which can quote a whole row


def is_of_a_row(error: Exception) -> bool:
    """Whether one row's values may be the cause of the failure: not for outages, locks, rights and names."""
    return isinstance(error, RowTooLong) or (
        isinstance(error, DatabaseError) and failures.may_be_of_a_row(error.sqlstate)
    )


@dataclass(frozen=True, slots=True)
class TableRows:
    """The rows of one stream: copies use `db`, other queries `looks`. `RowSource` has the docstrings of the reads."""

    source: RowSource
    db: Queries
    looks: Queries

    @property
    def names_writers(self) -> bool:
        """Whether rows have the name of their writer."""
        return self.source.instance_column is not None

    @property
    def unique_ids(self) -> bool:
        """Whether no two rows have the same id."""
        return self.source.unique_ids

    @property
    def sends_blocks(self) -> bool:
        """Whether `copy_blocks` sends each block as it comes: ids are unique, and no reader gathers them."""
        return self.source.unique_ids and self.source.reader is None

    async def copy_range(self, after: int, upto: int, sink: ChunkSink, *, limit: int | None = None) -> int:
        """`RowSource.copy_range`."""
        return await self.source.copy_range(self.db, after, upto, sink, limit=limit)

    async def copy_vector(
        self, ranges: Mapping[str, Range], sink: ChunkSink, *, others: Range | None = None, limit: int | None = None
    ) -> int:
        """`RowSource.copy_vector`."""
        return await self.source.copy_vector(self.db, ranges, sink, others=others, limit=limit)

    async def copy_blocks(
        self, after: int, upto: int, sink: ChunkSink, timeout: float | None = None, *, step: int, max_line: int
    ) -> int:
        """`RowSource.copy_blocks`."""
        return await self.source.copy_blocks(self.db, after, upto, sink, timeout, step=step, max_line=max_line)

    async def last_tokens(self, after: int, upto: int) -> dict[str, int]:
        """`RowSource.last_tokens`."""
        return await self.source.last_tokens(self.looks, after, upto)

    async def earliest(self) -> int | None:
        """`RowSource.earliest`."""
        return await self.source.earliest(self.looks)

    def unreadable(self, row_id: int, error: Exception) -> RowUnreadable:
        """The error for one unreadable row: which, why, and the remedy."""
        name, table, most = self.source.stream, self.source.table, self.source.max_row
        skip = f"`replicad streams skip {quote(name)} {row_id} --yes` leaves it out"
        if isinstance(error, RowTooLong) or (isinstance(error, DatabaseError) and failures.is_too_large(error)):
            size = f"{most} bytes" if isinstance(error, RowTooLong) else "Postgres can hold (1 GB)"
            higher = f"raise the bound (`replicad streams alter {quote(name)} --max-row BYTES`), "
            return RowTooLong(
                f"stream {name} stops before id {row_id} of {table}: its line is longer than {size}; "
                f"make the row or the row expression shorter, {higher if most < MAX_ROW else ''}or {skip}",
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

    async def try_row(self, row_id: int) -> RowUnreadable | None:
        """Read and discard the rows of one id; returns the error if they cannot be read.

        Raises DatabaseError if the row is not the cause.
        """
        failure, _ = await self._try((row_id - 1, row_id), None, (row_id - 1, row_id))
        return None if failure is None else self.unreadable(row_id, failure)

    async def find_unreadable(
        self, wanted: Range | Mapping[str, Range], others: Range | None = None
    ) -> RowUnreadable | None:
        """The first unreadable row in a range, or in a range per writer; None if all can be read now.

        `others`: the range of writers that are not named. Raises DatabaseError if a try fails and no row is the cause.
        """
        ranges = [wanted] if isinstance(wanted, tuple) else [*wanted.values(), *([others] if others else ())]
        if not ranges:
            return None
        low, high = min(after for after, _ in ranges), max(upto for _, upto in ranges)
        while (ends := await self.source.ends(self.db, low, high)) is not None:
            first, high = ends
            failure, _ = await self._try(wanted, others, (first - 1, first))
            if failure is not None:
                return self.unreadable(first, failure)
            low = first
            middle = (low + high) // 2
            if middle == low:
                continue
            failure, seen = await self._try(wanted, others, (low, middle))
            if failure is None:
                low = middle
            else:
                high, low = middle, max(low, seen)
        return None

    async def _try(
        self, wanted: Range | Mapping[str, Range], others: Range | None, part: Range
    ) -> tuple[Exception | None, int]:
        """Read the wanted rows of a part; returns the failure, and the id up to which rows were read."""
        low, high = part
        seen = low

        async def pass_over(chunk: Chunk) -> None:
            nonlocal seen
            seen = seen if chunk.token is None else chunk.token

        try:
            if isinstance(wanted, tuple):
                await self.copy_range(max(low, wanted[0]), min(high, wanted[1]), pass_over)
            else:
                # A named writer with an empty range stays named if others have a range: it must not count as another.
                clipped = {name: (max(low, after), min(high, upto)) for name, (after, upto) in wanted.items()}
                rest = None if others is None else (max(low, others[0]), min(high, others[1]))
                named = {name: span for name, span in clipped.items() if span[0] < span[1] or rest is not None}
                await self.copy_vector(named, pass_over, others=rest)
        except (DatabaseError, RowTooLong) as error:
            if not is_of_a_row(error):
                raise
            return error, seen
        return None, seen
