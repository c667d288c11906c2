"""ERROR lines back into exceptions, and what each of them means for the connection."""

from __future__ import annotations

import re

from replicad.errors import (
    BadToken,
    ConnectionLost,
    DatabaseError,
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

_STOPS = re.compile(r"stream (\S+) stops before id (-?\d{1,19})\b")  # how the server begins to say so
_NAMES = re.compile(r"stream (\S+) ")  # how the server begins a sentence about a stream
_FORKED = re.compile(r"stream (\S+) forked after \S+: .* resume from (\S+)")  # errors.forked_text
_STOPPING = "server stopping"  # the one ERROR without a code (docs/protocol-notes.md)


def refusal(text: str) -> ReplicadError:
    """The exception that an ERROR line stands for: `code: sentence` from replicad, free text from others."""
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
    error: ReplicadError = kind(sentence)
    return error


def _has_epoch(token: str) -> bool:
    try:
        return Vector.parse(token).epoch is not None
    except BadToken:
        return False


def is_notice(error: ReplicadError) -> bool:
    """Whether the server only reports a state: it answers no request with it, and ends nothing."""
    return isinstance(error, StreamWaits)


def again(error: ReplicadError) -> ReplicadError:
    """The same error for another raise: one that is raised again and again gathers tracebacks."""
    if isinstance(error, LineTooLong):
        return LineTooLong(str(error), stream=error.stream)
    return type(error)(str(error))


def concerns_one_request(error: ReplicadError) -> bool:
    """Whether the server refused a request and left the connection open, as far as its code tells."""
    return isinstance(error, StreamError | TubeError | DatabaseError | PresenceRefused | RelayRefused)


def keeps_in_step(error: BaseException) -> bool:
    """Whether the connection on which a request failed so can serve the next one; otherwise it has to be closed."""
    return isinstance(error, LocalProtocolError) or (isinstance(error, ReplicadError) and concerns_one_request(error))


def refuses_stream(error: ReplicadError) -> bool:
    """Whether the server refused a stream for a reason of its own. A refusal of our token is another matter."""
    return isinstance(error, StreamError | DatabaseError) and not isinstance(
        error, BadToken | TokenAhead | TokenExpired
    )


def named_stream(error: ReplicadError) -> str | None:
    """The stream that the sentence of an ERROR begins with; None where it begins otherwise."""
    found = _NAMES.match(str(error))
    return found[1] if found else None


def may_pass(error: ReplicadError) -> bool:
    """Whether trying again later may help, with nobody changing anything at our side."""
    return isinstance(error, ConnectionLost | RemoteError | DatabaseError | RowUnreadable)
