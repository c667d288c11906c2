"""Which sender serves a destination: highest random weight. One sender more moves only that sender's share."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence


def weight(sender: str, destination: str) -> bytes:
    """The weight of a sender for a destination; the same in every process and version."""
    digest = hashlib.blake2b(digest_size=8, key=hashlib.blake2b(sender.encode(), digest_size=16).digest())
    digest.update(destination.encode())
    return digest.digest()


def owner(senders: Sequence[str], destination: str) -> str:
    """The one of `senders` (at least one) that serves the destination. Their order does not matter."""
    return max(senders, key=lambda sender: (weight(sender, destination), sender))


def ownership(me: str, senders: Sequence[str]) -> Callable[[str], bool]:
    """A function that says whether `me` serves a destination."""
    if len(senders) == 1:
        return lambda _destination: True
    return lambda destination: owner(senders, destination) == me
