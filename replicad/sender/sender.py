"""The sender: runs the store, the connection to the daemon and the engine; starts again if a connection is lost.

A session lasts as long as its connection to Postgres. The next session begins with the state in the store, with an
empty memory. If several senders run, each serves a part of the destinations (`ownership`).
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import lru_cache

import structlog
import trio

from replicad.errors import (
    DatabaseUnavailable,
    FederationError,
    NotAuthorised,
    ReplicadError,
    SchemaTooNew,
    StreamError,
    StreamRefused,
    StreamRestarted,
    TokenAhead,
    TokenExpired,
    UsageError,
    WrongServer,
)
from replicad.groups import leaves
from replicad.postgres import schema as schemas
from replicad.postgres.bridge import Database, open_database
from replicad.retry import Backoff
from replicad.sender.engine import Engine, EngineStatistics, SqlLatest
from replicad.sender.intake import EARLIEST, NOW, IntakeStatistics, OpenUpstream, SenderIntake, Upstream
from replicad.sender.routing import FixedRouter, FunctionRouter, Router, SqlRouter, check_query, load_function
from replicad.sender.settings import Routing, SenderSettings
from replicad.sender.store import Recorded, Restart, SenderStore, open_store
from replicad.sender.transport import HttpTransport, open_transport


def weight(sender: str, destination: str) -> bytes:
    """The weight of a sender for a destination; the same in every process and version."""
    digest = hashlib.blake2b(digest_size=8, key=hashlib.blake2b(sender.encode(), digest_size=16).digest())
    digest.update(destination.encode())
    return digest.digest()


def owner(senders: Sequence[str], destination: str) -> str:
    """The sender of `senders` (at least one) that serves the destination. Their order does not matter."""
    return max(senders, key=lambda sender: (weight(sender, destination), sender))


def ownership(me: str, senders: Sequence[str]) -> Callable[[str], bool]:
    """A function that returns whether `me` serves a destination.

    By highest random weight: one sender more moves only the share of that sender.
    """
    if len(senders) == 1:
        return lambda _destination: True
    return lambda destination: owner(senders, destination) == me


CONNECTIONS = 6  # one holds the name and writes; the others read for destinations in catch-up
NAMES_CACHED = 100_000  # destinations whose owner is remembered; hashing costs some microseconds
FIRST_ANSWER = 5.0  # seconds in which a session waits for the daemon before it delivers the stored items
START_GRACE = 15.0  # seconds in which a stream may be refused to a sender that starts: one just reset is, for a moment
REFUSED = 15.0  # seconds, at most, before a stream that the daemon refuses is asked for again
STABLE = 60.0  # seconds after which a session counts as a success and the next pause is a short one
Objection = Callable[[str], str | None]  # why nothing is sent to a destination of that name, or None
_FATAL = (UsageError, NotAuthorised, WrongServer, SchemaTooNew, StreamError, FederationError)

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class SenderStatistics:
    """A moment of a sender; fields are None if it has no session."""

    engine: EngineStatistics | None
    intake: IntakeStatistics | None


class Sender:
    """A sender on the database at `url`, its tables in `schema`. `run` once.

    `moves`: streams that continue at another place than they were recorded up to: a token, NOW or EARLIEST. Facts after
    that place are delivered, even if they were delivered before.
    """

    def __init__(
        self,
        settings: SenderSettings,
        *,
        url: str,
        schema: str,
        open_upstream: OpenUpstream,
        moves: Mapping[str, str] | None = None,
    ) -> None:
        self._settings = settings
        self._url = url
        self._schema = schema
        self._open_upstream = open_upstream
        self._moves = dict(moves or {})
        self._mine = lru_cache(NAMES_CACHED)(ownership(settings.sender_name, settings.senders))
        self._engine: Engine | None = None
        self._intake: SenderIntake | None = None
        self._task_status: trio.TaskStatus[None] | None = None
        self._began = 0.0
        self._enlisted = False  # Postgres was there, and let us in
        self._scope = trio.CancelScope()
        self.stopping = False
        _check_names(settings)
        unknown = self._moves.keys() - set(settings.streams)
        if unknown:
            raise UsageError(f"--from names {', '.join(sorted(unknown))}, which is none of the streams that are sent")

    def statistics(self) -> SenderStatistics:
        """Frozen copies of the counters of the present session."""
        return SenderStatistics(
            self._engine.statistics() if self._engine is not None else None,
            self._intake.statistics() if self._intake is not None else None,
        )

    def stop(self) -> None:
        """Take no more rows, let requests under way end within the grace of the settings. Then `run` returns."""
        self.stopping = True
        self._scope.cancel()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Deliver until `stop` or cancelled. `started` is called when the daemon has been reached, or when another
        sender has the name, so that this one stands by.

        Raises:
            ReplicadError: it could not start, or another try would not help.
        """
        self._task_status = task_status
        self._began = trio.current_time()
        backoff = Backoff(first=0.5, cap=30.0)
        while not self.stopping:
            began = trio.current_time()
            try:
                await self._session()
            except (ReplicadError, Restart, BaseExceptionGroup) as error:
                self._engine = self._intake = None
                causes = self._causes(error)
                if trio.current_time() - began > STABLE:
                    backoff.reset()
                pause = backoff.next_delay()
                log.warning("session_ended", error="; ".join(causes) or "reset", retry_in=round(pause, 3))
                with self._until_stop():
                    await trio.sleep(pause)

    def _causes(self, error: BaseException) -> list[str]:
        """What ended a session, as text; raises errors that must end the sender."""
        found = leaves(error)
        if not all(isinstance(leaf, ReplicadError | Restart | trio.Cancelled) for leaf in found):
            raise error
        cancelled = error.subgroup(trio.Cancelled) if isinstance(error, BaseExceptionGroup) else None
        if cancelled is not None:  # it was to end, and the connection was lost meanwhile
            raise cancelled
        causes = [leaf for leaf in found if isinstance(leaf, ReplicadError)]
        for cause in causes:
            if isinstance(cause, TokenAhead | TokenExpired):
                raise StreamRestarted(
                    f"{cause}. Start the sender once with --from to say where to go on: a token, now or earliest"
                ) from cause
            starting = self._task_status is not None
            if isinstance(cause, DatabaseUnavailable) and self._enlisted:
                continue  # another sender of the stream may have ended our session (SenderStore.fork)
            if isinstance(cause, StreamRefused) and (not starting or trio.current_time() - self._began < START_GRACE):
                continue
            if isinstance(cause, _FATAL) or starting:
                raise cause
        return [str(cause) for cause in causes]

    async def _session(self) -> None:
        settings = self._settings
        async with (
            open_database(
                self._url, size=CONNECTIONS, application_name=f"replicad sender {settings.sender_name}"
            ) as db,
            open_transport(settings.delivery) as transport,
        ):
            present = await schemas.require(db, "federation", self._schema)  # the daemon installs it
            remark = schemas.remark(present, "federation", self._schema)
            if remark is not None:
                log.warning("schema_other", part="federation", schema=self._schema, reason=remark)
            async with AsyncExitStack() as stack:
                with self._until_stop():
                    store = await stack.enter_async_context(
                        open_store(
                            db,
                            self._schema,
                            settings.sender_name,
                            settings.senders,
                            settings.streams,
                            standing_by=self._standing_by,
                        )
                    )
                if self.stopping:
                    return
                self._enlisted = True
                bounds, delivery = settings.bounds, settings.delivery
                router, latest = await _open_routing(db, settings.routing, settings.facts)
                engine = Engine(
                    store,
                    transport,
                    bounds.terms(),
                    source=settings.streams[0],
                    memory=bounds.memory,
                    workers=delivery.concurrency,
                    probers=delivery.probes,
                    latest=latest,
                    now_ms=lambda: time.time_ns() // 1_000_000,
                )
                await self._meet(store, engine)
                intake = SenderIntake(
                    store=store,
                    engine=engine,
                    router=router,
                    facts=settings.facts,
                    sender=settings.sender_name,
                    mine=self._mine,
                    objection=transport.objection,
                    skip_bad_rows=settings.routing.bad_row == "skip",
                    connected=self._connected,
                )
                self._engine, self._intake = engine, intake
                await self._work(store, engine, intake, transport.objection)

    async def _meet(self, store: SenderStore, engine: Engine) -> None:
        """Give the engine all destinations of the store.

        A pause that lies further in the future than the longest pause is stored anew: the clock of Postgres was ahead
        when it began, or nothing new came for the destination, which is not stored. If it were only shortened in
        memory, it would begin again with every start.
        """
        longest = self._settings.bounds.retry_max
        late: list[str] = []
        async for name, standing in store.standings(self._mine):
            engine.meet(name, standing)
            if standing.retry_in is not None and standing.retry_in > longest:
                late.append(name)
        if late:
            await store.shorten(late, longest)

    async def _work(self, store: SenderStore, engine: Engine, intake: SenderIntake, objection: Objection) -> None:
        delivered = trio.Event()
        pauses = Backoff(first=1.0, cap=REFUSED)

        async def deliver() -> None:
            await _deliver(engine, intake)
            delivered.set()

        async with trio.open_nursery() as services:
            services.start_soon(self._keep_house, store, engine, objection)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(deliver)
                while not self.stopping:
                    recorded = await store.recorded()
                    async with self._open_upstream(self._tokens(recorded)) as upstream:
                        with self._until_stop():
                            await self._take(intake, upstream, recorded, pauses)
                        if self.stopping:
                            engine.close()
                            intake.began.set()
                            nursery.cancel_scope.deadline = trio.current_time() + self._settings.sender_grace
                            await delivered.wait()
            services.cancel_scope.cancel()

    def _tokens(self, recorded: Mapping[str, Recorded]) -> dict[str, str]:
        """Where each stream goes on."""
        return {
            stream: self._moves.get(stream) or _token(recorded[stream], self._settings.start)
            for stream in self._settings.streams
        }

    async def _take(
        self, intake: SenderIntake, upstream: Upstream, recorded: Mapping[str, Recorded], pauses: Backoff
    ) -> None:
        """Take rows until cancelled. Returns after a pause if the daemon refuses a stream, of which something was
        recorded once: as long as it does, the stored items are delivered all the same.
        """
        try:
            await intake.run(upstream, recorded, self._moves)
        except (StreamRefused, BaseExceptionGroup) as error:
            causes = leaves(error)
            known = any(one.token is not None for one in recorded.values())
            if not known or not all(isinstance(cause, StreamRefused) for cause in causes):
                raise
            pause = pauses.next_delay()
            log.warning("stream_refused", error=str(causes[0]), retry_in=round(pause, 3), delivers="stored items")
            self._connected()
            intake.began.set()
            await trio.sleep(pause)

    async def _keep_house(self, store: SenderStore, engine: Engine, objection: Objection) -> None:
        while True:
            await self._replay(store, engine, objection)
            await trio.sleep(self._settings.bounds.sweep_interval)
            await engine.collapse()
            removed = await store.sweep(self._settings.facts)
            log.info("sender_statistics", removed_facts=removed, **asdict(engine.statistics()))

    async def _replay(self, store: SenderStore, engine: Engine, objection: Objection) -> None:
        """Deliver parked items again, as far as the operator wants it."""
        names = [name for name in await store.wanted() if self._mine(name)]
        possible = [name for name in names if objection(name) is None]
        if possible:
            await store.replay(possible)
            engine.expect_edus(possible, pdus=True)
        for name in set(names) - set(possible):
            log.warning("destination_refused", destination=name[:200], reason=objection(name))

    def _standing_by(self, reason: str) -> None:
        log.warning("standby", reason=f"{reason}; this sender waits until that sender has ended")
        self._connected()

    def _connected(self) -> None:
        if self._task_status is not None:
            self._task_status.started()
            self._task_status = None

    @contextmanager
    def _until_stop(self) -> Iterator[None]:
        with trio.CancelScope() as self._scope:
            if self.stopping:
                self._scope.cancel()
            yield


