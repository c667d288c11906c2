"""The columns of the state: what each view needs of a column is there."""

from __future__ import annotations

from collections import Counter
from importlib import resources

import pytest

from replicad.daemon.state_columns import StateView
from replicad.streams.picture import COLUMNS

CONSOLE = (resources.files("replicad.operations") / "console" / "console.js").read_text(encoding="utf-8")


@pytest.mark.parametrize("view", list(StateView), ids=lambda view: view.name)
def test_no_view_has_a_name_twice(view: StateView) -> None:
    names = COLUMNS.names(view)
    assert names
    assert Counter(names).most_common(1)[0][1] == 1


def test_the_console_shows_only_what_status_has_with_a_heading_and_a_form_that_it_knows() -> None:
    forms = CONSOLE.split("const FORMS = {")[1].split("\n};")[0]
    for column in COLUMNS.of(StateView.CONSOLE):
        assert column.name == "name" or StateView.STATUS in column.views, column.name
        assert column.label, column.name
        assert f"\n  {column.form}: " in forms, column.name
    assert len(COLUMNS.of(StateView.CONSOLE)) > 5


def test_each_figure_is_declared_by_one_column() -> None:
    names = [family.name for family in COLUMNS.families]
    assert len(names) == len(set(names)) > 20
