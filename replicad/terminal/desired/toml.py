"""The file: reading it against the sections, with one sentence for each mistake, and writing it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from replicad.config.declaring import not_known, read_table, read_toml
from replicad.terminal.desired.section import BARE, Section, SectionKey, Values, described

Wanted = dict[str, dict[str, dict[str, Any]]]
"""Objects by section and name. A section that the file does not have is not in it: the file says nothing of it."""


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
