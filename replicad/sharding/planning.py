"""Decides which writer should have which slot. Every writer computes the same from the same view. Pure.

Every writer computes the plan from the view that it saw last, and does its own part. A view may be old. So each step
names the term under which the slot was seen, and a step from an old view does nothing. When all writers have the same
view, each step leaves one step less to do, and no slot moves without need.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice

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
