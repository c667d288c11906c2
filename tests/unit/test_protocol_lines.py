"""Bytes to lines: equal to bytes.split however the bytes are cut, linear in work, bounded in memory."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicad.protocol.lines import LineBuffer, LineTooLong

LIMIT = 20

texts = st.lists(st.sampled_from([b"a", b"bc", b"\r", b"\n", b"\r\n", b"x" * 7, b"\xff\0"]), max_size=40).map(b"".join)


def cut(data: bytes, at: list[int]) -> list[bytes]:
    """The data in pieces, cut at the given places."""
    places = [0, *sorted(place % (len(data) + 1) for place in at), len(data)]
    return [data[begin:end] for begin, end in itertools.pairwise(places)]


@given(texts, st.lists(st.integers(0, 300), max_size=10))
def test_lines_are_those_of_split_at_any_chunking(data: bytes, at: list[int]) -> None:
    buffer = LineBuffer(1000)
    blocks = [buffer.feed(piece) for piece in cut(data, at)]
    assert all(block.endswith(b"\n") or not block for block in blocks)
    assert b"".join(blocks) == data[: data.rfind(b"\n") + 1]
    assert buffer.partial == len(data) - data.rfind(b"\n") - 1


@given(texts, st.lists(st.integers(0, 300), max_size=10))
def test_the_limit_holds_at_any_chunking_and_costs_no_line_before_it(data: bytes, at: list[int]) -> None:
    parts = data.split(b"\n")
    too_long = next((number for number, part in enumerate(parts) if len(part) > LIMIT), None)
    buffer = LineBuffer(LIMIT)
    blocks: list[bytes] = []
    raised = 0
    for piece in cut(data, at):
        assert buffer.partial <= LIMIT
        try:
            blocks.append(buffer.feed(piece))
        except LineTooLong:
            raised += 1
    if too_long is None:
        assert raised == 0
        buffer.check()
    else:
        with pytest.raises(LineTooLong, match=f"at most {LIMIT} bytes"):
            buffer.check()
    assert b"".join(blocks).split(b"\n")[:-1] == parts[:-1][:too_long]


def test_a_line_of_exactly_the_limit_fits_and_one_byte_more_does_not() -> None:
    assert LineBuffer(LIMIT).feed(b"x" * LIMIT + b"\n") == b"x" * LIMIT + b"\n"
    buffer = LineBuffer(LIMIT)
    assert buffer.feed(b"ok\n" + b"x" * (LIMIT + 1)) == b"ok\n"
    with pytest.raises(LineTooLong):
        buffer.feed(b"\n")


class Counted(bytes):
    """Bytes that count how much of them is searched and copied."""

    work = 0

    def rfind(self, *args: object) -> int:  # type: ignore[override]
        Counted.work += len(self)
        return super().rfind(*args)  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [2_000, 4_000])
def test_a_sender_of_one_byte_at_a_time_costs_work_in_proportion_to_its_bytes(size: int) -> None:
    Counted.work = 0
    buffer = LineBuffer()
    for _ in range(size):
        buffer.feed(Counted(b"x"))
    assert buffer.feed(Counted(b"\n")) == b"x" * size + b"\n"
    assert Counted.work == size + 1, "every byte is looked at once, not once more with every byte that follows"


def test_an_endless_line_is_cut_at_the_limit_in_constant_memory() -> None:
    buffer = LineBuffer(1000)
    piece = b"x" * 300
    for fed in (300, 600, 900, 0):
        assert buffer.feed(piece) == b""
        assert buffer.partial == fed
    with pytest.raises(LineTooLong):
        buffer.feed(piece)
    assert buffer.partial == 0
