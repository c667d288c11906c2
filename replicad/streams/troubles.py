"""The troubles of all daemons, as they stand in Postgres: daemons write them, the command line reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple

from replicad.streams.queries import SCHEMA, Queries, installed, statement


class Row(NamedTuple):
    """One trouble as a daemon writes it; `age` in seconds."""

    kind: str
    name: str
    cause: str
    code: str
    reason: str
    age: float


@dataclass(frozen=True, slots=True)
class Reported:
    """One trouble that a running daemon reports. `kind` and `name` say of what: `stream` and the stream's name, say."""

    daemon: str
    kind: str
    name: str
    cause: str
    code: str
    reason: str
    since: datetime


async def write(db: Queries, daemon: str, rows: Sequence[Row], *, schema: str = SCHEMA) -> None:
    """Put these in the place of all that the daemon has written before."""
    columns: list[list[object]] = [list(column) for column in zip(*rows, strict=True)] or [[], [], [], [], [], []]
    with installed(schema):
        await db.fetch_value(statement("stream_trouble_write", schema), daemon, *columns)


async def load(db: Queries, *, schema: str = SCHEMA) -> list[Reported]:
    """What running daemons report, the oldest first. Raises SchemaMissing."""
    with installed(schema):
        return [Reported(*row) for row in await db.fetch(statement("stream_troubles", schema))]
