"""Delays clients that guess secrets. It counts wrong guesses by address and by the name of the client in the guess.

Existing and missing names are delayed alike, so the pauses do not reveal them. For each address there are SLOTS
for names, so that one address can fill neither the table nor have a pause forgotten by guessing under other names.
A wrong secret doubles the pause before the next try of the same address for the same client. The tries of several
connections wait for each other, and a right secret waits too: so a guesser learns nothing from a quick answer. A right
secret ends the pauses of its client at that address, and of no other.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b

import trio

from replicad.config.access import parse_ip

SLOTS = 256  # for names of one address; two names in one slot are delayed together


@dataclass(frozen=True, slots=True)
class GuessPace:
    """The pauses in seconds, and the bound of the table."""

    first: float = 0.25  # after the first wrong secret; doubles up to `longest`
    longest: float = 8.0
    patience: float = 8.0  # a try that would have to wait for longer is refused at once
    addresses: int = 10_000  # in the table, about 200 bytes each; one more removes the one whose last guess is oldest


@dataclass(slots=True)
class _Known:
    wrong: int
    next_try: float


class Guesses:
    """The table of wrong guesses. `now` is a monotonic clock."""

    def __init__(self, pace: GuessPace = GuessPace(), now: Callable[[], float] = trio.current_time) -> None:
        self._pace = pace
        self._now = now
        self._key = secrets.token_bytes(16)  # no client can choose a name that shares the slot of another
        self._known: OrderedDict[tuple[str, int], _Known] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def reserve(self, address: str, client: str) -> float | None:
        """Reserve the next try: how many seconds it has to wait. None: too many tries wait already; refuse it.

        The try counts as wrong until `succeeded` is called.
        """
        key = (_place(address), self._slot(client))
        known = self._known.pop(key, None) or _Known(0, 0.0)
        self._known[key] = known
        if len(self._known) > self._pace.addresses:
            self._known.popitem(last=False)
        now = self._now()
        start = max(now, known.next_try)
        if start - now > self._pace.patience:
            return None
        known.next_try = start + min(self._pace.first * 2.0 ** min(known.wrong, 30), self._pace.longest)
        known.wrong += 1
        return start - now

    def succeeded(self, address: str, client: str) -> None:
        """Forget the wrong guesses: who knows the secret has nothing more to guess."""
        self._known.pop((_place(address), self._slot(client)), None)

    def _slot(self, client: str) -> int:
        found = blake2b(client.encode("utf-8", "surrogateescape"), digest_size=8, key=self._key).digest()
        return int.from_bytes(found) % SLOTS


def _place(address: str) -> str:
    """The address, or the network of 64 bits of an IPv6 address: one machine may have all addresses in it."""
    found = parse_ip(address)
    if found is None:
        return address
    return str(found) if found.version == 4 else found.exploded[:19]
