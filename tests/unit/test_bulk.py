"""Blocks of pods: bytes between lines at any cutting, and columns as Postgres packs them into Arrow."""

from __future__ import annotations

import itertools
import struct
import sys
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replicad.client.requests import PodBlock, ask_for_blocks
from replicad.client.steps import Receive, Send
from replicad.errors import EncodingUnavailable, LeaseLost, RemoteProtocolError, TubeRefused
from replicad.protocol.connection import ProtocolConnection, Timing
from replicad.protocol.lines import LineTooLong, MixedBuffer
from replicad.protocol.tokens import Cursor
from replicad.protocol.words import Side
from replicad.spark import arrow
from replicad.tubes import columns
from replicad.tubes.columns import Columns
from replicad.tubes.commands import MAX_BLOCK, Part
from tests import vocabulary as c
from tests.vocabulary import EVERY

PART = Part(0, 2)
REQUEST = c.Pods("t", PART, 7, upto=Cursor(9, 0), encoding="arrow")
LIMIT = 40

plain_lines = st.sampled_from([b"", b"PING 5", b"ARROWS", b" ARROW 1", b"x" * LIMIT]).map(lambda line: line + b"\n")
raws = st.lists(st.sampled_from([b"\n", b"\nARROW 3\n", b"ARROW 9\n", b"\0\xff", b"y" * 100]), max_size=4).map(b"".join)
parts = st.lists(st.tuples(st.lists(plain_lines, max_size=3).map(b"".join), raws), max_size=4)
places = st.lists(st.integers(0, 2000), max_size=12)


def cut(data: bytes, at: list[int]) -> list[bytes]:
    edges = [0, *sorted(place % (len(data) + 1) for place in at), len(data)]
    return [data[begin:end] for begin, end in itertools.pairwise(edges)]


@given(parts, places)
def test_lines_and_raw_bytes_are_told_apart_at_any_cutting(found: list[tuple[bytes, bytes]], at: list[int]) -> None:
    data = b"".join(lines + b"ARROW %d\n" % len(raw) + raw + b"\n" for lines, raw in found) + b"PING 6\n"
    buffer = MixedBuffer(LIMIT)
    buffer.stop = b"ARROW "
    lines, raw = b"", []
    for piece in cut(data, at):
        fresh = piece
        while True:
            awaits_raw = buffer.raw
            whole = buffer.feed(fresh)
            fresh = b""
            if whole and awaits_raw:
                raw.append(whole)
            elif whole:
                lines += whole
                *_, last = whole.splitlines()
                if last.startswith(b"ARROW "):
                    buffer.expect_raw(int(last.split()[1]))
            if not buffer.held:
                break
    assert raw == [one + b"\n" for _, one in found]
    assert lines == b"".join(before + b"ARROW %d\n" % len(one) for before, one in found) + b"PING 6\n"
    assert not buffer.raw
    assert not buffer.partial


def test_a_line_that_announces_is_as_bounded_as_any_other() -> None:
    buffer = MixedBuffer(LIMIT)
    buffer.stop = b"ARROW "
    assert buffer.feed(b"ARROW " + b"1" * LIMIT) == b""
    with pytest.raises(LineTooLong):
        buffer.check()


def test_each_piece_of_a_block_is_a_sign_of_life_and_no_unfinished_line() -> None:
    connection = ProtocolConnection(Side.CLIENT, EVERY, now=0, timing=Timing(5, 15, 30))
    connection.receive_data(b"SERVER here\nPING 1\n", 0)
    assert connection.next_command() == c.Server("here")
    connection.next_command()
    connection.stop_at("ARROW")
    assert connection.receive_block(b"ARROW t 0/2 1 100\n", 1) == b"ARROW t 0/2 1 100\n"
    connection.expect_raw(100)
    for second in range(2, 90, 10):
        assert connection.receive_block(b"x", second) == b""
        connection.sent(second)
        assert connection.due(second + 4) is None


# --- the client's side of a request ---


def ask(*said: bytes, cuts: list[int] | None = None) -> tuple[list[PodBlock], Any, ProtocolConnection]:
    """What is handed over, and the result, once the server has said all that."""
    connection = ProtocolConnection(Side.CLIENT, EVERY, now=0)
    connection.understand(b"SERVER here")
    pieces = cut(b"".join(said), cuts or [])
    blocks: list[PodBlock] = []
    steps = ask_for_blocks(REQUEST, connection, 5)
    answer: bytes | None = None
    try:
        while True:
            step = steps.send(answer)
            answer = None
            if isinstance(step, PodBlock):
                blocks.append(PodBlock(step.pods, memoryview(bytes(step.data))))
            elif isinstance(step, Receive):
                while not answer:
                    answer = connection.receive_block(b"" if connection.holds_back else pieces.pop(0), 0)
            else:
                assert step == Send((REQUEST,))
    except StopIteration as stop:
        return blocks, stop.value, connection


