"""Who asks over HTTP, and what they may see: the rules of the protocol (docs/access.md), decided by the same code.

What browsers need is here, too: the places of their tokens, and pages of other origins.
"""

from __future__ import annotations

import ipaddress
import re
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import Any
from urllib.parse import urlsplit

import structlog
import trio

from replicad.config.access import READ
from replicad.config.settings import ANY_ORIGIN
from replicad.daemon.access import AccessControl, ClientAccess
from replicad.daemon.figures import Detail, Obstacle, Sample
from replicad.daemon.service import HangUp
from replicad.errors import Forbidden, NotAuthorised
from replicad.operations.http.wire import Refused, Request
from replicad.protocol.connection import CloseReason

NO_WORD = "send `Authorization: Bearer TOKEN`, the word that clients send with AUTH"
NO_NAME = "without a secret (--token-file, --access-file) use an address or localhost in place of a host's name"
_UNFIT = re.compile("[\x00-\x1f\x7f-\x9f\ufffd\ud800-\udfff]")  # bytes that are no UTF-8 become U+FFFD
NAMES = ("stream", "tube")  # labels and kinds with a name that a client may not know
CHANGED = "the operator has changed the rights of this client while it was answered; ask again"

log = structlog.get_logger()


@lru_cache(maxsize=256)
def is_address(host: str) -> bool:
    """Whether a header `Host` holds an address or `localhost`. The owner of any other name can point it at this machine
    and have browsers here read our answers as answers of his own page (DNS rebinding).
    """
    try:
        name = (urlsplit(f"//{host}").hostname or "").lower()
        return name == "localhost" or bool(ipaddress.ip_address(name))
    except ValueError:
        return False


def no_such(kind: str, name: str) -> Refused:
    """The answer for a name that does not exist, and for a name that the caller may not know."""
    return Refused(404, f"there is no {kind} {name[:80]!r}")


@dataclass(frozen=True, slots=True)
class BrowserCaller:
    """A caller with the token of a browser. `expires`: seconds since 1970. `in_address`: the address has the token."""

    expires: float
    in_address: bool


class Caller:
    """Who sent a request. `unknown`: why it gets nothing that needs a right (status and sentence). None: it has proved
    who it is, or no proof is needed.
    """

    def __init__(self, access: ClientAccess, unknown: tuple[int, str] | None, browser: BrowserCaller | None) -> None:
        self.browser = browser
        self._access = access
        self._unknown = unknown

    @property
    def known(self) -> bool:
        """Whether it has proved who it is, or no proof is needed."""
        return self._unknown is None

    @property
    def access(self) -> ClientAccess:
        """What services ask."""
        return self._access

    @property
    def name(self) -> str:
        """The client in the access file; empty for one with all rights."""
        return self._access.name

    def require_known(self) -> None:
        """Raise Refused if the caller has not proved who it is."""
        if self._unknown is not None:  # an exception that is kept would be in a cycle with its traceback
            raise Refused(*self._unknown)

    def require(self, verb: str) -> None:
        """Raise Refused if the caller may not use this verb."""
        self.require_known()
        try:
            self._access.require_plain(verb)
        except Forbidden as error:
            raise Refused(403, str(error)) from error

    def require_somewhere(self, verb: str) -> None:
        """Raise Refused if there is no stream or tube on which the caller may use this verb."""
        self.require_known()
        if not self._access.may_somewhere(verb):
            add = f'the operator can add "{verb} NAME" to [client.{self.name}]'
            raise Refused(403, f"client {self.name} may not {verb} anything; {add}")

    def require_on(self, verb: str, kind: str, name: str) -> None:
        """Raise Refused if the caller may not do this to the stream or tube; 404 if it may not know the name."""
        if not self.may_ask(verb, kind, name):
            raise no_such(kind, name)

    def may_ask(self, verb: str, kind: str, name: str) -> bool:
        """Whether the caller may do this to the stream or tube. False if it may not know the name: the answer is then
        that of a name which does not exist. Raises Refused.
        """
        self.require_known()
        try:
            return self._access.require(verb, kind, name)
        except Forbidden as error:
            raise Refused(403, str(error)) from error

    def may_read(self, stream: str) -> bool:
        """`may_ask` for the reading of a stream or of a part of it: the services ask which part."""
        self.require_known()
        return self._access.may_read_some(stream) or self.may_ask(READ, "stream", stream)

    @property
    def lists_everything(self) -> bool:
        """Whether the caller may know each stream and tube that there is, was, or may come."""
        return self._access.lists_everything

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


