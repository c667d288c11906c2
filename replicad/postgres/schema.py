"""What replicad keeps in the user's database: installing, upgrading and removing it, as scripts that psql can run.

The parts are those of `VERSIONS`: `tube`, `stream`, and those that stand on streams and are at home in the same schema.
This file puts their SQL together and knows which version is where; what the SQL means is said in the files:

    sql/<part>/NNN_name.sql   run in this order at every installation: idempotent (IF NOT EXISTS, OR REPLACE), nothing
                              but plain SQL, names without a schema (the script sets search_path)
    sql/<part>/upgrade/N.sql  run before them over an installation older than version N: changes tables, drops functions
                              that are gone, or whose result or names of arguments changed; N is then in VERSIONS
    sql/<part>/down.sql       one statement, run first when the part is removed: undoes what is outside of the schema

Functions, tables, sequences, views and types that the files create at the start of a line are removed by name.
"""

from __future__ import annotations

import enum
import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from replicad.errors import SchemaMissing, SchemaTooNew
from replicad.postgres.bridge import Database
from replicad.postgres.literals import quote_ident, quote_literal

Part = Literal["tube", "stream", "federation", "ownership", "cache", "presence"]
Direction = Literal["up", "down"]

VERSIONS: dict[Part, int] = {"tube": 2, "stream": 2, "federation": 1, "ownership": 1, "cache": 2, "presence": 1}
DEFAULT_SCHEMAS: dict[Part, str] = {
    "tube": "tube",
    "stream": "replicad",
    "federation": "replicad",
    "ownership": "replicad",
    "cache": "replicad",
    "presence": "replicad",
}

_SQL = Path(__file__).parent / "sql"
_CREATED = re.compile(
    r"^CREATE\s+(?:OR\s+REPLACE\s+|UNLOGGED\s+)?(FUNCTION|PROCEDURE|TABLE|SEQUENCE|VIEW|TYPE|DOMAIN)\s+(?:IF\s+NOT\s+EXISTS\s+)?(\w+)",
    re.MULTILINE,
)


class Outcome(enum.Enum):
    """What `install` did."""

    INSTALLED = "installed"
    UPGRADED = "upgraded"
    UNCHANGED = "unchanged"


@dataclass(frozen=True, slots=True)
class Installed:
    """What a schema holds of a part. `digest` tells two builds of one version apart."""

    version: int
    digest: str


def script(part: Part, schema: str | None, direction: Direction) -> str:
    """The whole SQL that installs (`up`) or removes (`down`) a part, for psql or any other client, in one transaction.

    Without `schema` it works in the current schema, the first of the search_path that exists. Both directions may be
    repeated. `up` over an older version upgrades it and keeps all data; over a newer one it fails.
    """
    values = {
        "part": part,
        "where": quote_ident(schema) if schema else "that comes first in search_path",
        "schema": quote_literal(schema) if schema else "NULL::text",
        "version": str(VERSIONS[part]),
        "digest": _digest(part),
    }
    values |= _created(part)
    if direction == "down":
        return _fill("down", values | {"prelude": _prelude(part)})
    texts = [f"-- {name}\n{text.strip()}\n" for name, text in _files(part)]
    return "\n".join([_fill("up", values | {"steps": _steps(part)}), *texts, _fill("up_end", values)])


async def read_installed(db: Database, part: Part, schema: str | None = None) -> Installed | None:
    """What the schema (default: the part's own) holds, or None."""
    table = f"{quote_ident(schema or DEFAULT_SCHEMAS[part])}.{part}_version"
    if await db.fetch_value("SELECT to_regclass($1) IS NULL", table):
        return None
    row = await db.fetch_row(f"SELECT version, digest FROM {table}")
    return None if row is None else Installed(row["version"], row["digest"])


async def install(db: Database, part: Part, schema: str | None = None) -> Outcome:
    """Make the part be there in its present version: installs it, upgrades an older one, or leaves it as it is.

    Raises SchemaTooNew, and DatabaseRefused where the user may not create it.
    """
    schema = schema or DEFAULT_SCHEMAS[part]
    present = await read_installed(db, part, schema)
    _refuse_newer(present, part, schema)
    if present == Installed(VERSIONS[part], _digest(part)):
        return Outcome.UNCHANGED
    async with db.connection() as connection:
        await connection.execute(script(part, schema, "up"))
    return Outcome.INSTALLED if present is None else Outcome.UPGRADED


