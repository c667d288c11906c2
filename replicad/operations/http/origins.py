"""Which pages of other origins may read rows in a browser (CORS, https://fetch.spec.whatwg.org/#http-cors-protocol)."""

from __future__ import annotations

from replicad.config.origins import ANY

EXPOSED = "ETag, Link, Replicad-Next"
KEPT = "600"  # seconds for which a browser keeps the answer to OPTIONS


class Origins:
    """The allowed ones; without any, browsers let only pages of the daemon's own origin read what it answers."""

    def __init__(self, allowed: str | None) -> None:
        """`allowed`: as the setting `http_origins`."""
        self._allowed = frozenset(allowed.split(",") if allowed else ())

    def headers(self, origin: str | None, *, preflight: bool = False) -> dict[str, str]:
        """The headers of an answer to a request with this Origin. `preflight`: the answer to OPTIONS."""
        if not self._allowed:
            return {}
        found = {} if ANY in self._allowed else {"vary": "Origin"}
        if origin is None or not (ANY in self._allowed or origin in self._allowed):
            return found
        found["access-control-allow-origin"] = ANY if ANY in self._allowed else origin
        if preflight:
            found["access-control-allow-methods"] = "GET"
            found["access-control-allow-headers"] = "Authorization, If-None-Match, Last-Event-ID"
            found["access-control-max-age"] = KEPT
        else:
            found["access-control-expose-headers"] = EXPOSED
        return found
