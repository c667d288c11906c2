"""FEDERATION_ACK: collects acks and writes them once a second.

An ack that is lost when the daemon ends is replaced by the sender's next one; until then trimming keeps more rows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import trio

from replicad.daemon.pieces import write_in_pieces
from replicad.daemon.troubles import Troubles
from replicad.errors import DatabaseError, StreamRefused, TokenAhead
from replicad.streams.acks import ReaderAck
from replicad.streams.commands import FederationAck
from replicad.streams.serving.feed import Feed
from replicad.streams.serving.intervals import StreamIntervals
from replicad.streams.store import PostgresNotes

MAX_WAITING = 10_000  # acks (one for each stream and sender) that wait for Postgres
FEDERATION = "federation"  # the stream of an ack without a name, as in Synapse
SERVICE = "acks"


class AckService:
    """The acks of all sessions."""

    def __init__(
        self,
        notes: PostgresNotes,
        feeds: Mapping[str, Feed],
        troubles: Troubles,
        pace: StreamIntervals = StreamIntervals(),
    ) -> None:
        """`feeds` are the streams that are served now, by name."""
        self._notes = notes
        self._feeds = feeds
        self._pace = pace
        self._troubles = troubles
        self._waiting: dict[tuple[str, str], ReaderAck] = {}
        self._came = trio.Event()

    @staticmethod
    def stream_of(command: FederationAck, following: Collection[str] | None) -> str | None:
        """The stream that an ack of a connection belongs to which follows these streams, or all (None).

        It belongs to the stream that it names; else to the only followed stream; else, if all are, to the stream
        called `federation`.
        """
        if command.stream is not None:
            return command.stream
        return FEDERATION if following is None else next(iter(following), None) if len(following) == 1 else None

    @staticmethod
    def refused(name: str) -> StreamRefused:
        """The answer to an ack that names a stream which is not served."""
        return StreamRefused(f"stream {name[:80]} is not served, so it takes no FEDERATION_ACK")

    def note(self, command: FederationAck, following: Collection[str] | None, reads: Callable[[str], bool]) -> bool:
        """Take an ack of a connection that follows these streams, or all (None). False if it belongs to no stream.

        `reads`: whether the connection is being sent the rows of a stream. Then it was informed if history has forked.
        From any other, a token may be of a generation before, in which the id was another row. So it counts only up to
        where all generations are the same: otherwise `trim --acked` would remove rows that the sender never had.

        Raises:
            StreamRefused: the stream that it names is not served.
            TokenAhead: the token lies beyond the stream's position, or beyond what counts from this connection.
        """
        feed = self._feeds.get(self.stream_of(command, following) or "")
        if feed is None:
            if command.stream is not None:
                raise self.refused(command.stream)
            return False
        position = feed.reading.position
        if position is None or command.token > position:
            raise TokenAhead(
                f"FEDERATION_ACK {command.token} is ahead of stream {feed.name}, whose position is {position}"
            )
        shared = feed.lineage.shared_by_all
        if shared is not None and command.token > shared and not reads(feed.name):
            raise TokenAhead(
                f"FEDERATION_ACK {command.token} is ahead of {shared}, where the history of stream {feed.name} forked; "
                "send it again on a connection that follows the stream"
            )
        key = (feed.name, command.instance)
        known = self._waiting.get(key)
        if known is None and len(self._waiting) >= MAX_WAITING:
            raise StreamRefused(f"the acks of {MAX_WAITING} senders wait for Postgres already; send it again later")
        if known is None or known.epoch != feed.stream.epoch or known.token < command.token:
            self._waiting[key] = ReaderAck(feed.name, feed.stream.epoch, command.instance, command.token)
            self._came.set()
        return True

    async def run(self) -> None:
        """Write acks until cancelled. Acks that cannot be written now are tried again after `pace.acks`."""
        while True:
            while not self._waiting:
                self._came = trio.Event()
                await self._came.wait()
            await trio.sleep(self._pace.acks)
            with self._troubles.contain("service", SERVICE, "write"):
                await self._write_waiting()

    async def _write_waiting(self) -> None:
        written = dict(self._waiting)
        await write_in_pieces(list(written.values()), self._write, self._refused)
        for key, ack in written.items():
            if self._waiting.get(key) is ack:
                del self._waiting[key]

    async def _write(self, some: Sequence[ReaderAck]) -> bool:
        await self._notes.note_acks(some)
        return True

    def _refused(self, error: DatabaseError) -> None:
        """Record an ack that Postgres cannot hold; the others are written."""
        self._troubles.record("service", SERVICE, "ack", error)
