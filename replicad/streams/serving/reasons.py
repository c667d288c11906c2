"""The texts for readers of a stream that does not advance, or whose feed has ended."""

from __future__ import annotations

from replicad.errors import ReplicadError, StreamRefused, StreamWaits
from replicad.groups import sole_leaf
from replicad.positions.horizon import Reading
from replicad.protocol.commands import Error


def waits_line(name: str, obstacle: str) -> bytes:
    """The ERROR line for readers of a stream that does not advance now."""
    text = f"{StreamWaits.code}: stream {name} does not move: {obstacle}; the subscription stays and goes on afterwards"
    return Error(" ".join(text.split())).render().encode() + b"\n"


def end_of(name: str, error: BaseException) -> ReplicadError:
    """The error for readers of a feed that ended by this exception."""
    cause = sole_leaf(error)
    if isinstance(cause, ReplicadError):
        return StreamRefused(f"stream {name} is served again: {cause} Reconnect and resume from your token.")
    return StreamRefused(f"stream {name} is served again after an internal error; reconnect and resume from your token")


def why_unknown(reading: Reading | None) -> str:
    """Why there is no first position."""
    if reading is None:
        return "it was added just now; try again"
    holder = reading.held_by
    if holder is None:
        return "it has no position yet; try again"
    who = f"prepared transaction {holder.gid!r}" if holder.gid else f"pid {holder.pid} ({holder.application_name})"
    return (
        f"it has no position yet: {who} began before this server did and may still write; it can be served when that "
        "has ended"
    )
