"""The readers of JSON and TOML that come from outside: arguments of commands, bodies over HTTP, files of operators.

What a reader gives fits into Postgres and into every log. It has no number of more than 64 bits (TOML) or MAX_NUMBER
characters (JSON), and none that is not finite; no NUL and no half of a character in a text or a key; and nothing is
nested deeper than MAX_DEPTH. Everything else is refused by one exception, `Unreadable`.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

MAX_DEPTH = 100  # tables, lists and objects inside each other; the parsers recurse, as does whoever shows a value
MAX_NUMBER = 100  # characters of a number in JSON; Python refuses more than 4,300 digits, Postgres more than 131,072
MAX_PARTS = 30  # of a dotted key in TOML: its parser takes time by the square of them
MAX_FILE = 4 << 20  # bytes of a TOML file: 20,000 clients, which take two seconds to read
_BIGGEST = 1 << 63  # below which a whole number of TOML lies, by its definition
_UNBOUNDED = 10**MAX_NUMBER  # of a number in JSON

_UNSTORABLE = re.compile("[\x00\ud800-\udfff]")  # possible as escapes, but not in UTF-8 and Postgres
_BRACKETS = re.compile(r'"(?:[^"\\]++|\\.)*+"?|[\[{]|[\]}]', re.DOTALL)  # strings as well, whose brackets do not count
_LONG_KEY = re.compile(r"""(?<![\w"'.-])(?:[\w"'-]++[ \t]*+\.[ \t]*+)""" + f"{{{MAX_PARTS}}}")


class Unreadable(ValueError):
    """The text is not what the reader takes."""


# --- JSON ---


def read_json(text: str | bytes | bytearray) -> Any:
    """The value of a JSON text. Whoever calls has bounded its length.

    Raises:
        Unreadable: it is not JSON, not UTF-8, or something in it is too long, too deep or cannot be stored.
    """
    if not isinstance(text, str):
        try:
            text = text.decode()
        except UnicodeDecodeError as error:
            raise Unreadable(f"it is not UTF-8 (byte {error.start + 1})") from None
    if text.count("[") + text.count("{") > MAX_DEPTH and _depth(text) > MAX_DEPTH:
        raise Unreadable(f"it is nested too deeply: {MAX_DEPTH} lists and objects in each other are allowed")
    try:
        value = _JSON.decode(text)
    except RecursionError:  # the caller stands deep in the stack
        raise Unreadable("it is nested too deeply") from None
    except ValueError as error:
        raise Unreadable(str(error)) from None
    if "\\" in text or not text.isprintable():
        _check(value)
    return value


def _depth(text: str) -> int:
    """How many lists and objects are open at once, at most."""
    depth = deepest = 0
    for found in _BRACKETS.finditer(text):
        first = found.group()[0]
        if first in "[{":
            depth += 1
            deepest = max(deepest, depth)
        elif first != '"':
            depth -= 1
    return deepest


def _whole(digits: str) -> int:
    if len(digits) > MAX_NUMBER:
        raise ValueError(f"a number has {len(digits)} characters, and up to {MAX_NUMBER} are allowed")
    return int(digits)


def _fraction(digits: str) -> float:
    if len(digits) > MAX_NUMBER or not math.isfinite(float(digits)):
        raise ValueError(f"the number {digits[:40]} is too long or too large")
    return float(digits)


def _no_number(word: str) -> None:
    raise ValueError(f"{word} is not a number of JSON")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):  # readers differ in which one counts
        raise ValueError("an object has a key twice")
    return found


_JSON = json.JSONDecoder(parse_int=_whole, parse_float=_fraction, parse_constant=_no_number, object_pairs_hook=_object)


# --- TOML ---


def read_toml_text(data: bytes) -> dict[str, Any]:
    """The tables of a TOML file.

    Raises:
        Unreadable: it is not TOML, not UTF-8, or something in it is too long, too deep or cannot be stored.
    """
    import tomllib  # noqa: PLC0415 - clients read no files, and start faster without it

    if len(data) > MAX_FILE:
        raise Unreadable(f"it has over {MAX_FILE} bytes")
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise Unreadable(f"it is not UTF-8 (byte {error.start + 1})") from None
    for number, line in enumerate(text.split("\n"), 1):  # one search of it all would hold the interpreter for 0.1 s
        if line.count(".") >= MAX_PARTS and _LONG_KEY.search(line) is not None:
            raise Unreadable(f"line {number} has a key of over {MAX_PARTS} parts with dots between")
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise Unreadable(f"it is not TOML: {error}") from None
    except RecursionError:
        raise Unreadable(f"it is nested too deeply: {MAX_DEPTH} tables and arrays in each other are allowed") from None
    except ValueError:
        raise Unreadable("a number in it has thousands of digits") from None
    _check(tables, _BIGGEST)
    return tables


# --- both ---


def _check(value: Any, most: int = _UNBOUNDED) -> None:
    """Refuse what cannot be stored or shown: whole numbers from `most` on, among others. Without recursion."""
    layer, depth = [value], 0
    while layer:
        if depth > MAX_DEPTH:
            raise Unreadable(f"it is nested too deeply: {MAX_DEPTH} tables and lists in each other are allowed")
        inner: list[Any] = []
        for one in layer:
            if isinstance(one, str):
                if (found := _UNSTORABLE.search(one)) is not None:
                    what = "a NUL" if found.group() == "\0" else "half a character"
                    raise Unreadable(f"the text {one[:40]!a} has {what}; leave it out")
            elif isinstance(one, int):
                if abs(one) >= most:
                    raise Unreadable("a whole number has more than 64 bits")
            elif isinstance(one, float):
                if not math.isfinite(one):
                    raise Unreadable(f"{one} is not a number that can be used")
            elif isinstance(one, dict):
                inner += one
                inner += one.values()
            elif isinstance(one, list):
                inner += one
        layer, depth = inner, depth + 1
