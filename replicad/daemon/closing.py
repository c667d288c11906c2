"""How a connection ends: the reason for an exception, and the last ERROR to the peer."""

from __future__ import annotations

import ssl
from contextlib import suppress

import trio

from replicad.daemon.service import HangUp
from replicad.daemon.turns import Turns
from replicad.errors import (
    DatabaseError,
    LocalProtocolError,
    NotAuthorised,
    ProtocolError,
    ReplicadError,
    SlowReader,
    StreamError,
)
from replicad.groups import sole_leaf
from replicad.protocol.commands import Error
from replicad.protocol.states import CloseReason
from replicad.protocol.words import sendable

RECEIVE_BYTES = 65536
DRAIN_BYTES = 4 << 20  # of input that is read and discarded after the last ERROR to a client that is known

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


async def send_last_error(stream: trio.abc.Stream, text: str, drain: int, turns: Turns) -> None:
    """Send ERROR and close this side; then read what the peer sends until it closes its side, at most `drain` bytes.

    With `drain` 0 only input that has arrived is read. Closing with unread input would send a reset, which can discard
    the ERROR. The caller bounds the time.
    """
    with suppress(*LOST):
        await stream.send_all(error_line(text).render().encode() + b"\n")
        if isinstance(stream, trio.abc.HalfCloseableStream):
            await stream.send_eof()
        if not drain:
            with trio.move_on_after(0):  # only input that has arrived
                await stream.receive_some(RECEIVE_BYTES)
        while drain > 0 and (data := await stream.receive_some(RECEIVE_BYTES)):
            drain -= len(data)
            await turns.next()
