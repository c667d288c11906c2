"""How long tests are: short in the suite, which runs often and with other examples each time; long in `make long`."""

from __future__ import annotations

import os
from collections.abc import Iterable
from itertools import product
from typing import Any, Final

import pytest
from _pytest.mark import ParameterSet

LONG: Final = bool(os.environ.get("REPLICAD_STRESS_SECONDS"))  # `make long` and `make stress` give it
SHARE: Final = 10 if LONG else 0.15


def examples(number: int) -> int:
    """How many examples hypothesis tries where a thorough look takes this many."""
    return max(10, round(number * SHARE))


def first(keep: int, values: Iterable[Any]) -> list[Any]:
    """Parameters of a test: the first ones are for the suite, and `make long` takes the others too.

    For a claim that each of them tries in the same way.
    """
    return [value if at < keep else _long(value) for at, value in enumerate(values)]


def crossed(*axes: Iterable[Any], turns: int = 1) -> list[Any]:
    """Parameters of a test with several arguments: each value of each of them with each of the others.

    The suite takes as many of them as the longest axis has values, times `turns`: each value of each axis is tried.
    """
    values = [list(axis) for axis in axes]
    most = max(map(len, values))
    short = {
        tuple((turn + number * (turn // most)) % len(axis) for number, axis in enumerate(values))
        for turn in range(turns * most)
    }
    found = []
    for at in product(*(range(len(axis)) for axis in values)):
        one = tuple(axis[index] for axis, index in zip(values, at, strict=True))
        found.append(pytest.param(*one) if at in short else _long(one))
    return found


def _long(value: Any) -> Any:
    if isinstance(value, ParameterSet):
        return pytest.param(*value.values, marks=[*value.marks, pytest.mark.long], id=value.id)
    return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.long)
