"""A long list of integers on a line. It is kept as text, and checked and read in pieces by whoever uses it.

Reading half a million numbers takes a second. The daemon must not do that while it splits input into commands, before
it knows whether the client may send the command at all.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TypeVar, overload

from replicad.protocol.words import MAX_INTEGER, integer

T = TypeVar("T")

AT_ONCE = 4096  # characters of a list that is read at once: less than a millisecond
_PIECE = re.compile(r"-?[0-9]{1,19}(?:,-?[0-9]{1,19})*").fullmatch


class IntegerList(Sequence[int]):
    """Bigints with commas between them. Equal to every sequence of the same numbers."""

    __slots__ = ("_command", "_text", "_what")

    def __init__(self, command: str, what: str, text: str) -> None:
        self._command = command
        self._what = what
        self._text = text

    def pieces(self) -> Iterator[tuple[int, ...]]:
        """The numbers, some hundred or thousand at a time.

        Raises:
            RemoteProtocolError: a part of the text is no bigint.
        """
        begin = 0
        while begin <= len(self._text):
            end = self._text.find(",", begin + AT_ONCE)
            end = len(self._text) if end < 0 else end
            yield _read(self._command, self._what, self._text[begin:end])
            begin = end + 1

    def __iter__(self) -> Iterator[int]:
        for piece in self.pieces():
            yield from piece

    def __len__(self) -> int:
        return self._text.count(",") + 1

    @overload
    def __getitem__(self, at: int) -> int: ...

    @overload
    def __getitem__(self, at: slice) -> tuple[int, ...]: ...

    def __getitem__(self, at: int | slice) -> int | tuple[int, ...]:
        return tuple(self)[at]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return f"<{len(self)} numbers>"


def integer_list(command: str, what: str, text: str) -> Sequence[int]:
    """One or more bigints with commas between them: a tuple, or an `IntegerList` if the text is long.

    Raises:
        RemoteProtocolError: a short list has a part that is no bigint. A long one raises when it is read.
    """
    return _read(command, what, text) if len(text) <= AT_ONCE else IntegerList(command, what, text)


def pieces_of(numbers: Sequence[T]) -> Iterator[Sequence[T]]:
    """The pieces of an `IntegerList`; another sequence is its only piece. Raises as `IntegerList.pieces`."""
    if isinstance(numbers, IntegerList):
        yield from numbers.pieces()  # type: ignore[misc]  # of ints, as T is
    else:
        yield numbers


def _read(command: str, what: str, text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if _PIECE(text) is not None:
        found = tuple(map(int, parts))
        if min(found) >= -MAX_INTEGER - 1 and max(found) <= MAX_INTEGER:
            return found
    return tuple(integer(command, what, part) for part in parts)  # raises for the part that is wrong
