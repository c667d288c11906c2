"""Daemons, writers, clients and faults on one clock that jumps and one seeded scheduler: `simulate`.

What runs is the daemon's own: pools and connections, horizon, bell, poller, registry, served streams, lanes, journals,
catch-ups, acks, sessions. Postgres is the model (`postgres.py`, `statements.py`), sockets are in memory (`links.py`),
clients check (`clients.py`). Tubes are not simulated: what they promise is kept by PL/pgSQL.
"""

from __future__ import annotations

import gc
import hashlib
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import structlog
import trio
import trio.testing
from trio._core import _run

from replicad.config.settings import ServerSettings
from replicad.daemon import access, journal, poller
from replicad.daemon import hub as hubs
from replicad.daemon.access import OPEN, AccessControl
from replicad.daemon.figures import Figures
from replicad.daemon.hub import Hub
from replicad.daemon.poller import Poller
from replicad.daemon.pools import Pools
from replicad.daemon.relay import Relay
from replicad.daemon.service import Host, Inside
from replicad.daemon.session import Dispatch, Session
from replicad.daemon.troubles import Troubles, keep_running, keep_service
from replicad.positions import bell
from replicad.positions.bell import Bell
from replicad.positions.horizon import Horizon
from replicad.postgres.bridge import Fence
from replicad.protocol.commands import CORE
from replicad.streams.serving import catchups, filters
from replicad.streams.serving.intervals import StreamIntervals
from replicad.streams.serving.service import feature

from .clients import Client, Violation
from .links import End, connected
from .postgres import Cluster, Failed, Mode, Pace, State, Table, Transaction
from .statements import Entry, ModelDatabase, Registry

NEVER = float("inf")
AGREEMENT = 240.0  # seconds within which all clients have everything once all is quiet
KEPT = 200  # rows of a table that stay when compared ones are removed
LOOK = 5.0  # seconds between two looks at the registry, where nothing happens: a second in the product
# Seconds without new ids after a sequence was set back. If it came so far again before a poll has looked, only the
# audit would find the rows (docs/positions.md), and that is no part of the simulation.
SEEN_BACK = 0.2
REST = 10.0  # seconds that a wait of the bell, and a pause beside it, last where nothing happens: 0.5 and 2
POOLS = {"positions": 2, "short": 4, "streams": 4, "catchups": 2, "tubes": 1, "acks": 1, "housekeeping": 4, "own": 1}


class InOrder(dict[Any, None]):
    """A set that keeps the order of its members: the order of a set of objects depends on their addresses."""

    def add(self, member: Any) -> None:
        self[member] = None

    def discard(self, member: Any) -> None:
        self.pop(member, None)

    def remove(self, member: Any) -> None:
        del self[member]


ORDERED = (journal, hubs, access, catchups, filters)  # modules whose sets of objects are kept in order


@contextmanager
def determined(seed: int) -> Iterator[None]:
    """The order of tasks, chance and sets depend on the seed alone. The process has PYTHONHASHSEED=0."""
    scheduler = random.Random(seed)
    state = random.getstate()
    random.seed(seed)
    with _patched(scheduler):
        try:
            yield
        finally:
            random.setstate(state)


@contextmanager
def _patched(scheduler: random.Random) -> Iterator[None]:
    patches = [
        patch.object(_run, "_r", scheduler),
        patch.object(_run, "_ALLOW_DETERMINISTIC_SCHEDULING", True),
        patch.object(bell, "SECONDS", REST),
        patch.object(poller, "BELL_PAUSE", REST),
        *(patch.object(module, "set", InOrder, create=True) for module in ORDERED),
    ]
    for one in patches:
        one.start()
    try:
        yield
    finally:
        for one in reversed(patches):
            one.stop()


@dataclass(frozen=True)
class Plan:
    """What happens. `faults`: the words of those that may; `calm`: seconds between two bursts, at most."""

    seed: int = 1
    hours: float = 1.0
    faults: tuple[str, ...] = (
        *("kill", "cut", "hang", "crash", "crash", "backend", "restart", "promote", "switchover", "drop"),
        *("lag", "truncate", "setback", "rewrite", "checkpoint", "trim"),
    )
    calm: float = 900.0
    burst: float = 6.0
    streams: int = 2
    clients: int = 4


