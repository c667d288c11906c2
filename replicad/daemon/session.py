"""One connection: receives commands, keeps its deadlines, and ends with a named reason.

Commands go to `Conversation.handle`, which passes them to the services. All lines to the client go through the
session's `Outbox`. An idle session is one task that waits for input; its keep-alives are sent by the hub's `Deadlines`.
"""

from __future__ import annotations

import os
import ssl
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from itertools import count
from typing import TYPE_CHECKING, Any

import structlog
import trio

from replicad.daemon import cuts
from replicad.daemon.access import WITHDRAWN, ClientAccess, access_by_token
from replicad.daemon.cuts import ClientView, Following
from replicad.daemon.fairness import Asker, YieldQueue, network_of
from replicad.daemon.hub import EARLY, Hub
from replicad.daemon.outbox import Outbox, Piece
from replicad.daemon.relay import Relay
from replicad.daemon.service import Answer, Answers, HangUp, Job, Service
from replicad.errors import (
    DatabaseError,
    LocalProtocolError,
    NotAuthorised,
    ProtocolError,
    ReplicadError,
    SlowReader,
    StreamError,
)
from replicad.groups import Reporting, sole_leaf
from replicad.protocol.command import Command, Vocabulary
from replicad.protocol.commands import (
    CORE,
    Auth,
    Error,
    Help,
    LockReleased,
    Name,
    Ping,
    RemoteServerUp,
    Server,
    help_answer,
)
from replicad.protocol.connection import CloseReason, Due, ProtocolConnection
from replicad.protocol.lines import LineTooLong
from replicad.protocol.words import Side, sendable

if TYPE_CHECKING:
    from replicad.config.settings import ServerSettings

# How a connection ends: the reason for an exception, and the last ERROR to the peer.


DRAIN_BYTES = 4 << 20  # of input that is read and discarded after the last ERROR to a client that is known
DRAINED = 65536  # of these at a time

_REASONS: tuple[tuple[type[Exception], CloseReason], ...] = (
    (NotAuthorised, CloseReason.NOT_AUTHORISED),
    (ProtocolError, CloseReason.BAD_LINE),
    (SlowReader, CloseReason.SLOW_READER),
    (StreamError, CloseReason.STREAM_ENDED),
    (DatabaseError, CloseReason.STREAM_ENDED),
    (trio.BrokenResourceError, CloseReason.PEER_LOST),
    (trio.ClosedResourceError, CloseReason.PEER_LOST),
    (ssl.SSLError, CloseReason.PEER_LOST),
)
LOST = (trio.BrokenResourceError, trio.ClosedResourceError, ssl.SSLError)  # raised by sending to a disconnected peer


def reason_of(error: BaseException) -> tuple[CloseReason, str] | None:
    """The close reason and the text for the peer that belong to an exception. None: it is a defect of replicad."""
    error = sole_leaf(error)
    if isinstance(error, HangUp):
        return error.reason, error.text
    for kind, reason in _REASONS:
        if isinstance(error, kind) and not isinstance(error, LocalProtocolError):
            return reason, text_of(error) if isinstance(error, ReplicadError) else ""
    return None


def text_of(error: ReplicadError) -> str:
    """The text of the ERROR for a refused request."""
    return f"{error.code}: {error}"


def error_line(text: str) -> Error:
    """ERROR with `text`; characters that a line cannot have are replaced."""
    return Error(sendable(text))


async def send_last_error(stream: trio.abc.Stream, text: str, drain: int, turns: YieldQueue, address: str) -> None:
    """Send ERROR and close this side; then read what the peer sends until it closes its side, at most `drain` bytes.

    With `drain` 0 only input that has arrived is read. Closing with unread input would send a reset, which can discard
    the ERROR. `address`: of the peer, for its turns. The caller bounds the time.
    """
    with suppress(*LOST):
        await stream.send_all(error_line(text).render().encode() + b"\n")
        if isinstance(stream, trio.abc.HalfCloseableStream):
            await stream.send_eof()
        if not drain:
            with trio.move_on_after(0):  # only input that has arrived
                await stream.receive_some(DRAINED)
        while drain > 0 and (data := await stream.receive_some(DRAINED)):
            drain -= len(data)
            await turns.next(address)


