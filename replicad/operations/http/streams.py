"""The pages /streams/NAME/rows and /streams/NAME/live: who may ask, what is asked, and how it is refused.

They are programs' interfaces, so errors are JSON. What rows there are, tokens and refusals come from the services that
serve clients of the protocol.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

import structlog
import trio
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from replicad.daemon.inside import PageRequest, RowPage
from replicad.daemon.service import Host
from replicad.errors import ReplicadError
from replicad.operations.http.entry import Caller, Refused, calling
from replicad.operations.http.origins import Origins
from replicad.operations.http.problems import BadRequest, Problem, problem_of, problem_of_refusal
from replicad.operations.http.row_json import row_json
from replicad.streams.commands import Replicate

ROWS, MOST_ROWS = 1000, 10_000  # of a page: without `limit`, and at most
LONGEST = 20.0  # seconds until a page is found; many may wait for connections to Postgres
PIECE = 64 << 10  # bytes of an answer for which the peer has the time of one send
SLICE = 1000  # rows, before other tasks run
IMMUTABLE = "max-age=31536000, immutable"
EARLIEST = "EARLIEST"

Found = tuple[int, Mapping[str, str], bytes]  # the status, the headers, and the body

log = structlog.get_logger()


class Page:
    """An ASGI application: checks the caller, and turns errors into answers."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.origins = Origins(host.settings.http_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        request = Request(scope, receive)
        origin = request.headers.get("origin")
        try:
            if request.method == "OPTIONS":
                await Response(None, 204, self.origins.headers(origin, preflight=True))(scope, receive, send)
            else:
                found = await self._answer(request)
                if found is not None:
                    await _send(request, send, *found)
        except Problem as problem:
            self._log(request, problem)
            headers = {**problem.headers, **self.origins.headers(origin)}
            await Response(problem.body, problem.status, headers)(scope, receive, send)

    async def _answer(self, request: Request) -> Found | None:
        if request.method != "GET":
            raise Problem("method_not_allowed", "send GET")
        name = request.path_params["name"]
        try:
            async with calling(self.host.access, request) as caller:
                caller.may_ask(Replicate.VERB or "", "stream", name)  # an unknown name is found to be unknown as usual
                return await self.answer(request, caller, name)
        except Refused as refusal:
            raise problem_of_refusal(refusal) from refusal
        except ReplicadError as error:
            raise problem_of(error) from error
        except Exception as error:
            if isinstance(error, Problem):
                raise
            self.host.troubles.record("service", "http", request.url.path[:20], error)
            raise Problem("internal_error", "internal error; the server's log has it", 500) from error

    async def answer(self, request: Request, caller: Caller, name: str) -> Found | None:
        """What a caller is answered that may read the stream, or may not know it. None: it was sent."""
        raise NotImplementedError

    def _log(self, request: Request, problem: Problem) -> None:
        if problem.logged:
            return
        peer = request.scope["state"]["peer"]
        log.info("request_refused", peer=peer, over="http", code=problem.code, error=str(problem))


class Rows(Page):
    """`GET /streams/NAME/rows?after=TOKEN&limit=N`: a page, a row on each line."""

    async def answer(self, request: Request, caller: Caller, name: str) -> Found:
        """`Page.answer`."""
        token = request.query_params.get("after") or EARLIEST
        limit = _limit(request.query_params.get("limit"))
        pages = self.host.inside.pages
        if pages is None:
            raise Problem("stream_refused", "this daemon serves no streams")
        client = caller.name or request.scope["state"]["peer"].rpartition(":")[0]
        with trio.move_on_after(LONGEST) as scope:
            page = await pages.page(PageRequest(name, token, limit, client, caller.access))
        if scope.cancelled_caught:
            raise Problem("timed_out", f"no page could be read within {LONGEST:g} s; try again")
        tag = _tag(page)
        headers = {
            "cache-control": self._caching(page),
            "etag": tag,
            "replicad-next": page.token,
            "link": f'<?after={page.token}&limit={limit}>; rel="next"',
            "x-content-type-options": "nosniff",
        }
        allowed = self.origins.headers(request.headers.get("origin"))
        vary = [allowed.pop("vary", ""), "" if self.host.access.open_to_all else "Authorization"]
        headers |= allowed | ({"vary": ", ".join(filter(None, vary))} if any(vary) else {})
        if _is_known(request.headers, tag):
            return 304, headers, b""
        return 200, headers | {"content-type": "application/jsonl"}, await _rendered(page)

    def _caching(self, page: RowPage) -> str:
        """A closed page may be kept for ever where the address names the generation; by shared caches too, if everybody
        may read it.
        """
        whose = "public" if self.host.access.public else "private"
        return f"{whose}, {IMMUTABLE}" if page.closed and page.named else f"{whose}, no-cache"


async def _send(request: Request, send: Send, status: int, headers: Mapping[str, str], body: bytes) -> None:
    if status == 304:
        await Response(None, status, headers)(request.scope, request.receive, send)
        return
    connection: Any = request.scope["state"].get("connection")
    fields = {"content-length": str(len(body)), **headers}
    raw = [(name.encode(), value.encode("latin-1")) for name, value in fields.items()]
    await send({"type": "http.response.start", "status": status, "headers": raw})
    for begin in range(0, len(body), PIECE):
        if connection is not None:
            connection.prolong()
        await send({"type": "http.response.body", "body": body[begin : begin + PIECE], "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def _limit(text: str | None) -> int:
    if text is None:
        return ROWS
    if not (text.isascii() and text.isdecimal() and len(text) < 9 and 1 <= int(text) <= MOST_ROWS):
        raise BadRequest(f"`limit` must be a number from 1 to {MOST_ROWS}")
    return int(text)


def _tag(page: RowPage) -> str:
    """A strong ETag: the same for the same bytes."""
    digest = blake2b(digest_size=16)
    digest.update(page.token.encode())
    for line in page.lines:
        digest.update(line)
    return f'"{digest.hexdigest()}"'


def _is_known(headers: Headers, tag: str) -> bool:
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
