"""Publishes messages through one connection to Redis, as the holder of a term."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import sha1
from pathlib import Path

import hiredis

from replicad.errors import RedisRefused
from replicad.redis.link import RedisLink, Word, refused
from replicad.redis.messages import Step, key_of, stream_channel

SCRIPT = Path(__file__).with_name("publishing.lua").read_text(encoding="utf-8")
_SHA = sha1(SCRIPT.encode(), usedforsecurity=False).hexdigest()  # as Redis names it
AHEAD = 8  # steps that are sent before the first of them is confirmed
KEPT = 60  # seconds for which Redis keeps the publisher's term after the last line: far more than two syncs


class RedisOutlet:
    """Publishes with a term; the first connection of a term with a higher one makes this one fail."""

    def __init__(self, link: RedisLink, server: str, term: int, address: str) -> None:
        """`address`: of our daemon, for followers that miss rows; may be empty."""
        self._link = link
        self._server = server
        self._head: tuple[Word, ...] = (1, key_of(server), term, KEPT, address, server)
        self._loaded = False

    async def publish(self, steps: Iterable[tuple[str, Step]]) -> int:
        """Publish steps of streams, in this order; returns the number of lines.

        Raises:
            RedisUnavailable: the connection was lost; an unknown number of lines was published.
            RedisRefused: Redis refuses it, or another publisher has begun.
        """
        some = [(stream, step) for stream, step in steps if step]
        for at in range(0, len(some), AHEAD):
            await self._publish(some[at : at + AHEAD])
        return sum(len(step) // 2 for _, step in some)

    async def _publish(self, steps: Sequence[tuple[str, Step]]) -> None:
        """Publish some steps. If a step is refused and a later step is not, followers find the gap by the position
        before the rows of each step; and all of them are published again.
        """
        if not self._loaded:
            await self._link.call("SCRIPT", "LOAD", SCRIPT)
            self._loaded = True
        commands: list[tuple[Word, ...]] = [
            ("EVALSHA", _SHA, *self._head, stream_channel(self._server, stream), *step) for stream, step in steps
        ]
        for answer in await self._link.call_all(commands):
            if isinstance(answer, hiredis.ReplyError):
                raise self._explained(answer)

    async def announce(self) -> None:
        """Keep our term and address in Redis, which also shows whether it answers. Raises as `publish`."""
        await self._publish([("", [])])

    async def aclose(self) -> None:
        """Close the connection; safe to repeat."""
        await self._link.aclose()

    def _explained(self, answer: hiredis.ReplyError) -> Exception:
        if str(answer).startswith("STALE"):
            return RedisRefused(
                f"another daemon publishes {self._server} to {self._link.address} ({answer}). If it belongs to another "
                f"database, give one of the two another --server-name; else this ends within {KEPT} s"
            )
        return refused(self._link.address, answer)
