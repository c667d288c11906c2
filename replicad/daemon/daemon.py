"""The daemon put together: databases, publisher, tubes, listeners, signals, and an end within a bounded time."""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import structlog
import trio

from replicad.config.limits import Limits
from replicad.config.settings import Address, ServerSettings
from replicad.daemon.files import ENTRANCE, FileBudget, plan_files
from replicad.daemon.hub import Hub
from replicad.daemon.installing import install_all
from replicad.daemon.listener import Entrance, open_listeners
from replicad.daemon.poller import Poller
from replicad.daemon.relay import Relay
from replicad.daemon.requests import Requests
from replicad.daemon.session import Session
from replicad.daemon.signals import interruptible, stop_on_signal, uninterruptible
from replicad.daemon.supervision import keep_running, keep_service
from replicad.daemon.troubles import Troubles
from replicad.errors import EnvironmentRefused, ReplicadError
from replicad.postgres import schema_text
from replicad.postgres.bridge import Database, open_database
from replicad.postgres.embedded import EmbeddedPostgres
from replicad.postgres.horizon import Horizon
from replicad.presence.service import PresenceService
from replicad.protocol.commands import ClearUserSync, Command, Error, LockReleased, RemoteServerUp, Server
from replicad.protocol.states import CloseReason
from replicad.streams.serving.ack_service import AckService
from replicad.streams.serving.publisher import Publisher
from replicad.streams.serving.trouble_book import TroubleBook
from replicad.tubes.serving.service import TubeService

GC_THRESHOLD = 50_000  # new objects between two looks for cycles; at Python's 700, sending to many spent a tenth on it
STREAM_CONNECTIONS = 4  # of all streams: to look, to copy new rows, to note positions
STREAM_LOCK_TIMEOUT = 1.0  # seconds; a copy from a table that somebody has locked must not keep a connection for long
RELAY_CONNECTIONS = 2  # one listens, the other tells
ACK_CONNECTIONS = 2  # they only delete from tubes, so their locks on tubes do not hold the positions of tubes back

Recover = Callable[[], Awaitable[None]]
log = structlog.get_logger()


def serve(settings: ServerSettings) -> None:
    """Run a daemon until SIGTERM or SIGINT; returns after a clean end.

    Raises:
        ReplicadError: it cannot start; the message says why and what to do.
    """
    gc.set_threshold(GC_THRESHOLD)
    gc.freeze()  # modules live as long as we do
    with interruptible(), _postgres(settings) as (url, recover):
        try:
            trio.run(_serve_until_signal, settings, url, recover)
        except BaseExceptionGroup as group:  # a nursery wraps what its tasks raise; the operator wants the sentence
            told, rest = group.split(ReplicadError)
            if told is None or rest is not None:
                raise
            raise _first_leaf(told) from group


@contextmanager
def _postgres(settings: ServerSettings) -> Iterator[tuple[str, Recover | None]]:
    """The database's URL, and how to start it again if it dies, where it is our own."""
    if settings.database.database is not None:
        yield settings.database.database, None
        return
    log.info("postgres_starting", folder=str(settings.database.data_folder))
    server = EmbeddedPostgres(settings.database.data_folder).__enter__()

    async def recover() -> None:
        await trio.to_thread.run_sync(server.ensure_running)

    try:
        yield server.url, recover
    finally:
        with uninterruptible():
            server.__exit__()


async def _serve_until_signal(settings: ServerSettings, url: str, recover: Recover | None) -> None:
    stop = trio.Event()
    async with trio.open_nursery() as nursery:
        await nursery.start(stop_on_signal, stop.set)
        async with open_daemon(settings, url, recover):
            await stop.wait()
        nursery.cancel_scope.cancel()
    log.info("stopped")


@dataclass(frozen=True, slots=True)
class Daemon:
    """A running daemon, for whoever started it: where it listens, and its parts."""

    addresses: tuple[Address, ...]
    hub: Hub
    publisher: Publisher
    tubes: TubeService
    presence: PresenceService
    relay: Relay
    troubles: Troubles


