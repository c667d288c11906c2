"""Cutting COPY data at line ends, and the names that writers have on the wire."""

from __future__ import annotations

import itertools
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicad.errors import DatabaseError
from replicad.protocol.words import Side
from replicad.streams.chunks import CHUNK, Chunk, LineCutter, no_longer
from replicad.streams.row_text import wire_instance
from replicad.streams.rows import RowSource
from tests.vocabulary import parse

rows = st.builds(
    lambda stream, instance, token, size: f"RDATA {stream} {instance} {token} ".encode() + b"x" * size + b"\n",
    st.just("events"),
    st.sampled_from(["master", "wörker-1"]),
    st.integers(-5, 1 << 62) | st.just("batch"),
    st.integers(1, 60) | st.integers(300, 700),
)


def cut(data: bytes, at: list[int], size: int) -> list[Chunk]:
    cutter = LineCutter(size)
    edges = sorted({0, len(data), *(min(place, len(data)) for place in at)})
    chunks = [chunk for low, high in itertools.pairwise(edges) for chunk in cutter.feed(data[low:high])]
    return chunks + cutter.finish()


@given(st.lists(rows, max_size=40), st.lists(st.integers(0, 20_000), max_size=30), st.integers(1, 2000))
def test_however_the_bytes_come_the_chunks_are_whole_lines_and_as_short_as_they_may_be(
    lines: list[bytes], at: list[int], size: int
) -> None:
    chunks = cut(b"".join(lines), at, size)
    assert b"".join(chunk.data for chunk in chunks) == b"".join(lines)
    assert sum(chunk.rows for chunk in chunks) == len(lines)
    left = list(lines)
    for chunk in chunks:
        taken = [left.pop(0) for _ in range(chunk.rows)]
        assert chunk.data == b"".join(taken)
        assert len(b"".join(taken[:-1])) < size, "one line less would have done"
        assert len(chunk.data) >= size or not left
        _, _, instance, token, _ = taken[-1].split(b" ", 4)
        assert chunk.instance == instance.decode()
        assert chunk.token == (None if token == b"batch" else int(token))


def test_a_line_of_many_pieces_takes_linear_time() -> None:
    cutter = LineCutter(max_row=1 << 30)
    piece = b"x" * 1000
    cutter.feed(b"RDATA events master 7 ")
    began = time.process_time()
    for _ in range(100_000):
        assert cutter.feed(piece) == []
    [chunk] = cutter.feed(b"\n")
    assert time.process_time() - began < 5, "quadratic would be hours"
    assert len(chunk.data) == 100_000_023
    assert chunk.token == 7


@given(st.lists(st.binary(max_size=30).map(lambda line: line.replace(b"\n", b"")), max_size=20), st.integers(0, 40))
def test_a_line_that_is_too_long_is_found_among_others(lines: list[bytes], most: int) -> None:
    assert no_longer(b"".join(line + b"\n" for line in lines), most) == all(len(line) <= most for line in lines)


def test_what_ends_within_a_line_is_an_error_and_not_a_row() -> None:
    cutter = LineCutter()
    assert cutter.feed(b"RDATA events master 7 []\nRDATA ev") == []
    with pytest.raises(DatabaseError, match="middle of a line"):
        cutter.finish()


def test_whole_chunks_are_passed_on_without_a_copy() -> None:
    data = b"RDATA events master 7 []\n" * (CHUNK // 25 + 1)
    [chunk] = LineCutter().feed(data)
    assert chunk.data is data


@given(st.none() | st.text(max_size=300))
def test_any_name_of_a_writer_is_one_word_that_the_protocol_takes(name: str | None) -> None:
    word = wire_instance(name)
    assert wire_instance(word) == word
    if name is None or "\0" not in name:  # Postgres has no NUL in text
        assert parse(f"RDATA events {word} 1 []", Side.SERVER).render() == f"RDATA events {word} 1 []"


def test_names_in_a_query_cannot_leave_their_quotes() -> None:
    source = RowSource(
        number=3, stream="o'clock", table='"a"."b"', id_column='i"d', instance_column="in'st", writers=("it's", "a\\b")
    )
    text = source.vector_sql({"it's": (1, 5), "a\\b": (2, 9)})
    assert """'RDATA o''clock it''s '""" in text
    assert '"i""d"' in text
    assert r"E'a\\b'" in text
    assert "> 1 AND" in text
