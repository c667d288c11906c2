"""The declaration of a command's arguments, for parsing, rendering and usage texts.

A line consists of words with one blank between them, in this order: required words, optional words, options
(`key=value`, in any order), and at the end perhaps a text, which may contain blanks. Each field declares one:

    stream: str = word("stream_name")
    part: Part = word("partition/partitions", PART)
    upto: int | None = optional("id", INTEGER)
    ttl: float | None = option("seconds", SECONDS)
    row: str = text("row_json")

A `Kind` reads and writes one argument. Features may define more kinds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from functools import partial
from typing import Any, Literal

from replicad.errors import RemoteProtocolError
from replicad.protocol.words import (
    MAX_WORD,
    bad,
    decimal,
    flag,
    integer,
    integer_list,
    json_value,
    seconds,
    small,
)

_KEY = "replicad.argument"

UNBOUNDED = 1 << 62  # characters: limited only by the length of the line

Read = Callable[[str, str, str], Any]  # command, name of the argument, its text; raises RemoteProtocolError


@dataclass(frozen=True, slots=True)
class Kind:
    """A type of argument: how its text is read and written, and how long it may be.

    `read` None: the value is the text. `name` is for tests, which make values of the kind.
    """

    name: str
    read: Read | None = None
    write: Callable[[Any], str] = str
    longest: int = MAX_WORD  # characters


def _choices(known: Mapping[str, Any], kind_name: str) -> Kind:
    words = {value: key for key, value in known.items()}

    def read(command: str, what: str, text: str) -> Any:
        if text not in known:
            raise bad(command, f"{what} must be {' or '.join(known)}, got {text[:40]!r}")
        return known[text]

    return Kind(kind_name, read, words.__getitem__)


def choice(**known: Any) -> Kind:
    """A word of a fixed set; each has a value."""
    return _choices(known, "choice")


def one_of(*words: str) -> Kind:
    """A word of a fixed set; the word is the value."""
    return _choices({word: word for word in words}, "one_of")


def word_or(absent: str, kind: Kind) -> Kind:
    """Like `kind`, but the word `absent` stands for None."""

    def read(command: str, what: str, text: str) -> Any:
        if text == absent:
            return None
        return text if kind.read is None else kind.read(command, what, text)

    return Kind(f"{kind.name}_or", read, lambda value: absent if value is None else kind.write(value), kind.longest)


def json_array_of(size: int) -> Kind:
    """A JSON array of exactly `size` values. The value of the argument is its text."""

    def read(command: str, what: str, text: str) -> str:  # noqa: ARG001
        found = json_value(command, text)
        if not isinstance(found, list) or len(found) != size:
            raise bad(command, f"expected a JSON array of {size} values")
        return text

    return Kind(f"json_array_{size}", read, longest=UNBOUNDED)


WORD = Kind("word")
INTEGER = Kind("integer", integer)
SMALL = Kind("small", small)
SECONDS = Kind("seconds", seconds, decimal)
FLAG = Kind("flag", flag, lambda value: "1" if value else "")
INTEGERS = Kind("integers", integer_list, lambda value: ",".join(map(str, value)), UNBOUNDED)
TEXT = Kind("text", longest=UNBOUNDED)


@dataclass(frozen=True, slots=True)
class Argument:
    """One declared argument of a command."""

    place: Literal["word", "optional", "option", "literal", "rest", "text"]
    usage: str
    kind: Kind
    empty: bool = False  # of a text: whether it may be missing
    name: str = ""  # of the field
    default: Any = None

    def shown(self) -> str:
        """The argument in the usage of its command."""
        match self.place:
            case "option":
                return f"[{self.name}={self.usage}]"
            case "optional" | "literal":
                return f"[{self.usage}]"
            case "text" if self.empty:
                return f"[{self.usage}]"
            case _:
                return self.usage


def word(usage: str, kind: Kind = WORD) -> Any:
    """A required word."""
    return field(metadata={_KEY: Argument("word", usage, kind)})


def optional(usage: str, kind: Kind = WORD, *, default: Any) -> Any:
    """A word that may be left out, together with all optional words behind it."""
    return field(default=default, metadata={_KEY: Argument("optional", usage, kind)})


def option(usage: str, kind: Kind = WORD, *, default: Any) -> Any:
    """`name=value`, which may be left out. Written only if the value is not the default."""
    return field(default=default, metadata={_KEY: Argument("option", usage, kind)})


def literal(spelled: str, *, default: bool) -> Any:
    """A last word that is present or absent: True or False. Never the first argument. Options may follow it, or precede
    it.
    """
    return field(default=default, metadata={_KEY: Argument("literal", spelled, WORD)})


def rest(usage: str, kind: Kind, *, default: tuple[Any, ...]) -> Any:
    """All remaining words, read and written as one text with single blanks. Without words: the default."""
    return field(default=default, metadata={_KEY: Argument("rest", usage, kind)})


def text(usage: str, kind: Kind = TEXT, *, empty: bool = False, default: Any = MISSING) -> Any:
    """The rest of the line, with its blanks. `empty`: it may be missing."""
    return field(default=default, metadata={_KEY: Argument("text", usage, kind, empty)})


class Form:
    """The arguments of one command: reads them from a line and writes them to one."""

    def __init__(self, command: str, kind: type) -> None:
        """`kind` is a dataclass whose fields are all declared by functions of this file."""
        self.arguments = declared = tuple(_argument(entry) for entry in fields(kind))
        self.usage = " ".join(argument.shown() for argument in declared)
        self._command = command
        self._words = [a for a in declared if a.place == "word"]
        self._count = len(self._words)
        self._more = declared[self._count :]
        self._optional = [a for a in declared if a.place == "optional"]
        self._options = {a.name: a for a in declared if a.place == "option"}
        self._literal = next((a for a in declared if a.place == "literal"), None)
        self._rest = next((a for a in declared if a.place == "rest"), None)
        self._text = next((a for a in declared if a.place == "text"), None)
        self._readers = [
            (at, partial(a.kind.read, command, _label(a)))
            for at, a in enumerate(self._words)
            if a.kind.read is not None
        ]
        self._limits = [a.kind.longest for a in self._words]
        several = sum(a.place in ("optional", "option", "literal") for a in self._more)
        # Words are split off up to one too many, so that a line with half a million blanks costs no more than others.
        self._most = -1 if self._rest is not None else self._count + several
        self._shortest = min([MAX_WORD, *self._limits])  # no word of at most so many characters is too long

    def read(self, line: str) -> list[Any]:
        """The values of all fields, in their order, from the text behind the command's name.

        Raises:
            RemoteProtocolError: the text has another form, or an argument cannot be read.
        """
        count = self._count
        if not self._more:
            return self._required(line.split(" ", self._count) if line else [])
        if self._text is not None:
            return self._read_with_text(line, self._text)
        words = line.split(" ", self._most) if line.strip(" ") else []
        if len(words) == count:
            return [*self._required(words), *(argument.default for argument in self._more)]
        found = self._read_more(words[count:], first=not count)
        return [*self._required(words[:count]), *(found.get(a.name, a.default) for a in self._more)]

    def write(self, command: object) -> str:
        """The text behind the command's name."""
        parts = [a.kind.write(getattr(command, a.name)) for a in self._words]
        for argument in self._more:
            value = getattr(command, argument.name)
            if argument.place == "literal":
                parts += [argument.usage] if value else []
            elif argument.place == "text":
                parts += [argument.kind.write(value)] if value != "" else []
            elif value != argument.default:
                written = argument.kind.write(value)
                parts.append(f"{argument.name}={written}" if argument.place == "option" else written)
        return " ".join(parts)

    def refused(self) -> RemoteProtocolError:
        """The error with the form of the command."""
        return bad(self._command, f"the form is `{f'{self._command} {self.usage}'.rstrip()}`")

    def _required(self, words: list[Any]) -> list[Any]:
        """Check the required words and replace each by its value."""
        if len(words) != self._count or not all(words):
            raise self.refused()
        if max(map(len, words), default=0) > self._shortest:
            for found, longest in zip(words, self._limits, strict=True):
                if len(found) > longest:
                    raise self.refused()
        for at, read in self._readers:
            words[at] = read(words[at])
        return words

    def _read_with_text(self, line: str, argument: Argument) -> list[Any]:
        parts: list[Any] = line.split(" ", self._count) if self._count and line else [line][self._count :]
        if len(parts) == self._count and argument.empty:
            parts.append("")
        if len(parts) != self._count + 1:
            raise self.refused()
        found = parts.pop()
        if (not found and not argument.empty) or len(found) > argument.kind.longest:
            raise self.refused()
        values = self._required(parts)
        if found and argument.kind.read is not None:
            found = argument.kind.read(self._command, _label(argument), found)
        values.append(found)
        return values

    def _read_more(self, words: list[str], *, first: bool) -> dict[str, Any]:
        """The values of optional words, options, literal and rest, by name; without absent ones."""
        values: dict[str, Any] = {}
        if self._rest is not None:
            if not all(words):
                raise self.refused()
            return {self._rest.name: self._value(self._rest, " ".join(words))} if words else {}
        if self._options:
            begin = next((at for at, found in enumerate(words) if self._is_option(at, found, first=first)), len(words))
            options, words = words[begin:], words[:begin]
            if self._literal is not None and options and options[-1] == self._literal.usage:
                values[self._literal.name] = True
                options.pop()
            values |= self._read_options(options)
        if self._literal is not None and words and words[-1] == self._literal.usage and not (first and len(words) == 1):
            if self._literal.name in values:
                raise self.refused()
            values[self._literal.name] = True
            words = words[:-1]
        if self._options:
            self._read_options(words[len(self._optional) :])  # which refuses what is no option
        if len(words) > len(self._optional):
            raise self.refused()
        for argument, found in zip(self._optional, words, strict=False):
            values[argument.name] = self._value(argument, found)
        return values

    def _is_option(self, at: int, found: str, *, first: bool) -> bool:
        """Whether a word is `option=value`. The first word of a command is none: a stream's name may have the sign."""
        key, equals, _ = found.partition("=")
        return bool(equals) and (at >= len(self._optional) or (key in self._options and not (first and at == 0)))

    def _read_options(self, words: list[str]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for each in words:
            key, equals, value = each.partition("=")
            if not equals or key not in self._options or key in found:
                known = "=, ".join(self._options)
                raise bad(self._command, f"unknown or repeated option {each[:80]!r}; there are {known}=")
            found[key] = self._value(self._options[key], value)
        return found

    def _value(self, argument: Argument, found: str) -> Any:
        if not found or len(found) > argument.kind.longest:
            raise self.refused()
        return found if argument.kind.read is None else argument.kind.read(self._command, _label(argument), found)


def _argument(entry: Field[Any]) -> Argument:
    declared: Argument = entry.metadata[_KEY]
    return Argument(declared.place, declared.usage, declared.kind, declared.empty, entry.name, entry.default)


def _label(argument: Argument) -> str:
    """The name of the argument in an error."""
    return argument.name if argument.place == "option" or not argument.usage.isidentifier() else argument.usage
