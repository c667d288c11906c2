"""Passes each command of a client to the service that answers it."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence

import structlog
import trio

from replicad.daemon import cuts
from replicad.daemon.hub import Hub
from replicad.daemon.relay import Relay
from replicad.daemon.service import Answer, Answers, HangUp, Job, Service
from replicad.daemon.session import Session
from replicad.errors import ProtocolError, ReplicadError, SlowReader
from replicad.protocol.command import Command
from replicad.protocol.commands import LockReleased, RemoteServerUp

PENDING_BYTES = 4 << 20  # of requests of one client in one service's queue: some of the longest ACKs

log = structlog.get_logger()


class Dispatch:
    """Hands the commands of all sessions to the services that answer them."""

    def __init__(self, services: Sequence[Service], max_pending: int) -> None:
        """`max_pending`: requests of one client that may wait in one service's queue."""
        self.received: Counter[str] = Counter()  # commands by name, since the start
        self.services = services
        self.max_pending = max_pending
        self.service_of: dict[type[Command], Service] = {}  # made with the first command of the first session

    def conversation(self, session: Session) -> Callable[[Command], Awaitable[None]]:
        """The handler of one session's commands."""
        return Conversation(session, self).handle


class Conversation:
    """The commands of one session. A service is asked for its answers with the first command that it answers."""

    __slots__ = ("_answers", "_dispatch", "_session")

    def __init__(self, session: Session, dispatch: Dispatch) -> None:
        self._session = session
        self._dispatch = dispatch
        self._answers: dict[type[Command], Answer] = {}

    async def handle(self, command: Command) -> None:
        """Answer one command or queue it. A refusal is sent as ERROR; the connection stays open."""
        session = self._session
        self._dispatch.received[command.NAME] += 1
        log.debug("command", session=session.number, peer=session.peer, name=session.name, command=command.NAME)
        answer = self._answers.get(type(command)) or self._find(type(command))
        try:
            await answer(command)
        except (ProtocolError, SlowReader):
            raise
        except ReplicadError as error:
            session.refuse(error)

    def _find(self, kind: type[Command]) -> Answer:
        """The answer to a kind of command whose service was not asked before, and its other answers."""
        known = self._dispatch.service_of
        if known:
            self._collect(known[kind])
        else:
            for service in self._dispatch.services:
                known |= dict.fromkeys(self._collect(service), service)
        return self._answers[kind]

    def _collect(self, service: Service) -> list[type[Command]]:
        answers = service.answers(self._session)
        self._answers |= self._checked(answers.at_once, answers.unknown)
        if answers.in_turn:
            queue = _RequestQueue(self._session, self._dispatch, self._checked(answers.in_turn, answers.unknown))
            self._answers |= dict.fromkeys(answers.in_turn, queue.put)
        return [*answers.at_once, *answers.in_turn]

    def _checked(
        self, answers: Mapping[type[Command], Answer], unknown: Answer | None
    ) -> Mapping[type[Command], Answer]:
        """The handlers behind the check of the client's rights. It is made when the handler is called, not before: the
        answers keep their order, and rights that are withdrawn meanwhile count.
        """
        access = self._session.access
        if not access.limited:
            return answers

        def checked(answer: Answer) -> Answer:
            async def check_and_answer(command: Command) -> None:
                if access.check(command):
                    await answer(command)
                else:
                    assert unknown is not None, f"{command.NAME} names an object, and its service has no `unknown`"
                    await unknown(command)

            return check_and_answer

        return {kind: checked(answer) for kind, answer in answers.items()}


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

    def answers(self, peer: Session) -> Answers:
        """`Service.answers`."""

        async def pass_on(command: Command) -> None:
            self._relay.broadcast(command)
            self._hub.relay(command, peer)

        return Answers(at_once={RemoteServerUp: pass_on, LockReleased: pass_on})

    def summary(self) -> Mapping[str, object]:
        """`Service.summary`."""
        return {}


class _RequestQueue:
    """Requests of one session, answered one after another by a task that exists while there are any.

    A refusal is sent as ERROR; the connection stays open.
    """

    __slots__ = ("_answers", "_dispatch", "_idle", "_known", "_session", "_size", "_waiting")

    def __init__(self, session: Session, dispatch: Dispatch, answers: Mapping[type[Command], Answer]) -> None:
        self._session = session
        self._dispatch = dispatch
        self._answers = answers
        self._waiting: deque[tuple[Command, int]] | None = None  # while there are requests: with the bytes of each
        self._size = 0  # bytes of the waiting commands
        self._known = False  # to the session, which waits for the answers at its end
        self._idle: trio.Event | None = None  # set when the last request has been answered

    async def wait_answered(self) -> None:
        """Wait until every request has been answered."""
        if self._waiting is not None:
            self._idle = trio.Event()
            await self._idle.wait()

    async def put(self, command: Command) -> None:
        """Queue a request. A client with too many unanswered requests, or too long ones, is disconnected."""
        if not self._known:
            self._known = True
            self._session.before_end(self.wait_answered)
        if self._waiting is None:
            self._waiting = deque()
            self._session.start(self._work, self._waiting)
        size = self._session.line_bytes
        if len(self._waiting) >= self._dispatch.max_pending:
            raise HangUp(*cuts.too_many_requests(self._dispatch.max_pending))
        if self._waiting and self._size + size > PENDING_BYTES:
            raise HangUp(*cuts.too_long_requests(PENDING_BYTES))
        self._waiting.append((command, size))
        self._size += size

    async def _work(self, waiting: deque[tuple[Command, int]]) -> None:
        while waiting:
            command, size = waiting.popleft()
            self._size -= size
            try:
                await self._answers[type(command)](command)
            except (ProtocolError, SlowReader):
                raise
            except ReplicadError as error:
                self._session.refuse(error)
            await trio.lowlevel.checkpoint()  # not every answer waits for something
        self._waiting = None
        if self._idle is not None:
            self._idle.set()