@asynccontextmanager
async def open_daemon(settings: ServerSettings, url: str, recover: Recover | None = None) -> AsyncIterator[Daemon]:
    """Start a daemon on the database at `url`; at the end of the block it stops as SIGTERM stops it.

    `recover` is called while Postgres is away, before each new try to reach it.

    Raises:
        ReplicadError: it cannot start.
    """
    limits = settings.limits
    schema_text.load(schema_text.PACKAGE)
    budget = _plan_files(limits)
    async with (
        _open_pools(settings, url) as (db, stream_db, ack_db, catchup_db, relay_db),
        Horizon(db, own_backends=ack_db.backends) as horizon,
    ):
        listeners = await open_listeners(settings.listen)
        await _install(db, settings)
        troubles = Troubles()
        hub = Hub(budget.connections, troubles)
        book = TroubleBook(db, settings.database.stream_schema, troubles, settings.server_name)
        poller = Poller(horizon, limits, troubles, recover)
        publisher = Publisher(stream_db, catchup_db, settings, poller, troubles)
        tubes = TubeService(db, ack_db, catchup_db, settings, poller, troubles=troubles)
        presence = PresenceService(db, settings, troubles)
        relay = Relay(relay_db, settings.database.stream_schema, partial(_heard, hub, presence), troubles)
        acks = AckService(db, settings.database.stream_schema, publisher, troubles)
        requests = Requests(
            hub=hub,
            publisher=publisher,
            tubes=tubes,
            poller=poller,
            presence=presence,
            acks=acks,
            relay=relay,
            max_pending=limits.max_pending,
        )

        full = _too_many(settings, hub.limit)

        async def serve_one(stream: trio.abc.Stream, peer: str) -> None:
            session = Session(stream, peer, settings, hub)
            if not hub.admit(session):
                await _turn_away(stream, full)
                return
            try:
                await session.run(requests.conversation(session))
            finally:
                hub.leave(session, CloseReason.INTERNAL_ERROR)  # it has left by now, unless it never began

        async with trio.open_nursery() as services:
            for name, job in (
                ("poller", poller.run),
                ("relay", relay.run),
                ("acks", acks.run),
                ("troubles", book.run),
            ):
                services.start_soon(keep_running, job, "service", name, troubles)
            await services.start(keep_service, publisher.run, "publisher", troubles)
            await services.start(keep_service, tubes.run, "tubes", troubles)
            await services.start(keep_service, presence.run, "presence", troubles)
            async with trio.open_nursery() as sessions:
                entrance = Entrance(
                    serve_one,
                    sessions,
                    troubles,
                    room=hub.limit + ENTRANCE,
                    full=full,
                    refused=hub.refuse,
                    tls=settings.ssl_context(),
                )
                async with trio.open_nursery() as accepting:
                    for listener in listeners:
                        accepting.start_soon(entrance.accept_forever, listener)
                    addresses = tuple(_address(listener) for listener in listeners)
                    _tell_ready(settings, addresses, publisher, tubes)
                    with _ready_file(settings.ready_file, addresses[0]):
                        yield Daemon(addresses, hub, publisher, tubes, presence, relay, troubles)
                    accepting.cancel_scope.cancel()
                for session in list(hub):
                    session.hang_up(CloseReason.SERVER_STOPPING, "server stopping")
                sessions.cancel_scope.deadline = trio.current_time() + limits.stop_grace / 2
            services.cancel_scope.cancel()


