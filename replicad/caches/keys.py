"""Keys of cache entries: JSON values as dictionary keys; and parsing of rows of the stream `caches`.

Two keys name the same entry if they are the same JSON: 1 and 1.0 are one number, true is not 1, the order of an
object's members does not matter.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Hashable, Iterable, Mapping, Set
from decimal import Decimal
from math import isfinite
from typing import Any, NamedTuple

Entry = list[Any] | tuple[Any, ...]  # the keys of an entry. Any other iterable but a text is taken as well
Key = tuple[Hashable, ...]  # of an entry: all its keys, frozen

_decode = json.JSONDecoder().decode  # a third faster than json.loads
_PLAIN = frozenset({str, int, type(None)})
_ORDERED = frozenset({tuple, list})  # known at a glance
_DEEPEST = 100  # lists and objects inside of each other; the interpreter's own limit differs from process to process
_EXACT = 1 << 53  # up to here a float that is a whole number equals the one that is written in its digits


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
    found = listed(keys)
    for value in found:
        if type(value) not in _PLAIN:
            return tuple(_frozen(value) for value in found)
    return found


def parse_row(row: str) -> Invalidation:
    """`[cache_func, keys or null, ts_ms]`; further elements are ignored.

    Raises:
        ValueError: the row has another form.
    """
    try:
        fields = _decode(row)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(fields, list) or len(fields) < 2:
        raise ValueError("no array of a name and keys")
    func, keys = fields[0], fields[1]
    if not isinstance(func, str) or not isinstance(keys, list | None):
        raise ValueError("the name is no string, or the keys are neither an array nor null")  # noqa: TRY004 - of a text
    return Invalidation(func, keys)


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
