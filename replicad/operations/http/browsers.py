"""Tokens of browsers in requests (docs/access.md): their places, and requests that are refused for safety.

A page cannot set a header for EventSource. So the token comes in a cookie, which every page of the site has the browser
send, or in a parameter of the address, which has to be kept out of everything that keeps addresses.
"""

from __future__ import annotations

from dataclasses import dataclass

from replicad.operations.http.messages import Refused, Request
from replicad.operations.http.origins import Origins

COOKIE = "replicad_token"
PARAMETER = "access_token"  # as in RFC 6750, 2.3
KEPT = {"referrer-policy": "no-referrer", "cross-origin-resource-policy": "same-origin"}  # headers of every answer


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
