"""What `open_client("redis://...")` needs: connections that come from a daemon first and from Redis afterwards."""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import inf

import anyio
from anyio.abc import ByteStream, SocketStream, TaskGroup

from replicad.client.async_link import connect
from replicad.client.link import DaemonTarget
from replicad.config.settings import Address, parse_server
from replicad.errors import ConnectionLost, RedisUnavailable, ReplicadError, UsageError
from replicad.eventlog import get_logger
from replicad.groups import leaves
from replicad.loops import open_plain_tasks
from replicad.redis.link import RedisLink, open_redis, parse_redis
from replicad.redis.messages import ALIVE, key_of, stream_channel
from replicad.retry import Backoff
from replicad.streams.chunks import MAX_ROW
from replicad.streams.commands import BATCH

# One connection of a follower that goes by TCP to a daemon first, and by Redis from then on.
#
# To the follower it is a connection like any other (`DaemonTarget.dial`): lost connections, gaps, tokens and forks
# are handled in the same way. Between the two is a pair of sockets, so a follower that reads slowly delays reading
# from Redis and from the daemon; only messages that `Junction` keeps before it joins are queued.
#
# `Junction` decides when a follower may switch from TCP to Redis, and which lines it then gets, without I/O. A
# follower subscribes by TCP as always. The junction sees its positions. On the channel of a stream all writers and
# positions are published every few seconds (a *sync*); messages after the sync are kept. As soon as the follower has
# by TCP everything up to a sync of the same generation, it gets the kept messages, and the lines of TCP for this
# stream are dropped: so it misses nothing, and it drops repeated rows as always.
#
# A message that does not continue at the follower's position (a gap, a fork, a new writer) raises `Missed`: then the
# connection ends, and the follower resumes by TCP, with its token.


SILENCE = 10.0  # seconds without a sync, after which rows are asked for by TCP again: several of them
READ_BYTES = 1 << 16
_INTRODUCTION = (b"NAME ", b"AUTH ")
_BROKEN = (anyio.BrokenResourceError, anyio.ClosedResourceError)

log = get_logger(__name__)

MAX_KEPT = 8 << 20  # bytes of lines after a sync, of one stream; beyond it the next sync is waited for
_BATCH = BATCH.encode()
_OWN = (b"NAME ", b"AUTH ", b"PING", b"STREAMS", b"REPLICATE ")  # what a plain follower sends


