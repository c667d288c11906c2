"""Starts and stops the daemon: databases, services, listeners, signals. Stopping takes a bounded time."""

from __future__ import annotations

import gc
import os
import shlex
import ssl
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import mkstemp

import structlog
import trio

from replicad.config.access import AccessFile, Verbs, read_access
from replicad.config.browser_tokens import BrowserKeys
from replicad.config.secrets import trust
from replicad.config.settings import Address, DatabaseSettings, ServerSettings
from replicad.daemon import cuts
from replicad.daemon.access import OPEN, AccessControl, ClientAccess, names_of, verbs_of
from replicad.daemon.admission import Acceptor, AcceptQueues, Handshakes, Pauses, files_of, listen
from replicad.daemon.fairness import YieldQueue
from replicad.daemon.figures import Figures
from replicad.daemon.hub import Hub
from replicad.daemon.own_figures import OwnFigures
from replicad.daemon.poller import Outages, Poller
from replicad.daemon.pools import EXTRA_CLIENTS, Pools, guest_files, open_pools, plan_connections
from replicad.daemon.process import (
    CycleCollector,
    Supervisor,
    allocator_of_this_process,
    give_back_forever,
    interruptible,
    stop_on_signal,
    take_supervisor,
    uninterruptible,
)
from replicad.daemon.relay import Relay, RelayIntervals, RelayKey
from replicad.daemon.service import Feature, Host, Inside, Job, Service
from replicad.daemon.session import Dispatch, Relaying, Session
from replicad.daemon.troubles import Restarts, Troubles, keep_running, keep_service
from replicad.errors import (
    DatabaseError,
    DatabaseRefused,
    DatabaseUnavailable,
    EnvironmentRefused,
    ReplicadError,
    UsageError,
)
from replicad.groups import leaves
from replicad.positions.bell import Bell
from replicad.positions.horizon import Horizon
from replicad.postgres import schema, schema_text
from replicad.postgres.bridge import Database, open_database
from replicad.postgres.embedded import DEFAULT_FOLDER, EmbeddedPostgres
from replicad.postgres.schema import Outcome, Part
from replicad.postgres.schema_text import Declaration, declarations
from replicad.postgres.statements import statement
from replicad.postgres.wal import WalListener
from replicad.protocol.command import Vocabulary
from replicad.protocol.commands import CORE, Error, Server
from replicad.protocol.connection import CloseReason
from replicad.retry import Backoff

# What a daemon does before it serves: it checks files, waits for Postgres, and installs and upgrades the SQL parts.


def refuse_unusable_files(settings: ServerSettings, verbs: Verbs) -> None:
    """Read every file that the settings name, and look whether the others can be written. It is called before Postgres
    is started or connected to, so that a wrong name is reported at once.

    Raises:
        UsageError: a file cannot be used.
        EnvironmentRefused: the ready file could not be written.
    """
    settings.ssl_context()
    if settings.access_file is not None:
        read_access(settings.access_file, verbs)
    if settings.browser_keys is not None:
        settings.browser_keys()
    if settings.redis_ca is not None:
        trust(settings.redis_ca, "--redis-ca")
    file = settings.ready_file
    if file is not None and not os.access(file.parent, os.W_OK | os.X_OK):
        why = "may not be written to" if file.parent.is_dir() else "is no folder"
        raise EnvironmentRefused(f"--ready-file {file} cannot be written: {file.parent} {why}")


# Refuses to run as a superuser of a Postgres that is not replicad's own: what the daemon may do, its bugs may do.


# A role that may become a superuser counts as one. The folder of the data is shown to superusers only.
_QUERY = """
    SELECT quote_ident(current_user) AS role, quote_ident(current_database()) AS database,
        CASE WHEN current_setting('is_superuser')::boolean THEN current_setting('data_directory') END AS folder
    WHERE EXISTS (SELECT FROM pg_roles AS r WHERE r.rolsuper AND pg_has_role(current_user, r.oid, 'MEMBER'))
"""


