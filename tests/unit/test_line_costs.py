"""The longest line of a client costs the event loop little: there is no work for each of its numbers or words.

Times depend on the machine, so what is counted is calls of functions, Python's and C's.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import pytest

from replicad.errors import RemoteProtocolError
from replicad.protocol.connection import ProtocolConnection
from replicad.protocol.words import AT_ONCE, IntegerList, Side, integer_list, pieces_of
from replicad.tubes.commands import Ack, Park, Part
from tests.vocabulary import EVERY

LINE = 1 << 20
SLICE = 8192  # bytes that a session gives to its connection at a time
CALLS = 5000  # half a millisecond; some for each slice


def fill(head: str, unit: str, tail: str = "") -> str:
    return head + unit * ((LINE - len(head) - len(tail)) // len(unit)) + tail


LINES = {
    "list of an ACK": fill("ACK t 0/1 1 ", "1,", "1"),
    "list of a PARK": fill("PARK t 0/1 1 5 ", "1,", "1 3 error"),
    "error of a PARK": fill("PARK t 0/1 1 5 * 3 ", "no "),
    "blanks of an ACK": fill("ACK t 0/1 1 ", " "),
    "words of an ACK": fill("ACK t 0/1 1 ", "a "),
    "words of a RELEASE": fill("RELEASE t 0/1 1 ", "a "),
    "options of PODS": fill("PODS t 0/1 1 ", "limit=1 "),
    "names of STREAMS": fill("STREAMS ", "a ", "b"),
    "JSON of USER_IP": fill("USER_IP u [", "1,", "1]"),
    "JSON of LOCK_RELEASED": fill("LOCK_RELEASED [", "1,", "1]"),
    "JSON of REPORT": fill('REPORT t r {"a":[', "1,", "1]}"),
    "words of a USER_SYNC": fill("USER_SYNC ", "a "),
    "words of REPLICATE": fill("REPLICATE ", "a "),
    "a word that is no command": fill("FROB", "x"),
    "a blank line": " " * LINE,
}


@pytest.mark.parametrize("line", LINES.values(), ids=LINES)
def test_the_longest_line_takes_few_calls(line: str) -> None:
    connection = ProtocolConnection(Side.SERVER, EVERY, now=0, max_line=LINE)
    data = line.encode() + b"\n"
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += 1

    sys.setprofile(count)
    try:
        for begin in range(0, len(data), SLICE):
            connection.receive_data(data[begin : begin + SLICE], 0)
        connection.next_command()
    except RemoteProtocolError:
        pass
    finally:
        sys.setprofile(None)
    assert calls < CALLS


@pytest.mark.parametrize("size", [1, AT_ONCE // 2, AT_ONCE // 2 + 1, 10 * AT_ONCE])
def test_a_list_of_any_length_reads_as_the_numbers_in_it(size: int) -> None:
    numbers = tuple((n * 7919) % 2003 - 1000 for n in range(size))
    found = integer_list("ACK", "seqs", ",".join(map(str, numbers)))
    assert found == numbers
    assert len(found) == size
    assert tuple(found) == numbers
    assert [n for piece in pieces_of(found) for n in piece] == list(numbers)
    assert hash(found) == hash(numbers)
    assert Ack("t", Part(0, 1), 1, found) == Ack("t", Part(0, 1), 1, numbers)
    assert Ack.parse(Ack("t", Part(0, 1), 1, numbers).render().removeprefix("ACK ")) == Ack("t", Part(0, 1), 1, found)


def test_a_long_list_is_read_in_pieces_that_are_bounded() -> None:
    found = integer_list("ACK", "seqs", ",".join(["1"] * 100_000))
    assert isinstance(found, IntegerList)
    assert max(len(piece) for piece in pieces_of(found)) <= AT_ONCE // 2 + 1
    assert found[99_999] == 1


@pytest.mark.parametrize("bad", ["", "x", "1.5", "9" * 19, "1,,2", "+1", "1_0", " 1"])
@pytest.mark.parametrize("before", [0, 10 * AT_ONCE])
def test_what_is_no_number_is_refused_when_it_is_read(bad: str, before: int) -> None:
    text = ",".join([*["1"] * before, bad])
    with pytest.raises(RemoteProtocolError, match="must be a whole number of 64 bits"):
        read(integer_list("ACK", "seqs", text))


def read(found: Sequence[int]) -> list[int]:
    return [n for piece in pieces_of(found) for n in piece]


@pytest.mark.parametrize("ids", [tuple(range(10_000)), tuple(f"key {n}" for n in range(10_000))], ids=("ids", "keys"))
def test_a_park_of_many_ids_is_the_same_on_the_wire(ids: tuple[int, ...] | tuple[str, ...]) -> None:
    park = Park("t", Part(0, 1), 1, 5, ids, 3, "no use")
    found = Park.parse(park.render().removeprefix("PARK "))
    assert found == park
    assert (len(found.ids), tuple(found.ids), hash(found)) == (10_000, ids, hash(park))
