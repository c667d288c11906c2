"""The role of the publisher: one daemon of a database has it, under a term, for as long as it renews it.

A daemon takes the role when it is free or its beat has not changed for the time to live. It publishes only until 0.9
of that time after it *sent* its last renewal. The term is also in Redis (publishing.lua): a publisher that was paused
and comes back is refused there.

`PublisherBook` has the role in Postgres: its term, and the published positions (docs/leases.md).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import structlog
import trio

from replicad.beats import BeatWatch
from replicad.daemon.troubles import Troubles
from replicad.errors import DatabaseError
from replicad.postgres import schema as schemas
from replicad.postgres.bridge import Database, quote_ident
from replicad.postgres.statements import call_row, call_value
from replicad.redis.intervals import RedisIntervals
from replicad.redis.publisher import RedisPublisher

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
