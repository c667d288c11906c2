"""Leases: which worker may read a partition of a tube. docs/leases.md has the states, the trust window, the failures.

A lease is a row with a term (unique to this lease) and a beat (unique to each renewal). A lease is expired when its
beat has not changed for `ttl` seconds (`replicad.beats`). CLAIM then replaces the row, but only if the beat still has
the value that was seen. The SQL functions refuse an old term.

A lease has a holder: its name and client, and the connection or the key that the lease is bound to. The holder is
stored as `NAME TAG`. The name is what lists and errors show; with an access file the client's name and a `/` stand
before it. The tag is made of the connection that claimed the lease, or of the key that the client gave behind a
`!` in `holder=NAME!KEY`. Two claims under one name have the same lease only if they have the same tag. When the
connection has ended, the tag is removed, and the next claim under the name gets the lease, with a new term.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from hashlib import sha256

import trio

from replicad.beats import BeatWatch
from replicad.errors import LeaseLost
from replicad.postgres.bridge import Database, quote_ident
from replicad.postgres.statements import call_row, call_value
from replicad.tubes.commands import Lease, Part

LONGEST_GAP = 1.5  # seconds; a longer gap between two looks counts as this. A daemon looks every second

_TAG = re.compile(r" [ck][0-9a-f]{32}\b")


@dataclass(frozen=True, slots=True)
class LeaseHolder:
    """Who claims a lease. `by_connection`: the lease is bound to the connection, not to a key."""

    name: str
    tag: str

    @property
    def stored(self) -> str:
        """The text in `tube_lease`."""
        return f"{self.name} {self.tag}"

    @property
    def by_connection(self) -> bool:
        """Whether the lease is bound to the connection, not to a key."""
        return self.tag.startswith("c")


def holder_of(given: str, client: str, connection: str) -> LeaseHolder:
    """The holder that a CLAIM means. `given`: `NAME` or `NAME!KEY`; `connection`: unique among all daemons."""
    name, mark, key = given.partition("!")
    kind, secret = ("k", key) if mark else ("c", connection)
    tag = kind + sha256(f"{client} {secret}".encode()).hexdigest()[:32]
    return LeaseHolder(f"{client}/{name}" if client else name, tag)


def belongs_to(stored: str, client: str) -> bool:
    """Whether a stored holder belongs to this client of the access file."""
    return stored.startswith(f"{client}/")


def without_tags(text: str) -> str:
    """A message of Postgres with the names of holders only."""
    return _TAG.sub("", text)


@dataclass(frozen=True, slots=True)
class LeaseView:
    """A lease, and for how many seconds this watcher has seen its beat unchanged (`silent`). `ttl` is in seconds.
    `holder` is stored as in `replicad.tubes.leases`.
    """

    tube: str
    term: int
    beat: int
    ttl: float
    silent: float
    holder: str = ""
    partition: int = 0
    partitions: int = 1

    @property
    def expired(self) -> bool:
        """Whether the beat has not changed for the whole time to live."""
        return self.silent >= self.ttl


class LeaseBook:
    """Claims, renews and releases leases in one database. `now` is a monotonic clock, trio's by default.

    `own` is the pool for renewals, which make no promise and wait for no standby; without it, `db` is.
    """

    def __init__(
        self,
        db: Database,
        schema: str,
        now: Callable[[], float] = trio.current_time,
        *,
        own: Database | None = None,
    ) -> None:
        self._db = db
        self._own = own or db
        self._schema = schema
        self._table = f"{quote_ident(schema)}.tube_lease"
        self._next_term = f"{quote_ident(schema)}.tube_term_next"
        self._valid = f"generation = (SELECT {quote_ident(schema)}.tube_generation_valid())"
        self._sequence = f"{quote_ident(schema)}.tube_term_seq".replace("'", "''")
        self._now = now
        self._watch = BeatWatch[int](LONGEST_GAP)

    async def look(self) -> list[LeaseView]:
        """Read all leases. Call it regularly: `silent` counts from the first look that saw a beat."""
        rows = await self._own.fetch(
            "SELECT tube, term, beat, extract(epoch FROM ttl)::float8 AS ttl, holder, partition, partitions "
            f"FROM {self._table}"
        )
        silent = self._watch.observe((row["beat"] for row in rows), self._now())
        return [LeaseView(**dict(row), silent=silent[row["beat"]]) for row in rows]

    async def claim(self, tube: str, part: Part, holder: LeaseHolder, ttl: float, expired: Sequence[int]) -> Lease:
        """Get the lease of a partition. `expired`: beats of leases of the tube that a look has found expired.

        The holder of exactly this lease keeps its term. A lease of its name whose connection has ended gets a new term.

        Raises:
            LeaseHeld: another holder has it, or a lease that overlaps it.
            UnknownTube, PartitionsChanged: raised by the SQL.
        """
        where = (tube, part.partitions, part.partition)
        await self._db.execute(
            f"UPDATE {self._table} SET holder = $4, term = {self._next_term}() "
            "WHERE tube = $1 AND partitions = $2 AND partition = $3 AND holder = $5",
            *where,
            holder.stored,
            holder.name,
        )
        row = await call_row(
            self._db, self._schema, "tube_lease_claim", *where, holder.stored, timedelta(seconds=ttl), list(expired)
        )
        return Lease(tube, part, row["term"], ttl, row["generation"])

    async def let_go(self, holders: Sequence[LeaseHolder]) -> None:
        """The connections that these holders are bound to have ended: another one under the name may have the lease."""
        await self._own.execute(
            f"UPDATE {self._table} SET holder = split_part(holder, ' ', 1) WHERE holder = ANY ($1::text[])",
            [holder.stored for holder in holders],
        )

    async def holder_of(self, tube: str, term: int) -> str | None:
        """The stored holder of the lease with this term; None if there is none."""
        found: str | None = await self._db.fetch_value(
            f"SELECT holder FROM {self._table} WHERE tube = $1 AND term = $2", tube, term
        )
        return found

    async def renew(self, tube: str, part: Part, term: int) -> Lease:
        """Renew a lease. `part` is the claimed partition, or a part of it.

        Raises:
            LeaseLost: no lease has this term, or it does not cover `part`.
        """
        row = await self._own.fetch_row(
            f"SELECT partitions, partition, extract(epoch FROM ttl)::float8 AS ttl FROM {self._table} "
            "WHERE tube = $1 AND term = $2",
            tube,
            term,
        )
        claimed = part if row is None else Part(row["partition"], row["partitions"])
        if row is not None and not claimed.covers(part):
            raise LeaseLost(f"term {term} holds {claimed} of tube {tube}, which does not cover {part}")
        where = (tube, claimed.partitions, claimed.partition, term)
        await call_value(self._own, self._schema, "tube_lease_renew", *where)
        assert row is not None  # else tube_lease_renew has raised
        return Lease(tube, claimed, term, row["ttl"])

    async def keep(self, tube: str, terms: Sequence[int], client: str = "") -> list[Lease]:
        """Renew many leases of a tube with one statement; returns the leases that are still held.

        `client`: only leases of this client of the access file. The rows are locked in one order, because two of these
        statements may concern the same leases.
        """
        rows = await self._own.fetch(
            f"UPDATE {self._table} AS l SET beat = nextval('{self._sequence}') FROM ("
            f"SELECT k.partitions, k.partition FROM {self._table} AS k WHERE k.tube = $1 "
            f"AND k.{self._valid} "
            "AND k.term = ANY ($2::bigint[]) AND ($3 = '' OR starts_with(k.holder, $3 || '/')) "
            "ORDER BY 1, 2 FOR NO KEY UPDATE) AS held "
            "WHERE l.tube = $1 AND (l.partitions, l.partition) = (held.partitions, held.partition) "
            "AND l.term = ANY ($2::bigint[]) "
            "RETURNING l.partitions, l.partition, l.term, extract(epoch FROM l.ttl)::float8 AS ttl",
            tube,
            list(terms),
            client,
        )
        return [Lease(tube, Part(row["partition"], row["partitions"]), row["term"], row["ttl"]) for row in rows]

    async def release(self, tube: str, part: Part, term: int) -> bool:
        """Release the lease. False if it was no longer held under that term."""
        released: bool = await call_value(
            self._own, self._schema, "tube_lease_release", tube, part.partitions, part.partition, term
        )
        return released
