"""Serves REPLICATE: from a token to the live rows without a gap and without a repeat.

Plain REPLICATE joins every stream's journal at its last boundary and sends the positions there. `REPLICATE stream
token` first copies the rows between the token and a boundary from Postgres to the socket, at the socket's speed. Then
it joins the journal at the boundary. If the journal no longer holds that chunk, it copies again from there.

If a stream stops before an unreadable row, its subscription ends with an ERROR and the connection stays open. Plain
REPLICATE follows every stream, so it joins the stream again when the stream goes on.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

import trio

from replicad.daemon.journal import Channel, Reader
from replicad.daemon.service import HangUp, Peer
from replicad.errors import (
    BadToken,
    DatabaseError,
    RowUnreadable,
    SlowReader,
    StreamRefused,
    TableReplaced,
    TokenAhead,
    TokenExpired,
    TokenForked,
    forked_text,
)
from replicad.protocol.commands import Ping
from replicad.protocol.states import CloseReason
from replicad.protocol.tokens import Vector
from replicad.streams.commands import Replicate, Taken
from replicad.streams.serving.feed import Feed
from replicad.streams.serving.lane import LINEAR, below
from replicad.streams.serving.pace import Pace
from replicad.streams.serving.publisher import Publisher
from replicad.streams.serving.roster import ALL
from replicad.streams.serving.told import position_lines, set_lines

SHOWN = 4096  # characters of a token in an ERROR
# The text of a PING: a person can read it, and every client of the original protocol takes a PING.
NO_STREAMS = "no stream is served yet; those that are added are sent from then on: replicad streams add"


@dataclass(frozen=True, slots=True)
class _Begin:
    """Where a subscription begins: the position of each writer, that of writers that are not listed, the generation of
    both, and the lines that say so.
    """

    positions: Mapping[str, int]
    others_after: int
    epoch: str
    preamble: bytes


class Subscriptions:
    """The streams that one session follows."""

    def __init__(self, session: Peer, publisher: Publisher, pace: Pace = Pace()) -> None:
        self._session = session
        self._publisher = publisher
        self._pace = pace
        self._all = False
        self._readers: dict[str, Reader] = {}
        self._streams: set[str] = set()
        session.at_end(lambda: publisher.unfollow(self._join_new))

    @property
    def followed(self) -> frozenset[str] | None:
        """The streams that are followed by name, or None where it is all of them."""
        return None if self._all else frozenset(self._streams)

    async def taken(self, command: Taken) -> None:
        """Answer a TAKEN.

        Raises:
            StreamError: there is no such stream, it cannot be served, or its ids are about to mean other rows.
        """
        feed = await self._publisher.find(command.stream)
        upto = await feed.taken()
        if self._publisher.is_forked(command.stream):
            raise StreamRefused(f"stream {command.stream} is about to begin a generation; try again")
        self._session.post(Taken(command.stream, upto))

    async def replicate(self, command: Replicate) -> None:
        """Serve one REPLICATE; what cannot be done is answered by ERROR and leaves the connection as it was.

        Raises:
            StreamError, BadToken: refused.
        """
        if command.stream is None:
            await self._replicate_all()
        else:
            await self._replicate_one(command, command.stream)

    # --- every stream, from now on (as in Synapse) ---

    async def _replicate_all(self) -> None:
        if self._streams:
            raise StreamRefused(
                "REPLICATE for all streams does not go with one for a single stream; use two connections"
            )
        if not self._publisher.feeds:
            self._session.post(Ping(NO_STREAMS))
        if self._all:  # a client may ask again for where everything stands
            for name, feed in sorted(self._publisher.feeds.items()):
                if name in self._readers:
                    boundary = feed.channel.boundary
                    self._readers[name].insert(boundary.index, feed.preamble(boundary.positions, extended=False))
            return
        self._all = True
        for _, feed in sorted(self._publisher.feeds.items()):
            self._join_new(feed)
        for waiting in self._publisher.waiting().values():
            self._session.refuse(waiting)
        self._publisher.follow(self._join_new)

    def _join_new(self, feed: Feed) -> None:
        boundary = feed.channel.boundary
        self._join(feed, feed.channel, boundary.positions, None, linear=False, extended=False)

    # --- one stream, from a token (ours) ---

    async def _replicate_one(self, command: Replicate, name: str) -> None:
        feed = await self._publisher.find(name)
        if self._all or name in self._streams:
            raise StreamRefused(f"stream {name} is subscribed to on this connection already")
        channel = feed.linear_channel() if command.linear else feed.channel
        start = await self._start_in_present(feed, command, channel)
        if channel.held is not None and start[0] == channel.boundary.positions:
            raise channel.held.copy()
        self._streams.add(name)
        self._join(feed, channel, *start, linear=command.linear, extended=True)

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
        """Read the journal from `start` on; by way of Postgres where it must be. `epoch`: the generation of `start`,
        where that may be an earlier one.
        """
        present = feed.epoch(channel)
        epoch = epoch or present
        preamble = _preamble(feed, channel, start, extended=extended)
        boundary = channel.boundary
        lowest = min(start.values(), default=feed.told_upto)
        others_after = lowest if others_after is None else others_after
        if start == boundary.positions and others_after == lowest and epoch == present:
            with suppress(SlowReader):
                self._read(feed, channel, boundary.index, linear=linear, extended=extended, preamble=preamble)
                return
        begin = _Begin(start, others_after, epoch, preamble)
        self._session.start(self._catch_up, feed, channel, begin, linear, extended)

    def _read(
        self, feed: Feed, channel: Channel, index: int, *, linear: bool, extended: bool, preamble: bytes = b""
    ) -> None:
        """Read the journal from a chunk on. Raises SlowReader."""

        def on_stop(error: RowUnreadable) -> None:
            self._stop(feed, channel, channel.boundary.positions, error, linear=linear)

        self._readers[feed.name] = self._session.read(
            channel, index, extended=extended, preamble=preamble, on_stop=on_stop
        )

    def _stop(
        self,
        feed: Feed,
        channel: Channel,
        told: Mapping[str, int],
        error: RowUnreadable,
        *,
        linear: bool,
        epoch: str | None = None,
    ) -> None:
        """End one subscription: the client has everything up to `told`, and what comes next cannot be read."""
        self._readers.pop(feed.name, None)
        self._session.refuse(error)
        if self._all:
            self._session.start(self._come_back, feed, channel, dict(told), epoch or feed.epoch(channel), linear)
        else:
            self._streams.discard(feed.name)

    async def _come_back(self, feed: Feed, channel: Channel, told: Mapping[str, int], epoch: str, linear: bool) -> None:
        """Join a stream again that had stopped, once it goes on, where the client was left."""
        if channel.held is not None:
            await channel.released.wait()
        else:
            await trio.sleep(self._pace.stopped)
        if channel.ended is not None:
            return  # the stream is joined when it is served anew
        self._join(feed, channel, told, None, linear=linear, extended=False, epoch=epoch)

    async def _start_in_present(
        self, feed: Feed, command: Replicate, channel: Channel
    ) -> tuple[Mapping[str, int], int | None]:
        """`_start_of`, in the generation that readers of the channel were told last: once more where it has changed
        meanwhile. A token of a generation that is not known may be another daemon's, which has seen a fork first.
        """
        token = _token_of(command)
        if token is not None and token.epoch not in (None, feed.epoch(channel)):
            if not feed.lineage.knows(token.epoch or ""):
                await self._publisher.look_at(feed.name)
            with trio.move_on_after(self._pace.ahead) as scope:
                await feed.wait_told(channel)
            if scope.cancelled_caught:
                raise TokenAhead(f"stream {feed.name} goes over to generation {feed.stream.epoch}; try again")
        while True:
            epoch = feed.epoch(channel)
            start = await self._start_of(feed, command, channel)
            if feed.epoch(channel) == epoch:
                return start

    async def _start_of(self, feed: Feed, command: Replicate, channel: Channel) -> tuple[Mapping[str, int], int | None]:
        """The position per writer that the subscriber begins behind, and that of the writers that are not listed.

        Raises:
            BadToken, TokenAhead, TokenExpired: with what would do.
        """
        if command.token in (None, "NOW"):
            return channel.boundary.positions, None
        retained = await feed.retained()  # every row above it is there
        if command.token == "EARLIEST":  # noqa: S105 - a word of the protocol
            start = {instance: min(retained, position) for instance, position in channel.boundary.positions.items()}
            return start, min([retained, *start.values()])
        token = await _parse(feed, command, channel)
        with trio.move_on_after(self._pace.ahead):
            while _ahead(feed, token, channel.boundary.positions):
                await channel.wait_sealed()
        start = {instance: _at(feed, token, instance) for instance in channel.boundary.positions}
        lowest = min(start.values(), default=token.minimum)
        if token.minimum < lowest and not command.linear:
            # Writers that are listed no more may have rows between the two: listed again, they keep the token down.
            await feed.know_writers_between(token.minimum, lowest)
            start = {instance: _at(feed, token, instance) for instance in channel.boundary.positions}
        if _ahead(feed, token, channel.boundary.positions):
            raise TokenAhead(
                f"token {token} lies beyond where {feed.name} stands, which is {feed.told_upto}; "
                "check that this is the database that the token came from"
            )
        if min(token.minimum, *start.values()) < retained:
            raise TokenExpired(
                f"rows of {feed.name} up to {retained} were removed, and the token is {token}; "
                f"`REPLICATE {feed.name} EARLIEST` begins with what is left"
            )
        return start, min(token.minimum, *start.values())

    async def _catch_up(
        self,
        feed: Feed,
        channel: Channel,
        begin: _Begin,
        linear: bool,
        extended: bool,
    ) -> None:
        """Copy (start, boundary] to the client, then join the journal at the boundary; repeat if that is too late."""
        session = self._session
        told, others_after, epoch = begin.positions, begin.others_after, begin.epoch
        await session.flush()
        await session.send(begin.preamble)
        began = trio.current_time()
        while True:
            while epoch != feed.epoch(channel):  # what took us back has left the journal
                kept, epoch, others_after = _take_back(feed, channel, told, epoch, others_after)
                again = position_lines(feed.name, kept, kept, all_of_them=True)
                named = (feed.writers_of(epoch, () if linear else kept) + again) if extended else b""
                await session.send(position_lines(feed.name, told, kept) + named)
                told = kept
            boundary = channel.boundary
            if joined := boundary.positions.keys() - told.keys():  # writers that joined meanwhile
                told = {**told, **dict.fromkeys(joined, others_after)}
                lines = position_lines(feed.name, told, dict.fromkeys(joined, others_after), all_of_them=True)
                await session.send((feed.writers_of(epoch, told) if extended else b"") + lines)
            await session.flush()
            try:
                await feed.copy(told, boundary.positions, session.send, linear=linear, others_after=others_after)
            except RowUnreadable as error:
                reached = below(told, boundary.positions, error)
                self._stop(feed, channel, reached, error, linear=linear, epoch=epoch)
                return
            except TableReplaced as error:
                if trio.current_time() >= began + self._pace.ahead:
                    raise HangUp(CloseReason.STREAM_ENDED, f"{error.code}: {error} Resume later.") from error
                with trio.move_on_after(self._pace.copy_retry):  # the next look finds out what has changed
                    await feed.wait_beyond(channel, epoch)
                if channel.ended is not None:
                    raise channel.ended from error
                continue
            except DatabaseError as error:
                raise HangUp(
                    CloseReason.STREAM_ENDED, f"{error.code}: catching up with {feed.name} broke off; resume later"
                ) from error
            if extended and not told.keys() <= boundary.positions.keys():  # writers that are listed no more
                await session.send(set_lines(feed.name, feed.writers_of(epoch, boundary.positions), boundary.positions))
            began = trio.current_time()
            told = boundary.positions
            others_after = max(others_after, min(told.values(), default=others_after))
            with suppress(SlowReader):
                self._read(feed, channel, boundary.index, linear=linear, extended=extended)
                return


def _preamble(feed: Feed, channel: Channel, start: Mapping[str, int], *, extended: bool) -> bytes:
    """What the subscription begins with; made once for all who begin where the stream stands."""
    if start is channel.boundary.positions and channel is feed.channel:
        return feed.preamble(start, extended=extended)
    # In linear order too, for the epoch: a token without it survives no restore.
    writers = feed.writers_of(feed.epoch(channel), feed.channel.boundary.positions) if extended else b""
    return writers + position_lines(feed.name, start, start, all_of_them=True)


def _token_of(command: Replicate) -> Vector | None:
    """The token of a REPLICATE; None for a word. Raises BadToken."""
    return None if command.token in (None, "NOW", "EARLIEST") else Vector.parse(command.token or "")


async def _parse(feed: Feed, command: Replicate, channel: Channel) -> Vector:
    """The token of a REPLICATE, as far as it can be checked without looking at positions.

    A token of an earlier generation is good up to where history is shared with the present one.

    Raises:
        TokenForked: it lies beyond that; with the token to resume from.
        BadToken: of a generation that is not known, or otherwise none.
    """
    token = _token_of(command)
    assert token is not None
    present = feed.epoch(channel)
    if command.linear and token.ahead:
        raise BadToken("a linear subscription takes a single integer as its token")
    if token.epoch is not None and token.epoch != present:
        shared = feed.lineage.shared_between(token.epoch, present)
        if shared is None:
            raise BadToken(
                f"the token is of generation {token.epoch}, stream {feed.name} is in {present} and its database knows "
                "nothing of the other one (it was restored to a time before, or the stream was added anew): what you "
                "have may differ; begin again from EARLIEST"
            )
        kept = Vector(min(token.minimum, shared.minimum)) if command.linear else token.at_most(shared)
        if (kept.minimum, kept.ahead) != (token.minimum, token.ahead):
            rewind = Vector(kept.minimum, kept.ahead, present).shortened(SHOWN)  # at or before what is shared
            raise TokenForked(forked_text(feed.name, str(shared.shortened(SHOWN)), str(rewind)))
    unknown = await feed.know_writers(token)
    if unknown:
        raise BadToken(f"the token names writers {sorted(unknown)[:20]} that stream {feed.name} does not have")
    return token


def _take_back(
    feed: Feed, channel: Channel, told: Mapping[str, int], epoch: str, others_after: int
) -> tuple[dict[str, int], str, int]:
    """What is left of positions that were told in generation `epoch`, the present one, and where others stand."""
    present = feed.epoch(channel)
    shared = feed.lineage.shared_between(epoch, present) or feed.lineage.floor
    return feed.kept(told, shared), present, min(others_after, shared.minimum)


def _at(feed: Feed, token: Vector, instance: str) -> int:
    return token.minimum if instance in (LINEAR, ALL) else token.at(feed.number(instance))


def _ahead(feed: Feed, token: Vector, positions: Mapping[str, int]) -> bool:
    """Whether the token knows more than we have told anybody."""
    return token.minimum > feed.told_upto or any(
        _at(feed, token, instance) > position for instance, position in positions.items()
    )
