"""The slots that one writer should have, those that it assumes to own, and its writes in flight.

This module does no I/O and reads no clock: the caller passes monotonic times.

The assumption is a hint: it saves a query and may be wrong. The fence in each transaction makes a write safe
(writer_owns in sharding/sql/slots.sql, docs/leases.md). The assumption ends before other writers may take over. A
slot that must be given away takes no new writes until the writes in flight have ended.

Every writer computes the same plan from the same view: the view that it saw last. It does its own
part of the plan. A view may be old. So each step names the term under which the slot was seen, and a step from an old
view does nothing. When all writers have the same view, each step leaves one step less to do, and no slot moves without
need.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

from replicad.errors import NotOwner

TRUST: Final = 0.9  # of the time to live; the others, whose clocks may run faster, wait for all of it
DRAIN: Final = 5.0  # seconds that new writes wait for those in flight, so that a slot can be given away
POSTPONE: Final = 5.0  # seconds until the next attempt; new writes may begin meanwhile

_HASHED = 4  # bytes of the digest that make the slot; writer_slot_of in sharding/sql/members.sql does the same


def slot_of(key: str, slots: int) -> int:
    """The slot of a key: the first four bytes of the SHA-256 of its UTF-8, big-endian, modulo `slots`."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:_HASHED], "big") % slots


@dataclass(frozen=True, slots=True)
class Slot:
    """One slot as stored in Postgres: its last owner, and the term of that ownership."""

    number: int
    owner: str | None
    term: int


@dataclass(frozen=True, slots=True)
class WriterMember:
    """One writer. `term` is that of its membership, `beat` its last beat; `ttl` is in seconds."""

    instance: str
    term: int
    beat: int = 0
    ttl: float = 0.0
    address: str | None = None
    leaving: bool = False


@dataclass(frozen=True, slots=True)
class View:
    """Members by name, and all slots by number, at one moment. A later view has a larger `version`."""

    members: Mapping[str, WriterMember] = field(default_factory=dict)
    slots: tuple[Slot, ...] = ()
    version: int = 0

    def holder(self, slot: Slot) -> WriterMember | None:
        """The owner of the slot. None if the owner is not a member, or joined after the slot was given to it."""
        member = None if slot.owner is None else self.members.get(slot.owner)
        return member if member is not None and member.term < slot.term else None

    def replaced(self, changed: Iterable[Slot]) -> tuple[Slot, ...]:
        """The slots with these in place of older ones. A slot that is known under a later term stays."""
        newer = [slot for slot in changed if slot.term > self.slots[slot.number].term]
        if not newer:
            return self.slots
        slots = list(self.slots)
        for slot in newer:
            slots[slot.number] = slot
        return tuple(slots)


@dataclass(frozen=True, slots=True)
class Plan:
    """The steps of one writer: slots to take, and slots to give with their receivers."""

    take: tuple[Slot, ...] = ()
    give: tuple[tuple[Slot, str], ...] = ()


def moves(view: View) -> dict[int, str]:
    """The slots that must move, and the writers that should have them.

    Every writer that stays gets the same number of slots. The remainder goes, one each, to the writers with the most
    slots.
    So only free slots and slots above the share move.
    """
    held: dict[str, list[int]] = {name: [] for name, member in sorted(view.members.items()) if not member.leaving}
    if not held:
        return {}
    loose: list[int] = []
    for slot in view.slots:
        holder = view.holder(slot)
        if holder is None or holder.leaving:
            loose.append(slot.number)
        else:
            held[holder.instance].append(slot.number)
    share, remainder = divmod(len(view.slots), len(held))
    ranked = sorted(held, key=lambda name: (-len(held[name]), name))
    due = {name: share + (place < remainder) for place, name in enumerate(ranked)}
    for name, numbers in held.items():
        loose += numbers[due[name] :]
    waiting = iter(sorted(loose))
    return {number: name for name in sorted(held) for number in islice(waiting, _lack(held, due, name))}


