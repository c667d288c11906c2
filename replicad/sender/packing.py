"""Takes facts and updates out of queues for the next transaction, and remembers which of them are suspects. No I/O.

A transaction that was refused holds at least one suspect. Its items are sent again in smaller transactions until the
one that is refused has a single item. Items that fit elsewhere go through meanwhile (docs/sender.md, Refusals).
"""

from __future__ import annotations

import sys
from collections import deque
from dataclasses import dataclass

from replicad.sender.items import Edu, Order, Pdu, Transaction


@dataclass(slots=True)
class Suspects:
    """The items of a transaction that was refused: facts up to `upto` and stored updates up to `number`.

    They are sent `most` at a time; updates and facts apart.
    """

    upto: Order
    number: int
    most: int

    @classmethod
    def of(cls, refused: Transaction, units: int) -> Suspects:
        """Those of a transaction with so many facts and updates; it is halved."""
        return cls(refused.upto, max(refused.edu_numbers, default=0), max(1, units // 2))

    def take(self, pdus: deque[Pdu], edus: deque[Edu], room: int) -> tuple[list[Pdu], list[Edu]]:
        """Take the next suspects out of the queues; nothing if there are none left."""
        found = take_edus(edus, self.most, room, upto=self.number)
        return ([], found) if found else (take_pdus(pdus, self.most, room, upto=self.upto), [])


def take_pdus(queue: deque[Pdu], most: int, room: int, upto: Order | None = None) -> list[Pdu]:
    """The oldest facts that fit, `most` at most. Facts that replace one fact count as one and stay together."""
    taken: list[Pdu] = []
    while queue and most > 0 and (upto is None or queue[0].order <= upto):
        order, count, size = queue[0].order, 0, 0
        for pdu in queue:
            if pdu.order != order:
                break
            count, size = count + 1, size + len(pdu.body)
        if taken and (count > most or size > room):
            break
        for _ in range(count):
            taken.append(queue.popleft())
        most -= count if upto is None else 1
        room -= size
    return taken


def take_edus(queue: deque[Edu], most: int, room: int, upto: int) -> list[Edu]:
    """The oldest stored updates that fit, `most` at most, with numbers up to `upto`."""
    taken: list[Edu] = []
    while queue and len(taken) < most and (queue[0].number or 0) <= upto:
        if taken and len(queue[0].body) > room:
            break
        room -= len(queue[0].body)
        taken.append(queue.popleft())
    return taken


def take_one(pdus: deque[Pdu], edus: deque[Edu], *, updates_first: bool) -> tuple[list[Pdu], list[Edu]]:
    """The oldest fact, or the oldest stored update: whichever is to come first, if there is one."""
    if edus and (updates_first or not pdus):
        return [], [edus.popleft()]
    return take_pdus(pdus, 1, 0, upto=Order(sys.maxsize, 0)), []


def take_updates(stored: deque[Edu], droppable: dict[object, Edu], most: int, room: int, *, alone: bool) -> list[Edu]:
    """The oldest updates that fit, `most` at most; those that may not be dropped come first.

    `alone`: there is nothing else in the transaction, so that the first may be larger than `room`.
    """
    taken: list[Edu] = []
    while len(taken) < most and (stored or droppable):
        edu = stored[0] if stored else next(iter(droppable.values()))
        if len(edu.body) > room and (taken or not alone):
            break
        room -= len(edu.body)
        taken.append(edu)
        if stored:
            stored.popleft()
        else:
            droppable.pop(next(iter(droppable)))
    return taken
