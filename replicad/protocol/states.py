"""The states of one end of a connection, and the commands that each allows."""

from __future__ import annotations

import enum

from replicad.errors import NotAuthorised, RemoteProtocolError
from replicad.protocol.commands import Auth, Command, Error, Name, Ping, Server


class State(enum.Enum):
    """The state of one end of a connection."""

    AWAIT_AUTH = "await_auth"  # server: the client must send AUTH
    AWAIT_SERVER = "await_server"  # client: the server must send SERVER
    OPEN = "open"
    CLOSED = "closed"


class CloseReason(enum.Enum):
    """Why a connection ended. Logged and counted by this name."""

    PEER_CLOSED = "peer_closed"  # end of file
    PEER_ERROR = "peer_error"  # the peer sent ERROR
    PEER_LOST = "peer_lost"  # reset, unreachable
    PEER_SILENT = "peer_silent"  # the peer has sent PING and then nothing for the time-out
    BAD_LINE = "bad_line"  # the peer broke the protocol
    UNFINISHED_LINE = "unfinished_line"  # the peer began a line and did not end it in time
    NOT_AUTHORISED = "not_authorised"
    ACCESS_EXPIRED = "access_expired"  # the token of a browser that follows over HTTP
    NO_COMMAND = "no_command"  # the peer sent no command in time after it connected
    TOO_MANY_NEWCOMERS = "too_many_newcomers"  # the oldest of too many connections that have not sent a command yet
    STREAM_ENDED = "stream_ended"  # a stream that the peer follows was removed or failed
    SLOW_READER = "slow_reader"  # the peer fell behind the journal, or took no bytes for too long
    TOO_MANY_REQUESTS = "too_many_requests"
    TOO_MANY_CONNECTIONS = "too_many_connections"  # of this client
    FORBIDDEN = "forbidden"  # a right was withdrawn while an answer was being sent
    SERVER_STOPPING = "server_stopping"
    INTERNAL_ERROR = "internal_error"  # a defect of replicad


TRANSITIONS: dict[State, dict[type[Command], State]] = {
    State.AWAIT_AUTH: {Auth: State.OPEN, Name: State.AWAIT_AUTH, Ping: State.AWAIT_AUTH, Error: State.CLOSED},
    State.AWAIT_SERVER: {Server: State.OPEN, Ping: State.AWAIT_SERVER, Error: State.CLOSED},
    State.CLOSED: {},
}
"""State, received command, next state. A command that is missing is refused. OPEN allows every command: an ERROR may
refuse one request only, and if it concerns the connection, its sender closes the connection."""


def after(state: State, command: Command) -> State:
    """The state after receiving `command`.

    Raises:
        NotAuthorised: the client has to send AUTH first.
        RemoteProtocolError: the command is not allowed in this state.
    """
    if state is State.OPEN:
        return state
    found = TRANSITIONS[state].get(type(command))
    if found is not None:
        return found
    if state is State.AWAIT_AUTH:
        raise NotAuthorised(f"{command.NAME} before AUTH: this server wants `AUTH token` first")
    raise RemoteProtocolError(f"{command.NAME} is not allowed while the connection is {state.value}")
