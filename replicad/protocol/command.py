"""What a command is: a frozen dataclass whose fields say how its line is written, and what others must know of it.

Whether a command is allowed now is for `states`, what it means for the daemon and the clients.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Self, TypeVar, dataclass_transform

from replicad.errors import LocalProtocolError, RemoteProtocolError
from replicad.protocol.fields import Form, literal, option, optional, rest, text, word
from replicad.protocol.words import BREAKS, SURROGATES, Side, decimal, refuse_controls

T = TypeVar("T")


class Command:
    """What all commands have. `command` declares the class attributes."""

    __slots__ = ()

    NAME: ClassVar[str]
    SENDER: ClassVar[Side]
    USAGE: ClassVar[str]
    FORM: ClassVar[Form]
    VERB: ClassVar[str | None]
    """What a client must be allowed to do; None: every client may."""
    ANSWER: ClassVar[str]
    """The name of the command that answers it, or that ends the answer; empty where nothing does."""
    EARLIER: ClassVar[Callable[[str], str] | None]
    """Turns the arguments of an earlier form of the command into those of the present one."""
    _read: ClassVar[Callable[[str], list[Any]]]
    _checked: ClassVar[bool]

    @classmethod
    def parse(cls, rest: str) -> Self:
        """Build the command from what follows its name on the line.

        Raises:
            RemoteProtocolError: the arguments are not of this command's form.
        """
        if cls.EARLIER is not None:
            rest = cls.EARLIER(rest)
        made = cls(*cls._read(rest))
        if cls._checked:
            made.check()
        return made

    def check(self) -> None:
        """Raise RemoteProtocolError where arguments do not go together."""

    def arguments(self) -> str:
        """What follows the name on the line, empty where nothing does."""
        return self.FORM.write(self)

    def render(self) -> str:
        """The line without its end, such that `parse` makes an equal command of it on the other side.

        Raises:
            LocalProtocolError: an argument would break the line, or be read as something else.
        """
        try:
            arguments = self.arguments()
        except KeyError:  # a value that no word stands for
            raise LocalProtocolError(f"{self.NAME} cannot be sent: an argument has no such value") from None
        line = f"{self.NAME} {arguments}" if arguments else self.NAME
        if not line.isprintable() and BREAKS.search(line):
            raise LocalProtocolError(f"{self.NAME} cannot be sent: it would contain a line end or a NUL")
        if not line.isascii() and SURROGATES.search(line):
            raise LocalProtocolError(f"{self.NAME} cannot be sent: it would contain half a character")
        try:
            understood = self._same_as(self.parse(arguments))
        except RemoteProtocolError as error:
            raise LocalProtocolError(f"{self.NAME} cannot be sent: {error}") from None
        if not understood:  # a blank in a name, say, that makes two words of it
            raise LocalProtocolError(f"{self.NAME} cannot be sent: it would be read as something else")
        return line

    def _same_as(self, other: Self) -> bool:
        """Equal as far as the line can tell: seconds only to the microsecond."""
        pairs = ((getattr(self, a.name), getattr(other, a.name)) for a in self.FORM.arguments)
        return all(a == b or (isinstance(b, float) and decimal(a) == decimal(b)) for a, b in pairs)


@dataclass_transform(frozen_default=True, field_specifiers=(word, optional, option, literal, rest, text))
def command(
    name: str,
    sender: Side,
    *,
    verb: str | None = None,
    answer: str = "",
    earlier: Callable[[str], str] | None = None,
) -> Callable[[type[T]], type[T]]:
    """Declare a class as a command: a frozen dataclass with the class attributes of `Command`."""

    def declare(kind: type[T]) -> type[T]:
        made: Any = dataclass(frozen=True, slots=True)(kind)
        made.NAME = name
        made.SENDER = sender
        made.FORM = Form.of(name, made)
        made.USAGE = made.FORM.usage
        made._read = made.FORM.read
        made._checked = made.check is not Command.check
        made.VERB = verb
        made.ANSWER = answer
        made.EARLIER = earlier
        declared: type[T] = made
        return declared

    return declare


def declared_in(module: str) -> tuple[type[Command], ...]:
    """The commands that a module declares, in their order; for its last line, as `declared_in(__name__)`."""
    return tuple(
        found
        for found in vars(sys.modules[module]).values()
        if isinstance(found, type) and issubclass(found, Command) and found.__module__ == module
    )


class Vocabulary:
    """The commands that one end of a connection knows, by name."""

    def __init__(self, kinds: Iterable[type[Command]]) -> None:
        self._kinds = {kind.NAME: kind for kind in kinds}
        self._from = {
            side: {name: kind for name, kind in self._kinds.items() if kind.SENDER & side}
            for side in (Side.CLIENT, Side.SERVER)
        }

    def __iter__(self) -> Iterator[type[Command]]:
        return iter(self._kinds.values())

    def __contains__(self, kind: type[Command]) -> bool:
        return self._kinds.get(kind.NAME) is kind

    def with_(self, *kinds: type[Command]) -> Vocabulary:
        """These commands and others."""
        return Vocabulary([*self, *kinds])

    def parse(self, line: str, sender: Side) -> Command:
        """Turn one line (without its end) into a command, as sent by `sender`.

        Raises:
            RemoteProtocolError: a control character, an unknown command, not that side's command, or wrong arguments.
        """
        refuse_controls(line, sender)
        name, _, arguments = line.partition(" ")
        kind = self._from[sender].get(name)
        if kind is not None:
            return kind.parse(arguments)
        if name in self._kinds:
            raise RemoteProtocolError(f"{name} is not a {'client' if sender is Side.CLIENT else 'server'}'s command")
        raise RemoteProtocolError(f"unknown command {name[:40]!r}; there are {', '.join(self._from[sender])}")