def _lack(held: Mapping[str, list[int]], due: Mapping[str, int], name: str) -> int:
    return max(0, due[name] - len(held[name]))


def plan(view: View, instance: str, moved: Mapping[int, str] | None = None) -> Plan:
    """The moves that this writer must make: it takes free slots, and gives slots above its share.

    `moved`: the result of `moves(view)`, if it is known already.
    """
    take, give = [], []
    for number, receiver in (moves(view) if moved is None else moved).items():
        slot = view.slots[number]
        holder = view.holder(slot)
        if holder is None and receiver == instance:
            take.append(slot)
        elif holder is not None and holder.instance == instance:
            give.append((slot, receiver))
    return Plan(tuple(take), tuple(give))


@dataclass(frozen=True, slots=True)
class KeyOwner:
    """The writer that owns a key; `address` is the address that the writer gave when it joined, if any."""

    instance: str
    address: str | None


@dataclass(frozen=True, slots=True)
class ShardedWriterStatistics:
    """A moment of a writer that shares a stream. The last six count since it was opened.

    `postponed`: slots that it should give away, with a write that takes longer than DRAIN. `refused`: writes that the
    fence refused because the slot had moved. `joined` is above 1 if other writers have expelled it.
    """

    owned: int
    members: int
    in_flight: int
    draining: int
    postponed: int
    joined: int
    taken: int
    given: int
    expelled: int
    writes: int
    refused: int


