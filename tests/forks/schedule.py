"""A schedule of faults, made from a seed: what happens to the daemons, to Postgres and to the tables, in rounds.

After each round everything is up again, the writers rest, and every client must have what the tables have. The seed
gives the order of the faults; when exactly they hit is up to the machine.
"""

from __future__ import annotations

import json
import random
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import trio

from tests import poolers
from tests.clock import step
from tests.conftest import PATIENCE, psql
from tests.full_disk import UNLIMITED, limit_files
from tests.roles import as_daemon

from .cluster import NamedPostgres
from .everyday import DDL, PARTS, ROTATIONS, SECURITY, SEQUENCES, SETTINGS, SWAP, SWAP_DONE, rotation
from .holder import Holder
from .ledger import Order
from .strangers import Stuck, lie
from .tables import ALTERED, EVERYDAY, PARTED, SWAPPED, TABLES, Table
from .world import World, blocking

DAEMONS = 2
ROUNDS = (1, 2)
STEPS = (3, 7)  # of a round
_HOPS = 0.3  # seconds between two disconnections of clients, on average
_LOCKED = 1.0  # seconds between two looks at who waits for a lock that a daemon holds
_EXCLUSIVE = ("truncate", "alter", "setval", "restore")
_END_BLOCKERS = """
    SELECT pg_terminate_backend(d.pid) FROM pg_stat_activity d
    WHERE d.application_name LIKE 'replicad%' AND d.pid IN (
        SELECT unnest(pg_blocking_pids(w.pid)) FROM pg_stat_activity w
        WHERE w.wait_event_type = 'Lock' AND clock_timestamp() - w.query_start > interval '2 s')
"""
_TRIES = 5  # of a command that needs a lock, or whose server may be away
FULL = 100_000  # bytes of a file, beyond which Postgres cannot write while its disk is full
_RECOVERED = 15.0  # seconds in which Postgres recovers when its disk has room again
_NOTED = 1.5  # seconds in which a daemon notes what it has published
VICTIMS = ("w", "replicad", "checkpointer", "walwriter")
_END_DAEMONS = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name LIKE 'replicad%'"
_HOW = {"immediate": signal.SIGQUIT, "fast": signal.SIGINT, "killed": signal.SIGKILL}


@dataclass(frozen=True)
class Step:
    """One fault, and the seconds in which the writers write after it."""

    what: str
    args: tuple[object, ...] = ()
    after: float = 0.0

    def __str__(self) -> str:
        return " ".join([self.what, *map(str, self.args), f"({self.after:.2f} s)"])

    def plain(self) -> list[object]:
        """As JSON, from which `written` makes it again."""
        return [self.what, [*self.args], round(self.after, 3)]


def written(text: str) -> list[list[Step]]:
    """Rounds as JSON: lists of steps, each a name, its arguments and its seconds. Raises ValueError."""
    try:
        rounds = [[Step(str(what), tuple(args), float(after)) for what, args, after in one] for one in json.loads(text)]
    except (TypeError, ValueError) as error:
        raise ValueError(f"these are no rounds of steps: {error}") from error
    if unknown := {one.what for steps in rounds for one in steps} - set(KINDS):
        raise ValueError(f"there is no fault {', '.join(sorted(unknown))}")
    if not playable(rounds):
        raise ValueError("a step cannot follow those before it: a promotion needs a standby, a restore a dump")
    return rounds


def make_schedule(seed: int, only: Collection[str] = ()) -> list[list[Step]]:
    """The rounds of a seed; of the kinds `only` where they are named."""
    return _Maker(random.Random(f"schedule {seed}"), frozenset(only or KINDS)).make()


def playable(rounds: Sequence[Sequence[Step]]) -> bool:
    """Whether each step can follow those before it, so that a part of a schedule may be played."""
    standby, known = "", set()
    for steps in rounds:
        down: set[object] = set()
        for one in steps:
            if one.what in ("kill", "end", "suspend", "up"):
                (down.discard if one.what == "up" else down.add)(one.args[0])
            needed = {"restore": "dump", "put_back": "copy"}.get(one.what)
            wrong = needed is not None and needed not in known
            wrong |= one.what == "setval" and one.args[2] in down
            wrong |= one.what in ("standby", "switchover") and standby != ""
            wrong |= one.what == "cut" and standby != "standby"
            wrong |= one.what == "promote" and standby == ""
            if wrong:
                return False
            known.add(one.what)
            standby = {"standby": "standby", "cut": "cut", "promote": ""}.get(one.what, standby)
    return True


