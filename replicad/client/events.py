"""What a reader of streams is told, as plain tuples: one is made for every row, so they have to be cheap."""

from __future__ import annotations

from typing import NamedTuple, TypeVar

from replicad.errors import ReplicadError
from replicad.protocol.commands import LockReleased, RemoteServerUp


class RowBatch(NamedTuple):
    """All rows of one token: facts that belong together and were written by `instance`.

    `rows` is JSON text, one per row, as it came; never empty. Whoever has dealt with the batch has dealt with
    everything of this writer up to `token`.
    """

    stream: str
    instance: str
    token: int
    rows: list[str]


class PositionMoved(NamedTuple):
    """A writer's position is `token` now, and there are no rows up to it that were not handed over.

    `instance` is `*` in a linear subscription.
    """

    stream: str
    instance: str
    token: int


class Reset(NamedTuple):
    """What was known of the stream no longer holds: ids went back, or rows were missed that nobody has any more.

    Whoever keeps something derived from the rows (a cache, a copy) throws it away, or makes it anew. `instance` is the
    writer that was reset, None for all of them. `reason` is `moved_back`, `epoch`, or the code of the error with which
    the server refused our token: `bad_token`, `token_ahead`, `token_expired`. `token` is the writer's new
    position where it is known.
    """

    stream: str
    instance: str | None
    token: int | None
    reason: str


class Gap(NamedTuple):
    """Rows of a writer between `have` and `told` were not received; they have to be fetched."""

    stream: str
    instance: str
    have: int
    told: int


class TakenUpto(NamedTuple):
    """Ids of the stream had been given out up to `token` when Postgres was asked, no more than `age` seconds ago.

    Whoever was handed everything up to there, by every writer, has whatever was committed by then.
    """

    stream: str
    token: int
    age: float


class Connected(NamedTuple):
    """A connection stands, and every stream is subscribed to, except those of which StreamStopped was reported."""

    server_name: str


class Disconnected(NamedTuple):
    """The connection is gone or could not be made; the next attempt comes in `retry_in` seconds."""

    error: ReplicadError
    retry_in: float


class StreamStopped(NamedTuple):
    """A stream that is followed beside others stops; the others go on, on the same connection.

    `error` says why. RowUnreadable and RowTooLong: before a row that the server cannot send; they have the row's id and
    the remedy. Others, UnknownStream and StreamRefused for example: the server refuses the stream, which it accepted
    before. The stream is asked for again, from where it stopped, in about `retry_in` seconds. Where no other stream is
    left, Disconnected comes instead.
    """

    stream: str
    error: ReplicadError
    retry_in: float


class StreamsChanged(NamedTuple):
    """Told to whoever follows every stream: some were added, and are followed from here on, or removed."""

    added: tuple[str, ...]
    gone: tuple[str, ...]


Also = (
    PositionMoved
    | Connected
    | Disconnected
    | StreamStopped
    | StreamsChanged
    | TakenUpto
    | RemoteServerUp
    | LockReleased
)
"""What a follower hands over where it is asked for in `also`."""

Event = RowBatch | Reset | Also
"""Whatever a follower may hand over. RowBatch and Reset always come."""

E = TypeVar("E", bound=Also)
