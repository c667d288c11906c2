"""The events for readers of streams, as plain tuples: every row makes an event, so they must be cheap."""

from __future__ import annotations

from typing import NamedTuple, TypeVar

from replicad.errors import ReplicadError
from replicad.protocol.commands import LockReleased, RemoteServerUp


class RowBatch(NamedTuple):
    """All rows of one token, which belong together and were written by `instance`.

    `rows` is JSON text, one per row, unchanged; never empty. After this batch the reader has everything of this writer
    up to `token`.
    """

    stream: str
    instance: str
    token: int
    rows: list[str]


class PositionMoved(NamedTuple):
    """A writer's position is now `token`: all its rows up to there were delivered.

    `instance` is `*` in a linear subscription.
    """

    stream: str
    instance: str
    token: int


class Reset(NamedTuple):
    """Discard what you have of `instance` above `token`; all of it where `token` is None.

    The rows above it are void: the history of the stream forked (a restored backup, a promoted standby, a new
    sequence), or rows that were missed have been removed. The present rows follow the event.

    `instance` is a writer, `*` in a linear subscription, or None: the rows of all writers. If you derive something
    from the rows that cannot be undone row by row (a cache, a sum), compute it again.

    `reason` is `moved_back` (a POSITION went back), `forked` (rows above the fork were received before it), or the code
    of the error with which the server refused a token: `bad_token`, `token_ahead`, `token_expired`. After these three
    the stream begins again and `token` is None. After a fork there may be several events, one for each writer and one
    for all.
    """

    stream: str
    instance: str | None
    token: int | None
    reason: str


class GenerationBegan(NamedTuple):
    """The server follows another generation of the stream's history: Postgres restarted, or a fork.

    Reset events before it say what to discard; mostly there are none. Discard also what you have read from the database
    itself: transactions that were visible there may be lost, even those whose rows were not received yet. Tokens have
    the new `epoch` from now on.
    """

    stream: str
    epoch: str


class Gap(NamedTuple):
    """Rows of a writer between `have` and `reported` were not received; the reader must subscribe again from `have`."""

    stream: str
    instance: str
    have: int
    reported: int


class TakenUpto(NamedTuple):
    """The stream's sequence had given out ids up to `token` when it was read, at most `age` seconds ago.

    A reader that has everything up to there, of every writer, has all rows that were committed by then.
    """

    stream: str
    token: int
    age: float


class Connected(NamedTuple):
    """Connected, and subscribed to every stream except those for which StreamStopped was delivered."""

    server_name: str


class Disconnected(NamedTuple):
    """The connection was lost or could not be made; the next attempt is in `retry_in` seconds."""

    error: ReplicadError
    retry_in: float


class StreamStopped(NamedTuple):
    """A followed stream stops; other followed streams continue on the same connection.

    `error` is the reason. RowUnreadable and RowTooLong: the server cannot send the next row; they have its id and the
    remedy. Others, such as UnknownStream and StreamRefused: the server refuses the stream, which it accepted before.
    The follower subscribes again, from where it stopped, in about `retry_in` seconds. If no other stream is left,
    Disconnected is delivered instead.
    """

    stream: str
    error: ReplicadError
    retry_in: float


class StreamsChanged(NamedTuple):
    """For followers of all streams: streams were added, and are followed from now on, or removed."""

    added: tuple[str, ...]
    removed: tuple[str, ...]


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
"""The events that a follower delivers if they are named in `also`."""

Event = RowBatch | Reset | Also
"""All events. RowBatch and Reset are always delivered."""

E = TypeVar("E", bound=Also)
