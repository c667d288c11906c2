"""The commands about streams: subscribing, rows and positions, which streams and writers there are, acks of senders.

The writers of a stream are a set of several lines of WRITERS: `writers_lines` and `WriterSet`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from replicad.config.access import Part, parse_part, part_text
from replicad.errors import RemoteProtocolError
from replicad.protocol.command import Command, command, declared_in
from replicad.protocol.fields import INTEGER, UNBOUNDED, Kind, literal, option, optional, rest, text, word, word_or
from replicad.protocol.tokens import MAX_TOKEN
from replicad.protocol.words import MAX_WORD, Side, bad, integer

BATCH = "batch"  # in the place of a token: more rows with the same token follow
MAX_STREAMS = 10_000  # names on one line; each stream costs the daemon a journal, so real numbers are far lower


def _names(command: str, what: str, found: str) -> tuple[str, ...]:
    names = tuple(found.split(" "))
    if len(names) > MAX_STREAMS or any(len(name) > MAX_WORD for name in names):
        raise bad(command, f"there may be {MAX_STREAMS} names of {MAX_WORD} characters, each {what}")
    return names


def _numbers(command: str, what: str, found: str) -> tuple[tuple[str, int], ...]:
    pairs = found.split(" ")
    split = [pair.rpartition("=") for pair in pairs]
    numbers = {name: integer(command, "number", number) for name, _, number in split if name}
    distinct = len(set(numbers.values()))
    fits = all(len(pair) <= MAX_WORD for pair in pairs) and all(number >= 1 for number in numbers.values())
    if not (fits and len(pairs) == len(numbers) == distinct):
        raise bad(command, f"every writer is written as {what}: a name, and a number of its own from 1 on")
    return tuple(numbers.items())


def _where(command: str, what: str, found: str) -> Part:
    try:
        return parse_part(found)
    except ValueError as error:
        raise bad(command, f"{what}={found[:80]!r} is no part of a stream: {error}") from None


_WHERE = Kind("where", _where, part_text, 4096)
_NAMES = Kind("names", _names, " ".join, UNBOUNDED)
_NUMBERS = Kind("numbers", _numbers, lambda pairs: " ".join(f"{name}={number}" for name, number in pairs), UNBOUNDED)
_TOKEN = Kind("token", longest=MAX_TOKEN)


@command("REPLICATE", Side.CLIENT, verb="read", on="stream", answer="POSITION", longest=MAX_TOKEN + 4096)
class Replicate(Command):
    """REPLICATE: subscribe, to every stream from now on, as in Synapse, or with arguments (**ours**) to one.

    `token` is None where none was given, `NOW`, `EARLIEST`, or a position as `tokens.Vector` renders it. `where`: only
    the changes with this value of a filter column; None: all that the client may read.
    """

    stream: str | None = optional("stream_name", default=None)
    token: str | None = optional("token|NOW|EARLIEST", _TOKEN, default=None)
    linear: bool = literal("linear", default=False)
    where: Part | None = option("column=value", _WHERE, default=None)


@command("RDATA", Side.SERVER)
class Rdata(Command):
    """RDATA: one row of a stream; `batch` in place of the token says that more rows with the same token follow.

    Then `token` is None.
    """

    stream: str = word("stream_name")
    instance: str = word("instance_name")
    token: int | None = word("token", word_or(BATCH, INTEGER))
    row: str = text("row_json")  # JSON, kept as it came


@command("POSITION", Side.SERVER)
class Position(Command):
    """POSITION: the position of a writer of a stream: the position that was sent last, and the present position."""

    stream: str = word("stream_name")
    instance: str = word("instance_name")
    prev: int = word("prev_token", INTEGER)
    new: int = word("new_token", INTEGER)


@command("WRITERS", Side.SERVER)
class Writers(Command):
    """WRITERS (ours): a stream's epoch and the small numbers of its writers, which vector tokens are made of.

    Sent before the POSITIONs that answer `REPLICATE stream ...`, and again when writers join or are retired; never to
    a client that subscribed with REPLICATE alone. A set with many writers takes several lines, see `writer_set`.
    """

    stream: str = word("stream_name")
    epoch: str = word("epoch")
    numbers: tuple[tuple[str, int], ...] = rest("[instance_name=number ...]", _NUMBERS, default=())


@command("STREAMS", Side.BOTH, verb="list", answer="STREAMS")
class Streams(Command):
    """STREAMS (ours): from a client, asks for the names of all streams; from the server, the names, sorted."""

    names: tuple[str, ...] = rest("[stream_name ...]", _NAMES, default=())


@command("TAKEN", Side.BOTH, verb="read", on="stream", answer="TAKEN")
class Taken(Command):
    """TAKEN (ours): from a client, asks up to which id there are rows; from the server, that id.

    Postgres is asked after the question was received. So every row that was committed before it has an id up to `upto`,
    and a reader that has reached that id, with every writer, has all these rows; positions alone do not show it, since
    they may be behind.
    """

    stream: str = word("stream_name")
    upto: int | None = optional("id", INTEGER, default=None)


@command("DOORBELL", Side.CLIENT, verb="doorbell")
class Doorbell(Command):
    """DOORBELL (ours): a writer has committed; look now instead of at the next poll. A hint, nothing more."""


@command("FEDERATION_ACK", Side.CLIENT, verb="ack", on="stream", speaker="instance")
class FederationAck(Command):
    """FEDERATION_ACK: the instance has delivered all rows up to the token; the name of the stream is **ours**."""

    instance: str = word("instance_name")
    token: int = word("token", INTEGER)
    stream: str | None = optional("stream_name", default=None)


COMMANDS = declared_in(__name__)


# Renders the writers of a stream as lines of WRITERS, and parses such lines into a set. Does no I/O.

WRITERS_ON_LINE = 1000  # clients of the first version accept no more
MAX_WRITERS = 1_000_000  # of one stream: bounds a reader's memory, at a hundred times what a daemon lists


def writers_lines(stream: str, epoch: str, numbers: Mapping[str, int]) -> bytes:
    """The lines of WRITERS for a whole set, newlines included; at least one.

    Not by `Writers.render`, which parses what it renders: names come from the registry, where each is one word.
    """
    pairs = sorted(numbers.items(), key=lambda pair: pair[1])
    parts = [pairs[at : at + WRITERS_ON_LINE] for at in range(0, len(pairs), WRITERS_ON_LINE)] or [[]]
    return b"".join(_writers_line(f"WRITERS {stream} {epoch}", part) for part in parts)


def _writers_line(head: str, pairs: Iterable[tuple[str, int]]) -> bytes:
    return " ".join([head, *(f"{name}={number}" for name, number in pairs)]).encode() + b"\n"


class WriterSet:
    """The writers of a stream in one epoch, from the lines of WRITERS that a reader received.

    A line that names no writer, or a writer of the set, begins a new set; a line with other writers adds to
    it. A set is complete when POSITION follows. Until then `numbers` has the writers of both the old and the new set,
    so that the token of a reader never leaves out a writer that is behind.
    """

    def __init__(self) -> None:
        self._whole: dict[str, int] = {}
        self._coming: dict[str, int] | None = None
        self._begun = False  # a line came on this connection
        self.numbers: Mapping[str, int] = {}

    def begin(self) -> None:
        """A new connection: the next line begins a new set."""
        self._coming = None
        self._begun = False

    def add(self, numbers: Mapping[str, int]) -> list[str]:
        """Take one line; returns the names that were not in the set.

        Raises:
            RemoteProtocolError: more writers than any daemon serves.
        """
        known = self._whole if self._coming is None else self._coming
        anew = not numbers or not self._begun or not numbers.keys().isdisjoint(known)
        self._begun = True
        self._coming = dict(numbers) if anew else {**known, **numbers}
        if len(self._coming) > MAX_WRITERS:
            raise RemoteProtocolError(f"WRITERS of one stream names more than {MAX_WRITERS} writers")
        new = [name for name in numbers if name not in self.numbers]
        self.numbers = {**self._whole, **self._coming}
        return new

    def close(self) -> None:
        """POSITION was received: the set is complete."""
        if self._coming is not None:
            self._whole = self._coming
            self.numbers = self._whole
            self._coming = None