async def refuse_superuser(db: Database, settings: ServerSettings) -> None:
    """Check the role of the daemon, unless --allow-superuser says that it is meant.

    Raises:
        DatabaseRefused: it is a superuser, and the server is not an embedded one.
    """
    if settings.database.database is None or settings.allow_superuser:
        return
    found = await db.fetch_row(_QUERY)
    if found is None:
        return
    if found["folder"] is not None and db.target.host.startswith("/") and is_embedded(Path(found["folder"])):
        return
    raise DatabaseRefused(
        f"role {found['role']} is a superuser of Postgres at {db.target.host}, which the daemon must not be: give it a "
        f"role of its own (CREATE ROLE replicad LOGIN; GRANT CREATE ON DATABASE {found['database']} TO replicad), or "
        "say --allow-superuser."
    )


def is_embedded(data: Path) -> bool:
    """Whether the folder is the data of an EmbeddedPostgres of this machine: its files of locks are beside it."""
    return all((data.parent / name).is_file() for name in ("lock", "users"))


# Waits at the start for a Postgres that does not answer yet (`--wait-for-database`).


CONNECT = 5.0  # seconds for one try to connect
REPORT = 10.0  # seconds between two events while it waits
log = structlog.get_logger()


class Patience:
    """How long a start may still wait for Postgres: `seconds` from now on, for all of its tries together."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._began = trio.current_time()
        self._reported = self._began - REPORT
        self._pauses = Backoff(first=0.2, cap=2.0)

    async def wait_for_database(self, url: str) -> None:
        """Return when Postgres accepts a connection; without any time to wait, at once.

        Raises:
            DatabaseUnavailable: it has not answered in that time.
            DatabaseRefused: it answers and does not let us in, which waiting would not mend.
        """
        while self._seconds > 0:
            try:
                async with open_database(url, size=1, application_name="replicad", connect_timeout=CONNECT):
                    return
            except DatabaseUnavailable as error:
                await self.pause(error)

    async def pause(self, error: DatabaseUnavailable) -> None:
        """Wait a little before the next try after this error. Raises the error when no time is left."""
        now, pause = trio.current_time(), self._pauses.next_delay()
        left = self._began + self._seconds - now
        if pause > left:
            if self._seconds <= 0:
                raise error
            raise DatabaseUnavailable(f"{error} (waited {self._seconds:g} s: --wait-for-database)") from error
        if now >= self._reported + REPORT:
            self._reported = now
            log.warning("waiting_for_database", error=str(error), left_s=round(left))
        await trio.sleep(pause)


async def install_all(db: Database, settings: DatabaseSettings) -> None:
    """Install or upgrade every part as its declaration says.

    Raises:
        DatabaseError: a part that the daemon needs cannot be installed or upgraded. For another part this is logged;
            commands and clients that need it get the reason.
    """
    for part in declarations().values():
        name = _schema_of(part, settings)
        if part.install == "always":
            await _install(db, part.name, name)
            continue
        try:
            if part.install == "offered" or await schema.read_installed(db, part.name, name) is not None:
                await _install(db, part.name, name)
        except DatabaseUnavailable:
            raise
        except DatabaseError as error:
            log.warning("schema_unusable", part=part.name, schema=name, code=error.code, reason=str(error))


def _schema_of(part: Declaration, settings: DatabaseSettings) -> str:
    name: str = getattr(settings, part.schema_option.removeprefix("--").replace("-", "_"))
    return name


async def _install(db: Database, part: Part, name: str) -> None:
    outcome = await schema.install(db, part, name)
    if outcome in (Outcome.INSTALLED, Outcome.UPGRADED):
        log.info(f"schema_{outcome.value}", part=part, schema=name, version=schema.PARTS[part].version)
    elif outcome is not Outcome.UNCHANGED:
        present = await schema.read_installed(db, part, name)
        log.warning(f"schema_{outcome.value}", part=part, schema=name, reason=schema.remark(present, part, name))


Recover = Callable[[], Awaitable[None]]
SWITCH = 0.0005  # seconds
LOGGED = 50  # changes of an access file in a turn of the event loop


def serve(settings: ServerSettings, features: Sequence[Feature]) -> None:
    """Run a daemon until SIGTERM or SIGINT; returns after a clean end.

    Raises:
        ReplicadError: it cannot start; the message says why and what to do.
    """
    settings.refuse_careless()
    refuse_unusable_files(settings, verbs_of(_vocabulary(features), features))
    if settings.exposure is not None:
        log.warning("exposed", listen=settings.exposed.partition(" ")[2], without=settings.exposure)
    parent = take_supervisor()
    gc.freeze()  # modules are never garbage
    with interruptible(), _postgres(settings) as (url, recover):
        try:
            collector = CycleCollector()
            trio.run(_serve_until_signal, settings, url, features, recover, parent, instruments=[collector])
        except BaseExceptionGroup as group:  # the operator needs the message, not the nursery's group
            errors = leaves(group)
            if not all(isinstance(error, ReplicadError) for error in errors):
                raise
            raise errors[0] from group


@contextmanager
def _postgres(settings: ServerSettings) -> Iterator[tuple[str, Recover | None]]:
    """The database's URL and, for the embedded server, a function that restarts it if it has stopped."""
    if settings.database.database is not None:
        yield settings.database.database, None
        return
    log.info("postgres_starting", folder=str(settings.database.data_folder))
    server = EmbeddedPostgres(settings.database.data_folder).__enter__()
    log.info("postgres_started", psql=_psql_line(settings.database.data_folder))

    async def recover() -> None:
        await trio.to_thread.run_sync(server.ensure_running)

    try:
        yield server.url, recover
    finally:
        with uninterruptible():
            server.__exit__()


