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

import trio

from replicad.errors import (
    BadToken,
    DatabaseError,
    RowUnreadable,
    SlowReader,
    StreamRefused,
    TokenAhead,
    TokenExpired,
)
from replicad.protocol.commands import Position, Replicate, Taken
from replicad.protocol.states import CloseReason
from replicad.protocol.tokens import Vector
from replicad.server.feed import LINEAR, Feed, below
from replicad.server.journal import Channel
from replicad.server.publisher import Publisher
from replicad.server.session import HangUp, Session

AHEAD_PATIENCE = 5.0  # seconds for us to get where another daemon, which the token came from, is already


STOPPED_PAUSE = 10.0  # seconds before plain REPLICATE tries again to read old rows, of which one cannot be read


class Subscriptions:
    """The streams that one session follows."""

    def __init__(self, session: Session, publisher: Publisher) -> None:
        self._session = session
        self._publisher = publisher
        self._all = False
        self._streams: set[str] = set()
        session.at_end(lambda: publisher.unfollow(self._join_new))

    @property
    def followed(self) -> frozenset[str] | None:
        """The streams that are followed by name, or None where it is all of them."""
        return None if self._all else frozenset(self._streams)

    async def answer(self, command: Replicate | Taken) -> None:
        """Serve a REPLICATE or answer a TAKEN. Raises what `replicate` raises."""
        if isinstance(command, Replicate):
            await self.replicate(command)
        else:
            feed = await self._publisher.find(command.stream)
            self._session.post(Taken(command.stream, await feed.taken()))

    async def replicate(self, command: Replicate) -> None:
        """Serve one REPLICATE; what cannot be done is answered by ERROR and leaves the connection as it was.

        Raises:
            StreamError, BadToken: refused.
        """
        if command.stream is None:
            self._replicate_all()
        else:
            await self._replicate_one(command, command.stream)

    # --- every stream, from now on (seed 001) ---

    def _replicate_all(self) -> None:
        if self._streams:
            raise StreamRefused(
                "REPLICATE for all streams does not go with one for a single stream; use two connections"
            )
        if self._all:  # a client may ask again for where everything stands
            for feed in self._publisher.feeds.values():
                self._tell(feed, feed.channel.seam.positions)
            return
        self._all = True
        for feed in self._publisher.feeds.values():
            self._join_new(feed)
        self._publisher.follow(self._join_new)

    def _join_new(self, feed: Feed) -> None:
        seam = feed.channel.seam
        self._tell(feed, seam.positions)
        self._join(feed, feed.channel, seam.positions, linear=False, extended=False)

    def _tell(self, feed: Feed, positions: Mapping[str, int]) -> None:
        for instance, position in sorted(positions.items()):
            self._session.post(Position(feed.name, instance, position, position))

    # --- one stream, from a token (ours) ---

    async def _replicate_one(self, command: Replicate, name: str) -> None:
        feed = await self._publisher.find(name)
        if self._all or name in self._streams:
            raise StreamRefused(f"stream {name} is subscribed to on this connection already")
        channel = feed.linear_channel() if command.linear else feed.channel
        start = await self._start_of(feed, command, channel)
        if channel.held is not None and start == channel.seam.positions:
            raise channel.held.copy()
        self._streams.add(name)
        self._session.post(feed.writers())  # in linear order too, for the epoch: a token without it survives no restore
        self._tell(feed, start)
        self._join(feed, channel, start, linear=command.linear, extended=not command.linear)

    def _join(self, feed: Feed, channel: Channel, start: Mapping[str, int], *, linear: bool, extended: bool) -> None:
        """Read the journal from `start` on, which is what the client was told; by way of Postgres where it must be."""
        if start == channel.seam.positions:
            with suppress(SlowReader):
                self._read(feed, channel, channel.seam.index, linear=linear, extended=extended)
                return
        self._session.start(self._catch_up, feed, channel, start, linear, extended)

    def _read(self, feed: Feed, channel: Channel, index: int, *, linear: bool, extended: bool) -> None:
        """Read the journal from a chunk on. Raises SlowReader."""

        def on_stop(error: RowUnreadable) -> None:
            self._stop(feed, channel, channel.seam.positions, error, linear=linear)

        self._session.read(channel, index, extended=extended, on_stop=on_stop)

    def _stop(
        self, feed: Feed, channel: Channel, told: Mapping[str, int], error: RowUnreadable, *, linear: bool
    ) -> None:
        """End one subscription: the client has everything up to `told`, and what comes next cannot be read."""
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
            await trio.sleep(STOPPED_PAUSE)
        self._tell(feed, told)
        self._join(feed, channel, told, linear=linear, extended=False)

    @staticmethod
    async def _start_of(feed: Feed, command: Replicate, channel: Channel) -> dict[str, int]:
        """The position per writer that the subscriber begins behind.

        Raises:
            BadToken, TokenAhead, TokenExpired: with what would do.
        """
        if command.token in (None, "NOW"):
            return dict(channel.seam.positions)
        retained = await feed.retained()  # every row above it is there
        earliest = command.token == "EARLIEST"  # noqa: S105 - a word of the protocol
        token = Vector(retained) if earliest else _parse(feed, command)
        if not command.linear:
            await feed.know_writers_above(max(token.minimum, retained))
        if earliest:
            return {instance: min(retained, position) for instance, position in channel.seam.positions.items()}
        with trio.move_on_after(AHEAD_PATIENCE):
            while _ahead(feed, token, channel.seam.positions):
                await channel.wait_sealed()
        now = channel.seam.positions
        if _ahead(feed, token, now):
            raise TokenAhead(
                f"token {token} lies beyond where {feed.name} stands, which is {feed.told_upto}; "
                "check that this is the database that the token came from"
            )
        start = {instance: _at(feed, token, instance) for instance in now}
        if min(start.values(), default=token.minimum) < retained:
            raise TokenExpired(
                f"rows of {feed.name} up to {retained} were removed, and the token is {token}; "
                f"`REPLICATE {feed.name} EARLIEST` begins with what is left"
            )
        return start

    async def _catch_up(
        self, feed: Feed, channel: Channel, start: Mapping[str, int], linear: bool, extended: bool
    ) -> None:
        """Copy (start, seam] to the client, then join the journal at the seam; where it has moved on, once more."""
        session = self._session
        told = dict(start)
        lowest = min(start.values(), default=feed.told_upto)
        while True:
            seam = channel.seam
            for instance in seam.positions.keys() - told.keys():  # a writer that joined meanwhile
                told[instance] = lowest
                if extended:
                    session.post(feed.writers())
                session.post(Position(feed.name, instance, told[instance], told[instance]))
            await session.flush()
            try:
                await feed.copy(told, seam.positions, session.send, linear=linear)
            except RowUnreadable as error:
                self._stop(feed, channel, below(told, seam.positions, error), error, linear=linear)
                return
            except DatabaseError as error:
                raise HangUp(
                    CloseReason.STREAM_ENDED, f"{error.code}: catching up with {feed.name} broke off; resume later"
                ) from error
            told = dict(seam.positions)
            with suppress(SlowReader):
                self._read(feed, channel, seam.index, linear=linear, extended=extended)
                return


def _parse(feed: Feed, command: Replicate) -> Vector:
    """The token of a REPLICATE, as far as it can be checked without looking at positions."""
    token = Vector.parse(command.token or "")
    if token.epoch is not None and token.epoch != feed.epoch:
        raise BadToken(
            f"the token is of epoch {token.epoch}, stream {feed.name} is in {feed.epoch}: "
            "its ids were reset (a restore, setval), so what you have may differ; begin again from EARLIEST"
        )
    if command.linear and token.ahead:
        raise BadToken("a linear subscription takes a single integer as its token")
    unknown = token.ahead.keys() - feed.numbers.values()
    if unknown:
        raise BadToken(f"the token names writers {sorted(unknown)} that stream {feed.name} does not have")
    return token


def _at(feed: Feed, token: Vector, instance: str) -> int:
    return token.minimum if instance == LINEAR else token.at(feed.numbers[instance])


def _ahead(feed: Feed, token: Vector, positions: Mapping[str, int]) -> bool:
    """Whether the token knows more than we have told anybody."""
    return token.minimum > feed.told_upto or any(
        _at(feed, token, instance) > position for instance, position in positions.items()
    )
