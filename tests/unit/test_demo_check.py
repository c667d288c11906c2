"""The demonstration's judge: it finds every kind of difference between two sides, and none where there is none."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from replicad.demo.run import compare

rows = st.dictionaries(st.integers(0, 50), st.tuples(st.text(max_size=3), st.none() | st.floats(allow_nan=False)))


@given(rows)
def test_a_side_equals_itself(side: dict[int, tuple[object, ...]]) -> None:
    found = compare(side, dict(side))
    assert found.is_equal
    assert found.left == found.right == found.equal == len(side)


@given(rows, rows)
def test_every_id_is_equal_different_or_on_one_side_only(
    left: dict[int, tuple[object, ...]], right: dict[int, tuple[object, ...]]
) -> None:
    found = compare(left, right)
    assert found.is_equal == (left == right)
    assert found.equal + len(found.different) + len(found.missing) == len(left)
    assert found.equal + len(found.different) + len(found.superfluous) == len(right)
    for i in found.different:
        assert left[i] != right[i]


def test_what_is_wrong_is_described_with_examples() -> None:
    found = compare({1: ("a",), 2: ("b",)}, {2: ("c",), 3: ("d",)})
    assert found.describe() == (
        "1 missing downstream, e.g. 1; 1 superfluous downstream, e.g. 3; 1 different downstream, e.g. 2"
    )