def _psql_line(folder: Path) -> str:
    """What a person types to look into the embedded Postgres."""
    named = "" if folder == DEFAULT_FOLDER else f" --data-folder {shlex.quote(str(folder.absolute()))}"
    return f"replicad psql{named}"


async def _serve_until_signal(
    settings: ServerSettings, url: str, features: Sequence[Feature], recover: Recover | None, parent: Supervisor
) -> None:
    stop = trio.Event()
    running: list[Daemon] = []

    async def reload() -> None:
        for daemon in running:
            await daemon.reload()

    async with trio.open_nursery() as nursery:
        await nursery.start(stop_on_signal, stop.set, reload if any(_reread_files(settings)) else None)
        patience = Patience(settings.wait_for_database)
        while not running and await _unless(stop, partial(patience.wait_for_database, url)):
            try:
                async with open_daemon(settings, url, features, recover) as daemon:
                    running.append(daemon)
                    gc.collect()
                    gc.freeze()  # what serves all clients is never garbage, and full looks pass all that is not frozen
                    nursery.start_soon(parent.run)
                    if allocator := allocator_of_this_process():
                        give_back = partial(give_back_forever, allocator)
                        nursery.start_soon(keep_running, give_back, "service", "free memory", daemon.troubles)
                    parent.tell("READY=1", f"STATUS=serves at {' '.join(map(str, daemon.addresses))}")
                    await stop.wait()
                    parent.tell("STOPPING=1")
            except (DatabaseUnavailable, BaseExceptionGroup) as error:
                lost = leaves(error)[0]
                if running or not all(isinstance(leaf, DatabaseUnavailable) for leaf in leaves(error)):
                    raise
                assert isinstance(lost, DatabaseUnavailable)
                await _unless(stop, partial(patience.pause, lost))  # Postgres has stopped again during the start
        nursery.cancel_scope.cancel()
    log.info("stopped")


async def _unless(stop: trio.Event, wait: Callable[[], Awaitable[None]]) -> bool:
    """Wait so. False: the daemon is to stop."""
    async with trio.open_nursery() as nursery:

        async def give_up() -> None:
            await stop.wait()
            nursery.cancel_scope.cancel()

        nursery.start_soon(give_up)
        await wait()
        nursery.cancel_scope.cancel()
    return not stop.is_set()


@dataclass(frozen=True, slots=True)
class DaemonIntervals:
    """The intervals and pauses of the daemon's own parts."""

    outages: Outages = Outages()
    relay: RelayIntervals = RelayIntervals()
    accepting: Pauses = Pauses()
    restarts: Restarts = Restarts()


