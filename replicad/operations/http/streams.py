"""The pages /streams/NAME/rows and /streams/NAME/live: rights, parameters, and refusals.

They are programs' interfaces, so errors are JSON. Rows, tokens and refusals come from the services that
serve clients of the protocol.

The JSON of a row is made of its line of RDATA: `{"instance":"master","token":54,"row":...}`. The row stays as it is.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from hashlib import blake2b
from weakref import WeakKeyDictionary

import structlog
import trio

from replicad.client.refusals import refusal
from replicad.config.access import Part, part_text
from replicad.config.declaring import seconds
from replicad.daemon.fairness import Asker
from replicad.daemon.service import Host, PageRequest, Pages, RowPage
from replicad.errors import BadToken, RemoteError, ReplicadError, TokenExpired, TokenForked
from replicad.operations.http.entry import KEPT, PARAMETER, Caller, Origins, calling
from replicad.operations.http.wire import Answer, Ended, Refused, Request
from replicad.protocol.tokens import Vector

ROWS, MOST_ROWS = 1000, 10_000  # of a page: without `limit`, and at most
LONGEST = 20.0  # seconds until a page is found; many may wait for connections to Postgres
PART_PAUSE = 0.25  # seconds between two looks for the rows of a part, whose stream moves by other rows too
SLICE = 1000  # rows, before other tasks run
SHORTEST_LIVE, LONGEST_LIVE = 1.0, 60.0  # seconds for which a page may wait for rows
LIVE_FRESH = 1  # seconds; the shortest time that Cache-Control can say
SHARED = 0.1  # seconds for which live readers get the same page with rows; longer, and they get fewer rows at a time
GENERATION = "!"  # in tokens that name their generation
IMMUTABLE = "max-age=31536000, immutable"
EARLIEST = "EARLIEST"

log = structlog.get_logger()


class Page:
    """Checks the caller of a request for rows, and turns errors into answers."""

    methods: tuple[str, ...] = ("GET", "OPTIONS")
    parameters: tuple[str, ...] = ("after",)  # those that are no filter columns
    closes = False  # whether the connection can be used for nothing else after a refusal

    def __init__(self, host: Host) -> None:
        self.host = host
        browsers = host.settings.browser_key is not None
        self._origins = Origins(host.settings.http_origins, cookies=browsers)
        self._kept = KEPT if browsers else {}

    def allowed(self, request: Request, *, preflight: bool = False) -> dict[str, str]:
        """The headers of every answer: who may read it in a browser, and that no page passes the address on."""
        return {**self._origins.headers(request.headers.get("origin"), preflight=preflight), **self._kept}

    async def __call__(self, request: Request, name: str) -> Answer | None:
        """The answer to a request for the stream of that name. None: it was sent."""
        try:
            if request.method == "OPTIONS":
                return Answer(204, headers=self.allowed(request, preflight=True))
            return await self._answer(request, name)
        except Problem as problem:
            self._log(request, problem)
            answer = problem.answer(self.allowed(request))
            answer.close = self.closes
            return answer

    async def _answer(self, request: Request, name: str) -> Answer | None:
        if request.method not in self.methods:
            problem = Problem("method_not_allowed", "send GET")
            problem.allowed = self.methods
            raise problem
        try:
            async with calling(self.host.access, request, self._origins) as caller:
                caller.may_read(name)  # an unknown name is found to be unknown as usual
                return await self.answer(request, caller, name)
        except Refused as refusal:
            raise problem_of_refusal(refusal) from refusal
        except ReplicadError as error:
            raise problem_of(error) from error
        except Exception as error:
            if isinstance(error, Problem | Ended):
                raise
            self.host.troubles.record("service", "http", request.path[:20], error)
            raise Problem("internal_error", "internal error; the server's log has it", 500) from error

    async def answer(self, request: Request, caller: Caller, name: str) -> Answer | None:
        """What a caller is answered that may read the stream, or may not know it. None: it was sent."""
        raise NotImplementedError

    def part_in(self, request: Request, name: str) -> Part | None:
        """The parameter that names a filter column of a stream of changes, and its value; None for all changes. Raises
        BadRequest for several.
        """
        pages = self.host.inside.pages
        if pages is None or not pages.has_changes(name):
            return None
        found = [(key, value) for key, value in request.query.items() if key not in (*self.parameters, PARAMETER)]
        if len(found) > 1:
            names = " and ".join(key[:40] for key, _ in found[:2])
            raise BadRequest(f"a part of a stream has one value of one filter column, and the request has {names}")
        if found and not found[0][0]:
            raise BadRequest("a parameter has no name; name the filter column, or leave the parameter out")
        return found[0] if found else None

    def _log(self, request: Request, problem: Problem) -> None:
        if not problem.logged:
            peer = request.guest.peer
            log.info("request_refused", peer=peer, over="http", code=problem.code, error=str(problem))


class RowsPage(Page):
    """`GET /streams/NAME/rows?after=TOKEN&limit=N&live=SECONDS`: a page, a row on each line.

    With `live` a page without rows is answered when rows are there, or after that time. All readers at one token ask
    for one address, so a shared cache in front sends one request for all of them and keeps the answer for LIVE_FRESH
    seconds. An answer without rows names another address to go on with (`cursor`): the cache still has it at its own.
    """

    methods = ("GET", "HEAD", "OPTIONS")
    parameters = ("after", "limit", "live", "cursor")

    def __init__(self, host: Host) -> None:
        super().__init__(host)
        self._bodies: WeakKeyDictionary[RowPage, tuple[str, bytes]] = WeakKeyDictionary()

    async def answer(self, request: Request, caller: Caller, name: str) -> Answer:
        """`Page.answer`."""
        token = request.query.get("after") or EARLIEST
        limit = _limit(request.query.get("limit"))
        part = self.part_in(request, name)
        pages = self.host.inside.pages
        if pages is None:
            raise Problem("stream_refused", "this daemon serves no streams")
        live = _live(request.query.get("live"))
        asker = Asker(caller.name or request.guest.address)
        wanted = PageRequest(name, token, limit, asker, caller.access, part)
        since = None  # when the build of a page with rows may have begun
        if live is not None:
            since = trio.current_time() - (SHARED if GENERATION in token else 0)
        page = None if live is None else await pages.empty_page(wanted)
        if page is None:
            page = await _read(pages, wanted, request, since)
        if live is not None:
            left = live if caller.browser is None else min(live, max(0.0, caller.browser.expires - time.time()))
            until = trio.current_time() + left
            while not page.lines and trio.current_time() < until:
                await _wait(pages, wanted, page.token, request, until)
                if page.part is not None:  # what came may be of other parts
                    await trio.sleep(PART_PAUSE)
                found = await _read(pages, replace(wanted, token=page.token), request, since)
                if found.named != page.named:  # the address of the request counts
                    found = replace(found, named=page.named)
                page = found
        tag, body = await self._rendered(page)
        headers = {
            "cache-control": self._caching(page, caller, live),
            "etag": tag,
            "replicad-next": page.token,
            "link": f'<{_next(page, limit, live)}{_asked(part)}>; rel="next"',
            "x-content-type-options": "nosniff",
        }
        allowed = self.allowed(request)
        vary = [allowed.pop("vary", ""), "" if self.host.access.open_to_all else "Authorization"]
        vary += ["Cookie"] if self.host.settings.browser_key is not None else []
        headers |= allowed | ({"vary": ", ".join(filter(None, vary))} if any(vary) else {})
        if _is_known(request.headers, tag):
            return Answer(304, headers=headers)
        return Answer(200, body, {"content-type": "application/jsonl", **headers})

    async def _rendered(self, page: RowPage) -> tuple[str, bytes]:
        """The ETag and the body of a page: made once, as long as the page is kept for others."""
        found = self._bodies.get(page)
        if found is None:
            found = self._bodies[page] = _tag(page), await _rendered(page)
        return found

    def _caching(self, page: RowPage, caller: Caller, live: float | None) -> str:
        """A closed page may be kept for ever where the address names the generation; by shared caches too, if all
        clients may read it. An answer that was waited for is kept for the others who waited for it. A page under an
        address with a token is not kept: the token would be kept too.
        """
        if caller.browser is not None and caller.browser.in_address:
            return "private, no-store"
        if page.part is not None:  # which part an address gives may depend on who asks
            return "private, no-cache"
        whose = "public" if self.host.access.public else "private"
        if page.closed and page.named:
            return f"{whose}, {IMMUTABLE}"
        return f"{whose}, no-cache" if live is None or not page.named else f"{whose}, max-age={LIVE_FRESH}"


def _asked(part: Part | None) -> str:
    return "" if part is None else f"&{part_text(part)}"


def _limit(text: str | None) -> int:
    if text is None:
        return ROWS
    if not (text.isascii() and text.isdecimal() and len(text) < 9 and 1 <= int(text) <= MOST_ROWS):
        raise BadRequest(f"`limit` must be a number from 1 to {MOST_ROWS}")
    return int(text)


def _live(text: str | None) -> float | None:
    """The parameter `live` in seconds; None without it."""
    if text is None:
        return None
    try:
        found = seconds(text)
    except ValueError:
        found = 0.0
    if not SHORTEST_LIVE <= found <= LONGEST_LIVE:
        raise BadRequest(f"`live` must be a time from {SHORTEST_LIVE:g}s to {LONGEST_LIVE:g}s, such as 20s")
    return found


async def _read(pages: Pages, wanted: PageRequest, request: Request, since: float | None = None) -> RowPage:
    with trio.move_on_after(LONGEST):
        await request.guest.take_place()
        return await pages.page(wanted, since)
    raise Problem("timed_out", f"no page could be read within {LONGEST:g} s; try again")


async def _wait(pages: Pages, wanted: PageRequest, token: str, request: Request, until: float) -> None:
    """Wait, without a place, until rows may follow the token, or until that time. Raises Ended: the peer has gone."""

    async def end_with_peer() -> None:
        await request.closed()
        raise Ended

    with request.guest.as_follower(), trio.move_on_at(until):
        await pages.wait_beyond(wanted, token, end_with_peer)


def _next(page: RowPage, limit: int, live: float | None) -> str:
    """The address to go on with, below the address of the page. An answer without rows is in caches under its address:
    readers go on at another one, which is the same for all who were answered within about that time.
    """
    found = f"?after={page.token}&limit={limit}"
    if live is None:
        return found
    cursor = "" if page.lines else f"&cursor={int(time.time() / live)}"
    return f"{found}&live={live:g}s{cursor}"


def _tag(page: RowPage) -> str:
    """A strong ETag: the same for the same bytes."""
    digest = blake2b(digest_size=16)
    digest.update(page.token.encode())
    for line in page.lines:
        digest.update(line)
    return f'"{digest.hexdigest()}"'


def _is_known(headers: Mapping[str, str], tag: str) -> bool:
    """Whether the client has that version (RFC 9110, 13.1.2)."""
    named = [one.strip().removeprefix("W/") for one in headers.get("if-none-match", "").split(",")]
    return tag in named or "*" in named


async def _rendered(page: RowPage) -> bytes:
    found: list[bytes] = []
    for number, line in enumerate(page.lines):
        if number % SLICE == 0:
            await trio.lowlevel.checkpoint()
        _, _, instance, token, row = line.split(b" ", 4)
        found.append(row_json(instance, token, row))
    return b"\n".join([*found, b""]) if found else b""


def row_json(instance: bytes, token: bytes, row: bytes) -> bytes:
    """The JSON of a line of RDATA, on one line. `token` is null if more rows with the same token follow (`batch`)."""
    return b"".join((_opening(instance), b"null" if token == b"batch" else token, b',"row":', row, b"}"))


@lru_cache(maxsize=1024)
def _opening(instance: bytes) -> bytes:
    return b'{"instance":%s,"token":' % json.dumps(instance.decode(), ensure_ascii=False).encode()


# Errors over HTTP: a status for each code of the protocol, and a JSON body with the code and the sentence.

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
