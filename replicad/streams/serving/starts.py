"""From the token of a reader to the position of each writer where it begins, in the present generation."""

from __future__ import annotations

from collections.abc import Mapping

import trio

from replicad.daemon.journal import Channel
from replicad.daemon.places import Asker
from replicad.errors import TokenAhead, TokenExpired
from replicad.streams.commands import Replicate
from replicad.streams.serving.beginnings import at_of, is_ahead, parse_token, token_of
from replicad.streams.serving.catchups import Catchups
from replicad.streams.serving.feed import Feed
from replicad.streams.serving.intervals import StreamIntervals
from replicad.streams.serving.publisher import Publisher


class Starts:
    """Answers for readers of one session, or for pages."""

    def __init__(self, publisher: Publisher, catchups: Catchups, pace: StreamIntervals) -> None:
        self._publisher = publisher
        self._catchups = catchups
        self._pace = pace

    async def in_present(
        self, feed: Feed, command: Replicate, channel: Channel, asker: Asker
    ) -> tuple[Mapping[str, int], int | None]:
        """`start_of` in the generation that was sent to readers of the channel last; repeated if that changes. A token
        of an unknown generation may come from another daemon that found a fork first. `asker`: who waits in turn.

        Raises:
            BadToken, TokenAhead, TokenExpired: the message says which token to use.
        """
        token = token_of(command)
        if token is not None and token.epoch not in (None, feed.epoch(channel)):
            if not feed.lineage.knows(token.epoch or ""):
                await self._publisher.look_at(feed.name)
            with trio.move_on_after(self._pace.ahead) as scope:
                await feed.wait_epoch_sent(channel)
            if scope.cancelled_caught:
                raise TokenAhead(f"stream {feed.name} goes over to generation {feed.stream.epoch}; try again")
        while True:
            epoch = feed.epoch(channel)
            start = await self._start_of(feed, command, channel, asker)
            if feed.epoch(channel) == epoch:
                return start

    async def _start_of(
        self, feed: Feed, command: Replicate, channel: Channel, asker: Asker
    ) -> tuple[Mapping[str, int], int | None]:
        """The position of each writer where the reader begins, and that of the writers that are not listed."""
        if command.token in (None, "NOW"):
            return channel.boundary.positions, None
        retained = await feed.retained()  # no row above it was trimmed
        self._catchups.trimmed(feed, retained)
        if command.token == "EARLIEST":  # noqa: S105 - a word of the protocol
            start = {instance: min(retained, position) for instance, position in channel.boundary.positions.items()}
            return start, min([retained, *start.values()])
        token = await parse_token(feed, command, channel)
        with trio.move_on_after(self._pace.ahead):
            while is_ahead(feed, token, channel.boundary.positions):
                await channel.wait_sealed()
        start = {instance: at_of(feed, token, instance) for instance in channel.boundary.positions}
        lowest = min(start.values(), default=token.minimum)
        if token.minimum < lowest and not command.linear:
            # Writers that are no longer listed may have rows between the two. Listed again, they have positions there.
            async with self._catchups.places.place(asker):
                await feed.list_writers_between(token.minimum, lowest)
            start = {instance: at_of(feed, token, instance) for instance in channel.boundary.positions}
        if is_ahead(feed, token, channel.boundary.positions):
            raise TokenAhead(
                f"token {token} is ahead of stream {feed.name}, whose position is {feed.sent_upto}; "
                "check that this is the database that the token came from"
            )
        if min(token.minimum, *start.values()) < retained:
            raise TokenExpired(
                f"no rows of {feed.name} up to {retained} are left, and the token is {token}; "
                f"`REPLICATE {feed.name} EARLIEST` begins with the oldest row that is left"
            )
        return start, min(token.minimum, *start.values())
