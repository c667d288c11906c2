r"""The password of a URL from the password file (`~/.pgpass`, `PGPASSFILE`), as libpq reads it.

The driver reads the file too, and leaves the escapes `\:` and `\\` in the password. A file that others can read is not
used: the driver warns of it, as libpq does.
"""

from __future__ import annotations

import getpass
import os
import re
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

_FIELD = re.compile(r"((?:\\.|[^:\\])*)(?::|$)", re.DOTALL)
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)


def find_password(url: str) -> str | None:
    """The password for the first host of the URL with an entry. None: the URL or the environment has one, the URL names
    a service, or no entry fits.
    """
    parts = urlsplit(url)
    query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
    credentials, _, location = parts.netloc.rpartition("@")
    named = {"password", "service"} & query.keys() or {"PGPASSWORD", "PGSERVICE"} & os.environ.keys()
    if ":" in credentials or named:
        return None
    user = unquote(credentials) or query.get("user") or os.environ.get("PGUSER") or getpass.getuser()
    path = unquote(parts.path.lstrip("/"))
    database = path or query.get("dbname") or query.get("database") or os.environ.get("PGDATABASE") or user
    entries = list(_entries(query.get("passfile")))
    for host, port in _places(unquote(location), query):
        for entry in entries:
            if all(field in ("*", value) for field, value in zip(entry, (host, port, database, user), strict=False)):
                return entry[4]
    return None


def _places(location: str, query: dict[str, str]) -> Iterator[tuple[str, str]]:
    """The hosts with their ports. A folder of a socket stands for localhost."""
    hosts = location or query.get("host") or os.environ.get("PGHOST") or "localhost"
    ports = (query.get("port") or os.environ.get("PGPORT") or "5432").split(",")
    for number, place in enumerate(hosts.split(",")):
        host, port = place, ""
        if found := re.fullmatch(r"\[(.*)\](?::(\d+))?|([^:]*):(\d+)", place):
            host, port = found[1] or found[3] or "", found[2] or found[4] or ""
        name = "localhost" if host.startswith("/") or not host else host
        yield name, port or (ports[number] if number < len(ports) else ports[0])


def _entries(named: str | None) -> Iterator[list[str]]:
    file = Path(named or os.environ.get("PGPASSFILE") or "~/.pgpass").expanduser()
    with suppress(OSError, UnicodeDecodeError):
        found = file.stat()
        if not stat.S_ISREG(found.st_mode) or found.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            return
        for line in file.read_text(encoding="utf-8").splitlines():
            if line.strip() and not line.startswith("#"):
                fields = [_ESCAPE.sub(r"\1", field) for field in _FIELD.findall(line)]
                if len(fields) >= 5:
                    yield fields