@given(st.lists(st.binary(min_size=1, max_size=60), max_size=4), places)
def test_blocks_come_as_they_were_sent_with_pings_between_them(found: list[bytes], at: list[int]) -> None:
    said = [b"ARROW t 0/2 2 %d\n" % len(one) + one + b"\nPING 3\n" for one in found]
    end = b"CURSOR t 0/2 9.0 %d\n" % (2 * len(found))
    blocks, cursor, connection = ask(*said, end, cuts=at)
    assert [bytes(block.data) for block in blocks] == found
    assert cursor == c.CursorAt("t", PART, Cursor(9, 0), 2 * len(found))
    assert connection.receive_block(b"ARROW 1\nPING\n", 0) == b"ARROW 1\nPING\n", "and lines are lines again"


@pytest.mark.parametrize(
    ("said", "says"),
    [
        (b"ARROW t 0/2 2 3\nabcd\n", "do not end there"),
        (b"ARROW t 0/2 2 5\nabcd\nCURSOR t 0/2 9.0 2\n", "do not end there"),
        (b"ARROW t 0/2 2 %d\n" % (MAX_BLOCK + 1), f"at most {MAX_BLOCK} bytes"),
        (b"ARROW t 0/2 2 0\n\n", "at least one pod"),
        (b"ARROW t 0/2 0 4\nabcd\n", "at least one pod"),
        (b"ARROW t 0/2 2 -1\n", "at least one pod"),
        (b"ARROW t 1/2 2 4\nabcd\n", "another part"),
        (b"ARROW u 0/2 2 4\nabcd\n", "another tube"),
        (b"ARROW t 0/2 2\n", "the form is"),
        (b"ARROW t 0/2 2 4\nabcd\nCURSOR t 0/2 9.0 3\n", "counts 3 pods of tube t, 2 came"),
    ],
)
def test_a_block_that_is_not_what_was_announced_is_refused(said: bytes, says: str) -> None:
    with pytest.raises(RemoteProtocolError, match=says):
        ask(said)


def test_a_refusal_between_two_blocks_ends_the_answer_and_leaves_the_connection_in_step() -> None:
    with pytest.raises(LeaseLost, match="term 7"):
        ask(b"ARROW t 0/2 2 4\nabcd\nERROR lease_lost: term 7 is not the lease\n")
    with pytest.raises(EncodingUnavailable, match="lines"):
        ask(b"ERROR encoding_unavailable: there are lines\n")


# --- columns to Arrow ---

EPOCH_2000 = 946_684_800_000_000
big = st.integers(-(1 << 63), (1 << 63) - 1)
micros = st.integers(-(1 << 55), 1 << 55)
pods = st.fixed_dictionaries(
    {
        "seq": big,
        "op": st.sampled_from("IUDTBé"),
        "shard": st.integers(-(1 << 31), (1 << 31) - 1),
        "ids": st.lists(big | st.none(), max_size=4) | st.lists(big, max_size=40),
        "payload": st.none() | st.text(st.characters(exclude_categories=["Cs"])),
        "ts": micros,
    }
)


