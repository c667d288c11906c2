"""Listens for HTTP: admission of connections, their time limits, and which are closed first.

A connection passes the same admission as a client of the protocol: it waits its turn by address (`Arrivals`), counts
within `--max-connections`, and is a newcomer as long as it has not sent a whole request. The oldest newcomer of the
address that has the most gives way. Each further request of a connection waits for a turn of its address too
(`YieldQueue`), so hundreds of connections that ask at the same time make a turn of the event loop no longer. Requests
that cost something hold one of `Limits.http_connections` places; a health check does not. A request whose peer does
not read the answer loses its place first.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from importlib import metadata
from itertools import chain
from typing import Any

import structlog
import trio

from replicad.config.settings import Address, DatabaseSettings
from replicad.daemon.admission import Acceptor, listen
from replicad.daemon.fairness import YieldQueue
from replicad.daemon.figures import GAUGE, Detail, Family, FigureQuery, Obstacle, Sample, StateView
from replicad.daemon.pools import guest_files
from replicad.daemon.service import Host
from replicad.daemon.troubles import keep_running
from replicad.operations.http import wire
from replicad.operations.http.console import FILES, Console
from replicad.operations.http.entry import Caller, calling, refuse_controls
from replicad.operations.http.guests import Desk, Guest
from replicad.operations.http.history import History
from replicad.operations.http.live import Live
from replicad.operations.http.metrics import AGE, FAILURES, Exposition, LookIntervals, Looks, send_to_collector
from replicad.operations.http.streams import RowsPage
from replicad.operations.http.wire import Answer, Ended, Refused, Request
from replicad.operations.serving import STATUS
from replicad.postgres.bridge import Database
from replicad.postgres.statements import load_sql, statement
from replicad.streams.daemons import DAEMON_COLUMNS, DaemonBeat, DaemonReports, Reported
from replicad.streams.serving.service import daemon_name
from replicad.tracing import collected

# The pages of `serve --http`. Each answers within a bounded time, from the daemon's memory. Rows: `streams`.


LONGEST = 10.0  # seconds for an answer; wrong secrets wait up to 8
SHOWN = 50  # sentences on /readyz
MOST_CLIENTS = 1000  # on /clients; `connected` has their number
SLICE = 100  # clients, before other tasks run

INFO = Family("replicad_info", GAUGE, "1; the labels say which program this is.", ("version", "python", "server_name"))
STARTED = Family("replicad_start_time_seconds", GAUGE, "When the daemon began to serve HTTP, in seconds since 1970.")
READY = Family("replicad_ready", GAUGE, "1 if /readyz answers 200, else 0.")
FAMILIES = (INFO, STARTED, READY, AGE, FAILURES)  # figures beside the figures of the sources

INDEX = """replicad
/livez    200 while the daemon runs
/readyz   200 if Postgres answers and every stream and tube is served, else 503 with the reasons
/status   the same and more, as JSON
/clients  connected clients, and clients that were cut, as JSON
/metrics  for Prometheus; docs/metrics.md has the table
/console  all of this for people, in a browser
/streams/NAME/rows?after=TOKEN&limit=N  rows, a line of JSON for each; docs/transports.md
/streams/NAME/rows?after=TOKEN&live=20s  the same; waits until there are rows
/streams/NAME/live?after=TOKEN  the same as server-sent events, as they come
"""

log = structlog.get_logger()
Page = Callable[[Request, Caller], Awaitable[Answer]]
STREAMS = "/streams/"  # what paths of streams begin with
READ = ("GET", "HEAD")


@dataclass(frozen=True, slots=True)
class Route:
    """A page, and with which methods it is asked for."""

    page: Page
    methods: tuple[str, ...] = READ


@dataclass(frozen=True, slots=True)
class OpenPage:
    """A page that answers everybody, whatever word is sent, and costs nothing: it needs no place."""

    page: Callable[[Request], Awaitable[Answer]]
    methods: tuple[str, ...] = READ


class HttpPages:
    """The answers. `looks.run` must be running."""

    def __init__(self, host: Host, looks: Looks, surroundings: Surroundings) -> None:
        self._host = host
        self._looks = looks
        self._surroundings = surroundings
        self._exposition = Exposition(self.families())
        self._version = metadata.version("replicad")
        self._started = time.time()
        self._began = trio.current_time()
        self._rows, self._live = RowsPage(host), Live(host)
        self.history = History(self._samples, looks.refresh)
        self._routes = self._table()

    def _table(self) -> dict[str, Route | OpenPage]:
        console = Console(self._host, self.history)
        return {
            "/": OpenPage(self.index),
            "/livez": OpenPage(self.livez),
            "/readyz": OpenPage(self.readyz),
            "/status": Route(self.status),
            "/clients": Route(self.clients),
            "/metrics": Route(self.metrics),
            "/events": Route(console.events),
            "/parked": Route(console.parked),
            "/history": Route(console.history),
            "/replay": Route(console.replay, ("POST",)),
            "/drop": Route(console.drop, ("POST",)),
            "/pause": Route(console.pause, ("POST",)),
            "/resume": Route(console.resume, ("POST",)),
            "/cancel": Route(console.cancel, ("POST",)),
            **dict.fromkeys(FILES, OpenPage(console.file)),
        }

    async def answer(self, request: Request) -> Answer | None:
        """The answer to a request. None: it was sent."""
        if request.path.startswith(STREAMS):
            name, _, last = request.path.removeprefix(STREAMS).rpartition("/")
            page = {"rows": self._rows, "live": self._live}.get(last)
            if page is not None:
                return await page(request, name)
        route = self._routes.get(request.path)
        if route is None:
            answer = Answer.text("there is no such page; / lists them\n", 404)
        elif request.method not in route.methods:
            wanted = ", ".join(route.methods)
            answer = Answer.text(f"send {wanted}\n", 405, {"allow": wanted})
        elif isinstance(route, OpenPage):
            answer = await self._answered(request, route.page(request))
        else:
            answer = await self._answered(request, self._admitted(request, route.page))
        answer.headers |= {"cache-control": "no-store", "x-content-type-options": "nosniff"}
        return answer

    async def _admitted(self, request: Request, page: Page) -> Answer:
        """The answer of a page to a caller with a place. Raises Refused."""
        async with calling(self._host.access, request) as caller:
            if caller.known:
                await request.guest.take_place()
            return await page(request, caller)

    async def _answered(self, request: Request, page: Awaitable[Answer]) -> Answer:
        """The answer of a page, in time, whatever happens."""
        try:
            with trio.fail_after(LONGEST):
                return await page
        except Refused as refusal:
            return Answer.text(
                f"{refusal.why}\n", refusal.status, {"www-authenticate": "Bearer"} if refusal.status == 401 else None
            )
        except trio.TooSlowError:
            return Answer.text(f"no answer within {LONGEST:g} s\n", 503)
        except Ended:
            raise
        except Exception as error:  # noqa: BLE001 - recorded; it ends this request only
            self._host.troubles.record("service", "http", request.path[:20], error)
            return Answer.text("internal error; the server's log has it\n", 500)

    async def index(self, request: Request) -> Answer:  # noqa: ARG002
        """What there is."""
        return Answer.text(INDEX)

    async def livez(self, request: Request) -> Answer:
        """200: the event loop runs. No word is looked at: an old secret of the probe is no reason for a restart."""
        refuse_controls(request)
        return Answer.text("ok\n")

    async def readyz(self, request: Request) -> Answer:
        """200, or 503 with the reasons that the caller may see. A word is looked at only if there are reasons."""
        found = self._obstacles()
        if not found:
            return Answer.text("ready\n")
        with suppress(Refused):
            async with calling(self._host.access, request) as caller:
                if caller.known:
                    return _reasons(found, caller)
        return Answer.text("not ready; send `Authorization: Bearer TOKEN` to see why\n", 503)

    async def status(self, request: Request, caller: Caller) -> Answer:  # noqa: ARG002
        """The state as JSON. Needs the right `status`."""
        caller.require(STATUS)
        await self._looks.refresh()
        found = self._obstacles()
        body = {
            "server_name": self._host.settings.server_name,
            "version": self._version,
            "uptime_seconds": round(trio.current_time() - self._began, 1),
            "server": self._surroundings.server,
            "ready": not found,
            "obstacles": [one._asdict() for one in found if caller.sees(one)],
        }
        lists: dict[str, list[str]] = {}
        details = list(chain.from_iterable(source.details() for source in self._host.figures.sources))
        for number, detail in enumerate(details):
            if number % SLICE == 0:
                await trio.lowlevel.checkpoint()
            if caller.sees(detail):
                listed = lists.setdefault(f"{detail.kind}s", [])
                listed.append(json.dumps({"name": detail.name, **detail.fields}))
        text = json.dumps(body)[:-1] + "".join(f', "{kind}": [{", ".join(some)}]' for kind, some in lists.items())
        return Answer.of_type("application/json", (text + "}").encode())

    async def clients(self, request: Request, caller: Caller) -> Answer:  # noqa: ARG002
        """The connected clients, their streams, and clients that were cut, as JSON. Needs the right `status`."""
        caller.require(STATUS)
        hub, now = self._host.hub, trio.current_time()
        catching_up = self._host.figures.catching_up()
        found = []
        for number, session in enumerate(list(hub)):
            if number == MOST_CLIENTS:
                break
            if number % SLICE == 0:
                await trio.lowlevel.checkpoint()
            view = asdict(session.view(now))
            also = map(asdict, catching_up.get(session.number, ()))
            view["following"] = [one for one in (*view["following"], *also) if caller.lists("stream", one["stream"])]
            found.append(view)
        cuts = [{**cut._asdict(), "ago_s": now - cut.at} for cut in reversed(tuple(hub.cuts))]
        body = {"connected": len(hub), "clients": found, "cuts": cuts, "closed": dict(hub.statistics().closed)}
        return Answer.json(body)

    async def metrics(self, request: Request, caller: Caller) -> Answer:
        """For Prometheus. Needs the right `status`."""
        caller.require(STATUS)
        await self._looks.refresh()
        accept = request.headers.get("accept", "")
        page, content_type = await self._exposition.page(caller.name, accept, self._samples, caller.admits)
        return Answer.of_type(content_type, page)

    async def push(self) -> None:
        """Send the figures to the collector of OpenTelemetry that the environment names."""
        named = {"service.version": self._version, "service.instance.id": self._host.settings.server_name}
        await send_to_collector(self.families(), self._samples, self._looks.refresh, named)

    def families(self) -> list[Family]:
        """All exported figures, except the figures of the process and `replicad_series_left_out`."""
        return [*FAMILIES, *(one for source in self._host.figures.sources for one in source.families)]

    def _samples(self) -> Iterable[Sample]:
        own = (
            INFO(1, self._version, platform.python_version(), self._host.settings.server_name),
            STARTED(self._started),
            READY(float(not self._obstacles())),
        )
        return chain(own, self._looks.samples(), *(source.samples() for source in self._host.figures.sources))

    def _obstacles(self) -> list[Obstacle]:
        return [one for source in self._host.figures.sources for one in source.obstacles()]


def _reasons(found: Sequence[Obstacle], caller: Caller) -> Answer:
    seen = [one for one in found if caller.sees(one)]
    lines = [" ".join(one.why.split()) for one in seen[:SHOWN]]
    if len(lines) < len(found):
        lines.append(f"and {len(found) - len(lines)} more")
    return Answer.text("not ready: " + "\n".join(lines) + "\n", 503)


OLD = 15.0  # seconds after which a connection is closed with its next answer
REQUESTS = 100  # on one connection, one after another
_GIVES_WAY = "this server has more connections than it takes (--max-connections, or too many are silent); try again"
FULL = wire.plain_answer(503, _GIVES_WAY, retry_after="5")
TOO_LONG = wire.plain_answer(431, f"the head of a request has at most {wire.HEAD_BYTES} bytes")


class HttpServer:
    """The HTTP server of one daemon."""

    def __init__(self, host: Host, pace: LookIntervals = LookIntervals()) -> None:
        assert host.settings.http is not None
        self.addresses: tuple[Address, ...] = ()
        self._host = host
        self._address = host.settings.http
        self._looks = Looks(host.figures, host.troubles, pace)
        own = daemon_name(host.settings.server_name)
        surroundings = Surroundings(host.pools.housekeeping, host.settings.database, own)
        host.figures.add(surroundings)
        self._pages = HttpPages(host, self._looks, surroundings)
        self._desk = Desk(host.settings.limits.http_connections)
        self._turns = YieldQueue()
        self._acceptor: Acceptor | None = None

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled. Raises EnvironmentRefused: the address cannot be used."""
        host, limits = self._host, self._host.settings.limits
        queues = await listen(self._address, "--http")
        self.addresses = queues.addresses
        self._address = self.addresses[0]  # port 0 was a free one: it is kept when this is started again
        with closing(queues):
            async with trio.open_nursery() as nursery:
                acceptor = Acceptor(
                    self._serve_one,
                    nursery,
                    host.troubles,
                    room=guest_files(limits) + (0 if host.handshakes is None else limits.tls_handshakes),
                    full=FULL,
                    refused=host.hub.refuse,
                    secure=host.handshakes,
                    give_way=YieldQueue(patience=0.001).next,
                    first_line=wire.HEAD_BYTES,
                    line_end=wire.HEAD_END,
                    too_long=TOO_LONG,
                    name="http",
                )
                self._acceptor = acceptor
                nursery.start_soon(keep_running, self._looks.run, "service", "figures", host.troubles)
                nursery.start_soon(keep_running, self._pages.history.run, "service", "history", host.troubles)
                if collected("metrics"):
                    nursery.start_soon(keep_running, self._pages.push, "service", "collector", host.troubles)
                nursery.start_soon(acceptor.accept_forever, queues)
                task_status.started()
                await trio.sleep_forever()

    async def _serve_one(self, stream: trio.abc.Stream, peer: str) -> None:
        assert self._acceptor is not None
        guest = Guest(self._host.hub, self._desk, stream, peer, self._acceptor.lent)
        with suppress(wire.Ended), guest.admitted() as may_stay:
            if may_stay:
                await self._serve_requests(guest, stream)
        if guest.refused:
            with suppress(trio.BrokenResourceError, trio.ClosedResourceError), trio.move_on_after(1.0):
                await stream.send_all(FULL)
        await trio.aclose_forcefully(stream)

    async def _serve_requests(self, guest: Guest, stream: trio.abc.Stream) -> None:
        line = wire.HttpWire(stream, guest.waiting)
        began = trio.current_time()
        try:
            for number in range(1, REQUESTS + 1):
                if number > 1 and await line.wait_request():  # for the first one, accepting has waited for a turn
                    await self._turns.next(guest.address)
                head = await line.next_head()
                if head is None:
                    return
                asked = (head.method, *head.parts, head.headers)
                request = Request(*asked, guest, line.read_body, line.wait_closed)
                answer = await self._pages.answer(request)
                if answer is None:  # it was sent in another way
                    return
                old = number == REQUESTS or trio.current_time() >= began + OLD
                if not await line.send(answer, head_only=head.method == "HEAD", close=old or answer.close):
                    return
                guest.rest()
        except Refused as refused:
            await line.refuse(refused)


