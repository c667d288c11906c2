"""The interfaces between the daemon and a feature.

A `Feature` has commands and a function that makes its `Service` from a `Host`. The daemon starts the service's jobs
and passes the commands of clients to it. A test can run a service with its own `Host` and `Session`.

Services use each other inside the process by `Inside`: pages of a stream, and sessions without a socket.
"""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import trio

from replicad.daemon.fairness import Asker
from replicad.errors import ConnectionLost
from replicad.protocol.command import Command, Vocabulary
from replicad.protocol.connection import CloseReason

if TYPE_CHECKING:
    from replicad.config.access import Part
    from replicad.config.settings import Address, ServerSettings
    from replicad.daemon.access import AccessControl, ClientAccess
    from replicad.daemon.admission import Handshakes
    from replicad.daemon.figures import Figures
    from replicad.daemon.hub import Hub
    from replicad.daemon.poller import Poller
    from replicad.daemon.pools import Pools
    from replicad.daemon.relay import Relay
    from replicad.daemon.session import Session
    from replicad.daemon.troubles import Troubles


class HangUp(Exception):
    """Ends the session that raises it. `text`, if not empty, is sent to the peer as ERROR."""

    def __init__(self, reason: CloseReason, text: str = "") -> None:
        super().__init__(reason, text)
        self.reason = reason
        self.text = text


Answer = Callable[[Any], Awaitable[None]]
"""Answers one command. ProtocolError and SlowReader end the connection; another ReplicadError is sent as ERROR."""


@dataclass(frozen=True, slots=True)
class Answers:
    """How a service answers the commands of one client.

    `at_once`: before the next line is read, so these must not wait. `in_turn`: one after another in a bounded queue of
    this service and client, so a slow answer delays neither PINGs nor rows nor other services. `unknown` raises what
    the client is answered if no stream or tube has the name in the command; it is called if the client may not know it.
    """

    at_once: Mapping[type[Command], Answer] = field(default_factory=dict)
    in_turn: Mapping[type[Command], Answer] = field(default_factory=dict)
    unknown: Answer | None = None


@dataclass(frozen=True, slots=True)
class Job:
    """A task of a service that runs as long as the daemon. It is restarted when it fails.

    `announces`: `run` takes `task_status`, and clients are served only after it has started. If it raises before that,
    the daemon does not start.
    """

    name: str
    run: Callable[..., Awaitable[None]]
    announces: bool = False


class Service(Protocol):
    """A feature that runs in one daemon."""

    def jobs(self) -> Sequence[Job]:
        """The tasks that the daemon runs, started in this order."""

    def answers(self, peer: Session) -> Answers:
        """The handlers of a client's commands. Called once for each client, before its first command is handled."""

    def summary(self) -> Mapping[str, object]:
        """The fields that this service adds to the event `ready`."""


@dataclass(frozen=True, slots=True)
class Host:
    """The parts of the daemon that every service may use. `handshakes`: None without TLS. `addresses` are the addresses
    of its listeners.
    """

    settings: ServerSettings
    pools: Pools
    poller: Poller
    hub: Hub
    relay: Relay
    troubles: Troubles
    access: AccessControl
    figures: Figures
    handshakes: Handshakes | None
    inside: Inside
    vocabulary: Vocabulary
    addresses: tuple[Address, ...]


@dataclass(frozen=True, slots=True)
class Feature:
    """A feature: its name, its commands, and the function that makes its service.

    `verbs`, `named_verbs`: rights that it checks, beside the rights that its commands declare: without a name, and with
    the name of a stream or tube.
    """

    name: str
    commands: tuple[type[Command], ...]
    open: Callable[[Host], Service]
    verbs: tuple[str, ...] = ()
    named_verbs: tuple[str, ...] = ()


# Connections of services to their own daemon: they follow streams and send commands as any other client does.
#
# So what a service passes on to somewhere else has the bounds, the tokens and the way to catch up that clients have. A
# service that speaks another protocol serves its clients in the same way: as a session whose stream translates.

Serve = Callable[[trio.abc.Stream, str, "ClientAccess | None"], Awaitable[object]]


