"""Statements on a user's table, run as the owner of the table by a function that `stream_reader_ensure` has made.

Reading a table runs code of its owner. So a statement goes as text to the function, its *reader*, which
runs it with the rights of the owner and lets that code change nothing of our session; the SQL says how.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from replicad.postgres import failures
from replicad.postgres.literals import fill, quote_literal
from replicad.postgres.statements import Queries

if TYPE_CHECKING:
    from replicad.postgres.bridge import Connection, Sink

UNBOUNDED: Final = (1 << 63) - 1  # bytes
_CUT, _FAILED = b"+", b"!"  # how the line begins that a reader adds; no line of ours does
_ITSELF: Final = ""  # a reader is a volatile function: each statement in it takes its snapshot after its locks
_LAST: Final = 8192  # bytes; the added line is shorter than that


@dataclass(frozen=True, slots=True)
class AsOwner:
    """Statements on one table, with the methods of a `Database`. `reader`: the function, quoted; `table`: the oid.

    `bound`: bytes after which `lines` and `copy_out` end, after a whole row.
    """

    db: Queries
    reader: str
    table: int
    bound: int = UNBOUNDED

    async def fetch(self, sql: str, *args: object) -> list[dict[str, Any]]:
        """The rows of a statement, by the names of its columns, which hold numbers, texts and arrays of these."""
        # `found` alone would mean a column of this name
        query = f"SELECT pg_catalog.row_to_json(found.*)::text FROM (\n{fill(sql, args)}\n) AS found"
        lines, _ = await self._lines(query, UNBOUNDED)
        return [json.loads(line) for line in lines]

    async def fetch_row(self, sql: str, *args: object) -> dict[str, Any] | None:
        """The first row, or None."""
        rows = await self.fetch(sql, *args)
        return rows[0] if rows else None

    async def fetch_value(self, sql: str, *args: object) -> Any:
        """The first column of the first row, or None."""
        row = await self.fetch_row(sql, *args)
        return None if row is None else next(iter(row.values()))

    async def lines(self, query: str) -> tuple[list[str], bool]:
        """The rows of a query with one text column; and whether there may be more of them."""
        return await self._lines(query, self.bound)

    async def copy_out(self, query: str, sink: Sink, timeout: float | None = None) -> tuple[int, bool]:
        """`Connection.copy_out`; returns also whether there may be more rows."""
        ending = _Ending(sink)
        rows = await self.db.copy_out(self._call(query), sink=ending.take, timeout=timeout, lock=_ITSELF)
        added = await ending.finish()
        if added.startswith(_FAILED):
            raise _reported(added.decode(), self.db.target)
        return rows - bool(added), added.startswith(_CUT)

    async def copy_values(self, query: str, sink: Sink, timeout: float | None = None) -> bool:
        """`Connection.copy_values`; returns whether there may be more values."""
        held = b""  # the last value: the reader may have added it

        async def take(value: bytes) -> None:
            nonlocal held
            if held:
                await sink(held)
            held = value

        await self.db.copy_values(self._call(query), sink=take, timeout=timeout, lock=_ITSELF)
        if held.startswith(_FAILED):
            raise _reported(held.decode(), self.db.target)
        if held and not held.startswith(_CUT):
            await sink(held)
        return held.startswith(_CUT)

    def _call(self, query: str) -> str:
        """The statement that has the reader run a query."""
        return (
            f"SELECT line FROM {self.reader}({int(self.table)}::oid, {quote_literal(query)},"
            f" pg_catalog.current_setting('search_path'), {quote_literal(self.bound)}) AS line"
        )

    async def _lines(self, query: str, bound: int) -> tuple[list[str], bool]:
        call = f"SELECT line FROM {self.reader}($1::oid, $2, pg_catalog.current_setting('search_path'), $3) AS line"
        lines = [row[0] for row in await self.db.fetch(call, self.table, query, bound)]
        last = lines[-1] if lines else ""
        if last.startswith(_FAILED.decode()):
            raise _reported(last, self.db.target)
        cut = last.startswith(_CUT.decode())
        return lines[:-1] if cut else lines, cut


def as_owner(connection: Connection, reader: str | None, table: int) -> Connection | AsOwner:
    """What runs the statements on a table: its reader, or the connection itself if it has none."""
    return connection if reader is None else AsOwner(connection, reader, table)


class _Ending:
    """Passes bytes on, but for a line at their end that the reader has added."""

    def __init__(self, sink: Callable[[bytes], Awaitable[None]]) -> None:
        self._sink = sink
        self._held = b""
        self._whole = True  # the data so far ends with a whole line

    async def take(self, data: bytes) -> None:
        if len(data) < _LAST:
            self._held += data
            if len(self._held) < 4 * _LAST:
                return
            data, self._held = self._held[-_LAST:], self._held[:-_LAST]
        held, self._held = self._held, data
        if held:
            self._whole = held.endswith(b"\n")
            await self._sink(held)

    async def finish(self) -> bytes:
        """The added line; empty if there is none."""
        begin = self._held.rfind(b"\n", 0, len(self._held) - 1) + 1
        begins = begin or self._whole
        added = self._held[begin:] if begins and self._held[begin : begin + 1] in (_CUT, _FAILED) else b""
        if len(self._held) > len(added):
            await self._sink(self._held[: len(self._held) - len(added)])
        return added


class _Reported(Exception):
    """An error that a reader has caught, as the driver would raise it."""

    def __init__(self, sqlstate: str, message: str, detail: str | None, hint: str | None) -> None:
        super().__init__(message)
        self.sqlstate, self.message, self.detail, self.hint = sqlstate, message, detail, hint


def _reported(line: str, target: failures.Target) -> Exception:
    told = json.loads(line[1:])
    cause = _Reported(told["sqlstate"], told["message"] or "", told.get("detail"), told.get("hint"))
    error = failures.while_running(cause, target, connection_lost=False)
    error.__cause__ = cause
    return error
