"""A feature's part of the file: its keys, how its objects are found in a database, and how one is made or changed.

An object (a stream, a tube) is a mapping of values by key. The *normal form* has every key that describes the object,
defaults included, and names as the database has them. `read` gives the file's values with defaults; `normal` finds the
names.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from replicad.config.declaring import seconds, size

if TYPE_CHECKING:
    from replicad.config.settings import DatabaseSettings
    from replicad.postgres.bridge import Database

Values = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class SectionKey:
    """One key of an object.

    `read` turns what TOML has into the value and raises ValueError with what to give. `inner`: the value is a table of
    named tables with these keys. `once`: it says what to do when the object is made, and describes nothing: it is
    neither compared nor exported. `fixed`: it cannot be changed later; the text says why, and what to do.
    """

    name: str
    read: Callable[[Any], Any]
    default: Any = None
    required: bool = False
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
    lists: str = ""  # what is in a list or inner table, and the command that removes one, for `{name}` and `{one}`

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


# --- readers of values: what TOML has to the value, ValueError with what to give ---


def text(value: Any) -> str:
    """A text that is not empty."""
    if not isinstance(value, str) or not value:
        raise ValueError("a text in quotes")
    return value


def whole(low: int, high: int) -> Callable[[Any], int]:
    """A whole number in a range."""

    def read(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ValueError(f"a whole number from {low} to {high}")
        return value

    return read


def amount(low: int, high: int) -> Callable[[Any], int]:
    """A number of bytes, or a text such as `64MiB`."""

    def read(value: Any) -> int:
        wanted = f'a number of bytes from {low} to {high}, such as 1048576 or "1MiB"'
        try:
            found = size(value) if isinstance(value, str) else whole(low, high)(value)
        except ValueError:
            raise ValueError(wanted) from None
        if not low <= found <= high:
            raise ValueError(wanted)
        return found

    return read


def duration(low: float, high: float) -> Callable[[Any], float]:
    """A number of seconds, or a text such as `30s` or `7d`."""

    def read(value: Any) -> float:
        wanted = f'a time from {low:g} to {high:g} seconds, such as 30, "500ms", "2m" or "7d"'
        try:
            found = seconds(value) if isinstance(value, str) else _number(value)
        except ValueError:
            raise ValueError(wanted) from None
        if not low <= found <= high:
            raise ValueError(wanted)
        return found

    return read


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError("a number")  # noqa: TRY004 - what a person wrote is wrong, not the program
    return float(value)


def choice(*words: str) -> Callable[[Any], str]:
    """One of a few words."""

    def read(value: Any) -> str:
        if value not in words:
            raise ValueError(" or ".join(f'"{word}"' for word in words))
        return str(value)

    return read


def texts(value: Any) -> tuple[str, ...]:
    """A list of texts, in no order and each once."""
    if not isinstance(value, list) or not all(isinstance(one, str) and one for one in value):
        raise ValueError('a list of texts, such as ["a", "b"]')
    return tuple(sorted(set(value)))


def tables(value: Any) -> dict[str, Any]:
    """A table of named tables; their keys are the keys of `SectionKey.inner`."""
    if not isinstance(value, dict) or not all(isinstance(one, dict) for one in value.values()):
        raise ValueError("a table for each name")
    return value


def described(keys: Sequence[SectionKey]) -> list[SectionKey]:
    """The keys that describe an object."""
    return [key for key in keys if not key.once]


BARE = re.compile(r"[A-Za-z0-9_-]+")
