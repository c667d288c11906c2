"""What a feed was made of is one declared list: a field that is added takes part unless it is named as passing."""

from __future__ import annotations

from dataclasses import fields, replace
from datetime import UTC, datetime
from typing import Any

import pytest

from replicad.streams.registry import _PASSING, GENERATION, RENEWABLE, Method, Stream, differences

STREAM = Stream(
    number=1,
    name="events",
    table="public.events",
    table_oid=10,
    id_column="id",
    instance_column=None,
    row=None,
    row_type="json",
    method=Method.LOCK_WATCH,
    sequence="public.events_id_seq",
    sequence_oid=11,
    positions_table=None,
    positions_oid=None,
    identity=None,
    fed=True,
    shares_sequence=False,
    plain=True,
    unique_ids=True,
    reader=None,
    sequence_reader=None,
    positions_reader=None,
    epoch="abc",
    continues=True,
    sequence_file=12,
    noted=None,
    fault=None,
    denied=None,
    proof_key=None,
    trimmed_upto=None,
    keep_for=None,
    keep_rows=None,
    max_row=1024,
    skipped=(),
    created_at=datetime(2026, 1, 1, tzinfo=UTC),
    writers={"master": 1},
)
NAMES = frozenset(field.name for field in fields(Stream))


def other(value: Any) -> Any:
    """Something else than the value."""
    return "other" if value != "other" else "another"


@pytest.mark.parametrize("name", sorted(NAMES))
def test_every_field_but_the_passing_ones_takes_part(name: str) -> None:
    changed = replace(STREAM, **{name: other(getattr(STREAM, name))})
    passing = {"fed", "fault", "denied", "trimmed_upto", "writers", "continues", "noted", "unrecorded"}
    assert differences(STREAM, changed) == (frozenset() if name in passing else {name})


def test_what_makes_a_stream_another_one_is_never_renewed_in_place_and_its_table_only_by_another_generation() -> None:
    assert NAMES >= RENEWABLE | GENERATION | _PASSING
    lasting = NAMES - RENEWABLE - GENERATION - _PASSING
    readers = {"reader", "sequence_reader", "positions_reader"}  # another owner: what watches the positions begins anew
    assert lasting == {"number", "name", "id_column", "instance_column", "method", "created_at"} | readers
