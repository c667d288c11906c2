"""Keys of cache entries: JSON values as dictionary keys; and parsing of rows of the stream `caches`.

Two keys name the same entry if they are the same JSON: 1 and 1.0 are one number, true is not 1, the order of an
object's members does not matter.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Hashable, Iterable, Mapping, Sequence, Set
from decimal import Decimal
from math import isfinite
from secrets import token_hex
from typing import Any, NamedTuple

Entry = list[Any] | tuple[Any, ...]  # the keys of an entry. Any other iterable but a text is taken as well
Key = tuple[Hashable, ...]  # of an entry: all its keys, frozen

_decoder = json.JSONDecoder()
_new = tuple.__new__
_MARK = token_hex(16)
_BETWEEN = f',"{_MARK}",'
_PLAIN = frozenset({str, int, type(None)})
_ORDERED = frozenset({tuple, list})  # known at a glance
_DEEPEST = 100  # lists and objects inside of each other; the interpreter's own limit differs from process to process
_EXACT = 1 << 53  # up to here a float that is a whole number equals the integer with its digits


class Invalidation(NamedTuple):
    """One row of the stream: an entry of cache `func` (or of a group of that name), or with `keys` None all of them."""

    func: str
    keys: list[object] | None


def listed(keys: Iterable[object]) -> tuple[object, ...]:
    """The keys of one entry in their order.

    Raises:
        TypeError: they are one text, whose letters would be taken for keys, or something without an order of its own.
    """
    if type(keys) not in _ORDERED:
        if isinstance(keys, str | bytes | bytearray | memoryview) or not isinstance(keys, Iterable):
            shown = reprlib.repr(keys)
            raise TypeError(f"the keys of an entry are a list, also if there is one key: [{shown}], not {shown}")
        if isinstance(keys, Set | Mapping):
            raise TypeError(f"the keys of an entry are a list, since their order counts, and no {type(keys).__name__}")
    return tuple(keys)


def freeze(keys: Iterable[object]) -> Key:
    """The keys of one entry, each a JSON value: str, int, float, bool, None, or lists, tuples and dicts of them.

    Raises:
        TypeError: a value has no form in JSON or is nested deeper than 100, or `keys` is no list of values (see
            `listed`).
    """
    found = tuple(keys) if type(keys) in _ORDERED else listed(keys)
    for value in found:
        if type(value) not in _PLAIN:
            return tuple(_frozen(value) for value in found)
    return found


def parse_rows(rows: Sequence[str]) -> list[Invalidation | None]:
    """The rows of the stream, each `[cache_func, keys or null, ts_ms]`; further elements are ignored. None stands for a
    row that has another form.
    """
    found = [_decoded(rows[0])] if len(rows) == 1 else _decoded_together(rows)
    return [  # without a Python function for each: there may be a hundred thousand in a second
        _new(Invalidation, fields[:2])
        if type(fields) is list
        and len(fields) > 1
        and type(fields[0]) is str
        and (fields[1] is None or type(fields[1]) is list)
        else None
        for fields in (map(_decoded, rows) if found is None else found)
    ]


def _decoded_together(rows: Sequence[str]) -> list[Any] | None:
    """The values of many rows in half the time of one by one; None if a value is no JSON.

    Between the rows is a mark that no row has. So it shows where a row does not end as a value ends.
    """
    try:
        values = _decoder.decode(f"[{_BETWEEN.join(rows)}]")
    except (ValueError, RecursionError):
        return None
    marks = values[1::2]
    return values[::2] if len(marks) == marks.count(_MARK) == len(rows) - 1 else None


def _decoded(row: str) -> Any:
    """The value of one row; None if it is no JSON or nested too deeply."""
    try:
        return _decoder.decode(row)
    except (ValueError, RecursionError):
        return None


def _frozen(value: object, depth: int = 0) -> Hashable:  # noqa: PLR0911 - one return per type
    """Values other than strings and plain numbers become tuples that begin with the type, so that none are equal."""
    if value is None:
        return None
    if isinstance(value, str):
        return str.__str__(value)  # for a member of an enumeration: its text
    if isinstance(value, bool):
        return (bool, int(value))
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float) and isfinite(value):
        if abs(value) > _EXACT:  # jsonb writes 1e23 in digits, which are read as 10**23; the float 1e23 is less
            return int(Decimal(repr(float(value))))
        return float(value)
    if depth == _DEEPEST:
        raise TypeError(f"a key of an entry is nested too deeply: more than {_DEEPEST} lists and objects in each other")
    if isinstance(value, list | tuple):
        return (list, *(_frozen(member, depth + 1) for member in value))
    if isinstance(value, dict) and all(isinstance(name, str) for name in value):
        return (dict, frozenset((name, _frozen(member, depth + 1)) for name, member in value.items()))
    raise TypeError(
        f"{type(value).__name__} is no JSON value and cannot be a key: give key=, a function from the arguments "
        "to a list of strings, numbers, booleans and None"
    )
