"""Pods in blocks of Arrow, from a real daemon and Postgres: the same pods as in lines, fenced and bounded likewise."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from replicad.client.blocking_client import BlockingClient
from replicad.client.requests import PodAnswer, PodBlock
from replicad.errors import LeaseLost
from replicad.postgres.bridge import Database
from replicad.protocol.tokens import Cursor
from replicad.spark.arrow import PodReader, block_batch
from replicad.tubes.bulk import Sizes
from replicad.tubes.commands import Part
from replicad.tubes.serving.waiting import TubeIntervals
from tests.conftest import PATIENCE
from tests.daemons import Daemon, Paces
from tests.lengths import examples

from .conftest import Connect

ALL = Part(0, 1)
SMALL = Paces(
    tubes=TubeIntervals(blocks=Sizes(row_bytes=4000, first_pods=1))
)  # a handful of pods takes several statements
BLIND = Paces(tubes=TubeIntervals(look=60))  # the daemon does not notice that a lease is lost
Start = Callable[..., AbstractAsyncContextManager[Daemon]]

texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=30)
payloads = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 60), 1 << 60) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=5,
)
ids = st.integers(-(1 << 63), (1 << 63) - 1)
pods = st.tuples(
    st.sampled_from("IUDTB"),
    st.integers(0, 3),
    st.lists(ids, max_size=5) | st.lists(ids | st.none(), max_size=3) | st.just(list(range(900))),
    st.none() | payloads.map(json.dumps) | st.just(json.dumps("z" * 6000)),  # more than a row aims at, below
    st.integers(0, 1 << 52).map(lambda micros: datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=micros)),
)


def connect(daemon: Daemon, name: str) -> BlockingClient:
    address = daemon.addresses[0]
    return BlockingClient(address.host, address.port, name=name)


def in_lines(client: BlockingClient, part: Part, term: int, upto: Cursor, *, payload: bool) -> list[dict[str, Any]]:
    chunks = client.pod_chunks("t", part, term, upto=upto)
    return [row for batch in PodReader("t", part, payload).batches(chunks) for row in batch.to_pylist()]


def in_blocks(client: BlockingClient, part: Part, term: int, upto: Cursor, *, payload: bool) -> list[dict[str, Any]]:
    blocks = client.pod_blocks("t", part, term, upto=upto, payload=payload)
    batches = [block_batch(block, payload=payload) for block in blocks]
    for batch in batches:
        batch.validate(full=True)
    return [row for batch in batches for row in batch.to_pylist()]


@pytest.mark.parametrize("paces", [SMALL])
async def test_pods_are_the_same_in_lines_and_in_blocks(database: Database, daemon: Daemon) -> None:
    await database.execute("SELECT tube.tube_ensure_exists('t', 2)")
    client = connect(daemon, "reader")
    term = (await trio.to_thread.run_sync(lambda: client.claim("t", ALL, ttl=60))).term

    @settings(max_examples=examples(50), deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(pods, min_size=1, max_size=30))
    def check(found: list[tuple[Any, ...]]) -> None:
        sql = "INSERT INTO tube.t (op, shard, ids, payload, ts) VALUES ($1, $2, $3, $4::jsonb, $5)"
        for pod in found:
            trio.from_thread.run(database.execute, sql, *pod)
        counts = {}
        for part in (ALL, Part(0, 2), Part(1, 2)):
            end = client.plan("t", part, term, limit=1000)
            while part == ALL and end.pods < len(found):
                end = client.plan("t", part, term, limit=1000, wait=1)
            for payload in (True, False):
                lines = in_lines(client, part, term, end.cursor, payload=payload)
                assert in_blocks(client, part, term, end.cursor, payload=payload) == lines
                counts[part] = len(lines)
        assert counts[ALL] == len(found) == counts[Part(0, 2)] + counts[Part(1, 2)]
        end = client.plan("t", ALL, term, limit=1000)
        client.ack_upto("t", ALL, term, Cursor(0, 0), end.cursor)

    try:
        await trio.to_thread.run_sync(check)
    finally:
        client.close()


async def fill(database: Database, pods: int) -> None:
    """A tube with so many pods of 500 ids: 4 MB for a thousand of them, which no socket holds."""
    await database.execute("SELECT tube.tube_ensure_exists('t', 1)")
    await database.execute(
        "INSERT INTO tube.t (op, shard, ids) SELECT 'U', 0, array_fill(n::bigint, ARRAY[500])"
        f" FROM generate_series(1, {pods}) AS n"
    )


def begin(client: BlockingClient, pods: int) -> tuple[PodAnswer[PodBlock], int]:
    """An answer of which the first block was taken, and the term under which it is given."""
    term = client.claim("t", ALL, ttl=60).term
    end = client.plan("t", ALL, term, limit=100_000, wait=5)
    while end.pods < pods:
        end = client.plan("t", ALL, term, limit=100_000, wait=1)
    answer = client.pod_blocks("t", ALL, term, upto=end.cursor)
    assert next(answer).pods > 0
    return answer, term


async def test_a_term_that_is_lost_on_the_way_is_noticed_by_the_next_statement(
    database: Database, start_daemon: Start
) -> None:
    async with start_daemon(BLIND) as daemon:
        await fill(database, 10_000)
        with connect(daemon, "reader") as client:
            answer, _ = await trio.to_thread.run_sync(begin, client, 10_000)
            await database.execute("DELETE FROM tube.tube_lease")  # what CLAIM does to one that has run out

            read: list[int] = []
            with pytest.raises(LeaseLost):
                await trio.to_thread.run_sync(lambda: read.extend(block.pods for block in answer))
            assert sum(read) < 9_000
            assert await trio.to_thread.run_sync(client.tube, "t") == 1, "the connection stays in step"


async def test_a_reader_that_takes_nothing_keeps_neither_a_connection_nor_a_snapshot(
    database: Database, start_daemon: Start
) -> None:
    async with start_daemon(tube_connections=1) as daemon:
        await fill(database, 10_000)
        with connect(daemon, "idle") as idle, connect(daemon, "busy") as busy:
            answer, term = await trio.to_thread.run_sync(begin, idle, 10_000)
            blocks = await trio.to_thread.run_sync(lambda: list(busy.pod_blocks("t", ALL, term, limit=300)))
            assert sum(block.pods for block in blocks) == 300
            held = (
                "SELECT count(*) FROM pg_stat_activity "
                "WHERE datname = current_database() AND backend_xmin IS NOT NULL AND pid <> pg_backend_pid()"
            )
            with trio.fail_after(PATIENCE):
                while await database.fetch_value(held + " AND query LIKE '%RECURSIVE piece%'"):
                    await trio.sleep(0.01)
            left = await trio.to_thread.run_sync(lambda: sum(block.pods for block in answer))
            assert answer.end is not None
            assert left < answer.end.pods == 10_000


async def test_netcat_gets_lines_and_a_refusal_where_blocks_cannot_be_made(
    database: Database, daemon: Daemon, netcat: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    await database.execute("SELECT tube.tube_ensure_exists('t', 1)")
    await database.execute("SELECT tube.t_touch(0, ARRAY[5]::bigint[], 'T')")
    async with netcat() as nc:
        await nc.expect("SERVER .*")
        await nc.send("CLAIM t 0/1 ttl=60")
        [lease] = await nc.expect("LEASE .*")
        read = f"PODS t 0/1 {lease.split()[3]} wait=5"
        monkeypatch.setitem(sys.modules, "pyarrow", None)
        await nc.send(f"{read} encoding=arrow")
        await nc.expect(r"ERROR encoding_unavailable: .* install replicad\[arrow\] .*")
        monkeypatch.undo()
        await nc.send(read)
        await nc.expect("RDATA tube:t 0/1 1 .*", "CURSOR t 0/1 1.0 1")
