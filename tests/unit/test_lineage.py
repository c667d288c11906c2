"""Up to where two generations share their history."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicad.protocol.tokens import Vector
from replicad.streams.lineage import Generation, Lineage, lineage_of

NUMBERS = range(1, 4)
VECTORS = st.builds(Vector, st.integers(-3, 9), st.dictionaries(st.sampled_from(NUMBERS), st.integers(-3, 9)))


@given(VECTORS, VECTORS)
def test_at_most_is_the_lower_of_both_for_every_writer(one: Vector, other: Vector) -> None:
    lower = one.at_most(other)
    assert lower.minimum == min(one.minimum, other.minimum)
    assert [lower.at(number) for number in NUMBERS] == [min(one.at(number), other.at(number)) for number in NUMBERS]
    assert lower.at_most(one) == lower.at_most(other) == lower == other.at_most(one)


def lineage(*began: Vector) -> Lineage:
    at = datetime(2026, 1, 1, tzinfo=UTC)
    return lineage_of(Generation(number, f"g{number}", one, "test", at) for number, one in enumerate(began))


@given(st.lists(VECTORS, min_size=2, max_size=6), st.data())
def test_shared_is_the_lowest_beginning_of_all_generations_in_between(began: list[Vector], data: st.DataObject) -> None:
    whole = lineage(*began)
    later = data.draw(st.integers(1, len(began) - 1))
    first = data.draw(st.integers(0, later - 1))
    shared = whole.shared_between(f"g{first}", f"g{later}")
    assert shared is not None
    for number in NUMBERS:
        assert shared.at(number) == min(one.at(number) for one in began[first + 1 : later + 1])
    assert shared.minimum == min(one.minimum for one in began[first + 1 : later + 1])
    assert whole.floor.minimum <= shared.minimum
    assert whole.shared_between(f"g{later}", f"g{first}") is None, "the list was restored to a time before"
    assert whole.shared("another") is None


def test_what_is_shared_of_one_generation_is_no_question() -> None:
    with pytest.raises(ValueError, match="one generation"):
        lineage(Vector(0)).shared("g0")
