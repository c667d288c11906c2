"""Refuses files of secrets that every user of the machine can read, and files of rights that every user can change."""

from __future__ import annotations

import stat
from pathlib import Path

from replicad.errors import UsageError


def refuse_readable_by_others(file: Path | str, source: str) -> None:
    """Refuse a file with secrets that every user of the machine can read.

    Raises:
        UsageError: with the remedy; it begins with `source`.
    """
    if _mode(file) & (stat.S_IROTH | stat.S_IWOTH):
        raise UsageError(f"{source}: every user of this machine can read {file}; run: chmod o-rwx {file}")


def refuse_writable_by_others(file: Path | str, source: str) -> None:
    """Refuse a file with settings of access that every user of the machine can change. Raises UsageError."""
    if _mode(file) & stat.S_IWOTH:
        raise UsageError(f"{source}: every user of this machine can change {file}; run: chmod o-w {file}")


def _mode(file: Path | str) -> int:
    """The permissions of a regular file; 0 for anything else. Reading a missing file fails with the reason."""
    try:
        mode = Path(file).stat().st_mode
    except OSError:
        return 0
    return mode if stat.S_ISREG(mode) else 0
