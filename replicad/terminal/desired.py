"""What should be in a database, as a file says it: `replicad plan`, `apply` and `export`.

A feature declares its part of the file as a `Section`: its keys, finding its objects in a database, and making or
changing an object. Reading, comparing and writing know no feature.

An object (a stream, a tube) is a mapping of values by key. The *normal form* has every key that describes the object,
defaults included, and names as the database has them. `read` gives the file's values with defaults; `normal` finds the
names.

The file is read against the sections, with one sentence for each mistake, and written from them.
"""

from __future__ import annotations

import enum
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any, Final

from replicad import sqlstates
from replicad.config.declaring import Key, not_known, read_table, read_toml
from replicad.errors import DatabaseError, DatabaseUnavailable, ReplicadError, SchemaMissing
from replicad.postgres.bridge import Connection, Database
from replicad.postgres.connection import Isolation
from replicad.terminal.failures import as_commands
from replicad.terminal.output import Report, silently

if TYPE_CHECKING:
    from replicad.config.settings import DatabaseSettings
    from replicad.postgres.bridge import Database
    from replicad.postgres.failures import Target

Values = Mapping[str, Any]

Wanted = dict[str, dict[str, dict[str, Any]]]
"""Objects by section and name. A section that the file does not have is not in it: the file says nothing of it."""


@dataclass(frozen=True, slots=True)
class SectionKey(Key):
    """A key of an object.

    `inner`: the value is a table of named tables with these keys. `once`: it says what to do when the object is made,
    and describes nothing: it is neither compared nor exported. `fixed`: it cannot be changed later; the text says why,
    and what to do.
    """

    inner: tuple[SectionKey, ...] = ()
    once: bool = False
    fixed: str = ""


@dataclass(frozen=True, slots=True)
class Section:
    """A feature's part of the file, the table called `name`.

    `named`: a table for each object, `[streams.events]`; otherwise the table is the one object, whose name is "".
    `present`: the objects in the database, in normal form; none where the feature is not installed but can be.
    `normal`: the normal form of an object of the file. Raises what making it would raise.
    `change`: make the object, or give it the values that differ. The third argument has the present values, or None.
    `change` runs in a transaction of a trial too (`TargetDatabase.on_trial`), so it uses `TargetDatabase.db` alone.
    `removal`: what the database has beside the file, with the command that removes it.
    `parts`: from the present values (or None) and the object of the file to the objects that together make it. Each is
    tried alone.
    `needs`: the section whose object of the same name must be there first.
    """

    name: str
    one: str  # the word for one object, as in `stream events`
    keys: tuple[SectionKey, ...]
    present: Callable[[TargetDatabase], Awaitable[dict[str, Values]]]
    change: Callable[[TargetDatabase, str, Values | None, Values], Awaitable[None]]
    normal: Callable[[TargetDatabase, str, Values], Awaitable[Values]]
    removal: Callable[[str], str]
    parts: Callable[[Values | None, Values], Iterable[Values]] = lambda _, wanted: (wanted,)
    needs: str = ""
    named: bool = True
    lists: str = ""  # items of a list or inner table, and the command that removes one, for `{name}` and `{one}`

    def label(self, name: str) -> str:
        """The object in messages: `stream events`, `presence`."""
        return f"{self.one} {name}" if self.named else self.one


@dataclass(frozen=True, slots=True)
class TargetDatabase:
    """The database that is looked at and changed, and the names of replicad's schemas in it.

    `on_trial`: `db` is one connection, whose transaction is rolled back: wait for no lock, and do one thing at a time.
    """

    db: Database
    settings: DatabaseSettings
    on_trial: bool = False


async def as_it_stands(place: TargetDatabase, name: str, values: Values) -> Values:  # noqa: ARG001
    """`Section.normal` where the file's values are the normal form."""
    return values


def described(keys: Sequence[SectionKey]) -> list[SectionKey]:
    """The keys that describe an object."""
    return [key for key in keys if not key.once]


BARE = re.compile(r"[A-Za-z0-9_-]+")


def read_file(path: Path, sections: Sequence[Section]) -> tuple[Wanted, list[str]]:
    """The objects of the file, defaults filled in, and a sentence for each mistake.

    Raises:
        UsageError: the file cannot be read, or is not TOML.
    """
    return read_tables(read_toml(path), sections, str(path))