@dataclass
class Result:
    """What has happened, and the hash of everything that did."""

    seed: int
    hours: float
    hash: str
    commits: int
    lines: int
    lost: int
    faults: Counter[str] = field(default_factory=Counter)
    resets: int = 0
    voided: int = 0
    quiet: int = 0  # moments at which all clients had exactly the rows of the tables


class Daemon:
    """One daemon, without its listeners."""

    def __init__(self, world: World, number: int) -> None:
        self.world = world
        self.number = number
        self.scope = trio.CancelScope()
        self.ends: list[End] = []
        self.ready = trio.Event()
        self._nursery: trio.Nursery | None = None

    async def run(self) -> None:
        """Serve until killed."""
        world = self.world
        settings = ServerSettings(server_name=f"d{self.number}")
        limits = replace(settings.limits, journal_seconds=60.0, stall_timeout=20.0, poll_min=0.05)
        object.__setattr__(limits, "journal_bytes", 1 << 15)  # far below what a user may choose: readers fall out of it
        settings = replace(settings, limits=limits)
        with self.scope:
            fence = Fence()
            pools = {
                name: ModelDatabase(world.cluster, world.registry, f"replicad {name}", size, fence)
                for name, size in POOLS.items()
            }
            pools["relays"] = pools["own"]
            self.pools = pools
            async with Horizon(pools["positions"]) as horizon, trio.open_nursery() as nursery:
                self._nursery = nursery
                troubles = self.troubles = Troubles()
                self.hub = Hub(100, troubles, limits)
                service_of = feature(StreamIntervals(late_look=NEVER, acks=0.5, look=LOOK, changes=60.0))
                vocabulary = CORE.with_(*service_of.commands)
                positions = Poller(horizon, limits, troubles)
                relay = Relay(pools["relays"], _no_key, vocabulary, troubles)
                host = Host(
                    settings, Pools(**pools), positions, self.hub, relay, troubles, AccessControl(), Figures(), None,
                    Inside(), vocabulary, (),
                )  # fmt: skip
                service = self.service = service_of.open(host)
                nursery.start_soon(keep_running, self.hub.run, "service", "sessions", troubles)
                nursery.start_soon(keep_running, positions.run, "service", "poller", troubles)
                attend = partial(positions.attend, Bell(pools["positions"], limits.bell_interval))
                nursery.start_soon(keep_running, attend, "service", "bell", troubles)
                for job in service.jobs():
                    if job.announces:
                        await nursery.start(keep_service, job.run, job.name, troubles)
                    else:
                        nursery.start_soon(keep_running, job.run, "service", job.name, troubles)
                self.dispatch = Dispatch([service], limits.max_pending)
                self.settings, self.vocabulary = settings, vocabulary
                self.ready.set()
                await trio.sleep_forever()

    def connect(self) -> End:
        """A new client. Raises BrokenResourceError: it does not serve."""
        if not self.ready.is_set() or self.scope.cancel_called or self._nursery is None:
            raise trio.BrokenResourceError("connection refused")
        ours, theirs = connected()
        name, settings = f"client:{len(self.ends)}", self.settings
        session = Session(ours, name, settings, self.hub, self.vocabulary, access=OPEN.enter(name))
        self.hub.admit(session)
        self.ends.append(ours)
        self._nursery.start_soon(self._serve, session, ours)
        return theirs

    async def _serve(self, session: Session, end: End) -> None:
        try:
            await session.run(self.dispatch.conversation(session))
        finally:
            self.ends.remove(end)

    def kill(self) -> None:
        """End it as a signal does that nobody can catch; its clients lose what is on its way."""
        for end in self.ends:
            end.cut()
        self.scope.cancel()

    def defects(self) -> list[str]:
        """Exceptions that nobody expected."""
        return [f"{one.place}: {one.reason}" for one in self.troubles.current() if one.code == "internal"]


async def _no_key() -> None:
    return None


