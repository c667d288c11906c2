"""Serves REPLICATE: from a token to the live rows without a gap and without a repeat.

Plain REPLICATE joins every stream's journal at its last boundary and sends the positions there. `REPLICATE stream
token` first copies the rows between the token and a boundary, in pieces that clients share (`catchups`, `copying`).
Then it joins the journal at the boundary. If the journal no longer holds that chunk, it copies again from there.

If a stream stops before an unreadable row, its subscription ends with an ERROR and the connection stays open. Plain
REPLICATE follows every stream, so it joins the stream again when the stream goes on.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

import trio

from replicad.daemon.journal import Boundary, Channel, Reader
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
from replicad.protocol.states import CloseReason
from replicad.streams.commands import Replicate, Taken
from replicad.streams.serving.catchups import Catchups
from replicad.streams.serving.copying import Copying, Taking
from replicad.streams.serving.feed import Feed
from replicad.streams.serving.intervals import StreamIntervals
from replicad.streams.serving.publisher import Publisher
from replicad.streams.serving.sent_positions import position_lines, set_lines
from replicad.streams.serving.starts import Begin, Starts, preamble_of, take_back

# The text of a PING: readable for people, and every client of the original protocol accepts a PING.
NO_STREAMS = "no stream is served yet; streams that are added are sent from then on: replicad streams add"


class Subscriptions:
    """The streams that one session follows."""

    def __init__(
        self, session: Session, publisher: Publisher, catchups: Catchups, pace: StreamIntervals = StreamIntervals()
    ) -> None:
        self._session = session
        self._publisher = publisher
        self._catchups = catchups
        self._pace = pace
        self._under_way = trio.Semaphore(catchups.limits.per_client)
        self._starts = Starts(publisher, catchups, pace)
        self._taking = Taking(session, catchups.limits.pace, catchups.limits.pace_seconds)
        self._all = False
        self._readers: dict[str, Reader] = {}
        self._streams: set[str] = set()
        self._catching_up: set[str] = set()
        self._unread: set[str] = set()  # streams that plain REPLICATE would follow if the client had the right
        session.at_end(lambda: publisher.unfollow(self._join_new))
        session.access.on_change(self._review)

    @property
    def followed(self) -> frozenset[str] | None:
        """The streams that are followed by name; None if all are followed."""
        return None if self._all else frozenset(self._streams)

    def reads(self, name: str) -> bool:
        """Whether rows of the stream are being sent, new or old ones: its generation is known to the client then."""
        return name in self._readers or name in self._catching_up

    async def taken(self, command: Taken) -> None:
        """Answer a TAKEN.

        Raises:
            StreamError: there is no such stream, it cannot be served, or a fork is being handled.
        """
        feed = await self._find(command.stream)
        upto = await feed.taken()
        if self._publisher.is_forked(command.stream):
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
            return
        began = trio.current_time()
        while True:
            try:
                await self._replicate_one(command, command.stream)
            except TableReplaced as error:  # seen before the registry was looked at; the client need not know
                if trio.current_time() >= began + self._pace.ahead:
                    raise StreamRefused(f"stream {command.stream} cannot be served now: {error}") from error
            else:
                return
            await self._publisher.look_at(command.stream)
            await trio.sleep(self._pace.look_pause)

    # --- every stream, from now on (as in Synapse) ---

    async def _replicate_all(self) -> None:
        if self._streams:
            raise StreamRefused(
                "REPLICATE for all streams does not go with one for a single stream; use two connections"
            )
        if not any(map(self._may_read, self._publisher.feeds)):
            self._session.post(Ping(NO_STREAMS))
        if self._all:  # a repeated REPLICATE: send the positions again
            for name, feed in sorted(self._publisher.feeds.items()):
                if name in self._readers:
                    boundary = feed.channel.boundary
                    self._readers[name].insert(boundary.index, feed.preamble(boundary.positions, extended=False))
            return
        self._all = True
        for _, feed in sorted(self._publisher.feeds.items()):
            self._join_new(feed)
        for name, waiting in self._publisher.waiting().items():
            if self._may_read(name):
                self._session.refuse(waiting)
        self._publisher.follow(self._join_new)

    # --- rights that changed ---

    def _review(self) -> None:
        """End the subscriptions that the client may no longer read; follow what it may read now, if it follows all."""
        for name in sorted({*self._readers, *self._catching_up}):
            if not self._may_read(name):
                self._withdraw(name)
        for name in sorted(self._unread):
            if self._may_read(name):
                self._unread.discard(name)
                if name in self._publisher.feeds:
                    self._join_new(self._publisher.feeds[name])

    def _withdraw(self, name: str) -> None:
        error = Forbidden(f"the operator has withdrawn the right to read stream {name}; its subscription has ended")
        reader = self._readers.pop(name, None)
        if reader is None:  # rows may be on their way to the socket
            self._session.hang_up(CloseReason.FORBIDDEN, f"{error.code}: {error}")
            return
        self._session.outbox.stop_reading(reader)
        self._streams.discard(name)
        if self._all:
            self._unread.add(name)
        self._session.refuse(error)

    async def _find(self, name: str) -> Feed:
        """`Publisher.find`; a stream whose name the client may not know counts as unknown."""
        access = self._session.access
        return await (self._publisher.find(name, access.lists) if access.limited else self._publisher.find(name))

    async def _require_still(self, name: str) -> None:
        """Refuse what the client may no longer read: there was a wait since its right was checked."""
        access = self._session.access
        if access.limited and not access.require("read", "stream", name):
            await self._find(name)  # which may not be known

    def _may_read(self, name: str) -> bool:
        return self._session.access.may("read", name)

    def _join_new(self, feed: Feed) -> None:
        """Follow a stream, if the client may read it."""
        if not self._may_read(feed.name):
            self._unread.add(feed.name)
            return
        boundary = feed.channel.boundary
        self._join(feed, feed.channel, boundary.positions, None, linear=False, extended=False)

    # --- one stream, from a token (ours) ---

    async def _replicate_one(self, command: Replicate, name: str) -> None:
        feed = await self._find(name)
        if self._all or name in self._streams:
            raise StreamRefused(f"stream {name} is subscribed to on this connection already")
        channel = feed.linear_channel() if command.linear else feed.channel
        start = await self._starts.in_present(feed, command, channel, self._session.asker)
        if channel.held is not None and start[0] == channel.boundary.positions:
            raise channel.held.copy()
        await self._require_still(name)
        self._streams.add(name)
        try:
            self._join(feed, channel, *start, linear=command.linear, extended=True)
        except ReplicadError:  # the stream has ended meanwhile
            self._streams.discard(name)
            raise

    def _join(
        self,
        feed: Feed,
        channel: Channel,
        start: Mapping[str, int],
        others_after: int | None,
        *,
        linear: bool,
        extended: bool,
        epoch: str | None = None,
    ) -> None:
        """Read the journal from `start` on, after a catch-up from Postgres if needed. `epoch`: the generation of
        `start`, if it may be an earlier one.
        """
        present = feed.epoch(channel)
        epoch = epoch or present
        preamble = preamble_of(feed, channel, start, extended=extended)
        boundary = channel.boundary
        lowest = min(start.values(), default=feed.sent_upto)
        others_after = lowest if others_after is None else others_after
        if start == boundary.positions and others_after == lowest and epoch == present:
            with suppress(SlowReader):
                self._read(feed, channel, boundary.index, linear=linear, extended=extended, preamble=preamble)
                return
        begin = Begin(start, others_after, epoch, preamble)
        self._catching_up.add(feed.name)  # from now on `_review` finds it
        self._session.start(self._catch_up_with_right, feed, channel, begin, linear, extended)

    async def _catch_up_with_right(
        self, feed: Feed, channel: Channel, begin: Begin, linear: bool, extended: bool
    ) -> None:
        """`_catch_up`, in turn with the other catch-ups of the client, if their number is bounded."""
        copying = Copying(self._catchups, self._taking, feed, begin.positions, begin.others_after, linear=linear)
        self._catchups.clients[self._session.number, feed.name] = copying
        try:
            async with self._session.access.catching_up():
                await self._catch_up(feed, channel, copying, begin, extended)
        finally:
            self._catching_up.discard(feed.name)
            self._catchups.clients.pop((self._session.number, feed.name), None)

    def _read(
        self, feed: Feed, channel: Channel, index: int, *, linear: bool, extended: bool, preamble: bytes = b""
    ) -> None:
        """Read the journal from a chunk on. Raises SlowReader."""

        def on_stop(error: RowUnreadable) -> None:
            self._stop(feed, channel, channel.boundary.positions, error, linear=linear)

        self._readers[feed.name] = self._session.outbox.read(
            channel, index, extended=extended, preamble=preamble, on_stop=on_stop
        )

    def _stop(
        self,
        feed: Feed,
        channel: Channel,
        sent: Mapping[str, int],
        error: RowUnreadable,
        *,
        linear: bool,
        epoch: str | None = None,
    ) -> None:
        """End one subscription: the client has everything up to `sent`, and the next row cannot be read."""
        self._readers.pop(feed.name, None)
        self._session.refuse(error)
        if self._all:
            self._session.start(self._come_back, feed, channel, dict(sent), epoch or feed.epoch(channel), linear)
        else:
            self._streams.discard(feed.name)

    async def _come_back(self, feed: Feed, channel: Channel, sent: Mapping[str, int], epoch: str, linear: bool) -> None:
        """Join a stopped stream again when it goes on, at the position that the client has."""
        if channel.held is not None:
            await channel.released.wait()
        else:
            await trio.sleep(self._pace.stopped)
        if channel.ended is not None:
            return  # the stream is joined when it is served again
        if not self._may_read(feed.name):
            self._unread.add(feed.name)
            return
        self._join(feed, channel, sent, None, linear=linear, extended=False, epoch=epoch)

    async def _catch_up(self, feed: Feed, channel: Channel, copying: Copying, begin: Begin, extended: bool) -> None:
        """Copy (start, boundary] to the client, then join the journal at the boundary; repeat if that is too late."""
        session = self._session
        await session.flush()
        await session.send(begin.preamble)
        async with self._under_way:
            await self._catch_up_now(feed, channel, copying, begin.epoch, extended)

    async def _catch_up_now(self, feed: Feed, channel: Channel, copying: Copying, epoch: str, extended: bool) -> None:
        session, linear = self._session, copying.linear
        began = trio.current_time()
        while True:
            epoch, boundary = await self._to_present(feed, channel, copying, epoch, linear=linear, extended=extended)
            sent = copying.reached
            await session.flush()
            try:
                whole = await copying.copy(boundary.positions, epoch)
            except RowUnreadable as error:
                self._stop(feed, channel, copying.reached, error, linear=linear, epoch=epoch)
                return
            except TableReplaced as error:
                if trio.current_time() >= began + self._pace.ahead:
                    raise HangUp(CloseReason.STREAM_ENDED, f"{error.code}: {error} Resume later.") from error
                with trio.move_on_after(self._pace.copy_retry):  # the next look at the registry finds the change
                    await feed.wait_beyond(channel, epoch)
                if channel.ended is not None:
                    raise channel.ended from error
                continue
            except DatabaseError as error:
                raise HangUp(
                    CloseReason.STREAM_ENDED, f"{error.code}: catching up with {feed.name} broke off; resume later"
                ) from error
            if not whole:  # another generation has begun
                await feed.wait_beyond(channel, epoch)
                if channel.ended is not None:
                    raise channel.ended
                continue
            if extended and not sent.keys() <= boundary.positions.keys():  # some writers are no longer listed
                await session.send(set_lines(feed.name, feed.writers_of(epoch, boundary.positions), boundary.positions))
            began = trio.current_time()
            copying.reached = boundary.positions
            try:
                self._read(feed, channel, boundary.index, linear=linear, extended=extended)
            except SlowReader:
                if channel.boundary is boundary:  # one copy after it has filled the journal and is not complete
                    await channel.wait_sealed()
            else:
                return

    async def _to_present(
        self, feed: Feed, channel: Channel, copying: Copying, epoch: str, *, linear: bool, extended: bool
    ) -> tuple[str, Boundary]:
        """Send the client back if another generation has begun, and list writers that joined; returns the present
        generation and boundary.
        """
        session, sent = self._session, copying.reached
        while epoch != feed.epoch(channel):  # the POSITION that goes back is no longer in the journal
            kept, epoch, copying.others_after = take_back(feed, channel, sent, epoch, copying.others_after)
            again = position_lines(feed.name, kept, kept, all_of_them=True)
            named = (feed.writers_of(epoch, () if linear else kept) + again) if extended else b""
            await session.send(position_lines(feed.name, sent, kept) + named)
            sent = kept
        boundary = channel.boundary
        if joined := boundary.positions.keys() - sent.keys():
            sent = {**sent, **dict.fromkeys(joined, copying.others_after)}
            lines = position_lines(feed.name, sent, dict.fromkeys(joined, copying.others_after), all_of_them=True)
            await session.send((feed.writers_of(epoch, sent) if extended else b"") + lines)
        copying.reached = sent
        return epoch, boundary
