"""Keep what a release installs: its dump, the digests of its parts, and the names of what they create.

    python -m tests.schema.release COMMIT NUMBER

writes vNUMBER.sql beside this file from what that commit's `replicad sql up` installs, marks the versions of its parts
as released in pins.json, and adds their names to sql/released.json of each part. Run it once for a release.
"""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import asdict
from pathlib import Path

from replicad.postgres import schema_text
from replicad.postgres.embedded import EmbeddedPostgres
from replicad.postgres.programs import find_programs
from tests.schema import pin

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
# Function bodies may name what is created later, and every name is written in full.
_HEAD = "SET check_function_bodies = false;\nSELECT pg_catalog.set_config('search_path', '', false);\n"
_NOISE = re.compile(r"^--\n-- (Name|Data for Name): .*\n--\n\n|^\\(un)?restrict .*\n", re.MULTILINE)


def unpack(commit: str, folder: Path) -> None:
    """The tree of the commit in `folder`."""
    done = subprocess.run(["git", "-C", str(ROOT), "archive", commit, "replicad"], capture_output=True, check=True)
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        archive.extractall(folder, filter="data")


def install(tree: Path, url: str) -> None:
    """Install all parts of the replicad in that tree, as an operator does with psql."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("REPLICAD_")}
    script = subprocess.run(
        [sys.executable, "-m", "replicad", "sql", "up"],
        cwd=tree, env={**clean, "PYTHONPATH": str(tree)}, capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    _program("psql", "-qX", "-v", "ON_ERROR_STOP=1", "-d", url, stdin=script.stdout)


def dump(url: str) -> str:
    """The statements that make what is installed in that database, with the rows of the versions and of the secrets."""
    made = _program("pg_dump", "--schema-only", "--no-owner", "-d", url)
    rows = _program("pg_dump", "--data-only", "--inserts", "-d", url)
    made = made[made.index("CREATE SCHEMA") :]  # before it stand settings that only some versions of Postgres know
    rows = rows[rows.index("INSERT INTO") :]
    return _HEAD + _NOISE.sub("", made) + _NOISE.sub("", rows)


def main(commit: str, number: str) -> None:
    """Keep the release."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        Path(folder).chmod(0o711)
        tree = Path(folder) / "tree"
        unpack(commit, tree)
        with EmbeddedPostgres(Path(folder) / "postgres") as server:
            install(tree, server.url)
            text = dump(server.url)
        head = (
            f"-- What commit {commit[:7]} installs; made by `python -m tests.schema.release {commit[:7]} {number}`.\n"
        )
        (FOLDER / f"v{number}.sql").write_text(head + text, encoding="utf-8")
        pins = pin.read()
        package, schema_text.PACKAGE = schema_text.PACKAGE, tree / "replicad"
        for part, declared in schema_text.declarations(tree / "replicad").items():
            version = declared.version
            step = schema_text.upgrade_digests(part).get(version)
            pins.setdefault(part, {})[str(version)] = pin.Pin(digest=schema_text.digest(part), step=step, released=True)
            _add_names(package, part, version)
        pin.write(pins)


def _add_names(package: Path, part: str, version: int) -> None:
    file = schema_text.declarations(package)[part].folder / "released.json"
    names = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    names[str(version)] = asdict(schema_text.created(part))
    file.write_text(json.dumps(names, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def _program(name: str, *words: str, stdin: str | None = None) -> str:
    done = subprocess.run(
        [str(find_programs() / name), *words], input=stdin, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise SystemExit(f"{name} failed: {done.stderr}")
    return done.stdout


if __name__ == "__main__":
    main(*sys.argv[1:])