@dataclass(frozen=True, slots=True)
class PageRequest:
    """Asks for at most `limit` rows of a stream after `token` (or the word EARLIEST), for a client with that access.

    `part`: of a stream of changes; None: what the client may read. `asker`: whose turn it is to use a connection to
    Postgres.
    """

    stream: str
    token: str
    limit: int
    asker: Asker
    access: ClientAccess
    part: Part | None = None


@dataclass(frozen=True, eq=False, slots=True, weakref_slot=True)
class RowPage:
    """Rows of a stream as lines of RDATA without their ends, in the order of ids, and the token to go on with.

    `closed`: more rows follow, so this page is the same as long as the generation lasts. `named`: the token of the
    request named the generation. `part`: the rows are those of a part of the stream.
    """

    lines: tuple[bytes, ...]
    token: str
    closed: bool
    named: bool
    part: Part | None = None


@dataclass(frozen=True, slots=True)
class Pages:
    """Streams page by page. `page` has no rows if there are none after the token yet. It raises StreamError: the stream
    is unknown, refused, stops before an unreadable row, or the token is not valid; and DatabaseError: Postgres cannot
    answer. With `since` (a time of trio's clock, not later than now) it may be a page that was built after that time.
    `empty_page` is the page of a reader that has everything that was sent to readers; None if it may lack something.
    `wait_beyond` runs a function until rows may follow the token of such a page, or until its token is no longer of the
    present generation, and cancels it then; it raises the same errors, and what the function raises. `has_changes`:
    whether the rows are changes of a table.
    """

    page: Callable[[PageRequest, float | None], Awaitable[RowPage]]
    empty_page: Callable[[PageRequest], Awaitable[RowPage | None]]
    wait_beyond: Callable[[PageRequest, str, Callable[[], Awaitable[None]]], Awaitable[None]]
    has_changes: Callable[[str], bool]


class Inside:
    """Made before the services; `admit` is called when clients are accepted. `pages`: set by the service of streams."""

    def __init__(self) -> None:
        self.pages: Pages | None = None
        self._ready = trio.Event()
        self._sessions: trio.Nursery | None = None
        self._serve: Serve | None = None

    def admit(self, sessions: trio.Nursery, serve: Serve) -> None:
        """From now on connections are served by `serve(stream, name, access)` in `sessions`; None is all rights."""
        self._sessions, self._serve = sessions, serve
        self._ready.set()

    async def connect(self, name: str) -> socket.socket:
        """A connection to this daemon with all rights, shown to operators under the name. Waits until it serves.

        The caller makes a stream of it, of the kind that it needs.

        Raises:
            ConnectionLost: the daemon stops.
        """
        await self._ready.wait()
        assert self._sessions is not None
        assert self._serve is not None
        ours, other = socket.socketpair()
        theirs = trio.SocketStream(trio.socket.from_stdlib_socket(other))
        try:
            self._sessions.start_soon(self._serve, theirs, name, None)
        except RuntimeError as error:  # the nursery is closed
            theirs.socket.close()
            ours.close()
            raise ConnectionLost("the daemon is stopping") from error
        return ours

    async def serve(
        self, stream: trio.abc.Stream, name: str, access: ClientAccess, beside: Callable[[], Awaitable[None]]
    ) -> None:
        """Serve a client that speaks another protocol, as a session. `stream` translates; it is closed at the end.

        `name`: the client's address. `access`: its rights. The session is among the sessions of all clients, so it is
        informed when the daemon stops. `beside` runs meanwhile, in the caller's task, and is cancelled at the end.

        Raises:
            ConnectionLost: the daemon stops.
        """
        await self._ready.wait()
        assert self._sessions is not None
        assert self._serve is not None
        serve, ended, scope = self._serve, trio.Event(), trio.CancelScope()

        async def run() -> None:
            try:
                await serve(stream, name, access)
            finally:
                ended.set()
                scope.cancel()

        try:
            self._sessions.start_soon(run)
        except RuntimeError as error:  # the nursery is closed
            raise ConnectionLost("the daemon is stopping") from error
        try:
            with scope:
                await beside()
            await ended.wait()
        finally:
            if not ended.is_set():
                with trio.CancelScope(shield=True):
                    await trio.aclose_forcefully(stream)