def _unknown(control: AccessControl, access: ClientAccess, request: Request) -> tuple[int, str] | None:
    """Why the caller gets no answer; None: it has proved who it is, or no proof is needed."""
    if not control.open_to_all:
        return None if access.client is not None else (401, NO_WORD)
    server, host = ipaddress.ip_address(request.guest.server), request.headers.get("host")
    return (403, NO_NAME) if server.is_loopback and host and not is_address(host) else None


def refuse_controls(request: Request) -> None:
    """Refuse an address with a character that no name, token or number has, so that no page has to think of it. Some of
    them Postgres refuses as well, with a text that is not for callers.
    """
    for text in (request.path, *chain.from_iterable(request.query.items())):
        if (found := _UNFIT.search(text)) is not None:
            raise Refused(400, f"bad_request: the address has the character U+{ord(found.group()):04X}; leave it out")
    if request.repeats:
        raise Refused(400, "bad_request: the address has a parameter twice; give it once")


def _as_browser(access: ClientAccess, shown: Shown) -> BrowserCaller | None:
    """Take the token of a browser. A cookie counts for nothing where the client has shown a certificate.

    Raises:
        NotAuthorised: it is not valid.
        HangUp: its `sub` has too many connections.
    """
    if access.client is None:
        return BrowserCaller(access.accept_browser(shown.token, time.time()), shown.in_address)
    if shown.in_address:
        raise NotAuthorised("this client has shown a certificate; leave the browser token out")
    return None


class _Asking:
    """The caller as `Revocable`: it lasts for one request. `scope` is cancelled, and `why` says why,
    when the client loses its access or gets other rights. So nothing is answered by rights that the client had before.
    """

    def __init__(self, peer: str) -> None:
        self.scope = trio.CancelScope()
        self.why: tuple[int, str] | None = None
        self._peer = peer

    @property
    def log(self) -> Any:
        """A logger bound to the client's fields; most requests log nothing."""
        return log.bind(peer=self._peer, over="http")

    def hang_up(self, reason: CloseReason, text: str = "") -> None:  # noqa: ARG002 - there is one reason
        """The access is withdrawn."""
        self._end(401, text)

    def change(self) -> None:
        """The client has other rights from now on."""
        self._end(503, CHANGED)

    def _end(self, status: int, why: str) -> None:
        self.why = self.why or (status, why)
        self.scope.cancel()


@asynccontextmanager
async def calling(control: AccessControl, request: Request, browsers: Origins | None = None) -> AsyncIterator[Caller]:
    """The caller of a request, for the block. A word that is sent is checked, also where none is needed.

    `browsers`: the page takes tokens of browsers as well; whose cookies count. Elsewhere they count for nothing.

    The answer may be sent after the block. It is wrong to send it in the block, which ends when rights are withdrawn.

    Raises:
        Refused: the word is wrong, the client has too many connections, or its rights were changed in the block.
    """
    refuse_controls(request)
    guest = request.guest
    access = control.enter(guest.peer, guest.certificate)
    kind, _, word = request.headers.get("authorization", "").partition(" ")
    asking = _Asking(guest.peer)
    shown = None if browsers is None or control.open_to_all else token_in(request, browsers)
    try:
        with asking.scope:
            access.begin(asking)
            access.on_change(asking.change)
            if kind.lower() == "bearer" and word.strip():
                await access.authenticate(word.strip())
            browser = None if shown is None else _as_browser(access, shown)
            yield Caller(access, _unknown(control, access, request), browser)
        if asking.why is not None:
            raise Refused(*asking.why)
    except NotAuthorised as error:
        raise Refused(401, str(error)) from error
    except HangUp as error:
        raise Refused(429, error.text) from error
    finally:
        if not control.open_to_all:
            access.end()


