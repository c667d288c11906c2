"""Run a command on the tubes of one database, or of several ("islands"), and name the database of each result."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, TypeVar

from replicad.config.settings import DatabaseSettings
from replicad.errors import DatabaseError, DatabaseUnavailable, ReplicadError, TubeRefused, UsageError
from replicad.terminal.command import settings_options
from replicad.terminal.database import on_database
from replicad.terminal.failures import say
from replicad.tubes.shards import ShardSet, shard_of_schema

if TYPE_CHECKING:
    from replicad.postgres.bridge import Database

T = TypeVar("T")

MOST_NAMED = 10  # changes that are named when a later one fails

island_options = settings_options(DatabaseSettings, several="database")


@dataclass(frozen=True, slots=True)
class NoIndex:
    """A table whose backfill in the order of this column reads and sorts all of it again and again."""

    table: str
    column: str
    rows: int  # an estimate
    partitioned: bool
    key: tuple[str, ...]

    def __str__(self) -> str:
        how = "" if self.partitioned else " CONCURRENTLY"
        columns = ", ".join(map(quoted, dict.fromkeys([self.column, *self.key])))
        index = f"CREATE INDEX{how} ON {self.table} ({columns})"
        return (
            f"no index on {self.table} begins with {self.column}, so each 100,000 of about {self.rows:,} ids read and "
            f"sort the whole table; to make the backfill fast: {index}"
        )


def quoted(name: str) -> str:
    """An identifier in SQL."""
    return '"' + name.replace('"', '""') + '"'


@dataclass(frozen=True, slots=True)
class NamedTable:
    """A table that a command names, and the shard that the command gives it. None: the default."""

    name: str
    shard: int | None


@dataclass(frozen=True, slots=True)
class TableMatch:
    """A table that a pattern names: as SQL writes it, without quotes, and whether its key needs ids of kind text."""

    tbl: str
    plain: str
    has_key: bool
    needs_text: bool


def is_pattern(name: str) -> bool:
    """Whether a name of a table has a wildcard."""
    return "*" in name or "?" in name


def matches(table: str, patterns: Iterable[str]) -> bool:
    """Whether a table, as SQL writes its name, is among those that the patterns or names mean."""
    return any(fnmatchcase(table.replace('"', ""), pattern.replace('"', "")) for pattern in patterns)


def _like(pattern: str) -> str:
    """A pattern of a shell as one of LIKE."""
    escaped = pattern.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")
    return escaped.replace("*", "%").replace("?", "_")


@dataclass(frozen=True, slots=True)
class Tubes:
    """The SQL functions of the tubes of one database."""

    db: Database
    schema: str
    stream_schema: str
    changed: list[str] = field(default_factory=list)  # what `change` has changed, for a command that fails later

    async def rows(self, function: str, *args: object) -> list[Any]:
        """The rows that a function returns."""
        from replicad.postgres.statements import call_rows

        return await call_rows(self.db, self.schema, function, *args)

    async def value(self, function: str, *args: object) -> Any:
        """The value that a function returns."""
        from replicad.postgres.statements import call_value

        return await call_value(self.db, self.schema, function, *args)

    async def backfills(self) -> list[Any]:
        """The backfills that are scheduled or running."""
        from replicad.postgres.statements import statement

        return await self.db.fetch(statement("tube_backfill_states", self.schema))

    async def without_index(self, orders: Sequence[tuple[str, str, Sequence[str]]]) -> list[NoIndex]:
        """The large tables without an index on the column that orders their backfill.

        `orders`: each table with that column, and with the columns of its key.
        """
        from replicad.postgres.statements import statement

        tables, columns = [table for table, _, _ in orders], [column for _, column, _ in orders]
        rows = await self.db.fetch(statement("tube_without_index", self.schema), tables, columns)
        keys = {table: tuple(key) for table, _, key in orders}
        return [NoIndex(**dict(row), key=keys[row["table"]]) for row in rows]

    async def change(self, what: str, function: str, *args: object) -> Any:
        """As `value`, for a function that locks tables; see `change_with_locks`. `what` names the change."""
        from replicad.postgres.statements import call_value
        from replicad.tubes.cli.changing import change_with_locks

        result = await change_with_locks(
            self.db, lambda connection: call_value(connection, self.schema, function, *args), what=what
        )
        self.changed.append(what)
        return result

    async def states(self) -> dict[str, str]:
        """`tube_states` of this database."""
        return await tube_states(self.db, self.schema, self.stream_schema, parked=True, paused=True)

    async def value_with_progress(self, function: str, *args: object) -> Any:
        """As `value`; the progress that the function reports is printed on stderr."""
        from replicad.postgres.statements import call_value

        async with self.db.connection() as connection:
            with connection.remarks(say):
                return await call_value(connection, self.schema, function, *args)

    async def match_tables(self, patterns: Sequence[str], exclude: Sequence[str]) -> list[TableMatch]:
        """The tables that the patterns name (`public.*`; `*` and `?` as in a shell), by name.

        Raises:
            UsageError: a pattern has no schema. TubeRefused: nothing matches, or tables that match have no key.
        """
        from replicad.postgres.statements import statement

        found: dict[str, TableMatch] = {}
        for pattern in patterns:
            schema, dot, name = pattern.rpartition(".")
            if not dot:
                raise UsageError(f"{pattern} has no schema; write the pattern like public.{pattern}")
            ours = [self.schema, self.stream_schema]
            rows = await self.db.fetch(statement("tube_pattern", self.schema), _like(schema), _like(name), ours)
            matches = [TableMatch(**dict(row)) for row in rows]
            found.update({one.tbl: one for one in matches if not any(fnmatchcase(one.plain, out) for out in exclude)})
        if not found:
            raise TubeRefused(f"no table matches {', '.join(patterns)}, or this user may not see it")
        without = [one.plain for one in found.values() if not one.has_key]
        if without:
            raise TubeRefused(
                f"{len(without)} of {len(found)} tables have no primary key and no column id, for example "
                f"{', '.join(without[:5])}: make one, attach them by name with --key, or leave them out by --exclude"
            )
        return sorted(found.values(), key=lambda one: one.plain)

    async def find_tables(self, names: Sequence[str], shards: ShardSet | None) -> list[NamedTable]:
        """The tables that a command names, each with the shard that the command gives it.

        With `shards`, a name without a schema means the tables of that name in the schemas of the shards. If no such
        schema has the table, or the name has a schema, `shards` is the shard of its rows, and must be one number.

        Raises:
            UsageError: a name with a schema, together with several shards.
            TubeRefused: there is no such table, or the name may mean the table of a shard or another one.
        """
        from replicad.postgres.bridge import load_sql

        found: list[NamedTable] = []
        for name in names:
            if shards is None:
                found.append(NamedTable(await self._existing(name), None))
                continue
            there = [] if "." in name else await self.db.fetch(load_sql("tables_of_shards"), name)
            of_shards = [(row["tbl"], shard_of_schema(row["schema"])) for row in there]
            wanted = [tbl for tbl, shard in of_shards if shard is not None and shard in shards]
            if not wanted:
                found.append(await self._single(name, shards))
                continue
            if shards.single is not None:
                await self._refuse_two_meanings(name, wanted[0])
            found += [NamedTable(tbl, None) for tbl in wanted]
        return found

    async def _existing(self, name: str) -> str:
        from replicad.postgres.statements import HOW, find_relation

        if await find_relation(self.db, name) is None:
            raise TubeRefused(f"there is no table {name} in this database: {HOW}")
        return name

    async def _single(self, name: str, shards: ShardSet) -> NamedTable:
        """A table whose shard the command gives."""
        from replicad.postgres.statements import find_relation

        if shards.single is not None and await find_relation(self.db, name) is not None:
            return NamedTable(name, shards.single)
        if "." in name and shards.single is None:
            raise UsageError(
                f"{name} has a schema, and --shard {shards.text} chooses schemas too; give the table's name alone, or "
                "one number"
            )
        raise TubeRefused(
            f"no schema of these shards has a table {name}; a shard's schema is one whose name ends in its "
            "number, such as shard_0001"
        )

    async def _refuse_two_meanings(self, name: str, of_shard: str) -> None:
        from replicad.postgres.statements import find_relation

        plain = await find_relation(self.db, name)
        if plain not in (None, await find_relation(self.db, of_shard)):
            raise TubeRefused(
                f"{name} may be {of_shard}, or the table {name} on the search_path, which has a shard of its own; "
                "name the schema of the table"
            )


def parse_shards(text: str) -> ShardSet:
    """Parse the value of --shard. Raises UsageError."""
    try:
        return ShardSet.parse(text)
    except ValueError as error:
        raise UsageError(f"--shard: {text!r} is not valid; {error}") from None


def on_islands(
    options: Mapping[str, Any],
    work: Callable[[Tubes], Awaitable[T]],
    *,
    statement_timeout: float | None = 60,
) -> list[tuple[str | None, T]]:
    """Run `work` on every database of --database, or on the default one. Returns pairs of name and result.

    The name (host and database) is None if there is only one database. The first failure ends the command, which then
    says what was done before it, and what was not.
    """
    databases: Sequence[str] = options.get("database") or ()
    found: list[tuple[str | None, T]] = []
    for number, url in enumerate(databases or (None,)):
        changed: list[str] = []

        async def run(db: Database, settings: DatabaseSettings, changed: list[str] = changed) -> tuple[str, T]:
            return str(db.target), await work(Tubes(db, settings.tube_schema, settings.stream_schema, changed))

        try:
            name, result = on_database(
                {**options, "database": url}, run, part="tube", statement_timeout=statement_timeout
            )
        except ReplicadError:
            for line in _report(databases, number, changed):
                say(line)
            raise
        found.append((name if len(databases) > 1 else None, result))
    return found


def _report(databases: Sequence[str], number: int, changed: Sequence[str]) -> list[str]:
    """What a command has done when it fails on the database with this number, and what it has not done."""
    names = [_name(url, place) for place, url in enumerate(databases)] or [""]
    lines = []
    if changed:
        where = f" on {names[number]}" if len(names) > 1 else ""
        more = f", and {len(changed) - MOST_NAMED:,} more" if len(changed) > MOST_NAMED else ""
        lines.append(f"changed{where} before the failure: {'; '.join(changed[-MOST_NAMED:])}{more}")
    if len(names) > 1:
        parts = [("done on", names[:number]), ("failed on", [names[number]]), ("not begun on", names[number + 1 :])]
        lines.append("; ".join(f"{what} {', '.join(which)}" for what, which in parts if which))
    return lines


def _name(url: str, place: int) -> str:
    """How a message names one of several databases."""
    from replicad.postgres.failures import parse_target

    try:
        return str(parse_target(url))
    except UsageError:
        return f"--database number {place + 1}"


def with_island(found: Sequence[tuple[str | None, Sequence[Mapping[str, Any]]]]) -> list[dict[str, Any]]:
    """The rows of all islands in one list; if there are several, each row has its `island`."""
    return [{**({} if name is None else {"island": name}), **dict(row.items())} for name, rows in found for row in rows]


async def tube_states(
    db: Database,
    tube_schema: str,
    stream_schema: str,
    *,
    without: Container[str] = (),
    parked: bool = False,
    paused: bool = False,
) -> dict[str, str]:
    """The faults by tube: from the catalogs, the rights of this session, and the reports of running daemons.

    Tubes that are ok are left out, and reports whose codes are in `without`. `parked`, `paused`: parked
    ids count as a fault, and so does a pause.

    If the reports of daemons cannot be read (no right, no such table), they are left out too.
    """
    from replicad.postgres.statements import statement
    from replicad.remedies import Remedy, word
    from replicad.streams.daemons import DaemonReports
    from replicad.tubes.pods import load_tubes
    from replicad.tubes.untouched import load_untouched

    reasons: dict[str, list[str]] = {}
    read_only = await _read_only(db)
    for tube in await load_tubes(db, tube_schema):
        reasons[tube.name] = list(read_only)
        if tube.paused is not None and paused:
            remedy = Remedy.make("resume_tube", tube=word(tube.name))
            reasons[tube.name].append(f"{tube.paused}; no reader gets its pods until `{remedy}`")
        if tube.fault is not None:
            reasons[tube.name].append(tube.fault)
    for name, reason in (await load_untouched(db, tube_schema)).items():
        reasons.setdefault(name, []).append(reason)
    for row in await db.fetch(statement("tube_parked_counts", tube_schema)) if parked else ():
        remedy = Remedy.make("list_parked", tube=word(row["tube"]))
        number = row["parked"]
        reasons.setdefault(row["tube"], []).append(
            f"{number:,} pod{' is' if number == 1 else 's are'} parked, so these rows are not downstream: `{remedy}`"
        )
    try:
        reported = await DaemonReports(db, stream_schema).troubles()
    except DatabaseUnavailable:
        raise
    except DatabaseError:
        reported = []
    for one in reported:
        wanted = one.kind == "tube" and one.code not in without
        known = reasons.setdefault(one.name, []) if wanted else None
        if known is not None and one.reason not in known:  # several daemons may report the same
            known.append(one.reason)
    return {name: " Also: ".join(found) for name, found in reasons.items() if found}


async def _read_only(db: Database) -> list[str]:
    """One sentence if this session may not write. A daemon of the same user then may not write either."""
    if await db.fetch_value("SELECT current_setting('transaction_read_only')") == "off":
        return []
    return [
        f'user "{db.target.user}" may only read here (a standby, or default_transaction_read_only is on for this user, '
        "database or server): a daemon that connects like this refuses every request about tubes and cannot report "
        "its troubles here"
    ]
