"""The open sessions: their maximum number, what they share, and counts of why connections ended.

`Deadlines` calls sessions in time. A command for all sessions is rendered once, before any session gets it. If that
fails, only its sender is concerned.
"""

from __future__ import annotations

import enum
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

import trio

from replicad.config.limits import Limits
from replicad.daemon.cuts import CUTS_KEPT, ORDINARY, ClientView, Cut
from replicad.daemon.fairness import TURN_BYTES, TURN_LINES, ByAddress, YieldQueue
from replicad.daemon.outbox import Rounds, SendRounds
from replicad.daemon.troubles import Restarts, Troubles, keep_running
from replicad.keeping import Newest
from replicad.protocol.command import Command
from replicad.protocol.commands import Ping
from replicad.protocol.connection import CloseReason, Timing

if TYPE_CHECKING:
    from replicad.daemon.session import Session

# The deadlines of all sessions, which one task works off: PINGs to be sent, clients that are too late.
#
# A timer or a task for each of ten thousand idle connections would cost more than the connections themselves.
# Deadlines within EARLY seconds of each other share a slot of a timer wheel. The task wakes when a slot begins and
# handles all that is in it, so PINGs go out up to so much early. What ends before its deadline leaves nothing behind:
# small things that a crowd leaves for a minute keep the memory of the whole crowd from going back to the system.

EARLY = 0.05  # seconds; what a PING may come before it is due: a hundredth of its interval
SLICE = 50  # sessions that are handled before other tasks run: less than a millisecond
EMPTY = 20  # slots without members that the heap may have, beside as many as have members


class _Slot:
    """The members whose deadlines lie within EARLY seconds from its begin."""

    __slots__ = ("begin", "members")

    def __init__(self, begin: float) -> None:
        self.begin = begin
        self.members: set[Session] = set()


class Deadlines:
    """Each member is in the slot of the time at which it must be called next. A member without a deadline is in no
    slot.
    """

    def __init__(self) -> None:
        self._slots: dict[float, _Slot] = {}  # by their begin; slots with members
        self._heap: list[float] = []  # begins of the slots, and of some removed ones
        self._slot_of: dict[Session, _Slot] = {}
        self._sooner = trio.Event()  # set when a deadline is earlier than all that `run` knew
        self._sleeps_until = float("-inf")
        self._ping = b""
        self._ping_at = float("-inf")

    def __len__(self) -> int:
        """How many members have a deadline."""
        return len(self._slot_of)

    @property
    def remembered(self) -> int:
        """How many slots it keeps; of the empty slots it removes all but a few."""
        return len(self._heap)

    def set(self, member: Session, deadline: float) -> None:
        """Call `member.mind` at the deadline, or before, if an earlier deadline was set already."""
        slot = self._slot_of.get(member)
        if slot is None or deadline < slot.begin:
            self._put(member, deadline)

    def forget(self, member: Session) -> None:
        """Call it no more; safe to repeat."""
        slot = self._slot_of.pop(member, None)
        if slot is None:
            return
        slot.members.discard(member)
        if not slot.members and self._slots.get(slot.begin) is slot:
            del self._slots[slot.begin]
            if len(self._heap) > 2 * len(self._slots) + EMPTY:
                self._heap = list(self._slots)
                heapify(self._heap)

    def ping(self, now: float) -> bytes:
        """The line of a PING, rendered once for all that are sent within EARLY seconds."""
        if now >= self._ping_at + EARLY:
            # PING carries the sender's wall-clock time in ms, as in Synapse. Nothing depends on it.
            self._ping = f"{Ping(str(int(time.time() * 1000))).render()}\n".encode()
            self._ping_at = now
        return self._ping

    async def run(self) -> None:
        """Call the members until cancelled."""
        while True:
            if self._heap:
                self._sleeps_until = max(self._heap[0], trio.current_time() + EARLY / 2)
            else:
                self._sleeps_until = float("inf")
            if self._sooner.is_set():
                self._sooner = trio.Event()
            with trio.move_on_at(self._sleeps_until):
                await self._sooner.wait()
            await self._call_due()

    async def _call_due(self) -> None:
        now = trio.current_time()
        due: list[Session] = []  # taken out first: a deadline that is set again may be in the same slot
        while self._heap and self._heap[0] <= now:
            slot = self._slots.pop(heappop(self._heap), None)
            if slot is not None:
                due += slot.members
        for done, member in enumerate(due, start=1):
            if member in self._slot_of:  # else it was forgotten meanwhile
                self._put(member, member.mind(now))
            if done % SLICE == 0:
                await trio.lowlevel.checkpoint()

    def _put(self, member: Session, deadline: float) -> None:
        self.forget(member)
        if deadline == float("inf"):
            return
        begin = int(deadline / EARLY) * EARLY
        slot = self._slots.get(begin)
        if slot is None:
            slot = self._slots[begin] = _Slot(begin)
            heappush(self._heap, begin)
        slot.members.add(member)
        self._slot_of[member] = slot
        if begin < self._sleeps_until:
            self._sooner.set()


