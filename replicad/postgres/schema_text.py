"""The SQL of the parts as text: the files, the names that they create, and the scripts that are built from them.

All files are read at the first use and kept, so a running daemon opens none later. `schema` finds out which version is
installed, and decides what to do.
"""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from replicad.postgres.literals import quote_ident, quote_literal
from replicad.postgres.statements import load_sql

Part = str  # the name of a part in `declarations`
Direction = Literal["up", "down"]

PACKAGE = Path(__file__).parents[1]
"""Every folder of the package may have a part in `sql/`: see `Declaration`."""

_DOWN = "down.sql"  # the file of a part that is not installed: it is run before the part is removed
# Texts that several parts have in common, each under a name of its own.
_SHARED = (
    "reader_body",
    "incarnation",
    "run",
    "fixed_settings",
    "key_types",
    "path_text",
    "safe_path",
    "moves",
    "moves_columns",
    "belong",
)
_KINDS = {"FUNCTION": "routines", "PROCEDURE": "routines", "TYPE": "types", "DOMAIN": "types", "INDEX": "indexes"}
_CREATED = re.compile(
    r"^CREATE\s+(?:OR\s+REPLACE\s+|UNLOGGED\s+|UNIQUE\s+)*(FUNCTION|PROCEDURE|TABLE|SEQUENCE|VIEW|TYPE|DOMAIN|INDEX)\s+"
    r"(?:IF\s+NOT\s+EXISTS\s+)?(\w+)",
    re.MULTILINE,
)


@dataclass(frozen=True, slots=True)
class Names:
    """What a part creates in its schema, by kind, each sorted. `relations` are tables, sequences and views."""

    routines: tuple[str, ...]
    relations: tuple[str, ...]
    types: tuple[str, ...]
    indexes: tuple[str, ...]

    def without(self, others: Names) -> Names:
        """The names that are not in `others`."""
        mine, theirs = asdict(self), asdict(others)
        return Names(**{kind: tuple(sorted(set(mine[kind]) - set(theirs[kind]))) for kind in mine})


@dataclass(frozen=True, slots=True)
class Declaration:
    """The content of `sql/part.toml` in a feature's folder.

    `version` and `serves`: see `schema`. `schema` is where the part is at home, `schema_option` the option of the
    command line that names another place. `needs` are parts that have to be installed first, `installer` is the command
    that installs this one. `install` says when a daemon does: "always", and it cannot start without the part;
    "offered", where its role may; "enabled", never, it only upgrades what the command has installed. `files` are the
    names of the files that are run at an installation, in this order. `folder` is where they are.
    """

    name: Part
    version: int
    serves: int
    schema: str
    schema_option: str
    needs: tuple[Part, ...]
    installer: str
    install: str
    files: tuple[str, ...]
    folder: Path


@cache
def declarations(root: Path = PACKAGE) -> Mapping[Part, Declaration]:
    """Every part of the package by name. A part comes after the parts that it needs."""
    found = [(path.parent, tomllib.loads(path.read_text(encoding="utf-8"))) for path in root.glob("*/sql/part.toml")]
    made = [
        Declaration(**{**entry, "needs": tuple(entry["needs"]), "files": tuple(entry["files"]), "folder": folder})
        for folder, entry in found
    ]
    return {part.name: part for part in sorted(made, key=lambda part: (len(part.needs), part.folder))}


@cache
def load(root: Path) -> Mapping[str, str]:
    """The texts of all parts, by part and file: `tube/tables.sql`, `tube/released.json`; and the templates of the
    scripts, as `schema/up.sql`. The files that a part installs are in their order.
    A name in `_SHARED` stands in braces for the text of that file of `postgres/sql`.
    """
    found = {f"schema/{path.name}": path for path in sorted((root / "postgres/sql").glob("*.sql"))}
    for part in declarations(root).values():
        found |= {f"{part.name}/{name}": part.folder / name for name in part.files}
        others = [part.folder / name for name in (_DOWN, "released.json")]
        found |= {f"{part.name}/{path.name}": path for path in others if path.exists()}
        found |= {f"{part.name}/upgrade/{path.name}": path for path in part.folder.glob("upgrade/*.sql")}
    texts = {name: path.read_text(encoding="utf-8") for name, path in found.items()}
    for name in _SHARED:
        shared = texts.pop(f"schema/{name}.sql")
        texts = {part: text.replace(f"{{{name}}}", shared) for part, text in texts.items()}
    return texts


def files(part: Part) -> list[tuple[str, str]]:
    """The names and texts of the files that are run at an installation, in their order."""
    pattern = re.compile(rf"{part}/([^/]+\.sql)")
    found = [(named[1], text) for path, text in load(PACKAGE).items() if (named := pattern.fullmatch(path))]
    return [(name, text) for name, text in found if name != _DOWN]


def digest(part: Part) -> str:
    """The digest of the texts that are run at every installation. It distinguishes builds of one version."""
    return _hash([*(text for _, text in files(part)), load(PACKAGE)["schema/up_end.sql"]])


def upgrade_digests(part: Part) -> dict[int, str]:
    """The digest of the upgrade step to each version that has one."""
    return {version: _hash([text]) for version, text in _steps(part)}