class Switch:
    """One connection; `run` it until it ends."""

    def __init__(
        self,
        follower: ByteStream,
        daemon: ByteStream,
        server: str,
        *,
        connect: Callable[[], Awaitable[ByteStream]],
        connect_redis: Callable[[], Awaitable[RedisLink]],
        silence: float = SILENCE,
        named: bool = False,
    ) -> None:
        """`follower`: the far end of its connection. `daemon`: connected; `connect` makes another one. `named`: Redis
        has named it, and may be wrong.
        """
        self._follower = follower
        self._daemon: ByteStream | None = daemon
        self._server = server
        self._connect = connect
        self._connect_redis = connect_redis
        self._silence = silence
        self._named = named
        self._junction = Junction()
        self._introduction: list[bytes] = []
        self._subscribed = anyio.Event()  # there is a stream whose channel is of use
        self._sending = anyio.Lock()
        self._tasks: TaskGroup | None = None
        self._leaving = anyio.CancelScope()  # of the connection to the daemon
        self._again = False  # whether it is a later one than the first

    async def run(self) -> None:
        """Until the follower or the daemon closes, or rows were missed. Raises only when cancelled."""
        try:
            async with open_plain_tasks() as tasks:
                self._tasks = tasks
                tasks.start_soon(self._from_redis_forever)
                assert self._daemon is not None
                tasks.start_soon(self._from_daemon, self._daemon, False)
                with suppress(*_BROKEN):
                    await self._from_follower()
        except* Missed as missed:
            log.info("redis_left", server=self._server, reason=str(leaves(missed)[0]))
        except* (ReplicadError, *_BROKEN) as errors:
            log.debug("redis_connection_ends", server=self._server, reason=str(leaves(errors)[0]))
        except* Exception as errors:  # the follower connects again; its program does not end
            log.exception("redis_connection_failed", server=self._server, reason=str(leaves(errors)[0]))
        finally:
            for stream in (self._follower, self._daemon):
                if stream is not None:
                    with anyio.CancelScope(shield=True):
                        await anyio.aclose_forcefully(stream)

    @staticmethod
    async def _some(stream: ByteStream) -> bytes:
        """What came on the stream; empty at its end."""
        try:
            return await stream.receive(READ_BYTES)
        except anyio.EndOfStream:
            return b""

    async def _give(self, lines: list[bytes]) -> None:
        if lines:
            await self._follower.send(b"\n".join(lines) + b"\n")

    async def _from_follower(self) -> None:
        rest = b""
        while data := await self._some(self._follower):
            *lines, rest = (rest + data).split(b"\n")
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
                        await self._daemon.send(line + b"\n")

    async def _reconnect(self) -> None:
        """Connect to the daemon again, for a request of a follower whose streams come by Redis."""
        self._daemon = await self._connect()
        self._leaving, self._again = anyio.CancelScope(), True
        await self._daemon.send(b"".join(line + b"\n" for line in self._introduction))
        assert self._tasks is not None
        self._tasks.start_soon(self._from_daemon, self._daemon, True)

    async def _from_daemon(self, daemon: ByteStream, again: bool) -> None:
        """Pass lines on until the streams come by Redis. `again`: not the first connection, so SERVER is not news."""
        rest, begun = b"", not self._named
        try:
            with self._leaving:
                while data := await self._some(daemon):
                    *lines, rest = (rest + data).split(b"\n")
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
            with anyio.CancelScope(shield=True):
                await anyio.aclose_forcefully(daemon)
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
            await anyio.sleep(backoff.next_delay())

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
                with anyio.move_on_after(self._silence) as scope:
                    messages = await link.messages()
                if scope.cancelled_caught:
                    raise ConnectionLost(f"nothing came from {link.address} for {self._silence:g} s")
                async with self._sending:
                    now = anyio.current_time()
                    found: list[bytes] = []
                    for channel, line in messages:
                        if (name := channels.get(channel)) is not None:
                            found += self._junction.from_redis(name, line, now)
                    if found:
                        await self._follower.send(_joined(found) + b"\n")
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


class Missed(Exception):
    """Redis does not go on where the follower is; the text says why."""


@dataclass(slots=True)
class _Stream:
    """One subscription."""

    name: str
    linear: bool = False
    epoch: bytes = b""  # as WRITERS had it on TCP
    numbers: frozenset[bytes] = frozenset()  # `writer=number`, likewise
    encoded: bytes = field(init=False)  # the name as lines have it
    rows: bytes = field(init=False)  # the begin of every row
    have: dict[bytes, int] = field(default_factory=dict)  # the position of each writer that the follower has
    torn: dict[bytes, int] = field(default_factory=dict)  # the rows of batches that are not complete, by writer
    joined: bool = False
    synced_at: float = float("-inf")
    coming: dict[bytes, int] | None = None  # the positions of a sync that is not complete
    writers: tuple[bytes, frozenset[bytes]] = (b"", frozenset())  # generation and numbers, as the sync has them
    sync: dict[bytes, int] | None = None  # the last complete sync, while not joined
    kept: list[bytes] = field(default_factory=list)  # lines after it
    kept_bytes: int = 0

    def __post_init__(self) -> None:
        self.encoded = self.name.encode()
        self.rows = b"RDATA %s " % self.encoded

    def names(self) -> set[bytes]:
        """The listed writers."""
        return {pair.rpartition(b"=")[0] for pair in self.writers[1]}