def packed(found: list[dict[str, Any]], rows: int) -> Columns:
    """As Postgres would pack them into so many rows."""
    share = -(-len(found) // rows)
    made = []
    for begin in range(0, len(found), share):
        some = found[begin : begin + share]
        bodies = [None if pod["payload"] is None else pod["payload"].encode() for pod in some]
        made.append(
            {
                "pods": len(some),
                "last": some[-1]["seq"],
                "fixed": b"".join(
                    struct.pack(">qiiqi", pod["seq"], pod["shard"], len(pod["ids"]), pod["ts"], ord(pod["op"]))
                    for pod in some
                ),
                "ids": b"".join(
                    struct.pack(">i", -1) if one is None else struct.pack(">iq", 8, one)
                    for pod in some
                    for one in pod["ids"]
                ),
                "sizes": b"".join(struct.pack(">i", -1 if body is None else len(body)) for body in bodies),
                "bodies": b"".join(body or b"" for body in bodies) or None,
            }
        )
    return Columns.of(made)


@settings(deadline=None)  # pyarrow's first call takes its time
@given(st.lists(pods, min_size=1, max_size=8), st.integers(1, 4))
def test_pods_come_out_of_a_block_as_they_went_in(found: list[dict[str, Any]], rows: int) -> None:
    line, body, end = columns.render("t", PART, packed(found, rows))
    data = bytes(line) + bytes(body) + bytes(end)
    (block,), _, _ = ask(data, b"CURSOR t 0/2 9.0 %d\n" % len(found))
    batch = arrow.block_batch(block, payload=True)
    batch.validate(full=True)
    ts = batch.column("ts").cast(pa.int64()).to_pylist()
    assert ts == [pod["ts"] + EPOCH_2000 for pod in found]
    got = batch.drop_columns(["ts"]).to_pylist()
    assert got == [{key: pod[key] for key in ("seq", "op", "shard", "ids", "payload")} for pod in found]


def test_the_daemon_and_spark_mean_the_same_columns() -> None:
    for payload in (False, True):
        assert columns.schema(payload=payload) == arrow.schema(payload=payload)


def sent(ids: list[str | None]) -> bytes:
    """The ids of kind text as Postgres sends them."""
    texts = [None if id is None else id.encode() for id in ids]
    return b"".join(struct.pack(">i", -1) if text is None else struct.pack(">i", len(text)) + text for text in texts)


@settings(deadline=None)
@given(st.lists(st.lists(st.text() | st.none() | st.uuids().map(str), max_size=5), min_size=1, max_size=5))
def test_ids_of_kind_text_come_out_of_a_block_as_they_went_in(found: list[list[str | None]]) -> None:
    fixed = b"".join(struct.pack(">qiiqi", n, 0, len(ids), 0, ord("U")) for n, ids in enumerate(found))
    made = Columns(len(found), len(found), fixed, tuple(map(sent, found)), keys="text")
    _, body, end = columns.render("t", PART, made)
    data = bytes(columns.render("t", PART, made)[0].partition(b"\n")[2]) + bytes(body) + bytes(end)[:-1]
    batch = arrow.block_batch(PodBlock(len(found), memoryview(data)), payload=False, keys="text")
    batch.validate(full=True)
    assert batch.column("ids").to_pylist() == found
    with pytest.raises(RemoteProtocolError, match="ids of kind bigint"):
        arrow.block_batch(PodBlock(len(found), memoryview(data)), payload=False)


@pytest.mark.parametrize("data", [b"ab", b"\0\0\0\3ab", b"\xff\xff\xff\xf0abcd", b"\0\0\0\1aX", b""])
def test_texts_that_are_no_one_dimensional_array_are_refused(data: bytes) -> None:
    fixed = struct.pack(">qiiqi", 1, 0, 1, 0, ord("U"))
    with pytest.raises(TubeRefused, match="not one-dimensional"):
        columns.record_batch(Columns(1, 1, fixed, (data,), keys="text"))


def test_ids_of_more_than_one_dimension_are_refused_and_never_misread() -> None:
    pod = {"seq": 1, "op": "U", "shard": 0, "ids": [1, 2], "payload": None, "ts": 0}
    whole = packed([pod], 1)
    for ids in (whole.ids[0] + b"\0" * 8, whole.ids[0][:-8], b"\0\0\0\7" + whole.ids[0][4:]):
        with pytest.raises(TubeRefused, match="not one-dimensional"):
            columns.record_batch(Columns(1, 1, whole.fixed, (ids,)))


def test_what_is_no_block_of_those_columns_is_refused() -> None:
    made = columns.record_batch(packed([{"seq": 1, "op": "U", "shard": 0, "ids": [], "payload": None, "ts": 0}], 1))
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, made.schema) as stream:
        stream.write_batch(made)
    data = sink.getvalue().to_pybytes()
    assert arrow.block_batch(PodBlock(1, memoryview(data)), payload=True).num_rows == 1
    for block, payload in (
        (PodBlock(2, memoryview(data)), True),
        (PodBlock(1, memoryview(data)), False),
        (PodBlock(1, memoryview(data)[: len(data) // 2]), True),
        (PodBlock(1, memoryview(b"no Arrow at all")), True),
    ):
        with pytest.raises(RemoteProtocolError, match="block of"):
            arrow.block_batch(block, payload=payload)


def test_pods_that_are_too_large_for_a_block_are_left_to_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    pod = {"seq": 7, "op": "U", "shard": 0, "ids": [], "payload": "x" * 5000, "ts": 0}
    columns.render("t", PART, packed([pod], 1))
    monkeypatch.setattr(columns, "MAX_BLOCK", 5000)
    with pytest.raises(EncodingUnavailable, match=r"ends with pod 7 .* at most 5000: read it as lines"):
        columns.render("t", PART, packed([pod], 1))


def test_without_pyarrow_the_refusal_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(EncodingUnavailable, match=r"replicad\[arrow\]"):
        columns.load()
