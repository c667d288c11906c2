"""One connection of a follower that goes by TCP to a daemon first, and by Redis from then on.

To the follower it is a connection like any other (`DaemonTarget.dial`): lost connections, gaps, tokens and forks are
handled in the same way. Between the two is a pair of sockets, so a follower that reads slowly delays reading from Redis
and from the daemon; only messages that `Junction` keeps before it joins are queued.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress

import structlog
import trio

from replicad.errors import ConnectionLost, ReplicadError
from replicad.groups import leaves
from replicad.nurseries import open_plain_nursery
from replicad.redis.junction import Junction, Missed
from replicad.redis.link import RedisLink
from replicad.redis.messages import stream_channel
from replicad.retry import Backoff
from replicad.streams.chunks import MAX_ROW

SILENCE = 10.0  # seconds without a sync, after which rows are asked for by TCP again: several of them
READ_BYTES = 1 << 16
_INTRODUCTION = (b"NAME ", b"AUTH ")
_BROKEN = (trio.BrokenResourceError, trio.ClosedResourceError)

log = structlog.get_logger()


class Switch:
    """One connection; `run` it until it ends."""

    def __init__(
        self,
        follower: trio.abc.Stream,
        daemon: trio.abc.Stream,
        server: str,
        *,
        connect: Callable[[], Awaitable[trio.abc.Stream]],
        connect_redis: Callable[[], Awaitable[RedisLink]],
        silence: float = SILENCE,
        named: bool = False,
    ) -> None:
        """`follower`: the far end of its connection. `daemon`: connected; `connect` makes another one. `named`: Redis
        has named it, and may be wrong.
        """
        self._follower = follower
        self._daemon: trio.abc.Stream | None = daemon
        self._server = server
        self._connect = connect
        self._connect_redis = connect_redis
        self._silence = silence
        self._named = named
        self._junction = Junction()
        self._introduction: list[bytes] = []
        self._subscribed = trio.Event()  # there is a stream whose channel is of use
        self._sending = trio.Lock()
        self._nursery: trio.Nursery | None = None
        self._leaving = trio.CancelScope()  # of the connection to the daemon
        self._again = False  # whether it is a later one than the first

    async def run(self) -> None:
        """Until the follower or the daemon closes, or rows were missed. Raises only when cancelled."""
        try:
            async with open_plain_nursery() as nursery:
                self._nursery = nursery
                nursery.start_soon(self._from_redis_forever)
                assert self._daemon is not None
                nursery.start_soon(self._from_daemon, self._daemon, False)
                with suppress(*_BROKEN):
                    await self._from_follower()
        except* Missed as missed:
            log.info("redis_left", server=self._server, reason=str(leaves(missed)[0]))
        except* (ReplicadError, *_BROKEN) as errors:
            log.debug("redis_connection_ends", server=self._server, reason=str(leaves(errors)[0]))
        except* Exception as errors:  # the follower connects again; its program does not end
            log.exception("redis_connection_failed", server=self._server, exc_info=leaves(errors)[0])
        finally:
            for stream in (self._follower, self._daemon):
                if stream is not None:
                    with trio.CancelScope(shield=True):
                        await trio.aclose_forcefully(stream)

    async def _give(self, lines: list[bytes]) -> None:
        if lines:
            await self._follower.send_all(b"\n".join(lines) + b"\n")

    async def _from_follower(self) -> None:
        rest = b""
        while data := await self._follower.receive_some(READ_BYTES):
            *lines, rest = (rest + bytes(data)).split(b"\n")
            for line in lines:
                self._junction.from_follower(line)
                if line.startswith(_INTRODUCTION):
                    self._introduction.append(line)
                if self._junction.wanted:
                    self._subscribed.set()
                if self._daemon is None and not line.startswith(b"PING"):
                    await self._reconnect()
                if self._daemon is not None:
                    # While a PING is sent the connection may be given up; not while an answer is awaited.
                    with suppress(*(_BROKEN if line.startswith(b"PING") else ())):
                        await self._daemon.send_all(line + b"\n")

    async def _reconnect(self) -> None:
        """Connect to the daemon again, for a request of a follower whose streams come by Redis."""
        self._daemon = await self._connect()
        self._leaving, self._again = trio.CancelScope(), True
        await self._daemon.send_all(b"".join(line + b"\n" for line in self._introduction))
        assert self._nursery is not None
        self._nursery.start_soon(self._from_daemon, self._daemon, True)

    async def _from_daemon(self, daemon: trio.abc.Stream, again: bool) -> None:
        """Pass lines on until the streams come by Redis. `again`: not the first connection, so SERVER is not news."""
        rest, begun = b"", not self._named
        try:
            with self._leaving:
                while data := await daemon.receive_some(READ_BYTES):
                    *lines, rest = (rest + bytes(data)).split(b"\n")
                    if len(rest) > MAX_ROW:
                        raise ConnectionLost(f"the daemon sent a line of over {MAX_ROW} bytes")
                    if not begun and (lines or rest):
                        begun = bool(lines)
                        self._check_first(lines[0] if lines else rest, whole=begun)
                    async with self._sending:
                        found = self._junction.from_daemon(lines)
                        if again:
                            found = [line for line in found if not line.startswith(b"SERVER ")]
                        await self._give(found)
                        await self._try_join()
        finally:
            self._daemon = None
            with trio.CancelScope(shield=True):
                await trio.aclose_forcefully(daemon)
        if self._junction.needs_tcp:
            raise ConnectionLost("the daemon closed the connection")

    def _check_first(self, line: bytes, *, whole: bool) -> None:
        """Raise ConnectionLost if no daemon of this server begins so. The follower would take it for final."""
        wanted = f"SERVER {self._server}".encode()
        if line.startswith(b"ERROR ") or (line.removesuffix(b"\r") == wanted if whole else wanted.startswith(line)):
            return
        raise ConnectionLost(f"what Redis names is no daemon of {self._server}: it says {line[:60]!a}")

    async def _try_join(self) -> None:
        """Join the streams that can be joined. After that the first connection to the daemon ends; a later connection
        is kept.
        """
        before = len(self._junction.joined)
        await self._give(self._junction.try_join())
        joined = self._junction.joined
        if len(joined) > before:
            log.info("redis_joined", server=self._server, streams=len(joined))
        if joined and not self._junction.needs_tcp and not self._again:
            self._leaving.cancel()

    # --- Redis ---

    async def _from_redis_forever(self) -> None:
        backoff = Backoff()
        await self._subscribed.wait()
        while True:
            try:
                await self._from_redis(backoff)
            except ReplicadError as error:
                log.info("redis_not_followed", server=self._server, reason=str(error))
            self._junction.lost_redis()
            await trio.sleep(backoff.next_delay())

    def _channels(self) -> dict[bytes, str]:
        """The streams whose channels are of use, by channel."""
        return {stream_channel(self._server, name).encode(): name for name in self._junction.wanted}

    async def _from_redis(self, backoff: Backoff) -> None:
        """Follow the channels of the streams. Raises Missed, and ReplicadError when the connection is lost."""
        link = await self._connect_redis()
        try:
            channels = self._channels()
            await link.subscribe(map(bytes.decode, channels))
            backoff.reset()
            while channels.keys() <= (wanted := self._channels()).keys():
                if more := wanted.keys() - channels.keys():  # a follower asks for one stream after another
                    await link.subscribe_more(map(bytes.decode, more))
                    channels = wanted
                with trio.move_on_after(self._silence) as scope:
                    messages = await link.messages()
                if scope.cancelled_caught:
                    raise ConnectionLost(f"nothing came from {link.address} for {self._silence:g} s")
                async with self._sending:
                    now = trio.current_time()
                    found: list[bytes] = []
                    for channel, line in messages:
                        if (name := channels.get(channel)) is not None:
                            found += self._junction.from_redis(name, line, now)
                    if found:
                        await self._follower.send_all(_joined(found) + b"\n")
                    if self._junction.silent(now, self._silence):
                        raise Missed(f"no daemon has published to {link.address} for {self._silence:g} s")
                    await self._try_join()
        finally:
            await link.aclose()


def _joined(lines: list[bytes]) -> bytes:
    """Lines of Redis in one piece.

    Raises:
        Missed: a message is no line: the follower would see a fault of the daemon, or several lines.
    """
    whole = b"\n".join(lines)
    if len(whole) > MAX_ROW and max(map(len, lines)) > MAX_ROW:
        raise Missed(f"Redis has a line of over {MAX_ROW} bytes")
    if whole.count(b"\n") != len(lines) - 1 or b"\r" in whole or b"\0" in whole:
        raise Missed("Redis has a line with a line end or a NUL in it")
    if not whole.isascii():
        try:
            whole.decode()
        except UnicodeDecodeError as error:
            raise Missed(f"Redis has a line that is not UTF-8: {whole[error.start : error.start + 20]!a}") from None
    return whole
