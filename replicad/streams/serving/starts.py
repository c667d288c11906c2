"""From the token of a REPLICATE or of a page to the position of each writer where the reader begins."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import trio

from replicad.daemon.fairness import Asker
from replicad.daemon.journal import Channel
from replicad.errors import BadToken, TokenAhead, TokenExpired, TokenForked, forked_text
from replicad.protocol.tokens import Vector
from replicad.streams.commands import Replicate
from replicad.streams.serving.catchups import Catchups
from replicad.streams.serving.feed import Feed
from replicad.streams.serving.intervals import StreamIntervals
from replicad.streams.serving.lane import LINEAR
from replicad.streams.serving.publisher import Publisher
from replicad.streams.serving.sent_positions import position_lines
from replicad.streams.serving.writer_list import ALL

SHOWN = 4096  # characters of a token in an ERROR


@dataclass(frozen=True, slots=True)
class Begin:
    """Where a subscription begins. `others_after`: the position of writers that are not listed. `epoch`: the generation
    of the positions. `preamble`: the lines to send first.
    """

    positions: Mapping[str, int]
    others_after: int
    epoch: str
    preamble: bytes


def preamble_of(feed: Feed, channel: Channel, start: Mapping[str, int], *, extended: bool) -> bytes:
    """The first lines of a subscription; cached for subscriptions that begin at the present position."""
    if start is channel.boundary.positions and channel is feed.channel:
        return feed.preamble(start, extended=extended)
    # WRITERS in linear order too, because it has the epoch: a token without it is not valid after a restore.
    writers = feed.writers_of(feed.epoch(channel), feed.channel.boundary.positions) if extended else b""
    return writers + position_lines(feed.name, start, start, all_of_them=True)


def token_of(command: Replicate) -> Vector | None:
    """The token of a REPLICATE; None for a word. Raises BadToken."""
    return None if command.token in (None, "NOW", "EARLIEST") else Vector.parse(command.token or "")


async def parse_token(feed: Feed, command: Replicate, channel: Channel) -> Vector:
    """The token of a REPLICATE, checked except for positions.

    A token of an earlier generation is valid up to the position that is shared with the present one.

    Raises:
        TokenForked: it is beyond that; the message has the token to resume from.
        BadToken: its generation is not known, or it is no token.
    """
    token = token_of(command)
    assert token is not None
    present = feed.epoch(channel)
    if command.linear and token.ahead:
        raise BadToken("a linear subscription takes a single integer as its token")
    if token.epoch is not None and token.epoch != present:
        shared = feed.lineage.shared_between(token.epoch, present)
        if shared is None:
            raise BadToken(
                f"the token is of generation {token.epoch}, stream {feed.name} is in {present} and its database does "
                "not know the other one (it was restored to an earlier time, or the stream was added again): your rows "
                "may differ; begin again from EARLIEST"
            )
        kept = Vector(min(token.minimum, shared.minimum)) if command.linear else token.at_most(shared)
        if (kept.minimum, kept.ahead) != (token.minimum, token.ahead):
            rewind = Vector(kept.minimum, kept.ahead, present).shortened(SHOWN)  # at or before the shared position
            raise TokenForked(forked_text(feed.name, str(shared.shortened(SHOWN)), str(rewind)))
    unknown = await feed.list_writers(token)
    if unknown:
        raise BadToken(f"the token names writers {sorted(unknown)[:20]} that stream {feed.name} does not have")
    return token


def take_back(
    feed: Feed, channel: Channel, sent: Mapping[str, int], epoch: str, others_after: int
) -> tuple[dict[str, int], str, int]:
    """Positions of generation `epoch` lowered to the shared ones, the present epoch, and the position of the others."""
    present = feed.epoch(channel)
    shared = feed.lineage.shared_between(epoch, present) or feed.lineage.floor
    return feed.kept(sent, shared), present, min(others_after, shared.minimum)


def at_of(feed: Feed, token: Vector, instance: str) -> int:
    """The token's position of one writer; for all writers together, the lowest."""
    return token.minimum if instance in (LINEAR, ALL) else token.at(feed.number(instance))


def is_ahead(feed: Feed, token: Vector, positions: Mapping[str, int]) -> bool:
    """Whether the token is beyond the positions that were sent to readers; in linear order, beyond the positions of
    that order.
    """
    unlisted = token.minimum if LINEAR not in positions else feed.sent_upto
    return unlisted > feed.sent_upto or any(
        at_of(feed, token, instance) > position for instance, position in positions.items()
    )


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
