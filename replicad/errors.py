"""Every exception that replicad raises on purpose, on one page.

The name says who is to blame and `code` is the same thing for machines: it opens the text of an ERROR
line on the wire (`ERROR lease_held: ...`), it is the `code` field of a log event, and clients turn it
back into the exception. The message is for people: the fault, its place, and the remedy.
"""

from __future__ import annotations

from typing import ClassVar


class ReplicadError(Exception):
    """Root of the tree. `str(error)` is one or two sentences that an operator can act on."""

    code: ClassVar[str] = "error"


# --- the person or program that started us ---------------------------------------------------------


class UsageError(ReplicadError):
    """Wrong options or a contradictory configuration."""

    code = "usage"


class EnvironmentRefused(ReplicadError):
    """The machine lacks something: Java, a free port, a writable folder, an extra that is not installed."""

    code = "environment"


# --- the two ends of a connection ------------------------------------------------------------------


class ProtocolError(ReplicadError):
    """A line that does not belong where it stands."""

    code = "protocol"


class LocalProtocolError(ProtocolError):
    """We were about to send what the protocol forbids: a defect on this side."""

    code = "local_protocol"


class RemoteProtocolError(ProtocolError):
    """The peer sent what the protocol forbids; it gets an ERROR and is disconnected."""

    code = "bad_line"


class ConnectionLost(ReplicadError):
    """The connection ended, timed out or could not be made. Trying again may help."""

    code = "connection_lost"


class NotAuthorised(ReplicadError):
    """The token was wrong or missing. Trying again does not help."""

    code = "not_authorised"


class Forbidden(ReplicadError):
    """The client may not do that; the message names the verb, the stream or tube, and what the operator can change."""

    code = "forbidden"


class WrongServer(ReplicadError):
    """SERVER named another server than expected."""

    code = "wrong_server"


class RemoteError(ReplicadError):
    """The peer answered ERROR with a code that has no class of its own here."""

    code = "remote_error"


class ServerStopping(ConnectionLost):
    """The daemon sent `ERROR server stopping`: it ends on purpose, reconnect later."""

    code = "server_stopping"


class SlowReader(ConnectionLost):
    """The daemon cut us off because we read slower than the bound; reconnect and resume from the token."""

    code = "slow_reader"


class RelayRefused(ReplicadError):
    """A line that concerns all connections is too long to be passed on to other daemons."""

    code = "relay_refused"


class RelayGap(ReplicadError):
    """Messages of another daemon were not received; they are not sent again."""

    code = "relay_gap"


class RedisUnavailable(ConnectionLost):
    """Redis cannot be reached, the connection to it was lost, or it did not answer in time."""

    code = "redis_unavailable"


class RedisRefused(ReplicadError):
    """Redis answers and does not let us: a password, a right, a replica, a second publisher. The message says what."""

    code = "redis_refused"


class PresenceRefused(ReplicadError):
    """What a worker says of its users cannot be kept; the message has the bound or the reason."""

    code = "presence_refused"


# --- Postgres --------------------------------------------------------------------------------------


class DatabaseError(ReplicadError):
    """Postgres refused a statement. `__cause__` keeps the driver's error, `sqlstate` its code where there is one."""

    code = "database"

    def __init__(self, message: str, *, sqlstate: str | None = None) -> None:
        super().__init__(message)
        self.sqlstate = sqlstate


class DatabaseUnavailable(DatabaseError):
    """No connection, or it broke; trying again may help."""

    code = "database_unavailable"


class DatabaseRefused(DatabaseError):
    """The server is reachable and refuses us (password, database name, rights, version)."""

    code = "database_refused"


class ValueRefused(DatabaseError):
    """Postgres cannot take a value: a number out of range, text that is not JSON, bytes that are not UTF-8."""


class StandbyRefused(DatabaseError):
    """The server is a standby: it shows no locks, so no position can be trusted (docs/positions.md)."""

    code = "standby"


