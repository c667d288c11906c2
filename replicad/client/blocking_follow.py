"""Following streams on a socket: the thread that iterates performs the steps of `pursuit`."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Collection, Iterator
from typing import Any, Self, TypeVar

from replicad.client.following import Followed, Tokens
from replicad.client.pursuit import FollowWishes
from replicad.client.sockets import SocketLink, Target, open_link
from replicad.client.steps import STEPS, Connect, Sleep
from replicad.errors import ConnectionLost, ReplicadError
from replicad.protocol.command import Command

T = TypeVar("T")


class BlockingFollower(Followed, Iterator[T]):
    """An endless iterator over RowBatch and Reset events, and over those of the types in `also`.

    It reconnects and resumes by itself; `close`, from any thread, ends it. Iterating raises errors that trying again
    does not help against: NotAuthorised, WrongServer, RemoteProtocolError, UnknownStream and BadToken for the caller's
    arguments, or the last ConnectionLost when `patience` has passed.
    """

    def __init__(
        self,
        target: Target,
        streams: Tokens | None,
        *,
        linear: bool,
        also: Collection[type],
        wishes: FollowWishes,
    ) -> None:
        super().__init__(target, streams, linear=linear, also=also, wishes=wishes, now=time.monotonic)
        self._link: SocketLink | None = None
        self._stop = threading.Event()

    def together(self) -> list[T]:
        """The next event and those that came with it: for who handles a hundred thousand in a second.

        Tokens and positions are those after the last of them. Empty when the follower was closed.
        """
        events = list(itertools.islice(self, 1))
        if events:
            self._add_at_hand(events)
        return events

    def __next__(self) -> T:
        if self._failure is not None:
            self.close()
            raise self._failure
        answer: Any = None
        error: ReplicadError | None = None
        while not self._stop.is_set():
            step, self._pending = self._pending, None
            try:
                if step is None:
                    step = self._steps.send(answer) if error is None else self._steps.throw(error)
            except ReplicadError:
                self.close()
                raise
            answer = error = None
            kind = type(step)
            if kind in self._wanted:
                event: T = step
                return event
            if kind in STEPS:
                try:
                    answer = self._perform(step)
                except ReplicadError as failure:
                    error = failure
                except BaseException:  # for example Ctrl-C: a step cannot be resumed
                    self.close()
                    raise
        raise StopIteration

    def _perform(self, step: Any) -> Any:
        if isinstance(step, Connect):
            self._disconnect()
            self._link = open_link(self._target)
            if self._stop.is_set():  # closed meanwhile, by another thread
                self._disconnect()
            return self._link.connection, self._link.server_name
        if isinstance(step, Sleep):
            self._disconnect()
            self._stop.wait(step.seconds)
            return None
        assert self._link is not None
        return self._link.perform(step)

    def _disconnect(self) -> None:
        if self._link is not None:
            self._link.close()

    def send(self, *commands: Command) -> None:
        """Send commands on the present connection: for those that mean something only where a stream is followed. What
        the server answers is received like other lines.

        Raises:
            ConnectionLost: there is no connection now.
        """
        if self._link is None:
            raise ConnectionLost(f"there is no connection to {self._target} now")
        self._link.send(commands)

    def close(self) -> None:
        """End the iteration, even if another thread waits in it; safe to repeat."""
        self._stop.set()
        self._disconnect()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
