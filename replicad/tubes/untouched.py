"""Find attached tables whose writes no longer reach their tube, or fail, and say why and what to do.

Someone may drop or disable triggers and tables by hand, or write where no trigger fires: to a partition that was made
later, by logical replication, with `session_replication_role = replica`, or to a new table that took the name of an
attached one. Then writes are not recorded, and no statement fails. Or a column that a trigger names was renamed: then
each write fails. The pods that are in the tube can still be read. docs/tubes.md lists these cases.
"""

from __future__ import annotations

from typing import Any, Final

from replicad.postgres.bridge import Database
from replicad.postgres.statements import statement
from replicad.remedies import Remedy, word

PART: Final = 200  # attached tables whose columns one look compares; of more, a part at each look
AT_ONCE: Final = 50  # tables whose columns have changed that one look tries; the next look tries others
TRIALS: Final = 4  # tables whose expressions are tried at each look though their columns are the same


class TriggerLooks:
    """Looks at all attached tables, again and again. It remembers which triggers cannot run, as finding that out takes
    Postgres a millisecond for each table: a look tries tables whose columns have changed, and a few others in turn.
    """

    def __init__(self, schema: str) -> None:
        self._schema = schema
        self._marks: dict[tuple[str, int], int | None] = {}
        self._failing: dict[tuple[str, int], str] = {}
        self._part = 0
        self._turn_at = 0

    async def look(self, db: Database) -> dict[str, str]:
        """A text by tube that names such tables and the remedy. Tubes without such tables are left out."""
        schema = self._schema
        found: dict[str, list[str]] = {}
        more: dict[str, int] = {}
        for row in await db.fetch(statement("tube_untouched", schema), schema):
            found.setdefault(row["tube"], []).append(_sentence(row))
            more[row["tube"]] = row["tables"] - len(found[row["tube"]])
        for row in await db.fetch(statement("tube_unseen", schema)):
            found.setdefault(row["tube"], []).append(_unseen(row))
        for row in await db.fetch(statement("tube_parted", schema)):
            found.setdefault(row["tube"], []).append(_parted(row))
        await self._try(db)
        for (tube, _), fault in sorted(self._failing.items()):
            found.setdefault(tube, []).append(fault)
        rest = {tube: f"; the same is true of {count:,} more tables" if count else "" for tube, count in more.items()}
        return {tube: "; ".join(sentences[:5]) + rest.get(tube, "") for tube, sentences in found.items()}

    async def _try(self, db: Database) -> None:
        parts = 1 + len(self._marks) // PART
        self._part = (self._part + 1) % parts
        rows = await db.fetch(statement("tube_marks", self._schema), parts, self._part)
        now = {(row["tube"], row["table_oid"]): row["mark"] for row in rows}
        for key in [key for key in self._marks if key[1] % parts == self._part and key not in now]:
            del self._marks[key]  # detached
        worth = [(row["tube"], row["table_oid"]) for row in rows if row["tries"]]
        begin = self._turn_at % max(1, len(worth))
        self._turn_at = begin + TRIALS
        changed = [key for key, mark in now.items() if self._marks.get(key) != mark][:AT_ONCE]
        chosen = {*changed, *[*worth[begin:], *worth[:begin]][:TRIALS], *self._failing}
        self._failing = {key: fault for key, fault in self._failing.items() if key in chosen}
        tubes, tables = [tube for tube, _ in chosen], [table for _, table in chosen]
        tried = await db.fetch(statement("tube_failing", self._schema), tubes, tables) if chosen else []
        faults = {(row["tube"], row["table_oid"]): row for row in tried}
        for key in chosen:
            row = faults.get(key)
            if row is not None and row["fault"] == "":
                continue  # locked: the next look finds out
            if key in now:
                self._marks[key] = now[key]
            if row is None or row["fault"] is None:
                self._failing.pop(key, None)
            else:
                self._failing[key] = _failing(row)


async def load_untouched(db: Database, schema: str) -> dict[str, str]:
    """One look of `TriggerLooks`, which tries every table if there are at most AT_ONCE."""
    return await TriggerLooks(schema).look(db)


def _parted(row: Any) -> str:
    attach = attach_command(row, row["given"])
    new = f"Attach it, `{attach}`, and backfill it, {_backfill(row)}. " if row["attachable"] else ""
    return (
        f"another table than the attached one has the name {row['given']} now, and its changes are not recorded; the "
        f"attached one is called {row['name']}. {new}If the attached one is meant: `{attach_command(row, row['name'])}`"
    )


def _failing(row: Any) -> str:
    again = "attach it again with a predicate and a routing that fit"
    if not row["has_key"]:
        again = f"attach it again, `{attach_command({**row, 'key': ['id']}, row['name'])}`"
    return (
        f"each write of {row['name']} fails, because its triggers of the tube cannot run: {row['fault']}. "
        f"Remedy: {again}; or stop recording it: `{_detach(row, row['name'])}`"
    )


def _sentence(row: Any) -> str:
    shard = row["shard"]
    if row["dropped"]:
        names = " or ".join(row["perhaps"])
        return (
            f"a table that was attached to it was dropped ({names + ', ' if names else ''}oid {row['table_oid']}, "
            f"shard {shard}). If there is a new table of that name, its changes are not recorded: attach it, "
            f"{attach_command(row, names)}, and backfill it, {_backfill(row)}. If there is none: "
            f"{_detach(row, row['table_oid'])}"
        )
    return (
        f"changes of table {row['name']} are not recorded: it has no enabled trigger of the tube for "
        f"{', '.join(row['missing'])}. Attach the table again, {attach_command(row, row['root'])}, and then backfill "
        f"it, because changes since then are lost: {_backfill(row)}"
    )


def _unseen(row: Any) -> str:
    more = f" (unattached; {row['tables']:,} such in all)" if row["tables"] > 1 else " (unattached)"
    if row["kind"] == "partition":
        return (
            f"statements on {row['name']}{more}, a partition of {row['root']} that was added later, are not recorded; "
            f"those on {row['root']} itself are. Attach it again, {attach_command(row, row['root'])}, and then "
            f"backfill it if {row['name']} had rows before, or if something writes to partitions: {_backfill(row)}"
        )
    if row["kind"] == "subscription":
        return (
            f"changes of {row['name']}{more} that arrive through subscription {row['who']} are not recorded: "
            "Postgres fires no trigger for them. Attach the table on the publisher, and detach it here: "
            f"{_detach(row, row['root'])}"
        )
    remedy = Remedy.make("reset_replication_role", what=row["whose"])
    return (
        f"{row['who']} has session_replication_role = replica, and writes of such sessions are not recorded. Set it in "
        f"single sessions only, `{remedy}`, and backfill what they have written"
    )


def attach_command(row: Any, table: str) -> Remedy:
    """The command that attaches a table again as it is; `row` has tube, shard, predicate, routing and key."""
    named = word(table) if table and " or " not in table else "TABLE"
    own = "".join(f" --{what} {word(row[what])}" for what in ("predicate", "routing") if row[what] is not None)
    key = "" if row["key"] == ["id"] else f" --key {word(','.join(row['key']))}"
    return Remedy.make("attach", tube=word(row["tube"]), table=named, shard=row["shard"], more=f"{own}{key}")


def _backfill(row: Any) -> Remedy:
    shard = "all" if row["routing"] is not None else row["shard"]
    return Remedy.make("backfill", tube=word(row["tube"]), shard=shard)


def _detach(row: Any, table: object) -> Remedy:
    return Remedy.make("detach", tube=word(row["tube"]), table=word(table))
