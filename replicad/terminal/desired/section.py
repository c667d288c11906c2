"""A feature's part of the file: its keys, finding its objects in a database, and making or changing an object.

An object (a stream, a tube) is a mapping of values by key. The *normal form* has every key that describes the object,
defaults included, and names as the database has them. `read` gives the file's values with defaults; `normal` finds the
names.

The file is read against the sections, with one sentence for each mistake, and written from them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from replicad.config.declaring import Key, not_known, read_table, read_toml

if TYPE_CHECKING:
    from replicad.config.settings import DatabaseSettings
    from replicad.postgres.bridge import Database

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
