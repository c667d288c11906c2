"""Which pages of other origins may read rows in a browser (CORS, https://fetch.spec.whatwg.org/#http-cors-protocol)."""

from __future__ import annotations

from collections.abc import Mapping

from replicad.config.settings import ANY_ORIGIN

EXPOSED = "ETag, Link, Replicad-Next"
KEPT = "600"  # seconds for which a browser keeps the answer to OPTIONS


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
            found["access-control-max-age"] = KEPT
        else:
            found["access-control-expose-headers"] = EXPOSED
        return found
