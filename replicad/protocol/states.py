"""Which command is allowed when, as one table: where a key is missing, the command is refused.

A connection is seen from one end. Names of states say what that end waits for.
"""

from __future__ import annotations

import enum

from replicad.errors import NotAuthorised, RemoteProtocolError
from replicad.protocol.commands import Auth, Command, Error, Name, Ping, Server


class State(enum.Enum):
    """Where a connection stands."""

    AWAIT_AUTH = "await_auth"  # server: the client has yet to show its token
    AWAIT_SERVER = "await_server"  # client: SERVER comes first
    OPEN = "open"
    CLOSED = "closed"


class CloseReason(enum.Enum):
    """Why a connection ended; logged and counted under this name."""

    PEER_CLOSED = "peer_closed"  # end of file
    PEER_ERROR = "peer_error"  # it sent ERROR
    PEER_LOST = "peer_lost"  # reset, unreachable
    PEER_SILENT = "peer_silent"  # it sent PING once and then nothing for the time-out
    BAD_LINE = "bad_line"  # it broke the protocol
    UNFINISHED_LINE = "unfinished_line"  # it began a line and did not end it in time
    NOT_AUTHORISED = "not_authorised"
    STREAM_ENDED = "stream_ended"  # a stream that it follows was removed, or broke off
    SLOW_READER = "slow_reader"  # it fell behind the bound
    TOO_MANY_REQUESTS = "too_many_requests"
    SERVER_STOPPING = "server_stopping"
    INTERNAL_ERROR = "internal_error"  # a defect of ours


TRANSITIONS: dict[State, dict[type[Command], State]] = {
    State.AWAIT_AUTH: {Auth: State.OPEN, Name: State.AWAIT_AUTH, Ping: State.AWAIT_AUTH, Error: State.CLOSED},
    State.AWAIT_SERVER: {Server: State.OPEN, Ping: State.AWAIT_SERVER, Error: State.CLOSED},
    State.CLOSED: {},
}
"""What leads where. On an OPEN connection every command is allowed: ERROR may refuse a single request and leave the
connection as it is; who sends one about the connection closes it."""


def after(state: State, command: Command) -> State:
    """The state that receiving `command` leads to.

    Raises:
        NotAuthorised: the client has to send AUTH first.
        RemoteProtocolError: the command has no place here.
    """
    if state is State.OPEN:
        return state
    found = TRANSITIONS[state].get(type(command))
    if found is not None:
        return found
    if state is State.AWAIT_AUTH:
        raise NotAuthorised(f"{command.NAME} before AUTH: this server wants `AUTH token` first")
    raise RemoteProtocolError(f"{command.NAME} is not allowed while the connection is {state.value}")