# What browsers need: the places of their tokens in requests (docs/access.md), and pages of other origins.
#
# A page cannot set a header for EventSource. So the token comes in a cookie, which every page of the site has the
# browser send, or in a parameter of the address, which has to be kept out of everything that keeps addresses.
#
# `Origins` decides which pages of other origins may read rows (CORS,
# https://fetch.spec.whatwg.org/#http-cors-protocol). Requests that are not safe are refused.

COOKIE = "replicad_token"
PARAMETER = "access_token"  # as in RFC 6750, 2.3
KEPT = {"referrer-policy": "no-referrer", "cross-origin-resource-policy": "same-origin"}  # headers of every answer

EXPOSED = "ETag, Link, Replicad-Next"
PREFLIGHT_KEPT = "600"  # seconds for which a browser keeps the answer to OPTIONS


class Origins:
    """The allowed ones; without any, browsers let only pages of the daemon's own origin read what it answers."""

    def __init__(self, allowed: str | None, *, cookies: bool = False) -> None:
        """`allowed`: as the setting `http_origins`. `cookies`: pages of named origins may have them sent."""
        self._allowed = frozenset(allowed.split(",") if allowed else ())
        self._cookies = cookies and ANY_ORIGIN not in self._allowed

    def is_own(self, headers: Mapping[str, str]) -> bool:
        """Whether the daemon's own page or a person has sent the request, or a page of an origin that is named.

        Browsers name the origin where a page of another one may read the answer, and the site where they trust the
        connection. Where they name neither, the attribute SameSite of the cookie is what keeps other sites away.
        """
        origin, site = headers.get("origin"), headers.get("sec-fetch-site", "none")
        if origin is not None:
            return origin in self._allowed or origin.partition("://")[2] == headers.get("host", "")
        return site in ("same-origin", "none")

    def headers(self, origin: str | None, *, preflight: bool = False) -> dict[str, str]:
        """The headers of an answer to a request with this Origin. `preflight`: the answer to OPTIONS."""
        if not self._allowed:
            return {}
        found = {} if ANY_ORIGIN in self._allowed else {"vary": "Origin"}
        if origin is None or not (ANY_ORIGIN in self._allowed or origin in self._allowed):
            return found
        found["access-control-allow-origin"] = ANY_ORIGIN if ANY_ORIGIN in self._allowed else origin
        if self._cookies:
            found["access-control-allow-credentials"] = "true"
        if preflight:
            found["access-control-allow-methods"] = "GET"
            found["access-control-allow-headers"] = "Authorization, If-None-Match, Last-Event-ID"
            found["access-control-max-age"] = PREFLIGHT_KEPT
        else:
            found["access-control-expose-headers"] = EXPOSED
        return found


@dataclass(frozen=True, slots=True)
class Shown:
    """A token that a request has shown. `in_address`: as a parameter, so nothing may keep the answer by its address."""

    token: str
    in_address: bool


def token_in(request: Request, origins: Origins) -> Shown | None:
    """The token of the request; None if it has none. A header Authorization goes before a cookie.

    Raises:
        Refused: there are two, or a cookie that a page of another site has the browser send.
    """
    authorised = "authorization" in request.headers
    parameter = request.query.get(PARAMETER)
    if parameter is not None:
        if authorised:
            raise Refused(400, f"bad_request: send the header Authorization or the parameter {PARAMETER}, not both")
        return Shown(parameter, in_address=True)
    found = [] if authorised else _cookies(request.headers.get("cookie", ""))
    if len(found) > 1:
        raise Refused(400, f"bad_request: there are {len(found)} cookies {COOKIE}; a page must set one")
    if not found:
        return None
    if not origins.is_own(request.headers):
        raise Refused(403, "a page of another site sent this request; --http-origins can name its origin")
    return Shown(found[0], in_address=False)


def _cookies(header: str) -> list[str]:
    pairs = (one.strip().partition("=") for one in header.split(";"))
    return [value.strip('"') for name, _, value in pairs if name == COOKIE]
