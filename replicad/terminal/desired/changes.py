"""The differences between the file and the database, and making them equal.

Before something is made it is tried: by its own `change`, in a transaction that is rolled back. So plan makes the same
checks as `apply`. Each try waits for locks for a short time only, since writers of a table may have to wait behind it.
An object with many tables is tried table by table, so that no two are locked together.
"""

from __future__ import annotations

import enum
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from shlex import quote
from typing import TYPE_CHECKING, Any, Final

from replicad import sqlstates
from replicad.errors import DatabaseError, DatabaseUnavailable, ReplicadError, SchemaMissing
from replicad.postgres.bridge import Connection, Database
from replicad.postgres.connection import Isolation
from replicad.terminal.desired.section import Section, SectionKey, TargetDatabase, Values, Wanted, described, value_of
from replicad.terminal.failures import as_commands
from replicad.terminal.output import Report, silently

if TYPE_CHECKING:
    from replicad.postgres.failures import Target

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
