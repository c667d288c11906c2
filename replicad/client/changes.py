"""Changes of a table out of the rows of its stream (docs/changes.md), and copies that follow them."""

from __future__ import annotations

import enum
import json
from collections.abc import Iterable, Iterator, MutableMapping
from typing import Any, NamedTuple, Protocol

from replicad.client.events import RowBatch
from replicad.errors import UsageError


class ChangeOp(enum.StrEnum):
    """What a change does. READ: a snapshot has read the row. TRUNCATE: the table was emptied. SCHEMA: `row` describes
    the table: its name, the columns of its key, and the names and types of the columns that rows have from now on.
    """

    INSERT = "insert"
    UPDATE = "update"
    DELETE = "delete"
    READ = "read"
    TRUNCATE = "truncate"
    SCHEMA = "schema"


class Change(NamedTuple):
    """One change of a table.

    `key`: the value of the key's column, or a tuple of the values of several; None for TRUNCATE and SCHEMA. `row`: the
    row after the change, as JSON has it; None for DELETE and TRUNCATE. In an UPDATE a column that is absent has not
    changed. `old`: the row before it, if the stream has such rows. `token`: where the stream goes on after it.
    `schema`: the number of the SCHEMA that describes the row. `xid`: the transaction.
    """

    op: ChangeOp
    key: Any
    row: dict[str, Any] | None
    old: dict[str, Any] | None
    token: int
    schema: int
    xid: int


_OPS = {op.value[0]: op for op in ChangeOp}


def read_changes(batch: RowBatch) -> Iterator[Change]:
    """The changes in a batch of rows of a stream of changes.

    Raises:
        UsageError: the stream has rows, and no changes.
    """
    for text in batch.rows:
        row = json.loads(text)
        op = _OPS.get(str(row.get("op"))) if isinstance(row, dict) else None
        if op is None or "schema" not in row:
            raise UsageError(
                f"stream {batch.stream} has no changes of a table: it was added without --changes "
                "(replicad streams add NAME --table TABLE --changes)"
            )
        key = row.get("key")
        yield Change(
            op,
            tuple(key) if isinstance(key, list) else key,
            row.get("row"),
            row.get("old"),
            batch.token,
            row["schema"],
            row["xid"],
        )


class SqlCursor(Protocol):
    """What is used of a cursor of the Python DB API (PEP 249): of sqlite3, or of psycopg."""

    def execute(self, sql: str, parameters: tuple[Any, ...] = ..., /) -> Any: ...


def apply_changes(copy: MutableMapping[Any, dict[str, Any]] | TableCopy, changes: Iterable[Change]) -> None:
    """Apply changes, in their order, to a copy of the table: a dict of the rows by their keys, or a table.

    A copy that gets all changes since a snapshot, or since the stream was added to an empty table, has the rows of the
    table. Changes may be applied again from an earlier token on, as after a reconnection.
    """
    if isinstance(copy, TableCopy):
        for change in changes:
            copy.apply(change)
        return
    for change in changes:
        if change.op is ChangeOp.DELETE:
            copy.pop(change.key, None)
        elif change.op is ChangeOp.TRUNCATE:
            copy.clear()
        elif change.op is ChangeOp.SCHEMA:
            names = {column["name"] for column in (change.row or {})["columns"]}
            for key, row in copy.items():
                if not row.keys() <= names:
                    copy[key] = {name: value for name, value in row.items() if name in names}
        elif change.row is not None:
            before = copy.get(change.key) if change.op is ChangeOp.UPDATE else None
            copy[change.key] = change.row if before is None else {**before, **change.row}


class TableCopy:
    """A table in SQLite or Postgres that `apply_changes` keeps equal to the table of the changes.

    `cursor` is a cursor of sqlite3 or psycopg, in the caller's transaction: commit the token in the same one, and each
    change is applied once. The table has the columns of the changes and a unique key on `key`. Columns of changes that
    the table does not have are left out. `quoted` is the table's name as SQL wants it.
    """

    def __init__(self, cursor: SqlCursor, quoted: str, key: tuple[str, ...], *, mark: str = "?") -> None:
        """`mark`: what stands for a parameter: `?` for sqlite3, `%s` for psycopg."""
        self._cursor = cursor
        self._table = quoted
        self._key = key
        self._mark = mark
        self._columns: frozenset[str] | None = None

    def apply(self, change: Change) -> None:
        """Apply one change."""
        if change.op is ChangeOp.TRUNCATE:
            self._cursor.execute(f"DELETE FROM {self._table}")
        elif change.op is ChangeOp.DELETE:
            values = change.key if len(self._key) > 1 else (change.key,)
            self._cursor.execute(f"DELETE FROM {self._table} WHERE {self._where()}", tuple(map(_parameter, values)))
        elif change.op is ChangeOp.SCHEMA:
            self._columns = None  # the table may have been altered as well
        elif change.row is not None:
            self._write(change)

    def _write(self, change: Change) -> None:
        row = {name: value for name, value in (change.row or {}).items() if name in self._present()}
        others = [name for name in row if name not in self._key]
        values = tuple(map(_parameter, row.values()))
        if change.op is ChangeOp.UPDATE and others and set(row) != self._present():
            sets = ", ".join(f"{_quoted(name)} = {self._mark}" for name in others)
            key = tuple(_parameter(row[name]) for name in self._key)
            changed = tuple(_parameter(row[name]) for name in others)
            self._cursor.execute(f"UPDATE {self._table} SET {sets} WHERE {self._where()}", changed + key)
            return
        sets = ", ".join(f"{_quoted(name)} = excluded.{_quoted(name)}" for name in others)
        self._cursor.execute(
            f"INSERT INTO {self._table} ({', '.join(map(_quoted, row))}) VALUES ({', '.join([self._mark] * len(row))}) "
            f"ON CONFLICT ({', '.join(map(_quoted, self._key))}) DO {f'UPDATE SET {sets}' if sets else 'NOTHING'}",
            values,
        )

    def _where(self) -> str:
        return " AND ".join(f"{_quoted(name)} = {self._mark}" for name in self._key)

    def _present(self) -> frozenset[str]:
        """The columns of the table."""
        if self._columns is None:
            found = self._cursor.execute(f"SELECT * FROM {self._table} LIMIT 0")
            description = getattr(found, "description", None) or getattr(self._cursor, "description", None) or ()
            self._columns = frozenset(column[0] for column in description)
        return self._columns


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _parameter(value: Any) -> Any:
    """A value of JSON as a parameter: arrays and objects as their text."""
    return json.dumps(value) if isinstance(value, (dict, list)) else value