@dataclass(frozen=True, slots=True)
class Daemon:
    """A running daemon: its addresses and its parts. `services` are by feature.

    `reload` reads the files of access and the TLS certificates again; False if one of them cannot be used.
    """

    addresses: tuple[Address, ...]
    hub: Hub
    relay: Relay
    troubles: Troubles
    services: Mapping[str, Service]
    access: AccessControl
    reload: Callable[[], Awaitable[bool]]


@asynccontextmanager
async def open_daemon(
    settings: ServerSettings,
    url: str,
    features: Sequence[Feature],
    recover: Recover | None = None,
    pace: DaemonIntervals = DaemonIntervals(),
) -> AsyncIterator[Daemon]:
    """Start a daemon on the database at `url`. At the end of the block it stops as on SIGTERM.

    `recover` is called before each new try while Postgres cannot be reached.

    Raises:
        ReplicadError: it cannot start.
    """
    schema_text.load(schema_text.PACKAGE)
    over_http = 0 if settings.http is None else guest_files(settings.limits) + files_of(settings.http)
    budget = plan_connections(settings.limits, files_of(settings.listen) + over_http)
    async with (
        open_pools(url, settings.limits) as pools,
        Horizon(pools.positions, own_backends=pools.acks.backends) as horizon,
        AsyncExitStack() as stack,
    ):
        queues = stack.enter_context(closing(await listen(settings.listen)))  # another try can listen again
        await refuse_superuser(pools.short, settings)
        await install_all(pools.housekeeping, settings.database)
        addresses = queues.addresses
        wal = WalListener(url, pools.own)
        host = _host(
            settings,
            pools,
            horizon,
            features,
            addresses,
            wal=wal,
            most_connections=budget.connections,
            recover=recover,
            pace=pace,
        )
        services = {feature.name: feature.open(host) for feature in features}
        everything = [Relaying(host.hub, host.relay), *services.values()]
        async with trio.open_nursery() as nursery:
            bell = Bell(pools.positions, settings.limits.bell_interval, wal)
            jobs = [
                Job("poller", host.poller.run),
                Job("bell", partial(host.poller.attend, bell)),
                Job("wal", wal.run),
                Job("sessions", host.hub.run),
                *(job for service in everything for job in service.jobs()),
            ]
            await _start(nursery, jobs, host.troubles, pace.restarts)
            dispatch = Dispatch(everything, settings.limits.max_pending)
            entrance = _Entrance(host.hub, dispatch, host.vocabulary, host.access, host.handshakes, host.inside)
            async with _serving(settings, queues, entrance, pauses=pace.accepting):
                summary = {name: value for service in everything for name, value in service.summary().items()}
                _log_ready(settings, addresses, summary)
                with _ready_file(settings.ready_file, addresses[0]):
                    reload = partial(_reload, settings, entrance)
                    yield Daemon(addresses, host.hub, host.relay, host.troubles, services, host.access, reload)
            nursery.cancel_scope.cancel()


def _host(
    settings: ServerSettings,
    pools: Pools,
    horizon: Horizon,
    features: Sequence[Feature],
    addresses: tuple[Address, ...],
    *,
    wal: WalListener,
    most_connections: int,
    recover: Recover | None,
    pace: DaemonIntervals,
) -> Host:
    """What services find in this daemon."""
    vocabulary = _vocabulary(features)
    troubles = Troubles()
    access = AccessControl(
        token=settings.token,
        file=settings.access_file,
        certified=settings.tls_client_ca is not None,
        verbs=verbs_of(vocabulary, features),
        troubles=troubles,
        browsers=settings.browser_keys,
    )
    hub = Hub(most_connections, troubles, settings.limits)
    relay = Relay(
        pools.relays, partial(_relay_key, pools, settings.database.stream_schema), vocabulary, troubles, pace.relay
    )
    poller = Poller(horizon, settings.limits, troubles, recover, pace.outages)
    tls = settings.ssl_context()
    handshakes = None if tls is None else Handshakes(tls, hub, settings.limits.tls_timeout)
    figures = Figures()
    folder = settings.database.data_folder if settings.database.database is None else None
    figures.add(OwnFigures(hub, poller, pools, troubles, settings.limits, relay, wal, folder))
    return Host(
        settings, pools, poller, hub, relay, troubles, access, figures, handshakes, Inside(), vocabulary, addresses
    )


