"""The intervals of what a daemon does for Redis, and the bounds of what it keeps for it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RedisIntervals:
    """Seconds, where nothing else is said."""

    ttl: float = 10.0  # the role of the publisher passes on when its beat has not changed for so long
    look: float = 1.0  # between two looks at the role, and at the list of streams
    renew: float = 2.5  # between two beats of the publisher
    sync: float = 2.0  # between two messages with all positions of a stream; followers give up after ten seconds
    answers: float = 0.1  # between two answers to REPLICATE: one answer is for all requests meanwhile
    snapshot: float = 1.0  # between two notes of published positions; a take-over repeats at least so much
    give_up: float = 10.0  # for which publishing fails before another daemon may try
    retry: float = 0.2  # before the second try to connect; doubles up to `longest_retry`
    longest_retry: float = 5.0
    answer: float = 5.0  # for an answer of Redis
    silence: float = 15.0  # without any message or PONG, after which a subscription counts as lost
    waiting_bytes: int = 32 << 20  # of rows that wait for Redis; if more do, they are read again when it takes them
