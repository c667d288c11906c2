"""What differs between the file and the database, and making it equal."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from shlex import quote
from typing import Any

from replicad.errors import DatabaseUnavailable, ReplicadError
from replicad.terminal.desired.section import Key, Place, Section, Values, described
from replicad.terminal.desired.toml import Wanted, value_of
from replicad.terminal.desired.trial import attempt
from replicad.terminal.progress import Report, silently
from replicad.terminal.remedies import as_commands

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
    place: Place, sections: Sequence[Section], wanted: Wanted, report: Report = silently
) -> list[Difference]:
    """The differences, in the order in which they are to be made. Sections that the file does not have are left out.

    What would be made or changed is tried (trial.py); the database is as before. `report` gets the progress.

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
    place: Place, section: Section, name: str, present: Values | None, values: Values
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


async def _tried(place: Place, one: Difference, needed: Sequence[Difference], report: Report) -> Difference:
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


def _key_differences(section: Section, name: str, key: Key, before: Any, after: Any) -> Iterator[tuple[str, bool]]:
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


def _values(keys: Sequence[Key], values: Values) -> Iterator[str]:
    for key in keys:
        if key.inner:
            for name, inside in sorted(values[key.name].items()):
                yield f"{key.name}.{name}: {', '.join(_values(key.inner, inside)) or 'as usual'}"
        elif values.get(key.name) != key.default:
            yield f"{key.name} = {_shown(values[key.name])}"


def _shown(value: Any) -> str:
    return NOTHING if value in (None, ()) else value_of(value)


async def make(place: Place, differences: Sequence[Difference], done: Callable[[Difference], None]) -> None:
    """Make what can be made, one after the other; `done` is called after each. The first failure ends it."""
    for one in differences:
        if one.action in (Action.MAKE, Action.CHANGE):
            assert one.wanted is not None
            await one.section.change(place, one.name, one.present, one.wanted)
            done(one)


async def present_objects(place: Place, sections: Sequence[Section]) -> Mapping[str, Mapping[str, Values]]:
    """All objects of the database, by section and name, in normal form."""
    return {section.name: await section.present(place) for section in sections}
