"""The messages of a burst, and its answers: cut anywhere, and never taken for something else."""

from __future__ import annotations

import struct

import pytest

from replicad.errors import DatabaseError
from replicad.postgres.burst import Answers, Prepared, as_text

ONE = Prepared("one", [("id", 20), ("name", 25)])
OTHER = Prepared("other", [("data", 17)])


def message(kind: bytes, body: bytes) -> bytes:
    return kind + struct.pack("!i", len(body) + 4) + body


def row(*values: bytes | None) -> bytes:
    fields = b"".join(b"\xff\xff\xff\xff" if one is None else struct.pack("!i", len(one)) + one for one in values)
    return message(b"D", struct.pack("!h", len(values)) + fields)


READY = message(b"Z", b"I")
BOUND, DONE = message(b"2", b""), message(b"C", b"SELECT 2\0")
ERROR = message(b"E", b"SERROR\0VERROR\0C55P03\0Mlocked\0\0")
NOTICE = message(b"N", b"SNOTICE\0Mlook\0\0")


def test_answers_are_the_same_however_they_are_cut() -> None:
    whole = BOUND + row(b"7", b"a b") + NOTICE + row(b"8", None) + DONE + READY + BOUND + ERROR + READY
    whole += BOUND + row(b"\0\xff") + DONE + READY
    expected = [
        [{"id": 7, "name": "a b"}, {"id": 8, "name": None}],
        {"S": "ERROR", "V": "ERROR", "C": "55P03", "M": "locked"},
        [{"data": b"\0\xff"}],
    ]
    for size in (1, 2, 3, 5, 7, 64, len(whole)):
        answers = Answers([ONE, ONE, OTHER])
        for at in range(0, len(whole), size):
            assert not answers.complete
            answers.feed(whole[at : at + size])
        assert answers.complete
        assert answers.found == expected
        assert answers.fatal is None
        assert not answers.in_transaction


def test_an_end_of_the_session_is_no_answer() -> None:
    answers = Answers([ONE])
    answers.feed(message(b"E", b"SFATAL\0VFATAL\0C57P01\0Mgone\0\0"))
    assert not answers.complete
    assert answers.fatal is not None
    assert answers.fatal["C"] == "57P01"


def test_an_open_transaction_is_noticed() -> None:
    answers = Answers([ONE])
    answers.feed(BOUND + DONE + message(b"Z", b"T"))
    assert answers.in_transaction


@pytest.mark.parametrize("kind", [b"G", b"H", b"W", b"R", b"D", b"Z"])
def test_what_no_statement_of_ours_can_be_answered_is_refused(kind: bytes) -> None:
    answers = Answers([])
    with pytest.raises(DatabaseError, match="kind"):
        answers.feed(message(kind, b"I"))


def test_the_message_of_a_statement_is_not_taken_for_another_with_other_values() -> None:
    first = ONE.call(([1, 2], None))
    assert ONE.call(([1, 2], None)) == first
    assert ONE.call(([1, 3], None)) != first
    assert ONE.call(([1, 2], None)) == first
    assert ONE.call((True,)) != ONE.call((1,)), "equal in Python, and not for Postgres"
    same = ([1, 2], None)
    assert ONE.call(same) == ONE.call(same) == first


def test_a_type_without_a_decoder_is_left_to_the_driver() -> None:
    with pytest.raises(LookupError):
        Prepared("x", [("at", 1184)])


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (True, "t"),
        (-5, "-5"),
        (0.1, "0.1"),
        (b"\0\xff", "\\x00ff"),
        ([], "{}"),
        ([1, None, 2], "{1,NULL,2}"),
        (["a", 'b"c\\', "", None], '{"a","b\\"c\\\\","",NULL}'),
    ],
)
def test_values_are_written_as_postgres_reads_them(value: object, text: str) -> None:
    assert as_text(value) == text


def test_a_value_without_a_text_is_refused() -> None:
    with pytest.raises(TypeError):
        as_text({})
