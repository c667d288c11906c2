"""Positions as text: vectors and cursors round-trip, merge as they should, and refuse what is none."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicad.errors import BadToken, RemoteProtocolError
from replicad.protocol.tokens import MAX_TOKEN, START, Cursor, Vector

BIG = (1 << 63) - 1

positions = st.integers(-20, 20) | st.integers(-BIG, BIG)
numbers = st.integers(1, 6)
epochs = st.none() | st.sampled_from(["a1b2c3d4", "00ff00ff00ff"])
vectors = st.builds(Vector, positions, st.dictionaries(numbers, positions, max_size=6))


@given(vectors, epochs)
def test_a_vector_survives_its_text(vector: Vector, epoch: str | None) -> None:
    named = Vector(vector.minimum, vector.ahead, epoch)
    again = Vector.parse(str(named))
    assert again == named
    assert hash(again) == hash(named)
    assert str(again) == str(named)


@given(positions, st.dictionaries(numbers, positions, max_size=6))
def test_the_text_names_only_writers_that_are_ahead_of_the_minimum(minimum: int, ahead: dict[int, int]) -> None:
    vector = Vector(minimum, ahead)
    assert str(vector).count("~") == sum(at > minimum for at in ahead.values())
    assert all(vector.at(number) == max(at, minimum) for number, at in ahead.items())
    assert vector.at(99) == minimum
    assert vector.maximum == max([minimum, *ahead.values()])


@given(vectors, vectors, vectors)
def test_merging_is_the_least_position_that_knows_both(one: Vector, two: Vector, three: Vector) -> None:
    merged = one.merge(two)
    assert merged == two.merge(one)
    assert merged.merge(one) == merged
    assert one.merge(two.merge(three)) == merged.merge(three)
    assert one.compare(merged) in (-1, 0)
    assert two.compare(merged) in (-1, 0)
    assert all(merged.at(number) == max(one.at(number), two.at(number)) for number in range(1, 8))


@given(vectors, vectors)
def test_comparing_says_who_is_behind_or_that_neither_is(one: Vector, two: Vector) -> None:
    pairs = [(one.at(number), two.at(number)) for number in range(1, 8)]  # 7 is a writer that neither names
    some_behind, some_ahead = any(a < b for a, b in pairs), any(a > b for a, b in pairs)
    expected = {(0, 0): 0, (1, 0): -1, (0, 1): 1, (1, 1): None}[some_behind, some_ahead]
    assert one.compare(two) == expected
    assert two.compare(one) == (None if expected is None else -expected)
    assert (expected == 0) == (one == two)


def test_vectors_of_two_epochs_have_nothing_to_do_with_each_other() -> None:
    with pytest.raises(BadToken, match="two epochs"):
        Vector(5, {}, "a1b2c3d4").compare(Vector(5, {}, "b1b2c3d4"))
    with pytest.raises(BadToken, match="two epochs"):
        Vector(5, {}, "a1b2c3d4").merge(Vector(5))


@pytest.mark.parametrize(
    "text",
    [
        "", "x", "58 ", "058", "-0", "+5", "5.0", "58~", "58~2", "58~2.", "58~0.61", "58~02.61", "58~2.61~2.62",
        "58~-2.6",
        "58~2.061", "A1B2C3D4!58", "abc!58", "a1b2c3d4!", "!58", "٥٨", f"{BIG + 1}", f"5~2.{BIG + 1}", "58\n",
        "5" + "".join(f"~{number}.9" for number in range(1, MAX_TOKEN // 4)),
    ],
)  # fmt: skip
def test_what_is_no_token_is_refused(text: str) -> None:
    with pytest.raises(BadToken):
        Vector.parse(text)


@given(st.integers(0, BIG), st.integers(0, BIG))
def test_a_cursor_survives_its_text(regular: int, backfill: int) -> None:
    assert Cursor.parse(str(Cursor(regular, backfill))) == Cursor(regular, backfill)


@pytest.mark.parametrize("text", ["", "5", "5.", ".5", "-1.0", "5.5.5", f"{BIG + 1}.0", "5.0 ", "٥.0", "5.0\n"])
def test_what_is_no_cursor_is_refused(text: str) -> None:
    with pytest.raises(RemoteProtocolError, match="cursor"):
        Cursor.parse(text)


def test_the_start_is_before_every_pod() -> None:
    assert Cursor.parse("0.0") == START


@given(vectors, vectors)
def test_a_bound_lowers_each_writer_to_where_it_is_in_the_bound(one: Vector, two: Vector) -> None:
    named = Vector(one.minimum, one.ahead, "a1b2c3d4")
    lower = named.at_most(two)
    assert [lower.at(number) for number in range(1, 8)] == [min(one.at(n), two.at(n)) for n in range(1, 8)]
    assert lower.minimum == min(one.minimum, two.minimum)
    assert lower.epoch == "a1b2c3d4"


def test_a_short_text_keeps_the_writers_that_are_most_ahead() -> None:
    vector = Vector(5, {1: 7, 2: 900, 3: 80}, "a1b2c3d4")
    text = str(vector)
    assert text == "a1b2c3d4!5~1.7~2.900~3.80"
    assert vector.shortened() == vector
    assert vector.shortened(len(text)) == vector
    assert str(vector.shortened(len(text) - 1)) == "a1b2c3d4!5~2.900~3.80"
    assert str(vector.shortened(len("a1b2c3d4!5~2.900~3.80") - 1)) == "a1b2c3d4!5~2.900"
    assert str(vector.shortened(len("a1b2c3d4!5~2.900"))) == "a1b2c3d4!5~2.900"
    assert str(vector.shortened(10)) == "a1b2c3d4!5"


def test_the_largest_numbers_and_the_longest_token_are_accepted() -> None:
    assert Vector.parse(f"0~1.{BIG}").at(1) == BIG
    assert Vector.parse(str(-BIG)).minimum == -BIG
    assert Cursor.parse(f"{BIG}.{BIG}") == Cursor(BIG, BIG)
    many = (MAX_TOKEN - 1) // 12
    text = "0" + "".join(f"~{10**8 + number}.1" for number in range(many))
    text = f"{text[:-1]}{'1' * (MAX_TOKEN - len(text) + 1)}"
    assert len(text) == MAX_TOKEN
    assert len(Vector.parse(text).ahead) == many


def test_what_two_know_is_of_their_epoch_and_vectors_differ_in_a_set() -> None:
    one, two = Vector(1, {3: 9}, "a1b2c3d4"), Vector(2, {}, "a1b2c3d4")
    assert one.merge(two) == Vector(2, {3: 9}, "a1b2c3d4")
    assert len({hash(Vector(number)) for number in range(10)}) > 1


def test_a_refusal_quotes_the_beginning_of_the_text() -> None:
    with pytest.raises(BadToken, match=rf"^'{'x' * 80}' is not a token; a token looks like 58 or 58~2.61$"):
        Vector.parse("x" * 200)
    twice = f"5{'~1.6' * 30}"
    with pytest.raises(BadToken) as caught:
        Vector.parse(twice)
    assert str(caught.value).startswith(f"{twice[:80]!r} is not a token: a writer stands in it twice")
    with pytest.raises(RemoteProtocolError) as refused:
        Cursor.parse("y" * 99)
    assert str(refused.value).endswith(f"got {'y' * 40!r}")
