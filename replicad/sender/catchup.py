"""Catch-up with the latest facts of a room, in place of the last fact that the destination missed in it.

A destination that was away then gets the latest facts of each room from the first server that reaches it. Other
servers need not send it older ones. Synapse does the same (docs/sender.md, Outages). Only the application knows
whether a destination may have these facts. So the application names the rooms and the facts; for every other room the
destination gets the facts that were meant for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from replicad.errors import RouteFailed
from replicad.postgres.bridge import Database
from replicad.sender.items import Page, Pdu


class Latest(Protocol):
    """The application's knowledge of its rooms."""

    async def latest(self, destination: str, rooms: Sequence[str]) -> Mapping[str, Sequence[str]]:
        """The latest facts (JSON text, oldest first) of those rooms whose facts the destination may have.

        Rooms are left out if it may not have them, or if that is unknown (rooms of partial state).
        """


class SqlLatest:
    """A user's query of `$1` destination and `$2` rooms (text[]) that returns `room` and `pdu` (json)."""

    def __init__(self, db: Database, sql: str) -> None:
        self._db = db
        self._sql = sql

    async def latest(self, destination: str, rooms: Sequence[str]) -> Mapping[str, Sequence[str]]:
        """See Latest. Raises RouteFailed if the query returns something else."""
        found: dict[str, list[str]] = {}
        for row in await self._db.fetch(self._sql, destination, list(rooms)):
            if not isinstance(row["pdu"], str):
                raise RouteFailed(f"--latest-sql returned {type(row['pdu']).__name__} as pdu of room {row['room']!r}")
            found.setdefault(row["room"], []).append(row["pdu"])
        return found


async def stand_in(page: Page, destination: str, source: Latest, most: int) -> Page:
    """The page, with the facts of a room replaced by its latest ones, if there are any; at most `most` of a room."""
    rooms = list(dict.fromkeys(pdu.room for pdu in page.pdus if pdu.room is not None))
    found = await source.latest(destination, rooms) if rooms else {}
    pdus: list[Pdu] = []
    for pdu in page.pdus:
        bodies = found.get(pdu.room) if pdu.room is not None else None
        if bodies:
            pdus.extend(Pdu(pdu.order, pdu.room, body, substituted=True) for body in bodies[-most:])
        else:
            pdus.append(pdu)
    return replace(page, pdus=tuple(pdus))
