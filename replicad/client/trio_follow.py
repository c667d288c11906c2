"""Following streams on trio: the task that iterates performs the steps of `pursuit`. Like `blocking_follow`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection
from typing import Any, Self, TypeVar

import trio

from replicad.client.following import Followed, Tokens
from replicad.client.pursuit import FollowWishes
from replicad.client.sockets import Target
from replicad.client.steps import STEPS, Connect, Sleep
from replicad.client.trio_link import TrioLink, open_link
from replicad.errors import ConnectionLost, ReplicadError
from replicad.protocol.command import Command

T = TypeVar("T")


class TrioFollower(Followed, AsyncIterator[T]):
    """An endless asynchronous iterator over RowBatch and Reset events, and over those of the types in `also`.

    It reconnects and resumes by itself. A cancelled `__anext__` loses no row: the next one goes on where it was; only
    an attempt to connect begins again. It raises what `blocking_follow.BlockingFollower` raises.
    """

    def __init__(
        self,
        target: Target,
        nursery: trio.Nursery,
        streams: Tokens | None,
        *,
        linear: bool,
        also: Collection[type],
        wishes: FollowWishes,
    ) -> None:
        super().__init__(target, streams, linear=linear, also=also, wishes=wishes, now=trio.current_time)
        self._nursery = nursery
        self._link: TrioLink | None = None
        self._closed = False

    def __aiter__(self) -> Self:
        return self

    async def together(self) -> list[T]:
        """The next event and those that came with it: for who handles a hundred thousand in a second.

        Tokens and positions are those after the last of them. Cancelled, it loses none.
        """
        events = [await self.__anext__()]
        self._add_at_hand(events)
        return events

    async def send(self, *commands: Command) -> None:
        """Send commands on the present connection: for those that mean something only where a stream is followed. What
        the server answers is received like other lines.

        Raises:
            ConnectionLost: there is no connection now.
        """
        if self._link is None:
            raise ConnectionLost(f"there is no connection to {self._target} now")
        await self._link.send(commands)

    async def __anext__(self) -> T:
        if self._failure is not None:
            self.close()
            raise self._failure
        if self._closed:
            raise StopAsyncIteration
        while True:
            answer: Any = None
            error: ReplicadError | None = None
            if self._pending is not None:
                try:
                    answer = await self._perform(self._pending)
                except ReplicadError as failure:
                    error = failure
                self._pending = None
            try:
                step = self._steps.send(answer) if error is None else self._steps.throw(error)
            except BaseException:
                self.close()
                raise
            if type(step) in STEPS:
                self._pending = step
            elif type(step) in self._wanted:
                event: T = step
                return event

    async def _perform(self, step: Any) -> Any:
        if isinstance(step, Connect):
            self._disconnect()
            self._link = await open_link(self._target, self._nursery)
            return self._link.connection, self._link.server_name
        if isinstance(step, Sleep):
            self._disconnect()
            await trio.sleep(step.seconds)
            return None
        assert self._link is not None
        return await self._link.perform(step)

    def _disconnect(self) -> None:
        if self._link is not None:
            self._link.close()

    def close(self) -> None:
        """End it; safe to repeat."""
        self._closed = True
        self._disconnect()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()