class Holdings:
    """The slots of one writer, as it knows them. `term` is that of its membership, None while it is not a member."""

    def __init__(self, stream: str, instance: str, ttl: float) -> None:
        self.stream = stream
        self.instance = instance
        self.view = View()
        self.term: int | None = None
        self.counts: Counter[str] = Counter()
        self._ttl = ttl
        self._trusted_until = float("-inf")
        self._moves: dict[int, str] = {}
        self._in_flight: Counter[int] = Counter()
        self._draining: dict[int, float] = {}  # since when
        self._postponed: dict[int, float] = {}  # until when
        self._doubted: dict[int, int] = {}  # the term that the fence refused

    def saw(self, view: View) -> None:
        """Use a new view. If this writer is not a member in it, it owns nothing."""
        if view.version != self.view.version or view.slots is not self.view.slots:
            self._moves = moves(view)
        self.view = view
        member = view.members.get(self.instance)
        if self.term is not None and (member is None or member.term != self.term):
            self.lost()

    def joined(self, term: int, sent_at: float) -> None:
        """This writer is a member since the statement that was sent at that time. Earlier views are dropped."""
        self.view = View()
        self._moves = {}
        self._doubted = {}
        self.term = term
        self.counts["joined"] += 1
        self.alive(sent_at)

    def alive(self, sent_at: float) -> None:
        """A beat that was sent at `sent_at` has arrived: no other writer expels this one for `ttl` seconds."""
        self._trusted_until = sent_at + self._ttl * TRUST

    def lost(self) -> None:
        """This writer is not a member any more."""
        self.term = None
        self._trusted_until = float("-inf")
        self._draining.clear()
        self._postponed.clear()

    def moved(self, slots: Iterable[Slot], why: str) -> None:
        """Slots that this writer has just taken or given (`why`), with their new terms."""
        moved = list(slots)
        self.counts[why] += len(moved)
        self.saw(View(self.view.members, self.view.replaced(moved), self.view.version))
        for slot in moved:
            self._draining.pop(slot.number, None)
            self._postponed.pop(slot.number, None)

    def begin(self, key: str, now: float) -> Slot | None:
        """Begin a write of the key; returns its slot. None if this writer does not have it now, or is giving it
        away.
        """
        slot = self._slot(key)
        if slot is None or not self._owned(slot, now) or slot.number in self._draining:
            return None
        self._in_flight[slot.number] += 1
        return slot

    def end(self, slot: Slot) -> bool:
        """End a write; true if the slot can be given away now."""
        self._in_flight[slot.number] -= 1
        if self._in_flight[slot.number]:
            return False
        del self._in_flight[slot.number]
        return slot.number in self._draining

    def doubt(self, slot: Slot) -> None:
        """The fence has refused a write under this slot's term: the slot is not ours, even if the view shows that."""
        self.counts["refused"] += 1
        self._doubted[slot.number] = slot.term

    def is_ready(self, key: str, now: float) -> bool:
        """Whether a write of the key can begin."""
        slot = self._slot(key)
        return slot is not None and self._owned(slot, now) and slot.number not in self._draining

    def is_moving(self, key: str) -> bool:
        """Whether the slot may soon change hands, so that waiting makes sense. Otherwise go to the owner."""
        slot = self._slot(key)
        holder = None if slot is None else self.view.holder(slot)
        if slot is None or holder is None or holder.instance == self.instance:
            return True
        return self._moves.get(slot.number) == self.instance

    def owner(self, key: str) -> KeyOwner | None:
        """The owner of the key at the last look, or None."""
        slot = self._slot(key)
        holder = None if slot is None else self.view.holder(slot)
        return None if holder is None else KeyOwner(holder.instance, holder.address)

    def term_of(self, key: str) -> int | None:
        """The term under which this writer has the key's slot, as far as it knows, or None."""
        slot = self._slot(key)
        return slot.term if slot is not None and self._is_ours(slot) else None

    def refusal(self, key: str) -> NotOwner:
        """The error for a write of a key that another writer owns, or that has no owner at this moment."""
        owner = self.owner(key)
        if owner is None or owner.instance == self.instance:
            whose = "changes hands at this moment: try again, or wait for it with wait="
        else:
            where = f" at {owner.address}" if owner.address else ""
            whose = f"belongs to writer {owner.instance}{where}: send it there"
        error = NotOwner(f"key {key[:100]!r} of stream {self.stream} {whose}.", key=key)
        if owner is not None and owner.instance != self.instance:
            error.owner, error.address = owner.instance, owner.address
        return error

    def plan(self) -> Plan:
        """The slots that this writer must take and give, as far as it knows."""
        return plan(self.view, self.instance, self._moves)

    def drained(self, now: float) -> list[tuple[Slot, str]]:
        """The slots to give away that have no write in flight, with their receivers.

        In the other slots to give away no new write begins for DRAIN seconds. After that they are left for a while.
        """
        self._postponed = {number: until for number, until in self._postponed.items() if until > now}
        give = [(slot, receiver) for slot, receiver in self.plan().give if slot.number not in self._postponed]
        self._draining = {slot.number: self._draining.get(slot.number, now) for slot, _ in give}
        for number, since in list(self._draining.items()):
            if now - since > DRAIN:
                del self._draining[number]
                self._postponed[number] = now + POSTPONE
        return [pair for pair in give if pair[0].number in self._draining and not self._in_flight[pair[0].number]]

    def statistics(self) -> ShardedWriterStatistics:
        """Counts, as one frozen value."""
        return ShardedWriterStatistics(
            owned=sum(map(self._is_ours, self.view.slots)),
            members=len(self.view.members),
            in_flight=self._in_flight.total(),
            draining=len(self._draining),
            postponed=len(self._postponed),
            joined=self.counts["joined"],
            taken=self.counts["taken"],
            given=self.counts["given"],
            expelled=self.counts["expelled"],
            writes=self.counts["writes"],
            refused=self.counts["refused"],
        )

    def _slot(self, key: str) -> Slot | None:
        return self.view.slots[slot_of(key, len(self.view.slots))] if self.view.slots else None

    def _is_ours(self, slot: Slot) -> bool:
        return slot.owner == self.instance and self.term is not None and slot.term > self.term

    def _owned(self, slot: Slot, now: float) -> bool:
        return self._is_ours(slot) and now < self._trusted_until and self._doubted.get(slot.number) != slot.term
