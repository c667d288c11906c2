"""Reads the long lists of ACK and PARK in pieces, so that one line does not hold the event loop."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from replicad.protocol.integer_list import pieces_of
from replicad.tubes.commands import Ack
from replicad.tubes.serving.books import PodStore

GiveWay = Callable[[], Awaitable[None]]  # waits for the next turn

ACKED_AT_ONCE = 10_000  # listed pods in one statement: a few milliseconds


async def ack_listed(pods: PodStore, command: Ack, give_way: GiveWay) -> int:
    """Remove the listed pods; returns how many there were. The first piece shows whether the lease is held.

    Raises:
        LeaseLost: the term does not cover the partition; nothing was removed.
        RemoteProtocolError: a part of the list is no number. Pods before it were removed.
    """
    removed = 0
    most = 0
    listed: list[int] = []
    for piece in pieces_of(command.seqs):
        if most:
            await give_way()
        listed += piece
        if len(listed) > most:
            removed += await pods.ack(command.tube, command.part, command.term, listed)
            most, listed = ACKED_AT_ONCE, []
    if listed:
        removed += await pods.ack(command.tube, command.part, command.term, listed)
    return removed


async def read_list(numbers: Sequence[int], give_way: GiveWay) -> tuple[int, ...]:
    """All numbers of a list. Raises RemoteProtocolError."""
    listed: list[int] = []
    for piece in pieces_of(numbers):
        if listed:
            await give_way()
        listed += piece
    return tuple(listed)
