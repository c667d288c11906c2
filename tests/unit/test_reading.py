"""The readers of JSON and TOML: whatever comes, they give a value that can be kept, or refuse it in one way."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicad import reading
from replicad.cli import app
from replicad.config.access import Verbs, read_access
from replicad.config.settings import ServerSettings, read_contexts, read_settings
from replicad.errors import UsageError
from replicad.reading import MAX_DEPTH, MAX_FILE, Unreadable, read_json, read_toml_text
from replicad.spark.pipeline_file import load_config

PIECES = (
    "[", "]", "{", "}", '"', "'", ",", ":", "=", ".", "\n", " ", "\\", "\\u0000", "\\ud800", "\\udc00", "\\U00110000",
    "\0", "\x1f", "\x7f", "\x85", "\u2028", "\ufeff", "\U0001f600", "a", "a.b", "[[a]]", "true", "null", "nan", "inf",
    "1e999", "-", "0x", "f" * 5000, "9" * 5000, "[" * 500, "{a=" * 500, '{"a":' * 500, "a." * 500,
    "1979-05-27T07:32:00Z", "0000-00-00", '"""', "'''", "#",
)  # fmt: skip
texts = st.lists(st.sampled_from(PIECES) | st.text(max_size=5), max_size=12).map("".join)
values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**40), 10**40) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=3).filter(lambda key: "\0" not in key), inner),
    max_leaves=20,
)  # fmt: skip
TOO_MUCH = {
    "nested arrays": "a = " + "[" * 500 + "]" * 500,
    "nested tables": "a = " + "{a = " * 500 + "1" + "}" * 500,
    "a number of 5,000 digits": "a = " + "9" * 5000,
    "a hexadecimal number of 5,000 digits": "a = 0x" + "f" * 5000,
    "a key of 30,000 parts": "a." * 30_000 + "a = 1",
    "a table of 30,000 parts": "[" + "a." * 30_000 + "a]",
    "quoted parts": '"a" . ' * 3000 + "a = 1",
    "a NUL": 'a = "\\u0000"',
    "a number that is too large": "a = 1e999",
    "no number": "a = nan",
    "half a character": 'a = "\\ud800"',
    "no UTF-8": "a = '\udcff'",
    "a file that is too long": "#" * (MAX_FILE + 1),
    "no date": "a = 2000-13-01",
}


def can_be_kept(value: Any) -> None:
    """Raise unless every program can store and show the value."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, default=str)
    assert "\0" not in text
    assert "\\u0000" not in text.replace("\\\\", "")
    text.encode()
    repr(value)


@given(texts | st.binary(max_size=30))
def test_json_of_strangers_is_read_to_what_can_be_kept_or_is_unreadable(given: str | bytes) -> None:
    try:
        value = read_json(given)
    except Unreadable as error:
        str(error).encode()
    else:
        can_be_kept(value)


@given(values)
def test_json_that_can_be_kept_is_read_as_it_is(value: Any) -> None:
    assert read_json(json.dumps(value).encode()) == value
    assert read_json(json.dumps(value, ensure_ascii=False)) == value


def test_json_is_bounded_before_it_is_parsed() -> None:
    assert read_json("[" * MAX_DEPTH + "]" * MAX_DEPTH)
    assert read_json(json.dumps(["[" * 500, {'"[' * 300: 1}])), "brackets in a text are none"
    for text in ("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1), '{"a":' * 10**5, "[" * 10**5, '["\\"",' + "[" * 200):
        with pytest.raises(Unreadable, match="nested too deeply"):
            read_json(text)
    began = time.monotonic()
    with pytest.raises(Unreadable):
        read_json('"' + "[\\" * 10**5)
    assert time.monotonic() - began < 10, "it takes time by the length"
    with pytest.raises(Unreadable, match="a key twice"):
        read_json('{"a": 1, "\\u0061": 2}')


@given(texts | st.binary(max_size=30))
def test_toml_of_anybody_is_read_to_what_can_be_kept_or_is_unreadable(given: str | bytes) -> None:
    data = given if isinstance(given, bytes) else given.encode("utf-8", "surrogatepass")
    try:
        value = read_toml_text(data)
    except Unreadable as error:
        str(error).encode()
    else:
        can_be_kept(value)


@pytest.mark.parametrize("what", TOO_MUCH)
def test_every_file_of_toml_that_cannot_be_used_is_one_sentence(
    what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file.toml"
    file.write_bytes(TOO_MUCH[what].encode("utf-8", "surrogateescape"))
    monkeypatch.setenv("REPLICAD_CONTEXTS", str(file))
    for read in (
        lambda: read_access(file, Verbs(frozenset({"read"}), frozenset())),
        lambda: read_contexts(file),
        lambda: read_settings(ServerSettings, {}, file=file, environ={}),
        lambda: load_config(file),
    ):
        with pytest.raises(UsageError) as caught:
            read()
        assert str(file) in str(caught.value)
        assert len(str(caught.value)) < 1000
    for words in (["plan", str(file)], ["contexts", "list"], ["access", "check", str(file)]):
        assert app.run(words) == 2, words
        assert "Traceback" not in capsys.readouterr().err


def test_the_deepest_and_the_largest_that_is_taken_is_taken() -> None:
    assert read_toml_text(("a = " + "[" * 90 + "]" * 90 + f"\nb = {(1 << 63) - 1}\nc = 0.5").encode())
    assert math.isclose(read_toml_text(b"x.y.z = 1e300")["x"]["y"]["z"], 1e300)


def test_no_search_goes_through_a_whole_file_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search keeps all other threads from Python until it ends."""
    searched: list[int] = []

    class Counted:
        def search(self, text: str) -> None:
            searched.append(len(text))

    monkeypatch.setattr(reading, "_LONG_KEY", Counted())
    line = 'allow = ["read ' + "a." * 60 + '"]\n'
    reading.read_toml_text("".join(f"[client.c{number}]\n{line}" for number in range(1000)).encode())
    assert searched == [len(line) - 1] * 1000
