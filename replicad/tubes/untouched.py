"""Find attached tables whose writes no longer reach their tube, and say why and what to do. Reads catalogs only.

Someone may drop or disable triggers and tables by hand, or write where no trigger fires: to a partition that was made
later, by logical replication, with `session_replication_role = replica`. Then writes are not recorded, and no statement
fails. The pods that are in the tube can still be read. docs/tubes.md lists these cases.
"""

from __future__ import annotations

from shlex import quote
from typing import Any

from replicad.postgres.bridge import Database
from replicad.postgres.statements import statement


async def load_untouched(db: Database, schema: str) -> dict[str, str]:
    """A text by tube that names such tables and the remedy. Tubes without such tables are left out."""
    found: dict[str, list[str]] = {}
    more: dict[str, int] = {}
    for row in await db.fetch(statement("tube_untouched", schema), schema):
        found.setdefault(row["tube"], []).append(_sentence(row))
        more[row["tube"]] = row["tables"] - len(found[row["tube"]])
    for row in await db.fetch(statement("tube_unseen", schema)):
        found.setdefault(row["tube"], []).append(_unseen(row))
    rest = {tube: f"; the same is true of {count:,} more tables" if count else "" for tube, count in more.items()}
    return {tube: "; ".join(sentences) + rest.get(tube, "") for tube, sentences in found.items()}


def _sentence(row: Any) -> str:
    tube, shard = row["tube"], row["shard"]
    if row["dropped"]:
        names = " or ".join(row["perhaps"])
        return (
            f"a table that was attached to it was dropped ({names + ', ' if names else ''}oid {row['table_oid']}, "
            f"shard {shard}). If there is a new table of that name, its changes are not recorded: attach it, "
            f"{attach_command(row, names)}, and backfill it, {_backfill(row)}. If there is none: "
            f"replicad tubes detach {quote(tube)} {row['table_oid']}"
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
            f"backfill it if something writes to partitions: {_backfill(row)}"
        )
    if row["kind"] == "subscription":
        return (
            f"changes of {row['name']}{more} that arrive through subscription {row['who']} are not recorded: "
            "Postgres fires no trigger for them. Attach the table on the publisher, and detach it here: "
            f"replicad tubes detach {quote(row['tube'])} {quote(row['root'])}"
        )
    return (
        f"{row['who']} has session_replication_role = replica, and writes of such sessions are not recorded. Set it in "
        "single sessions only, and backfill what they have written"
    )


def attach_command(row: Any, table: str) -> str:
    """The command that attaches a table again as it is; `row` has tube, shard, predicate, routing and key."""
    named = quote(table) if table and " or " not in table else "TABLE"
    own = "".join(f" --{what} {quote(row[what])}" for what in ("predicate", "routing") if row[what] is not None)
    key = "" if row["key"] == ["id"] else f" --key {quote(','.join(row['key']))}"
    return f"replicad tubes attach {quote(row['tube'])} {named} --shard {row['shard']}{own}{key}"


def _backfill(row: Any) -> str:
    return (
        f"replicad tubes backfill {quote(row['tube'])} --shards {'all' if row['routing'] is not None else row['shard']}"
    )
