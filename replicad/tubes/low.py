"""Low-water marks: after so many acks of a partition, tell Postgres from where reads of it may begin.

Acked pods stay in the index until VACUUM removes them, and a transaction with an old snapshot can prevent that for
hours. A read from the start would pass all of them. The marks are in the table `tube_low`; every read uses them.
"""

from __future__ import annotations

from collections.abc import Collection

import structlog
import trio

from replicad.errors import DatabaseError
from replicad.postgres.bridge import Database
from replicad.postgres.statements import call_value
from replicad.tubes.commands import Part

EVERY = 2000  # acked pods of a partition between two moves; a read passes about as many: 0.2 ms
PAUSE = 0.25  # seconds between two moves at least: each takes 3 ms, which a worker that empties a partition waits

log = structlog.get_logger()


class LowMarks:
    """Counts the acks of each partition. `db` is a pool for short statements."""

    def __init__(self, db: Database, schema: str) -> None:
        self._db = db
        self._schema = schema
        self._positions: dict[tuple[str, Part], int] = {}
        self._acked: dict[tuple[str, Part], int] = {}
        self._moved: dict[tuple[str, Part], float] = {}

    def note_position(self, tube: str, part: Part, position: int) -> None:
        """A read has used this position: no pod can appear at or below it."""
        self._positions[tube, part] = position

    def keep_only(self, tubes: Collection[str]) -> None:
        """Forget the other tubes."""
        for known in (self._positions, self._acked, self._moved):
            for key in [key for key in known if key[0] not in tubes]:
                del known[key]

    async def note_acks(self, tube: str, part: Part, pods: int) -> None:
        """So many pods were acked. If it is time, move the mark. A failure is logged; then reads only take longer."""
        key = tube, part
        acked = self._acked.get(key, 0) + pods
        self._acked[key] = acked
        now = trio.current_time()
        if acked < EVERY or key not in self._positions or now < self._moved.get(key, -PAUSE) + PAUSE:
            return
        self._acked[key], self._moved[key] = 0, now
        where = (tube, part.partitions, part.partition)
        try:
            await call_value(self._db, self._schema, "tube_low_raise", *where, self._positions[key])
        except DatabaseError as error:
            log.warning("low_mark_not_moved", tube=tube, part=str(part), error=str(error))
