"""Which part of the daemon answers which command.

Stream commands are served as they come. Requests about tubes wait in a bounded queue of the session and are
answered one after another, so that a long poll keeps neither PINGs nor stream rows waiting.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Mapping

import trio

from replicad.errors import ProtocolError, ReplicadError
from replicad.protocol.commands import (
    Ack,
    Claim,
    ClearUserSync,
    Command,
    Doorbell,
    FederationAck,
    LockReleased,
    Park,
    Pods,
    Release,
    RemoteServerUp,
    Renew,
    Replicate,
    Streams,
    Tube,
    UserIp,
    UserSync,
)
from replicad.protocol.states import CloseReason
from replicad.server.hub import Hub
from replicad.server.poller import Poller
from replicad.server.publisher import Publisher
from replicad.server.session import HangUp, Session
from replicad.server.subscriptions import Subscriptions
from replicad.server.tubes import TubeService

TUBE_COMMANDS = (Tube, Claim, Renew, Release, Pods, Ack, Park)


class Requests:
    """Hands the commands of all sessions to those who answer them."""

    def __init__(self, hub: Hub, publisher: Publisher, tubes: TubeService, poller: Poller, max_pending: int) -> None:
        self.hub = hub
        self.publisher = publisher
        self.tubes = tubes
        self.poller = poller
        self.max_pending = max_pending
        self.received: Counter[str] = Counter()  # commands by name, since the start

    def conversation(self, session: Session) -> Callable[[Session, Command], Awaitable[None]]:
        """What handles the commands of one session."""
        return Conversation(session, self).handle


class Conversation:
    """What one session has asked for so far."""

    def __init__(self, session: Session, requests: Requests) -> None:
        self._session = session
        self._requests = requests
        self._subscriptions = Subscriptions(session, requests.publisher)
        self._queue: trio.MemorySendChannel[Command] | None = None
        self._answers: Mapping[type[Command], Callable[..., Awaitable[None]]] = {
            Replicate: self._subscriptions.replicate,
            Streams: self._list_streams,
            Doorbell: self._ring,
            RemoteServerUp: self._relay,
            LockReleased: self._relay,
            UserSync: self._note,
            ClearUserSync: self._note,
            UserIp: self._note,
            FederationAck: self._note,
            **dict.fromkeys(TUBE_COMMANDS, self._enqueue),
        }

    async def handle(self, _: Session, command: Command) -> None:
        """Answer one command, or queue it to be answered; a refusal becomes ERROR and the connection stays."""
        self._requests.received[command.NAME] += 1
        await self._guarded(self._answers[type(command)], command)

    async def _guarded(self, answer: Callable[..., Awaitable[None]], command: Command) -> None:
        try:
            await answer(command)
        except ProtocolError:
            raise
        except ReplicadError as error:
            self._session.refuse(error)

    async def _ring(self, _: Doorbell) -> None:
        self._requests.poller.ring()

    async def _list_streams(self, _: Streams) -> None:
        self._session.post(Streams(tuple(sorted(self._requests.publisher.feeds))))

    async def _relay(self, command: Command) -> None:
        self._requests.hub.relay(command, self._session)

    async def _note(self, command: Command) -> None:
        self._session.log.debug("command", command=command.NAME)

    async def _enqueue(self, command: Command) -> None:
        if self._queue is None:
            self._queue, waiting = trio.open_memory_channel[Command](self._requests.max_pending)
            self._session.start(self._answer_in_turn, waiting)
        try:
            self._queue.send_nowait(command)
        except trio.WouldBlock:
            raise HangUp(
                CloseReason.TOO_MANY_REQUESTS,
                f"too_many_requests: more than {self._requests.max_pending} requests wait; read the answers first",
            ) from None

    async def _answer_in_turn(self, waiting: trio.MemoryReceiveChannel[Command]) -> None:
        async for command in waiting:
            await self._guarded(self._requests.tubes.answerer(self._session, type(command)), command)