# The receiving side of one connection. On a plain socket it costs an idle connection three frames instead of six.


class Inlet:
    """Receives from one peer."""

    __slots__ = ("_socket", "_stream")

    def __init__(self, stream: trio.abc.ReceiveStream) -> None:
        self._stream = stream
        self._socket = stream.socket if isinstance(stream, trio.SocketStream) else None

    async def receive(self, most: int) -> bytes:
        """Up to `most` bytes; nothing at the end of the input. Other tasks run before it returns.

        Raises:
            trio.BrokenResourceError: the connection is lost.
        """
        if self._socket is None:
            return bytes(await self._stream.receive_some(most))
        while True:
            await trio.lowlevel.wait_readable(self._socket)
            data = self.receive_nowait(most)
            if data is not None:  # else it was woken without data
                return data

    def receive_nowait(self, most: int) -> bytes | None:
        """As `receive`, on a plain socket. None: there is no input yet, or the stream is another one."""
        if self._socket is None:
            return None
        try:
            return os.read(self._socket.fileno(), most)
        except BlockingIOError:
            return None
        except OSError as error:
            raise trio.BrokenResourceError(f"cannot receive: {error.strerror}") from error


RELAY = "relay"  # the verb of lines for all clients
log = structlog.get_logger()


ERROR_GRACE = 1.0  # seconds for sending the last ERROR, best effort
_numbers = count(1)


Handler = Callable[[Command], Awaitable[None]]


