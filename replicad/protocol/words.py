"""Strict parsers for words, numbers, lists and JSON on a line. A text of another form raises RemoteProtocolError."""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar, overload

from replicad.errors import RemoteProtocolError
from replicad.reading import Unreadable, read_json

MAX_WORD = 1024  # characters in any name: longer than real names, much shorter than a line
MAX_INTEGER = (1 << 63) - 1  # bigint in Postgres
MAX_SMALL = 2**31 - 1  # integer in Postgres
MAX_ERROR = 4096  # characters of an ERROR that we send; it may contain a driver's message, which may contain a row

_INTEGER = re.compile(r"-?[0-9]{1,19}").fullmatch
_SECONDS = re.compile(r"[0-9]{1,9}(\.[0-9]{1,6})?").fullmatch
_CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f]")  # C0, DEL and C1
BREAKS = re.compile(r"[\x00\n\r]")  # not allowed in any line
_UNSENDABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
SURROGATES = re.compile(r"[\ud800-\udfff]")  # halves of characters, which UTF-8 cannot encode


class Side(enum.Flag):
    """Who may send a command."""

    SERVER = enum.auto()
    CLIENT = enum.auto()
    BOTH = SERVER | CLIENT


def bad(command: str, what: str) -> RemoteProtocolError:
    """The error for a malformed command."""
    return RemoteProtocolError(f"{command}: {what}")


def refuse_controls(line: str, sender: Side) -> None:
    """Refuse a line with a character that could not be sent on, or that could change a terminal or a log.

    A client's line may have no control character. A server's line may have control characters of rows: JSON escapes
    characters below U+0020, but neither DEL nor U+0080 to U+009F, and a TAB may be between two values.

    Raises:
        RemoteProtocolError: with the character and its place.
    """
    if line.isprintable():  # the usual case; ten times as fast as the search
        return
    found = (_CONTROLS if sender is Side.CLIENT else BREAKS).search(line)
    if found is not None:
        code = f"{ord(found.group()):04X}"
        raise RemoteProtocolError(
            f"a line has the control character U+{code} (character {found.start() + 1} of it); leave it out, or "
            f"write it as \\u{code.lower()} where the argument is JSON"
        )


def sendable(text: str) -> str:
    """The text for an ERROR: control characters and halves of characters become blanks, and a long text is cut."""
    text = text if len(text) <= MAX_ERROR else text[:MAX_ERROR] + "..."
    return text if text.isprintable() else _UNSENDABLE.sub(" ", text)


def integer(command: str, what: str, text: str) -> int:
    """A bigint in decimal. Stricter than int(): no underscores, no blanks, only ASCII digits."""
    if not _INTEGER(text) or not -MAX_INTEGER - 1 <= int(text) <= MAX_INTEGER:
        raise bad(command, f"{what} must be a whole number of 64 bits, got {text[:40]!r}")
    return int(text)


def small(command: str, what: str, text: str) -> int:
    """A count that fits into an integer of Postgres: from 0 to 2147483647."""
    value = integer(command, what, text)
    if not 0 <= value <= MAX_SMALL:
        raise bad(command, f"{what} must be a whole number from 0 to {MAX_SMALL}, got {value}")
    return value


def seconds(command: str, what: str, text: str) -> float:
    """Seconds in decimal, not negative, to the microsecond."""
    if not _SECONDS(text):
        raise bad(command, f"{what} must be seconds such as 30 or 0.5, got {text[:40]!r}")
    return float(text)


def flag(command: str, what: str, text: str) -> bool:
    """An option that is `1` or left out."""
    if text != "1":
        raise bad(command, f"{what} can only be 1, got {text[:40]!r}")
    return True


def json_value(command: str, text: str) -> Any:
    """A JSON value whose numbers and strings Postgres can store and every client can read.

    Raises:
        RemoteProtocolError: not JSON, nested too deeply, a number that is too long or not finite, or a string (also a
            key) with an escaped NUL or with half a character (a surrogate without its other half).
    """
    try:
        return read_json(text)
    except Unreadable as error:
        raise bad(command, f"not valid JSON: {error}") from None


def decimal(value: float) -> str:
    """Seconds in the form that `seconds` reads, without zeros at the end."""
    return f"{value:f}".rstrip("0").rstrip(".")


# A long list of integers on a line. It is kept as text, and checked and read in pieces by whoever uses it.
#
# Reading half a million numbers takes a second. The daemon must not do that while it splits input into commands, before
# it knows whether the client may send the command at all.

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