@dataclass
class _Maker:
    """Knows what can happen next: no promotion without a standby, no `setval` that nobody can see."""

    rng: random.Random
    only: frozenset[str]
    daemons: list[str] = field(default_factory=lambda: ["up"] * DAEMONS)
    standby: str | None = None
    dumps: bool = False
    copies: bool = False

    def make(self) -> list[list[Step]]:
        return [self._round() for _ in range(self.rng.randint(*ROUNDS))]

    def _round(self) -> list[Step]:
        steps = [self._step() for _ in range(self.rng.randint(*STEPS))]
        self.daemons = ["up"] * DAEMONS
        return steps

    def _step(self) -> Step:
        names, weights = zip(*((name, weight) for name, weight in self._choices() if name in self.only), strict=True)
        name, args = self._make(self.rng.choices(names, weights)[0])
        return Step(name, args, self.rng.choice((0.0, 0.05, 0.3, 0.8)) * self.rng.random())

    def _choices(self) -> list[tuple[str, float]]:
        """What can happen next, and how often it should."""
        up = self.daemons.count("up")
        return [
            ("restart", 1.5),
            ("truncate", 2),
            ("alter", 1),
            ("dump", 0.3 if self.dumps else 1.5),
            ("copy", 0.2 if self.copies else 1),
            ("setval", 2 if up else 0),
            ("kill", up),
            ("end", up),
            ("suspend", 2 * up),
            ("up", 2 * (DAEMONS - up)),
            ("standby", 0 if self.standby else 2),
            ("cut", 4 if self.standby == "standby" else 0),
            ("promote", 3 if self.standby else 0),
            ("restore", 2 if self.dumps else 0),
            ("put_back", 2 if self.copies else 0),
            ("ddl", 5),
            ("rotate", 1.5),
            ("swap", 1),
            ("sequence", 1.5),
            ("security", 1),
            ("setting", 2),
            ("crash", 2),
            ("switchover", 0 if self.standby else 1),
            ("pooler", 0.3 if poolers.PROGRAM else 0),
            ("clock", 1),
            ("full", 0.4),
            ("liars", 1),
            ("stuck", 0.7),
            ("pause", 0.01),  # where nothing else may happen
        ]

    def _make(self, name: str) -> tuple[str, tuple[object, ...]]:
        rng, table = self.rng, self.rng.choice(TABLES).name
        if name == "restart":
            return name, (rng.choice([*_HOW]),)
        if name == "truncate":
            return name, (table, rng.choice((-5, 0, 5, 40)))
        if name == "alter":
            return name, (table, rng.randint(5, 60))
        if name == "setval":
            return name, (table, rng.randint(1, 40), self.daemons.index("up"))
        if name == "dump":
            self.dumps = True
            return name, (rng.choice(("plain", "custom")),)
        if name == "restore":
            return name, (rng.choice(("one_transaction", "many")),)
        if name == "copy":
            self.copies = True
            return name, (rng.choice(("immediate", "fast")),)
        if name in _EVERYDAY:
            return name, _EVERYDAY[name](rng)
        if name in ("kill", "end", "suspend", "up"):
            one = rng.choice([one for one in range(DAEMONS) if (self.daemons[one] == "up") != (name == "up")])
            self.daemons[one] = name
            return name, (one,)
        if name in ("standby", "cut", "promote"):
            self.standby = None if name == "promote" else name
            return name, (rng.choice(("primary_ends", "primary_lives_on")),) if name == "promote" else ()
        return name, ()


_EVERYDAY: dict[str, Callable[[random.Random], tuple[object, ...]]] = {
    "ddl": lambda rng: (rng.choice([*DDL]),),
    "rotate": lambda rng: (rng.choice(ROTATIONS),),
    "swap": lambda rng: (),
    "sequence": lambda rng: (rng.choice((*TABLES, *EVERYDAY)).name, rng.choice([*SEQUENCES])),
    "security": lambda rng: (rng.choice((*TABLES, *EVERYDAY)).name,),
    "setting": lambda rng: (name := rng.choice([*SETTINGS]), rng.choice(SETTINGS[name])),
    "crash": lambda rng: (rng.choice(VICTIMS),),
    "switchover": lambda rng: (rng.choice(("busy", "idle")),),
    "pooler": lambda rng: (),
    "clock": lambda rng: (rng.randrange(DAEMONS), rng.choice((-86_400, -3600, -1, 1, 3600, 86_400))),
    "full": lambda rng: (rng.choice((0.3, 1.0)),),
    "liars": lambda rng: (rng.randrange(DAEMONS), rng.randrange(1 << 16)),
    "stuck": lambda rng: (rng.randrange(DAEMONS),),
}