# A bound on the memory or places held for clients; above it an old client is cut, and a new client is served.
#
# Refusing the newest client would let an attacker who connects first shut out all others. The oldest of the address
# that has the most is cut, so that a crowd from one address takes no place from others.


class Allowance:
    """Members with weights, in the order in which they came. If the sum is above `most`, old ones are cut."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.used = 0
        self.cut = 0  # members that were cut, since the start
        self._members: dict[object, tuple[int, Callable[[], None]]] = {}
        self._addresses: ByAddress[object] = ByAddress()

    def __len__(self) -> int:
        return len(self._members)

    def hold(self, member: object, cut: Callable[[], None], weight: int = 1, address: str = "") -> None:
        """Add a member, or change its weight (it keeps its age). `cut` must not wait; the member has left by then.
        `address`: the client's address.

        The new member may itself be cut, at once.
        """
        before, _ = self._members.get(member, (0, cut))
        if member not in self._members:
            self._addresses.add(member, address)
        self._members[member] = (weight, cut)
        self.used += weight - before
        while self.used > self.most and self._members:
            self.cut_one()

    def leave(self, member: object) -> None:
        """Remove a member; safe to repeat."""
        if member in self._members:
            weight, _ = self._members.pop(member)
            self.used -= weight
            self._addresses.remove(member)

    def cut_one(self) -> bool:
        """Cut the oldest member of the address that has the most; of all, if each has one. False if there is none."""
        if not self._members:
            return False
        number, crowded = self._addresses.most()
        member = self._addresses.oldest(crowded) if number > 1 else next(iter(self._members))
        _, cut = self._members[member]
        self.leave(member)
        self.cut += 1
        cut()
        return True


# Hands lines to every session but their sender, a bounded number of sessions in each turn of the event loop.
#
# A line is rendered once. Lines that come while others are handed out are handed out together afterwards, so that
# many lines cost each session one send.


RELAY_BYTES = 1 << 20  # that may wait: ten thousand lines; senders wait for room, the oldest of other daemons go
BATCH = 64 << 10  # bytes that are handed out together
SLICE = 25  # sessions that get them in one turn: a quarter of a millisecond


class Announcing:
    """The lines that wait to be handed out, in their order."""

    def __init__(self, listeners: Collection[Session], most: int, turns: YieldQueue) -> None:
        """`most`: the bytes that may wait; if more do, the oldest lines are dropped."""
        self._turns = turns
        self.announced = self.dropped = 0  # lines, since the start
        self._listeners = listeners
        self._most = most
        self._waiting: deque[tuple[bytes, object | None]] = deque()
        self._waiting_bytes = 0
        self._has_lines = trio.Event()
        self._room = trio.Event()

    @property
    def crowded(self) -> bool:
        """Whether so much waits that a sender should wait for `wait_room` before it sends more."""
        return self._waiting_bytes >= min(BATCH, self._most)

    async def wait_room(self) -> None:
        """Wait until it is not crowded."""
        while self.crowded:
            self._room = trio.Event()
            await self._room.wait()

    def put(self, line: bytes, sender: object | None) -> None:
        """Queue a rendered line with its end for all but `sender`. Never waits."""
        self._waiting.append((line, sender))
        self._waiting_bytes += len(line)
        while self._waiting_bytes > self._most:
            dropped, _ = self._waiting.popleft()
            self._waiting_bytes -= len(dropped)
            self.dropped += 1
        self._has_lines.set()

    async def run(self) -> None:
        """Hand out until cancelled."""
        while True:
            while not self._waiting:
                self._has_lines = trio.Event()
                await self._has_lines.wait()
            await self._hand_out(self._take())

    def _take(self) -> list[tuple[bytes, object | None]]:
        batch: list[tuple[bytes, object | None]] = []
        size = 0
        while self._waiting and (not batch or size + len(self._waiting[0][0]) <= BATCH):
            batch.append(self._waiting.popleft())
            size += len(batch[-1][0])
        self._waiting_bytes -= size
        self._room.set()
        return batch

    async def _hand_out(self, batch: list[tuple[bytes, object | None]]) -> None:
        whole = b"".join(line for line, _ in batch)
        senders = {sender for _, sender in batch if sender is not None}
        self.announced += len(batch)
        for number, listener in enumerate(list(self._listeners), 1):
            if not listener.hears:
                pass
            elif listener not in senders:
                listener.deliver(whole)
            elif lines := b"".join(line for line, sender in batch if sender is not listener):
                listener.deliver(lines)
            if number % SLICE == 0:
                await self._turns.next()


# The TLS handshakes under way, in the order in which they are closed when there are too many.
#
# First the handshakes of the address with the most. Of these, first the handshakes without a whole ClientHello: an
# attacker can begin many of them at no cost. Then the handshakes that the server has answered: a client continues
# within one round trip. Handshakes that wait for the server come last. `ready` bounds their number, so each of them
# is answered within milliseconds. Of several, the handshake that has waited for the longest time. If each comes from
# another address, that order is the same.


WORKED_ON = 1  # handshakes that wait for the server; the next is begun when this handshake is answered
ALONE = 3  # as many beside it, each alone from its address: they need not wait behind a crowd


class Stage(enum.Enum):
    """What a handshake waits for."""

    HELLO = 0  # the client's first message
    SERVER = 1  # the answer: its turn, and the processor
    CLIENT = 2  # the client's last message


GIVES_WAY = (Stage.HELLO, Stage.CLIENT, Stage.SERVER)


class Underway:
    """Handshakes by stage, at most `most` of them."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.cut = 0  # handshakes that were cut, since the start
        self._stages: dict[Stage, ByAddress[object]] = {stage: ByAddress() for stage in Stage}
        self._all: ByAddress[object] = ByAddress()
        self._members: dict[object, _Member] = {}

    def __len__(self) -> int:
        return len(self._members)

    def ready(self, address: str) -> bool:
        """Whether another one from this address, whose ClientHello has come, would soon be answered."""
        return len(self._stages[Stage.SERVER]) < WORKED_ON or self.may_jump(address)

    def may_jump(self, address: str) -> bool:
        """Whether another handshake need not wait behind others: no other handshake of its address is under way."""
        return not self._all.count(address) and len(self._stages[Stage.SERVER]) < WORKED_ON + ALONE

    def hold(self, member: object, cut: Callable[[], None], address: str = "", stage: Stage = Stage.HELLO) -> None:
        """Add a handshake with a client, for which another one gives way if there are too many.

        `cut` ends it and must not wait; the member has left by then.
        """
        while len(self) >= self.most:
            self.cut_one()
        self._members[member] = _Member(cut, address, stage)
        self._all.add(member, address)
        self._stages[stage].add(member, address)

    def move(self, member: object, stage: Stage) -> None:
        """It waits for something else from now on. No effect if it has left."""
        found = self._members.get(member)
        if found is not None:
            self._stages[found.stage].remove(member)
            self._stages[stage].add(member, found.address)
            found.stage = stage

    def leave(self, member: object) -> None:
        """Remove a member; safe to repeat."""
        found = self._members.pop(member, None)
        if found is not None:
            self._all.remove(member)
            self._stages[found.stage].remove(member)

    def cut_one(self) -> bool:
        """Cut the first in the order of this file's head. False if there is none."""
        number, crowded = self._all.most()
        for stage in GIVES_WAY:
            members = self._stages[stage]
            member = members.oldest(crowded if number > 1 else members.most()[1])
            if member is not None:
                cut = self._members[member].cut
                self.leave(member)
                self.cut += 1
                cut()
                return True
        return False


