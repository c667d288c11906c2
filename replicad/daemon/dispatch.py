"""Passes each command of a client to the service that answers it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence

import trio

from replicad.daemon.hub import Hub
from replicad.daemon.relay import Relay
from replicad.daemon.service import Answer, Answers, HangUp, Job, Peer, Service
from replicad.daemon.session import Session
from replicad.errors import ProtocolError, ReplicadError, SlowReader
from replicad.protocol.command import Command
from replicad.protocol.commands import LockReleased, RemoteServerUp
from replicad.protocol.states import CloseReason


class Dispatch:
    """Hands the commands of all sessions to the services that answer them."""

    def __init__(self, services: Sequence[Service], max_pending: int) -> None:
        """`max_pending`: requests of one client that may wait in one service's queue."""
        self.received: Counter[str] = Counter()  # commands by name, since the start
        self._services = services
        self._max_pending = max_pending

    def conversation(self, session: Session) -> Callable[[Command], Awaitable[None]]:
        """The handler of one session's commands."""
        return Conversation(session, self._services, self._max_pending, self.received).handle


class Conversation:
    """The commands of one session."""

    def __init__(self, session: Session, services: Sequence[Service], max_pending: int, received: Counter[str]) -> None:
        self._session = session
        self._services = services
        self._max_pending = max_pending
        self._received = received
        self._answers: Mapping[type[Command], Answer] = {}  # made with the first command

    async def handle(self, command: Command) -> None:
        """Answer one command or queue it. A refusal is sent as ERROR; the connection stays open."""
        if not self._answers:
            self._answers = self._collect()
        self._received[command.NAME] += 1
        self._session.log.debug("command", command=command.NAME)
        try:
            await self._answers[type(command)](command)
        except (ProtocolError, SlowReader):
            raise
        except ReplicadError as error:
            self._session.refuse(error)

    def _collect(self) -> Mapping[type[Command], Answer]:
        found: dict[type[Command], Answer] = {}
        for service in self._services:
            answers = service.answers(self._session)
            found |= answers.at_once
            if answers.in_turn:
                queue = _Queue(self._session, self._max_pending, answers.in_turn)
                found |= dict.fromkeys(answers.in_turn, queue.put)
        return found


class Relaying:
    """The service for commands that go to every client of this daemon and of the other daemons."""

    def __init__(self, hub: Hub, relay: Relay) -> None:
        self._hub = hub
        self._relay = relay
        for kind in (RemoteServerUp, LockReleased):
            relay.on(kind, lambda command: hub.relay(command, None))

    def jobs(self) -> Sequence[Job]:
        """`Service.jobs`."""
        return [Job("relay", self._relay.run)]

    def answers(self, peer: Peer) -> Answers:
        """`Service.answers`."""

        async def pass_on(command: Command) -> None:
            self._relay.broadcast(command)
            self._hub.relay(command, peer)
            await trio.lowlevel.checkpoint()  # let the other sessions send it before the next command of a burst

        return Answers(at_once={RemoteServerUp: pass_on, LockReleased: pass_on})

    def summary(self) -> Mapping[str, object]:
        """`Service.summary`."""
        return {}


class _Queue:
    """Requests of one session, answered one after another. A refusal is sent as ERROR; the connection stays open."""

    def __init__(self, session: Session, limit: int, answers: Mapping[type[Command], Answer]) -> None:
        self._session = session
        self._limit = limit
        self._answers = answers
        self._send, self._receive = trio.open_memory_channel[Command](limit)
        self._started = False
        self._unanswered = 0
        self._idle = trio.Event()  # set when the last request has been answered; then replaced

    async def wait_answered(self) -> None:
        """Wait until every request has been answered."""
        while self._unanswered:
            await self._idle.wait()

    async def put(self, command: Command) -> None:
        """Queue a request. A client with more than `limit` unanswered requests is disconnected."""
        if not self._started:
            self._started = True
            self._session.start(self._work)
            self._session.before_end(self.wait_answered)
        try:
            self._send.send_nowait(command)
            self._unanswered += 1
        except trio.WouldBlock:
            raise HangUp(
                CloseReason.TOO_MANY_REQUESTS,
                f"too_many_requests: more than {self._limit} requests wait; read the answers first",
            ) from None

    async def _work(self) -> None:
        async for command in self._receive:
            try:
                await self._answers[type(command)](command)
            except (ProtocolError, SlowReader):
                raise
            except ReplicadError as error:
                self._session.refuse(error)
            self._unanswered -= 1
            if not self._unanswered:
                self._idle.set()
                self._idle = trio.Event()