class Junction:
    """The subscriptions of one connection of a follower."""

    def __init__(self) -> None:
        self._streams: dict[str, _Stream] = {}
        self._plain = True  # nothing was asked but what a follower of single streams asks
        self._unanswered = 0  # STREAMS

    @property
    def wanted(self) -> list[str]:
        """The streams whose channels are of use."""
        return [one.name for one in self._streams.values() if not one.linear] if self._plain else []

    @property
    def joined(self) -> list[str]:
        """The streams that come by Redis."""
        return [one.name for one in self._streams.values() if one.joined]

    @property
    def needs_tcp(self) -> bool:
        """Whether the connection to the daemon is of use."""
        whole = self._streams and all(one.joined for one in self._streams.values())
        return not whole or not self._plain or self._unanswered > 0

    def silent(self, now: float, limit: float) -> bool:
        """Whether a stream that comes by Redis has had no sync for `limit` seconds."""
        return any(one.joined and now > one.synced_at + limit for one in self._streams.values())

    # --- lines ---

    def from_follower(self, line: bytes) -> None:
        """A line that the follower sends."""
        words = line.split(b" ")
        if line == b"STREAMS":
            self._unanswered += 1
        elif words[0] == b"REPLICATE" and len(words) > 1:
            name = words[1].decode(errors="replace")
            self._streams[name] = _Stream(name, linear=words[-1] == b"linear")
        elif not line.startswith(_OWN):
            self._plain = False

    def from_daemon(self, lines: list[bytes]) -> list[bytes]:
        """Lines of the daemon; returns those for the follower."""
        found: list[bytes] = []
        for line in lines:
            words = line.split(b" ", 4)
            stream = self._streams.get(words[1].decode(errors="replace")) if len(words) > 2 else None
            if words[0] == b"STREAMS":
                self._unanswered -= 1
            if stream is None or words[0] not in (b"RDATA", b"POSITION", b"WRITERS"):
                found.append(line)
            elif not stream.joined:
                _note(stream, words)
                found.append(line)
        return found

    def try_join(self) -> list[bytes]:
        """Join the streams that can be; returns the lines for the follower. Raises Missed."""
        found: list[bytes] = []
        for stream in self._streams.values() if self._plain else ():
            if not stream.joined and _can_join(stream):
                stream.joined = True
                kept, stream.kept, stream.kept_bytes, stream.sync = stream.kept, [], 0, None
                for line in kept:
                    found += self._redis_line(stream, line, stream.synced_at)
        return found

    def from_redis(self, name: str, line: bytes, now: float) -> list[bytes]:
        """A message on the channel of a stream; returns the lines for the follower. Raises Missed."""
        stream = self._streams.get(name)
        if stream is None or stream.linear:
            return []
        try:
            if stream.joined and line.startswith(stream.rows):
                return _row(stream, line)
            return self._redis_line(stream, line, now)
        except ValueError as error:
            raise Missed(f"Redis has a malformed line of stream {name}: {line[:100]!a}") from error

    def _redis_line(self, stream: _Stream, line: bytes, now: float) -> list[bytes]:
        if line == ALIVE:
            stream.synced_at = now
            if stream.joined:
                return [line]
            _forget_sync(stream)
            stream.coming, stream.writers = {}, (b"", frozenset())
            return []
        if stream.joined:
            return self._joined_line(stream, line)
        if stream.coming is not None:
            _sync(stream, line)
        elif stream.sync is not None:
            stream.kept.append(line)
            stream.kept_bytes += len(line)
            if stream.kept_bytes > MAX_KEPT:
                _forget_sync(stream)
        return []

    def lost_redis(self) -> None:
        """The subscription has ended. Raises Missed if a stream came by it."""
        if self.joined:
            raise Missed("the connection to Redis was lost")
        for stream in self._streams.values():
            _forget_sync(stream)
            stream.coming = None

    def _joined_line(self, stream: _Stream, line: bytes) -> list[bytes]:
        if line.startswith(stream.rows):
            return _row(stream, line)
        words = line.split(b" ", 4)
        if len(words) > 1 and words[1] != stream.encoded:
            raise Missed(f"on the channel of stream {stream.name} is a line of another: {line[:100]!a}")
        match words:
            case [b"BATCH", _, writer, rows]:
                if stream.torn.get(writer, 0) != int(rows):
                    raise Missed(f"rows of a batch of stream {stream.name} are missing")
                return []
            case [b"POSITION", _, writer, prev, new]:
                stream.coming = None
                return [line] if _moves(stream, writer, _number(prev), _number(new)) else []
            case [b"WRITERS", _, epoch, *_]:
                if (epoch, _numbers(line)) != (stream.epoch, stream.numbers):
                    raise Missed(f"the writers or the generation of stream {stream.name} have changed")
                return []
        raise Missed(f"Redis says of stream {stream.name}: {line[:200].decode(errors='replace')}")


