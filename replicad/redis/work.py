"""What a daemon does for Redis: it publishes while it has the role, and hears what other processes say.

A command on the channel of the server is treated as if it had come over TCP (`Hearing`). Every daemon hears presence
and acks, which may be written twice without harm; so nothing of them is lost when the role of the publisher passes on.
Commands that concern all connections (REMOTE_SERVER_UP, LOCK_RELEASED) and REPLICATE are handled by the daemon that has
the role. The commands go through a connection of our own to this daemon, so they are checked, bounded and counted like
commands of any client.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Awaitable, Callable
from contextlib import suppress

import structlog
import trio

from replicad.client.refusals import refusal
from replicad.config.settings import ServerSettings
from replicad.daemon.inside import Inside
from replicad.daemon.service import Host
from replicad.daemon.troubles import Troubles
from replicad.errors import ConnectionLost, RemoteProtocolError, ReplicadError, ServerStopping
from replicad.nurseries import open_plain_nursery
from replicad.protocol.command import Vocabulary
from replicad.protocol.commands import LockReleased, Name, RemoteServerUp
from replicad.protocol.lines import LineTooLong
from replicad.protocol.words import Side
from replicad.redis.intake import Intake
from replicad.redis.intervals import RedisIntervals
from replicad.redis.link import RedisLink, open_redis, parse_redis
from replicad.redis.publisher import RedisOutlet, RedisPublisher
from replicad.redis.role import PublisherBook, RoleKeeper, Turn
from replicad.retry import Backoff
from replicad.streams.commands import FederationAck, Replicate

WILDCARDS = ("0.0.0.0", "::")  # noqa: S104 - compared with, not bound to
USER_IPS = "USER_IP"  # Synapse says this command on a channel of its own, below that of the server

NAME = "redis-commands"  # of our connection, in lists of clients
FEDERATION = "federation"  # the stream of an ack that names none, as for a client that follows all
HEARD = frozenset({"presence", "ack", "doorbell"})  # the rights of the commands that every daemon handles
SERVERS = (b"RDATA ", b"POSITION ", b"PING", b"SERVER ", b"WRITERS ", b"ERROR")  # lines that are not for a daemon
_RELAYED = (RemoteServerUp, LockReleased)

log = structlog.get_logger()


class RedisWork:
    """One daemon's work: it hears always, and publishes while it has the role."""

    def __init__(self, host: Host, url: str, pace: RedisIntervals) -> None:
        """Raises UsageError if the URL is not for a Redis."""
        settings = host.settings
        self.address = parse_redis(url, password=settings.redis_password, ca=settings.redis_ca)
        self._host = host
        self._pace = pace
        self._server = settings.server_name
        book = PublisherBook(host.pools.own, settings.database.stream_schema, self._server, claims=host.pools.short)
        holder = f"{self._server} pid {os.getpid()} {secrets.token_hex(4)}"
        self.turns = RoleKeeper(
            book,
            holder,
            is_fit=lambda: self.hearing.connected,
            begin=self._begin,
            troubles=host.troubles,
            pace=pace,
        )
        self.hearing = Hearing(
            (self._server, f"{self._server}/{USER_IPS}"),
            connect=self._connect,
            inside=host.inside,
            vocabulary=host.vocabulary,
            publisher=lambda: self.turns.publisher,
            troubles=host.troubles,
            max_line=settings.limits.max_line,
            pace=pace,
        )

    async def run(self) -> None:
        """Until cancelled."""
        async with open_plain_nursery() as nursery:
            nursery.start_soon(self.hearing.run)
            nursery.start_soon(self.turns.run)
            await trio.sleep_forever()

    async def _connect(self) -> RedisLink:
        return await open_redis(self.address, name="replicad", timeout=self._pace.answer)

    def _begin(self, turn: Turn) -> RedisPublisher:
        host = self._host
        announced = announced_address(host.settings)

        async def connect() -> RedisOutlet:
            return RedisOutlet(await self._connect(), self._server, turn.term, announced)

        intake = Intake(host.inside, turn.tokens, host.troubles, self._pace)
        return RedisPublisher(intake, connect, turn.tokens, host.troubles, self._pace)


def announced_address(settings: ServerSettings) -> str:
    """The address for followers that miss rows; empty if it is not known."""
    if settings.redis_announce is not None:
        return str(settings.redis_announce)
    known = settings.listen.port != 0 and settings.listen.host not in WILDCARDS
    return str(settings.listen) if known else ""