def _vocabulary(features: Sequence[Feature]) -> Vocabulary:
    return CORE.with_(*(kind for feature in features for kind in feature.commands))


async def _relay_key(pools: Pools, schema: str) -> RelayKey | None:
    """`FindKey` of the relay."""
    row = await pools.relays.fetch_row(statement("relay_key", schema))
    return (
        None
        if row is None or row["secret"] is None
        else RelayKey(row["channel"], bytes.fromhex(row["secret"]), row["clock"])
    )


async def _start(nursery: trio.Nursery, jobs: Sequence[Job], troubles: Troubles, restarts: Restarts) -> None:
    """Start all jobs; returns when those with `announces` have started."""
    for job in jobs:
        if not job.announces:
            nursery.start_soon(keep_running, job.run, "service", job.name, troubles, restarts)
    for job in jobs:
        if job.announces:
            await nursery.start(keep_service, job.run, job.name, troubles, restarts)


@dataclass(frozen=True, slots=True)
class _Entrance:
    """What a new session needs."""

    hub: Hub
    dispatch: Dispatch
    vocabulary: Vocabulary
    access: AccessControl
    handshakes: Handshakes | None
    inside: Inside


@dataclass(frozen=True, slots=True)
class _Reread:
    """The files that were read again, and the clients that have changed."""

    tls: ssl.SSLContext | None
    access: AccessFile | None
    browsers: BrowserKeys | None
    changes: Mapping[str, str]  # of clients


async def _reload(settings: ServerSettings, entrance: _Entrance) -> bool:
    """Read the access file and the certificates again. If a file cannot be used, nothing is changed.

    A thread reads and checks them: thousands of clients take seconds, in which other clients are served.
    """
    access, handshakes = entrance.access, entrance.handshakes

    def read() -> _Reread:
        _refuse_pipes(settings)
        with _frequent_switches():
            tls, found = settings.ssl_context(), access.read_file()
            return _Reread(tls, found, access.read_browsers(), access.changes(found))

    try:
        again = await trio.to_thread.run_sync(read, abandon_on_cancel=True)
    except Exception as error:  # noqa: BLE001 - whatever it is, the daemon goes on with what it has
        access.keep(error)
        return False
    connected = {client: access.connections_of(client) for client in again.changes}
    with entrance.hub.troubles.contain_and_record("service", "access", "reload"):
        if handshakes is not None and again.tls is not None:
            handshakes.use(again.tls)
        access.replace(again.access, again.browsers)
    for number, (client, change) in enumerate(again.changes.items()):
        if number % LOGGED == 0:
            await trio.lowlevel.checkpoint()
        log.info("access_changed", client=client, change=change, connected=connected[client])
    log.info(
        "reloaded",
        clients=None if again.access is None else len(again.access.clients),
        certificates=again.tls is not None,
        browser_keys=None if again.browsers is None else len(again.browsers.keys),
    )
    return True