def _plan_files(limits: Limits) -> FileBudget:
    """How many clients the limit of open files allows; it is said where that is fewer than were asked for."""
    pools = (
        limits.database_connections
        + limits.catchup_connections
        + STREAM_CONNECTIONS
        + ACK_CONNECTIONS
        + RELAY_CONNECTIONS
    )
    budget = plan_files(limits.max_connections, pools)
    if budget.connections < limits.max_connections:
        log.warning(
            "connections_limited",
            open_files=budget.limit,
            needed=budget.needed,
            max_connections=limits.max_connections,
            possible=budget.connections,
            remedy="raise the hard limit of open files (ulimit -Hn, LimitNOFILE=), or lower --max-connections",
        )
    return budget


def _tell_ready(
    settings: ServerSettings, addresses: Sequence[Address], publisher: Publisher, tubes: TubeService
) -> None:
    log.info(
        "ready",
        listen=[str(address) for address in addresses],
        database=settings.database.shown,
        streams=sorted(publisher.feeds),
        tubes=sorted(tubes.tubes),
    )


@asynccontextmanager
async def _open_pools(
    settings: ServerSettings, url: str
) -> AsyncIterator[tuple[Database, Database, Database, Database, Database]]:
    """Pools by purpose: for what is short, for the tables of streams, for acks, for relays, and for copies that last as
    long as their reader takes.
    """
    limits = settings.limits
    usual = partial(
        open_database, url, statement_timeout=limits.statement_timeout, connect_timeout=limits.connect_timeout
    )
    async with (
        usual(size=limits.database_connections, application_name="replicad") as db,
        usual(
            size=STREAM_CONNECTIONS, application_name="replicad streams", lock_timeout=STREAM_LOCK_TIMEOUT
        ) as stream_db,
        usual(size=ACK_CONNECTIONS, application_name="replicad ack", identify=True) as ack_db,
        usual(
            size=limits.catchup_connections,
            application_name="replicad catch-up",
            statement_timeout=None,  # bounded by the client's own progress (stall_timeout)
            wait_timeout=limits.wait_max,
        ) as catchup_db,
        usual(size=RELAY_CONNECTIONS, application_name="replicad relay") as relay_db,
    ):
        yield db, stream_db, ack_db, catchup_db, relay_db


def _heard(hub: Hub, presence: PresenceService, command: Command) -> None:
    """What another daemon told."""
    if isinstance(command, ClearUserSync):
        presence.clear(command, elsewhere=True)
    elif isinstance(command, RemoteServerUp | LockReleased):
        hub.relay(command, None)


async def _install(db: Database, settings: ServerSettings) -> None:
    """Install what is missing, upgrade what is older, and say so."""
    await install_all(db, stream_schema=settings.database.stream_schema, tube_schema=settings.database.tube_schema)


def _too_many(settings: ServerSettings, limit: int) -> bytes:
    """What one connection too many is told. SERVER comes first: to a health check the daemon is alive."""
    text = f"too_many_connections: this server takes {limit} connections; try again later"
    return "".join(f"{command.render()}\n" for command in (Server(settings.server_name), Error(text))).encode()


async def _turn_away(stream: trio.abc.Stream, full: bytes) -> None:
    """Tell one connection too many, best effort."""
    with trio.move_on_after(1):
        with suppress(trio.BrokenResourceError):
            await stream.send_all(full)
    await trio.aclose_forcefully(stream)


def _address(listener: trio.SocketListener) -> Address:
    host, port, *_ = listener.socket.getsockname()
    return Address(host, port)


@contextmanager
def _ready_file(path: Path | None, address: Address) -> Iterator[None]:
    """Tell whoever waits for it where clients may connect."""
    if path is None:
        yield
        return
    try:
        partial = path.with_name(path.name + ".new")
        partial.write_text(f"{address}\n")
        partial.rename(path)
    except OSError as error:
        raise EnvironmentRefused(f"--ready-file {path} cannot be written: {error.strerror}") from error
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def _first_leaf(group: BaseExceptionGroup[ReplicadError]) -> ReplicadError:
    """Any one of the exceptions in a group; which of several does not matter."""
    error = group.exceptions[0]
    return _first_leaf(error) if isinstance(error, BaseExceptionGroup) else error
