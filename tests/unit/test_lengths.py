"""Which parameters of a test the suite takes, and which only `make long`."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from tests.lengths import crossed, first


def in_suite(parameters: list[Any]) -> list[Any]:
    values = [getattr(one, "values", (one,)) for one in parameters if pytest.mark.long not in getattr(one, "marks", ())]
    return [one[0] if len(one) == 1 else one for one in values]


def test_the_first_ones_are_in_the_suite_and_the_others_in_the_long_form() -> None:
    found = first(2, ["a", ("b", 1), pytest.param("c", id="see"), ("d", 2)])
    assert in_suite(found) == ["a", ("b", 1)]
    assert [(one.values, one.id) for one in found[2:]] == [(("c",), "see"), (("d", 2), None)]


@pytest.mark.parametrize(("turns", "many"), [(1, 6), (2, 12)])
def test_each_value_of_each_axis_is_in_the_suite_and_each_combination_in_the_long_form(turns: int, many: int) -> None:
    axes = ["abcdef", range(5), [True, False, None]]
    found = crossed(*axes, turns=turns)
    assert [one.values for one in found] == list(product(*axes))
    short = in_suite(found)
    assert len(short) == many
    for number, axis in enumerate(axes):
        assert {one[number] for one in short} == set(axis)
