"""A binary COPY is cut into its values however its bytes come, and what is none is refused."""

from __future__ import annotations

import itertools
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicad.errors import DatabaseError
from replicad.postgres.connection import Values

HEADER = b"PGCOPY\n\xff\r\n\0" + bytes(8)
END = b"\xff\xff"


def field(value: bytes) -> bytes:
    return struct.pack("!hi", 1, len(value)) + value


def fed(data: bytes, at: list[int]) -> list[bytes]:
    values = Values()
    edges = sorted({0, len(data), *(min(place, len(data)) for place in at)})
    found = [value for low, high in itertools.pairwise(edges) for value in values.feed(data[low:high])]
    values.finish()
    return found


@given(st.lists(st.binary(max_size=300), max_size=9), st.lists(st.integers(0, 3000), max_size=20))
def test_however_the_bytes_come_the_values_are_the_same(values: list[bytes], at: list[int]) -> None:
    data = HEADER + b"".join(map(field, values)) + END
    assert fed(data, at) == fed(data, list(range(len(data)))) == values


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"COPY" * 10, "format"),
        (HEADER[:-1] + b"\4" + END, "format"),
        (HEADER + struct.pack("!hi", 2, 1) + b"x", "other values"),
        (HEADER + struct.pack("!hi", 1, -1), "other values"),
        (HEADER + field(b"abc")[:-1], "middle"),
        (HEADER + field(b"abc"), "middle"),
        (HEADER, "middle"),
        (b"", "middle"),
        (HEADER + END + field(b"abc"), "other values"),
    ],
)
def test_anything_else_is_refused(data: bytes, why: str) -> None:
    with pytest.raises(DatabaseError, match=why):
        fed(data, [])