def read_tables(found: Mapping[str, Any], sections: Sequence[Section], where: str) -> tuple[Wanted, list[str]]:
    """`read_file` for what TOML has. `where` begins each sentence."""
    faults: list[str] = []
    by_name = {section.name: section for section in sections}
    wanted: Wanted = {}
    for name, content in found.items():
        place = f"{where}: {name}"
        section = by_name.get(name)
        if section is None:
            faults.append(not_known(place, name, by_name))
        elif not isinstance(content, dict):
            faults.append(f"{place} must be a table: write [{name}{'.NAME' if section.named else ''}]")
        elif not section.named:
            wanted[name] = {"": _object(content, section.keys, place, faults)}
        else:
            wanted[name] = dict(_named(content, section.keys, place, faults))
    return wanted, faults


def _named(
    content: Mapping[str, Any], keys: Sequence[SectionKey], place: str, faults: list[str]
) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, values in content.items():
        inside = f"{place}.{quoted(name)}"
        if isinstance(values, dict):
            yield name, _object(values, keys, inside, faults)
        else:
            faults.append(f"{inside} must be a table: write [{inside.partition(': ')[2]}]")


def _object(values: Mapping[str, Any], keys: Sequence[SectionKey], place: str, faults: list[str]) -> dict[str, Any]:
    found = {key.name: key.default for key in keys}
    found |= read_table(values, keys, lambda name: f"{place}.{quoted(name)}", faults.append)
    for key in keys:
        if key.inner and key.name in values:
            found[key.name] = dict(_named(found[key.name], key.inner, f"{place}.{key.name}", faults))
    return found


# --- writing ---


def render(objects: Mapping[str, Mapping[str, Values]], sections: Sequence[Section]) -> str:
    """The file that says that these objects should be there. Values that are the default are left out."""
    blocks = []
    for section in sections:
        for name, values in sorted(objects.get(section.name, {}).items()):
            head = f"{section.name}.{quoted(name)}" if section.named else section.name
            blocks += list(_blocks(head, section.keys, values))
    return "\n\n".join(blocks) + "\n" if blocks else ""


def _blocks(head: str, keys: Sequence[SectionKey], values: Values) -> Iterator[str]:
    lost = [key.name for key in keys if key.required and values[key.name] is None]
    if lost:
        yield f"# [{head}] is left out: its {' and '.join(lost)} does not exist any more, so it cannot be made again"
        return
    plain = [key for key in described(keys) if not key.inner and values[key.name] != key.default]
    yield "\n".join([f"[{head}]", *(f"{key.name} = {value_of(values[key.name])}" for key in plain)])
    for key in described(keys):
        for name, inside in sorted((values[key.name] or {}).items()) if key.inner else ():
            yield from _blocks(f"{head}.{key.name}.{quoted(name)}", key.inner, inside)


def quoted(name: str) -> str:
    """A key as TOML wants it."""
    return name if BARE.fullmatch(name) else value_of(name)


def value_of(value: Any) -> str:
    """A value as TOML writes it: texts, numbers, lists of texts."""
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(value_of, value))}]"
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    if isinstance(value, str):  # as in JSON, but for DEL, which TOML wants escaped
        return re.sub("\x7f", r"\\u007f", json.dumps(value, ensure_ascii=False))
    return str(value)


# The differences between the file and the database, and making them equal.
#
# Before something is made it is tried: by its own `change`, in a transaction that is rolled back. So plan makes the
# same checks as `apply`. Each try waits for locks for a short time only, since writers of a table may have to wait
# behind it. An object with many tables is tried table by table, so that no two are locked together.

LOCK_TIMEOUT: Final = "400ms"  # below deadlock_timeout, so that no transaction of a user is ended
MOST = 20  # sentences of each kind; a fault of hundreds of tables is shown for some
_UNDECIDED: Final = (*sqlstates.TIMED_OUT, *sqlstates.NO_RIGHT, *sqlstates.READ_ONLY, "40P01")
"""Says nothing of the object: a lock, or a role or server that may only read. Another role may apply the file."""


@dataclass(slots=True)
class Tried:
    """Why an object cannot be made, and why some of it could not be tried. Both are empty if it can be made."""

    refused: list[str] = field(default_factory=list)
    untried: list[str] = field(default_factory=list)

    def note(self, kind: list[str], error: ReplicadError) -> None:
        """Add the error's sentence to a list, once."""
        if str(error) not in kind and len(kind) < MOST:
            kind.append(str(error))