class SchemaMissing(DatabaseError):
    """Our schema is not installed in this database."""

    code = "schema_missing"


class SchemaTooNew(DatabaseError):
    """Our schema was installed by a newer replicad than this one."""

    code = "schema_too_new"


class SchemaCollision(DatabaseError):
    """Objects of somebody else have the names that our schema needs; nothing was installed."""

    code = "schema_collision"


# --- streams ---------------------------------------------------------------------------------------


class StreamError(ReplicadError):
    """Something about one stream."""

    code = "stream"


class UnknownStream(StreamError):
    """No stream of that name is registered."""

    code = "unknown_stream"


class StreamRefused(StreamError):
    """A table cannot be made a stream, or no longer is one; the message names the remedy."""

    code = "stream_refused"


class StreamWaits(StreamError):
    """The stream is followed and does not move until something is mended; the subscription stays (a notice)."""

    code = "stream_waits"


class BadToken(StreamError):
    """The token does not parse, or the stream does not know its epoch (any more)."""

    code = "bad_token"


class TokenForked(BadToken):
    """The history of the stream forked below the token: the rows above the fork are void, ids may mean other rows.

    `rewind` is the token to resume with, after the rows above it were discarded. On the wire it is a `bad_token` as
    `forked_text` writes it; a client that does not know of forks begins again.
    """

    @property
    def rewind(self) -> str:
        """The last word of the message (an exception that is made again from its message alone keeps it so)."""
        return str(self).rpartition(" ")[2]


def forked_text(stream: str, shared: str, rewind: str) -> str:
    """The message of a TokenForked: up to where history is shared, and the token to resume with.

    Both are vector tokens. `shared` has no epoch; `rewind` has one.
    """
    return f"stream {stream} forked after {shared}: discard the rows after {shared} and resume from {rewind}"


class TokenAhead(StreamError):
    """The token lies beyond the stream's position: this daemon has not published these ids."""

    code = "token_ahead"


class TokenExpired(StreamError):
    """The token is older than the retained rows: rows after it were removed."""

    code = "token_expired"


class RowUnreadable(StreamError):
    """A row cannot be sent, and the stream stops just before it until it is mended or skipped.

    The message begins with `stream NAME` and has the row's id. `stream` and `row_id` are None where they are not known.
    """

    code = "row_unreadable"

    def __init__(self, message: str, *, stream: str | None = None, row_id: int | None = None) -> None:
        super().__init__(message)
        self.stream = stream
        self.row_id = row_id

    def copy(self) -> RowUnreadable:
        """The same for another reader: an exception that is raised again and again would gather tracebacks."""
        return type(self)(str(self), stream=self.stream, row_id=self.row_id)


class RowTooLong(RowUnreadable):
    """The line of a row has more bytes than the stream may send."""

    code = "row_too_long"


class TableReplaced(StreamError):
    """Another table has the name of a stream's table now; nothing of it was read."""

    code = "table_replaced"


class NotOwner(StreamError):
    """The key belongs to another writer, or to none at this moment; nothing was written.

    `key`, `owner` and `address` are None where they are not known; with an address the write can be sent there.
    """

    code = "not_owner"

    def __init__(
        self, message: str, *, key: str | None = None, owner: str | None = None, address: str | None = None
    ) -> None:
        super().__init__(message)
        self.key = key
        self.owner = owner
        self.address = address


class WriterExpelled(StreamError):
    """The writer gave no sign of life for its time to live: it shares the stream no longer and has to join anew."""

    code = "writer_expelled"


class InstanceTaken(StreamError):
    """Another process writes the stream under that name."""

    code = "instance_taken"


# --- tubes -----------------------------------------------------------------------------------------


class TubeError(ReplicadError):
    """Something about one tube."""

    code = "tube"


class UnknownTube(TubeError):
    """No tube of that name exists."""

    code = "unknown_tube"


class TubeRefused(TubeError):
    """A tube, an attachment or an argument of one cannot be as asked; the message names the remedy."""

    code = "tube_refused"


