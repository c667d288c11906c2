"""A command: a frozen dataclass whose fields declare the form of its line.

`states` decides whether a command is allowed now. Its meaning is left to the daemon and the clients.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self, TypeVar, dataclass_transform

from replicad.errors import LocalProtocolError, RemoteProtocolError
from replicad.protocol.fields import Form, literal, option, optional, rest, text, word
from replicad.protocol.words import BREAKS, SURROGATES, Side, bad, decimal, refuse_controls

T = TypeVar("T")

LONGEST = 16_384  # characters behind the name of a client's command: parsing so many takes less than a millisecond


class Command:
    """The base class of all commands. The decorator `command` sets the class attributes."""

    __slots__ = ()

    NAME: ClassVar[str]
    SENDER: ClassVar[Side]
    USAGE: ClassVar[str]
    FORM: ClassVar[Form]
    VERB: ClassVar[str | None]
    """The permission that a client needs; None: every client may send it."""
    OBJECT: ClassVar[str | None]
    """The field with the name of the stream or tube on which VERB is needed; None: the command names none. The field
    itself may be None: the service then decides for each name."""
    SPEAKER: ClassVar[str | None]
    """The field with the name of the instance for which the client speaks; None: it speaks for itself."""
    LONGEST: ClassVar[int]
    """Characters behind the name of a client's command."""
    ANSWER: ClassVar[str]
    """The name of the command that is or ends the answer; empty if there is no answer."""
    EARLIER: ClassVar[Callable[[str], str] | None]
    """Converts the arguments of an earlier form of the command to the present form."""
    _read: ClassVar[Callable[[str], list[Any]]]
    _checked: ClassVar[bool]

    @classmethod
    def parse(cls, rest: str) -> Self:
        """Build the command from the text behind its name.

        Raises:
            RemoteProtocolError: the arguments do not have the form of this command.
        """
        if cls.EARLIER is not None:
            rest = cls.EARLIER(rest)
        made = cls(*cls._read(rest))
        if cls._checked:
            made.check()
        return made

    def check(self) -> None:
        """Raise RemoteProtocolError for arguments that exclude each other."""

    def render(self) -> str:
        """The line without its end. The other side parses it into an equal command.

        Raises:
            LocalProtocolError: an argument would break the line, or would be parsed as something else.
        """
        try:
            arguments = self.FORM.write(self)
        except KeyError:  # a value for which the kind has no word
            raise LocalProtocolError(f"{self.NAME} cannot be sent: an argument has no such value") from None
        line = f"{self.NAME} {arguments}" if arguments else self.NAME
        if not line.isprintable() and BREAKS.search(line):
            raise LocalProtocolError(f"{self.NAME} cannot be sent: it would contain a line end or a NUL")
        if not line.isascii() and SURROGATES.search(line):
            raise LocalProtocolError(f"{self.NAME} cannot be sent: it would contain half a character")
        try:
            same = self._same_as(self.parse(arguments))
        except RemoteProtocolError as error:
            raise LocalProtocolError(f"{self.NAME} cannot be sent: {error}") from None
        if not same:  # e.g. a name with a blank, which would be two words
            raise LocalProtocolError(f"{self.NAME} cannot be sent: it would be parsed as something else")
        return line

    def _same_as(self, other: Self) -> bool:
        """Whether both have the same line: seconds are equal to the microsecond."""
        pairs = ((getattr(self, a.name), getattr(other, a.name)) for a in self.FORM.arguments)
        return all(a == b or (isinstance(b, float) and decimal(a) == decimal(b)) for a, b in pairs)


@dataclass_transform(frozen_default=True, field_specifiers=(word, optional, option, literal, rest, text))
def command(
    name: str,
    sender: Side,
    *,
    verb: str | None = None,
    on: str | None = None,
    speaker: str | None = None,
    answer: str = "",
    longest: int = LONGEST,
    earlier: Callable[[str], str] | None = None,
) -> Callable[[type[T]], type[T]]:
    """Declare a class as a command: a frozen dataclass with the class attributes of `Command`.

    `longest` bounds what a client may send. Give more than LONGEST only if parsing it takes no more than a few ms.
    """

    def declare(kind: type[T]) -> type[T]:
        made: Any = dataclass(frozen=True, slots=True)(kind)
        made.NAME = name
        made.SENDER = sender
        made.FORM = Form(name, made)
        made.USAGE = made.FORM.usage
        made._read = made.FORM.read
        made._checked = made.check is not Command.check
        made.VERB = verb
        made.OBJECT = on
        made.SPEAKER = speaker
        assert {on, speaker} - {None} <= {argument.name for argument in made.FORM.arguments}, name
        made.ANSWER = answer
        made.LONGEST = longest
        made.EARLIER = earlier
        declared: type[T] = made
        return declared

    return declare


def declared_in(module: str) -> tuple[type[Command], ...]:
    """The commands of a module in their order. A module calls `declared_in(__name__)` in its last line."""
    return tuple(
        found
        for found in vars(sys.modules[module]).values()
        if isinstance(found, type) and issubclass(found, Command) and found.__module__ == module
    )


class Vocabulary:
    """The commands that one end of a connection accepts, by name."""

    def __init__(self, kinds: Iterable[type[Command]]) -> None:
        self._kinds = {kind.NAME: kind for kind in kinds}
        self._from = {
            side: {name: kind for name, kind in self._kinds.items() if kind.SENDER & side}
            for side in (Side.CLIENT, Side.SERVER)
        }

    def __iter__(self) -> Iterator[type[Command]]:
        return iter(self._kinds.values())

    def __contains__(self, name: object) -> bool:
        return name in self._kinds

    def of(self, sender: Side) -> Mapping[str, type[Command]]:
        """The commands that this side may send, by name."""
        return self._from[sender]

    def with_(self, *kinds: type[Command]) -> Vocabulary:
        """A vocabulary with more commands."""
        return Vocabulary([*self, *kinds])

    def parse(self, line: str, sender: Side) -> Command:
        """Parse one line (without its end) from `sender`.

        Raises:
            RemoteProtocolError: a control character, an unknown command, a command of the other side, or wrong
                arguments.
        """
        name, _, arguments = line.partition(" ")
        kind = self._from[sender].get(name)
        if kind is not None and sender is Side.CLIENT and len(arguments) > kind.LONGEST:
            raise bad(name, f"it has {len(arguments)} characters, and up to {kind.LONGEST} are accepted")
        refuse_controls(line if kind is not None else line[:LONGEST], sender)
        if kind is not None:
            return kind.parse(arguments)
        if name in self._kinds:
            raise RemoteProtocolError(f"{name} is not a {'client' if sender is Side.CLIENT else 'server'}'s command")
        raise RemoteProtocolError(f"unknown command {name[:40]!r}; there are {', '.join(self._from[sender])}")
