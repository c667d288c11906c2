"""Tubes against a model, over real connections to two daemons: writers, workers, zombies, repartitioning, backfills.

What must hold: nothing is lost, nothing is read or acked under a lease that another has taken over, nobody takes over a
lease whose holder spoke within its time to live, and pods come in order.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pytest
import trio
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from replicad.client.blocking_client import BlockingClient
from replicad.client.requests import Pod
from replicad.config.settings import Address, ServerSettings
from replicad.errors import CursorAhead, LeaseHeld, LeaseLost, PartitionsChanged
from replicad.postgres.bridge import Connection, Database, open_database
from replicad.protocol.tokens import START, Cursor
from replicad.tubes.commands import Part
from tests.conftest import PATIENCE
from tests.daemons import open_daemon

TTL = 0.5  # seconds; short, so that a machine of some dozen steps sees take-overs
SURE = 0.8 * TTL  # a request renews only when a fifth of the time to live has passed since the last renewal
WORKERS = 3
SHARDS = 4
EXAMPLES = int(os.environ.get("REPLICAD_MACHINE_EXAMPLES", "2"))

T = TypeVar("T")


class World:
    """Two daemons on one database, running in a thread with a trio of its own."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.addresses: list[Address] = []
        self.database: Database
        self._ready = threading.Event()
        self._thread = threading.Thread(target=trio.run, args=(self._main,), name="world")

    async def _main(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        self._stop = trio.Event()
        async with AsyncExitStack() as stack:
            for _ in range(2):
                made = ServerSettings(listen=Address("127.0.0.1", 0), server_name="example.com")
                daemon = await stack.enter_async_context(open_daemon(made, self.url))
                self.addresses.append(daemon.addresses[0])
            self.database = await stack.enter_async_context(
                open_database(self.url, size=6, application_name="application")
            )
            self._nursery = await stack.enter_async_context(trio.open_nursery())
            self._ready.set()
            await self._stop.wait()
            self._nursery.cancel_scope.cancel()

    def __enter__(self) -> World:
        self._thread.start()
        assert self._ready.wait(PATIENCE)
        return self

    def __exit__(self, *_: object) -> None:
        self._token.run_sync_soon(self._stop.set)
        self._thread.join(PATIENCE)

    def call(self, function: Callable[..., Awaitable[T]], *args: object) -> T:
        return trio.from_thread.run(function, *args, trio_token=self._token)

    def sql(self, statement: str, *args: object) -> Any:
        return self.call(self.database.fetch, statement, *args)

    def begin(self) -> Transaction:
        """A transaction that stays open until it is told how to end."""
        made = Transaction()

        async def hold() -> None:
            async with self.database.connection() as connection:
                await connection.execute("BEGIN")
                made.connection = connection
                made.begun.set()
                await made.over.wait()

        async def start() -> None:
            self._nursery.start_soon(hold)
            await made.begun.wait()

        self.call(start)
        return made

    def end(self, transaction: Transaction, how: str) -> None:
        async def finish() -> None:
            assert transaction.connection is not None
            await transaction.connection.execute(how)
            transaction.over.set()

        self.call(finish)


class Transaction:
    def __init__(self) -> None:
        self.begun = trio.Event()
        self.over = trio.Event()
        self.connection: Connection | None = None


@dataclass
class Worker:
    """A worker as the model sees it."""

    client: BlockingClient
    part: Part | None = None
    term: int = 0
    cursor: Cursor = START
    pods: list[Pod] = field(default_factory=list)
    spoke_at: float = 0.0
    replaced: bool = False  # another has taken its lease over: nothing may succeed under its term any more

    def forget(self) -> None:
        self.part, self.term, self.cursor, self.pods, self.replaced = None, 0, START, [], False


class Machine(RuleBasedStateMachine):
    world: World

    @initialize()
    def begin(self) -> None:
        self.world.sql("SELECT tube.tube_ensure_absent('items')")
        self.world.call(self.world.database.execute, "DROP TABLE IF EXISTS items")
        self.world.call(
            self.world.database.execute,
            "CREATE TABLE items (id bigint PRIMARY KEY, value int); SELECT tube.tube_ensure_exists('items', 2);"
            f"SELECT tube.tube_table_ensure_attached('items', 'items', 0, routing => '(id % {SHARDS})::integer')",
        )
        self.partitions = 2
        self.fresh_id = 100
        self.downstream: dict[int, int] = {}
        self.transactions: list[Transaction] = []
        self.workers = [Worker(self._client(n)) for n in range(WORKERS)]

    def _client(self, number: int) -> BlockingClient:
        address = self.world.addresses[number % 2]
        return BlockingClient(address.host, address.port, name=f"worker-{number}")

    # --- the application ---

    @rule(ids=st.lists(st.integers(0, 15), min_size=1, max_size=4, unique=True), value=st.integers(0, 99))
    def write(self, ids: list[int], value: int) -> None:
        self.world.sql(
            "INSERT INTO items SELECT id, $2 FROM unnest($1::bigint[]) AS id "
            "ON CONFLICT (id) DO UPDATE SET value = excluded.value",
            ids,
            value,
        )

    @rule(id=st.integers(0, 15))
    def delete(self, id: int) -> None:
        self.world.sql("DELETE FROM items WHERE id = $1", id)

    @precondition(lambda self: len(self.transactions) < 2)
    @rule()
    def write_and_stay_open(self) -> None:
        self.fresh_id += 1  # one of its own: nobody else waits for this transaction
        transaction = self.world.begin()
        self.transactions.append(transaction)
        assert transaction.connection is not None
        self.world.call(transaction.connection.execute, f"INSERT INTO items VALUES ({self.fresh_id}, 1)")

    @precondition(lambda self: self.transactions)
    @rule(how=st.sampled_from(["COMMIT", "ROLLBACK"]))
    def end_a_transaction(self, how: str) -> None:
        self.world.end(self.transactions.pop(0), how)

    @precondition(lambda self: not self.transactions)
    @rule(partitions=st.sampled_from([1, 2, 4]))
    def repartition(self, partitions: int) -> None:
        self.world.sql("SELECT tube.tube_ensure_exists('items', $1)", partitions)
        self.partitions = partitions

    @rule()
    def schedule_a_backfill(self) -> None:
        self.world.sql("SELECT tube.tube_backfill_schedule('items', 'id', 0, 0)")

    # --- workers ---

    @rule(number=st.integers(0, WORKERS - 1), partition=st.integers(0, 3), whole=st.booleans())
    def claim(self, number: int, partition: int, whole: bool) -> None:
        worker = self.workers[number]
        part = Part(0, 1) if whole else Part(partition % self.partitions, self.partitions)
        if worker.part is not None:
            return
        asked = time.monotonic()
        try:
            lease = worker.client.claim("items", part, ttl=TTL, wait=3 * TTL)
        except LeaseHeld:
            others = [w for w in self.workers if w is not worker and w.part is not None and not w.replaced]
            assert others, "a lease is held by nobody that there is"
            return
        now = time.monotonic()
        for other in self.workers:
            if other.part is not None and not other.replaced and overlap(other.part, part):
                assert now - other.spoke_at >= SURE, "taken over while its holder was alive"
                other.replaced = True
        worker.part, worker.term, worker.cursor, worker.spoke_at = part, lease.term, START, asked

    def _as(self, worker: Worker, action: Callable[[], T]) -> T | None:
        """Do something under the worker's lease; a lease that was taken over must refuse it."""
        asked = time.monotonic()
        try:
            done = action()
        except (LeaseLost, PartitionsChanged) as error:
            lost_while_alive = isinstance(error, LeaseLost) and not worker.replaced and asked - worker.spoke_at < SURE
            worker.forget()
            if lost_while_alive:
                raise
            return None
        except CursorAhead:
            worker.cursor = START
            return None
        assert not worker.replaced, "a zombie was served"
        worker.spoke_at = asked
        return done

    @rule(number=st.integers(0, WORKERS - 1), limit=st.integers(1, 5), wait=st.sampled_from([0.0, 0.1]))
    def read(self, number: int, limit: int, wait: float) -> None:
        worker = self.workers[number]
        if worker.part is None:
            return
        part, term = worker.part, worker.term
        read_as = part if part.partitions > 1 else Part(0, self.partitions)

        def ask() -> tuple[list[Pod], Cursor]:
            answer = worker.client.pods("items", read_as, term, worker.cursor, limit=limit, wait=wait)
            pods = list(answer)
            assert answer.end is not None
            assert answer.end.pods == len(pods)
            return pods, answer.end.cursor

        found = self._as(worker, ask)
        if found is None:
            return
        pods, cursor = found
        keys = [(pod.op == "B", pod.seq) for pod in pods]
        assert keys == sorted(keys)
        assert all(pod.shard % read_as.partitions == read_as.partition for pod in pods)
        before = {False: worker.cursor.regular, True: worker.cursor.backfill}
        assert all(seq > before[backfill] for backfill, seq in keys)
        worker.pods += pods
        worker.cursor = cursor if read_as == part else START

    @rule(number=st.integers(0, WORKERS - 1), count=st.integers(1, 5))
    def finish(self, number: int, count: int) -> None:
        worker = self.workers[number]
        pods, worker.pods = worker.pods[:count], worker.pods[count:]
        if worker.part is None or not pods:
            return
        self._write_downstream(pods)
        part, term = worker.part, worker.term
        self._as(worker, lambda: worker.client.ack("items", part, term, [pod.seq for pod in pods]))

    def _write_downstream(self, pods: list[Pod]) -> None:
        ids = {id for pod in pods for id in pod.ids}
        found = {row["id"]: row["value"] for row in self.world.sql("SELECT * FROM items WHERE id = ANY($1)", list(ids))}
        for id in ids:
            self.downstream.pop(id, None)
        self.downstream |= found

    @rule(number=st.integers(0, WORKERS - 1))
    def die(self, number: int) -> None:
        """Gone without a word; the lease stays until its time is over. Somebody of its name comes in its place."""
        dead = self.workers[number]
        dead.client.close()
        self.workers[number] = Worker(self._client(number + 1))
        if dead.part is not None and not dead.replaced:
            self.workers.append(dead)  # its lease still stands in the way

    @rule(number=st.integers(0, WORKERS - 1))
    def release(self, number: int) -> None:
        worker = self.workers[number]
        if worker.part is not None:
            worker.client.release("items", worker.part, worker.term)
            worker.forget()

    @invariant()
    def no_two_live_leases_overlap(self) -> None:
        rows = self.world.sql("SELECT partitions, partition FROM tube.tube_lease WHERE tube = 'items'")
        parts = [Part(row["partition"], row["partitions"]) for row in rows]
        assert not any(overlap(a, b) for i, a in enumerate(parts) for b in parts[:i])

    def teardown(self) -> None:
        if not hasattr(self, "workers"):
            return
        for transaction in self.transactions:
            self.world.end(transaction, "COMMIT")
        for worker in self.workers:
            worker.client.close()
        with self._client(0) as client:
            term = client.claim("items", Part(0, 1), ttl=30, wait=20).term
            deadline = time.monotonic() + PATIENCE
            while self.world.sql("SELECT count(*) AS n FROM tube.items")[0]["n"]:
                assert time.monotonic() < deadline, "the tube does not become empty"
                pods = list(client.pods("items", Part(0, 1), term, wait=0.2))
                self._write_downstream(pods)
                if pods:
                    client.ack("items", Part(0, 1), term, [pod.seq for pod in pods])
            client.release("items", Part(0, 1), term)
        table = {row["id"]: row["value"] for row in self.world.sql("SELECT * FROM items")}
        assert self.downstream == table


def overlap(a: Part, b: Part) -> bool:
    """Whether a shard could belong to both; up to 4 partitions each."""
    return any(s % a.partitions == a.partition and s % b.partitions == b.partition for s in range(16))


@pytest.fixture
def world(database_url: str) -> Iterator[World]:
    with World(database_url) as made:
        yield made


@pytest.mark.timeout(600)
def test_tubes_keep_their_promises_whatever_happens_in_whatever_order(world: World) -> None:
    Machine.world = world
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        Machine,
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            print_blob=True,
            phases=[Phase.explicit, Phase.generate],
        ),
    )
