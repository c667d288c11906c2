"""Which writer should have which slot: decided from one view, by everybody alike. Pure: no connection, no clock.

Every writer makes the plan for itself, from what it has seen last, and does its own part of it. Views may be old: each
step is tied to the term under which a slot was seen, so that a step from an old view does nothing, and never harm. Once
all see the same, every step that is done leaves one less to do, and no slot moves that need not.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice

_HASHED = 4  # bytes of the digest that make the slot; sharding/sql/100_writer_slot_of.sql does the same


def slot_of(key: str, slots: int) -> int:
    """The slot of a key: the first four bytes of the SHA-256 of its UTF-8, big-endian, modulo `slots`."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:_HASHED], "big") % slots


@dataclass(frozen=True, slots=True)
class Slot:
    """One slot as it stands in Postgres: whom it was given to last, and under which term."""

    number: int
    owner: str | None
    term: int


@dataclass(frozen=True, slots=True)
class Member:
    """One writer. `term` is that of its membership, `beat` its last sign of life, `ttl` in seconds."""

    instance: str
    term: int
    beat: int = 0
    ttl: float = 0.0
    address: str | None = None
    leaving: bool = False


@dataclass(frozen=True, slots=True)
class View:
    """Members by name, and all slots by number, at one moment. `version` tells a later moment by a larger number."""

    members: Mapping[str, Member] = field(default_factory=dict)
    slots: tuple[Slot, ...] = ()
    version: int = 0

    def holder(self, slot: Slot) -> Member | None:
        """Whose the slot is; None for nobody's: its owner is gone, or came back after the slot was given."""
        member = None if slot.owner is None else self.members.get(slot.owner)
        return member if member is not None and member.term < slot.term else None

    def replaced(self, changed: Iterable[Slot]) -> tuple[Slot, ...]:
        """The slots with these in place of older ones; one that is known under a later term stays."""
        newer = [slot for slot in changed if slot.term > self.slots[slot.number].term]
        if not newer:
            return self.slots
        slots = list(self.slots)
        for slot in newer:
            slots[slot.number] = slot
        return tuple(slots)


@dataclass(frozen=True, slots=True)
class Plan:
    """What one writer has to do: slots to take, and slots to give with their receivers."""

    take: tuple[Slot, ...] = ()
    give: tuple[tuple[Slot, str], ...] = ()


def moves(view: View) -> dict[int, str]:
    """The slots that are not where they should be, and who should have them.

    Everybody who stays is due the same number, the remainder one more each, to those who have the most already. So no
    more slots move than there are beyond that, and nobody's.
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
    """The part of the moves that is this writer's: it takes what is nobody's, and gives what it has too much of.

    `moved` are the view's moves, where they are known already.
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
