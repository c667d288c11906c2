"""The ids in a tube: the keys of rows. A tube has keys of one kind; this file has the forms of both.

| kind | a key is | in Postgres | on the wire | in Arrow and Spark | in Python |
|---|---|---|---|---|---|
| bigint | one integer column | `bigint[]` | `[1,2]` in a pod, `1,2` in PARK | list of int64 | int |
| text | any other column, or several | `text[]` | `["a","b"]` in a pod and in PARK | list of utf8 | str |

A key of kind text is the text of its column as Postgres writes it under the settings of `tube_fixed`
(tubes/sql/keys.sql). The key of several columns is a JSON array of these texts, which `fields_of` reads.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import overload

from replicad.protocol.fields import UNBOUNDED, Kind
from replicad.protocol.words import AT_ONCE, MAX_INTEGER, bad, integer_list, json_value

BIGINT, TEXT = "bigint", "text"
KINDS = (BIGINT, TEXT)

Key = int | str
"""An id: an int in a tube with keys of kind bigint, else a str."""

_INTEGER = re.compile(r"-?[0-9]{1,19}").fullmatch


def fields_of(key: str) -> list[str]:
    """The texts of the columns of a key of several columns, in the order of the key.

    Raises:
        ValueError: it is no key of several columns.
    """
    found = json.loads(key)
    if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
        raise ValueError(f"{key[:80]!r} is no JSON array of texts")
    return found


def parse_key(kind: str, text: str) -> Key:
    """A key that a user writes. Raises ValueError with what to give."""
    if kind == TEXT:
        return text
    if not _INTEGER(text) or not -MAX_INTEGER - 1 <= int(text) <= MAX_INTEGER:
        raise ValueError("ids of this tube are whole numbers of 64 bits")
    return int(text)


class KeyList(Sequence[str]):
    """A long JSON array of keys on a line. It is kept as text until it is used, as `IntegerList` is."""

    __slots__ = ("_command", "_text", "_what")

    def __init__(self, command: str, what: str, text: str) -> None:
        self._command = command
        self._what = what
        self._text = text

    def __iter__(self) -> Iterator[str]:
        yield from _read(self._command, self._what, self._text)

    def __len__(self) -> int:
        return len(_read(self._command, self._what, self._text))  # not of `self`, which asks for the length first

    @overload
    def __getitem__(self, at: int) -> str: ...

    @overload
    def __getitem__(self, at: slice) -> tuple[str, ...]: ...

    def __getitem__(self, at: int | slice) -> str | tuple[str, ...]:
        return tuple(self)[at]

    def __bool__(self) -> bool:
        return True  # the whole pod is `*`

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return f"<keys of {len(self._text)} characters>"


def _read(command: str, what: str, text: str) -> tuple[str, ...]:
    found = json_value(command, text)
    if not found or not isinstance(found, list) or not all(isinstance(one, str) for one in found):
        raise bad(command, f"{what} must be numbers with commas, a JSON array of texts, or *, got {text[:40]!r}")
    return tuple(found)


def _some_or_all(command: str, what: str, text: str) -> Sequence[int] | Sequence[str]:
    if text == "*":
        return ()
    if text.startswith("["):
        return _read(command, what, text) if len(text) <= AT_ONCE else KeyList(command, what, text)
    return integer_list(command, what, text)


def _rendered(keys: Sequence[Key]) -> str:
    """The keys as one word: blanks and control characters in a JSON array are escaped."""
    if not keys:
        return "*"
    if isinstance(next(iter(keys)), int):
        return ",".join(map(str, keys))
    return json.dumps(list(keys), separators=(",", ":")).replace(" ", "\\u0020").replace("\x7f", "\\u007f")


KEYS_OR_ALL = Kind("keys_or_all", _some_or_all, _rendered, UNBOUNDED)
