"""Serves REPLICATE: from a token to the live rows without a gap and without a repeat.

Plain REPLICATE joins every stream's journal at its last boundary and sends the positions there. `REPLICATE stream
token` first copies the rows between the token and a boundary, in pieces that clients share (`catchups`, `copying`).
Then it joins the journal at the boundary. If the journal no longer holds that chunk, it copies again from there.

If a stream stops before an unreadable row, its subscription ends with an ERROR and the connection stays open. Plain
REPLICATE follows every stream, so it joins the stream again when the stream goes on.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import trio

from replicad.config.access import Part
from replicad.daemon.journal import Boundary, Reader
from replicad.daemon.service import HangUp
from replicad.daemon.session import Session
from replicad.errors import (
    DatabaseError,
    Forbidden,
    ReplicadError,
    RowUnreadable,
    SlowReader,
    StreamRefused,
    TableReplaced,
)
from replicad.protocol.commands import Ping
from replicad.protocol.connection import CloseReason
from replicad.streams.commands import Replicate, Taken
from replicad.streams.serving.copying import Copying, Taking
from replicad.streams.serving.filters import FilterFeeds
from replicad.streams.serving.intervals import StreamIntervals
from replicad.streams.serving.lane import LINEAR, position_lines, set_lines
from replicad.streams.serving.publisher import Publisher
from replicad.streams.serving.served_stream import ServedStream
from replicad.streams.serving.starts import Start, begin

# The text of a PING: readable for people, and every client of the original protocol accepts a PING.
NO_STREAMS = "no stream is served yet; streams that are added are sent from then on: replicad streams add"


class Subscriptions:
    """The streams that one session follows."""

    def __init__(
        self,
        session: Session,
        publisher: Publisher,
        pace: StreamIntervals = StreamIntervals(),
        *,
        filters: FilterFeeds,
    ) -> None:
        self._session = session
        self._publisher = publisher
        self._filters = filters
        self._filtered: dict[str, Callable[[], None]] = {}  # what stops the reading of a part of a stream
        self._parts: dict[str, Part] = {}  # that are read, by the name of the stream
        self._catchups = publisher.catchups
        self._pace = pace
        limits = publisher.catchups.limits
        self._under_way = trio.Semaphore(limits.per_client)
        self._taking = Taking(session, limits.pace, limits.pace_seconds)
        self._all = False
        self._readers: dict[str, Reader] = {}
        self._streams: set[str] = set()
        self._catching_up: set[str] = set()
        self._unread: set[str] = set()  # streams that plain REPLICATE would follow if the client had the right
        session.at_end(lambda: publisher.unfollow(self._join_new))
        session.at_end(self._stop_filtered)
        session.access.on_change(self._review)

    @property
    def followed(self) -> frozenset[str] | None:
        """The streams that are followed by name; None if all are followed."""
        return None if self._all else frozenset(self._streams)

    def reads(self, name: str) -> bool:
        """Whether rows of the stream are being sent, new or old ones: its generation is known to the client then."""
        return name in self._readers or name in self._catching_up or name in self._filtered

    async def taken(self, command: Taken) -> None:
        """Answer a TAKEN.

        Raises:
            StreamError: there is no such stream, it cannot be served, or a fork is being handled.
        """
        stream = await self._publisher.find(command.stream, self._lists)
        upto = await stream.taken()
        if stream.forked:
            raise StreamRefused(f"stream {command.stream} is about to begin a generation; try again")
        await self._require_still(command.stream)
        self._session.post(Taken(command.stream, upto))

    async def replicate(self, command: Replicate) -> None:
        """Serve one REPLICATE.

        Raises:
            StreamError, BadToken: refused.
        """
        if command.stream is None:
            await self._replicate_all()
        else:
            await self._publisher.use(command.stream, self._lists, lambda stream: self._replicate_one(command, stream))

    # --- every stream, from now on (as in Synapse) ---

    async def _replicate_all(self) -> None:
        if self._streams:
            raise StreamRefused(
                "REPLICATE for all streams does not go with one for a single stream; use two connections"
            )
        if not any(map(self._may_read, self._publisher.served)):
            self._session.post(Ping(NO_STREAMS))
        if self._all:  # a repeated REPLICATE: send the positions again
            for name, stream in sorted(self._publisher.served.items()):
                if name in self._readers:
                    start = Start.now(stream, stream.lane(linear=False))
                    self._readers[name].insert(stream.channel.boundary.index, start.lines(extended=False))
            return
        self._all = True
        for _, stream in sorted(self._publisher.served.items()):
            self._join_new(stream)
        for name, waiting in self._publisher.waiting().items():
            if self._may_read(name):
                self._session.refuse(waiting)
        self._publisher.follow(self._join_new)

    # --- rights that changed ---

    def _review(self) -> None:
        """End the subscriptions that the client may no longer read; follow what it may read now, if it follows all."""
        for name in sorted({*self._readers, *self._catching_up, *self._filtered}):
            if not self._may_go_on(name):
                self._withdraw(name)
        for name in sorted(self._unread):
            if self._may_read(name):
                self._unread.discard(name)
                if name in self._publisher.served:
                    self._join_new(self._publisher.served[name])

    def _withdraw(self, name: str) -> None:
        error = Forbidden(f"the operator has withdrawn the right to read stream {name}; its subscription has ended")
        if name in self._filtered:
            self._filtered.pop(name)()
            self._end_filtered(name, error)
            return
        reader = self._readers.pop(name, None)
        if reader is None:  # rows may be on their way to the socket
            self._session.hang_up(CloseReason.FORBIDDEN, f"{error.code}: {error}")
            return
        self._session.outbox.stop_reading(reader)
        self._streams.discard(name)
        if self._all:
            self._unread.add(name)
        self._session.refuse(error)

    def _lists(self, name: str) -> bool:
        """Whether the client may know the stream's name; a stream whose name it may not know counts as unknown."""
        access = self._session.access
        return not access.limited or access.lists(name)

    async def _require_still(self, name: str) -> None:
        """Refuse what the client may no longer read: there was a wait since its right was checked."""
        access = self._session.access
        if access.limited and not access.may_read_some(name) and not access.require("read", "stream", name):
            await self._publisher.find(name, self._lists)  # which may not be known

    def _may_read(self, name: str) -> bool:
        """Whether the client may read the whole stream."""
        return self._session.access.may("read", name)

    def _may_go_on(self, name: str) -> bool:
        """Whether the client may read what it reads of a stream."""
        part = self._parts.get(name)
        return self._may_read(name) if part is None else self._session.access.may_read_part(name, part)

    def _join_new(self, stream: ServedStream) -> None:
        """Follow a stream, if the client may read it."""
        if not self._may_read(stream.name):
            self._unread.add(stream.name)
            access = self._session.access
            if access.may_read_some(stream.name):
                self._session.refuse(
                    Forbidden(
                        f"client {access.name} may read a part of stream {stream.name} alone, and REPLICATE without a "
                        f"name sends whole streams; send REPLICATE {stream.name} NOW"
                    )
                )
            return
        self._join(Start.now(stream, stream.lane(linear=False)), extended=False)

    # --- one stream, from a token (ours) ---

    async def _replicate_one(self, command: Replicate, stream: ServedStream) -> None:
        name = stream.name
        if self._all or name in self._streams:
            raise StreamRefused(f"stream {name} is subscribed to on this connection already")
        part = self._session.access.part_of(name, command.where)
        if part is not None and command.linear:
            raise StreamRefused("a part of a stream has one writer, so it is not read with `linear`; leave that out")
        start = await begin(stream, command.token, self._session.asker, linear=command.linear)
        channel = start.lane.channel
        if part is None and channel.held is not None and start.positions == channel.boundary.positions:
            raise channel.held.copy()
        await self._require_still(name)
        if self._session.access.part_of(name, command.where) != part:  # there was a wait
            raise Forbidden(f"the operator has changed the part of stream {name} that this client may read; ask again")
        self._streams.add(name)
        if part is not None:
            self._parts[name] = part
            self._catching_up.add(name)
            self._session.start(self._follow_part, start, part)
            return
        try:
            self._join(start, extended=True)
        except ReplicadError:  # the stream has ended meanwhile
            self._streams.discard(name)
            raise

    # --- a part of one stream (ours) ---

    async def _follow_part(self, start: Start, part: Part) -> None:
        name = start.stream.name
        try:
            async with self._session.access.catching_up(), self._under_way:
                self._filtered[name] = await self._filters.follow(
                    self._session, start, part, lambda error: self._end_filtered(name, error)
                )
        except ReplicadError as error:
            self._end_filtered(name, error)
        finally:
            self._catching_up.discard(name)

    def _end_filtered(self, name: str, error: ReplicadError) -> None:
        """The reading of a part has ended: the client may ask again on this connection."""
        self._filtered.pop(name, None)
        self._parts.pop(name, None)
        self._streams.discard(name)
        self._session.refuse(error)

    def _stop_filtered(self) -> None:
        for stop in self._filtered.values():
            stop()
        self._filtered.clear()

    def _join(self, start: Start, *, extended: bool) -> None:
        """Read the journal from `start` on, after a catch-up from Postgres if needed."""
        lines = start.lines(extended=extended)
        if start.at_boundary and start.stream.stream.source is None:  # changes are described first
            with suppress(SlowReader):
                self._read(start, start.lane.channel.boundary, extended=extended, lines=lines)
                return
        self._catching_up.add(start.stream.name)  # from now on `_review` finds it
        self._session.start(self._catch_up_with_right, start, lines, extended)

    async def _catch_up_with_right(self, start: Start, lines: bytes, extended: bool) -> None:
        """`_catch_up`, in turn with the other catch-ups of the client, if their number is bounded."""
        name = start.stream.name
        copying = Copying(self._catchups, self._taking, start)
        self._catchups.clients[self._session.number, name] = copying
        try:
            async with self._session.access.catching_up():
                await self._session.flush()
                await self._session.send(lines)
                async with self._under_way:
                    await self._catch_up(copying, extended)
        finally:
            self._catching_up.discard(name)
            self._catchups.clients.pop((self._session.number, name), None)

    def _read(
        self, start: Start, boundary: Boundary, *, extended: bool, lines: bytes = b"", preface: bytes = b""
    ) -> None:
        """Read the journal from a boundary on. Raises SlowReader."""
        channel = start.lane.channel

        def on_stop(error: RowUnreadable) -> None:
            self._stop(Start.now(start.stream, start.lane), error)

        self._readers[start.stream.name] = self._session.outbox.read(
            channel, boundary.index, extended=extended, preamble=lines, preface=preface, on_stop=on_stop
        )

    def _stop(self, reached: Start, error: RowUnreadable) -> None:
        """End one subscription: the client has everything up to `reached`, and the next row cannot be read."""
        name = reached.stream.name
        self._readers.pop(name, None)
        self._session.refuse(error)
        if self._all:
            self._session.start(self._come_back, reached)
        else:
            self._streams.discard(name)

    async def _come_back(self, reached: Start) -> None:
        """Join a stopped stream again when it goes on, at the position that the client has."""
        channel = reached.lane.channel
        if channel.held is not None:
            await channel.released.wait()
        else:
            await trio.sleep(self._pace.stopped)
        if channel.ended is not None:
            return  # the stream is joined when it is served again
        if not self._may_read(reached.stream.name):
            self._unread.add(reached.stream.name)
            return
        self._join(reached, extended=False)

    async def _catch_up(self, copying: Copying, extended: bool) -> None:
        """Copy (start, boundary] to the client, then join the journal at the boundary; repeat if that is too late."""
        session, stream, lane = self._session, copying.stream, copying.lane
        began, described = trio.current_time(), ""
        while True:
            boundary = await self._to_present(copying, extended=extended)
            epoch, sent = copying.epoch, copying.reached
            await session.flush()
            try:
                described = await self._describe(copying, described)
                whole = await copying.copy(boundary.positions)
            except RowUnreadable as error:
                self._stop(copying.start, error)
                return
            except TableReplaced as error:
                if trio.current_time() >= began + self._pace.ahead:
                    raise HangUp(CloseReason.STREAM_ENDED, f"{error.code}: {error} Resume later.") from error
                with trio.move_on_after(self._pace.copy_retry):  # the next look at the registry finds the change
                    await lane.wait_beyond(epoch)
                if lane.channel.ended is not None:
                    raise lane.channel.ended from error
                continue
            except DatabaseError as error:
                raise HangUp(
                    CloseReason.STREAM_ENDED, f"{error.code}: catching up with {stream.name} broke off; resume later"
                ) from error
            if not whole:  # another generation has begun
                await lane.wait_beyond(epoch)
                if lane.channel.ended is not None:
                    raise lane.channel.ended
                continue
            if extended and not sent.keys() <= boundary.positions.keys():  # some writers are no longer listed
                writers = lane.writers_of(epoch, boundary.positions)
                await session.send(set_lines(stream.name, writers, boundary.positions))
            began = trio.current_time()
            copying.reached = boundary.positions
            try:
                self._read(copying.start, boundary, extended=extended, preface=copying.preface)
            except SlowReader:
                if lane.channel.boundary is boundary:  # one copy after it has filled the journal and is not complete
                    await lane.channel.wait_sealed()
            else:
                return

    async def _describe(self, copying: Copying, described: str) -> str:
        """Describe the columns of the next change, unless that was done in this generation; returns the generation."""
        if described != copying.epoch:
            copying.preface = await copying.stream.description(copying.position)
        return copying.epoch

    async def _to_present(self, copying: Copying, *, extended: bool) -> Boundary:
        """Send the client back if another generation has begun, and list writers that joined; returns the present
        boundary.
        """
        session, stream, lane = self._session, copying.stream, copying.lane
        while copying.epoch != lane.epoch:  # the POSITION that goes back is no longer in the journal
            sent = copying.reached
            copying.start = kept = copying.start.taken_back()
            again = position_lines(stream.name, kept.positions, kept.positions, all_of_them=True)
            listed = () if LINEAR in kept.positions else kept.positions
            named = (lane.writers_of(kept.epoch, listed) + again) if extended else b""
            await session.send(position_lines(stream.name, sent, kept.positions) + named)
        boundary = lane.channel.boundary
        if joined := boundary.positions.keys() - copying.reached.keys():
            new = dict.fromkeys(joined, copying.others_after)
            sent = {**copying.reached, **new}
            lines = position_lines(stream.name, sent, new, all_of_them=True)
            await session.send((lane.writers_of(copying.epoch, sent) if extended else b"") + lines)
            copying.reached = sent
        return boundary
