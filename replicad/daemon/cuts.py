"""Why a client is cut that breaks a limit, and the lists of connected and cut clients for operators."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from replicad.config.declaring import plain
from replicad.config.limits import Limits
from replicad.protocol.connection import CloseReason

CUTS_KEPT = 100  # the last ones; all are in the log

ORDINARY = frozenset(
    (
        CloseReason.PEER_CLOSED,
        CloseReason.PEER_LOST,
        CloseReason.SERVER_STOPPING,
        CloseReason.TOO_MANY_NEWCOMERS,
        CloseReason.ACCESS_EXPIRED,
    )
)
"""Reasons of ends that are no cuts: the client ended it, the daemon ends, or a browser's token has expired.
Strangers without a command are many."""


@dataclass(frozen=True, slots=True)
class Following:
    """A stream that a client is sent. A client that reads the journal is behind by the seconds that its next chunk has
    waited for it. A client that catches up with old rows has so many ids to go; nothing waits for it in memory.
    """

    stream: str
    behind_s: float | None
    ids_left: int | None = None


@dataclass(frozen=True, slots=True)
class ClientView:
    """A connected client. `access`: its name in the access file. Times in seconds; `sent` in bytes."""

    number: int
    name: str | None
    peer: str
    access: str
    connected_s: float
    sent: int
    known: bool
    following: tuple[Following, ...]


class Cut(NamedTuple):
    """An end of a connection that its client did not want. `at`: by the clock of trio."""

    at: float
    name: str | None
    peer: str
    access: str
    reason: str
    why: str


# Why a client is cut that breaks a limit: the reason in the log, and the ERROR, which names the option.
#
# A limit that is fixed has no option: there the ERROR has the value of the limit.

WhyCut = tuple[CloseReason, str]  # the reason in the log, and the text of the ERROR


def newcomer_gives_way(limits: Limits) -> WhyCut:
    """The oldest of too many connections whose clients are not known yet."""
    return (
        CloseReason.TOO_MANY_NEWCOMERS,
        f"too_many_newcomers: up to {limits.max_newcomers} connections may wait for their first command, "
        "or as many as --max-connections has room for; send a command at once",
    )


def line_gives_way(limits: Limits) -> WhyCut:
    """The oldest of the unfinished lines, which are too long together."""
    return (
        CloseReason.UNFINISHED_LINE,
        f"unfinished_line: all clients together may have {limits.unfinished_bytes} bytes of unfinished lines, "
        "and this one began first; send it again",
    )


def unknown_for_too_long(limits: Limits, *, wants_token: bool) -> WhyCut:
    """A client that has sent no valid command, or no AUTH where that is wanted."""
    if wants_token:
        wait = f"{plain(limits.auth_timeout)} s"
        return CloseReason.NOT_AUTHORISED, f"not_authorised: no AUTH came in time; send it within {wait}"
    wait = f"{plain(limits.first_command_timeout)} s"
    return CloseReason.NO_COMMAND, f"no_command: no command came in time; send one, such as NAME, within {wait}"


def silent(limits: Limits) -> WhyCut:
    """A client that has sent PING, and then nothing."""
    text = f"peer_silent: nothing came for {plain(limits.peer_timeout)} s; send PING now and then"
    return CloseReason.PEER_SILENT, text


def unfinished(limits: Limits) -> WhyCut:
    """A line that did not end in time."""
    text = f"unfinished_line: a line has to end within {plain(limits.line_timeout)} s"
    return CloseReason.UNFINISHED_LINE, text


def too_long(text: str, *, known: bool, wants_token: bool) -> WhyCut:
    """A line that is too long; `text` has the limit."""
    if known:
        return CloseReason.BAD_LINE, f"{text} (--max-line)"
    return CloseReason.BAD_LINE, f"{text} before {'AUTH' if wants_token else 'the first command'}"


def answers_not_read(most: int) -> WhyCut:
    """Too much is queued for a client."""
    text = f"slow_reader: more than {most} bytes of answers wait; read them, or resume later"
    return CloseReason.SLOW_READER, text


def stalled(seconds: float) -> WhyCut:
    """A client that takes no bytes."""
    return (
        CloseReason.SLOW_READER,
        f"slow_reader: next to nothing was read for {plain(seconds)} s (--stall-timeout)",
    )


def too_long_requests(most: int) -> WhyCut:
    """A client whose waiting requests are too long together."""
    return (
        CloseReason.TOO_MANY_REQUESTS,
        f"too_many_requests: more than {most} bytes of requests wait; read the answers first",
    )


def too_many_requests(most: int) -> WhyCut:
    """A client that sends requests faster than they are answered."""
    return (
        CloseReason.TOO_MANY_REQUESTS,
        f"too_many_requests: more than {most} requests wait; read the answers first",
    )