async def upgrade(db: Database, part: Part, schema: str | None = None) -> Outcome:
    """`install`, but only where a version is there already. Raises SchemaMissing, and what `install` raises."""
    schema = schema or DEFAULT_SCHEMAS[part]
    if await read_installed(db, part, schema) is None:
        raise _missing(part, schema)
    return await install(db, part, schema)


async def require(db: Database, part: Part, schema: str | None = None) -> None:
    """See that the part can be used. Raises SchemaMissing (also for an older version) or SchemaTooNew."""
    schema = schema or DEFAULT_SCHEMAS[part]
    present = await read_installed(db, part, schema)
    _refuse_newer(present, part, schema)
    if present is None:
        raise _missing(part, schema)
    if present.version < VERSIONS[part]:
        raise SchemaMissing(
            f'schema "{schema}" holds version {present.version} of the {part} part, this replicad needs '
            f"{VERSIONS[part]}: run `replicad sql up` through psql, or start `replicad serve`, which upgrades it."
        )


async def uninstall(db: Database, part: Part, schema: str | None = None) -> bool:
    """Remove the part with everything in it; False where it was not installed.

    Raises SchemaTooNew (the newer replicad knows what there is to remove), and DatabaseError where something that is
    not ours depends on it.
    """
    schema = schema or DEFAULT_SCHEMAS[part]
    present = await read_installed(db, part, schema)
    _refuse_newer(present, part, schema)
    if present is not None:
        async with db.connection() as connection:
            await connection.execute(script(part, schema, "down"))
    return present is not None


def _missing(part: Part, schema: str) -> SchemaMissing:
    return SchemaMissing(
        f'the {part} part of replicad is not installed in schema "{schema}": run `replicad sql up` through psql, or '
        "start `replicad serve`, which installs it."
    )


def _refuse_newer(present: Installed | None, part: Part, schema: str) -> None:
    if present is not None and present.version > VERSIONS[part]:
        raise SchemaTooNew(
            f'schema "{schema}" holds version {present.version} of the {part} part, this replicad knows '
            f"{VERSIONS[part]}: use the newer replicad."
        )


def _fill(template: str, values: dict[str, str]) -> str:
    text = (_SQL / "schema" / f"{template}.sql").read_text(encoding="utf-8")
    return re.sub(r"\{(\w+)\}", lambda found: values[found.group(1)], text)


def _files(part: Part) -> list[tuple[str, str]]:
    return [(path.name, path.read_text(encoding="utf-8")) for path in sorted((_SQL / part).glob("[0-9]*.sql"))]


def _digest(part: Part) -> str:
    return hashlib.sha256("".join(text for _, text in _files(part)).encode()).hexdigest()[:16]


def _steps(part: Part) -> str:
    steps = sorted((_SQL / part / "upgrade").glob("*.sql"), key=lambda path: int(path.stem))
    return "\n".join(
        f"    IF present < {int(path.stem)} THEN\n{_execute(path.read_text(encoding='utf-8'))}\n    END IF;"
        for path in steps
    )


def _prelude(part: Part) -> str:
    first = _SQL / part / "down.sql"
    return _execute(first.read_text(encoding="utf-8")) if first.exists() else ""


def _created(part: Part) -> dict[str, str]:
    """The names of all that the files create, as SQL arrays by kind."""
    names: dict[str, list[str]] = {"routines": [], "relations": [f"{part}_version"], "types": []}
    kinds = {"FUNCTION": "routines", "PROCEDURE": "routines", "TYPE": "types", "DOMAIN": "types"}
    for _, text in _files(part):
        for kind, name in _CREATED.findall(text):
            names[kinds.get(kind, "relations")].append(name)
    arrays = {key: ", ".join(map(quote_literal, sorted(set(found)))) for key, found in names.items()}
    return {key: f"ARRAY[{items}]::text[]" for key, items in arrays.items()}


def _execute(text: str) -> str:
    """A statement of PL/pgSQL that runs these statements."""
    return f"    EXECUTE $replicad_text$\n{text.strip()}\n$replicad_text$;"
