"""The publisher to Redis, in Postgres: the role, its term, and the published positions (docs/leases.md)."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import trio

from replicad.beats import BeatWatch
from replicad.postgres import schema as schemas
from replicad.postgres.bridge import Database, quote_ident
from replicad.postgres.statements import call_row, call_value

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
