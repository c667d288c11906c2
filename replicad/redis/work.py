"""What a daemon does for Redis: it publishes while it has the role, and hears what other processes say.

A command on the channel of the server is treated as if it had come over TCP (`Hearing`). Every daemon hears presence
and acks, which may be written twice without harm; so nothing of them is lost when the role of the publisher passes on.
Commands that concern all connections (REMOTE_SERVER_UP, LOCK_RELEASED) and REPLICATE are handled by the daemon that has
the role. The commands go through a connection of our own to this daemon, so they are checked, bounded and counted like
commands of any client.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

import structlog
import trio

from replicad.beats import BeatWatch
from replicad.client.refusals import refusal
from replicad.config.settings import ServerSettings
from replicad.daemon.service import Host, Inside
from replicad.daemon.troubles import Troubles
from replicad.errors import ConnectionLost, DatabaseError, RemoteProtocolError, ReplicadError, ServerStopping
from replicad.nurseries import open_plain_nursery
from replicad.postgres import schema as schemas
from replicad.postgres.bridge import Database, quote_ident
from replicad.postgres.statements import call_row, call_value
from replicad.protocol.command import Vocabulary
from replicad.protocol.commands import LockReleased, Name, RemoteServerUp
from replicad.protocol.lines import LineTooLong
from replicad.protocol.words import Side
from replicad.redis.intake import Intake
from replicad.redis.link import RedisLink, open_redis, parse_redis
from replicad.redis.publisher import RedisOutlet, RedisPublisher
from replicad.redis.service import RedisIntervals
from replicad.retry import Backoff
from replicad.streams.commands import FederationAck, Replicate

# The role of the publisher: one daemon of a database has it, under a term, for as long as it renews it.
#
# A daemon takes the role when it is free or its beat has not changed for the time to live. It publishes only until 0.9
# of that time after it *sent* its last renewal. The term is also in Redis (publishing.lua): a publisher that was paused
# and comes back is refused there.
#
# `PublisherBook` has the role in Postgres: its term, and the published positions (docs/leases.md).


TRUST = 0.9  # of the time to live
RELEASE_TIMEOUT = 2.0  # seconds to give the role back, best effort

log = structlog.get_logger()

LONGEST_GAP = 1.5  # seconds between two looks that count as watched, at most; a daemon looks every second

Tokens = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class PublisherRole:
    """The role as it is now. `holder`: None if it is free; `silent`: for how long (s) its beat has not changed."""

    holder: str | None
    beat: int
    silent: float


@dataclass(frozen=True, slots=True)
class Turn:
    """The role, held by us under a term; `tokens`: the published positions."""

    term: int
    tokens: Tokens


class PublisherBook:
    """The role of one server's publisher. `now` is a monotonic clock, trio's by default.

    `claims` is the pool for new terms: Redis refuses what an older term sends, so a failover must not take a term back.
    """

    def __init__(
        self,
        db: Database,
        schema: str,
        server: str,
        now: Callable[[], float] = trio.current_time,
        *,
        claims: Database,
    ) -> None:
        self._db = db
        self._claims = claims
        self._name = schema
        self._table = f"{quote_ident(schema)}.redis_publisher"
        self._server = server
        self._now = now
        self._watch = BeatWatch[int](LONGEST_GAP)

    async def install(self) -> None:
        """Install or upgrade the tables. Raises DatabaseError."""
        await schemas.install(self._db, "redis", self._name)

    async def look(self) -> PublisherRole | None:
        """The holder of the role; None if no daemon ever had it. Call it regularly."""
        row = await self._db.fetch_row(f"SELECT holder, beat FROM {self._table} WHERE server = $1", self._server)
        silent = self._watch.observe([] if row is None else [row["beat"]], self._now())
        return None if row is None else PublisherRole(row["holder"], row["beat"], silent[row["beat"]])

    async def claim(self, holder: str, seen: int | None) -> Turn | None:
        """Take the role, if it is free or its beat is still `seen`; None if another has it."""
        row = await call_row(self._claims, self._name, "redis_claim", self._server, holder, seen)
        return None if row is None else Turn(row["term"], json.loads(row["tokens"]))

    async def renew(self, term: int, tokens: Tokens) -> bool:
        """Keep the role, and store the published positions. False: it is lost."""
        kept: bool = await call_value(
            self._db, self._name, "redis_renew", self._server, term, json.dumps(tokens), result="boolean"
        )
        return kept

    async def release(self, term: int, tokens: Tokens) -> None:
        """Give the role back."""
        await call_value(self._db, self._name, "redis_release", self._server, term, json.dumps(tokens))


class RoleKeeper:
    """Takes the role again and again, and publishes while it has it."""

    def __init__(
        self,
        book: PublisherBook,
        holder: str,
        *,
        is_fit: Callable[[], bool],
        begin: Callable[[Turn], RedisPublisher],
        troubles: Troubles,
        pace: RedisIntervals,
    ) -> None:
        """`is_fit`: whether this daemon reaches Redis; a daemon that does not leaves the role to the others."""
        self._book = book
        self._holder = holder
        self._is_fit = is_fit
        self._begin = begin
        self._troubles = troubles
        self._pace = pace
        self.publisher: RedisPublisher | None = None  # while this daemon has the role
        self.term: int | None = None
        self.others: str | None = None  # the name of the holder, if it is another daemon
        self.turns = 0  # since the start
        self._lines = self._overflows = 0  # of the turns before

    @property
    def lines(self) -> int:
        """Lines published since the start."""
        return self._lines + (0 if self.publisher is None else self.publisher.lines)

    @property
    def overflows(self) -> int:
        """How often too much waited, since the start."""
        return self._overflows + (0 if self.publisher is None else self.publisher.intake.overflows)

    async def run(self) -> None:
        """Until cancelled. Raises DatabaseError if the tables cannot be installed."""
        await self._book.install()
        while True:
            asked = trio.current_time()
            turn = None
            with self._troubles.contain("service", "redis", "role"):
                turn = await self._claim()
            if turn is not None:
                await self._have(turn, asked)
            await trio.sleep(self._pace.look)

    async def _claim(self) -> Turn | None:
        standing = await self._book.look()
        self.others = None if standing is None else standing.holder
        if not self._is_fit():
            return None
        if standing is None or standing.holder is None:
            return await self._book.claim(self._holder, None)
        if standing.silent < self._pace.ttl:
            return None
        log.warning("redis_publisher_silent", holder=standing.holder, silent_s=round(standing.silent, 1))
        return await self._book.claim(self._holder, standing.beat)

    async def _have(self, turn: Turn, asked: float) -> None:
        publisher = self.publisher = self._begin(turn)
        self.term, self.others = turn.term, None
        self.turns += 1
        log.info("redis_publishes", term=turn.term, streams=len(turn.tokens))
        why = "the daemon stops"
        try:
            scope = trio.CancelScope(deadline=asked + self._pace.ttl * TRUST)
            with scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(publisher.run)
                    why = await self._renew(turn, publisher, scope)
                    nursery.cancel_scope.cancel()
            if scope.cancelled_caught:
                why = "it could not be renewed in time"
        finally:
            self._lines, self._overflows = self.lines, self.overflows
            self.publisher = self.term = None
            log.info("redis_publishes_no_more", term=turn.term, lines=publisher.lines, reason=why)
            with trio.move_on_after(RELEASE_TIMEOUT, shield=True), self._troubles.contain("service", "redis", "role"):
                await self._book.release(turn.term, publisher.tokens)

    async def _renew(self, turn: Turn, publisher: RedisPublisher, scope: trio.CancelScope) -> str:
        """Renew until the role is lost or is better left to another; returns the reason."""
        while True:
            with trio.move_on_after(self._pace.renew):
                await publisher.grown.wait()
            publisher.grown = trio.Event()
            if publisher.failing_s >= self._pace.give_up:
                return "Redis does not answer"
            sent = trio.current_time()
            try:
                if not await self._book.renew(turn.term, publisher.tokens):
                    return "another daemon has it"
            except DatabaseError as error:
                self._troubles.fail("service", "redis", "role", error)
            else:
                self._troubles.end("service", "redis", "role")
                scope.deadline = sent + self._pace.ttl * TRUST


WILDCARDS = ("0.0.0.0", "::")  # noqa: S104 - compared with, not bound to
USER_IPS = "USER_IP"  # Synapse says this command on a channel of its own, below that of the server

NAME = "redis-commands"  # of our connection, in lists of clients
FEDERATION = "federation"  # the stream of an ack that names none, as for a client that follows all
HEARD = frozenset({"presence", "ack", "doorbell"})  # the rights of the commands that every daemon handles
SERVERS = (b"RDATA ", b"POSITION ", b"PING", b"SERVER ", b"WRITERS ", b"ERROR")  # lines that are not for a daemon
_RELAYED = (RemoteServerUp, LockReleased)


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
                stream = trio.SocketStream(trio.socket.from_stdlib_socket(await self._inside.connect(NAME)))
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
