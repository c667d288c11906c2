"""A request and its answer, as the pages see them. What may stand on the wire is decided in `wire`."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, unquote

if TYPE_CHECKING:
    from replicad.operations.http.guests import Guest

MOST_PARAMETERS = 20  # of a query


class Refused(Exception):
    """The request is refused: the status of HTTP, and why."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status
        self.why = why


@dataclass(frozen=True, slots=True)
class Request:
    """A request whose head has been read. `path` is decoded; names of `headers` are lower-case, and several fields of
    one name are one value with commas. `guest`: the connection that it came on. `body` reads at most so
    many bytes; it raises Refused. `repeats`: a parameter of the query was given twice, of which `query` has the last.
    """

    method: str
    path: str
    query: Mapping[str, str]
    repeats: bool
    headers: Mapping[str, str]
    guest: Guest
    body: Callable[[int], Awaitable[bytes]]


@dataclass(slots=True)
class Answer:
    """What a request is answered: whole, in memory. `close`: the connection is closed after it."""

    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    close: bool = False

    @classmethod
    def text(cls, text: str, status: int = 200, headers: Mapping[str, str] | None = None) -> Answer:
        """Plain text."""
        return cls(status, text.encode(), {"content-type": "text/plain; charset=utf-8", **(headers or {})})

    @classmethod
    def json(cls, found: object) -> Answer:
        """JSON of numbers and texts in UTF-8."""
        return cls.of_type("application/json", json.dumps(found, ensure_ascii=False, allow_nan=False).encode())

    @classmethod
    def of_type(cls, content_type: str, body: bytes) -> Answer:
        """Bytes of that type."""
        return cls(200, body, {"content-type": content_type})


def split_target(target: str) -> tuple[str, Mapping[str, str], bool]:
    """The path and the parameters of an origin-form (RFC 9112, 3.2.1), and whether a parameter was given twice.

    Raises:
        Refused: there are too many parameters.
    """
    path, _, query = target.partition("?")
    try:
        found = parse_qsl(query, keep_blank_values=True, max_num_fields=MOST_PARAMETERS)
    except ValueError:
        raise Refused(400, f"a query has at most {MOST_PARAMETERS} parameters") from None
    parameters = dict(found)
    return unquote(path, errors="replace"), parameters, len(parameters) < len(found)
