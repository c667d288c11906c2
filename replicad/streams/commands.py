"""The commands about streams: subscribing, rows and positions, which streams and writers there are, acks of senders."""

from __future__ import annotations

from replicad.protocol.command import Command, command, declared_in
from replicad.protocol.fields import INTEGER, UNBOUNDED, Kind, literal, optional, rest, text, word, word_or
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


_NAMES = Kind("names", _names, " ".join, UNBOUNDED)
_NUMBERS = Kind("numbers", _numbers, lambda pairs: " ".join(f"{name}={number}" for name, number in pairs), UNBOUNDED)
_TOKEN = Kind("token", longest=MAX_TOKEN)


@command("REPLICATE", Side.CLIENT, verb="read", on="stream", answer="POSITION", longest=MAX_TOKEN + 4096)
class Replicate(Command):
    """REPLICATE: subscribe, to every stream from now on, as in Synapse, or with arguments (**ours**) to one.

    `token` is None where none was given, `NOW`, `EARLIEST`, or a position as `tokens.Vector` renders it.
    """

    stream: str | None = optional("stream_name", default=None)
    token: str | None = optional("token|NOW|EARLIEST", _TOKEN, default=None)
    linear: bool = literal("linear", default=False)


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