# What `/status` shows beside the daemon's own parts: the server, all daemons of the database, and backfills.
#
# They are the statements of `replicad status` and `replicad doctor`, read as all figures are (`Looks`).

MOST = 1000  # backfills, reports, and daemons


class Surroundings:
    """`Source` without figures. `db`: a pool for what can wait. `own`: how the reports of this daemon begin."""

    def __init__(self, db: Database, settings: DatabaseSettings, own: str) -> None:
        self._db = db
        self._settings = settings
        self._own = own
        self.server: dict[str, object] = {}  # of the last look; empty if it is too old
        self._backfills: list[Mapping[str, Any]] = []
        self._reports: list[Reported] = []
        self._daemons: list[DaemonBeat] = []
        self._read_at = 0.0  # when the daemons were read, by this daemon's clock

    @property
    def families(self) -> Sequence[Family]:
        """`Source.families`."""
        return ()

    def samples(self) -> Iterable[Sample]:
        """`Source.samples`."""
        return ()

    def obstacles(self) -> Iterable[Obstacle]:
        """`Source.obstacles`."""
        return ()

    def details(self) -> Iterable[Detail]:
        """`Source.details`: each backfill that is not finished, and each trouble that another daemon reports. `kind`
        says whose name it has. And each daemon with its last beat; `own`: it is this one.
        """
        passed = trio.current_time() - self._read_at
        for daemon in self._daemons:
            aged = replace(daemon, silent_s=daemon.silent_s + passed)
            fields = DAEMON_COLUMNS.fields(StateView.STATUS, aged)
            yield Detail("daemon", daemon.name, {**fields, "own": self._is_own(daemon)})
        for row in self._backfills:
            fields = {"table": row["table"], "ids": row["ids"], "of": row["approx_ids"], "idle_seconds": row["idle_s"]}
            yield Detail("backfill", row["tube"], {"kind": "tube", **fields})
        now = datetime.now(UTC)
        for one in self._reports:
            lasting = round(max(0.0, (now - one.since).total_seconds()), 1)
            what = {"kind": one.kind, "cause": one.cause, "code": one.code, "reason": one.reason}
            yield Detail("report", one.name, {"daemon": one.daemon, **what, "lasting_seconds": lasting})

    def looks(self) -> Sequence[FigureQuery]:
        """`Source.looks`."""
        return (
            FigureQuery("server", self._look_at_server, self.server.clear),
            FigureQuery("backfills", self._look_at_backfills, self._backfills.clear),
            FigureQuery("reports", self._look_at_reports, self._reports.clear),
            FigureQuery("daemons", self._look_at_daemons, self._daemons.clear),
        )

    async def _look_at_server(self) -> None:
        row = (await self._db.fetch(load_sql("doctor_server")))[0]
        self.server.update(
            database=self._db.target.database,
            host=self._db.target.host,
            version=row["version"],
            role=row["role"],
            standby=row["standby"],
            sessions=row["sessions"],
            max_sessions=row["max_sessions"],
            daemons=row["daemons"],
        )

    async def _look_at_backfills(self) -> None:
        found = await self._db.fetch(statement("doctor_backfills", self._settings.tube_schema))
        self._backfills[:] = [dict(row) for row in found[:MOST]]

    async def _look_at_reports(self) -> None:
        found = await DaemonReports(self._db, self._settings.stream_schema).troubles()
        self._reports[:] = [one for one in found if not one.daemon.startswith(self._own)][:MOST]

    async def _look_at_daemons(self) -> None:
        self._daemons[:] = (await DaemonReports(self._db, self._settings.stream_schema).daemons())[:MOST]
        self._read_at = trio.current_time()

    def _is_own(self, one: DaemonBeat) -> bool:
        return self._own == daemon_name(one.name, one.pid)
