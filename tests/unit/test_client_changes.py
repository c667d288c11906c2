"""Changes of a table as a reader sees them, and copies in a dict and in SQLite."""

from __future__ import annotations

import json
import sqlite3
from typing import Any

import pytest

from replicad.client import Change, ChangeOp, RowBatch, TableCopy, apply_changes, read_changes
from replicad.errors import UsageError


def changes(*found: tuple[str, Any, dict[str, Any] | None]) -> list[Change]:
    """The changes that these lines are: the letter of the operation, the key and the row."""
    rows = [json.dumps({"op": op, "key": key, "row": row, "schema": 1, "xid": 7}) for op, key, row in found]
    return [
        change for number, row in enumerate(rows) for change in read_changes(RowBatch("shop", "master", number, [row]))
    ]


def test_a_line_is_read_as_a_change() -> None:
    row = '{"op":"u","key":["a", 2],"row":{"n":1},"old":{"n":0},"schema":3,"xid":99,"at":"2026-01-01T00:00:00+00:00"}'
    assert list(read_changes(RowBatch("shop", "master", 12, [row]))) == [
        Change(ChangeOp.UPDATE, ("a", 2), {"n": 1}, {"n": 0}, 12, 3, 99)
    ]


@pytest.mark.parametrize("row", ['{"id":1}', '["op","u"]', '{"op":"x","schema":1,"xid":1}', "null", '{"op":"u"}'])
def test_a_row_of_another_stream_is_refused_with_the_remedy(row: str) -> None:
    with pytest.raises(UsageError, match="--changes"):
        list(read_changes(RowBatch("shop", "master", 12, [row])))


WRITTEN = [
    ("s", None, {"columns": [{"name": "id"}, {"name": "n"}, {"name": "note"}]}),
    ("r", 1, {"id": 1, "n": 1, "note": "a"}),
    ("i", 2, {"id": 2, "n": 2, "note": "b"}),
    ("i", 2, {"id": 2, "n": 2, "note": "b"}),  # again, as after a reconnection
    ("u", 1, {"id": 1, "n": 5}),  # the note has not changed
    ("u", 2, {"id": 2, "n": 6, "note": None}),
    ("d", 3, None),
]


def test_a_dict_follows() -> None:
    copy: dict[Any, dict[str, Any]] = {}
    apply_changes(copy, changes(*WRITTEN))
    assert copy == {1: {"id": 1, "n": 5, "note": "a"}, 2: {"id": 2, "n": 6, "note": None}}
    apply_changes(copy, changes(("s", None, {"columns": [{"name": "id"}, {"name": "n"}]}), ("d", 2, None)))
    assert copy == {1: {"id": 1, "n": 5}}, "a column that was dropped goes"
    apply_changes(copy, changes(("t", None, None)))
    assert copy == {}


def test_a_table_of_sqlite_follows() -> None:
    with sqlite3.connect(":memory:") as database:
        cursor = database.cursor()
        cursor.execute('CREATE TABLE "a shop" (id INTEGER PRIMARY KEY, n INTEGER, note TEXT)')
        copy = TableCopy(cursor, '"a shop"', ("id",))
        apply_changes(copy, changes(*WRITTEN, ("i", 4, {"id": 4, "n": [1, {}], "note": "d", "more": 1})))
        present = 'SELECT * FROM "a shop" ORDER BY id'
        assert list(cursor.execute(present)) == [(1, 5, "a"), (2, 6, None), (4, "[1, {}]", "d")]
        cursor.execute('ALTER TABLE "a shop" ADD COLUMN more INTEGER')
        apply_changes(copy, changes(("s", None, {"columns": []}), ("u", 4, {"id": 4, "n": 0, "note": "d", "more": 2})))
        apply_changes(copy, changes(("d", 1, None)))
        assert list(cursor.execute(present)) == [(2, 6, None, None), (4, 0, "d", 2)]
        apply_changes(copy, changes(("t", None, None)))
        assert list(cursor.execute(present)) == []
    database.close()


def test_a_table_with_a_key_of_several_columns_follows() -> None:
    with sqlite3.connect(":memory:") as database:
        cursor = database.cursor()
        cursor.execute("CREATE TABLE shop (region TEXT, id INTEGER, PRIMARY KEY (region, id))")
        copy = TableCopy(cursor, "shop", ("region", "id"))
        rows = [("i", ["a", 1], {"region": "a", "id": 1}), ("r", ["b", 1], {"region": "b", "id": 1})]
        apply_changes(copy, changes(*rows, ("u", ["a", 1], {"region": "a", "id": 1}), ("d", ["b", 1], None)))
        assert list(cursor.execute("SELECT * FROM shop")) == [("a", 1)]
    database.close()
