"""The columns of the state: what each view needs of a column is there."""

from __future__ import annotations

from collections import Counter
from importlib import resources
from typing import Any

import pytest

from replicad.daemon.figures import StateColumns, StateView
from replicad.streams.daemons import DAEMON_COLUMNS
from replicad.streams.picture import COLUMNS
from replicad.tubes.picture import PARTITION_COLUMNS, TUBE_COLUMNS

CONSOLE = (resources.files("replicad.operations") / "console" / "console.js").read_text(encoding="utf-8")


TABLES: dict[str, StateColumns[Any]] = {
    "streams": COLUMNS, "tubes": TUBE_COLUMNS, "partitions": PARTITION_COLUMNS, "daemons": DAEMON_COLUMNS,
}  # fmt: skip


@pytest.mark.parametrize("view", list(StateView), ids=lambda view: view.name)
def test_no_view_has_a_name_twice(view: StateView) -> None:
    assert any(columns.names(view) for columns in TABLES.values())
    for columns in TABLES.values():
        assert max(Counter(columns.names(view)).values(), default=1) == 1


@pytest.mark.parametrize("kind", ["streams", "partitions", "daemons"])
def test_the_console_shows_only_what_status_has_with_a_heading_and_a_form_that_it_knows(kind: str) -> None:
    forms = CONSOLE.split("const FORMS = {")[1].split("\n};")[0]
    columns = TABLES[kind].of(StateView.CONSOLE)
    assert len(columns) > 5
    for column in columns:
        assert column.name == "name" or StateView.STATUS in column.views, column.name
        assert column.label, column.name
        assert f"\n  {column.form}: " in forms, column.name


def test_each_figure_is_declared_by_one_column() -> None:
    names = [family.name for columns in TABLES.values() for family in columns.families]
    assert len(names) == len(set(names)) > 30


def test_a_table_leaves_out_rare_columns_without_a_value_and_spare_ones_in_their_order() -> None:
    names = PARTITION_COLUMNS.names(StateView.TOP)
    assert set(names) - set(PARTITION_COLUMNS.headings(StateView.TOP, [{"pods": 1}])) == {"parked", "backfill"}
    assert PARTITION_COLUMNS.headings(StateView.TOP, [{"parked": 0}, {"parked": 1, "backfill": "1 id"}]) == names
    assert PARTITION_COLUMNS.spare(StateView.TOP) == ["ids", "out_s", "in_s", "parked", "backfill"]
