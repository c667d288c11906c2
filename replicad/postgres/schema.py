"""Installs, upgrades and removes the SQL parts in the user's database, by scripts that psql can run too.

Each feature's folder has its part in `sql/`. This file finds out which version is installed, and decides what to do;
`schema_text` builds the SQL. The files of a part:

    sql/part.toml       name, where the part is at home, its `version`, `serves`: the oldest version of programs that
                        can use this one (tests run such a program against it), and `files`: the names of the next files
    sql/TOPIC.sql       run in the order of `files` at every installation: idempotent (IF NOT EXISTS, OR REPLACE),
                        nothing but plain SQL, names without a schema (the script sets search_path). A function with a
                        COMMENT ON is public: users may call it, and docs/sql.md lists it. All other functions, and all
                        tables, are for replicad's own programs
    sql/upgrade/N.sql   run before them over an installation older than version N: changes tables, drops functions that
                        are removed, or whose result or names of arguments changed; N is then the version in part.toml
    sql/down.sql        one statement, run first when the part is removed: undoes changes outside of the schema
    sql/released.json   the objects that each released version created
    sql/query/TOPIC.sql not installed: queries of the program, see `statements`

Functions, tables, sequences, views and types that the files create at the start of a line are removed by name.

Versions. The number of a part grows by one with every release that changes its SQL; tests/schema has the digest of
each. Programs of neighbouring versions run side by side while an installation is upgraded, so a function that an older
program calls keeps its name, its arguments and the columns of its result. A function that has to change gets a new
name; the old function stays as long as `serves` names a version that calls it. A program never touches an installation
that is newer than itself, and uses it only if that installation declares that it serves programs of this version.

Builds. Within one version the digest distinguishes development builds. A build replaces the SQL of another build once.
If it is replaced itself later, it leaves the SQL as it is. So two builds that run side by side do not replace each
other again and again. `replicad sql up` always replaces.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

from replicad import sqlstates
from replicad.errors import DatabaseError, DatabaseRefused, SchemaMissing, SchemaTooNew
from replicad.postgres import schema_text
from replicad.postgres.literals import quote_ident
from replicad.postgres.schema_text import Direction, Part
from replicad.sqlstates import means

if TYPE_CHECKING:
    from replicad.postgres.bridge import Connection, Database

__all__ = [
    "PARTS",
    "Direction",
    "Installed",
    "Outcome",
    "Part",
    "install",
    "read_installed",
    "remark",
    "require",
    "script",
    "uninstall",
    "upgrade",
]

PARTS: dict[Part, schema_text.Declaration] = dict(schema_text.declarations())
"""The declarations of all parts, by name; a part comes after the parts that it needs."""


class Outcome(enum.Enum):
    """What `install` did."""

    INSTALLED = "installed"
    UPGRADED = "upgraded"
    UNCHANGED = "unchanged"
    NEWER = "newer"
    """Nothing: a newer version is installed, and it serves this program."""
    OTHER_BUILD = "other_build"
    """Nothing: another build of the same version has replaced this one's SQL, or this user may not replace it."""


@dataclass(frozen=True, slots=True)
class Installed:
    """The installation of a part in a schema.

    `digest` distinguishes builds of one version; `replaced` are the digests of the builds before.
    `serves` is the oldest version of programs that can use it.
    """

    version: int
    digest: str
    serves: int
    replaced: tuple[str, ...] = ()


def script(part: Part, schema: str | None, direction: Direction) -> str:
    """The whole SQL that installs (`up`) or removes (`down`) a part, for psql or any other client, in one transaction.

    Without `schema` it works in the current schema, the first of the search_path that exists. Both directions may be
    repeated. `up` over an older version upgrades it and keeps all data; over a newer one it fails.
    """
    body = schema_text.up(PARTS[part], schema) if direction == "up" else schema_text.down(part, schema)
    return f"BEGIN;\n{body}COMMIT;\n"


