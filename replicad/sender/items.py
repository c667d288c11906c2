"""The items that are delivered: facts (PDUs), updates (EDUs), transactions of them, and the memory that they take.

Values only. A body is unchanged JSON text, and is not parsed here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

MAX_PDUS = 50  # in a transaction, as the Matrix specification says (server-server API, /send)
MAX_EDUS = 100  # in a transaction; the same page

_OVERHEAD = 200  # bytes of the objects around a body, roughly


class Order(NamedTuple):
    """A place in a stream of facts: the token, and which of the rows that share it (0 where there is one only)."""

    token: int
    part: int


START = Order(0, 0)  # before the first fact; tokens are above 0


@dataclass(slots=True, eq=False)
class Pdu:
    """A fact. Destinations share the object; `holders` counts their queues. `room` None: nothing ever supersedes it.

    `substituted`: during catch-up the room's latest facts stand in for this one; the body is then not what the store
    has under `order`. Several with the same order are delivered together.
    """

    order: Order
    room: str | None
    body: str
    substituted: bool = False
    holders: int = 0

    @property
    def size(self) -> int:
        """Bytes that it takes in memory, roughly."""
        return len(self.body) + _OVERHEAD


@dataclass(slots=True, eq=False)
class Edu:
    """An update. A later one with the same `key` takes its place.

    `number` is its place in the store; None: it is not stored and may be dropped.
    """

    body: str
    key: str | None = None
    number: int | None = None
    holders: int = 0

    @property
    def droppable(self) -> bool:
        """True if it is only in memory."""
        return self.number is None

    @property
    def size(self) -> int:
        """Bytes that it takes in memory, roughly."""
        return len(self.body) + len(self.key or "") + _OVERHEAD


class Memory:
    """Counts the bytes of the bodies in all queues together; a body that many queues hold counts once."""

    def __init__(self, limit: int) -> None:
        """`limit` in bytes."""
        self.limit = limit
        self.held = 0

    @property
    def full(self) -> bool:
        """True when no queue should take more."""
        return self.held >= self.limit

    def hold(self, item: Pdu | Edu) -> None:
        """One more queue has it."""
        if item.holders == 0:
            self.held += item.size
        item.holders += 1

    def let_go(self, item: Pdu | Edu) -> None:
        """One queue less has it."""
        item.holders -= 1
        if item.holders == 0:
            self.held -= item.size


class Aside(NamedTuple):
    """What a destination refuses, and for how long it may be only a suspect: facts above those set aside before, up to
    `upto`, and the stored updates of these numbers.
    """

    upto: Order
    numbers: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Transaction:
    """The content of one request. Made once, stored, and then repeated unchanged until it is accepted or refused.

    `upto` is how far the destination has got once it took this; `ts` is when it was made, in ms since 1970.
    `edu_numbers` are the places in the store of the updates that are kept there. `aside`: the items that were refused
    before; they are parked if this transaction is accepted. `refused`: the transaction that is repeated if none is
    accepted.
    """

    id: str
    serial: int
    ts: int
    upto: Order
    pdus: tuple[str, ...]
    edus: tuple[str, ...]
    edu_numbers: tuple[int, ...] = ()
    substituted: bool = False
    aside: tuple[Aside, ...] = ()
    refused: Transaction | None = None


def make_transaction(
    destination: str,
    *,
    source: str = "",
    serial: int,
    ts: int,
    upto: Order,
    pdus: Sequence[str] = (),
    edus: Sequence[str] = (),
    edu_numbers: Sequence[int] = (),
    substituted: bool = False,
) -> Transaction:
    """A transaction whose id is computed from its content: 32 hexadecimal digits; equal content, equal id.

    The serial distinguishes two intended transactions of equal content (typing, not typing, typing); the source (see
    SenderStore) distinguishes the transactions of two senders.
    """
    head = (destination, source, serial, ts, upto.token, upto.part, len(pdus))
    texts = [text.encode() for text in (*map(str, head), *pdus, *edus)]
    content = b"".join([part for text in texts for part in (len(text).to_bytes(8, "big"), text)])
    made = hashlib.blake2b(content, digest_size=16).hexdigest()
    return Transaction(made, serial, ts, upto, tuple(pdus), tuple(edus), tuple(edu_numbers), substituted)


@dataclass(frozen=True, slots=True)
class DestinationState:
    """The stored state of a destination when it is loaded. `retry_in` in seconds; None: it does not back off."""

    success: Order = START
    serial: int = 0
    failures: int = 0
    retry_in: float | None = None
    catching_up: bool = False
    outstanding: bool = False  # the store has something for it


@dataclass(frozen=True, slots=True)
class WantedItems:
    """What to read from the store: facts above `after`, oldest first; updates, oldest first; after a `collapse`."""

    pdus: bool
    edus: bool
    transaction: bool
    collapse: bool
    after: Order = START


@dataclass(frozen=True, slots=True)
class OutstandingPage:
    """Items read from the store. With a `transaction` to repeat there is nothing else; `more_...`: more is stored."""

    pdus: tuple[Pdu, ...] = ()
    edus: tuple[Edu, ...] = ()
    more_pdus: bool = False
    more_edus: bool = False
    transaction: Transaction | None = None