class EncodingUnavailable(TubeError):
    """The daemon cannot give these pods in that encoding; ask for lines, or install what the sentence says."""

    code = "encoding_unavailable"


class LeaseHeld(TubeError):
    """Another holder has the partition (or an overlapping partition)."""

    code = "lease_held"


class LeaseLost(TubeError):
    """The term is not, or no longer, the partition's: nothing was read, nothing was acked."""

    code = "lease_lost"


class LeaseForked(LeaseLost):
    """The history of the tube has forked since the lease was given. Cursors and seqs that were read under it are void.

    On the wire it is a `lease_lost` whose text begins with FORKED.
    """

    FORKED = "history forked"


class PartitionsChanged(TubeError):
    """The tube has another number of partitions now; claim anew."""

    code = "partitions_changed"


class CursorAhead(TubeError):
    """A cursor lies beyond the tube's position: pods below it can still appear."""

    code = "cursor_ahead"


class DataLoss(TubeError):
    """Pods of a planned range are no longer there."""

    code = "data_loss"


# --- pipelines -------------------------------------------------------------------------------------


class DownstreamError(ReplicadError):
    """The place that a pipeline writes to did not take a batch, or is not what it was; nothing of it was acked."""

    code = "downstream"


class DownstreamDiffers(DownstreamError):
    """Rows downstream are not those of the source."""

    code = "downstream_differs"


class DownstreamUnavailable(DownstreamError):
    """It cannot be reached, is full or too busy; trying again may help."""

    code = "downstream_unavailable"


class RowRefused(DownstreamError):
    """The downstream refuses a row because of its content, and would accept others."""

    code = "row_refused"


class ValueUnheld(DatabaseError):
    """A row holds what a pipeline cannot carry unchanged. `reasons` has all such rows of the look-up, by id."""

    code, reasons = "value_unheld", dict[int, str]()


class ColumnsChanged(DatabaseError):
    """A table has got columns, or other types of columns, since the pipeline looked at it."""

    code = "columns_changed"


class TableUnreadable(DatabaseError):
    """The table of a shard was dropped, lost a column or its rights. No row is to blame; other shards may be well."""

    code = "table_unreadable"


class RowsUnproven(DatabaseError):
    """The session cannot be shown to see every row as it was when the pods were committed, or later. So a row that it
    does not find may still be there, and a row that it finds may be old.
    """

    code = "rows_unproven"


class SparkFailed(ReplicadError):
    """Spark ended a query for a reason of its own, or code of the user's did; the message is its sentence."""

    code = "spark_failed"


class SparkWorkerLost(SparkFailed):
    """A Python worker of Spark did not start in time, or ended unexpectedly; the next try may find a less busy
    machine.
    """

    code = "spark_worker_lost"


# --- federation ------------------------------------------------------------------------------------


class FederationError(ReplicadError):
    """Something about the federation sender."""

    code = "federation"


class SenderRefused(FederationError):
    """Another sender runs under that name, the senders do not agree on how they share the destinations, or the stream's
    ids cannot be ids of facts.
    """

    code = "sender_refused"


class RouteFailed(FederationError):
    """The destinations of a row cannot be determined; the message names the row's token."""

    code = "route_failed"


class StreamRestarted(FederationError):
    """The ids of a stream went back, or rows that were not recorded were removed: an operator decides where to
    continue.
    """

    code = "stream_restarted"


def by_code() -> dict[str, type[ReplicadError]]:
    """Map every `code` to its class, for clients that turn an ERROR line back into an exception.

    A class that shares the code of its parent is not in it: the text tells the two apart.
    """
    found: dict[str, type[ReplicadError]] = {}
    todo: list[type[ReplicadError]] = [ReplicadError]
    while todo:
        kind = todo.pop()
        if "code" in vars(kind):
            found[kind.code] = kind
        todo.extend(kind.__subclasses__())
    return found
