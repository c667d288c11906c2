"""Many writers on the wire: sets in several lines, tokens that stay short, and what a reader never passes over."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicad.client.follower import Follower, StreamProgress
from replicad.protocol.command import Command
from replicad.protocol.tokens import MAX_TOKEN, Vector
from replicad.protocol.words import Side
from replicad.streams.chunks import Chunk
from replicad.streams.commands import WRITERS_ON_LINE, Position, Replicate, Writers, WriterSet, writers_lines
from replicad.streams.serving.lane import LastTokens, position_lines, set_lines
from tests.vocabulary import parse

EPOCH = "7c1fd2a90b31"
names = st.text(st.characters(codec="utf-8", exclude_characters=" \r\n\0", min_codepoint=33), min_size=1, max_size=8)
sets = st.lists(names, unique=True, max_size=40).map(lambda found: {name: at for at, name in enumerate(found, 1)})


def understand(line: bytes) -> Command | None:
    return parse(line.decode(), Side.SERVER) if line else None


def parsed(lines: bytes) -> list[Writers]:
    found = [understand(line) for line in lines.split(b"\n")[:-1]]
    return [one for one in found if isinstance(one, Writers)]


def many(count: int) -> dict[str, int]:
    return {f"writer-{number}": number for number in range(1, count + 1)}


@given(sets)
def test_the_lines_of_a_set_name_it_whole(numbers: dict[str, int]) -> None:
    found = WriterSet()
    for line in parsed(writers_lines("events", EPOCH, numbers)):
        assert (line.stream, line.epoch) == ("events", EPOCH)
        found.add(dict(line.numbers))
    found.close()
    assert found.numbers == numbers


@pytest.mark.parametrize("writers", [20_000, pytest.param(100_000, marks=pytest.mark.long)])
def test_many_writers_take_lines_of_a_thousand(writers: int) -> None:
    lines = parsed(writers_lines("events", EPOCH, many(writers)))
    assert [len(line.numbers) for line in lines] == [WRITERS_ON_LINE] * (writers // WRITERS_ON_LINE)
    found = WriterSet()
    for line in lines:
        found.add(dict(line.numbers))
    found.close()
    assert found.numbers == many(writers)


def test_lines_that_name_others_add_and_one_that_repeats_a_name_begins_anew() -> None:
    found = WriterSet()
    assert found.add({"a": 1, "b": 2}) == ["a", "b"]
    assert found.add({"c": 3}) == ["c"]
    found.close()
    assert found.numbers == {"a": 1, "b": 2, "c": 3}
    assert found.add({"d": 4}) == ["d"]
    found.close()
    assert found.numbers == {"a": 1, "b": 2, "c": 3, "d": 4}
    found.add({"b": 2})
    assert found.numbers.keys() == {"a", "b", "c", "d"}, "until it is whole, nobody is left out"
    found.close()
    assert found.numbers == {"b": 2}
    found.begin()
    found.add({"e": 5})
    found.close()
    assert found.numbers == {"e": 5}, "on a new connection the first line begins anew"


def test_a_token_that_is_taken_between_two_lines_of_a_set_passes_over_nobody() -> None:
    progress = StreamProgress("events", None, linear=False)
    progress.set_writers(EPOCH, many(3000))
    for number in range(1, 3001):
        progress.position_received()
        progress.mark(f"writer-{number}").at = 50 if number == 2500 else 90
    progress.set_writers(EPOCH, {f"writer-{number}": number for number in range(2, 1001)})  # the second line is to come
    assert Vector.parse(progress.token() or "").minimum == 50
    progress.new_connection()
    assert Vector.parse(progress.token() or "").minimum == 50


def test_a_writer_that_is_retired_keeps_the_token_down_no_more() -> None:
    follower = Follower()
    follower.want("events", None)
    block = writers_lines("events", EPOCH, {"a": 1, "b": 2}) + position_lines(
        "events", {"a": 9, "b": 5}, {"a": 9, "b": 5}, all_of_them=True
    )
    list(follower.feed(block, understand))
    assert follower.token("events") == f"{EPOCH}!5~1.9"
    gone = {"a": 9}
    list(follower.feed(set_lines("events", writers_lines("events", EPOCH, {"a": 1}), gone), understand))
    assert follower.token("events") == f"{EPOCH}!9"
    back = writers_lines("events", EPOCH, {"a": 1, "b": 2}) + b"POSITION events b 7 7\nRDATA events b 8 {}\n"
    list(follower.feed(back, understand))
    assert follower.token("events") == f"{EPOCH}!8~1.9"
    assert follower.gap is None


def test_rows_of_a_writer_that_is_not_listed_do_not_move_the_token_nor_leave_a_gap_when_it_joins() -> None:
    follower = Follower()
    follower.want("events", "3")
    block = writers_lines("events", EPOCH, {"a": 1}) + b"POSITION events a 3 3\nRDATA events old 4 {}\n"
    [_, rows] = list(follower.feed(block, understand))
    assert (rows.instance, rows.token) == ("old", 4)  # type: ignore[union-attr]
    assert follower.token("events") == f"{EPOCH}!3"
    joins = writers_lines("events", EPOCH, {"a": 1, "old": 2}) + b"POSITION events old 6 6\nRDATA events old 7 {}\n"
    events = list(follower.feed(joins, understand))
    assert follower.gap is None
    assert events[-1].token == 7  # type: ignore[union-attr]


vectors = st.builds(
    Vector,
    st.integers(0, 1000),
    st.dictionaries(st.integers(1, 10**9 - 1), st.integers(0, 1 << 62), max_size=60),
    st.sampled_from([None, EPOCH]),
)


@given(vectors, st.integers(50, 400))
def test_a_shortened_token_is_behind_the_whole_one_for_every_writer(vector: Vector, size: int) -> None:
    short = vector.shortened(size)
    assert len(str(short)) <= size
    assert short.minimum == vector.minimum
    assert short.compare(vector) in (-1, 0)
    assert vector.shortened() == vector


def test_a_token_of_ten_thousand_writers_that_are_far_ahead_is_taken_by_the_server() -> None:
    longest = Vector(1, {999_999_999 - n: (1 << 63) - 1 - n for n in range(10_000)}, EPOCH)
    short = longest.shortened()
    assert len(short.ahead) > 8000
    assert len(str(short)) <= MAX_TOKEN
    line = Replicate("events", str(short)).render()
    assert len(line) < 1 << 20
    assert parse(line, Side.CLIENT) == Replicate("events", str(short))
    ten_thousand = Vector(1, {n: 10**12 + n for n in range(1, 10_001)}, EPOCH)
    assert ten_thousand.shortened() == ten_thousand


rows = st.lists(st.tuples(st.sampled_from(["a", "b", "cc", "other"]), st.booleans()), min_size=1, max_size=30)


@given(rows, st.integers(0, 20))
def test_the_last_tokens_are_the_same_for_few_and_for_many_writers(rows: list[tuple[str, bool]], more: int) -> None:
    lines = [f'RDATA events {name} {at} {{"a": "RDATA events a 99 x"}}\n' for at, (name, _) in enumerate(rows, 1)]
    listed = dict.fromkeys(["a", "b", "cc", *(f"more{n}" for n in range(more))], 0)
    seen = LastTokens("events", listed, one=False)
    seen.see(Chunk("".join(lines).encode(), rows[-1][0], len(rows)))
    expected = {name: at for at, (name, _) in enumerate(rows, 1) if name != "other"}
    assert seen.tokens == expected
    assert seen.done == len(rows)


def test_position_lines_are_those_that_the_command_renders() -> None:
    told, now = {"b": 1, "a": 2, "c": 3}, {"b": 4, "a": 2, "c": -5}
    wanted = [Position("events", name, told[name], now[name]).render() for name in ("b", "c")]
    assert position_lines("events", told, now).decode().splitlines() == wanted
