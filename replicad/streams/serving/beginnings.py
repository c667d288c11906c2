"""Where a subscription begins: the token of a REPLICATE, checked, and the positions that it stands for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from replicad.daemon.journal import Channel
from replicad.errors import BadToken, TokenForked, forked_text
from replicad.protocol.tokens import Vector
from replicad.streams.commands import Replicate
from replicad.streams.serving.feed import Feed
from replicad.streams.serving.lane import LINEAR
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
