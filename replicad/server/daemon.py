"""The daemon put together: databases, publisher, tubes, listeners, signals, and an end within a bounded time."""

from __future__ import annotations

import gc
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import structlog
import trio

from replicad.config import Address, ServerSettings
from replicad.errors import EnvironmentRefused, ReplicadError
from replicad.postgres import schema
from replicad.postgres.bridge import Database, open_database
from replicad.postgres.embedded import EmbeddedPostgres
from replicad.postgres.horizon import Horizon
from replicad.protocol.commands import ClearUserSync, Command, Error, LockReleased, RemoteServerUp, Server
from replicad.protocol.states import CloseReason
from replicad.server.acks import AckService
from replicad.server.hub import Hub
from replicad.server.listener import accept_forever, open_listeners
from replicad.server.poller import Poller
from replicad.server.presence import PresenceService
from replicad.server.publisher import Publisher
from replicad.server.relay import Relay
from replicad.server.requests import Requests
from replicad.server.session import Session
from replicad.server.supervision import keep_running, keep_service
from replicad.server.trouble_book import TroubleBook
from replicad.server.troubles import Troubles
from replicad.server.tubes import TubeService

GC_THRESHOLD = 50_000  # new objects between two looks for cycles; at Python's 700, sending to many spent a tenth on it
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
    with _interruptible(), _postgres(settings) as (url, recover):
        try:
            trio.run(_serve_until_signal, settings, url, recover)
        except BaseExceptionGroup as group:  # a nursery wraps what its tasks raise; the operator wants the sentence
            told, rest = group.split(ReplicadError)
            if told is None or rest is not None:
                raise
            raise _first_leaf(told) from group


@contextmanager
def _interruptible() -> Iterator[None]:
    """Until trio takes the signals over, SIGTERM unwinds like Ctrl-C, so that a starting Postgres is stopped again."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _uninterruptible() -> Iterator[None]:
    """While the embedded Postgres is stopped, which is bounded: a second Ctrl-C must not leave it behind."""
    before = [signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)]
    try:
        yield
    finally:
        for number, handler in zip((signal.SIGINT, signal.SIGTERM), before, strict=True):
            signal.signal(number, handler)


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
        with _uninterruptible():
            server.__exit__()


async def _serve_until_signal(settings: ServerSettings, url: str, recover: Recover | None) -> None:
    stop = trio.Event()
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:

        async def listen() -> None:
            async for number in signals:  # also those that come while we stop already: they must not cut it short
                log.info("stopping", signal=signal.Signals(number).name)
                stop.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(listen)
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
    async with (
        _open_pools(settings, url) as (db, ack_db, catchup_db, relay_db),
        Horizon(db, own_backends=ack_db.backends) as horizon,
    ):
        listeners = await open_listeners(settings.listen)
        await _install(db, settings)
        hub = Hub(limits.max_connections)
        troubles = Troubles()
        book = TroubleBook(db, settings.database.stream_schema, troubles, settings.server_name)
        poller = Poller(horizon, limits, troubles, recover)
        publisher = Publisher(db, catchup_db, settings, poller, troubles)
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

        async def serve_one(stream: trio.abc.Stream, peer: str) -> None:
            session = Session(stream, peer, settings, hub)
            if hub.admit(session):
                await session.run(requests.conversation(session))
            else:
                await _turn_away(stream, settings)

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
                async with trio.open_nursery() as accepting:
                    for listener in listeners:
                        accepting.start_soon(accept_forever, listener, serve_one, sessions, settings.ssl_context())
                    addresses = tuple(_address(listener) for listener in listeners)
                    _tell_ready(settings, addresses, publisher, tubes)
                    with _ready_file(settings.ready_file, addresses[0]):
                        yield Daemon(addresses, hub, publisher, tubes, presence, relay, troubles)
                    accepting.cancel_scope.cancel()
                for session in list(hub):
                    session.hang_up(CloseReason.SERVER_STOPPING, "server stopping")
                sessions.cancel_scope.deadline = trio.current_time() + limits.stop_grace / 2
            services.cancel_scope.cancel()


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
) -> AsyncIterator[tuple[Database, Database, Database, Database]]:
    """Connections for everything that is short, for acks, and for copies that last as long as their reader takes."""
    limits = settings.limits
    usual = partial(
        open_database, url, statement_timeout=limits.statement_timeout, connect_timeout=limits.connect_timeout
    )
    async with (
        usual(size=limits.database_connections, application_name="replicad") as db,
        usual(size=ACK_CONNECTIONS, application_name="replicad ack", identify=True) as ack_db,
        usual(
            size=limits.catchup_connections,
            application_name="replicad catch-up",
            statement_timeout=None,  # bounded by the client's own progress (stall_timeout)
            wait_timeout=limits.wait_max,
        ) as catchup_db,
        usual(size=RELAY_CONNECTIONS, application_name="replicad relay") as relay_db,
    ):
        yield db, ack_db, catchup_db, relay_db


def _heard(hub: Hub, presence: PresenceService, command: Command) -> None:
    """What another daemon told."""
    if isinstance(command, ClearUserSync):
        presence.clear(command, elsewhere=True)
    elif isinstance(command, RemoteServerUp | LockReleased):
        hub.relay(command, None)


async def _install(db: Database, settings: ServerSettings) -> None:
    """Install what is missing, upgrade what is older, and say so."""
    parts: tuple[tuple[schema.Part, str], ...] = (
        ("stream", settings.database.stream_schema),
        ("tube", settings.database.tube_schema),
    )
    for part, name in parts:
        outcome = await schema.install(db, part, name)
        if outcome is not schema.Outcome.UNCHANGED:
            log.info(f"schema_{outcome.value}", part=part, schema=name)


async def _turn_away(stream: trio.abc.Stream, settings: ServerSettings) -> None:
    """Tell one connection too many, best effort. SERVER comes first: to a health check the daemon is alive."""
    lines = [
        Server(settings.server_name).render(),
        Error(
            f"too_many_connections: this server takes {settings.limits.max_connections} connections; try again later"
        ).render(),
    ]
    with trio.move_on_after(1):
        with suppress(trio.BrokenResourceError):
            await stream.send_all("\n".join([*lines, ""]).encode())
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
