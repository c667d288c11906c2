"""The interfaces between the daemon and a feature.

A `Feature` has commands and a function that makes its `Service` from a `Host`. The daemon starts the service's jobs
and passes the commands of clients to it. A test can run a service with its own `Host` and `Session`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from replicad.protocol.command import Command, Vocabulary
from replicad.protocol.connection import CloseReason

if TYPE_CHECKING:
    from replicad.config.settings import Address, ServerSettings
    from replicad.daemon.access import AccessControl
    from replicad.daemon.admission import Handshakes
    from replicad.daemon.figures import Figures
    from replicad.daemon.hub import Hub
    from replicad.daemon.inside import Inside
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
