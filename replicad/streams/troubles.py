"""The troubles of all daemons in Postgres: daemons write them, the command line reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple

from replicad.postgres.statements import Queries, call_rows, call_value
from replicad.streams.queries import SCHEMA, installed


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
    """One trouble that a running daemon reports, of the thing `kind` and `name` (for example a stream and its name)."""

    daemon: str
    kind: str
    name: str
    cause: str
    code: str
    reason: str
    since: datetime


async def write(db: Queries, daemon: str, rows: Sequence[Row], *, schema: str = SCHEMA) -> None:
    """Replace all troubles that the daemon has written before."""
    columns: list[list[object]] = [list(column) for column in zip(*rows, strict=True)] or [[], [], [], [], [], []]
    with installed(schema):
        await call_value(db, schema, "stream_trouble_write", daemon, *columns)


async def load(db: Queries, *, schema: str = SCHEMA) -> list[Reported]:
    """The troubles of running daemons, the oldest first. Raises SchemaMissing."""
    with installed(schema):
        rows = await call_rows(db, schema, "stream_troubles", columns="daemon, kind, name, cause, code, reason, since")
    return [Reported(*row) for row in rows]
