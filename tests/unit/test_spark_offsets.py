"""Offsets of the Spark source: one text per position, and the ranges between two of them."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicad.errors import UsageError
from replicad.protocol.tokens import START, Cursor, Vector
from replicad.spark.offsets import Range, StreamOffset, TubeCursor, TubeOffset
from replicad.tubes.commands import Part

numbers = st.integers(0, (1 << 63) - 1)
places = st.builds(TubeCursor, st.builds(Cursor, numbers, numbers), numbers)
offsets = st.lists(places, min_size=1, max_size=12).map(lambda found: TubeOffset(tuple(found)))


@given(offsets)
def test_an_offset_survives_json_and_has_one_text(offset: TubeOffset) -> None:
    text = json.dumps(offset.to_json())
    assert TubeOffset.from_json(json.loads(text)) == offset
    assert text == json.dumps(json.loads(text), sort_keys=True)
    assert json.dumps(TubeOffset.from_json(json.loads(text)).to_json()) == text


def test_the_text_is_the_one_that_checkpoints_hold() -> None:
    offset = TubeOffset((TubeCursor(Cursor(120, 88), 1004), TubeCursor()))
    text = '{"n":2,"p":{"0":{"b":88,"c":1004,"r":120},"1":{"b":0,"c":0,"r":0}},"v":1}'
    assert json.dumps(offset.to_json(), separators=(",", ":")) == text


@pytest.mark.parametrize(
    "value",
    [
        {},
        [],
        {"v": 1},
        {"n": 1, "p": {}, "v": 1},
        {"n": 0, "p": {}, "v": 1},
        {"n": 1, "p": {"0": {"b": 0, "c": 0, "r": 0}, "1": {"b": 0, "c": 0, "r": 0}}, "v": 1},
        {"n": 1, "p": {"0": {"b": 0, "c": -1, "r": 0}}, "v": 1},
        {"n": 1, "p": {"0": {"b": 0, "c": True, "r": 0}}, "v": 1},
        {"n": 1, "p": {"0": {"b": "0", "c": 0, "r": 0}}, "v": 1},
        {"t": "58", "v": 1},
    ],
)
def test_an_offset_of_something_else_is_refused_with_the_remedy(value: object) -> None:
    with pytest.raises(UsageError, match="checkpointLocation"):
        TubeOffset.from_json(value)  # type: ignore[arg-type]


def test_an_offset_of_another_version_is_not_guessed_at() -> None:
    with pytest.raises(UsageError, match="version 2"):
        TubeOffset.from_json({"n": 1, "p": {"0": {"b": 0, "c": 0, "r": 0}}, "v": 2})


def test_ranges_leave_out_partitions_that_did_not_move() -> None:
    start = TubeOffset((TubeCursor(Cursor(5, 0), 5), TubeCursor(Cursor(6, 2), 3)))
    end = TubeOffset((TubeCursor(Cursor(5, 0), 5), TubeCursor(Cursor(9, 4), 10)))
    assert start.ranges_to(end) == [Range(Part(1, 2), Cursor(6, 2), Cursor(9, 4), 7)]
    assert end.ranges_to(end) == []


def test_another_number_of_partitions_begins_anew() -> None:
    start = TubeOffset((TubeCursor(Cursor(50, 9), 20),))
    end = TubeOffset((TubeCursor(Cursor(60, 0), 4), TubeCursor()))
    assert start.ranges_to(end) == [Range(Part(0, 2), START, Cursor(60, 0), 4)]
    assert start.ranges_to(TubeOffset.beginning(2)) == []


def test_a_cursor_that_went_back_begins_anew() -> None:
    start = TubeOffset((TubeCursor(Cursor(50, 9), 20),))
    end = TubeOffset((TubeCursor(Cursor(7, 0), 3),))
    assert start.ranges_to(end) == [Range(Part(0, 1), START, Cursor(7, 0), 3)]


@given(offsets, st.data())
def test_ranges_add_up_to_what_lies_between(start: TubeOffset, data: st.DataObject) -> None:
    steps = st.tuples(st.integers(0, 99), st.integers(0, 99), st.integers(0, 99))
    moved = [data.draw(steps) for _ in start.places]
    end = TubeOffset(
        tuple(
            TubeCursor(Cursor(place.cursor.regular + r, place.cursor.backfill + b), place.pods + c)
            for place, (r, b, c) in zip(start.places, moved, strict=True)
        )
    )
    assert sum(one.pods for one in start.ranges_to(end)) == end.pods - start.pods


def test_a_stream_offset_is_its_token() -> None:
    offset = StreamOffset(Vector(58, {2: 61}))
    assert offset.to_json() == {"t": "58~2.61", "v": 1}
    assert StreamOffset.from_json(json.loads(json.dumps(offset.to_json()))) == offset
    with pytest.raises(UsageError):
        StreamOffset.from_json(TubeOffset.beginning(1).to_json())