class Hearing:
    """The subscription of one daemon."""

    def __init__(
        self,
        channels: tuple[str, ...],
        *,
        connect: Callable[[], Awaitable[RedisLink]],
        inside: Inside,
        vocabulary: Vocabulary,
        publisher: Callable[[], RedisPublisher | None],
        troubles: Troubles,
        max_line: int,
        pace: RedisIntervals,
    ) -> None:
        """`publisher`: that of this daemon, while it has the role. `max_line`: bytes of a command."""
        self._channels = channels
        self._connect = connect
        self._inside = inside
        self._vocabulary = vocabulary
        self._publisher = publisher
        self._troubles = troubles
        self._max_line = max_line
        self._pace = pace
        self._stream: trio.abc.Stream | None = None
        self._heard_at = 0.0
        self.connected = False
        self.heard = 0  # commands that were passed on, since the start
        self.refused = 0  # lines that are no commands, or that the daemon refused

    async def run(self) -> None:
        """Receive until cancelled. A lost connection to Redis is made again; commands of the meantime are lost."""
        async with open_plain_nursery() as nursery:
            nursery.start_soon(self._speak_forever)
            backoff = Backoff(self._pace.retry, self._pace.longest_retry)
            while True:
                with self._troubles.contain("service", "redis", "hear"):
                    await self._hear(backoff)
                self.connected = False
                await trio.sleep(backoff.next_delay())

    async def _hear(self, backoff: Backoff) -> None:
        link = await self._connect()
        try:
            await link.subscribe(self._channels)
            self.connected = True
            self._troubles.end("service", "redis", "hear")
            backoff.reset()
            self._heard_at = trio.current_time()
            async with open_plain_nursery() as nursery:
                nursery.start_soon(self._watch, link)
                while True:
                    messages = await link.messages()
                    self._heard_at = trio.current_time()
                    for _, line in messages:
                        if not line.startswith(SERVERS):
                            await self._take(line)
        finally:
            self.connected = False
            await link.aclose()

    async def _watch(self, link: RedisLink) -> None:
        """Find out when the connection is dead."""
        while trio.current_time() < self._heard_at + self._pace.silence:
            await trio.sleep(self._pace.silence / 3)
            await link.ping()
        raise ConnectionLost(f"{link.address} has sent nothing for {self._pace.silence:g} s")

    async def _take(self, line: bytes) -> None:
        publisher = self._publisher()
        if publisher is not None and publisher.ours.get(line, 0):
            publisher.ours[line] -= 1
            if not publisher.ours[line]:
                del publisher.ours[line]
            return
        try:
            if len(line) > self._max_line:
                raise LineTooLong(f"a line may have at most {self._max_line} bytes")
            command = self._vocabulary.parse(_text(line), Side.CLIENT)
        except ReplicadError as error:
            self.refused += 1
            self._troubles.record("service", "redis", "line", error)
            return
        if isinstance(command, Replicate):
            if publisher is not None:
                publisher.answer_replicate()
            return
        if isinstance(command, FederationAck) and command.stream is None:
            command = FederationAck(command.instance, command.token, FEDERATION)
        if command.VERB in HEARD or (isinstance(command, _RELAYED) and publisher is not None):
            await self._pass_on(command.render().encode() + b"\n")

    async def _pass_on(self, line: bytes) -> None:
        if self._stream is not None:
            try:
                await self._stream.send_all(line)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                self.refused += 1
            else:
                self.heard += 1

    # --- the connection to this daemon ---

    async def _speak_forever(self) -> None:
        """Have a connection to this daemon until cancelled, and publish what it is sent for other processes."""
        while True:
            with suppress(trio.BrokenResourceError, ConnectionLost):
                stream = await self._inside.connect(NAME)
                async with stream:
                    await stream.send_all(Name(NAME).render().encode() + b"\n")
                    self._stream = stream
                    await self._listen(stream)
            self._stream = None
            log.debug("redis_commands_end")
            await trio.sleep(self._pace.retry)

    async def _listen(self, stream: trio.abc.Stream) -> None:
        rest = b""
        while data := await stream.receive_some(1 << 16):
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                if line.startswith((b"REMOTE_SERVER_UP ", b"LOCK_RELEASED ")):
                    if (publisher := self._publisher()) is not None:
                        publisher.say(line)
                elif line.startswith(b"ERROR "):
                    error = refusal(line[6:].decode())
                    if not isinstance(error, ServerStopping):
                        self.refused += 1
                        self._troubles.record("service", "redis", "command", error)


def _text(line: bytes) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise RemoteProtocolError(f"a line that is not UTF-8 (byte {error.start + 1}): {line[:60]!a}") from None