def _note(stream: _Stream, words: list[bytes]) -> None:
    """What the follower has by TCP after this line."""
    match words:
        case [b"RDATA", _, writer, token, _]:
            if token == _BATCH:
                stream.torn[writer] = stream.torn.get(writer, 0) + 1
            else:
                stream.torn.pop(writer, None)
                stream.have[writer] = max(int(token), stream.have.get(writer, int(token)))
        case [b"POSITION", _, writer, _, new]:
            stream.torn.pop(writer, None)
            stream.have[writer] = int(new)
        case [b"WRITERS", _, epoch, *_]:
            stream.epoch, stream.numbers = epoch, _numbers(b" ".join(words))
            stream.have.clear()  # the POSITION of each writer follows


def _row(stream: _Stream, line: bytes) -> list[bytes]:
    """A row of a stream by Redis. Raises Missed, and ValueError for a text that is no row."""
    _, _, writer, token, _ = line.split(b" ", 4)
    have = stream.have.get(writer)
    if have is None:
        raise Missed(f"stream {stream.name} has a new writer")
    if token == _BATCH:
        stream.torn[writer] = stream.torn.get(writer, 0) + 1
        return [line]
    if stream.torn:
        stream.torn.pop(writer, None)
    number = int(token) if token.isdigit() and len(token) < 19 else _number(token)
    if number > have:
        stream.have[writer] = number
    return [line]


def _number(text: bytes) -> int:
    """A position. Raises ValueError for what a daemon would not write: blanks, underscores, more than 64 bits."""
    found = int(text)
    if b"%d" % found != text or abs(found) >= 1 << 63:
        raise ValueError
    return found


def _numbers(line: bytes) -> frozenset[bytes]:
    return frozenset(line.split(b" ")[3:])


def _can_join(stream: _Stream) -> bool:
    return (
        stream.sync is not None
        and not stream.linear
        and not stream.torn
        and stream.writers == (stream.epoch, stream.numbers)
        and all(stream.have.get(writer, position - 1) >= position for writer, position in stream.sync.items())
    )


def _sync(stream: _Stream, line: bytes) -> None:
    """A line of a sync, while the stream is not joined."""
    assert stream.coming is not None
    words = line.split(b" ", 4)
    match words:
        case [b"WRITERS", _, epoch, *_]:
            stream.writers = (epoch, _numbers(line))
        case [b"POSITION", _, writer, _, new]:
            stream.coming[writer] = int(new)
        case _:
            stream.coming = None
            return
    if stream.coming and stream.coming.keys() == stream.names():
        stream.sync, stream.coming = stream.coming, None
        stream.kept, stream.kept_bytes = [], 0


def _forget_sync(stream: _Stream) -> None:
    stream.sync, stream.kept, stream.kept_bytes = None, [], 0


def _moves(stream: _Stream, writer: bytes, prev: int, new: int) -> bool:
    """Whether a POSITION moves the follower; False if it has that already. Raises Missed."""
    have = stream.have.get(writer)
    if have is None:
        raise Missed(f"stream {stream.name} has a new writer")
    if writer in stream.torn:
        raise Missed(f"a batch of stream {stream.name} was not ended")
    if prev > have or new < prev:
        raise Missed(f"rows of stream {stream.name} after {have} are missing, Redis goes on from {prev}")
    if new <= have:
        return False
    stream.have[writer] = new
    return True


