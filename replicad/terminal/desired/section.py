"""A feature's part of the file: its keys, finding its objects in a database, and making or changing an object.

An object (a stream, a tube) is a mapping of values by key. The *normal form* has every key that describes the object,
defaults included, and names as the database has them. `read` gives the file's values with defaults; `normal` finds the
names.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from replicad.config.declaring import Key

if TYPE_CHECKING:
    from replicad.config.settings import DatabaseSettings
    from replicad.postgres.bridge import Database

Values = Mapping[str, Any]


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
