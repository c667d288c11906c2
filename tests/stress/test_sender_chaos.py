"""Senders of two streams among kills, resets, changed lists, refusals and receivers that are away.

What must hold at the end, for each stream and destination: each fact that the stream has is taken once or parked once,
what is taken is in order, and what is parked can be sent again. Stored updates are taken once if the list of senders
stays, and else at least once. The model is in `Expected`; receivers check that one id is one request.

Takes REPLICAD_STRESS_SECONDS (`make stress`): a seed of five rounds for every ten seconds; in the suite there is one of
two rounds. REPLICAD_STRESS_SENDER_SEED is the first seed. A kill is a cancellation of all that a sender does, at any
moment: nothing is stored after it. Processes that are killed are in integration/test_sender_process.py.
"""

from __future__ import annotations

import json
import os
import socket
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from email.utils import formatdate
from random import Random
from typing import Any

import pytest
import trio

from replicad.postgres.bridge import Database
from replicad.sender.intake import client_upstream
from replicad.sender.sender import Sender
from replicad.sender.settings import WEBHOOK, Delivery, SenderBounds, SenderSettings
from replicad.streams.registry import Registry
from tests.daemons import Daemon

from ..federation_receiver import Receiver, Reply, Request
from ..integration.conftest import *  # noqa: F403 - its fixtures: a daemon of the test's own