@contextmanager
def _frequent_switches() -> Iterator[None]:
    """For the block, in which a thread computes: the event loop waits for the interpreter for a tenth of the usual."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def _reread_files(settings: ServerSettings) -> Iterator[Path]:
    """The files that SIGHUP has read again."""
    named = settings.access_file, settings.browser_key, settings.tls_cert, settings.tls_key, settings.tls_client_ca
    return (file for file in named if file is not None)


def _refuse_pipes(settings: ServerSettings) -> None:
    """Raise UsageError for a file that is none: to read a pipe here would stop the daemon until somebody writes."""
    for file in _reread_files(settings):
        if file.exists() and not file.is_file():
            raise UsageError(f"{file} is a pipe, a folder or a device; write a file there, to be read again by SIGHUP")


@asynccontextmanager
async def _serving(
    settings: ServerSettings,
    queues: AcceptQueues,
    entrance: _Entrance,
    *,
    pauses: Pauses,
) -> AsyncIterator[None]:
    """Accept clients and serve them. At the end they are sent the reason and get half of `stop_grace` to disconnect."""
    hub = entrance.hub
    full = _too_many(settings, hub.limit)

    async def serve_one(stream: trio.abc.Stream, peer: str) -> None:
        await serve_as(stream, peer, entrance.access.enter(peer, names_of(stream)))

    async def serve_inside(stream: trio.abc.Stream, name: str, known: ClientAccess | None) -> None:
        with hub.troubles.contain_and_record("session", name, "serve"):
            await serve_as(stream, name, known or OPEN.enter(name))

    async def serve_as(stream: trio.abc.Stream, peer: str, known: ClientAccess) -> None:
        session = Session(stream, peer, settings, hub, entrance.vocabulary, access=known)
        if not hub.admit(session):
            await _refuse(stream, full)
            return
        try:
            await session.run(entrance.dispatch.conversation(session))
        finally:
            hub.leave(session, CloseReason.INTERNAL_ERROR)  # no effect unless `run` failed before its first statement

    async with trio.open_nursery() as sessions:
        entrance.inside.admit(sessions, serve_inside)
        acceptor = Acceptor(
            serve_one,
            sessions,
            hub.troubles,
            room=hub.limit + EXTRA_CLIENTS,
            full=full,
            refused=hub.refuse,
            secure=entrance.handshakes,
            give_way=YieldQueue(patience=0.001).next,
            first_line=settings.limits.first_line,
            too_long=_first_line_too_long(settings, wants_token=not entrance.access.open_to_all),
            pauses=pauses,
        )
        async with trio.open_nursery() as accepting:
            accepting.start_soon(acceptor.accept_forever, queues)
            yield
            accepting.cancel_scope.cancel()
        for session in list(hub):
            session.hang_up(CloseReason.SERVER_STOPPING, "server stopping")
        sessions.cancel_scope.deadline = trio.current_time() + settings.limits.stop_grace / 2


def _log_ready(settings: ServerSettings, addresses: Sequence[Address], summary: Mapping[str, object]) -> None:
    log.info("ready", listen=[str(a) for a in addresses], database=settings.database.shown, **summary)


def _too_many(settings: ServerSettings, limit: int) -> bytes:
    """The lines for a client above the limit. SERVER comes first, so that a health check sees a running daemon."""
    text = f"too_many_connections: this server takes {limit} connections (--max-connections); try again later"
    return "".join(f"{command.render()}\n" for command in (Server(settings.server_name), Error(text))).encode()


def _first_line_too_long(settings: ServerSettings, *, wants_token: bool) -> bytes:
    """The lines for a client whose first line is too long, as a session would send them."""
    text = f"line_too_long: a line may have at most {settings.limits.first_line} bytes"
    _, text = cuts.too_long(text, known=False, wants_token=wants_token)
    return "".join(f"{command.render()}\n" for command in (Server(settings.server_name), Error(text))).encode()


async def _refuse(stream: trio.abc.Stream, full: bytes) -> None:
    """Send `full` to a client above the limit, best effort, and close."""
    with trio.move_on_after(1):
        with suppress(trio.BrokenResourceError):
            await stream.send_all(full)
    await trio.aclose_forcefully(stream)


READY_MODE = 0o644  # the address is no secret, and programs of other accounts wait for it


@contextmanager
def _ready_file(path: Path | None, address: Address) -> Iterator[None]:
    """Write the address into the ready file while clients are accepted."""
    if path is None:
        yield
        return
    try:
        _write_anew(path, f"{address}\n")
    except OSError as error:
        raise EnvironmentRefused(f"--ready-file {path} cannot be written: {error.strerror}") from error
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def _write_anew(path: Path, text: str) -> None:
    """Write a file that others see whole or not at all. Raises OSError.

    Where other accounts may write to the folder, none of them can prepare the name that is written to first.
    """
    number, name = mkstemp(dir=path.parent, prefix=f"{path.name}.")
    partial = Path(name)
    try:
        with open(number, "w", encoding="utf-8") as file:
            file.write(text)
        partial.chmod(READY_MODE)
        partial.rename(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