async def read_installed(db: Database | Connection, part: Part, schema: str | None = None) -> Installed | None:
    """The installation in the schema (default: the part's own), or None.

    Raises:
        DatabaseRefused: this user may not read it.
    """
    schema = schema or PARTS[part].schema
    found = await db.fetch_row(_FIND, schema, f"{part}_version")
    if found is None or not found["ours"]:
        return None
    if not found["readable"]:
        raise DatabaseRefused(
            f'role "{found["role"]}" may not read what is installed in schema "{schema}": have its owner run '
            f"GRANT USAGE ON SCHEMA {quote_ident(schema)} and GRANT SELECT ON {part}_version, as on all else that it "
            "shall use.",
            sqlstate=sqlstates.NO_RIGHT[0],
        )
    table = f"{quote_ident(schema)}.{part}_version"
    row = await db.fetch_row(f"SELECT version, digest, serves FROM {table}")
    if row is None:
        return None
    digest, *replaced = row["digest"].split() or [""]
    return Installed(row["version"], digest, row["serves"], tuple(replaced))


async def install(db: Database, part: Part, schema: str | None = None) -> Outcome:
    """Install the part, upgrade an older version, or leave a usable one as it is.

    Daemons that start at the same time do it one after the other. It is one transaction; if it is interrupted, nothing
    has changed.

    Raises:
        SchemaTooNew: a newer version is installed that does not serve this program.
        SchemaCollision: objects that are not ours have the names that it needs.
        DatabaseRefused: it must be installed or upgraded, and this user may not do that.
        DatabaseError: a table was locked for too long.
    """
    schema = schema or PARTS[part].schema
    present = await read_installed(db, part, schema)
    settled = _settled(present, part, schema)
    if settled is not None:
        return settled
    try:
        return await _install(db, part, schema)
    except DatabaseError as error:
        if means(error.sqlstate, sqlstates.NO_RIGHT) and present is not None and present.version == PARTS[part].version:
            return Outcome.OTHER_BUILD
        holder = await db.fetch_value(_LOCKED_BY, schema) if means(error.sqlstate, sqlstates.TIMED_OUT) else None
        raise _explained(error, part, schema, present, holder) from error


async def upgrade(db: Database, part: Part, schema: str | None = None) -> Outcome:
    """`install`, but only if some version is installed. Raises SchemaMissing, and what `install` raises."""
    schema = schema or PARTS[part].schema
    if await read_installed(db, part, schema) is None:
        raise _missing(part, schema)
    return await install(db, part, schema)


async def require(db: Database, part: Part, schema: str | None = None) -> Installed:
    """Check that the part can be used. Changes nothing.

    Raises:
        SchemaMissing: it is not installed, or in an older version.
        SchemaTooNew: a newer version is installed that does not serve this program.
    """
    schema = schema or PARTS[part].schema
    present = await read_installed(db, part, schema)
    if present is None:
        raise _missing(part, schema)
    if present.version < PARTS[part].version:
        raise SchemaMissing(
            f'schema "{schema}" holds version {present.version} of the {part} part, which is older than version '
            f"{PARTS[part].version} of this program: {_remedy(part, schema, 'upgrades')}."
        )
    _refuse_newer(present, part, schema)
    return present


def remark(present: Installed | None, part: Part, schema: str | None = None) -> str | None:
    """A sentence for the operator if the part is usable but of another build than this program; else None."""
    schema = schema or PARTS[part].schema
    if present is None:
        return None
    if present.version > PARTS[part].version:
        return (
            f'schema "{schema}" holds version {present.version} of the {part} part, which is newer than version '
            f"{PARTS[part].version} of this program and serves programs from version {present.serves} on: it is used "
            "as it is. Upgrade this program soon."
        )
    if present.version == PARTS[part].version and present.digest != schema_text.digest(part):
        return (
            f'schema "{schema}" holds the {part} part of another build of version {present.version}: it is used as it '
            f"is. To replace it by this build's: {_script(part, schema)}."
        )
    return None


async def uninstall(db: Database, part: Part, schema: str | None = None) -> bool:
    """Remove the part with all its data; False if it was not installed.

    Raises SchemaTooNew (only the newer replicad knows what to remove), and DatabaseError if an object that is not ours
    depends on it.
    """
    schema = schema or PARTS[part].schema
    present = await read_installed(db, part, schema)
    if present is not None and present.version > PARTS[part].version:
        raise _too_new(present, part, schema)
    if present is not None:
        async with db.connection() as connection:
            await connection.execute(script(part, schema, "down"))
    return present is not None


# Whether the table is there, whatever this user may read. A user's own table of that name is not ours.
_FIND = """
    SELECT c.relkind = 'r' AND count(a.attname) = 3 AS ours, current_user AS role,
        has_schema_privilege(n.oid, 'USAGE') AND has_table_privilege(c.oid, 'SELECT') AS readable
    FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
        LEFT JOIN pg_attribute a ON a.attrelid = c.oid AND NOT a.attisdropped
            AND a.attname IN ('version', 'digest', 'installed_at')
    WHERE n.nspname = $1 AND c.relname = $2 GROUP BY n.oid, c.oid, c.relkind
"""


