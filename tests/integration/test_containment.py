"""Failures of every kind injected into every long-lived task in turn: bystanders go on, and each failure is counted.

A fault is put where a task leaves its own code: a statement of a book, a copy of rows, an `accept`. Ten calls in
a row raise ten kinds of error. Meanwhile rows of another stream arrive, and another tube is read and acked.
"""

from __future__ import annotations

import inspect
import itertools
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Set
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from typing import Any

import pytest
import trio
from structlog.testing import capture_logs

from replicad.config.settings import Address, ServerSettings
from replicad.daemon import poller, troubles
from replicad.daemon.admission import Acceptor, Pauses
from replicad.daemon.daemon import DaemonIntervals
from replicad.daemon.hub import Announcing, Deadlines
from replicad.daemon.outbox import Outbox, Rounds
from replicad.daemon.poller import Outages
from replicad.daemon.relay import RelayIntervals
from replicad.daemon.session import Session
from replicad.daemon.troubles import Restarts
from replicad.errors import (
    DatabaseError,
    DatabaseRefused,
    DatabaseUnavailable,
    SchemaMissing,
    SchemaTooNew,
    StandbyRefused,
)
from replicad.operations import serving
from replicad.operations.http.history import History
from replicad.operations.http.metrics import Looks
from replicad.positions.horizon import Horizon
from replicad.postgres import wal
from replicad.postgres.bridge import Database, load_sql
from replicad.postgres.connection import Connection, Notices
from replicad.presence.repository import PresenceRepository
from replicad.presence.service import PresenceIntervals
from replicad.retry import Backoff
from replicad.streams.daemons import DaemonReports
from replicad.streams.registry import RecordedChanges, Registry
from replicad.streams.rows import RowSource
from replicad.streams.serving import audit, catchups
from replicad.streams.serving.audit import Audit
from replicad.streams.serving.filters import FilterFeed
from replicad.streams.serving.intervals import StreamIntervals
from replicad.tubes.backfill import Backfiller, BackfillIntervals
from replicad.tubes.leases import LeaseBook
from replicad.tubes.pods import PodBook
from replicad.tubes.serving.known import KnownTubes
from replicad.tubes.serving.waiting import TubeIntervals
from tests.daemons import Daemon, Paces
from tests.lengths import LONG

from .conftest import Netcat, netcat_to

HANG = 60.0  # seconds after which a wait is a failure
DATABASE_ERRORS = (DatabaseError, DatabaseUnavailable, DatabaseRefused, StandbyRefused, SchemaMissing, SchemaTooNew)
ERRORS: tuple[type[Exception], ...] = (OSError, MemoryError, ValueError, AssertionError, *DATABASE_ERRORS)
LOGGED = {"unexpected_failure", "failure_contained", "trouble_began", "trouble_changed", "database_away", "relay_deaf"}
INJECTED = ERRORS if LONG else (OSError, AssertionError, DatabaseRefused)  # a kind of each sort
numbers = itertools.count(1)


def code_of(kind: type[Exception]) -> str:
    return str(getattr(kind, "code", kind.__name__))


CODES: Set[str] = frozenset(code_of(kind) for kind in INJECTED)
# The end of a session by an error of the database has a reason of its own.
DEFECTS: Set[str] = CODES - frozenset(code_of(kind) for kind in DATABASE_ERRORS)


@pytest.fixture
def paces() -> Paces:
    """Everything is looked at and tried again soon."""
    restarts = Restarts(first=0.01, longest=0.02, steady=0.2)
    retry: Any = {"retry": 0.01, "longest_retry": 0.02, "restarts": restarts}
    return Paces(
        DaemonIntervals(
            Outages(first=0.01, longest=0.02),
            RelayIntervals(patience=0.05, **retry),
            Pauses(first=0.01, longest=0.02),
            restarts,
        ),
        StreamIntervals(
            look=0.05,
            follow_retry=0.01,
            copy_retry=0.01,
            longest_copy_retry=0.02,
            acks=0.01,
            troubles=0.01,
            refresh=0.05,
            late_look=0.05,
            changes=0.05,
            keep=0.05,
            restarts=restarts,
        ),
        TubeIntervals(look=0.05, backfills=BackfillIntervals(retry=0.02, retry_max=0.02), restarts=restarts),
        PresenceIntervals(look=0.05, ips=0.01, sweep=0.05, **retry),
    )


