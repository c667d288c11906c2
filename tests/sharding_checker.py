"""What proves from the rows alone that no two writers were ever in a write of one key at the same time.

Every write reads, behind the fence, the key's last number and adds one, and keeps its transaction's id and a snapshot
taken at that moment. Two writes overlapped where neither was over when the other's snapshot was taken: Postgres' own
evidence, no clock. With a whole chain of numbers in which each write sees the one before, no two overlapped.
"""

from __future__ import annotations

from collections.abc import Iterable

from replicad.postgres.bridge import Connection, Database

ROWS = """
CREATE TABLE events (
    id bigserial PRIMARY KEY, key text NOT NULL, instance text NOT NULL, term bigint NOT NULL, n bigint NOT NULL,
    xid xid8 NOT NULL, seen pg_snapshot NOT NULL, at timestamptz NOT NULL DEFAULT clock_timestamp()
);
CREATE INDEX ON events (key, n)
"""

SABOTAGE = """
CREATE OR REPLACE FUNCTION replicad.writer_owns(stream text, key text, instance text, term bigint) RETURNS integer
LANGUAGE sql AS $$ SELECT 0 $$
"""

WRITE = """
INSERT INTO events (key, instance, term, n, xid, seen)
SELECT $1, $2, $3, coalesce(max(n), 0) + 1, pg_current_xact_id(), pg_current_snapshot() FROM events WHERE key = $1
RETURNING n
"""

OVERLAPS = """
WITH line AS (
    SELECT key, n, instance, term, xid, seen,
        lag(n) OVER w AS n_before, lag(xid) OVER w AS before, lag(instance) OVER w AS instance_before,
        lag(term) OVER w AS term_before
    FROM events WINDOW w AS (PARTITION BY key ORDER BY n, id)
)
SELECT key, n, instance, instance_before,
    n <> coalesce(n_before, 0) + 1 OR NOT coalesce(pg_visible_in_snapshot(before, seen), true) AS overlap
FROM line
WHERE n <> coalesce(n_before, 0) + 1 OR NOT coalesce(pg_visible_in_snapshot(before, seen), true) OR term < term_before
ORDER BY key, n
"""


async def write_row(connection: Connection, key: str, instance: str, term: int | None) -> int:
    """Write the key's next row in the transaction that is open, behind its fence; returns the row's number."""
    number: int = await connection.fetch_value(WRITE, key, instance, term)
    return number


async def check_rows(db: Database, acked: Iterable[tuple[str, int]] = ()) -> int:
    """See that no two writes of a key overlapped, that no term went back, and that `acked` (key, n) are all there.

    Returns how many rows there are.
    """
    found = await db.fetch(OVERLAPS)
    overlaps = [dict(row) for row in found if row["overlap"]]
    assert not overlaps, f"{len(overlaps)} writes of one key at the same time: {overlaps[:3]}"
    assert not found, f"terms went back: {[dict(row) for row in found][:3]}"
    there = {(row["key"], row["n"]) for row in await db.fetch("SELECT key, n FROM events")}
    lost = set(acked) - there
    assert not lost, f"{len(lost)} acknowledged writes are gone: {sorted(lost)[:3]}"
    return len(there)
