"""Who asks over HTTP, and what they may see: the rules of the protocol (docs/access.md), decided by the same code."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import structlog

from replicad.daemon.access import AccessControl, ClientAccess
from replicad.daemon.figures import Detail, Obstacle, Sample
from replicad.daemon.service import HangUp
from replicad.errors import Forbidden, NotAuthorised
from replicad.protocol.states import CloseReason

NAMES = ("stream", "tube")  # labels and kinds with a name that a client may not know

log = structlog.get_logger()


class Refused(Exception):
    """The request is refused: the status of HTTP, and why."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status
        self.why = why


def no_such(kind: str, name: str) -> Refused:
    """The answer for a name that does not exist, and for one that the caller may not know."""
    return Refused(404, f"there is no {kind} {name[:80]!r}")


class Caller:
    """Who sent a request. `known`: it has proved who it is, or nobody has to."""

    def __init__(self, access: ClientAccess, *, known: bool) -> None:
        self._access = access
        self.known = known

    @property
    def access(self) -> ClientAccess:
        """What services ask."""
        return self._access

    @property
    def name(self) -> str:
        """The client in the access file; empty for one with all rights."""
        return self._access.name

    def require(self, verb: str) -> None:
        """Raise Refused if the caller may not use this verb."""
        if not self.known:
            raise Refused(401, "send `Authorization: Bearer TOKEN`, the word that clients send with AUTH")
        try:
            self._access.require_plain(verb)
        except Forbidden as error:
            raise Refused(403, str(error)) from error

    def require_on(self, verb: str, kind: str, name: str) -> None:
        """Raise Refused if the caller may not do this to the stream or tube; 404 if it may not know the name."""
        if not self.known:
            raise Refused(401, "send `Authorization: Bearer TOKEN`, the word that clients send with AUTH")
        try:
            if self._access.require(verb, kind, name):
                return
        except Forbidden as error:
            raise Refused(403, str(error)) from error
        raise no_such(kind, name)

    @property
    def limited(self) -> bool:
        """Whether the caller's rights come from an access file."""
        return self._access.limited

    def lists(self, kind: object, name: str) -> bool:
        """Whether the caller may know a name of this kind."""
        return kind not in NAMES or not self._access.limited or self._access.lists(name)

    def admits(self, sample: Sample) -> bool:
        """Whether the caller may know the stream or tube of a sample."""
        return all(map(self.lists, sample.family.labels, sample.labels))

    def sees(self, found: Obstacle | Detail) -> bool:
        """Whether the caller may know what this is about."""
        kind = found.fields.get("kind", found.kind) if isinstance(found, Detail) else found.kind
        return self.lists(kind, found.name)


class _Asking:
    """What `ClientAccess` needs of a session: here it lasts for one request."""

    def __init__(self, peer: str) -> None:
        self.log: Any = log.bind(peer=peer, over="http")

    def hang_up(self, reason: CloseReason, text: str = "") -> None:
        """Rights that are withdrawn now count from the next request on."""


@asynccontextmanager
async def calling(
    control: AccessControl, peer: str, certificate: frozenset[str], authorization: str
) -> AsyncIterator[Caller]:
    """The caller of a request, for the block. A word that is sent is checked, also where none is needed.

    Raises:
        Refused: the word is wrong, or the client has too many connections.
    """
    access = control.enter(peer, certificate)
    kind, _, word = authorization.partition(" ")
    try:
        access.begin(_Asking(peer))
        if kind.lower() == "bearer" and word.strip():
            await access.authenticate(word.strip())
        yield Caller(access, known=control.open_to_all or access.client is not None)
    except NotAuthorised as error:
        raise Refused(401, str(error)) from error
    except HangUp as error:
        raise Refused(429, error.text) from error
    finally:
        if not control.open_to_all:
            access.end()
