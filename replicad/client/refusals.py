"""Turns ERROR lines into exceptions, and decides what each of them means for the connection."""

from __future__ import annotations

import re

from replicad.errors import (
    BadToken,
    ConnectionLost,
    DatabaseError,
    Forbidden,
    LeaseForked,
    LeaseLost,
    LocalProtocolError,
    PresenceRefused,
    RelayRefused,
    RemoteError,
    ReplicadError,
    RowUnreadable,
    ServerStopping,
    StreamError,
    StreamWaits,
    TokenAhead,
    TokenExpired,
    TokenForked,
    TubeError,
    by_code,
)
from replicad.protocol.lines import LineTooLong
from replicad.protocol.tokens import Vector

_STOPS = re.compile(r"stream (\S+) stops before id (-?\d{1,19})\b")  # the begin of the server's message
_NAMES = re.compile(r"stream (\S+) ")  # the begin of a message about a stream
_FORKED = re.compile(r"stream (\S+) forked after \S+: .* resume from (\S+)")  # errors.forked_text
_STOPPING = "server stopping"  # the one ERROR without a code (docs/dev/protocol-notes.md)


def refusal(text: str) -> ReplicadError:
    """The exception for an ERROR line: `code: sentence` from replicad, free text from others."""
    if text == _STOPPING:
        return ServerStopping("the server is stopping; connect again in a while")
    code, colon, sentence = text.partition(": ")
    kind = by_code().get(code) if colon else None
    if kind is None:
        return RemoteError(text or "the server sent ERROR without a reason")
    if issubclass(kind, RowUnreadable) and (found := _STOPS.match(sentence)):
        return kind(sentence, stream=found[1], row_id=int(found[2]))
    if kind is BadToken and (found := _FORKED.fullmatch(sentence)) and _has_epoch(found[2]):
        return TokenForked(sentence)
    if kind is LeaseLost and sentence.startswith(LeaseForked.FORKED):
        return LeaseForked(sentence)
    error: ReplicadError = kind(sentence)
    return error


def _has_epoch(token: str) -> bool:
    try:
        return Vector.parse(token).epoch is not None
    except BadToken:
        return False


def is_notice(error: ReplicadError) -> bool:
    """Whether the server only reports a state: the error answers no request and ends nothing."""
    return isinstance(error, StreamWaits)


def again(error: ReplicadError) -> ReplicadError:
    """A copy of the error: raising the same one several times would accumulate tracebacks."""
    if isinstance(error, LineTooLong):
        return LineTooLong(str(error), stream=error.stream)
    return type(error)(str(error))


def concerns_one_request(error: ReplicadError) -> bool:
    """Whether, by its code, the server refused one request and left the connection open."""
    return isinstance(error, StreamError | TubeError | DatabaseError | PresenceRefused | RelayRefused | Forbidden)


def keeps_in_step(error: BaseException) -> bool:
    """Whether the connection can serve another request after this failure; otherwise it must be closed."""
    return isinstance(error, LocalProtocolError) or (isinstance(error, ReplicadError) and concerns_one_request(error))


def refuses_stream(error: ReplicadError) -> bool:
    """Whether the server refused a stream for another reason than our token."""
    return isinstance(error, StreamError | DatabaseError) and not isinstance(
        error, BadToken | TokenAhead | TokenExpired
    )


def named_stream(error: ReplicadError) -> str | None:
    """The stream with which the message of an ERROR begins, or None."""
    found = _NAMES.match(str(error))
    return found[1] if found else None


def may_pass(error: ReplicadError) -> bool:
    """Whether trying again later may help without a change at our side."""
    return isinstance(error, ConnectionLost | RemoteError | DatabaseError | RowUnreadable)
