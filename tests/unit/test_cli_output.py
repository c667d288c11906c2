"""What commands print and how they read shards: tables that line up, JSON that parses, ranges that are meant."""

from __future__ import annotations

import json
import unicodedata
from datetime import UTC, datetime, timedelta
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicad.errors import UsageError
from replicad.masking import mask_value, visible
from replicad.terminal.failures import say
from replicad.terminal.output import as_json_line, echo, print_rows, table
from replicad.tubes.cli.islands import parse_shards
from replicad.tubes.cli.tubes import _ranges, _read_ids
from replicad.tubes.keys import BIGINT
from replicad.tubes.shards import MAX_SHARD, shard_of_schema

values = st.one_of(
    st.none(), st.integers(-(10**18), 10**18), st.text(max_size=20), st.booleans(), st.floats(allow_nan=False)
)


@given(st.lists(st.fixed_dictionaries({"name": st.text(max_size=12), "value": values}), max_size=6))
def test_a_table_has_one_line_per_row_whatever_is_in_it(rows: list[dict[str, object]]) -> None:
    lines = table(["name", "value"], rows).split("\n")
    assert len(lines) == len(rows) + 1
    assert lines[0].split() == ["name", "value"]


def test_numbers_stand_to_the_right_and_none_is_empty() -> None:
    rows = [{"tube": "cities", "pods": 1234567, "ids": None}, {"tube": "x", "pods": 5, "ids": [1, 2]}]
    assert table(["tube", "pods", "ids"], rows).split("\n") == [
        "tube         pods  ids",
        "cities  1,234,567",
        "x               5  1,2",
    ]


def test_json_lines_parse_back(capsys: pytest.CaptureFixture[str]) -> None:
    at = datetime(2026, 1, 1, tzinfo=UTC)
    row = {"a": 1, "at": at, "for": timedelta(seconds=90), "d": Decimal(7), "e": Decimal("0.5"), "s": "é\n"}
    assert json.loads(as_json_line(row)) == {
        "a": 1, "at": "2026-01-01T00:00:00+00:00", "for": 90.0, "d": 7, "e": 0.5, "s": "é\n",
    }  # fmt: skip
    print_rows([], [row, row], as_json=True, nothing="nothing")
    assert len(capsys.readouterr().out.splitlines()) == 2
    print_rows(["a"], [], as_json=True, nothing="nothing")
    assert capsys.readouterr().out == ""
    print_rows(["a"], [], as_json=False, nothing="nothing there")
    assert capsys.readouterr().out == "nothing there\n"


@given(st.integers(0, MAX_SHARD), st.integers(0, MAX_SHARD), st.integers(0, MAX_SHARD))
def test_a_range_of_shards_holds_both_ends_and_nothing_outside(one: int, other: int, shard: int) -> None:
    low, high = min(one, other), max(one, other)
    found = parse_shards(f"{low}-{high}")
    assert low in found
    assert high in found
    assert (shard in found) == (low <= shard <= high)


def test_shards_are_a_number_a_range_several_or_all() -> None:
    everything = parse_shards("all")
    assert 0 in everything
    assert MAX_SHARD in everything
    some = parse_shards("7, 10-12")
    assert [shard for shard in range(20) if shard in some] == [7, 10, 11, 12]


@pytest.mark.parametrize("text", ["", "a", "3-1", "1-", "-1", "1,,2", "99999999999", f"{MAX_SHARD + 1}"])
def test_what_is_no_shard_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--shard"):
        parse_shards(text)


def test_a_schemas_shard_is_the_number_that_ends_its_name() -> None:
    assert shard_of_schema("shard_0012") == 12
    assert shard_of_schema("s3x7") == 7
    assert shard_of_schema("public") is None
    assert shard_of_schema("x99999999999") is None


def test_shards_are_shown_in_short() -> None:
    assert _ranges([1, 2, 3, 7]) == "1-3,7"
    assert _ranges([]) == ""
    assert _ranges(range(0, 100, 4)).endswith("... (25)")


def test_ids_come_as_words_with_commas_or_blanks_and_nothing_else_passes() -> None:
    assert list(_read_ids(["1,2", "3 4", "-5"], BIGINT)) == [1, 2, 3, 4, -5]
    most = 2**63 - 1
    assert list(_read_ids([f"{most}", f"{-most - 1},1000000000000000000"], BIGINT)) == [most, -most - 1, 10**18]
    for wrong in ("x", f"{most + 1}", f"{-most - 2}", "1" * 30, "1_0", "٣"):
        with pytest.raises(UsageError, match=f"'{wrong}'"):
            list(_read_ids(["1", wrong], BIGINT))


@given(st.text(st.characters(codec="utf-8")))
def test_nothing_that_is_shown_contains_what_a_terminal_obeys(text: str) -> None:
    for shown in (visible(text), table(["x"], [{"x": text}]), table(["x"], [{"x": [text]}]), mask_value([text])[0]):
        assert not any(unicodedata.category(one) == "Cc" and one not in "\n\t" for one in shown)
        assert not any(
            unicodedata.bidirectional(one) in {"LRO", "RLO", "LRE", "RLE", "LRI", "RLI", "PDF"} for one in shown
        )


@given(st.text())
def test_json_keeps_its_meaning_when_it_is_shown(text: str) -> None:
    line = as_json_line({"x": text})
    assert json.loads(visible(line)) == {"x": text}


def test_what_a_client_says_cannot_move_the_cursor(capsys: pytest.CaptureFixture[str]) -> None:
    evil = "\x1b[2J\x9b1A\u202eok"
    echo(evil)
    print_rows(["a"], [{"a": evil}], as_json=False, nothing="")
    print_rows(["a"], [{"a": evil}], as_json=True, nothing="")
    say(evil)
    told = capsys.readouterr()
    assert told.out.count("[2J") == 3
    assert told.err == "\\u001b[2J\\u009b1A\\u202eok\n"
    assert not set(told.out) & set("\x1b\x9b\u202e")
