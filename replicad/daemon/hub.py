"""The open sessions: their maximum number, what they share, and counts of why connections ended.

A command for all sessions is rendered once, before any session gets it. If that fails, only its sender is concerned.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import trio

from replicad.config.limits import Limits
from replicad.daemon.allowance import Allowance
from replicad.daemon.announcing import RELAY_BYTES, Announcing
from replicad.daemon.clients import CUTS_KEPT, ORDINARY, ClientView, Cut
from replicad.daemon.deadlines import Deadlines
from replicad.daemon.rounds import SendRounds
from replicad.daemon.supervision import Restarts, keep_running
from replicad.daemon.troubles import Troubles
from replicad.daemon.turns import TURN_BYTES, TURN_LINES, Turns
from replicad.daemon.underway import Stage, Underway
from replicad.keeping import Newest
from replicad.protocol.command import Command
from replicad.protocol.connection import Timing
from replicad.protocol.states import CloseReason

GUESTS = 32  # connections of HTTP beyond the limit: health checks are answered while clients have all connections


class Member(Protocol):
    """What the hub needs of a session."""

    def deliver(self, lines: bytes) -> None:
        """Send whole lines now, if the socket is free, or queue them. Never raises."""

    @property
    def hears(self) -> bool:
        """Whether the client may get the lines for all clients."""

    @property
    def number(self) -> int:
        """The connection's number, unique in this daemon."""

    @property
    def sent(self) -> int:
        """The bytes that its socket has taken."""

    def view(self, now: float) -> ClientView:
        """Its row in the list of clients."""

    def hang_up(self, reason: CloseReason, text: str = "") -> None:
        """End the session soon; the text is sent to the peer as ERROR."""


@dataclass(frozen=True, slots=True)
class HubStatistics:
    """The first four are present values, the others counts since the start; `closed` is by reason.

    `newcomers` have not sent a command yet; `unfinished` are bytes of long unfinished lines. `turns` counts how often a
    client's input had to wait for another turn of the event loop, `sends` how often a large send had to.
    """

    connected: int
    handshakes: int
    newcomers: int
    unfinished: int
    accepted: int
    refused: int
    handshakes_cut: int
    newcomers_cut: int
    announced: int
    announcements_dropped: int
    turns: int
    sends: int
    closed: Mapping[str, int]


class Hub:
    """The set of open sessions, and what they share. `limit` is their maximum, handshakes and guests included.

    Failures of a session are recorded in `troubles`. `run` must run while there are sessions.
    """

    def __init__(self, limit: int, troubles: Troubles | None = None, limits: Limits = Limits()) -> None:
        self.limit = limit
        self.timing = Timing(limits.ping_interval, limits.peer_timeout, limits.line_timeout)
        self.deadlines = Deadlines()
        self.turns = Turns(TURN_LINES, TURN_BYTES)
        self.rounds = SendRounds()
        self.handshakes = Underway(limits.tls_handshakes)
        self.newcomers = Allowance(limits.max_newcomers)
        self.unfinished = Allowance(limits.unfinished_bytes)
        self.troubles = troubles or Troubles()
        self._sessions: set[Member] = set()
        self._guests: set[object] = set()
        self._accepted = 0
        self._refused = 0
        self._closed: Counter[str] = Counter()
        self._sent = 0  # bytes, to sessions that have ended
        self.cuts = Newest(CUTS_KEPT, Cut)
        self.announcing = Announcing(self._sessions, RELAY_BYTES, self.turns)

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Member]:
        return iter(self._sessions)

    def admit(self, session: Member) -> bool:
        """Add a session. False if the limit is reached, and no connection whose client is not known gives way."""
        if not self._has_room():
            return False
        self._accepted += 1
        self._sessions.add(session)
        return True

    def admit_handshake(
        self, handshake: object, cut: Callable[[], None], address: str = "", stage: Stage = Stage.HELLO
    ) -> bool:
        """Count a TLS handshake as a connection. `cut` ends it, when there are too many; first a handshake of the
        address with the most. False as `admit`.

        Call `handshakes.leave` at its end.
        """
        if not self._has_room():
            return False
        self.handshakes.hold(handshake, cut, address, stage)
        return True

    def admit_guest(self, guest: object) -> bool:
        """Count a connection that is no session, such as an HTTP connection. False as `admit`. Call `leave_guest` at
        its end.

        If it may give way, hold it among the `newcomers` too.
        """
        if not self._has_room(GUESTS):
            return False
        self._guests.add(guest)
        return True

    def leave_guest(self, guest: object) -> None:
        """Count it no longer; safe to repeat."""
        self._guests.discard(guest)

    def _has_room(self, beyond: int = 0) -> bool:
        """Whether there is room for one more. If not, a handshake gives way, or a client that has sent no command."""
        if len(self._sessions) + len(self.handshakes) + len(self._guests) < self.limit + beyond:
            return True
        if self.handshakes.cut_one() or self.newcomers.cut_one():
            return True
        self.refuse()
        return False

    def refuse(self) -> None:
        """Count a refused connection."""
        self._refused += 1

    def leave(self, session: Member, reason: CloseReason) -> None:
        """Remove a session and count the reason why it ended. Safe to repeat; the first reason counts."""
        if session in self._sessions:
            self._sessions.discard(session)
            self._closed[reason.value] += 1
            self._sent += session.sent

    def note_end(self, view: ClientView, reason: CloseReason, why: str) -> None:
        """Keep an end that the client did not want, to be shown."""
        if reason not in ORDINARY:
            cut = Cut(trio.current_time(), view.name, view.peer, view.access, reason.value, why)
            self.cuts.append(cut)

    def relay(self, command: Command, sender: object | None) -> None:
        """Have a command sent to every session except its sender and sessions without the right to get it.

        Raises:
            LocalProtocolError: it cannot be rendered; nothing is sent.
        """
        self.announcing.put(command.render().encode() + b"\n", sender)

    async def run(self, restarts: Restarts = Restarts()) -> None:
        """Keep the deadlines of all sessions, assign places to send, and pass on lines for all clients, until
        cancelled.
        """
        jobs = (
            ("deadlines", self.deadlines.run),
            ("announcing", self.announcing.run),
            ("sends of old rows", self.rounds.old.run),
            ("sends of new rows", self.rounds.new.run),
        )
        async with trio.open_nursery() as nursery:
            for name, job in jobs:
                nursery.start_soon(keep_running, job, "service", f"sessions: {name}", self.troubles, restarts)

    def sent_bytes(self) -> int:
        """The bytes that the sockets of all clients have taken since the start."""
        return self._sent + sum(session.sent for session in self._sessions)

    def statistics(self) -> HubStatistics:
        """Counts, as one frozen value."""
        return HubStatistics(
            connected=len(self._sessions),
            handshakes=len(self.handshakes),
            newcomers=len(self.newcomers),
            unfinished=self.unfinished.used,
            accepted=self._accepted,
            refused=self._refused,
            handshakes_cut=self.handshakes.cut,
            newcomers_cut=self.newcomers.cut,
            announced=self.announcing.announced,
            announcements_dropped=self.announcing.dropped,
            turns=self.turns.waits,
            sends=self.rounds.waits,
            closed=dict(self._closed),
        )