class Player:
    """Plays a schedule in a world with two daemons."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.played: list[str] = []
        self._began = time.monotonic()
        self._standby: NamedPostgres | None = None
        self._dumps: list[Path] = []
        self._copies: list[Path] = []
        self._tables = {table.name: table for table in world.tables}
        self._plain: list[Holder] = []
        self._exclusive = False  # a step wants locks that keep everybody out
        self._stuck = Stuck()

    async def play(self, seed: int, rounds: list[list[Step]]) -> None:
        """Play it. Raises Disagreement, or AssertionError where a step itself fails."""
        world = self.world
        rng = random.Random(f"clients {seed}")
        self._plain = [world.hold(f"plain@{place}", Order.PLAIN, place) for place in range(DAEMONS)]
        for number in range(6):
            order = (Order.NAMED, Order.LINEAR)[number % 2]
            world.hold(f"{order.value}{number}", order, rng.randrange(DAEMONS))
        for number, steps in enumerate(rounds, 1):
            world.writing.go()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._move_clients, rng)
                nursery.start_soon(self._free_locks)
                await trio.sleep(rng.random() * 0.6)
                for step in steps:
                    self._log(str(step))
                    self._exclusive = step.what in _EXCLUSIVE
                    await Player._steps[step.what](self, *step.args)
                    self._exclusive = False
                    await trio.sleep(step.after)
                nursery.cancel_scope.cancel()
            await self._stuck.close()
            await self._all_up()
            self._log("all up")
            await world.settle(f"after round {number}")
            self._log(f"agreed after round {number}")

    def _log(self, what: str) -> None:
        self.played.append(f"{time.strftime('%H:%M:%S')} {time.monotonic() - self._began:6.2f} {what}")

    async def _move_clients(self, rng: random.Random) -> None:
        """Clients with a token disconnect and resume, here or there, at once or later."""
        movable = [holder for holder in self.world.holders if holder.order is not Order.PLAIN]
        while True:
            await trio.sleep(rng.expovariate(1 / _HOPS))
            holder = rng.choice(movable)
            if not holder.away.is_set():
                if rng.random() < 0.3:  # so that some stay away over several forks
                    holder.come_back(rng.randrange(DAEMONS))
            elif rng.random() < 0.3:
                holder.leave()
            else:
                holder.hop()

    async def _free_locks(self) -> None:
        """End the sessions of daemons on which others wait: one that was suspended in a statement keeps its locks."""
        while True:
            await trio.sleep(_LOCKED)
            if self._exclusive:
                with suppress(AssertionError):  # Postgres is away
                    await blocking(self.world.sql, _END_BLOCKERS)

    async def _all_up(self) -> None:
        for server in self.world.servers:
            server.resume()
            if not server.runs:
                server.start()
        for server in self.world.servers:
            await server.wait_ready()
        for holder in self.world.holders:
            if not holder.away.is_set():
                holder.come_back()

    # --- the steps ---

    async def _kill(self, one: int) -> None:
        await self.world.servers[one].end(signal.SIGKILL)

    async def _end(self, one: int) -> None:
        await self.world.servers[one].end(signal.SIGTERM)

    async def _suspend(self, one: int) -> None:
        self.world.servers[one].suspend()

    async def _up(self, one: int) -> None:
        """Resume it, or start it without waiting."""
        server = self.world.servers[one]
        server.resume()
        if not server.runs:
            server.start()

    async def _restart(self, how: str) -> None:
        await blocking(self.world.cluster.restart, _HOW[how])

    async def _make_standby(self) -> None:
        self._standby = await blocking(self.world.cluster.make_standby)

    async def _cut(self) -> None:
        assert self._standby is not None
        await blocking(self.world.cluster.cut, self._standby)

    async def _promote(self, how: str) -> None:
        assert self._standby is not None
        standby, self._standby = self._standby, None
        lives_on = how == "primary_lives_on"
        old = await blocking(self.world.cluster.promote, standby, primary_lives_on=lives_on)
        if lives_on:
            for but_readers in (True, False, False):
                await trio.sleep(0.2)
                await blocking(self.world.cluster.move_some, old, but_readers=but_readers)
            await trio.sleep(0.2)
        await blocking(self.world.cluster.end, old)

    async def _dump(self, form: str) -> None:
        self._dumps.append(await blocking(self.world.cluster.dump, custom=form == "custom"))

    async def _restore(self, how: str) -> None:
        """Writers wait meanwhile, as they would for an operator. Daemons do not."""
        await self._quiet()
        await blocking(self.world.cluster.restore, self._dumps[-1], one_transaction=how == "one_transaction")
        self.world.writing.go()

    async def _copy(self, how: str) -> None:
        await blocking(self.world.cluster.stop, _HOW[how])
        self._copies.append(await blocking(self.world.cluster.copy))
        await blocking(self.world.cluster.start)

    async def _put_back(self) -> None:
        await blocking(self.world.cluster.stop)
        await blocking(self.world.cluster.put_back, self._copies[-1])
        await blocking(self.world.cluster.start)

    async def _truncate(self, name: str, more: int) -> None:
        """Begin a table's ids again and climb beyond where they were, or not quite, in one transaction."""
        await self._quiet()
        table = self._tables[name]
        rows = max(1, await blocking(self.world.position_of, table) + more)
        sql = f"SET application_name = 'w1'; {table.truncate()}; {table.insert(rows)}"
        await blocking(self.world.sql, sql)
        self.world.writing.go()

    async def _alter(self, name: str, back: int) -> None:
        await self._quiet()
        table = self._tables[name]
        to = max(1, await blocking(self.world.position_of, table) - back)
        sql = (
            f"SET application_name = 'w2'; {table.set_back(to)}; "
            f"ALTER SEQUENCE {table.sequence} RESTART WITH {to + 1}; {table.insert(2 * back)}"
        )
        await blocking(self.world.sql, sql)
        self.world.writing.go()

    async def _setval(self, name: str, back: int, seer: int) -> None:
        """Set a sequence back, and write on when a daemon has told it: what no poll can see is no promise.

        The daemon has told everything before, so that it is this, and no restore, by which its reader is taken back.
        """
        await self._quiet()
        table = self._tables[name]
        await self.world.servers[seer].wait_ready()
        # What a server shows before it has given out an id in this run is not published.
        await blocking(self.world.write_rows, table, 1)
        if advance := table.advance():  # else the linear order waits for writers that are idle
            await blocking(self.world.sql, advance)
        await self.world.wait_reached(table, self._plain[seer])
        to = max(1, await blocking(self.world.position_of, table) - back)
        await blocking(self.world.sql, f"BEGIN; {table.set_back(to)}; COMMIT")
        await self.world.wait_told(table, to, self._plain[seer])
        self.world.writing.go()

    async def _try(self, *commands: str, table: Table | None = None) -> None:
        """Commands of an operator, each a transaction; those that meet a lock or no server are given up in the end."""
        for command in commands:
            text = command if table is None else command.format(t=table.name, s=table.sequence)
            for _ in range(_TRIES):
                try:
                    await blocking(psql, self.world.url, "SET lock_timeout = '1s'", text)
                    break
                except AssertionError as error:
                    self._log(f"    {text[:60]}: {str(error).splitlines()[0]}")
                await trio.sleep(0.1)

    async def _ddl(self, kind: str) -> None:
        await self._try(*DDL[kind], table=ALTERED)

    async def _rotate(self, how: str) -> None:
        last = await blocking(self.world.position_of, PARTED)
        parts = (await blocking(self.world.sql, PARTS.format(t=PARTED.name))).splitlines()
        await self._try(*rotation(PARTED, last, parts, how))

    async def _swap(self) -> None:
        """The stream stops until the operator has said that the new table is the same."""
        await self._try(*SWAP, table=SWAPPED)
        await trio.sleep(0.3)
        await self._try(*SWAP_DONE, table=SWAPPED)

    async def _sequence(self, name: str, how: str) -> None:
        await self._try(SEQUENCES[how], table=self._tables[name])

    async def _security(self, name: str) -> None:
        """A policy hides all rows from daemons for a while."""
        await self._try(SECURITY["on"], table=self._tables[name])
        await trio.sleep(0.5)
        await self._try(SECURITY["off"], table=self._tables[name])

    async def _setting(self, name: str, value: str) -> None:
        """Of the database; sessions are made again with it, and once more without it."""
        for command in (f"ALTER DATABASE postgres SET {name} = '{value}'", f"ALTER DATABASE postgres RESET {name}"):
            await self._try(command, _END_DAEMONS)
            await trio.sleep(0.7)

    async def _crash(self, victim: str) -> None:
        unflushed = (
            f"SET synchronous_commit = off; SET application_name = 'w3'; {table.insert(3)}" for table in TABLES
        )
        await self._try(*unflushed)
        await blocking(self.world.cluster.crash, victim)

    async def _switchover(self, how: str) -> None:
        """To a standby and back. `idle`: nobody writes while the standby is the server."""
        cluster = self.world.cluster
        standby = await blocking(cluster.make_standby)
        if how == "idle":
            await self._quiet()
        old = await blocking(cluster.switch_over, standby)
        await blocking(cluster.follow, old)
        await trio.sleep(_NOTED)
        await blocking(cluster.switch_over, old)
        await blocking(cluster.end, standby)
        self.world.writing.go()

    async def _pooler(self) -> None:
        """A daemon refuses to start behind a pooler that shares sessions."""
        with poolers.pgbouncer(self.world.cluster.server.url, "transaction") as url:
            words = [sys.executable, "-m", "replicad", "serve", "--listen", "127.0.0.1:0", "--database", as_daemon(url)]
            with trio.fail_after(PATIENCE):
                done = await trio.run_process(words, capture_stdout=True, capture_stderr=True, check=False)
        said = done.stderr.decode() + done.stdout.decode()
        assert (done.returncode != 0, "pooler" in said) == (True, True), f"a daemon behind a pooler: {said[-1000:]}"

    async def _clock(self, one: int, seconds: int) -> None:
        """The wall clock of a daemon is set; its monotonic clock is not."""
        step(self.world.servers[one].clock, seconds)

    async def _full(self, seconds: float) -> None:
        """The disk of Postgres is full for a while: it fails, and may end. One that waits for ever in its recovery, as
        PostgreSQL 18 can, is started again by an operator.
        """
        cluster = self.world.cluster
        await blocking(limit_files, cluster.server.pid(), FULL)
        await trio.sleep(seconds)
        patient = trio.current_time() + _RECOVERED
        with trio.fail_after(2 * PATIENCE):
            while True:
                await blocking(limit_files, cluster.server.pid(), UNLIMITED)  # again: what was just started, too
                if await blocking(cluster.answers):
                    return
                if cluster.server.pid() is None:
                    await blocking(cluster.start)
                elif trio.current_time() > patient:
                    self._log("    Postgres does not recover; it is started again")
                    await blocking(cluster.restart, signal.SIGKILL)
                    patient = trio.current_time() + _RECOVERED
                await trio.sleep(0.05)

    async def _liars(self, one: int, seed: int) -> None:
        await lie(self.world.servers[one].address, [table.name for table in self.world.tables], random.Random(seed))

    async def _stuck_readers(self, one: int) -> None:
        """Until the round ends."""
        await self._stuck.join(self.world.servers[one].address, [table.name for table in self.world.tables])

    async def _pause(self) -> None:
        """Nothing happens."""

    async def _quiet(self) -> None:
        await self.world.writing.rest()
        await blocking(self.world.end_prepared)

    _steps: ClassVar[dict[str, Callable[..., Awaitable[None]]]] = {
        "kill": _kill,
        "end": _end,
        "suspend": _suspend,
        "up": _up,
        "restart": _restart,
        "standby": _make_standby,
        "cut": _cut,
        "promote": _promote,
        "dump": _dump,
        "restore": _restore,
        "copy": _copy,
        "put_back": _put_back,
        "truncate": _truncate,
        "alter": _alter,
        "setval": _setval,
        "ddl": _ddl,
        "rotate": _rotate,
        "swap": _swap,
        "sequence": _sequence,
        "security": _security,
        "setting": _setting,
        "crash": _crash,
        "switchover": _switchover,
        "pooler": _pooler,
        "clock": _clock,
        "full": _full,
        "liars": _liars,
        "stuck": _stuck_readers,
        "pause": _pause,
    }


KINDS = tuple(Player._steps)
