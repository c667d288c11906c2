"""From the token of a REPLICATE, or of a page over HTTP, to the place where its reader begins: `begin`."""

from __future__ import annotations

from dataclasses import dataclass, replace

import trio

from replicad.daemon.fairness import Asker
from replicad.errors import BadToken, TokenAhead, TokenExpired, TokenForked, forked_text
from replicad.protocol.tokens import Vector
from replicad.streams.serving.lane import LINEAR, Lane, Positions
from replicad.streams.serving.served_stream import ServedStream
from replicad.streams.serving.writer_list import ALL

NOW, EARLIEST = "NOW", "EARLIEST"  # the words in place of a token
SHOWN = 4096  # characters of a token in an ERROR


@dataclass(frozen=True, slots=True)
class Start:
    """Where a reader begins in an order of a stream. `others_after`: the position of writers that are not listed.
    `epoch`: the generation of the positions, which may be an earlier one.
    """

    stream: ServedStream
    lane: Lane
    positions: Positions
    others_after: int
    epoch: str

    @classmethod
    def now(cls, stream: ServedStream, lane: Lane) -> Start:
        """The start of a reader that gets all rows from now on."""
        positions = lane.channel.boundary.positions
        return cls(stream, lane, positions, stream.lowest(positions), lane.epoch)

    @property
    def at_boundary(self) -> bool:
        """Whether the reader has exactly the rows up to the last boundary of the journal."""
        return (
            self.epoch == self.lane.epoch
            and self.positions == self.lane.channel.boundary.positions
            and self.others_after == self.stream.lowest(self.positions)
        )

    def lines(self, *, extended: bool) -> bytes:
        """The first lines of a subscription: for subscribers by name the writers, then positions."""
        return self.stream.first_lines(self.lane, self.positions, extended=extended)

    def taken_back(self) -> Start:
        """The same start, lowered to the positions that its generation shares with the present one."""
        lineage, present = self.stream.lineage, self.lane.epoch
        shared = lineage.shared_between(self.epoch, present) or lineage.floor
        kept, others_after = self.stream.kept(self.positions, shared), min(self.others_after, shared.minimum)
        return replace(self, positions=kept, others_after=others_after, epoch=present)


async def begin(stream: ServedStream, token: str | None, asker: Asker, *, linear: bool) -> Start:
    """Where a reader with this token begins, in the generation that was sent to readers last. `token`: NOW (None is the
    same), EARLIEST, or a token. `asker`: who waits in turn for a connection to Postgres.

    Raises:
        BadToken, TokenAhead, TokenExpired, TokenForked: the message says which token to use.
        TableReplaced: seen before the registry was looked at.
    """
    lane = stream.lane(linear=linear)
    if token in (None, NOW):
        return Start.now(stream, lane)
    vector = None if token == EARLIEST else Vector.parse(str(token))
    if vector is not None and vector.epoch not in (None, lane.epoch):
        await stream.wait_for_generation(vector.epoch or "", lane)
    while True:
        epoch = lane.epoch
        retained = await stream.retained()  # no row above it was trimmed
        if vector is None:
            positions = {name: min(retained, at) for name, at in lane.channel.boundary.positions.items()}
            start = Start(stream, lane, positions, min([retained, *positions.values()]), epoch)
        else:
            start = await _start_of(stream, vector, lane, asker, retained)
        if lane.epoch == epoch:
            return start


async def _start_of(stream: ServedStream, token: Vector, lane: Lane, asker: Asker, retained: int) -> Start:
    """The position of each writer where the reader begins, and that of the writers that are not listed."""
    await _check(stream, token, lane)
    with trio.move_on_after(stream.pace.ahead):
        while _is_ahead(stream, token, lane):
            await lane.channel.wait_sealed()
    positions = _positions_of(stream, token, lane)
    lowest = min(positions.values(), default=token.minimum)
    if token.minimum < lowest and not lane.linear:
        # Writers that are no longer listed may have rows between the two. Listed again, they have positions there.
        await stream.list_writers_between(token.minimum, lowest, asker)
        positions = _positions_of(stream, token, lane)
    if _is_ahead(stream, token, lane):
        raise TokenAhead(
            f"token {token} is ahead of stream {stream.name}, whose position is {stream.sent_upto}; "
            "check that this is the database that the token came from"
        )
    others_after = min(token.minimum, *positions.values())
    if others_after < retained:
        raise TokenExpired(
            f"no rows of {stream.name} up to {retained} are left, and the token is {token}; "
            f"`REPLICATE {stream.name} EARLIEST` begins with the oldest row that is left"
        )
    return Start(stream, lane, positions, others_after, lane.epoch)


async def _check(stream: ServedStream, token: Vector, lane: Lane) -> None:
    """Refuse a token for any reason but its position. A token of an earlier generation is valid up to the position that
    is shared with the present one.

    Raises:
        TokenForked: it is beyond that; the message has the token to resume from.
        BadToken: its generation or a writer is not known.
    """
    present = lane.epoch
    if lane.linear and token.ahead:
        raise BadToken("a linear subscription takes a single integer as its token")
    if token.epoch is not None and token.epoch != present:
        shared = stream.lineage.shared_between(token.epoch, present)
        if shared is None:
            raise BadToken(
                f"the token is of generation {token.epoch}, stream {stream.name} is in {present} and its database does "
                "not know the other one (it was restored to an earlier time, or the stream was added again): your rows "
                "may differ; begin again from EARLIEST"
            )
        kept = Vector(min(token.minimum, shared.minimum)) if lane.linear else token.at_most(shared)
        if (kept.minimum, kept.ahead) != (token.minimum, token.ahead):
            rewind = Vector(kept.minimum, kept.ahead, present).shortened(SHOWN)  # at or before the shared position
            raise TokenForked(forked_text(stream.name, str(shared.shortened(SHOWN)), str(rewind)))
    unknown = await stream.writers.add_numbered(token.ahead.keys())
    if unknown:
        raise BadToken(f"the token names writers {sorted(unknown)[:20]} that stream {stream.name} does not have")


def _positions_of(stream: ServedStream, token: Vector, lane: Lane) -> dict[str, int]:
    """The token's position of each listed writer; for all writers together, the lowest."""
    if lane.channel.ended is not None:  # the stream is served again, and its list of writers is another one
        raise lane.channel.ended
    numbers = stream.writers.every
    return {
        name: token.minimum if name in (LINEAR, ALL) else token.at(numbers[name])
        for name in lane.channel.boundary.positions
    }


def _is_ahead(stream: ServedStream, token: Vector, lane: Lane) -> bool:
    """Whether the token is beyond the positions that were sent to readers; in linear order, beyond the positions of
    that order.
    """
    sent = lane.channel.boundary.positions
    unlisted = stream.sent_upto if lane.linear else token.minimum
    return unlisted > stream.sent_upto or any(
        at > sent[name] for name, at in _positions_of(stream, token, lane).items()
    )