async def _deliver(engine: Engine, intake: SenderIntake) -> None:
    """Run the engine. Wait first until the daemon has accepted the tokens: recorded rows may be void by now.

    Without a daemon it runs soon all the same: recorded rows can be delivered.
    """
    with trio.move_on_after(FIRST_ANSWER):
        await intake.began.wait()
    await engine.run()


def _check_names(settings: SenderSettings) -> None:
    """Raises UsageError for a destination of --destinations to which nothing can be sent."""
    objection = HttpTransport((), settings.delivery).objection
    for name in settings.routing.destinations:
        reason = objection(name)
        if reason is not None:
            raise UsageError(
                f"--destinations: nothing can be sent to {name!r}: {reason} (--form {settings.delivery.form}, "
                f"--url {settings.delivery.url})"
            )


async def _open_routing(db: Database, routing: Routing, facts: str) -> tuple[Router, SqlLatest | None]:
    """The routers of the settings, checked. Raises UsageError."""
    latest = None
    if routing.latest_sql is not None:
        await check_query(db, "--latest-sql", routing.latest_sql, "room::text, pdu::text", "", [])
        latest = SqlLatest(db, routing.latest_sql)
    if routing.route is not None:
        return FunctionRouter(load_function(routing.route), facts), latest
    if routing.destinations:
        return FixedRouter(routing.destinations), latest
    router = SqlRouter(db, routing.route_sql, routing.update_route_sql)
    await router.check()
    return router, latest


def _token(recorded: Recorded, start: str) -> str:
    if recorded.token is not None:
        return str(recorded)
    return EARLIEST if start == "earliest" else NOW
