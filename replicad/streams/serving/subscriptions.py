"""What REPLICATE does: from a token to the live flow without a gap and without a repeat.

Plain REPLICATE joins every stream's journal at its last seam and tells the positions there. `REPLICATE stream token`
first copies the rows between the token and a seam from Postgres, straight into the socket and as fast as the socket
takes them, and joins at the seam; if the journal has moved on meanwhile, once more from there.

Where a stream stops before a row that cannot be read, its subscription ends with an ERROR and the connection stays.
Plain REPLICATE follows every stream, so it joins the stream again by itself as soon as it goes on.
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
    TokenAhead,
    TokenExpired,
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

# The text of a PING: a person can read it, and every client of the original protocol takes a PING.
NO_STREAMS = "no stream is served yet; those that are added are sent from then on: replicad streams add"


@dataclass(frozen=True, slots=True)
class _Begin:
    """Where a subscription begins: the position of each writer, that of writers that are not listed, and the lines that
    say so.
    """

    positions: Mapping[str, int]
    others_after: int
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
            StreamError: there is no such stream, or it cannot be served.
        """
        feed = await self._publisher.find(command.stream)
        self._session.post(Taken(command.stream, await feed.taken()))

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
                    seam = feed.channel.seam
                    self._readers[name].insert(seam.index, feed.preamble(seam.positions, extended=False))
            return
        self._all = True
        for _, feed in sorted(self._publisher.feeds.items()):
            self._join_new(feed)
        for waiting in self._publisher.waiting().values():
            self._session.refuse(waiting)
        self._publisher.follow(self._join_new)

    def _join_new(self, feed: Feed) -> None:
        seam = feed.channel.seam
        self._join(feed, feed.channel, seam.positions, None, linear=False, extended=False)

    # --- one stream, from a token (ours) ---

    async def _replicate_one(self, command: Replicate, name: str) -> None:
        feed = await self._publisher.find(name)
        if self._all or name in self._streams:
            raise StreamRefused(f"stream {name} is subscribed to on this connection already")
        channel = feed.linear_channel() if command.linear else feed.channel
        start = await self._start_of(feed, command, channel)
        if channel.held is not None and start[0] == channel.seam.positions:
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
    ) -> None:
        """Read the journal from `start` on; by way of Postgres where it must be."""
        preamble = _preamble(feed, channel, start, extended=extended)
        seam = channel.seam
        lowest = min(start.values(), default=feed.told_upto)
        others_after = lowest if others_after is None else others_after
        if start == seam.positions and others_after == lowest:
            with suppress(SlowReader):
                self._read(feed, channel, seam.index, linear=linear, extended=extended, preamble=preamble)
                return
        begin = _Begin(start, others_after, preamble)
        self._session.start(self._catch_up, feed, channel, begin, linear, extended)

    def _read(
        self, feed: Feed, channel: Channel, index: int, *, linear: bool, extended: bool, preamble: bytes = b""
    ) -> None:
        """Read the journal from a chunk on. Raises SlowReader."""

        def on_stop(error: RowUnreadable) -> None:
            self._stop(feed, channel, channel.seam.positions, error, linear=linear)

        self._readers[feed.name] = self._session.read(
            channel, index, extended=extended and not linear, preamble=preamble, on_stop=on_stop
        )

    def _stop(
        self, feed: Feed, channel: Channel, told: Mapping[str, int], error: RowUnreadable, *, linear: bool
    ) -> None:
        """End one subscription: the client has everything up to `told`, and what comes next cannot be read."""
        self._readers.pop(feed.name, None)
        self._session.refuse(error)
        if self._all:
            self._session.start(self._come_back, feed, channel, dict(told), linear)
        else:
            self._streams.discard(feed.name)

    async def _come_back(self, feed: Feed, channel: Channel, told: Mapping[str, int], linear: bool) -> None:
        """Join a stream again that had stopped, once it goes on, where the client was left."""
        if channel.held is not None:
            await channel.released.wait()
        else:
            await trio.sleep(self._pace.stopped)
        self._join(feed, channel, told, None, linear=linear, extended=False)

    async def _start_of(self, feed: Feed, command: Replicate, channel: Channel) -> tuple[Mapping[str, int], int | None]:
        """The position per writer that the subscriber begins behind, and that of the writers that are not listed.

        Raises:
            BadToken, TokenAhead, TokenExpired: with what would do.
        """
        if command.token in (None, "NOW"):
            return channel.seam.positions, None
        retained = await feed.retained()  # every row above it is there
        if command.token == "EARLIEST":  # noqa: S105 - a word of the protocol
            start = {instance: min(retained, position) for instance, position in channel.seam.positions.items()}
            return start, min([retained, *start.values()])
        token = await _parse(feed, command)
        with trio.move_on_after(self._pace.ahead):
            while _ahead(feed, token, channel.seam.positions):
                await channel.wait_sealed()
        start = {instance: _at(feed, token, instance) for instance in channel.seam.positions}
        lowest = min(start.values(), default=token.minimum)
        if token.minimum < lowest and not command.linear:
            # Writers that are listed no more may have rows between the two: listed again, they keep the token down.
            await feed.know_writers_between(token.minimum, lowest)
            start = {instance: _at(feed, token, instance) for instance in channel.seam.positions}
        if _ahead(feed, token, channel.seam.positions):
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
        """Copy (start, seam] to the client, then join the journal at the seam; where it has moved on, once more."""
        session = self._session
        told, others_after = begin.positions, begin.others_after
        await session.flush()
        await session.send(begin.preamble)
        while True:
            seam = channel.seam
            if joined := seam.positions.keys() - told.keys():  # writers that joined meanwhile
                told = {**told, **dict.fromkeys(joined, others_after)}
                lines = position_lines(feed.name, told, dict.fromkeys(joined, others_after), all_of_them=True)
                await session.send((feed.writers_of(told) if extended else b"") + lines)
            await session.flush()
            try:
                await feed.copy(told, seam.positions, session.send, linear=linear, others_after=others_after)
            except RowUnreadable as error:
                self._stop(feed, channel, below(told, seam.positions, error), error, linear=linear)
                return
            except DatabaseError as error:
                raise HangUp(
                    CloseReason.STREAM_ENDED, f"{error.code}: catching up with {feed.name} broke off; resume later"
                ) from error
            if extended and not told.keys() <= seam.positions.keys():  # writers that are listed no more
                await session.send(set_lines(feed.name, feed.writers_of(seam.positions), seam.positions))
            told = seam.positions
            others_after = max(others_after, min(told.values(), default=others_after))
            with suppress(SlowReader):
                self._read(feed, channel, seam.index, linear=linear, extended=extended)
                return


