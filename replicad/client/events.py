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
    """Discard what you have of `instance` above `token`; all of it where `token` is None.

    The rows above it are void: the history of the stream forked (a restored backup, a promoted standby, a new
    sequence), or rows were missed that are no longer there. Those that there are now come after the event.

    `instance` is a writer, `*` in a linear subscription, or None: the rows of all writers. Whoever keeps something
    derived from the rows that cannot be undone row by row (a cache, a sum) makes it anew.

    `reason` is `moved_back` (a POSITION went back), `forked` (rows above the fork were received before it), or the code
    of the error with which the server refused a token that cannot be continued: `bad_token`, `token_ahead`,
    `token_expired`. After these three the stream begins again, `token` is None. After a fork several events may come,
    one for each writer and one for all.
    """

    stream: str
    instance: str | None
    token: int | None
    reason: str


class GenerationBegan(NamedTuple):
    """The server follows another generation of the stream's history: Postgres restarted, or a fork.

    What is to be discarded is in Reset events before it; mostly there are none. Whoever keeps something that was read
    from the database itself throws it away: transactions that were visible there may be lost, also those whose rows
    had not come yet. `epoch` stands in tokens from now on.
    """

    stream: str
    epoch: str


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
    | GenerationBegan
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
