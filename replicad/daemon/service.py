"""What a feature gives to the daemon and gets from it: the few interfaces between the two.

A feature is a `Feature`: its commands, and a function that makes its `Service` from a `Host`. The daemon starts the
service's jobs and hands it the commands of its clients. So a service runs in a test with a `Host` and a `Peer` of the
test's own.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from replicad.daemon.journal import Channel, Reader
from replicad.daemon.outlet import Piece
from replicad.errors import ReplicadError, RowUnreadable
from replicad.protocol.command import Command
from replicad.protocol.states import CloseReason

if TYPE_CHECKING:
    from replicad.config.settings import ServerSettings
    from replicad.daemon.hub import Hub
    from replicad.daemon.poller import Poller
    from replicad.daemon.pools import Pools
    from replicad.daemon.relay import Relay
    from replicad.daemon.troubles import Troubles
    from replicad.postgres.horizon import Reading, Source


class HangUp(Exception):
    """Ends a session from within. `text` goes to the peer as ERROR, if there is any."""

    def __init__(self, reason: CloseReason, text: str = "") -> None:
        super().__init__(reason, text)
        self.reason = reason
        self.text = text


class Peer(Protocol):
    """One client, as services see it. Nothing here waits but what is async."""

    @property
    def number(self) -> int:
        """Different for every connection of this daemon."""

    @property
    def identity(self) -> str:
        """Who this is in lists and leases: a name and the number."""

    @property
    def log(self) -> Any:
        """A structlog logger that knows the client."""

    def post(self, command: Command) -> None:
        """Queue a command. Never raises; a peer that lets the queue fill up is cut off."""

    def post_line(self, line: bytes) -> None:
        """`post` for a line that is finished, its end included."""

    def refuse(self, error: ReplicadError) -> None:
        """Answer a request that cannot be done: ERROR, and the connection stays."""

    async def send(self, *pieces: Piece) -> None:
        """Send whole lines with nothing in between; waits until the socket has taken them."""

    async def flush(self) -> None:
        """Send what is posted already."""

    def read(
        self,
        channel: Channel,
        cursor: int,
        *,
        extended: bool,
        preamble: bytes = b"",
        on_stop: Callable[[RowUnreadable], None] | None = None,
    ) -> Reader:
        """Have a journal sent from `cursor` on. Raises SlowReader where the journal no longer holds that chunk."""

    def start(self, job: Callable[..., Awaitable[None]], *args: object) -> None:
        """Run a task that lives as long as the connection; what it raises ends the connection."""

    def at_end(self, call: Callable[[], None]) -> None:
        """Have `call` called when the connection is over."""


class Positions(Protocol):
    """Where services learn how far tables may be read: the poller, whose methods say what each does."""

    def watch(
        self,
        name: str,
        source: Source,
        on_reading: Callable[[str, Reading], None],
        *,
        published: int | None = None,
        per_writer: Mapping[str, int] | None = None,
        writers: Iterable[str] = (),
        file: int | None = None,
    ) -> None: ...

    def before_polling(self, look: Callable[[], Awaitable[None]]) -> None: ...

    def set_writers(self, name: str, writers: Iterable[str]) -> None: ...

    def unwatch(self, name: str) -> None: ...

    def ring(self) -> None: ...


class Telling(Protocol):
    """The way to the clients of the other daemons: the relay, whose methods say what each does."""

    def on(self, kind: type[Command], handler: Callable[[Any], None]) -> None: ...

    def tell(self, command: Command) -> None: ...


Answer = Callable[[Any], Awaitable[None]]
"""Answers one command. A ReplicadError is sent as ERROR and the connection stays; ProtocolError, SlowReader end it."""


@dataclass(frozen=True, slots=True)
class Answers:
    """How a service answers the commands of one client.

    `at_once`: before the next line is read, so these must not wait. `in_turn`: one after another in a bounded queue of
    this service and client, so that what takes time keeps neither PINGs nor rows nor other services waiting.
    """

    at_once: Mapping[type[Command], Answer] = field(default_factory=dict)
    in_turn: Mapping[type[Command], Answer] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Job:
    """A task of a service that runs as long as the daemon, and is begun again when it fails.

    `announces`: `run` takes `task_status`, and clients are served only when it has started. What it raises before that
    keeps the daemon from starting.
    """

    name: str
    run: Callable[..., Awaitable[None]]
    announces: bool = False


class Service(Protocol):
    """A feature at work in one daemon."""

    def jobs(self) -> Sequence[Job]:
        """What the daemon has to run, in this order."""

    def answers(self, peer: Peer) -> Answers:
        """How the commands of a client are answered; called once, with the first of them."""

    def summary(self) -> Mapping[str, object]:
        """What the event `ready` shows of it."""


@dataclass(frozen=True, slots=True)
class Host:
    """What the daemon lends to every service."""

    settings: ServerSettings
    pools: Pools
    poller: Poller
    hub: Hub
    relay: Relay
    troubles: Troubles


@dataclass(frozen=True, slots=True)
class Feature:
    """A feature as the daemon knows it."""

    name: str
    commands: tuple[type[Command], ...]
    open: Callable[[Host], Service]
