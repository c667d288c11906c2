"""The list of commands, and the way from a line to one of them.

Each command is a frozen dataclass that parses and renders its own line; which side may send it stands on it too.
Whether it is allowed *now* is the business of `states`; what it means, of the server and the clients.
"""

from __future__ import annotations

from replicad.errors import RemoteProtocolError
from replicad.protocol.extensions import Auth, Doorbell, Streams, Taken, Writers
from replicad.protocol.pods import Ack, Acked, Arrow, CursorAt, Park, Parked, Pods
from replicad.protocol.replication import (
    ClearUserSync,
    Error,
    FederationAck,
    LockReleased,
    Name,
    Ping,
    Position,
    Rdata,
    RemoteServerUp,
    Replicate,
    Server,
    UserIp,
    UserSync,
)
from replicad.protocol.tubing import Claim, Lease, Part, Release, Renew, Report, Tube
from replicad.protocol.words import Command, Side, refuse_controls

__all__ = [
    "COMMANDS", "Ack", "Acked", "Arrow", "Auth", "Claim", "ClearUserSync", "Command", "CursorAt", "Doorbell", "Error",
    "FederationAck", "Lease", "LockReleased", "Name", "Park", "Parked", "Part", "Ping", "Pods", "Position",
    "Rdata", "Release", "RemoteServerUp", "Renew", "Replicate", "Report", "Server", "Side", "Streams", "Taken", "Tube",
    "UserIp", "UserSync", "Writers", "parse",
]  # fmt: skip

COMMANDS: dict[str, type[Command]] = {
    kind.NAME: kind
    for kind in (
        Server, Rdata, Position, Error, Ping, Name, Replicate, UserSync, ClearUserSync, FederationAck,
        RemoteServerUp, UserIp, LockReleased,
        Auth, Streams, Writers, Taken, Doorbell,
        Tube, Claim, Renew, Release, Lease, Pods, Arrow, CursorAt, Ack, Acked, Park, Parked, Report,
    )
}  # fmt: skip


def parse(line: str, sender: Side) -> Command:
    """Turn one line (without its end) into a command, as sent by `sender`.

    Raises:
        RemoteProtocolError: a control character, unknown command, not that side's command, or wrong arguments.
    """
    refuse_controls(line, sender)
    name, _, rest = line.partition(" ")
    kind = COMMANDS.get(name)
    if kind is None:
        known = ", ".join(n for n, k in COMMANDS.items() if k.SENDER & sender)
        raise RemoteProtocolError(f"unknown command {name[:40]!r}; there are {known}")
    if not kind.SENDER & sender:
        raise RemoteProtocolError(f"{name} is not a {'client' if sender is Side.CLIENT else 'server'}'s command")
    return kind.parse(rest)
