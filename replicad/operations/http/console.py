"""The console: a page for people, and what only it asks for. The rest of what it shows is `/status` and `/clients`.

The page itself holds nothing of the daemon, so everybody gets it, as `/livez`. Its data come as JSON under the rules of
the other pages.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import resources
from typing import Any

import structlog
import trio

from replicad.config.logs import RECENT, Recent, RecentEvents
from replicad.daemon.figures import StateColumns, StateView
from replicad.daemon.service import Host
from replicad.errors import ReplicadError, UnknownTube
from replicad.operations.http.entry import NAMES, NO_NAME, Caller, is_address, no_such
from replicad.operations.http.history import History
from replicad.operations.http.wire import Answer, Refused, Request
from replicad.operations.serving import CANCEL, DROP, PAUSE, REPLAY, STATUS
from replicad.postgres.statements import call_value, statement
from replicad.reading import Unreadable, read_json
from replicad.streams.daemons import DAEMON_COLUMNS
from replicad.streams.picture import COLUMNS
from replicad.tubes.picture import PARTITION_COLUMNS

FILES: dict[str, tuple[str | None, str]] = {  # None: it is made from the columns of the state
    "/console": ("console.html", "text/html"),
    "/console.css": ("console.css", "text/css"),
    "/console.js": ("console.js", "text/javascript"),
    "/console-nodes.js": ("console-nodes.js", "text/javascript"),
    "/console-columns.js": (None, "text/javascript"),
}
POLICY = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
}
MOST_PARKED = 100  # entries that are shown of a tube, and that one request puts back
BODY = 16 << 10  # bytes of a request
WAIT = 5.0  # seconds for Postgres

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class _Change:
    """A change of a tube that a page of the console can ask for.

    `verb`: the right that it needs. `numbered`: the request names parked entries. `result`: the name of the number that
    the SQL function returns.
    """

    verb: str
    function: str
    event: str
    result: str = ""
    numbered: bool = False


_REPLAY = _Change(REPLAY, "tube_parked_replay", "parked_replayed", "replayed", numbered=True)
_DROP = _Change(DROP, "tube_parked_drop", "parked_dropped", "dropped", numbered=True)
_PAUSE = _Change(PAUSE, "tube_pause", "tube_paused")
_RESUME = _Change(PAUSE, "tube_resume", "tube_resumed", "was_paused")
_CANCEL = _Change(CANCEL, "tube_backfill_cancel", "backfills_cancelled", "cancelled")


class Console:
    """The pages of the console. `history`: what its charts show. `events`: the last ones of the process."""

    def __init__(self, host: Host, history: History, events: RecentEvents = RECENT) -> None:
        self._host = host
        self._history = history
        self._events = events
        self._began = time.time()
        self._schema = host.settings.database.tube_schema
        folder = resources.files("replicad.operations") / "console"
        self._files = {
            path: (_columns() if name is None else folder.joinpath(name).read_bytes(), kind)
            for path, (name, kind) in FILES.items()
        }

    async def file(self, request: Request) -> Answer:
        """The page, its style and its program. Needs no right."""
        content, kind = self._files[request.path]
        return Answer(200, content, {"content-type": f"{kind}; charset=utf-8", **POLICY})

    async def events(self, request: Request, caller: Caller) -> Answer:
        """The last events of the log that the caller may see. Needs the right `status`.

        `?after=NUMBER`: only later ones. `started` changes when the daemon is started again, and numbers begin again.
        """
        caller.require(STATUS)
        after = _whole(request.query.get("after", "0"))
        found = self._events.after(after)
        shown = [one._asdict() for one in found if is_visible(one, caller)]
        last = found[-1].number if found else after
        return Answer.json({"started": self._began, "last": last, "events": shown})

    async def parked(self, request: Request, caller: Caller) -> Answer:
        """The parked ids of the tube `?tube=NAME`, the oldest first. Needs the right `status`, and to list the tube."""
        caller.require(STATUS)
        tube = request.query.get("tube", "")
        if not caller.lists("tube", tube):
            raise no_such("tube", tube)
        with _asking_postgres(tube):
            pool = self._host.pools.housekeeping
            await call_value(pool, self._schema, "tube_find", tube)
            rows = await pool.fetch(statement("console_parked", self._schema), tube, MOST_PARKED + 1)
        return Answer.json(
            {"tube": tube, "parked": [dict(row) for row in rows[:MOST_PARKED]], "more": len(rows) > MOST_PARKED}
        )

    async def history(self, request: Request, caller: Caller) -> Answer:  # noqa: ARG002
        """Lag and rate of the last hour, of each stream and tube that the caller may see. Needs the right `status`."""
        caller.require(STATUS)
        return Answer.json(self._history.shown(caller.lists))

    async def replay(self, request: Request, caller: Caller) -> Answer:
        """Put parked entries back into their tube: a POST of `{"tube": NAME, "numbers": [...]}`."""
        return await self._change(request, caller, _REPLAY)

    async def drop(self, request: Request, caller: Caller) -> Answer:
        """Delete parked entries of a tube: a POST of `{"tube": NAME, "numbers": [...]}`."""
        return await self._change(request, caller, _DROP)

    async def pause(self, request: Request, caller: Caller) -> Answer:
        """Pause a tube: a POST of `{"tube": NAME}`."""
        return await self._change(request, caller, _PAUSE)

    async def resume(self, request: Request, caller: Caller) -> Answer:
        """Resume a paused tube: a POST of `{"tube": NAME}`."""
        return await self._change(request, caller, _RESUME)

    async def cancel(self, request: Request, caller: Caller) -> Answer:
        """Cancel all backfills of a tube: a POST of `{"tube": NAME}`."""
        return await self._change(request, caller, _CANCEL)

    async def _change(self, request: Request, caller: Caller, change: _Change) -> Answer:
        """Change a tube. Needs the right of the change on the tube. Refuses what another site's page may have sent."""
        require_own_page(request.headers, open_to_all=self._host.access.open_to_all)
        caller.require_somewhere(change.verb)  # before the body is read
        tube, numbers = _wanted(_parsed(await request.body(BODY)), numbered=change.numbered)
        caller.require_on(change.verb, "tube", tube)
        arguments = [numbers] if change.numbered else []
        with _asking_postgres(tube):
            pool = self._host.pools.housekeeping
            found = await call_value(pool, self._schema, change.function, tube, *arguments)
        done = {change.result: int(found)} if change.result else {}
        client, peer = caller.name or None, request.guest.peer
        log.info(change.event, tube=tube, **({"numbers": numbers} if numbers else {}), **done, client=client, peer=peer)
        return Answer.json({"tube": tube, **done})