class Session:
    """One client. It is a *newcomer* until its first valid command, or until AUTH where it has to send one."""

    __slots__ = (
        "__weakref__",
        "_asked",
        "_before_end",
        "_closed_by",
        "_connection",
        "_end",
        "_held",
        "_hub",
        "_known_by",
        "_limits",
        "_nursery",
        "_opened_at",
        "_reading",
        "_stream",
        "_wants_auth",
        "access",
        "name",
        "number",
        "outbox",
        "peer",
    )

    def __init__(
        self,
        stream: trio.abc.Stream,
        peer: str,
        settings: ServerSettings,
        hub: Hub,
        vocabulary: Vocabulary = CORE,
        *,
        access: ClientAccess | None = None,
    ) -> None:
        """`access`: without it, the one token of the settings decides."""
        limits = settings.limits
        now = self._opened_at = trio.current_time()
        self.number = next(_numbers)
        self.peer = peer
        self.name: str | None = None
        self._stream = stream
        self._limits = limits
        self.access = access or access_by_token(settings.token, peer)
        self._wants_auth = self.access.wants_auth
        self._hub = hub
        self._connection = ProtocolConnection(
            Side.SERVER,
            vocabulary,
            now=now,
            timing=hub.timing,
            max_line=min(limits.first_line, limits.max_line),
            wants_auth=self._wants_auth,
        )
        wait = limits.auth_timeout if self._wants_auth else limits.first_command_timeout
        self._known_by: float | None = now + wait  # None: it is known
        self._held = 0  # bytes of an unfinished line that count towards `unfinished_bytes`
        self.outbox = Outbox(stream, self, limits.stall_timeout, hub.rounds)
        self._asked = False  # a service for anything
        self._end: tuple[CloseReason, str] | None = None
        self._closed_by: list[Callable[[], None]] = []
        self._before_end: list[Callable[[], Awaitable[None]]] = []
        self._reading = trio.CancelScope()
        self._nursery: trio.Nursery | None = None
        self.post(Server(settings.server_name))
        self.post_line(hub.deadlines.ping(now))

    # --- for services ---

    @property
    def identity(self) -> str:
        """The client's name (its address if it has none) and number, as shown in lists and leases."""
        return f"{(self.name or self.peer).replace(' ', '_')}#{self.number}"

    @property
    def _address(self) -> str:
        """Of the client, without the port; of IPv6 the network, as `network_of` has it."""
        return network_of(self.peer.rpartition(":")[0].strip("[]"))

    @property
    def line_bytes(self) -> int:
        """Length of the line of the command that is handled."""
        return self._connection.line_bytes

    @property
    def log(self) -> Any:
        """A logger bound to the client's fields; made when it is needed, since most sessions are idle."""
        bound = log.bind(session=self.number, peer=self.peer)
        if self.access.name:
            bound = bound.bind(client=self.access.name)
        return bound if self.name is None else bound.bind(name=self.name)

    def post(self, command: Command) -> None:
        """Queue a command without waiting; never raises. A peer whose queue is full is disconnected.

        The command is rendered now. If that fails, it is a defect of replicad, and only this session ends.
        """
        try:
            line = self._connection.render(command)
        except Exception as error:  # noqa: BLE001 - logged with its traceback
            self._fail(error)
        else:
            self.outbox.post_line(line)

    def post_line(self, line: bytes) -> None:
        """`post` for a rendered line with its newline."""
        self.outbox.post_line(line)

    def deliver(self, lines: bytes) -> None:
        """Send whole lines now, if the socket is free, or queue them. Never raises."""
        if not self.outbox.offer(lines):
            self.outbox.post_line(lines)

    @property
    def hears(self) -> bool:
        """Whether the client may get the lines for all clients."""
        return self.access.may(RELAY)

    def refuse(self, error: ReplicadError) -> None:
        """Answer a request with ERROR; the connection stays open."""
        self.log.info("request_refused", code=error.code, error=str(error))
        self.post(error_line(text_of(error)))

    async def give_way(self) -> None:
        """Wait for the next turn: for work in masses, such as reading a long list."""
        await self._hub.turns.next(self._address)

    async def send(self, *pieces: Piece, to_go: float = 0.0) -> None:
        """`Outbox.send`."""
        await self.outbox.send(*pieces, to_go=to_go)

    async def flush(self) -> None:
        """Send the commands that are queued already, so that the next `send` comes after them."""
        await self.outbox.flush()

    def hang_up(self, reason: CloseReason, text: str = "") -> None:
        """End the session soon; the first reason counts."""
        if self._end is None:
            self._end = (reason, text)
            self.outbox.stop()  # commands under way may end later, and rows may arrive meanwhile
            self._reading.cancel()

    @property
    def sent(self) -> int:
        """The bytes that the socket has taken."""
        return self.outbox.sent

    @property
    def asker(self) -> Asker:
        """The client as a member of a fair queue. Its crowd is its name in the access file, or its address."""
        return Asker(self.access.name or self._address, self.number)

    def view(self, now: float) -> ClientView:
        """The client's row in the list of clients."""
        following = tuple(Following(one.stream, one.behind_s(now)) for one in self.outbox.readers)
        connected, known = now - self._opened_at, self._known_by is None
        return ClientView(self.number, self.name, self.peer, self.access.name, connected, self.sent, known, following)

    def at_end(self, call: Callable[[], None]) -> None:
        """Call `call` when the session has ended."""
        self._closed_by.append(call)

    def before_end(self, wait_answered: Callable[[], Awaitable[None]]) -> None:
        """Await `wait_answered`, for at most ERROR_GRACE, when the peer has closed its side or broken the protocol."""
        self._before_end.append(wait_answered)

    # --- life ---

    async def run(self, handle: Handler) -> CloseReason:
        """Serve the client until one side ends the session; always closes the stream. Raises only when cancelled.

        `handle` is called with every command except PING, NAME, AUTH, HELP and ERROR, one at a time.

        A health check is logged on level debug: it asks no service for anything, and closes the connection.
        """
        self._hub.newcomers.hold(self, self._give_way, address=self._address)
        self._hub.deadlines.set(self, self._next_deadline())
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                self.outbox.open()
                with self._reading:
                    await self._guarded(self._read, (handle,))
                self._drop_input()
                await self._hub.ends.next()
                await self._finish()
                nursery.cancel_scope.cancel()
        finally:
            reason, text = self._end or (CloseReason.SERVER_STOPPING, "server stopping")
            self._hub.note_end(self.view(trio.current_time()), reason, text)
            self._leave(reason)
            await self._close(text if reason is not CloseReason.TOO_MANY_NEWCOMERS else "")
            quiet = not self._asked and reason is CloseReason.PEER_CLOSED
            (self.log.debug if quiet else self.log.info)("session_closed", reason=reason.value, error=text or None)
        return reason

    def start(self, job: Callable[..., Awaitable[None]], *args: object) -> None:
        """Run a task until the session ends; an exception that it raises ends the session.

        Does nothing if the session has ended: services may call this before `at_end` has notified them.
        """
        if self._nursery is not None:
            with suppress(RuntimeError):  # the nursery is closed
                self._nursery.start_soon(self._guarded, job, args)

    async def _guarded(self, job: Callable[..., Awaitable[None]], args: tuple[object, ...]) -> None:
        with Reporting(self._fail):
            await job(*args)

    async def _finish(self) -> None:
        try:
            with suppress(*LOST):
                await self.outbox.finish(ERROR_GRACE)
        except Exception as error:  # noqa: BLE001 - the session ends in any case
            self._record(error, "end")

    def _leave(self, reason: CloseReason) -> None:
        """Leave everything that refers to this session, and drop what it holds. So its memory is freed at once."""
        for call in [*(reader.close for reader in self.outbox.close()), *self._closed_by, self.access.end]:
            try:
                call()
            except Exception as error:  # noqa: BLE001 - the others must be called too
                self._record(error, "end")
        self._closed_by.clear()
        self._before_end.clear()
        self._nursery = None
        self._drop_input()
        self._hub.deadlines.forget(self)
        self._hub.newcomers.leave(self)
        self._hub.leave(self, reason)

    def _drop_input(self) -> None:
        """Forget what was received: nothing more is read."""
        self._connection.drop()
        self._hub.unfinished.leave(self)

    async def _close(self, text: str) -> None:
        if text and not self.outbox.torn:  # after half a line the peer could not parse the ERROR
            with trio.move_on_after(ERROR_GRACE, shield=True):
                try:
                    drain = DRAIN_BYTES if self._known_by is None else 0
                    await send_last_error(self._stream, text, drain, self._hub.turns, self._address)
                except Exception as error:  # noqa: BLE001 - the stream is closed in any case
                    self._record(error, "end")
        with trio.CancelScope(shield=True):
            await trio.aclose_forcefully(self._stream)

    def _fail(self, error: BaseException) -> None:
        """End the session because of an exception. A defect of replicad is logged."""
        found = reason_of(error)
        if found is None:
            self._record(error, "run")
            found = (CloseReason.INTERNAL_ERROR, "internal error; the server's log has it")
        self.hang_up(*found)

    def _record(self, error: BaseException, cause: str) -> None:
        self._hub.troubles.record("session", self.identity, cause, error)

    # --- reading ---

    async def _read(self, handle: Handler) -> None:
        """Handle commands until the peer closes its side or breaks the protocol; queued requests are answered first."""
        inlet, turns = Inlet(self._stream), self._hub.turns
        pours = False  # whether the peer has sent more than is handled in one turn, so that more may have come
        self.access.begin(self)
        if self.access.wants_auth and not self._wants_auth:  # it was known by its certificate when the session was made
            raise HangUp(CloseReason.NOT_AUTHORISED, WITHDRAWN)
        try:
            while True:
                most = turns.size if self._known_by is None else min(self._limits.first_line, turns.size)
                data = None
                if pours:
                    await turns.next(self._address)  # before reading: what waits is in no memory of ours
                    data = inlet.receive_nowait(most)
                if data is None:
                    data = await inlet.receive(most)
                if not data:
                    break
                if self._known_by is not None and b"\n" not in data:
                    await turns.next(self._address)  # all of a crowd may be too long, and have to be closed
                pours = await self._handle_lines(data, handle) or len(data) == most
        except ProtocolError as error:
            await self._wait_answered()
            if not isinstance(error, LineTooLong):
                raise
            known = self._known_by is None
            self.hang_up(*cuts.too_long(text_of(error), known=known, wants_token=self._wants_auth))
            return
        await self._wait_answered()
        raise HangUp(CloseReason.PEER_CLOSED)

    async def _handle_lines(self, data: bytes, handle: Handler) -> bool:
        """Handle received input, in slices of one turn's lines. True if it was more than one slice."""
        self._connection.receive_data(data, trio.current_time())
        self._note_unfinished()
        several = False
        while await self._handle_some(handle):
            several = True
            await self._hub.turns.next(self._address)
        return several

    async def _handle_some(self, handle: Handler) -> bool:
        """Handle lines up to the budget of a turn; their answers are sent together. True if there may be more."""
        announcing = self._hub.announcing
        with self.outbox.gathering():
            for _ in range(self._hub.turns.lines):
                command = self._connection.next_command()
                if command is None:
                    return False
                await self._take(command, handle)
                if announcing.crowded:
                    break
        await announcing.wait_room()
        return True

    def _note_unfinished(self) -> None:
        """Give an unfinished line its deadline, and count it if it is long."""
        held = self._connection.unfinished
        if held:
            self._hub.deadlines.set(self, self._connection.next_deadline())
        if held > self._limits.first_line:
            self._held = held
            self._hub.unfinished.hold(self, self._give_up_line, held, self._address)
        elif self._held:
            self._held = 0
            self._hub.unfinished.leave(self)

    async def _wait_answered(self) -> None:
        with trio.move_on_after(ERROR_GRACE):
            for wait_answered in self._before_end:
                await wait_answered()

    async def _take(self, command: Command, handle: Handler) -> None:
        if self._known_by is not None and not self._wants_auth:
            self._become_known()
        match command:
            case Ping():
                pass
            case Name():
                self.name = command.text
            case Auth():
                if self._known_by is not None:
                    self._known_by = trio.current_time() + self._limits.auth_timeout  # the check may have to wait
                await self.access.authenticate(command.token)
                if self._known_by is not None:
                    self._become_known()
            case Error():
                self.log.warning("peer_error", error=command.text)
                raise HangUp(CloseReason.PEER_ERROR)
            case Help():
                self.outbox.post_line(help_answer(self._connection.vocabulary, command.text))
            case _:
                if not self._asked:
                    self._asked = True
                    self.access.note_use()
                    self.log.info("session_opened", connected=len(self._hub))
                await handle(command)

    def _become_known(self) -> None:
        """The limits of newcomers end."""
        self._known_by = None
        self._connection.allow(self._limits.max_line)
        self._hub.newcomers.leave(self)

    # --- limits and deadlines ---

    def _give_way(self) -> None:
        self.hang_up(*cuts.newcomer_gives_way(self._limits))
        self._hub.leave(self, CloseReason.TOO_MANY_NEWCOMERS)

    def _give_up_line(self) -> None:
        self._held = 0
        self.hang_up(*cuts.line_gives_way(self._limits))

    def note_sent(self) -> None:
        """Lines were sent: the next PING is due later."""
        self._connection.sent(trio.current_time())

    def note_waiting(self, look_at: float) -> None:
        """A send waits for the peer: `mind` looks at it then."""
        self._hub.deadlines.set(self, look_at)

    def _next_deadline(self) -> float:
        deadline = min(self._connection.next_deadline(), self.outbox.look_at)
        return deadline if self._known_by is None else min(deadline, self._known_by)

    def mind(self, now: float) -> float:
        """Send a PING, or end the session of a peer that is too late."""
        due = self._connection.due(now, EARLY)
        if self._known_by is not None and now >= self._known_by:
            self.hang_up(*cuts.unknown_for_too_long(self._limits, wants_token=self._wants_auth))
        elif now >= self.outbox.look_at and self.outbox.stalls(now):
            self.hang_up(*cuts.stalled(self._limits.stall_timeout))
        elif due is Due.PEER_SILENT:
            self.hang_up(*cuts.silent(self._limits))
        elif due is Due.UNFINISHED_LINE:
            self.hang_up(*cuts.unfinished(self._limits))
        elif due is Due.PING:
            self.outbox.keep_alive(self._hub.deadlines.ping(now))
            self._connection.sent(now)
        return self._next_deadline() if self._end is None else float("inf")


# Passes each command of a client to the service that answers it.

PENDING_BYTES = 4 << 20  # of requests of one client in one service's queue: some of the longest ACKs


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
