"""Which SQL belongs to which version of each part, in pins.json; renew what is not released yet:

    python -m tests.schema.pin

An entry has the digest of the files that are run at every installation, that of the upgrade step that leads to the
version (null: there is none), and whether the version is released. Entries of released versions are never changed here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TypedDict

from replicad.postgres import schema, schema_text

PINS = Path(__file__).with_name("pins.json")


class Pin(TypedDict):
    """What is known of one version of a part."""

    digest: str
    step: str | None
    released: bool


Pins = dict[str, dict[str, Pin]]  # part, version


def read() -> Pins:
    """All pins."""
    found: Pins = json.loads(PINS.read_text(encoding="utf-8"))
    return found


def write(pins: Pins) -> None:
    """Replace the file."""
    PINS.write_text(json.dumps(pins, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def present(part: schema.Part) -> Pin:
    """What the files say of the part's present version."""
    step = schema_text.upgrade_digests(part).get(schema.PARTS[part].version)
    return Pin(digest=schema_text.digest(part), step=step, released=False)


def complaints(pins: Pins) -> list[str]:
    """A sentence for each version whose SQL is not what is pinned."""
    found = []
    for part, declared in schema.PARTS.items():
        version = declared.version
        pin = pins.get(part, {}).get(str(version))
        if pin is not None and pin["released"] and pin | {"released": False} != present(part):
            found.append(
                f"the SQL of the part {part} has changed, and version {version} of it is released: set its version "
                f"to {version + 1} in part.toml, write upgrade/{version + 1}.sql beside it for what changes in tables, "
                "and run `python -m tests.schema.pin`"
            )
        elif pin is None or pin | {"released": False} != present(part):
            found.append(
                f"the SQL of the part {part} is not what is pinned for version {version}, which is not released yet: "
                "run `python -m tests.schema.pin`"
            )
        steps = schema_text.upgrade_digests(part)
        found += [
            f"upgrade/{older}.sql of the part {part} has changed, and version {older} of it is released: undo it, and "
            "put what is to be changed into the next version"
            for older, known in ((int(number), known) for number, known in pins.get(part, {}).items())
            if older < version and known["released"] and steps.get(older) != known["step"]
        ]
        newest = max(steps, default=0)
        if newest > version:
            found.append(f"upgrade/{newest}.sql of the part {part} is there, and its part.toml has version {version}")
    return found


def main() -> None:
    """Pin the present versions that are not released."""
    pins = read()
    for part, declared in schema.PARTS.items():
        version = declared.version
        of_part = pins.setdefault(part, {})
        if not of_part.get(str(version), {}).get("released"):
            of_part[str(version)] = present(part)
        for number in [number for number, pin in of_part.items() if not pin["released"] and int(number) != version]:
            del of_part[number]
    write(pins)
    print("\n".join(complaints(pins)) or "pinned")


if __name__ == "__main__":
    main()