# Whose session holds the lock that installers take in turn. Every role that may connect can take it.
_LOCKED_BY = """
    SELECT format('pid %s (%s, role %s)', a.pid, a.application_name, a.usename)
    FROM pg_locks l JOIN pg_stat_activity a ON a.pid = l.pid
    WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 2 AND a.datname = current_database()
        AND l.classid = hashtext('replicad schema')::oid AND l.objid = hashtext($1)::oid LIMIT 1
"""
LOCK_WAIT = 20.0  # seconds for the lock, as the script waits for tables; another installer takes less


async def _install(db: Database, part: Part, schema: str) -> Outcome:
    async with db.connection() as connection, connection.transaction():
        await connection.execute("SELECT set_config('lock_timeout', $1, true)", f"{LOCK_WAIT * 1000:.0f}ms")
        # As in the script; then the installed version is read again, since another daemon may have been first.
        await connection.execute("SELECT pg_advisory_xact_lock(hashtext('replicad schema'), hashtext($1))", schema)
        present = await read_installed(connection, part, schema)
        settled = _settled(present, part, schema)
        if settled is None:
            await connection.execute(schema_text.up(PARTS[part], schema))
            settled = Outcome.INSTALLED if present is None else Outcome.UPGRADED
        return settled


def _settled(present: Installed | None, part: Part, schema: str) -> Outcome | None:
    """The outcome if nothing must be done, else None. Raises SchemaTooNew."""
    if present is None or present.version < PARTS[part].version:
        return None
    _refuse_newer(present, part, schema)
    if present.version > PARTS[part].version:
        return Outcome.NEWER
    mine = schema_text.digest(part)
    if present.digest == mine:
        return Outcome.UNCHANGED
    return Outcome.OTHER_BUILD if mine in present.replaced else None


def _refuse_newer(present: Installed, part: Part, schema: str) -> None:
    if present.version > PARTS[part].version and present.serves > PARTS[part].version:
        raise _too_new(present, part, schema)


def _too_new(present: Installed, part: Part, schema: str) -> SchemaTooNew:
    return SchemaTooNew(
        f'schema "{schema}" holds version {present.version} of the {part} part, this replicad knows '
        f"{PARTS[part].version}: use the newer replicad."
    )


def _missing(part: Part, schema: str) -> SchemaMissing:
    return SchemaMissing(
        f'the {part} part of replicad is not installed in schema "{schema}": {_remedy(part, schema, "installs")}.'
    )


def _remedy(part: Part, schema: str, verb: str) -> str:
    """What to run; `verb` is installs or upgrades."""
    command = PARTS[part].installer if verb == "installs" else "replicad serve"
    start = "start" if command == "replicad serve" else "run"
    return f"{start} `{command}`, which {verb} it, or run what `{_script_words(part, schema)}` prints through psql"


def _script(part: Part, schema: str) -> str:
    return f"`{_script_words(part, schema)} | psql -v ON_ERROR_STOP=1 -d DATABASE`"


def _script_words(part: Part, schema: str) -> str:
    where = "" if schema == PARTS[part].schema else f" --schema {schema}"
    return f"replicad sql up {part}{where}"


def _explained(
    error: DatabaseError, part: Part, schema: str, present: Installed | None, holder: str | None
) -> DatabaseError:
    """The same failure with its meaning for the installation and the remedy. Nothing was changed.

    `holder`: the session that holds the lock of the installers.
    """
    target = PARTS[part].version
    done = "installed" if present is None else f"upgraded from version {present.version} to version {target}"
    if means(error.sqlstate, sqlstates.NO_RIGHT):
        advice = f"have its owner, or a superuser, run {_script(part, schema)}"
    elif holder is not None:
        advice = f"{holder} holds the lock of the installation; end that session (pg_terminate_backend) and start again"
    elif means(error.sqlstate, sqlstates.TIMED_OUT):
        advice = "a table stayed locked; end long transactions (see pg_stat_activity) and start again"
    else:
        return error
    return type(error)(
        f'the {part} part of replicad could not be {done} in schema "{schema}", and nothing was changed: {advice}. '
        f"{error}",
        sqlstate=error.sqlstate,
    )
