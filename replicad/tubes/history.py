"""The generations of the history of tubes in Postgres: read them, begin one, note positions (docs/positions.md).

The rules are SQL functions (tubes/sql/generations.sql, missed.sql). A `HistoryBook` remembers what it has read and
written, so that it notices a database that was set back on the same server: its last note is missing, or a sequence is
lower.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from replicad.postgres.bridge import Database, Row, quote_ident
from replicad.postgres.statements import call_row, call_value, statement
from replicad.remedies import Remedy, word

MOST_TEXTS = 3  # tables of a tube that are named with what may have been missed of them


@dataclass(frozen=True, slots=True)
class TubeGeneration:
    """The present generation of all tubes of a schema. `reason`: why it began. The first one has number 1.

    `missed`: tubes may have missed changes (`HistoryBook.missing`).
    """

    number: int
    id: str
    reason: str
    missed: bool = False


@dataclass(frozen=True, slots=True)
class Unknown:
    """The answer to somebody who has passed on pods of an earlier generation (tube_seen).

    `shared`: up to which seq they are pods of the present history; None: of the present generation. `since`: when that
    was noted. `state`: same, unknown, scheduled or healed. `mended`: the caller may remember this seq of the present
    `generation` instead; None: it must ask again.
    """

    state: str
    shared: int | None = None
    since: datetime | None = None
    mended: int | None = None
    generation: str | None = None


class HistoryBook:
    """The history of the tubes of one schema. `db`: a pool whose statements wait for no standby."""

    def __init__(self, db: Database, schema: str) -> None:
        self._db = db
        self._schema = schema
        self._last: Row | None = None  # of the last look
        self._note = 0  # the number of our last note

    async def present(self, fork: str | None = None) -> TubeGeneration:
        """The present generation. Begins one if history has forked; `fork`: the caller knows it, and why.

        Raises:
            DatabaseError: it cannot begin: a dump is being restored, or a right is missing.
        """
        noted = self._note  # before the look: a note that is written meanwhile may be missing in it
        row = await self._look()
        if (why := fork or self._set_back(row, noted)) is not None:
            await call_value(self._db, self._schema, "tube_fork", row["id"], why)
            row = await self._look()
        if self._last is None or row["id"] != self._last["id"]:
            self._note = 0
        self._last = row
        return TubeGeneration(row["number"], row["id"], row["reason"], row["missed"])

    async def _look(self) -> Row:
        row = await self._db.fetch_row(statement("tube_history", self._schema), self._last is None)
        assert row is not None
        return row

    def _set_back(self, row: Row, noted: int) -> str | None:
        """Why the database is not the one of the last look, although its generation is valid; None if it is."""
        last = self._last
        if last is None or row["number"] > last["number"]:
            return None
        if row["id"] != last["id"] or row["note"] < max(last["note"], noted):
            return "restored"
        if row["last_seq"] < last["last_seq"] or row["last_term"] < last["last_term"]:
            return "ids_went_back"
        return None

    async def missing(self) -> dict[str, str]:
        """By tube: the changes that it may have missed and that no backfill has brought in yet, with the remedy."""
        found: dict[str, list[str]] = {}
        for row in await self._db.fetch(f"SELECT * FROM {quote_ident(self._schema)}.tube_missing()"):
            found.setdefault(row["tube"], []).append(_missing_text(row))
        return {tube: "; ".join(texts[:MOST_TEXTS] + _more(len(texts))) for tube, texts in found.items()}

    async def check_triggers(self) -> None:
        """Note which attached tables have triggers that are off, or were off since the last look of any daemon, and of
        which partitions were dropped or detached.
        """
        await call_value(self._db, self._schema, "tube_triggers_check")
        await call_value(self._db, self._schema, "tube_partitions_check")

    async def note(self, generation: str, positions: Mapping[str, int]) -> None:
        """Note positions that were read in that generation. Raises LeaseLost: it is not the present one any more."""
        number: int = await call_value(
            self._db, self._schema, "tube_note", generation, json.dumps(dict(positions), sort_keys=True)
        )
        self._note = max(self._note, number)

    async def seen(self, tube: str, generation: str, seq: int) -> Unknown:
        """Pods of the tube up to `seq` were passed on in that generation: whether history still has them.

        If it does not, this is noted and reported until the tables are backfilled. Raises UnknownTube.
        """
        row = await call_row(self._db, self._schema, "tube_seen", tube, generation, seq)
        return Unknown(row["state"], row["shared"], row["since"], row["mended"], row["generation"])


def _more(texts: int) -> list[str]:
    return [f"the same is true of {texts - MOST_TEXTS:,} more tables"] if texts > MOST_TEXTS else []


def _missing_text(row: Any) -> str:
    remedy = Remedy.make("backfill", tube=word(row["tube"]), shard="all" if row["routed"] else row["shard"])
    since, until = (row[name].isoformat(" ", "seconds") for name in ("since", "until"))
    if row["cause"] == "triggers":
        return (
            f"the triggers of the tube on {row['tbl']} were off or were replaced (noticed from {since} to {until}), "
            f"and changes of the table in that time may not be recorded. They are on now. Run a backfill: {remedy}"
        )
    if row["cause"] == "partitions":
        return (
            f"partitions of {row['tbl']} were dropped or detached (noticed from {since} to {until}). Their rows left "
            f"without touches, so downstreams still have them. Run a backfill; then readers delete them: {remedy}"
        )
    which = "since then" if row["upto"] is None else f"with a seq from {row['after'] + 1} to {row['upto']}"
    return (
        f"history has forked; the database has all touches of {row['tbl']} of before {since}. The touches {which} are "
        f"unknown: readers have passed them on, and their changes may not be in the table. Run a backfill: {remedy}"
    )
