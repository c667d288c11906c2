"""What the commands are made of: the base class, and the words, numbers and options on a line.

Strict on purpose: what a command does not know it refuses, with the form that it wants. Knows no command by name.
"""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self

from replicad.errors import LocalProtocolError, RemoteProtocolError

MAX_WORD = 1024  # characters in a name of anything; far above any real one, far below a line
MAX_INTEGER = (1 << 63) - 1  # ids are Postgres' bigint


class Side(enum.Flag):
    """Who may send a command."""

    SERVER = enum.auto()
    CLIENT = enum.auto()
    BOTH = SERVER | CLIENT


def bad(command: str, what: str) -> RemoteProtocolError:
    """The error that says which command was malformed and how."""
    return RemoteProtocolError(f"{command}: {what}")


def integer(command: str, what: str, text: str) -> int:
    """A bigint in decimal. Stricter than int(): no underscores, blanks or other scripts' digits."""
    if not re.fullmatch(r"-?[0-9]{1,19}", text) or not -MAX_INTEGER - 1 <= int(text) <= MAX_INTEGER:
        raise bad(command, f"{what} must be a whole number of 64 bits, got {text[:40]!r}")
    return int(text)


def seconds(command: str, what: str, text: str) -> float:
    """Seconds in decimal, not negative, to the microsecond."""
    if not re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,6})?", text):
        raise bad(command, f"{what} must be seconds such as 30 or 0.5, got {text[:40]!r}")
    return float(text)


def split_words(command: str, rest: str, usage: str, least: int, most: int) -> list[str]:
    """Split into between `least` and `most` words; no word may be empty or absurdly long."""
    words = rest.split(" ") if rest else []
    if not least <= len(words) <= most or any(not word or len(word) > MAX_WORD for word in words):
        raise bad(command, f"the form is `{command} {usage}`".rstrip())
    return words


def split_tail(command: str, rest: str, usage: str, words: int, *, unlimited: int = -1) -> list[str]:
    """`words` words and then free text, which may hold blanks and must not be empty.

    The word at index `unlimited` is a list, which may be as long as the line.
    """
    parts = rest.split(" ", words)
    too_long = any(len(part) > MAX_WORD and at != unlimited for at, part in enumerate(parts[:words]))
    if len(parts) != words + 1 or not all(parts) or too_long:
        raise bad(command, f"the form is `{command} {usage}`")
    return parts


def integers(command: str, what: str, text: str) -> tuple[int, ...]:
    """One or more bigints with commas between them."""
    return tuple(integer(command, what, part) for part in text.split(","))


def flag(command: str, what: str, text: str) -> bool:
    """An option that is switched on by `1` and off by being left out."""
    if text != "1":
        raise bad(command, f"{what} can only be 1, got {text[:40]!r}")
    return True


def read_options(command: str, words: list[str], known: dict[str, Callable[[str], Any]]) -> dict[str, Any]:
    """`key=value` words; unknown and repeated keys are refused with the list of those that exist."""
    found: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or key not in known or key in found:
            raise bad(command, f"unknown or repeated option {word[:80]!r}; there are {'=, '.join(known)}=")
        found[key] = known[key](value)
    return found


def json_array(command: str, text: str, size: int) -> list[Any]:
    """A JSON array of exactly `size` values."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise bad(command, f"not valid JSON: {error}") from None
    if not isinstance(value, list) or len(value) != size:
        raise bad(command, f"expected a JSON array of {size} values")
    return value


def decimal(value: float) -> str:
    """Seconds as `seconds` reads them, without needless zeros."""
    return f"{value:f}".rstrip("0").rstrip(".")


@dataclass(frozen=True, slots=True)
class Command:
    """What all commands have: a NAME, the side that may send it, `parse` and `render`."""

    NAME: ClassVar[str]
    SENDER: ClassVar[Side]
    USAGE: ClassVar[str] = ""

    @classmethod
    def parse(cls, rest: str) -> Self:
        """Build the command from what follows its name on the line.

        Raises:
            RemoteProtocolError: the arguments are not of this command's form.
        """
        split_words(cls.NAME, rest, cls.USAGE, 0, 0)
        return cls()

    def arguments(self) -> str:
        """What follows the name on the line, empty where nothing does."""
        return ""

    def render(self) -> str:
        """The line without its end, such that `parse` makes an equal command of it on the other side.

        Raises:
            LocalProtocolError: an argument would break the line, or be read as something else.
        """
        arguments = self.arguments()
        line = f"{self.NAME} {arguments}" if arguments else self.NAME
        if "\n" in line or "\r" in line or "\0" in line:
            raise LocalProtocolError(f"{self.NAME} cannot be sent: it would contain a line end or a NUL")
        try:
            understood = self._same_as(self.parse(arguments))
        except RemoteProtocolError as error:
            raise LocalProtocolError(f"{self.NAME} cannot be sent: {error}") from None
        if not understood:  # a blank in a name, say, that makes two words of it
            raise LocalProtocolError(f"{self.NAME} cannot be sent: it would be read as something else")
        return line

    def _same_as(self, other: Self) -> bool:
        """Equal as far as the wire can tell: seconds only to the microsecond."""
        pairs = ((getattr(self, entry.name), getattr(other, entry.name)) for entry in fields(self))
        return all(a == b or (isinstance(b, float) and decimal(a) == decimal(b)) for a, b in pairs)
