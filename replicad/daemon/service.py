"""The interfaces between the daemon and a feature.

A `Feature` has commands and a function that makes its `Service` from a `Host`. The daemon starts the service's jobs
and passes the commands of clients to it. A test can run a service with its own `Host` and `Peer`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from replicad.daemon.fairness import Asker
from replicad.daemon.journal import Channel, Reader
from replicad.daemon.outbox import Piece
from replicad.errors import ReplicadError, RowUnreadable
from replicad.protocol.command import Command, Vocabulary
from replicad.protocol.states import CloseReason

if TYPE_CHECKING:
    from replicad.config.settings import Address, ServerSettings
    from replicad.daemon.access import AccessControl, ClientAccess
    from replicad.daemon.figures import Figures
    from replicad.daemon.handshakes import Handshakes
    from replicad.daemon.hub import Hub
    from replicad.daemon.inside import Inside
    from replicad.daemon.poller import Poller
    from replicad.daemon.pools import Pools
    from replicad.daemon.relay import Relay
    from replicad.daemon.troubles import Troubles


class HangUp(Exception):
    """Ends the session that raises it. `text`, if not empty, is sent to the peer as ERROR."""

    def __init__(self, reason: CloseReason, text: str = "") -> None:
        super().__init__(reason, text)
        self.reason = reason
        self.text = text


class Peer(Protocol):
    """One client, as services see it. Only the async methods wait."""

    @property
    def access(self) -> ClientAccess:
        """What the client may do."""

    @property
    def number(self) -> int:
        """The connection's number, unique in this daemon."""

    @property
    def identity(self) -> str:
        """The client's name and number, as shown in lists and leases."""

    @property
    def asker(self) -> Asker:
        """The client as a member of a fair queue. Its crowd is its name in the access file, or its address."""

    @property
    def log(self) -> Any:
        """A structlog logger bound to the client's fields."""

    def post(self, command: Command) -> None:
        """Queue a command. Never raises. A peer whose queue is full is disconnected."""

    def post_line(self, line: bytes) -> None:
        """`post` for a rendered line with its newline."""

    def refuse(self, error: ReplicadError) -> None:
        """Answer a request with ERROR; the connection stays open."""

    async def give_way(self) -> None:
        """Wait for the next turn: for work in masses, such as reading a long list."""

    async def send(self, *pieces: Piece, to_go: float = 0.0) -> None:
        """Send whole lines with nothing in between; waits until the socket has taken them.

        `to_go`: how much the client has before it. Of the clients that are sent much, those with most come first.
        """

    async def flush(self) -> None:
        """Send the commands that are queued already."""

    def read(
        self,
        channel: Channel,
        cursor: int,
        *,
        extended: bool,
        preamble: bytes = b"",
        on_stop: Callable[[RowUnreadable], None] | None = None,
    ) -> Reader:
        """Send a journal from `cursor` on. Raises SlowReader if the journal no longer holds that chunk."""

    def stop_reading(self, reader: Reader) -> None:
        """End what `read` began, between two chunks. Safe to repeat."""

    def hang_up(self, reason: CloseReason, text: str = "") -> None:
        """End the connection soon; the text is sent as ERROR."""

    def start(self, job: Callable[..., Awaitable[None]], *args: object) -> None:
        """Run a task until the connection ends. An exception that it raises ends the connection."""

    def at_end(self, call: Callable[[], None]) -> None:
        """Call `call` when the connection has ended."""


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

    def answers(self, peer: Peer) -> Answers:
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