def created(part: Part) -> Names:
    """The names of all objects that the files create at the start of a line."""
    names: dict[str, set[str]] = {kind: set() for kind in ("routines", "relations", "types", "indexes")}
    names["routines"].add(f"{part}_on_disk")  # this and the table: from the script's own text
    names["relations"].add(f"{part}_version")
    for _, text in files(part):
        for kind, name in _CREATED.findall(text):
            names[_KINDS.get(kind, "relations")].add(name)
    return Names(**{kind: tuple(sorted(found)) for kind, found in names.items()})


def released(part: Part) -> dict[int, Names]:
    """What each released version of the part created."""
    text = load(PACKAGE).get(f"{part}/released.json", "{}")
    return {
        int(version): Names(**{kind: tuple(found) for kind, found in names.items()})
        for version, names in json.loads(text).items()
    }


def up(declared: Declaration, schema: str | None) -> str:
    """The statements that install or upgrade, to be run in one transaction. Without `schema`: in the current one."""
    part = declared.name
    values = _values(part, schema) | {
        "version": str(declared.version),
        "digest": digest(part),
        "steps": "\n".join(_step(number, text) for number, text in _steps(part)),
        "fresh": quote_literal(json.dumps(_fresh(part), sort_keys=True)),
        "option": declared.schema_option,
        "serves": str(declared.serves),
    }
    texts = [f"-- {name}\n{text.strip()}\n" for name, text in files(part)]
    return "\n".join([_fill("up", values), *texts, _fill("up_end", values)])


def down(part: Part, schema: str | None) -> str:
    """The statements that remove the part, to be run in one transaction."""
    prelude = load(PACKAGE).get(f"{part}/{_DOWN}")
    return _fill("down", _values(part, schema) | {"prelude": "" if prelude is None else _execute(prelude)})


def _values(part: Part, schema: str | None) -> dict[str, str]:
    names = created(part)
    return {
        "part": part,
        "where": quote_ident(schema) if schema else "that comes first in search_path",
        "schema": quote_literal(schema) if schema else "NULL::text",
        "routines": _array(names.routines),
        "relations": _array(names.relations),
        "types": _array(names.types),
    }


def _fresh(part: Part) -> dict[str, dict[str, tuple[str, ...]]]:
    """By installed version (0: none), the names that this version adds to it."""
    names = created(part)
    older = {str(version): asdict(names.without(those)) for version, those in released(part).items()}
    return {"0": asdict(names)} | older


def _steps(part: Part) -> list[tuple[int, str]]:
    pattern = re.compile(rf"{part}/upgrade/([0-9]+)\.sql")
    return sorted((int(found[1]), text) for path, text in load(PACKAGE).items() if (found := pattern.fullmatch(path)))


def _step(version: int, text: str) -> str:
    return f"    IF present < {version} THEN\n{_execute(text)}\n    END IF;"


def _execute(text: str) -> str:
    """A statement of PL/pgSQL that runs these statements."""
    return f"    EXECUTE $replicad_text$\n{text.strip()}\n$replicad_text$;"


def _fill(template: str, values: Mapping[str, str]) -> str:
    text = load(PACKAGE)[f"schema/{template}.sql"]
    return re.sub(r"\{(\w+)\}", lambda found: values[found.group(1)], text)


def _array(names: tuple[str, ...]) -> str:
    return f"ARRAY[{', '.join(map(quote_literal, names))}]::text[]"


def _hash(texts: Iterable[str]) -> str:
    return hashlib.sha256("".join(texts).encode()).hexdigest()[:16]


# The SQL that makes the roles which replicad needs, with the least rights: `replicad sql roles` prints it.


@dataclass(frozen=True, slots=True)
class Roles:
    """Names of roles. `daemon` installs and serves; `owners` own the tables of streams and tubes; `writers` write them;
    `operators` look at what replicad knows. `replication`: the daemon hears of commits by the server's WAL.
    """

    daemon: str = "replicad"
    owners: Sequence[str] = ()
    writers: Sequence[str] = ()
    operators: Sequence[str] = ()
    replication: bool = False


def script(roles: Roles, stream_schema: str = "replicad", tube_schema: str = "tube") -> str:
    """The SQL for psql or any other client, in one transaction. It may be repeated.

    Raises ValueError for a name that is empty or has a NUL.
    """
    home = quote_ident(stream_schema)
    everybody = list(dict.fromkeys([roles.daemon, *roles.owners, *roles.writers, *roles.operators]))
    for name in (*everybody, tube_schema):
        quote_ident(name)
    values = {
        "daemon": quote_literal(roles.daemon),
        "all": _names_array(everybody),
        "owners": _names_array(roles.owners),
        "writers": _names_array(roles.writers),
        "operators": _names_array(roles.operators),
        "schemas": _names_array([stream_schema, tube_schema]),
        "reports": _names_array([f"{home}.{name}(timestamptz)" for name in ("stream_troubles", "stream_daemons")]),
        "stream_table": quote_literal(f"{home}.stream"),
        "cache_write": quote_literal(f"{home}.cache_write(text, jsonb)"),
    }
    wanted = {
        "roles_replication": roles.replication,
        "roles_writers": bool(roles.writers),
        "roles_operators": bool(roles.operators),
    }
    names = ["roles", *(name for name, is_wanted in wanted.items() if is_wanted)]
    parts = [re.sub(r"\{(\w+)\}", lambda found: values[found[1]], load_sql(name)) for name in names]
    return "BEGIN;\n" + "\n".join(parts) + "COMMIT;\n"


def _names_array(names: Sequence[str]) -> str:
    return f"ARRAY[{', '.join(map(quote_literal, names))}]::text[]"
