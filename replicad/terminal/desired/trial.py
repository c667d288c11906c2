"""Tries whether an object can be made or changed: by its own `change`, in a transaction that is rolled back.

So the checks are those of `apply`, whatever they are. Each try waits for locks for a short time only, since writers of
a table may have to wait behind it. An object with many tables is tried table by table, so that no two are locked
together.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from replicad import sqlstates
from replicad.errors import DatabaseError, DatabaseUnavailable, ReplicadError, SchemaMissing
from replicad.postgres.bridge import Connection, Database
from replicad.postgres.connection import Isolation
from replicad.terminal.desired.section import Place, Section, Values
from replicad.terminal.progress import Report, silently

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
        """Add the error's sentence to one of the lists, once."""
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
    place: Place,
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
                trial = Place(_Lent(lent), place.settings, on_trial=True)
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
