"""Reads the files of secrets: the token, and the certificate authorities to trust; checks permissions of files.

Not every user of the machine may read a file of secrets, or change a file of rights.
"""

from __future__ import annotations

import stat
from pathlib import Path
from typing import TYPE_CHECKING

from replicad.config.declaring import matching
from replicad.errors import UsageError

if TYPE_CHECKING:
    import ssl


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


SYSTEM = "system"  # instead of a file: the authorities that the operating system trusts

WORD = matching(r"[!-~]{1,1024}", "one word of printable ASCII without blanks")  # an argument of a command


def read_token(file: Path | str, source: str = "--token-file") -> str:
    """Read a secret from the first line of a file. `source` is the option that gave the file.

    Raises:
        UsageError: the file cannot be read, or its first line is not a token.
    """
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise UsageError(f"{source}: {file} cannot be read: {why}") from error
    try:
        found: str = WORD.parse(lines[0].strip() if lines else "")
    except ValueError as error:
        raise UsageError(f"{source}: the first line of {file} is not a token; {error}") from None
    return found


def trust(authority: Path | str | None, source: str) -> ssl.SSLContext:
    """TLS for a client that trusts a certificate authority (a PEM file). `system` and None: the authorities of the
    system.

    Raises:
        UsageError: the file cannot be read or has no certificate; `source` is the option that gave it.
    """
    import ssl  # noqa: PLC0415 - takes a third of the start of `ping`, and most connections are plain

    try:
        return ssl.create_default_context(cafile=None if str(authority) == SYSTEM else authority)
    except OSError as error:
        raise UsageError(f"{source} {authority} cannot be used as a certificate authority: {error}") from error
