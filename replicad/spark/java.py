"""Find Java and check its version before Spark starts. pip cannot install it, and Spark's own errors do not help."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from replicad.errors import EnvironmentRefused

OLDEST_JAVA = 17  # required by Spark 4
_TIMEOUT = 20  # seconds for `java -version`, which is slow from a cold disk
_REMEDY = (
    "install one (Debian and Ubuntu: `apt install openjdk-17-jre-headless`; macOS: `brew install openjdk@17`) "
    "or set JAVA_HOME to one"
)


def find_java(environ: Mapping[str, str]) -> Path:
    """The `java` that Spark will start: JAVA_HOME's, else the first on PATH.

    Raises:
        EnvironmentRefused: there is none, it does not run, or it is older than 17.
    """
    home = environ.get("JAVA_HOME")
    if home:
        java = Path(home) / "bin" / "java"
        if not java.exists():
            raise EnvironmentRefused(f"JAVA_HOME is {home}, but there is no bin/java in it; {_REMEDY}")
    else:
        found = shutil.which("java", path=environ.get("PATH"))
        if found is None:
            raise EnvironmentRefused(f"Spark needs Java {OLDEST_JAVA} or newer and there is no java on PATH; {_REMEDY}")
        java = Path(found)
    version = _version_of(java)
    if version < OLDEST_JAVA:
        raise EnvironmentRefused(f"{java} is Java {version}, Spark needs {OLDEST_JAVA} or newer; {_REMEDY}")
    return java


def _version_of(java: Path) -> int:
    try:
        done = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=_TIMEOUT, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EnvironmentRefused(f"{java} cannot be run ({error}); {_REMEDY}") from error
    version = parse_version(done.stderr + done.stdout)
    if done.returncode or version is None:
        output = (done.stderr or done.stdout).strip().partition("\n")[0][:200]
        raise EnvironmentRefused(f"`{java} -version` failed: {output or f'exit status {done.returncode}'}; {_REMEDY}")
    return version


def parse_version(text: str) -> int | None:
    """The major version in the output of `java -version` (17 of `"17.0.15"`, 8 of `"1.8.0_402"`), or None."""
    found = re.search(r'version "(?:1\.)?([0-9]+)', text)
    return int(found[1]) if found else None
