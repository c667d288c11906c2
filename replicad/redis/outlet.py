"""Publishes messages through one connection to Redis, as the holder of a term."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import sha1
from pathlib import Path

import hiredis

from replicad.errors import RedisRefused
from replicad.redis.link import RedisLink, Word, refused
from replicad.redis.messages import Message, key_of, stream_channel

SCRIPT = Path(__file__).with_name("publishing.lua").read_text(encoding="utf-8")
_SHA = sha1(SCRIPT.encode(), usedforsecurity=False).hexdigest()  # as Redis names it
KEPT = 60  # seconds for which Redis keeps the publisher's term after the last line: far more than two syncs


class RedisOutlet:
    """Publishes with a term; the first connection of a term with a higher one makes this one fail."""

    def __init__(self, link: RedisLink, server: str, term: int, address: str) -> None:
        """`address`: of our daemon, for followers that miss rows; may be empty."""
        self._link = link
        self._server = server
        self._head: tuple[Word, ...] = (1, key_of(server), term, KEPT, address, server)
        self._loaded = False

    async def publish(self, steps: Iterable[tuple[str, Sequence[Message]]]) -> int:
        """Publish steps of streams, in this order; returns the number of lines.

        Raises:
            RedisUnavailable: the connection was lost; an unknown number of lines was published.
            RedisRefused: Redis refuses it, or another publisher has begun.
        """
        lines = 0
        for stream, step in steps:
            if step:
                await self._publish(stream, step)  # one at a time: after one that fails, the next would leave a gap
                lines += len(step)
        return lines

    async def _publish(self, stream: str, step: Sequence[Message]) -> None:
        if not self._loaded:
            await self._link.call("SCRIPT", "LOAD", SCRIPT)
            self._loaded = True
        words: list[Word] = []
        for message in step:
            words += (1 if not message.own else 2 if not message.common else 3, message.line)
        channel = stream_channel(self._server, stream)
        answer = (await self._link.call_all([("EVALSHA", _SHA, *self._head, channel, *words)]))[0]
        if isinstance(answer, hiredis.ReplyError):
            raise self._explained(answer)

    async def announce(self) -> None:
        """Keep our term and address in Redis, which also shows whether it answers. Raises as `publish`."""
        await self._publish("", ())

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