class World:
    """One run."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.chance = random.Random(plan.seed)
        self._hash = hashlib.sha256()
        self.lines = 0
        self.slowness = 0.2
        self.cluster = Cluster(random.Random(plan.seed + 1), self.trace, Pace())
        self.registry = Registry(self.cluster)
        self.registry.on_ack = self.on_ack
        self.committed: dict[str, set[str]] = defaultdict(set)
        self.counts: Counter[str] = Counter()
        self.causes = 0
        self.disturbed = 0  # `causes` at the last quiet moment
        self.doubtful: dict[str, int] = {}  # streams whose sequence was set back, and the generation of then
        self.writing = trio.Event()  # set while writers write
        self.numbers = 0
        self.quiet = 0
        self.clients: list[Client] = []
        self.daemons: list[Daemon] = []
        self.problem: Violation | None = None
        self.removed: dict[str, int] = {}
        self.seen_back: dict[str, float] = {}  # when each poll has seen that a sequence was set back
        self.published: dict[str, int] = {}  # the highest position that a client was sent, and that must last
        self.durable = 0.8  # so many of the commits wait for the disk

    def trace(self, *what: object) -> None:
        """Something has happened."""
        self._hash.update(f"{trio.current_time():.6f} {what}\n".encode())
        self.lines += what[0] == "line"
        if self.log is not None:
            self.log(f"{trio.current_time():.6f} {what}")

    log: Callable[[str], None] | None = None

    # --- the run ---

    async def run(self) -> Result:
        for number in range(self.plan.streams):
            table = self.cluster.create(f"s{number}")
            self.registry.add(table, by_writer=number % 2 == 1)
        began = trio.current_time()
        async with trio.open_nursery() as nursery:
            self.nursery = nursery
            nursery.start_soon(self.cluster.write_in_background)
            for number in range(2):
                self._start_daemon(number)
            for number in range(self.plan.clients):
                stream = f"s{number % self.plan.streams}"
                by_writer = self.registry.entries[stream].by_writer
                client = Client(
                    self, f"c{number}", stream, linear=number % 3 == 2, by_writer=by_writer, acks=number % 2 == 0
                )
                self.clients.append(client)
                nursery.start_soon(self._client, client)
            for entry in self.registry.entries.values():
                for number in range(3):
                    nursery.start_soon(self._writer, entry, f"w{number}")
            ends = began + self.plan.hours * 3600
            while trio.current_time() < ends:
                await self._episode()
                await trio.sleep(min(self.chance.uniform(0, self.plan.calm), max(0.0, ends - trio.current_time())))
            nursery.cancel_scope.cancel()
        return Result(
            self.plan.seed,
            (trio.current_time() - began) / 3600,
            self._hash.hexdigest(),
            self.cluster.commits,
            self.lines,
            self.cluster.lost,
            self.counts,
            sum(client.resets for client in self.clients),
            sum(client.voided for client in self.clients),
            self.quiet,
        )

    async def _client(self, client: Client) -> None:
        try:
            await client.run()
        except Violation as violation:
            raise Violation(self.report(client, str(violation))) from None

    def report(self, client: Client, what: str) -> str:
        """What a client has found, and what it was sent before."""
        entry = self.registry.entries[client.stream]
        lines = "\n".join(f"    {line[:160]}" for line in [*client.lines][-25:])
        at = f"at {trio.current_time():.3f} s; position of the sequence {entry.table.sequence.value}, generation "
        of = f"{entry.present.number} ({entry.present.reason}, {entry.present.began_at})"
        return f"seed {self.plan.seed}: {client.name} of {client.stream}: {what}\n  {at}{of}\n{lines}"

    def _start_daemon(self, number: int) -> None:
        daemon = Daemon(self, number)
        self.daemons = [one for one in self.daemons if one.number != number] + [daemon]
        self.nursery.start_soon(daemon.run)

    async def connect(self) -> End:
        """A connection to any daemon."""
        await trio.sleep(self.chance.uniform(0.0005, 0.005))
        return self.chance.choice(self.daemons).connect()

    async def _episode(self) -> None:
        """Writers and faults for a while; then all is repaired, and all clients must agree with the tables."""
        self.durable = self.chance.choice((0.9, 0.9, 0.0))
        self.cluster.pace = Pace(background=self.chance.choice((0.2, 0.2, 0.6)))
        self.writing.set()
        ends = trio.current_time() + self.chance.uniform(1, self.plan.burst)
        while trio.current_time() < ends:
            await trio.sleep(self.chance.expovariate(1 / 1.5))
            await self._fault(self.chance.choice(self.plan.faults))
        self.writing = trio.Event()
        await self._agree()
        self._remove_old()

    async def _agree(self) -> None:
        """Wait until all clients have exactly the rows of the tables."""
        cluster = self.cluster
        with trio.move_on_after(AGREEMENT):
            while cluster.transactions or not cluster.up:
                for one in [one for one in cluster.transactions if one.state is State.PREPARED]:
                    await self._finish_prepared(one)
                await trio.sleep(0.5)
            pause = 0.2
            while self._differences():
                await trio.sleep(pause)
                pause = min(2.0, pause * 1.5)
        if cluster.transactions:
            raise Violation(f"seed {self.plan.seed}: transactions do not end")
        for daemon in self.daemons:
            if daemon.ready.is_set() and (defects := daemon.defects()):
                raise Violation(f"seed {self.plan.seed}: defects of daemon {daemon.number}: {defects}")
        for client, difference in self._differences():
            raise Violation(self.report(client, difference))
        self.quiet += 1
        self.disturbed = self.causes

    def _differences(self) -> list[tuple[Client, str]]:
        found = []
        for client in self.clients:
            entry = self.registry.entries[client.stream]
            table = entry.table
            if client.epoch != entry.present.id or not self.registry.continues(entry):
                found.append((client, f"it is in generation {client.epoch}, and the present one is {entry.present.id}"))
                continue
            above = self.removed.get(client.stream, 0)
            there = table.between(above, 1 << 60)
            rows = {row.id: (row.writer if client.by_writer else "master", row.body) for row in there}
            if difference := client.differs(rows, above):
                found.append((client, difference))
        return found

    def _remove_old(self) -> None:
        """Rows that all clients have are removed now and then, so that tables stay small."""
        for name, entry in self.registry.entries.items():
            ids = [row.id for row in entry.table.between(-1, 1 << 60)]
            if len(ids) > 2 * KEPT and 0 in entry.noted:
                upto = min(ids[-KEPT], entry.noted[0].position)
                self.registry.trim(entry, upto)
                self.trace("removed", name, upto)
                self.removed[name] = max(self.removed.get(name, 0), upto)
                for client in self.clients:
                    if client.stream == name:
                        client.forget(upto)
        self.cluster.vacuum()
        for name, entry in self.registry.entries.items():
            self.committed[name] = {row.body for row in entry.table.rows}  # a promotion may undo a removal

    # --- writers ---

    async def _writer(self, entry: Entry, name: str) -> None:
        chance = self.chance
        while True:
            while not self.writing.is_set():
                await self.writing.wait()
            if not self.cluster.up:
                await trio.sleep(chance.uniform(0.1, 1.0))
                continue
            application = name if entry.by_writer and chance.random() < 0.8 else "psql"
            transaction = self.cluster.begin(application)
            run = self.cluster.run
            try:
                await self._transaction(entry, transaction, name, run)
            except Failed:
                self.cluster.abort(transaction)
            pause = chance.choice((0.001, 0.01, 0.05, 0.3, 1.0))
            await trio.sleep(chance.uniform(0, pause))

    async def _transaction(self, entry: Entry, transaction: Transaction, name: str, run: int) -> None:
        cluster, chance, table = self.cluster, self.chance, entry.table
        bodies: list[str] = []
        for _ in range(chance.choice((1, 1, 1, 2, 5, 20))):
            await cluster.locks.acquire(table.oid, transaction, Mode.ROW_EXCLUSIVE, 5.0)
            await self._go_on(transaction, run)
            await cluster.locks.acquire(table.sequence.oid, transaction, Mode.ROW_EXCLUSIVE, 5.0)
            await trio.sleep_until(max(trio.current_time(), self.seen_back.get(entry.name, 0.0)))
            id = cluster.nextval(table.sequence, transaction)
            if id <= self.published.get(entry.name, 0):
                what = f"id {id} of {entry.name} is given out, and clients have passed it"
                raise Violation(f"seed {self.plan.seed}: {what}")
            if chance.random() < 0.3:
                await self._go_on(transaction, run)
            if chance.random() < 0.05:
                continue  # a savepoint is rolled back
            self.numbers += 1
            body = f"[{self.numbers},{'9' * chance.choice((1, 1, 50, 900))}]"
            bodies.append(body)
            cluster.insert(table, transaction, id, name, body)
        if chance.random() < 0.05:
            await trio.sleep(chance.uniform(0, 5))
        await self._go_on(transaction, run)
        fate = chance.random()
        if fate < 0.12:
            cluster.abort(transaction)
            return
        self.committed[entry.name].update(bodies)
        if fate < 0.2 and self.durable:
            await cluster.prepare(transaction, f"g{self.numbers}")
            self.trace("prepared", entry.name, transaction.number)
            await trio.sleep(chance.choice((0.0, 0.05, 3.0)))
            if transaction.state is State.PREPARED:
                await self._finish_prepared(transaction)
            return
        await cluster.commit(transaction, durable=chance.random() < self.durable)
        self.trace("committed", entry.name, transaction.number)

    async def _go_on(self, transaction: Transaction, run: int) -> None:
        await self.cluster.step()
        if self.cluster.run != run or transaction.state is not State.OPEN:
            raise Failed("57P01", "terminating connection", fatal=True)

    async def _finish_prepared(self, transaction: Transaction) -> None:
        if transaction.state is not State.PREPARED:
            return
        if self.chance.random() < 0.8:
            try:
                await self.cluster.commit(transaction)
            except Failed:
                return
        else:
            self.cluster.abort(transaction)

    # --- faults ---

    async def _fault(self, word: str) -> None:
        self.counts[word] += 1
        self.trace("fault", word)
        await getattr(self, f"_{word}")()

    async def _kill(self) -> None:
        daemon = self.chance.choice(self.daemons)
        daemon.kill()
        await trio.sleep(self.chance.choice((0.0, 0.5, 5.0)))
        self._start_daemon(daemon.number)

    async def _cut(self) -> None:
        for client in self.clients:
            if self.chance.random() < 0.5:
                client.cut()

    async def _drop(self) -> None:
        """The connections of one pool of a daemon are lost."""
        daemon = self.chance.choice(self.daemons)
        if daemon.ready.is_set():
            for database in dict.fromkeys(daemon.pools.values()):
                if self.chance.random() < 0.5:
                    database._drop_idle()

    async def _hang(self) -> None:
        cluster = self.cluster
        if cluster.resumed is None:
            resumed = cluster.resumed = trio.Event()
            await trio.sleep(self.chance.choice((0.05, 1.0, 12.0)))
            cluster.resumed = None
            resumed.set()

    async def _down(self, come_back: Callable[[], None]) -> None:
        """The server is away for a while."""
        self.causes += 1
        cluster = self.cluster
        come_back()
        cluster.up = False
        await trio.sleep(self.chance.choice((0.01, 0.5, 4.0)))
        cluster.up = True

    async def _crash(self) -> None:
        await self._down(self.cluster.crash)

    async def _backend(self) -> None:
        await self._down(partial(self.cluster.crash, only_backends=True))

    async def _restart(self) -> None:
        await self._down(self.cluster.restart)

    async def _promote(self) -> None:
        self.published.clear()  # what was not replicated is lost, and its ids come again
        await self._down(partial(self.cluster.promote, planned=False))

    async def _switchover(self) -> None:
        """Sometimes there and back, and nobody writes meanwhile."""
        switch = partial(self.cluster.promote, planned=True)
        await self._down(switch)
        if self.chance.random() < 0.5:
            self.writing = trio.Event()
            await trio.sleep(self.chance.uniform(0, 10))
            await self._down(switch)
            await trio.sleep(self.chance.uniform(0, 3))
            self.writing.set()

    async def _lag(self) -> None:
        """The standby receives nothing for a while: a promotion loses all that comes meanwhile."""
        self.cluster.lags_until = trio.current_time() + self.chance.uniform(1, 10)

    async def _checkpoint(self) -> None:
        self.cluster.checkpoint()

    async def _alone(self, entry: Entry, do: Callable[[Table, Transaction], None], *, sequence: bool) -> None:
        """In a transaction that locks a table against everybody."""
        cluster, table = self.cluster, entry.table
        transaction, run = cluster.begin("ddl"), cluster.run
        try:
            await cluster.locks.acquire(table.oid, transaction, Mode.ACCESS_EXCLUSIVE, 8.0)
            if sequence:
                await cluster.locks.acquire(table.sequence.oid, transaction, Mode.ACCESS_EXCLUSIVE, 8.0)
            await self._go_on(transaction, run)
            do(table, transaction)
            await trio.sleep(self.chance.choice((0.0, 0.03, 1.0)))
            await self._go_on(transaction, run)
            await cluster.commit(transaction)
        except Failed:
            cluster.abort(transaction)

    async def _rewrite(self) -> None:
        await self._alone(self._some_entry(), self.cluster.rewrite, sequence=False)

    async def _truncate(self) -> None:
        entry = self._some_entry()
        self.causes += 1
        self.doubtful[entry.name] = entry.present.number
        self.removed.pop(entry.name, None)
        self.published.pop(entry.name, None)
        await self._alone(entry, self.cluster.truncate, sequence=True)

    async def _setback(self) -> None:
        """Somebody removes the newest rows and sets the sequence back, as before a restore by hand."""
        entry = self._some_entry()
        cluster, table = self.cluster, entry.table
        transaction, run = cluster.begin("ddl"), cluster.run
        try:
            await cluster.locks.acquire(table.oid, transaction, Mode.ACCESS_EXCLUSIVE, 8.0)
            await self._go_on(transaction, run)
            last = cluster.last_value(table.sequence) or 0
            back = max(self.removed.get(entry.name, 0), entry.trimmed_upto or 0, last - self.chance.choice((1, 10, 60)))
            if back < 1 or back >= last:
                raise Failed("00000", "nothing to set back")
            self.causes += 1
            self.doubtful[entry.name] = entry.present.number
            cluster.number(transaction)
            for row in list(table.between(back, 1 << 60)):
                row.gone = transaction
            await cluster.commit(transaction)
            cluster.setval(table.sequence, back)
            self.seen_back[entry.name] = trio.current_time() + SEEN_BACK
            self.published.pop(entry.name, None)
        except Failed:
            cluster.abort(transaction)

    async def _trim(self) -> None:
        """What all senders have acknowledged is removed."""
        entry = self._some_entry()
        upto = self.registry.acked(entry)
        if upto is None or not self.cluster.up:
            return
        self.registry.trim(entry, upto)
        self.removed[entry.name] = max(self.removed.get(entry.name, 0), upto)

    def _has(self, client: Client, entry: Entry, upto: int) -> bool:
        return all(row.id in client.rows for row in entry.table.between(self.removed.get(entry.name, 0), upto))

    def _some_entry(self) -> Entry:
        return self.chance.choice(list(self.registry.entries.values()))

    # --- what clients ask ---

    def check_all_sent(self, client: Client, writer: str, after: int, upto: int) -> None:
        """All rows of (after, upto] that are there now were sent, if the history of the client is the present one."""
        entry = self.registry.entries[client.stream]
        if client.epoch != entry.present.id or not self.registry.continues(entry):
            return
        if self.doubtful.get(entry.name) == entry.present.number:
            return
        for row in entry.table.between(after, upto):
            if (writer == "*" or not entry.by_writer or row.writer == writer) and row.id not in client.rows:
                raise Violation(f"row {row.id} of {row.writer} was not sent, and {writer} is at {upto}")

    def on_position(self, client: Client, position: int) -> None:
        """A client was sent a position: ids up to there are not given out any more, unless history is lost."""
        entry = self.registry.entries[client.stream]
        doubtful = self.doubtful.get(entry.name) == entry.present.number
        if client.epoch == entry.present.id and self.registry.continues(entry) and not doubtful:
            self.published[entry.name] = max(position, self.published.get(entry.name, 0))

    def on_ack(self, stream: str, instance: str, token: int) -> None:
        """Postgres has noted that a client has all rows up to a token."""
        entry = self.registry.entries[stream]
        client = next(one for one in self.clients if one.name == instance)
        if self.doubtful.get(stream) != entry.present.number and not self._has(client, entry, token):
            raise Violation(self.report(client, f"rows up to {token} may be removed, which it does not have"))

    def on_reset(self, client: Client) -> None:
        """A client was told to discard rows: something has happened since all was quiet."""
        if self.causes == self.disturbed:
            raise Violation("rows are void although nothing has happened")

    def on_beginning(self, client: Client, why: str) -> None:
        """A client begins anew."""
        if self.causes == self.disturbed and why == "bad_token":
            raise Violation("a token is void although nothing has happened")


def simulate(plan: Plan, log: Callable[[str], None] | None = None) -> Result:
    """Run a plan. Raises Violation."""
    world = World(plan)
    world.log = log
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    gc.freeze()
    with determined(plan.seed):
        try:
            return trio.run(world.run, clock=trio.testing.MockClock(autojump_threshold=0))
        except BaseExceptionGroup as group:
            found = _first(group)
            if isinstance(found, Violation):
                raise found from None
            raise


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        violations, _ = error.split(Violation)
        error = (violations or error).exceptions[0]
    return error