def is_visible(event: Recent, caller: Caller) -> bool:
    """Whether the caller may see an event: it may list what the event names, or everything if it names nothing.

    An event that names nothing may quote any name in a text, also that of a stream which is no longer there.
    """
    fields = event.fields
    named = [(kind, str(fields[kind])) for kind in NAMES if kind in fields]
    if fields.get("kind") in NAMES and "name" in fields:
        named.append((fields["kind"], str(fields["name"])))
    return all(caller.lists(*one) for one in named) if named else caller.lists_everything


def require_own_page(headers: Mapping[str, str], *, open_to_all: bool) -> None:
    """Refuse a request that changes something and that a page of another site has a browser send.

    A browser names the page's origin in every POST. JSON from another origin needs a permission that is never given.
    Where clients need no secret, the host must be an address or `localhost`: the owner of any other name can point it
    at this machine (DNS rebinding), and then the origin looks right.

    Raises:
        Refused: it may come from another site.
    """
    host = headers.get("host", "")
    if headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise Refused(415, "send JSON, with `Content-Type: application/json`")
    origin, site = headers.get("origin"), headers.get("sec-fetch-site", "same-origin")
    if (origin is not None and origin.partition("://")[2] != host) or site != "same-origin":
        raise Refused(403, "a page of another site sent this request")
    if open_to_all and not is_address(host):
        raise Refused(403, NO_NAME)


def _parsed(found: bytes) -> Any:
    """The JSON in the body of a request. Raises Refused."""
    try:
        return read_json(found)
    except Unreadable as error:
        raise Refused(400, f"the body is no JSON that can be used: {error}") from error


def _wanted(body: Any, *, numbered: bool) -> tuple[str, list[int]]:
    match body:
        case {"tube": str(tube)} if not numbered:
            return tube, []
        case {"tube": str(tube), "numbers": list(numbers)} if (
            numbered and 0 < len(numbers) <= MOST_PARKED and _are_whole(numbers)
        ):
            return tube, numbers
    if not numbered:
        raise Refused(400, 'send {"tube": NAME}')
    raise Refused(400, f'send {{"tube": NAME, "numbers": [...]}} with 1 to {MOST_PARKED} numbers of parked entries')


def _are_whole(numbers: Iterable[object]) -> bool:
    return all(isinstance(one, int) and not isinstance(one, bool) and abs(one) < 1 << 63 for one in numbers)


def _columns() -> bytes:
    """The columns of the console that show values of `/status`, as a module of its program."""

    def exported(name: str, columns: StateColumns[Any]) -> str:
        found = [{"title": one.label, "name": one.name, "form": one.form} for one in columns.of(StateView.CONSOLE)]
        return f"export const {name} = {json.dumps(found)};\n"

    tables: dict[str, StateColumns[Any]] = {
        "STREAMS": COLUMNS,
        "PARTITIONS": PARTITION_COLUMNS,
        "DAEMONS": DAEMON_COLUMNS,
    }
    return "".join(exported(name, columns) for name, columns in tables.items()).encode()


def _whole(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or len(text) > 18:
        raise Refused(400, "`after` must be a number")
    return int(text)


@contextmanager
def _asking_postgres(tube: str) -> Iterator[None]:
    """Turns what Postgres refuses, and what takes too long, into an answer."""
    try:
        with trio.fail_after(WAIT):
            yield
    except trio.TooSlowError as error:
        raise Refused(503, f"Postgres did not answer within {WAIT:g} s") from error
    except UnknownTube as error:
        raise no_such("tube", tube) from error
    except ReplicadError as error:
        raise Refused(503, str(error)) from error
