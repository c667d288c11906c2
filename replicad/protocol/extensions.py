"""Our own commands beside tubes: access, which streams there are, their writers and how far ids got, the doorbell."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from replicad.protocol.words import Command, Side, bad, integer, split_words


@dataclass(frozen=True, slots=True)
class Auth(Command):
    """AUTH: the shared secret of a daemon that asks for one; the client's first line."""

    NAME = "AUTH"
    SENDER = Side.CLIENT
    USAGE = "token"
    token: str

    @classmethod
    def parse(cls, rest: str) -> Self:
        return cls(*split_words(cls.NAME, rest, cls.USAGE, 1, 1))

    def arguments(self) -> str:
        return self.token

    def __repr__(self) -> str:  # a secret must never reach a log
        return "Auth(token=...)"


MAX_STREAMS = 10_000  # names on one line; each stream costs the daemon a journal, so that nobody comes near


@dataclass(frozen=True, slots=True)
class Streams(Command):
    """STREAMS: from a client, asks which streams there are; from the server, their names, in alphabetical order."""

    NAME = "STREAMS"
    SENDER = Side.BOTH
    USAGE = "[stream_name ...]"
    names: tuple[str, ...] = ()

    @classmethod
    def parse(cls, rest: str) -> Self:
        return cls(tuple(split_words(cls.NAME, rest, cls.USAGE, 0, MAX_STREAMS)))

    def arguments(self) -> str:
        return " ".join(self.names)


@dataclass(frozen=True, slots=True)
class Writers(Command):
    """WRITERS: a stream's epoch and the small numbers of its writers, which vector tokens are made of.

    Sent before the POSITIONs that answer `REPLICATE stream ...`, and again when writers join or are retired; never to
    a client that subscribed with REPLICATE alone. A set with many writers takes several lines, see `writer_set`.
    """

    NAME = "WRITERS"
    SENDER = Side.SERVER
    USAGE = "stream_name epoch instance_name=number ..."
    stream: str
    epoch: str
    numbers: tuple[tuple[str, int], ...]

    @classmethod
    def parse(cls, rest: str) -> Self:
        stream, epoch, *pairs = split_words(cls.NAME, rest, cls.USAGE, 2, len(rest))
        split = [pair.rpartition("=") for pair in pairs]
        numbers = {name: integer(cls.NAME, "number", number) for name, _, number in split if name}
        distinct = len(set(numbers.values()))
        if not len(pairs) == len(numbers) == distinct or any(number < 1 for number in numbers.values()):
            raise bad(cls.NAME, "every writer is written like name=3, with a number of its own from 1 on")
        return cls(stream, epoch, tuple(numbers.items()))

    def arguments(self) -> str:
        return " ".join([self.stream, self.epoch, *(f"{name}={number}" for name, number in self.numbers)])


@dataclass(frozen=True, slots=True)
class Taken(Command):
    """TAKEN: from a client, asks up to where ids of a stream have been given out; from the server, that id.

    Postgres is asked after the question came. So whatever was committed before it has an id up to `upto`, and who has
    got there, with every writer, has all of it; positions alone do not tell, since they may be behind.
    """

    NAME = "TAKEN"
    SENDER = Side.BOTH
    USAGE = "stream_name [id]"
    stream: str
    upto: int | None = None

    @classmethod
    def parse(cls, rest: str) -> Self:
        stream, *found = split_words(cls.NAME, rest, cls.USAGE, 1, 2)
        return cls(stream, integer(cls.NAME, "id", found[0]) if found else None)

    def arguments(self) -> str:
        return self.stream if self.upto is None else f"{self.stream} {self.upto}"


@dataclass(frozen=True, slots=True)
class Doorbell(Command):
    """DOORBELL: a writer has just committed; look now instead of at the next poll. A hint, nothing more."""

    NAME = "DOORBELL"
    SENDER = Side.CLIENT
