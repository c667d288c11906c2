"""Who may read a partition of a tube, decided without any wall clock.

A lease is a row with a term (a number that no other lease ever had) and a beat (a number that no other renewal ever
had). Whose beat stays the same for the lease's whole time to live (`beats`) may be replaced, exactly that beat. What a
holder does with an old term is refused by the statements themselves (tubes/sql).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import trio

from replicad.beats import BeatWatch
from replicad.errors import LeaseHeld, LeaseLost
from replicad.postgres.bridge import Database, quote_ident
from replicad.protocol.commands import Lease, Part

RETRY_INTERVAL = 0.5  # seconds between two looks while a claim waits; a look is one cheap query
LONGEST_GAP = 1.5  # seconds between two looks that count as watched, at most; a daemon looks every second


@dataclass(frozen=True, slots=True)
class LeaseRow:
    """One lease as it stands in Postgres. `ttl` in seconds."""

    tube: str
    part: Part
    holder: str
    term: int
    beat: int
    ttl: float


@dataclass(frozen=True, slots=True)
class LeaseView:
    """A lease and how long (seconds) this watcher has seen its beat unchanged."""

    row: LeaseRow
    silent: float

    @property
    def expired(self) -> bool:
        """Whether the holder has been silent for its whole time to live."""
        return self.silent >= self.row.ttl


class LeaseBook:
    """Claims, renews and releases leases in one database. `now` is a monotonic clock, trio's by default."""

    def __init__(self, db: Database, schema: str, now: Callable[[], float] = trio.current_time) -> None:
        self._db = db
        self._schema = quote_ident(schema)
        self._now = now
        self._watch = BeatWatch[int](LONGEST_GAP)

    async def look(self) -> list[LeaseView]:
        """Read all leases. Call it regularly: silence only counts from the first look that saw a beat."""
        rows = await self._db.fetch(
            f"SELECT tube, partitions, partition, holder, term, beat, extract(epoch FROM ttl)::float8 AS ttl "
            f"FROM {self._schema}.tube_lease"
        )
        leases = [
            LeaseRow(
                row["tube"],
                Part(row["partition"], row["partitions"]),
                row["holder"],
                row["term"],
                row["beat"],
                row["ttl"],
            )
            for row in rows
        ]
        silent = self._watch.observe((lease.beat for lease in leases), self._now())
        return [LeaseView(lease, silent[lease.beat]) for lease in leases]

    async def claim(self, tube: str, part: Part, holder: str, ttl: float, wait: float = 0.0) -> Lease:
        """Get the lease of a partition, waiting up to `wait` seconds while others hold it or what overlaps it.

        The holder of exactly this lease gets the term that it has.

        Raises:
            LeaseHeld: somebody else has it, and still had it when the wait was over.
            UnknownTube, PartitionsChanged: as the SQL says.
        """
        deadline = self._now() + wait
        while True:
            expired = [view.row.beat for view in await self.look() if view.row.tube == tube and view.expired]
            try:
                term = await self._db.fetch_value(
                    f"SELECT term FROM {self._schema}.tube_lease_claim("
                    "$1, $2, $3, $4, make_interval(secs => $5), $6::bigint[])",
                    tube,
                    part.partitions,
                    part.partition,
                    holder,
                    ttl,
                    expired,
                )
                return Lease(tube, part, term, ttl)
            except LeaseHeld:
                remaining = deadline - self._now()
                if remaining <= 0:
                    raise
                await trio.sleep(min(remaining, RETRY_INTERVAL))

    async def renew(self, tube: str, part: Part, term: int) -> Lease:
        """Say that the holder is alive. `part` is what was claimed, or a part of it.

        Raises:
            LeaseLost: there is no such lease any more, or it does not cover `part`.
        """
        row = await self._db.fetch_row(
            f"SELECT partitions, partition, extract(epoch FROM ttl)::float8 AS ttl FROM {self._schema}.tube_lease "
            "WHERE tube = $1 AND term = $2",
            tube,
            term,
        )
        claimed = part if row is None else Part(row["partition"], row["partitions"])
        if row is not None and not claimed.covers(part):
            raise LeaseLost(f"term {term} holds {claimed} of tube {tube}, which does not cover {part}")
        where = (tube, claimed.partitions, claimed.partition, term)
        await self._db.fetch_value(f"SELECT {self._schema}.tube_lease_renew($1, $2, $3, $4)", *where)
        assert row is not None  # else the statement has just raised
        return Lease(tube, claimed, term, row["ttl"])

    async def release(self, tube: str, part: Part, term: int) -> bool:
        """Give the lease back; False when it was not held under that term any more."""
        released: bool = await self._db.fetch_value(
            f"SELECT {self._schema}.tube_lease_release($1, $2, $3, $4)", tube, part.partitions, part.partition, term
        )
        return released
