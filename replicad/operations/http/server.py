"""Listens for HTTP: admission of connections, their time limits, and which are closed first.

A connection passes the same admission as a client of the protocol: it waits its turn by address (`Arrivals`), counts
within `--max-connections`, and is a newcomer as long as it has not sent a whole request. The oldest newcomer of the
address that has the most gives way. Each further request of a connection waits for a turn of its address too (`Turns`),
so hundreds of connections that ask at the same time make a turn of the event loop no longer. Requests that cost
something hold one of `Limits.http_connections` places; a health check does not. A request whose peer does not read the
answer loses its place first.
"""

from __future__ import annotations

from contextlib import closing, suppress

import trio

from replicad.config.settings import Address
from replicad.daemon.files import guest_files
from replicad.daemon.listener import Acceptor, listen
from replicad.daemon.service import Host
from replicad.daemon.supervision import keep_running
from replicad.daemon.turns import Turns
from replicad.operations.http import wire
from replicad.operations.http.app import HttpPages
from replicad.operations.http.guests import Desk, Guest
from replicad.operations.http.messages import Refused, Request, split_target
from replicad.operations.http.metrics import LookIntervals, Looks
from replicad.operations.http.surroundings import Surroundings
from replicad.streams.serving.trouble_book import daemon_name

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
        self._turns = Turns()
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
                    give_way=Turns(patience=0.001).next,
                    first_line=wire.HEAD_BYTES,
                    line_end=wire.HEAD_END,
                    too_long=TOO_LONG,
                    name="http",
                )
                self._acceptor = acceptor
                nursery.start_soon(keep_running, self._looks.run, "service", "figures", host.troubles)
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
        line = wire.Wire(stream, guest.waiting)
        began = trio.current_time()
        try:
            for number in range(1, REQUESTS + 1):
                if number > 1 and await line.wait_request():  # for the first one, accepting has waited for a turn
                    await self._turns.next(guest.address)
                head = await line.next_head()
                if head is None:
                    return
                path, query, repeats = split_target(head.target)
                request = Request(head.method, path, query, repeats, head.headers, guest, line.read_body)
                answer = await self._pages.answer(request)
                if answer is None:  # it was sent in another way
                    return
                old = number == REQUESTS or trio.current_time() >= began + OLD
                if not await line.send(answer, head_only=head.method == "HEAD", close=old or answer.close):
                    return
                guest.rest()
        except Refused as refused:
            await line.refuse(refused)