PATIENCE = 2.0  # seconds for Redis to say where a daemon is, if we know of one


def open_target(url: str, target: DaemonTarget, tasks: TaskGroup, daemon: str | Sequence[str] | None) -> DaemonTarget:
    """The target of a client over Redis. `daemon`: HOST:PORT of a daemon, or of several, of which the announced daemon
    is used; without it, any announced daemon, to which no secret is sent.

    Raises:
        UsageError: the URL, an address or the name of the server is missing or cannot be used; or there is a secret
            and no daemon to which it may be sent.
    """
    return RedisTransport(url, target, tasks, daemon, SILENCE).target


class RedisTransport:
    """Makes the connections of one client."""

    def __init__(
        self, url: str, target: DaemonTarget, tasks: TaskGroup, daemon: str | Sequence[str] | None, silence: float
    ) -> None:
        if target.us.server_name is None:
            raise UsageError("a client over Redis needs server_name, which is the name of the channel")
        if target.us.token is not None and not daemon:
            raise UsageError(
                "whoever may write to Redis could have the token sent to an address of his own: name the daemons that "
                "may have it, by daemon='db1:9009' or daemon=['db1:9009', 'db2:9009']"
            )
        self._redis = parse_redis(url)
        self._server = target.us.server_name
        self._tcp = target
        self._tasks = tasks
        self._given = tuple(_given(one) for one in ([daemon] if isinstance(daemon, str) else daemon or ()))
        self._address = self._given[0] if self._given else None  # of a daemon; the last address that was announced
        self._silence = silence
        self.target = replace(target, host=f"{self._server} over {self._redis}", port=0, dial=self._dial)

    async def _dial(self) -> ByteStream:
        daemon = await self._connect()
        ours, theirs = [await SocketStream.from_socket(one) for one in socket.socketpair()]
        switch = Switch(
            theirs,
            daemon,
            self._server,
            connect=self._connect,
            connect_redis=self._connect_redis,
            silence=self._silence,
            named=not self._given,
        )
        self._tasks.start_soon(switch.run)
        return ours

    async def _connect_redis(self) -> RedisLink:
        return await open_redis(self._redis, name=self._tcp.us.name)

    async def _connect(self) -> ByteStream:
        found = await self._find()
        try:
            return await connect(replace(self._tcp, host=found.host, port=found.port, dial=None))
        except ConnectionLost:
            if found in self._given:  # the next of them, if Redis names none
                self._address = self._given[(self._given.index(found) + 1) % len(self._given)]
            raise

    async def _find(self) -> Address:
        """The address of a daemon. Raises ConnectionLost and RedisRefused."""
        if len(self._given) != 1:
            try:
                with anyio.move_on_after(inf if self._address is None else PATIENCE):
                    self._address = await self._announced() or self._address
            except RedisUnavailable:
                if self._address is None:
                    raise
        if self._address is None:
            raise ConnectionLost(
                f"no daemon announces its address for {self._server} in {self._redis}: start `replicad serve --redis` "
                "with --redis-announce HOST:PORT, or give daemon=HOST:PORT"
            )
        return self._address

    async def _announced(self) -> Address | None:
        """What Redis names, if the program allows it. Raises RedisUnavailable and RedisRefused."""
        link = await self._connect_redis()
        try:
            text = await link.call_text("HGET", key_of(self._server), "address")
        finally:
            await link.aclose()
        if not text:
            return None
        try:
            found = parse_server(text)
        except ValueError as error:
            raise RedisUnavailable(
                f"{self._redis} names {text[:100]!a} as the address of a daemon, which is none: {error}"
            ) from None
        if self._given and found not in self._given:
            log.warning("redis_names_other_daemon", server=self._server, address=str(found))
            return None
        return found


def _given(text: str) -> Address:
    try:
        return parse_server(text)
    except ValueError as error:
        raise UsageError(f"{text[:100]!r} is not the address of a daemon: {error}") from None