@dataclass(slots=True)
class _Member:
    cut: Callable[[], None]
    address: str
    stage: Stage


ENDS = 4  # sessions whose end begins in a turn of the event loop, as many as begin in it; each takes half a millisecond
GUESTS = 32  # connections of HTTP beyond the limit: health checks are answered while clients have all connections


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
        self.turns = YieldQueue(TURN_LINES, TURN_BYTES)
        self.rounds = SendRounds()
        self.ends = Rounds(ENDS)
        self.handshakes = Underway(limits.tls_handshakes)
        self.newcomers = Allowance(limits.max_newcomers)
        self.unfinished = Allowance(limits.unfinished_bytes)
        self.troubles = troubles or Troubles()
        self._sessions: set[Session] = set()
        self._guests: set[object] = set()
        self._accepted = 0
        self._refused = 0
        self._closed: Counter[str] = Counter()
        self._sent = 0  # bytes, to sessions that have ended
        self.cuts = Newest(CUTS_KEPT, Cut)
        self.announcing = Announcing(self._sessions, RELAY_BYTES, self.turns)

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session]:
        return iter(self._sessions)

    def admit(self, session: Session) -> bool:
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

    def leave(self, session: Session, reason: CloseReason) -> None:
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
        """Keep the deadlines of all sessions, assign places to send and to end, and pass on lines for all clients,
        until cancelled.
        """
        jobs = (
            ("deadlines", self.deadlines.run),
            ("announcing", self.announcing.run),
            ("sends of old rows", self.rounds.old.run),
            ("sends of new rows", self.rounds.new.run),
            ("ends", self.ends.run),
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
