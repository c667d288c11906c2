"""Services of the daemon over memory: no Postgres, no sockets, and a clock that jumps."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, cast

import pytest
import trio
import trio.testing
from structlog.testing import capture_logs

from replicad.config.settings import ServerSettings
from replicad.daemon.access import AccessControl
from replicad.daemon.hub import Hub
from replicad.daemon.journal import JournalLimits
from replicad.daemon.poller import Poller
from replicad.daemon.service import Service
from replicad.daemon.session import Dispatch, Session
from replicad.daemon.troubles import Troubles, keep_running, keep_service
from replicad.protocol.connection import CloseReason
from replicad.streams.daemon_registry import DaemonRegistry
from replicad.streams.daemons import DaemonReports
from replicad.streams.serving.catchups import CatchupLimits, Catchups
from replicad.streams.serving.filters import FilterFeeds
from replicad.streams.serving.intervals import StreamIntervals
from replicad.streams.serving.publisher import Publisher
from replicad.streams.serving.recording import Recording
from replicad.streams.serving.retention import Retention
from replicad.streams.serving.service import AckService, StreamService, TroubleBook
from tests.vocabulary import EVERY

from .memory_streams import MemoryPositions, MemoryStore


@pytest.fixture(autouse=True)
def logs() -> Iterator[list[Any]]:
    """What was logged. Nothing is rendered, which would take most of the time."""
    with capture_logs() as entries:
        yield entries


async def settle(seconds: float = 0.3) -> None:
    """Let everything that is due happen; the clock jumps, so this takes no time."""
    await trio.sleep(seconds)
    await trio.testing.wait_all_tasks_blocked()


class Client:
    """A client of services in memory: what it was sent, PINGs left out."""

    def __init__(self, stream: trio.abc.Stream, session: Session) -> None:
        self.session = session
        self.reason: CloseReason | None = None
        self._stream = stream
        self._data = b""

    async def say(self, *lines: str) -> list[str]:
        """Send lines, and return what comes until nothing more does."""
        await self.send(*lines)
        return await self.lines()

    async def send(self, *lines: str) -> None:
        """Send lines."""
        await self._stream.send_all("".join(f"{line}\n" for line in lines).encode())

    async def lines(self, seconds: float = 0.3) -> list[str]:
        """What comes within so many seconds."""
        with trio.move_on_after(seconds):
            while data := await self._stream.receive_some(1 << 16):
                self._data += data
        *lines, rest = self._data.split(b"\n")
        self._data = rest
        return [line.decode() for line in lines if not line.startswith((b"PING 1", b"PING 2", b"SERVER"))]

    async def leave(self) -> None:
        """Close the connection, and wait until the session has ended."""
        await self._stream.aclose()
        while self.reason is None:
            await settle()


class Desk:
    """Any services, and clients that talk to them."""

    def __init__(self, nursery: trio.Nursery, troubles: Troubles, **limits: Any) -> None:
        settings = ServerSettings(server_name="example.com")
        self.settings = replace(settings, limits=replace(settings.limits, **limits))
        self.troubles = troubles
        self.hub = Hub(1000, troubles, self.settings.limits)
        self.access = AccessControl()
        self.dispatch: Dispatch
        self.services: Sequence[Service] = ()
        self._nursery = nursery
        nursery.start_soon(self.hub.run)

    async def open(self, *services: Service) -> None:
        """Run their jobs as the daemon does."""
        self.services = services
        self.dispatch = Dispatch(services, self.settings.limits.max_pending)
        for job in [job for service in services for job in service.jobs()]:
            if job.announces:
                await self._nursery.start(keep_service, job.run, job.name, self.troubles)
            else:
                self._nursery.start_soon(keep_running, job.run, "service", job.name, self.troubles)

    def connect(self, peer: str = "memory", certificate: Sequence[str] = ()) -> Client:
        """A new client."""
        ours, theirs = trio.testing.memory_stream_pair()
        known = self.access.enter(peer, certificate)
        session = Session(ours, peer, self.settings, self.hub, EVERY, access=known)
        self.hub.admit(session)
        client = Client(theirs, session)

        async def run() -> None:
            client.reason = await session.run(self.dispatch.conversation(session))

        self._nursery.start_soon(run)
        return client


async def _trim_nothing(_name: str, _batch: int) -> int:
    return 0


class Streams:
    """The service of streams over a store in memory."""

    def __init__(
        self, desk: Desk, store: MemoryStore, pace: StreamIntervals, limits: JournalLimits, catchups: CatchupLimits
    ) -> None:
        self.desk = desk
        self.store = store
        self.positions = MemoryPositions()
        self.troubles = desk.troubles
        poller, registry = cast(Poller, self.positions), cast(DaemonRegistry, store)
        self.publisher = Publisher(
            registry, store, limits, poller, self.troubles, catchups=Catchups(catchups), pace=pace
        )
        acks = AckService(registry, self.publisher.served, self.troubles, pace)
        book = TroubleBook(cast(DaemonReports, store), self.troubles, "example.com", pace)
        recording = Recording(registry, self.troubles, lambda: False, pace)
        filters = FilterFeeds(self.troubles, pace)
        retention = Retention(self.publisher.streams, _trim_nothing, self.troubles, pace)
        self.service = StreamService(
            self.publisher, acks, book, retention, poller, recording=recording, filters=filters, pace=pace
        )
        self.connect = desk.connect

    def why(self, name: str) -> str:
        """What is wrong with a stream."""
        return self.troubles.why("stream", name) or ""

    async def write(self, name: str, *ids: int, writer: str = "master", upto: int | None = None) -> None:
        """Commit rows, and have them published."""
        self.store.insert(name, *ids, writer=writer)
        self.positions.tell(name, max(ids) if upto is None else upto)
        await settle()


@asynccontextmanager
async def open_streams(
    *names: str,
    by_writer: bool = False,
    pace: StreamIntervals = StreamIntervals(),
    limits: JournalLimits | None = None,
    store: MemoryStore | None = None,
    catchups: CatchupLimits = CatchupLimits(),
) -> AsyncIterator[Streams]:
    """The service with streams that stand at 0."""
    async with trio.open_nursery() as nursery:
        desk = Desk(nursery, Troubles())
        streams = Streams(desk, store or MemoryStore(), pace, limits or JournalLimits(), catchups)
        for name in names:
            streams.store.add(name, by_writer=by_writer)
        nursery.start_soon(streams.desk.open, streams.service)
        await settle()
        for name in names:
            streams.positions.tell(name, 0)
        await settle(3)
        yield streams
        nursery.cancel_scope.cancel()


def on_a_jumping_clock(scenario: Callable[..., Awaitable[None]], *args: Any) -> None:
    """Run a scenario of a test that Hypothesis drives."""
    trio.run(scenario, *args, clock=trio.testing.MockClock(autojump_threshold=0))