def _preamble(feed: Feed, channel: Channel, start: Mapping[str, int], *, extended: bool) -> bytes:
    """What the subscription begins with; made once for all who begin where the stream stands."""
    if start is channel.seam.positions and channel is feed.channel:
        return feed.preamble(start, extended=extended)
    # In linear order too, for the epoch: a token without it survives no restore.
    writers = feed.writers_of(feed.channel.seam.positions) if extended else b""
    return writers + position_lines(feed.name, start, start, all_of_them=True)


async def _parse(feed: Feed, command: Replicate) -> Vector:
    """The token of a REPLICATE, as far as it can be checked without looking at positions."""
    token = Vector.parse(command.token or "")
    if token.epoch is not None and token.epoch != feed.epoch:
        raise BadToken(
            f"the token is of epoch {token.epoch}, stream {feed.name} is in {feed.epoch}: "
            "its ids were reset (a restore, setval), so what you have may differ; begin again from EARLIEST"
        )
    if command.linear and token.ahead:
        raise BadToken("a linear subscription takes a single integer as its token")
    unknown = await feed.know_writers(token)
    if unknown:
        raise BadToken(f"the token names writers {sorted(unknown)[:20]} that stream {feed.name} does not have")
    return token


def _at(feed: Feed, token: Vector, instance: str) -> int:
    return token.minimum if instance in (LINEAR, ALL) else token.at(feed.number(instance))


def _ahead(feed: Feed, token: Vector, positions: Mapping[str, int]) -> bool:
    """Whether the token knows more than we have told anybody."""
    return token.minimum > feed.told_upto or any(
        _at(feed, token, instance) > position for instance, position in positions.items()
    )