class _Within(Connection):
    """The connection of a trial. What would be a transaction is a part of the trial's own.

    It is no savepoint, since the installer of SQL parts knows what it has created by the transaction's number. After a
    failure the connection only reads, so nothing can be kept.
    """

    def __init__(self, connection: Connection) -> None:
        self.__dict__ = connection.__dict__  # the same connection

    async def begin(self, access: str = "") -> None:
        """Open the transaction that is never committed."""
        lock_timeout = f"SET LOCAL lock_timeout = '{LOCK_TIMEOUT}'"
        await self.execute(f"BEGIN ISOLATION LEVEL READ COMMITTED {access}; {lock_timeout}")

    @asynccontextmanager
    async def transaction(
        self,
        *,
        isolation: Isolation = "read_committed",  # noqa: ARG002
        readonly: bool = False,  # noqa: ARG002
        opening: str = "",
        idle: float | None = None,  # noqa: ARG002
    ) -> AsyncIterator[None]:
        """`Connection.transaction`, without an end of its own."""
        try:
            if opening:
                await self.execute(opening)
            yield
        except ReplicadError:
            await self.execute("ROLLBACK")
            await self.begin("READ ONLY")
            raise


class _Lent(Database):
    """A database of one connection."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    @property
    def target(self) -> Target:
        return self._connection.target

    @asynccontextmanager
    async def _borrowed(self, *, reset: bool = False, leader: bool = False) -> AsyncIterator[Connection]:  # noqa: ARG002
        yield self._connection


async def attempt(
    place: TargetDatabase,
    section: Section,
    name: str,
    present: Values | None,
    wanted: Values,
    *,
    first: Sequence[tuple[Section, Values]] = (),
    report: Report = silently,
) -> Tried:
    """Make or change the object and leave nothing behind. `first` is what must be made before, under the same name.

    Raises:
        DatabaseUnavailable, SchemaMissing: the database cannot be used at all.
    """
    tried = Tried()
    parts = list(section.parts(present, wanted))
    for number, part in enumerate(parts, 1):
        if len(parts) > 1:
            report(f"part {number} of {len(parts)}")
        try:
            async with place.db.connection() as connection:  # its end rolls back
                lent = _Within(connection)
                await lent.begin()
                trial = TargetDatabase(_Lent(lent), place.settings, on_trial=True)
                for needed, values in first:
                    await needed.change(trial, name, None, values)
                await section.change(trial, name, present, part)
        except (DatabaseUnavailable, SchemaMissing):
            raise
        except DatabaseError as error:
            undecided = sqlstates.means(error.sqlstate, _UNDECIDED)
            tried.note(tried.untried if undecided else tried.refused, error)
        except ReplicadError as error:
            tried.note(tried.refused, error)
    return tried


NOTHING = "nothing"  # how an absent value is shown


class Action(enum.Enum):
    """What `apply` does about a difference; the value is the mark of its lines."""

    MAKE = "+"
    CHANGE = "~"
    REFUSE = "!"  # it cannot be made so; the line says why
    EXTRA = "?"  # the database has more than the file: apply removes nothing, the line names the command


@dataclass(frozen=True, slots=True)
class Difference:
    """One object that differs. `lines` say how, for people. `present` is None where the object is missing."""

    section: Section
    name: str
    action: Action
    lines: tuple[str, ...]
    present: Values | None = None
    wanted: Values | None = None

    @property
    def label(self) -> str:
        """The object: `stream events`."""
        return self.section.label(self.name)


async def compare(
    place: TargetDatabase, sections: Sequence[Section], wanted: Wanted, report: Report = silently
) -> list[Difference]:
    """The differences, in the order in which they are to be made. Sections that the file does not have are left out.

    Each object to be made or changed is tried; afterwards the database is as before. `report` gets the progress.

    Raises:
        SchemaMissing, DatabaseError: the database cannot be looked at.
    """
    found: list[Difference] = []
    total, looked = sum(len(wanted.get(section.name, {})) for section in sections), 0
    for section in sections:
        if section.name not in wanted:
            continue
        present = await section.present(place)
        for name, values in wanted[section.name].items():
            looked += 1
            about = f"comparing {section.label(name)}, {looked} of {total}"
            report(about)
            needed = [one for one in found if (one.section.name, one.name) == (section.needs, name)]
            for one in await _compare_one(place, section, name, present.get(name), values):
                found.append(await _tried(place, one, needed, _within(report, about)))
        for name in sorted(present.keys() - wanted[section.name].keys()):
            found.append(
                Difference(section, name, Action.EXTRA, (f"is not in the file; {section.removal(quote(name))}",))
            )
    return found


async def _compare_one(
    place: TargetDatabase, section: Section, name: str, present: Values | None, values: Values
) -> list[Difference]:
    try:
        wanted = await section.normal(place, name, values)
    except DatabaseUnavailable:
        raise
    except ReplicadError as error:
        return [Difference(section, name, Action.REFUSE, (as_commands(str(error)),), present)]
    if present is None:
        return [Difference(section, name, Action.MAKE, tuple(_values(section.keys, wanted)), None, wanted)]
    found = []
    changed: list[str] = []
    fixed: list[str] = []
    extra: list[str] = []
    for key in described(section.keys):
        before, after = present[key.name], wanted[key.name]
        for line, more in _key_differences(section, name, key, before, after):
            (extra if more else fixed if key.fixed else changed).append(
                f"{line}{f'; {key.fixed}' if key.fixed else ''}"
            )
    if fixed:
        found.append(Difference(section, name, Action.REFUSE, tuple(fixed), present, wanted))
    elif changed:
        found.append(Difference(section, name, Action.CHANGE, tuple(changed), present, wanted))
    if extra:
        found.append(Difference(section, name, Action.EXTRA, tuple(extra), present, wanted))
    return found


def _within(report: Report, about: str) -> Report:
    return lambda text: report(f"{about}, {text}")


async def _tried(place: TargetDatabase, one: Difference, needed: Sequence[Difference], report: Report) -> Difference:
    """The difference with what trying it has shown: why it cannot be made, or what could not be tried.

    `needed`: the differences of the object that must be there first.
    """
    if one.action not in (Action.MAKE, Action.CHANGE):
        return one
    assert one.wanted is not None
    verb = "made" if one.action is Action.MAKE else "changed"
    first = []
    for other in needed:
        if other.action is Action.REFUSE:
            return replace(one, action=Action.REFUSE, lines=(f"{other.label} is not as the file says: see its line",))
        if other.action is Action.MAKE and other.wanted is not None:
            first.append((other.section, other.wanted))
    tried = await attempt(place, one.section, one.name, one.present, one.wanted, first=first, report=report)
    if tried.refused:
        return replace(one, action=Action.REFUSE, lines=tuple(map(as_commands, tried.refused)))
    untried = (f"it was not tried whether it can be {verb}: {why}" for why in tried.untried)
    return replace(one, lines=(*one.lines, *untried))


def _key_differences(
    section: Section, name: str, key: SectionKey, before: Any, after: Any
) -> Iterator[tuple[str, bool]]:
    """Lines of what differs in one value, and whether it is something that the database has beside the file."""
    if key.inner:
        for one in sorted(after):
            if one not in before:
                yield f"{key.name}.{one}: {', '.join(_values(key.inner, after[one])) or 'as usual'}", False
            else:
                for inner in described(key.inner):
                    for line, _ in _key_differences(
                        section, name, inner, before[one][inner.name], after[one][inner.name]
                    ):
                        yield f"{key.name}.{one}: {line}", False
        for one in sorted(before.keys() - after.keys()):
            yield f"{key.name}.{one} is not in the file; {section.lists.format(name=quote(name), one=quote(one))}", True
    elif isinstance(after, tuple):
        if set(after) - set(before):
            yield f"{key.name}: also {', '.join(sorted(set(after) - set(before)))}", False
        for one in sorted(set(before) - set(after)):
            yield (
                f"{key.name}: {one} is not in the file; {section.lists.format(name=quote(name), one=quote(one))}",
                True,
            )
    elif before != after:
        yield f"{key.name}: {_shown(before)} -> {_shown(after)}", False


def _values(keys: Sequence[SectionKey], values: Values) -> Iterator[str]:
    for key in keys:
        if key.inner:
            for name, inside in sorted(values[key.name].items()):
                yield f"{key.name}.{name}: {', '.join(_values(key.inner, inside)) or 'as usual'}"
        elif values.get(key.name) != key.default:
            yield f"{key.name} = {_shown(values[key.name])}"


def _shown(value: Any) -> str:
    return NOTHING if value in (None, ()) else value_of(value)


async def make(place: TargetDatabase, differences: Sequence[Difference], done: Callable[[Difference], None]) -> None:
    """Make what can be made, one after the other; `done` is called after each. The first failure ends it."""
    for one in differences:
        if one.action in (Action.MAKE, Action.CHANGE):
            assert one.wanted is not None
            await one.section.change(place, one.name, one.present, one.wanted)
            done(one)


async def present_objects(place: TargetDatabase, sections: Sequence[Section]) -> Mapping[str, Mapping[str, Values]]:
    """All objects of the database, by section and name, in normal form."""
    return {section.name: await section.present(place) for section in sections}