@pytest.fixture
def settings() -> ServerSettings:
    anywhere = Address("127.0.0.1", 0)
    return ServerSettings(listen=anywhere, http=anywhere, server_name="example.com")


@pytest.fixture(autouse=True)
def other_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that no setting of a test changes."""
    monkeypatch.setattr(poller, "BELL_RETRY", 0.02)
    monkeypatch.setattr(catchups, "SWEEP", 0.02)
    monkeypatch.setattr(serving, "INTERVAL", 0.02)
    monkeypatch.setattr(wal, "RETRY", (0.02, 0.02))
    monkeypatch.setattr(audit, "IDLE_SHARE", 10.0)
    restarts = Restarts(first=0.01, longest=0.02, steady=0.2)
    run_once = troubles._run_once

    def soon(job: Any, kind: str, name: str, troubles: Any, _: Restarts) -> Awaitable[Exception | None]:
        return run_once(job, kind, name, troubles, restarts)

    monkeypatch.setattr(troubles, "_run_once", soon)
    monkeypatch.setattr(troubles, "Backoff", lambda *_, **__: Backoff(restarts.first, restarts.longest, jitter=0.0))


class World:
    """A daemon with a victim and a bystander of each kind, and what a client does with them."""

    def __init__(self, database: Database, daemon: Daemon, stack: AsyncExitStack) -> None:
        self.database = database
        self.daemon = daemon
        self.bystander: Netcat
        self.term: str
        self._stack = stack

    async def open(self) -> None:
        for name in ("victim", "bystander"):
            await self.database.execute(
                f"CREATE TABLE {name} (id bigserial PRIMARY KEY, writer text NOT NULL, body jsonb)"
            )
            await Registry(self.database).add(name, f"public.{name}", "id", row="body", instance_column="writer")
            await self.database.execute(f"SELECT tube.tube_ensure_exists('{name}', 1)")
            await self.database.execute(
                f"CREATE SCHEMA {name}_1; CREATE TABLE {name}_1.t (id bigint PRIMARY KEY);"
                f"SELECT tube.tube_table_ensure_attached('{name}', '{name}_1.t')"
            )
        await PresenceRepository(self.database, "replicad").enable(ttl=0.3)
        self.bystander = await self.connect()
        lease = await self.ask(self.bystander, "CLAIM bystander 0/1 ttl=600", r"LEASE bystander 0/1 \d+ 600")
        self.term = lease.split()[3]
        await self.ask(self.bystander, "REPLICATE bystander", "WRITERS bystander .*")

    async def connect(self) -> Netcat:
        nc = await self._stack.enter_async_context(netcat_to(self.daemon))
        await until(nc, "SERVER .*")
        return nc

    async def ask(self, nc: Netcat, request: str, answer: str) -> str:
        """Ask until the answer comes, and return it: while the daemon has not seen a new tube, say, it may refuse."""
        with trio.fail_after(HANG):
            while True:
                await nc.send(request)
                line = await until(nc, f"{answer}|ERROR .*")
                if not line.startswith("ERROR"):
                    return line
                await trio.sleep(0.02)

    async def insert(self, name: str) -> str:
        return str(
            await self.database.fetch_value(
                f"INSERT INTO {name} (writer, body) VALUES ($1, '1') RETURNING id", f"w{next(numbers) % 50}"
            )
        )

    async def see_bystanders_go_on(self) -> None:
        nc = self.bystander
        token = await self.insert("bystander")
        await until(nc, rf"RDATA bystander \S+ {token} 1")
        await self.database.execute(f"INSERT INTO bystander_1.t VALUES ({next(numbers)})")
        await nc.send(f"PODS bystander 0/1 {self.term} wait=60")
        pod = await until(nc, "RDATA tube:bystander .*")
        await until(nc, "CURSOR bystander 0/1 .*")
        await self.ask(nc, f"ACK bystander 0/1 {self.term} {pod.split()[3]}", "ACKED bystander 0/1 1")


async def until(nc: Netcat, pattern: str) -> str:
    with trio.fail_after(HANG):
        while True:
            with suppress(trio.TooSlowError):
                return (await nc.until(pattern))[-1]


@pytest.fixture
async def world(database: Database, daemon: Daemon) -> AsyncIterator[World]:
    async with AsyncExitStack() as stack:
        made = World(database, daemon, stack)
        await made.open()
        yield made


# --- where faults are put, and what leads to them ---


async def nothing(world: World) -> None:
    """The task comes by without our doing."""


async def write_to_victim(world: World) -> None:
    await world.insert("victim")


async def touch_victim(world: World) -> None:
    await world.database.execute(f"INSERT INTO victim_1.t VALUES ({next(numbers)})")


async def wait_for_pods_of_victim(world: World) -> None:
    nc = await world.connect()
    term = await world.database.fetch_value("SELECT max(term) FROM tube.tube_lease WHERE tube = 'victim'")
    if term is None:
        await world.ask(nc, "CLAIM victim 0/1 ttl=600 holder=h", "LEASE victim .*")
        term = await world.database.fetch_value("SELECT max(term) FROM tube.tube_lease WHERE tube = 'victim'")
    await nc.send(f"PODS victim 0/1 {term} after=0.0 limit=0 wait=1")
    await touch_victim(world)


async def claim_and_leave(world: World) -> None:
    with suppress(OSError, EOFError, trio.BrokenResourceError):
        async with netcat_to(world.daemon) as nc:
            await nc.send("CLAIM victim 0/1 ttl=0.5")
            await nc.until("LEASE .*|ERROR .*")


async def backfill_victim(world: World) -> None:
    await world.database.execute("SELECT tube.tube_backfill_schedule('victim', 'id', 1, 1)")


def say(*lines: str) -> Callable[[World], Awaitable[None]]:
    async def provoke(world: World) -> None:
        nc = await world.connect()
        number = next(numbers)
        await nc.send(*(line.replace("{n}", str(number)) for line in lines))
        await nc.send("STREAMS")
        await until(nc, "STREAMS.*|ERROR .*")

    return provoke


async def notify(world: World) -> None:
    await world.database.execute(
        "SELECT pg_notify(replicad.stream_relay_channel(), $1)", f"somebody {next(numbers)}\nREMOTE_SERVER_UP x"
    )


async def cause_trouble(world: World) -> None:
    world.daemon.troubles.begin("service", f"test {next(numbers)}", "test", "for the book", code="test")


async def knock(world: World) -> None:
    with suppress(OSError):
        await (await trio.open_tcp_stream(world.daemon.addresses[0].host, world.daemon.addresses[0].port)).aclose()


async def want_to_send_much(world: World) -> None:
    rounds = world.daemon.hub.rounds
    async with trio.open_nursery() as nursery:
        for one in (rounds.old, rounds.new):
            for _ in range(3 * one.sends):
                nursery.start_soon(one.next)


async def want_to_end_much(world: World) -> None:
    ends = world.daemon.hub.ends
    async with trio.open_nursery() as nursery:
        for _ in range(3 * ends.sends):
            nursery.start_soon(ends.next)


async def find_fork_of_tubes(world: World) -> None:
    world.daemon.tubes._known._fork_found.set()


async def read_old_rows(world: World) -> None:
    """A client that catches up; a failure ends its connection."""
    await world.insert("victim")
    with suppress(OSError, EOFError, trio.BrokenResourceError):
        async with netcat_to(world.daemon) as nc:
            await nc.send("REPLICATE victim EARLIEST")
            await nc.until("RDATA victim .*|ERROR .*")


async def record_victim(world: World) -> None:
    """Let the changes of a table of the victim be a stream too; repeated, it changes nothing."""
    await Registry(world.database).add_changes("changes", "victim_1.t", RecordedChanges(filters=("id",)))


async def read_changes_of_victim(world: World) -> None:
    """A client that reads a part of the changes; a failure ends its connection."""
    await record_victim(world)
    number = next(numbers)
    with suppress(OSError, EOFError, trio.BrokenResourceError):
        async with netcat_to(world.daemon) as nc:
            await nc.send(f"REPLICATE changes NOW where=id={number}")
            if (await nc.until("POSITION changes .*|ERROR .*"))[-1].startswith("POSITION"):
                await world.database.execute(f"INSERT INTO victim_1.t VALUES ({number})")
                await nc.until("RDATA changes .*|ERROR .*")


async def keep_rows_of_victim(world: World) -> None:
    """By a rule that lets no row go."""
    await Registry(world.database).set_keep("victim", keep_for=None, keep_rows=1_000_000)


async def scrape(world: World) -> None:
    assert world.daemon.http is not None
    async with await trio.open_tcp_stream(world.daemon.http.host, world.daemon.http.port) as stream:
        await stream.send_all(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")


async def talk(world: World) -> None:
    """A session whose fault ends it: the next one is another."""
    with suppress(OSError, EOFError, trio.BrokenResourceError):
        async with netcat_to(world.daemon) as nc:
            await nc.send("NAME victim", "STREAMS")
            await nc.until("ERROR .*|STREAMS.*")


def of_victim(self: object, *args: object, **named: object) -> bool:
    return "victim" in f"{self!r} {args!r} {named!r}"


def is_victim(self: Session, *_: object) -> bool:
    return self.name == "victim"


def rings(self: Connection, sql: str, *_: object) -> bool:
    return sql == load_sql("bell")


def asks_for_wal(self: Database, sql: str, *_: object) -> bool:
    """Again and again, as this role may not hear of WAL. Errors of the database are no failures of the listener."""
    return sql == wal._MAY_LISTEN


def trims_by_rules(_: Database, sql: str, *args: object) -> bool:
    return "stream_trim_kept" in sql


def by_its_own_task(*_: object) -> bool:
    """Not in a request of a client, which does the same where it is due."""
    return "keep_running" in trio.lowlevel.current_task().name


def always(*args: object, **named: object) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Fault:
    """`provoke` is done again and again until all errors were raised by `owner.attribute`, where `when` holds."""

    task: str
    services: str  # the supervised tasks that it concerns, with commas
    owner: object
    attribute: str
    provoke: Callable[[World], Awaitable[None]] = nothing
    when: Callable[..., bool] = always
    codes: Set[str] = CODES  # under which the errors are counted


FAULTS = (
    Fault("poller", "poller", Horizon, "poll"),
    Fault("bell", "bell", Connection, "fetch_value", nothing, rings),
    Fault("WAL", "wal", Database, "fetch_value", write_to_victim, asks_for_wal, codes=DEFECTS),
    Fault("publisher's loop", "publisher", Registry, "load_streams"),
    Fault("publisher's notes", "publisher", Registry, "publish", write_to_victim),
    Fault("feed", "victim", RowSource, "last_tokens", write_to_victim, of_victim),
    Fault("lane", "victim", RowSource, "copy_vector", write_to_victim, of_victim),
    Fault("late rows", "late_rows", Audit, "_forget"),
    Fault("late rows of a stream", "late_rows", Audit, "look", nothing, of_victim),
    Fault("catch-ups", "catch-ups", catchups.Catchups, "_sweep", read_old_rows),
    Fault("catch-up", "catch-ups", RowSource, "copy_range", read_old_rows, of_victim, codes=DEFECTS),
    Fault("changes", "changes", Registry, "look_after_changes", record_victim),
    Fault("snapshots", "snapshots", Registry, "snapshots", record_victim),
    Fault("parts of streams", "filters", FilterFeed, "_pass_on", read_changes_of_victim, codes=DEFECTS),
    Fault("retention", "retention", Database, "fetch", keep_rows_of_victim, trims_by_rules),
    Fault("tubes' loop", "tubes", PodBook, "tubes"),
    Fault("history of tubes", "tube history", KnownTubes, "look", find_fork_of_tubes, by_its_own_task),
    Fault("triggers", "tubes", Database, "fetch", nothing, lambda _, sql, *args: "untouched AS" in sql),
    Fault("leases", "tubes", LeaseBook, "look"),
    Fault("letting go of leases", "leases", LeaseBook, "let_go", claim_and_leave, by_its_own_task),
    Fault("waker of tubes", "tube waiters", PodBook, "shards_between", wait_for_pods_of_victim, of_victim),
    Fault("backfill", "tubes", Backfiller, "_next_piece", backfill_victim, of_victim),
    Fault("presence: settings", "presence", PresenceRepository, "look"),
    Fault("presence: daemons", "presence", PresenceRepository, "beats"),
    Fault("presence: users", "presence: users", PresenceRepository, "apply", say("USER_SYNC w @u{n}:x None start 1")),
    Fault("presence: beats", "presence: beats", PresenceRepository, "beat", say("USER_SYNC w @u{n}:x None start 1")),
    Fault(
        "presence: addresses",
        "presence: addresses",
        PresenceRepository,
        "write_ips",
        say('USER_IP @u{n}:x ["t", "1.1.1.1", null, null, 1]'),
    ),
    Fault("presence: sweeps", "presence: sweeps", PresenceRepository, "sweep_ips"),
    Fault(
        "relay: send",
        "relay, relay: send",
        Database,
        "fetch",
        say("REMOTE_SERVER_UP x{n}"),
        lambda _, sql, *args: "pg_notify" in sql,
    ),
    Fault("relay: listen", "relay: listen", Notices, "next", notify),
    Fault("acks", "acks", Registry, "note_acks", say("FEDERATION_ACK w{n} 0 victim")),
    Fault("trouble book", "troubles", DaemonReports, "write_troubles", cause_trouble),
    Fault("beats", "beats", DaemonReports, "beat"),
    Fault("charts", "history", History, "note"),
    Fault("accept", "", Acceptor, "_accept_waiting", knock, codes=(CODES - {"OSError"}) | {"accept_failed"}),
    Fault("session: reader", "", Session, "_take", talk, is_victim, codes=DEFECTS),
    Fault("session: writer", "", Outbox, "_take_posted", talk, lambda outbox: is_victim(outbox._owner), codes=DEFECTS),
    Fault("deadlines", "sessions, sessions: deadlines", Deadlines, "_call_due", knock),
    Fault("announcing", "sessions: announcing", Announcing, "_take", say("REMOTE_SERVER_UP x{n}")),
    Fault(
        "places to send",
        "sessions: sends of old rows, sessions: sends of new rows",
        Rounds,
        "_give",
        want_to_send_much,
        by_its_own_task,
    ),
    Fault("places to end", "sessions: ends", Rounds, "_give", want_to_end_much, by_its_own_task),
    Fault("figures", "figures", Looks, "_due", scrape, by_its_own_task),
    Fault("pages", "http", Looks, "refresh", scrape),
)


def inject(fault: Fault, patch: pytest.MonkeyPatch) -> deque[Exception]:
    """Have the next calls raise; returns the errors that were not raised yet."""
    original = getattr(fault.owner, fault.attribute)
    left: deque[Exception] = deque(kind("injected") for kind in INJECTED)

    def due(args: tuple[Any, ...], named: dict[str, Any]) -> bool:
        return bool(left) and fault.when(*args, **named)

    async def wait(*args: Any, **named: Any) -> Any:
        if due(args, named):
            await trio.lowlevel.checkpoint()
            raise left.popleft()
        return await original(*args, **named)

    def call(*args: Any, **named: Any) -> Any:
        if due(args, named):
            raise left.popleft()
        return original(*args, **named)

    patch.setattr(fault.owner, fault.attribute, wait if inspect.iscoroutinefunction(original) else call)
    return left


SLOW = {"charts", "catch-up", "deadlines", "late rows of a stream"}  # those come seldom


@pytest.mark.parametrize(
    "fault",
    [pytest.param(one, id=one.task, marks=[pytest.mark.long] if one.task in SLOW else []) for one in FAULTS],
)
async def test_a_failing_task_is_reported_and_hurts_no_bystander(world: World, fault: Fault) -> None:
    counts = world.daemon.troubles.counts
    with pytest.MonkeyPatch.context() as patch, capture_logs() as logs:
        left = inject(fault, patch)
        with trio.fail_after(HANG):
            while left:
                await fault.provoke(world)
                await trio.sleep(0.02)
                if len(left) == len(INJECTED) // 2:
                    await world.see_bystanders_go_on()
        await world.see_bystanders_go_on()
        with trio.fail_after(HANG):
            while missing := fault.codes - {code for _, _, code in counts}:
                assert missing  # a failure is counted a moment after it was raised
                await trio.sleep(0.02)
    assert LOGGED & {entry["event"] for entry in logs}
    with trio.fail_after(HANG):
        while [one for one in world.daemon.troubles.current() if not one.place.name.startswith("test ")]:
            await fault.provoke(world)
            await trio.sleep(0.05)


async def test_every_supervised_task_of_a_daemon_has_a_fault(
    database: Database, start_daemon: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task that is added without one fails here."""
    running: set[str] = set()
    run_once = troubles._run_once

    async def noted(job: Any, kind: str, name: str, *rest: Any) -> Exception | None:
        running.add(name)
        return await run_once(job, kind, name, *rest)

    monkeypatch.setattr(troubles, "_run_once", noted)
    covered = {name for fault in FAULTS for name in fault.services.split(", ") if name}
    async with AsyncExitStack() as stack:
        made = World(database, await stack.enter_async_context(start_daemon()), stack)
        await made.open()
        with trio.fail_after(HANG):
            while covered - running:
                await trio.sleep(0.02)
    assert running - covered == {"bystander"}
