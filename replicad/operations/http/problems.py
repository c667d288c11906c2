"""Errors over HTTP: a status for each code of the protocol, and a JSON body with the code and the sentence."""

from __future__ import annotations

import json
from collections.abc import Mapping

from replicad.client.refusals import refusal
from replicad.errors import BadToken, RemoteError, ReplicadError, TokenExpired, TokenForked
from replicad.operations.http.wire import Answer, Refused
from replicad.protocol.tokens import Vector

UNAVAILABLE = 503  # of every code that is not in the table: it may be over later
STATUS = {
    "access_expired": 401,
    "bad_request": 400,
    "bad_token": 400,
    "forbidden": 403,
    "method_not_allowed": 405,
    "not_authorised": 401,
    "token_ahead": 409,
    "token_expired": 410,
    "too_many_guesses": 429,
    "too_many_requests": 429,
    "unknown_stream": 404,
    "wrong_version": 505,
}
FORKED = 409  # a bad_token with the token to go on with
RETRY = "5"  # seconds: a request that is refused now may be served then

_CODES = {
    401: "not_authorised",
    403: "forbidden",
    404: "unknown_stream",
    429: "too_many_requests",
    503: "rights_changed",
}


class BadRequest(ReplicadError):
    """A parameter of the request is not valid."""

    code = "bad_request"


class Problem(Exception):
    """The request is answered by an error: its status, its headers, its body."""

    def __init__(self, code: str, sentence: str, status: int | None = None, **more: object) -> None:
        super().__init__(sentence)
        self.code = code
        self.status = STATUS.get(code, UNAVAILABLE) if status is None else status
        self.allowed: tuple[str, ...] = ()  # the methods of the page, if another method was sent (RFC 9110, 15.5.6)
        self.logged = False  # by the session that the error comes from
        self.fields = {"code": code, "error": sentence, **more}

    def noted(self) -> Problem:
        """The same, to be raised, from the log entry of a session. An exception that is raised and kept makes a cycle
        of references.
        """
        found = Problem(self.code, str(self), self.status)
        found.fields, found.logged = self.fields, True
        return found

    def answer(self, headers: Mapping[str, str]) -> Answer:
        """The same answer, with other headers."""
        return Answer(self.status, self.body, {**self.headers, **headers})

    @property
    def body(self) -> bytes:
        """`{"code": ..., "error": sentence}`, and where there is one `token`, the token to go on with."""
        return json.dumps(self.fields, ensure_ascii=False).encode() + b"\n"

    @property
    def headers(self) -> Mapping[str, str]:
        """The headers that belong to the status; never kept by a cache."""
        found = {"content-type": "application/json", "cache-control": "no-store"}
        if self.status == 401:
            found["www-authenticate"] = "Bearer"
        if self.status in (429, UNAVAILABLE):
            found["retry-after"] = RETRY
        if self.allowed:
            found["allow"] = ", ".join(self.allowed)
        return found


def problem_of(error: ReplicadError) -> Problem:
    """The answer for an error of the protocol.

    The history has forked: rows of all writers above `discard_after` are void, and `token` is the token to continue
    with. Both are the minimum of the shared positions: a reader of pages does not know the numbers of writers in a
    vector token, and could not know whose rows to discard. Rows were trimmed: `token` is EARLIEST.
    """
    if isinstance(error, TokenForked):
        rewind = Vector.parse(error.rewind)
        begin = Vector(rewind.minimum, epoch=rewind.epoch)
        return Problem(BadToken.code, str(error), FORKED, discard_after=str(begin.minimum), token=str(begin))
    if isinstance(error, TokenExpired):
        return Problem(error.code, str(error), token="EARLIEST")  # noqa: S106 - a word of the protocol
    return Problem(error.code, str(error))


def problem_of_text(text: str) -> Problem:
    """The answer for the text of an ERROR."""
    error = refusal(text)
    if isinstance(error, RemoteError):
        code, colon, sentence = text.partition(": ")
        return Problem(code, sentence) if colon else Problem(error.code, text)
    return problem_of(error)


def problem_of_refusal(refusal: Refused) -> Problem:
    """The answer for a caller that may not ask."""
    code, _, sentence = refusal.why.partition(": ")
    if code in STATUS or code == "too_many_connections":
        return Problem(code, sentence, refusal.status)
    return Problem(_CODES.get(refusal.status, "refused"), refusal.why, refusal.status)
