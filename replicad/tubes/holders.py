"""The holder of a lease: its name and client, and the connection or the key that it is bound to.

It is stored as `NAME TAG`. The name is what lists and errors show; with an access file the client's name and a `/`
stand before it. The tag is made of the connection that claimed the lease, or of the key that the client gave behind a
`!` in `holder=NAME!KEY`. Two claims under one name have the same lease only if they have the same tag. When the
connection has ended, the tag is removed, and the next claim under the name gets the lease, with a new term
(docs/leases.md).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from hashlib import sha256

_TAG = re.compile(r" [ck][0-9a-f]{32}\b")


@dataclass(frozen=True, slots=True)
class LeaseHolder:
    """Who claims a lease. `by_connection`: the lease is bound to the connection, not to a key."""

    name: str
    tag: str

    @property
    def stored(self) -> str:
        """The text in `tube_lease`."""
        return f"{self.name} {self.tag}"

    @property
    def by_connection(self) -> bool:
        """Whether the lease is bound to the connection, not to a key."""
        return self.tag.startswith("c")


def holder_of(given: str, client: str, connection: str) -> LeaseHolder:
    """The holder that a CLAIM means. `given`: `NAME` or `NAME!KEY`; `connection`: unique among all daemons."""
    name, mark, key = given.partition("!")
    kind, secret = ("k", key) if mark else ("c", connection)
    tag = kind + sha256(f"{client} {secret}".encode()).hexdigest()[:32]
    return LeaseHolder(f"{client}/{name}" if client else name, tag)


def belongs_to(stored: str, client: str) -> bool:
    """Whether a stored holder belongs to this client of the access file."""
    return stored.startswith(f"{client}/")


def without_tags(text: str) -> str:
    """A message of Postgres with the names of holders only."""
    return _TAG.sub("", text)
