"""Which part of the daemon answers which command.

What takes time (subscribing, and the requests about tubes) waits in bounded queues of the session, one for either,
and is done one after another there. So a long poll or a search in Postgres keeps nothing else of the session waiting:
neither PINGs nor the rows of streams.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

import trio

from replicad.daemon.hub import Hub
from replicad.daemon.poller import Poller
from replicad.daemon.relay import Relay
from replicad.daemon.session import HangUp, Session
from replicad.errors import PresenceRefused, ProtocolError, RelayRefused, ReplicadError, SlowReader, StreamError
from replicad.presence.service import PresenceService
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
    Report,
    Streams,
    Taken,
    Tube,
    UserIp,
    UserSync,
)
from replicad.protocol.states import CloseReason
from replicad.streams.serving.ack_service import AckService
from replicad.streams.serving.publisher import Publisher
from replicad.streams.serving.subscriptions import Subscriptions
from replicad.tubes.serving.service import TubeService

TUBE_COMMANDS = (Tube, Claim, Renew, Release, Pods, Ack, Park, Report)


class Requests:
    """Hands the commands of all sessions to those who answer them."""

    def __init__(
        self,
        *,
        hub: Hub,
        publisher: Publisher,
        tubes: TubeService,
        poller: Poller,
        presence: PresenceService,
        acks: AckService,
        relay: Relay,
        max_pending: int,
    ) -> None:
        self.hub = hub
        self.publisher = publisher
        self.tubes = tubes
        self.poller = poller
        self.presence = presence
        self.acks = acks
        self.relay = relay
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
        self._subscribing = _Queue(session, requests.max_pending, self._subscriptions.answer)
        self._tubes = _Queue(session, requests.max_pending, partial(requests.tubes.answer, session))
        self._answers: Mapping[type[Command], Callable[..., Awaitable[None]]] = {
            Replicate: self._subscribing.put,
            Taken: self._subscribing.put,
            Streams: self._list_streams,
            Doorbell: self._ring,
            RemoteServerUp: self._relay,
            LockReleased: self._relay,
            UserSync: self._user_sync,
            ClearUserSync: self._clear_user_sync,
            UserIp: self._user_ip,
            FederationAck: self._federation_ack,
            **dict.fromkeys(TUBE_COMMANDS, self._tubes.put),
        }

    async def handle(self, _: Session, command: Command) -> None:
        """Answer one command, or queue it to be answered; a refusal becomes ERROR and the connection stays."""
        self._requests.received[command.NAME] += 1
        try:
            await self._answers[type(command)](command)
        except (PresenceRefused, RelayRefused, StreamError) as error:
            self._session.refuse(error)

    async def _ring(self, _: Doorbell) -> None:
        self._requests.poller.ring()

    async def _list_streams(self, _: Streams) -> None:
        self._session.post(Streams(tuple(sorted(self._requests.publisher.feeds))))

    async def _relay(self, command: Command) -> None:
        self._requests.relay.tell(command)
        self._requests.hub.relay(command, self._session)
        await trio.lowlevel.checkpoint()  # the others send it before the next of a burst comes

    async def _user_sync(self, command: UserSync) -> None:
        self._note(command)
        self._requests.presence.user_sync(self._session, command)

    async def _clear_user_sync(self, command: ClearUserSync) -> None:
        self._note(command)
        self._requests.presence.clear(command)
        self._requests.relay.tell(command)

    async def _user_ip(self, command: UserIp) -> None:
        self._note(command)
        self._requests.presence.user_ip(command)

    async def _federation_ack(self, command: FederationAck) -> None:
        if not self._requests.acks.note(command, self._subscriptions.followed):
            self._note(command)

    def _note(self, command: Command) -> None:
        self._session.log.debug("command", command=command.NAME)


class _Queue:
    """Requests of one session that are answered in turn; a refusal becomes ERROR and the connection stays."""

    def __init__(self, session: Session, limit: int, answer: Callable[[Any], Awaitable[None]]) -> None:
        self._session = session
        self._limit = limit
        self._answer = answer
        self._send, self._receive = trio.open_memory_channel[Command](limit)
        self._begun = False
        self._left = 0  # not answered yet
        self._answered = trio.Event()  # the last of them, since it was made

    async def wait_answered(self) -> None:
        """Until nothing is left to be answered."""
        while self._left:
            await self._answered.wait()

    async def put(self, command: Command) -> None:
        """Queue a request; the client that has more unanswered ones than there may be is cut off."""
        if not self._begun:
            self._begun = True
            self._session.start(self._work)
            self._session.answers(self.wait_answered)
        try:
            self._send.send_nowait(command)
            self._left += 1
        except trio.WouldBlock:
            raise HangUp(
                CloseReason.TOO_MANY_REQUESTS,
                f"too_many_requests: more than {self._limit} requests wait; read the answers first",
            ) from None

    async def _work(self) -> None:
        async for command in self._receive:
            try:
                await self._answer(command)
            except (ProtocolError, SlowReader):
                raise
            except ReplicadError as error:
                self._session.refuse(error)
            self._left -= 1
            if not self._left:
                self._answered.set()
                self._answered = trio.Event()
