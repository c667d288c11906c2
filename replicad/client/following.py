"""What the followers of both clients have in common: which events they hand over, and where they stand."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from replicad.client.events import Reset, RowBatch
from replicad.client.pursuit import FollowOptions, FollowWishes, Pursuit
from replicad.client.sockets import Target

Tokens = Mapping[str, str | None]
"""A token for each stream: NOW (or None), EARLIEST, or what a follower's `token` has returned."""


class Followed:
    """Where a follower stands; the base of both followers. `also`: the types of events wanted besides the usual."""

    def __init__(
        self,
        target: Target,
        streams: Tokens | None,
        *,
        linear: bool,
        also: Collection[type],
        wishes: FollowWishes,
        now: Callable[[], float],
    ) -> None:
        options = FollowOptions(linear, answer_timeout=target.answer_timeout, **wishes)
        self._target = target
        self._pursuit = Pursuit(streams, options, now=now)
        self._steps = self._pursuit.steps()
        self._wanted = frozenset({RowBatch, Reset, *also})

    def token(self, stream: str) -> str | None:
        """What to follow the stream with later so that nothing handed out comes again and nothing else is missed."""
        return self._pursuit.follower.token(stream)

    def tokens(self) -> dict[str, str | None]:
        """`token` of every stream."""
        return {stream: self.token(stream) for stream in self._pursuit.follower.streams()}

    def positions(self, stream: str) -> Mapping[str, int]:
        """How far each known writer's rows were handed out (`*`: in a linear subscription all of them)."""
        return self._pursuit.follower.positions(stream)