SECONDS = float(os.environ.get("REPLICAD_STRESS_SECONDS", "0"))
SEEDS = max(1, int(SECONDS // 10))
FIRST_SEED = int(os.environ.get("REPLICAD_STRESS_SENDER_SEED", "0"))
ROUNDS = 5 if SECONDS >= 10 else 2
STREAMS = ("facts", "more")
LISTS = (("s1",), ("s1", "s2"), ("s2", "s3"), ("s1", "s2", "s3"))
FINAL = ("s1", "s2")
IMPOSSIBLE = "127.0.0.1:9/r"  # without a scheme
REFUSALS = (400, 413, 414, 415, 422, 431)
PATIENCE = 60.0

pytestmark = [pytest.mark.stress, pytest.mark.timeout(300)]


@dataclass
class Expected:
    """What was written, and what is void since."""

    number: int = 0
    facts: dict[str, dict[int, Sequence[str]]] = field(default_factory=lambda: {name: {} for name in STREAMS})
    rooms: dict[int, str | None] = field(default_factory=dict)
    void: set[int] = field(default_factory=set)
    updates: dict[int, Sequence[str]] = field(default_factory=dict)
    bad: set[int] = field(default_factory=set)  # facts that every receiver refuses

    def reset(self, stream: str) -> None:
        self.void |= self.facts[stream].keys()
        self.facts[stream].clear()

    def of(self, stream: str, destination: str) -> list[int]:
        return [number for number, names in self.facts[stream].items() if destination in names]


class World:
    """Two receivers, one of which is away at times, and senders that are started and killed."""

    def __init__(self, seed: int, db: Database, daemon: Daemon, url: str) -> None:
        self.chance = Random(seed)
        self.db = db
        self.daemon = daemon
        self.url = url
        self.expected = Expected()
        self.receivers = (Receiver(self.behave), Receiver(self.behave))
        self.names: list[str] = []
        self.most_facts = 50  # more than so many are too large
        self.proxy = False  # everything is refused
        self.troubled = True
        self.latest = self.chance.random() < 0.5
        self.one_list = self.chance.random() < 0.5  # of the senders with updates: else these may come again

    # --- receivers ---

    def behave(self, request: Request) -> Reply:
        numbers = [found["n"] for found in request.facts]
        draw = self.chance.random() if self.troubled else 1.0
        if draw < 0.04:
            return Reply(reset=True)  # taken, and the answer is lost
        if draw < 0.07:
            return Reply(reset=True, accept=False)
        if draw < 0.1:
            return Reply(503)
        if draw < 0.13:
            wait = self.chance.choice(["0.05", "0.1", formatdate(usegmt=True), "soon"])
            return Reply(429, headers=(("retry-after", wait),))
        if any(request.transaction in one.taken[request.destination] for one in self.receivers):
            return Reply()  # it knows the id
        if self.expected.bad.intersection(numbers) or self.proxy:
            return Reply(self.chance.choice(REFUSALS))
        if len(numbers) > self.most_facts:
            return Reply(413)
        return Reply(delay=0.05 * self.chance.random() if draw < 0.5 else 0.0)

    def receiver(self, name: str) -> tuple[Receiver, str]:
        """The receiver of a destination, and what it calls it."""
        host, _, place = name.removeprefix("http://").partition("/")
        (found,) = [one for one in self.receivers if host.endswith(f":{one.port}")]
        return found, place

    def had(self, name: str, stream: str) -> list[int]:
        return self.updates(name) if stream == "typing" else self.taken(name, stream)

    def taken(self, name: str, stream: str) -> list[int]:
        receiver, place = self.receiver(name)
        return [found["n"] for found in receiver.facts(place) if found["of"] == stream]

    @property
    def requests(self) -> int:
        return sum(len(one.requests) for one in self.receivers)

    # --- writers ---

    async def write(self, stream: str, count: int) -> None:
        rows = []
        for _ in range(count):
            self.expected.number += 1
            number, room = self.expected.number, self.chance.choice([None, "r1", "r2"])
            names = self.chance.sample(self.names, self.chance.randrange(1, len(self.names) + 1))
            if self.chance.random() < 0.05:
                names.append(IMPOSSIBLE)
            if self.chance.random() < 0.04:
                self.expected.bad.add(number)
            self.expected.facts[stream][number] = names
            self.expected.rooms[number] = room
            rows.append({"destinations": names, "room": room, "pdu": {"n": number, "of": stream}})
        await self.insert(stream, rows)

    async def write_last(self, stream: str) -> None:
        """A fact that everybody accepts: what was refused before it is parked now."""
        self.expected.number += 1
        number = self.expected.number
        self.expected.facts[stream][number], self.expected.rooms[number] = self.names, None
        await self.insert(stream, [{"destinations": self.names, "room": None, "pdu": {"n": number, "of": stream}}])

    async def insert(self, table: str, rows: Sequence[object]) -> None:
        query = f"INSERT INTO {table} (body) SELECT r FROM unnest($1::text[]::json[]) r"
        await self.db.execute(query, [json.dumps(row) for row in rows])

    async def update(self) -> None:
        self.expected.number += 1
        names = self.chance.sample(self.names, 3)
        self.expected.updates[self.expected.number] = names
        await self.insert("typing", [{"destinations": names, "edu": {"update": self.expected.number}}])

    # --- senders ---

    @asynccontextmanager
    async def sender(self, stream: str, name: str, senders: Sequence[str]) -> AsyncIterator[trio.CancelScope]:
        """A sender that is killed at the end of the block, or before by the scope."""
        settings = SenderSettings(
            facts=stream,
            updates=("typing",) if stream == "facts" else (),
            sender_name=name,
            senders=tuple(senders),
            start="earliest",
            delivery=Delivery(form=WEBHOOK, allow_private=("127.0.0.1",), request_timeout=5, probes=8),
            bounds=SenderBounds(
                retry_first=0.02,
                retry_max=0.1,
                sweep_interval=0.2,
                catch_up_after=0.05,
                catch_up="latest" if self.latest else "every",
            ),
        )
        address = self.daemon.addresses[0]
        upstream = client_upstream(address.host, address.port, name=name)
        sender = Sender(settings, url=self.url, schema="replicad", open_upstream=upstream)
        life = trio.CancelScope()  # of the sender alone: writers go on

        async def live(*, task_status: trio.TaskStatus[None]) -> None:
            with life:
                await sender.run(task_status=task_status)

        async with trio.open_nursery() as nursery:
            await nursery.start(live)
            yield life
            life.cancel()

    async def one_round(self, port: int) -> None:
        """Changes while all are down; then senders that work and are killed, while rows come in."""
        chance = self.chance
        for stream in STREAMS:
            if chance.random() < 0.4:
                await self.db.execute(f"TRUNCATE {stream} RESTART IDENTITY")
                self.expected.reset(stream)
            if chance.random() < 0.5:
                await self.write(stream, chance.randrange(1, 40))
        self.most_facts = chance.choice([50, 50, 3])
        self.proxy = chance.random() < 0.2
        async with AsyncExitStack() as stack:
            if chance.random() < 0.5:
                await stack.enter_async_context(self.receivers[1].listening(port))
            scopes = []
            for stream in STREAMS:
                senders = FINAL if self.one_list and stream == "facts" else chance.choice(LISTS)
                for name in senders if chance.random() < 0.8 else senders[:1]:
                    scopes.append(await stack.enter_async_context(self.sender(stream, name, senders)))
            for _ in range(6):
                await self.write(chance.choice(STREAMS), chance.randrange(1, 12))
                await self.update()
                if chance.random() < 0.2:
                    chance.choice(scopes).cancel()
                if chance.random() < 0.1:
                    await self.db.execute(CUT)
                await self.some_requests(chance.randrange(12))

    async def some_requests(self, number: int) -> None:
        """Go on after so many, or when a moment has passed: all senders may be dead."""
        upto = self.requests + number
        with trio.move_on_after(0.3):
            while self.requests < upto:
                await trio.sleep(0.005)

    # --- the end ---

    async def missing(self) -> list[tuple[str, str, int]]:
        """Present facts that were neither taken nor parked, nor superseded."""
        parked = await self.parked()
        found = []
        for stream in STREAMS:
            for name in (*self.names, IMPOSSIBLE):
                had = set(parked[name, stream]) | set(self.taken(name, stream) if name != IMPOSSIBLE else ())
                latest = {self.expected.rooms[number]: number for number in sorted(had)}
                for number in self.expected.of(stream, name):
                    room = self.expected.rooms[number]
                    superseded = self.latest and room is not None and latest.get(room, 0) > number
                    if number not in had and not superseded:
                        found.append((stream, name, number))
        got = {name: {*self.updates(name), *parked[name, "typing"]} for name in self.names}
        for number, names in self.expected.updates.items():
            found += [("typing", name, number) for name in names if number not in got[name]]
        return found

    def updates(self, name: str) -> list[int]:
        receiver, place = self.receiver(name)
        return [found["update"] for found in receiver.updates(place)]

    def story(self, name: str, stream: str) -> list[object]:
        """What was sent to a destination, for a failed test: ids, facts, and what of them is void."""
        receiver, place = self.receiver(name)
        told: list[object] = []
        for request in receiver.requests:
            if request.destination == place:
                numbers = [found["n"] for found in request.facts if found["of"] == stream]
                told.append((request.transaction[:6], numbers, [n for n in numbers if n in self.expected.void]))
        return told

    async def parked(self) -> defaultdict[tuple[str, str], list[int]]:
        rows = await self.db.fetch("SELECT source, destination, body::text FROM replicad.federation_parked ORDER BY id")
        found: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
        for row in rows:
            body = json.loads(row["body"])
            stream = row["source"] if "n" in body else "typing"
            found[row["destination"], stream].append(body["n"] if "n" in body else body["update"])
        return found

    async def until_complete(self) -> None:
        found = await self.missing()
        with trio.move_on_after(PATIENCE):
            while found:
                await trio.sleep(0.25)
                found = await self.missing()
        assert not found, f"lost: {found}; {await self.state(found)}"

    async def state(self, lost: Sequence[tuple[str, str, int]]) -> list[object]:
        """What Postgres has, for a failed test: where the lost facts are, tokens, and what is outstanding."""
        found: list[object] = []
        for stream in STREAMS:
            numbers = [number for of, _, number in lost if of == stream]
            query = f"SELECT id FROM {stream} WHERE (body -> 'pdu' ->> 'n')::int = ANY ($1) ORDER BY id"
            found.append((stream, [row["id"] for row in await self.db.fetch(query, numbers)]))
        for table in ("sender", "destination", "destination_room"):
            rows = await self.db.fetch(f"SELECT t::text AS row FROM replicad.federation_{table} t LIMIT 50")
            found.append((table, [row["row"] for row in rows]))
        return found

    async def check(self) -> None:
        """Everything once, and in order."""
        parked = await self.parked()
        for name in self.names:
            for stream in STREAMS:
                taken = self.taken(name, stream)
                assert taken == sorted(taken), f"{stream} to {name}: out of order: {taken}; {self.story(name, stream)}"
                assert len(set(taken)) == len(taken), f"{stream} to {name}: twice: {taken}"
                assert not set(taken) & set(parked[name, stream]), f"{stream} to {name}: taken and parked"
                wrong = {number for number in taken if number not in self.expected.void} - {
                    *self.expected.of(stream, name)
                }
                assert not wrong, f"{stream} to {name}: facts of others"
            updates = self.updates(name)
            assert not self.one_list or len(set(updates)) == len(updates), f"updates to {name}: twice: {updates}"
            both = set(updates) & set(parked[name, "typing"])
            assert not self.one_list or not both, f"updates to {name}: taken and parked: {both}"
        for (name, stream), numbers in parked.items():
            once = len(set(numbers)) == len(numbers)
            assert once or (stream == "typing" and not self.one_list), f"{stream} to {name}: parked twice"

    async def replay_everything(self) -> None:
        """What was parked is taken, but for names to which nothing can be sent."""
        self.expected.bad.clear()
        await self.db.execute("UPDATE replicad.federation_parked SET wanted = true")

        async def left() -> list[Any]:
            query = "SELECT source, destination FROM replicad.federation_parked WHERE destination <> $1"
            return await self.db.fetch(query, IMPOSSIBLE)

        before = await self.parked()
        with trio.fail_after(PATIENCE):
            while await left():
                await trio.sleep(0.05)
            for (name, stream), numbers in before.items():
                while name != IMPOSSIBLE and not set(numbers) <= set(self.had(name, stream)):
                    await trio.sleep(0.05)
        for name in self.names:
            for stream in STREAMS:
                taken = self.taken(name, stream)
                assert len(set(taken)) == len(taken), f"{stream} to {name}: twice"


CUT = """SELECT pg_terminate_backend(pid) FROM pg_stat_activity
    WHERE datname = current_database() AND application_name LIKE 'replicad sender%'"""


@pytest.mark.parametrize("seed", range(FIRST_SEED, FIRST_SEED + SEEDS))
async def test_whatever_changes_around_senders_each_fact_is_taken_or_parked_once_and_in_order(
    seed: int, database: Database, daemon: Daemon, database_url: str
) -> None:
    for stream in (*STREAMS, "typing"):
        await database.execute(f"CREATE TABLE {stream} (id bigserial PRIMARY KEY, body json)")
        await Registry(database).add(stream, f"public.{stream}", "id", row="body")
        await daemon.publisher.find(stream)
    world = World(seed, database, daemon, database_url)
    absent = world.receivers[1]
    with socket.socket() as place:  # it keeps the port while nobody listens: another process would get it
        place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        place.bind(("127.0.0.1", 0))
        absent.port = place.getsockname()[1]
        await live_through(world)


async def live_through(world: World) -> None:
    steady, absent = world.receivers
    port = absent.port
    async with steady.listening():
        world.names = [f"http://127.0.0.1:{one.port}/{name}" for one in world.receivers for name in ("a", "b", "c")]
        for _ in range(ROUNDS):
            await world.one_round(port)
        world.troubled = world.proxy = False
        world.most_facts = 50
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(absent.listening(port))
            for stream in STREAMS:
                for name in FINAL:
                    await stack.enter_async_context(world.sender(stream, name, FINAL))
                await world.write_last(stream)
            await world.until_complete()
            await world.check()
            await world.replay_everything()
