"""Where a Redis is, and how to log in: from a URL, without I/O."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urlsplit

from replicad.config.secrets import trust
from replicad.errors import UsageError
from replicad.masking import mask_secrets

PORT = 6379


@dataclass(frozen=True, slots=True)
class RedisAddress:
    """A Redis: `redis://[[user]:password@]host[:port][/database]`; `rediss://` is the same with TLS.

    `str()` has no password.
    """

    host: str
    port: int = PORT
    database: int = 0
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    tls: ssl.SSLContext | None = field(default=None, repr=False)

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"redis{'s' if self.tls else ''}://{host}:{self.port}/{self.database}"


def parse_redis(url: str, *, password: str | None = None, ca: Path | None = None) -> RedisAddress:
    """Parse the URL. `password` counts where the URL has none; `ca`: whom to trust, for rediss://; else the system.

    Raises:
        UsageError: with what to give instead.
    """
    try:
        parts = urlsplit(url)
        port = parts.port or PORT
    except ValueError as error:
        raise UsageError(f"{mask_secrets(url)!r} is no URL of a Redis: {error}") from None
    database = parts.path.strip("/") or "0"
    if parts.scheme not in ("redis", "rediss") or not parts.hostname or parts.query or parts.fragment:
        raise UsageError(
            f"{mask_secrets(url)!r} is no URL of a Redis; give redis://host:{PORT}/0, or rediss:// for TLS"
        )
    if not (database.isascii() and database.isdigit() and len(database) < 6):
        raise UsageError(f"the database of a Redis is a number, not {database[:40]!r}; give redis://{parts.hostname}/0")
    tls = None
    if parts.scheme == "rediss":
        tls = ssl.create_default_context() if ca is None else trust(ca, "--redis-ca")
    elif ca is not None:
        raise UsageError("--redis-ca is for a Redis with TLS; give rediss://, or leave it out")
    given = None if parts.password is None else unquote(parts.password)
    user = unquote(parts.username) if parts.username else None
    return RedisAddress(parts.hostname, port, int(database), user, given or password, tls)
