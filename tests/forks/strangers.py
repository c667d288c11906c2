"""Clients that lie and clients that never read. Those that are compared must notice nothing of them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import suppress

import trio

from tests.fuzz.hostile import kinds, lines

from .holder import Address

LIARS = 6
LINES = 40  # of each, at most
STUCK = 4
# What a client may say of others: presence and acknowledgements that are taken as true are no lie to be found out.
TRUSTED = ("USER_SYNC", "CLEAR_USER_SYNC", "USER_IP", "FEDERATION_ACK", "REMOTE_SERVER_UP")
LIES = [kind.NAME for kind in kinds() if kind.NAME not in TRUSTED]
_PATIENCE = 2.0  # seconds in which a daemon may take what a liar sends
_BROKEN = (OSError, trio.BrokenResourceError, trio.ClosedResourceError)


async def lie(place: Address, streams: Sequence[str], rng: random.Random) -> None:
    """Some clients that send lines of every command with arguments that nobody expects, about the streams that are
    there: tokens ahead, ACKs of what was never sent, rows of their own. Some of them end in the middle of a line.
    """
    async with trio.open_nursery() as nursery:
        for _ in range(LIARS):
            nursery.start_soon(_lie, place, streams, random.Random(rng.random()))


async def _lie(place: Address, streams: Sequence[str], rng: random.Random) -> None:
    hostile = lines(rng.getrandbits(32), streams, LIES)
    with suppress(*_BROKEN), trio.move_on_after(_PATIENCE):
        async with await trio.open_tcp_stream(*place) as link:
            for _ in range(rng.randrange(1, LINES)):
                line = next(hostile) if rng.random() < 0.5 else _about(rng.choice(streams), rng)
                await link.send_all(line.encode("utf-8", "surrogatepass") + b"\n")
                with trio.move_on_after(0.01):
                    await link.receive_some(4096)
            await link.send_all(b"REPLICATE " + rng.choice(streams).encode())


def _about(stream: str, rng: random.Random) -> str:
    """A lie about a stream that there is."""
    token = rng.choice(("9" * 18, "-5", "0", f"{rng.getrandbits(64):x}!7", "3~1.99999999", "ffff!0~0.0"))
    return rng.choice(
        (
            f"REPLICATE {stream} {token}",
            f"REPLICATE {stream} {token} linear",
            f'RDATA {stream} w1 {rng.randrange(1 << 40)} [1,"lie"]',
            f"POSITION {stream} w1 0 {1 << 50}",
            f"WRITERS {stream} ffff w1=1",
        )
    )


class Stuck:
    """Clients that ask for everything and read nothing, until they are closed."""

    def __init__(self) -> None:
        self._links: list[trio.SocketStream] = []

    async def join(self, place: Address, streams: Sequence[str]) -> None:
        """Some more of them."""
        for _ in range(STUCK):
            with suppress(*_BROKEN):
                link = await trio.open_tcp_stream(*place)
                self._links.append(link)
                await link.send_all(b"".join(b"REPLICATE %s EARLIEST\n" % name.encode() for name in streams))

    async def close(self) -> None:
        """All of them go."""
        for link in self._links:
            await trio.aclose_forcefully(link)
        self._links.clear()
