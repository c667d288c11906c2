"""What browsers need: the places of their tokens in requests (docs/access.md), and pages of other origins.

A page cannot set a header for EventSource. So the token comes in a cookie, which every page of the site has the browser
send, or in a parameter of the address, which has to be kept out of everything that keeps addresses.

`Origins` decides which pages of other origins may read rows (CORS, https://fetch.spec.whatwg.org/#http-cors-protocol).
Requests that are not safe are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from replicad.config.settings import ANY_ORIGIN
from replicad.operations.http.messages import Refused, Request

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
