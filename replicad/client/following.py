"""The base of both clients' followers: the events that they deliver, their tokens and positions."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from replicad.client.events import Reset, RowBatch
from replicad.client.pursuit import FollowOptions, FollowWishes, Pursuit
from replicad.client.sockets import Target
from replicad.client.steps import STEPS
from replicad.errors import ReplicadError

Tokens = Mapping[str, str | None]
"""A token for each stream: NOW (or None), EARLIEST, or what a follower's `token` has returned."""


class Followed:
    """The state of a follower. `also`: the types of events wanted besides RowBatch and Reset."""

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
        self._pending: Any = None  # a step that is not performed yet
        self._failure: ReplicadError | None = None  # to be raised when the events before it were handed over

    def _add_at_hand(self, events: list[Any]) -> None:
        """Add the events that can be had without performing a step; those of one read of the socket at most."""
        while self._pending is None and self._failure is None:
            try:
                step = self._steps.send(None)
            except ReplicadError as error:
                self._failure = error
                return
            if type(step) in self._wanted:
                events.append(step)
            elif type(step) in STEPS:
                self._pending = step

    def token(self, stream: str) -> str | None:
        """The token to follow the stream with later: delivered rows do not come again, and no others are missed."""
        return self._pursuit.follower.token(stream)

    def tokens(self) -> dict[str, str | None]:
        """`token` of every stream."""
        return {stream: self.token(stream) for stream in self._pursuit.follower.streams()}

    def epoch(self, stream: str) -> str | None:
        """The generation of the stream that is followed; None before the first answer to a token without one."""
        return self._pursuit.follower.epoch(stream)

    def writers(self, stream: str) -> Mapping[str, int]:
        """The small numbers of the stream's writers that vector tokens are made of, by name."""
        return self._pursuit.follower.writers(stream)

    def is_accepted(self, stream: str) -> bool:
        """Whether the subscription to the stream was accepted on the present or last connection."""
        return self._pursuit.follower.answered(stream)

    def positions(self, stream: str) -> Mapping[str, int]:
        """The position up to which each known writer's rows were delivered (`*`: all, in a linear subscription)."""
        return self._pursuit.follower.positions(stream)
