"""Who may still write to the watched tables, or hold a reservation: the second statement of a poll.

A reservation counts only with a proof, if the secret is known by which proofs are checked (`ReservationSource`).
Without it every lock in the band counts. That holds a position back for nothing at worst, and skips no row.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

from replicad import errors, sqlstates
from replicad.postgres.bridge import Backend, Connection, Row, load_sql
from replicad.postgres.watched import LockSource, ReservationSource, Source
from replicad.sqlstates import means

_MOVED = "$9::oid[], $10::text[], $11::text[], $12::oid[], $13::bigint[]"
_UNKNOWN = "NULL::bytea"  # the secret, if it cannot be read


async def fetch_holders(
    connection: Connection,
    sources: Sequence[Source],
    sequences: list[int],
    own: Collection[Backend],
    feeds: Mapping[int, int],
) -> list[Row]:
    """The rows of the query horizon_holders. `own`: sessions that only delete from tables with `own_deletes`. `feeds`:
    by sequence, `Watched.feeds`.
    """
    tables = [source for source in sources if isinstance(source, LockSource)]
    keys = {source.proof_key for source in sources if isinstance(source, ReservationSource)}
    args = (
        [source.table for source in tables],
        sequences,
        [source.table for source in tables if source.own_deletes],
        [backend.pid for backend in own],
        [backend.started for backend in own],
    )
    alone = [source for source in tables if source.has_sequence]
    taken = [source.sequence for source in alone], [source.table for source in alone]
    known = [source.identity for source in sources if source.identity is not None]
    names = [name for identity in known for name in identity.names]
    after: tuple[list[object], ...] = ()
    if known:
        columns = zip(*names, strict=True) if names else ((), (), ())
        after = (*map(list, columns), list(feeds), list(feeds.values()))
    moved = f"{known[0].home}.stream_moved({_MOVED})" if known else "'{}'::oid[]"
    sql = load_sql("horizon_holders").replace("{moved}", moved)
    key = keys.pop() if len(keys) == 1 else None
    if key is not None:
        try:
            return await connection.fetch(
                sql.replace("{key}", f"(SELECT s.key FROM {key} AS s)"), *args, True, *taken, *after
            )
        except errors.DatabaseUnavailable:
            raise
        except errors.DatabaseError as error:
            # The right was revoked, or the table was dropped. The registry notices it within a second.
            if not means(error.sqlstate, (*sqlstates.NO_RIGHT, *sqlstates.MISSING)):
                raise
    return await connection.fetch(sql.replace("{key}", _UNKNOWN), *args, False, *taken, *after)


def holders_key(source: Source) -> tuple[str, int]:
    """Under which key `by_source` has the holders of this source."""
    if isinstance(source, ReservationSource):
        return ("number", source.number)
    return ("watched", source.table)


def by_source(rows: list[Row]) -> dict[tuple[str, int], list[Row]]:
    """Holders by table or by the number of the stream. The row for 'no holder' is left out."""
    found: dict[tuple[str, int], list[Row]] = defaultdict(list)
    for row in rows:
        if row["watched"] is not None:
            found["watched", row["watched"]].append(row)
        elif row["number"] is not None:
            found["number", row["number"]].append(row)
    return found
