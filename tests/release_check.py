"""Check what `make dist` has built, as somebody who installs it: in new environments, with each Python that is here.

    python -m tests.release_check [dist]

The metadata passes `twine check --strict`. A wheel that is built of the sdist has the files of the wheel. Each Python
from 3.11 on that is found (`python3.N` on the PATH, or in pyenv) gets an environment with the two wheels, in a folder
without the sources: the command starts, prints its SQL and finds its files, and every public name that needs no extra
can be imported. A Python that is missing is named, and is no failure.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

VERSIONS = ("3.11", "3.12", "3.13")
PROBE = """
import importlib.resources, pathlib, sys
import replicad
assert pathlib.Path(replicad.__file__).is_relative_to(sys.prefix), replicad.__file__
missing = []
for name in replicad.__all__:
    try:
        getattr(replicad, name)
    except ImportError as error:  # of an extra: the text says which
        missing.append(f"{name}: {error}")
assert all("pip install" in one or "No module named" in one for one in missing), missing
console = importlib.resources.files("replicad.operations") / "console"
assert {one.name for one in console.iterdir()} >= {"console.html", "console.js", "console.css"}
print(f"{len(replicad.__all__) - len(missing)} of {len(replicad.__all__)} public names need no extra")
"""


def run(*command: str | Path, cwd: Path) -> str:
    """The output of a program. Raises SystemExit with what it said if it fails."""
    clean = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "REPLICAD_", "VIRTUAL"))
    }
    done = subprocess.run(list(map(str, command)), cwd=cwd, env=clean, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def find_pythons() -> dict[str, Path]:
    """The program of each version that is here."""
    found: dict[str, Path] = {}
    versions = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for version in VERSIONS:
        candidates = sorted(versions.glob(f"{version}.*/bin/python"))
        named = shutil.which(f"python{version}")
        for one in [*candidates[::-1], *([Path(named)] if named else [])]:
            if subprocess.run([one, "-c", "import ensurepip, venv"], capture_output=True, check=False).returncode == 0:
                found[version] = one
                break
    return found


def files_of(wheel: Path) -> set[str]:
    """The names of the files in a wheel, without its own metadata."""
    return {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}


def check_sdist(sdist: Path, wheel: Path, folder: Path) -> None:
    """A wheel that is made of the sdist has what the wheel has."""
    run(sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", folder, sdist, cwd=folder)
    (made,) = folder.glob("*.whl")
    if files_of(made) != files_of(wheel):
        raise SystemExit(f"the sdist makes another wheel: {sorted(files_of(made) ^ files_of(wheel))[:20]}")
    print(f"{sdist.name}: makes the same wheel, {len(files_of(wheel)):,} files", flush=True)


def check_install(python: Path, version: str, wheel: Path, client: Path, folder: Path) -> None:
    """The wheel works in an empty environment, with that of the clients."""
    run(python, "-m", "venv", folder / "env", cwd=folder)
    own = folder / "env/bin"
    run(own / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", wheel, client, cwd=folder)
    run(own / "python", "-m", "pip", "check", cwd=folder)
    said = run(own / "replicad", "--version", cwd=folder).strip()
    if wheel.name.split("-")[1] not in said:
        raise SystemExit(f"replicad --version says {said!r}, and the wheel is {wheel.name}")
    if "CREATE TABLE" not in run(own / "replicad", "sql", "up", cwd=folder):
        raise SystemExit("replicad sql up prints no SQL")
    print(f"Python {version}: {said}; {run(own / 'python', '-c', PROBE, cwd=folder).strip()}", flush=True)


def main(folder: Path) -> None:
    """Check the files in the folder. Raises SystemExit with the reason."""
    built = {kind: sorted(folder.glob(f"*{kind}")) for kind in (".whl", ".tar.gz")}
    wheel, client = built[".whl"]  # replicad-..., replicad_client-...
    check = (sys.executable, "-m", "twine", "check", "--strict")
    print(run(*check, *built[".whl"], *built[".tar.gz"], cwd=folder).strip(), flush=True)
    with tempfile.TemporaryDirectory(prefix="replicad-release-") as place:
        work = Path(place)
        for sdist, its_wheel in zip(built[".tar.gz"], built[".whl"], strict=True):
            (work / sdist.name).mkdir()
            check_sdist(sdist, its_wheel, work / sdist.name)
        pythons = find_pythons()
        for version, python in pythons.items():
            (work / version).mkdir()
            check_install(python, version, wheel, client, work / version)
    missing = [version for version in VERSIONS if version not in pythons]
    if not pythons:
        raise SystemExit("there is no Python from 3.11 on to install it with")
    print("not tried, because they are not here: " + ", ".join(missing) if missing else "every version was tried")


def arguments(words: Sequence[str]) -> Path:
    """The folder with the built files."""
    return Path(words[0] if words else "dist").resolve()


if __name__ == "__main__":
    main(arguments(sys.argv[1:]))
