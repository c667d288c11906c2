"""Few and small pods, read in one statement: the same pods, lines and cursors as by a plan and a COPY, or nothing."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator

import pytest
import trio

from replicad.postgres.bridge import Database, open_database
from replicad.protocol.tokens import Cursor
from replicad.tubes.commands import CursorAt, Part
from replicad.tubes.pods import FEW_PODS, PodBook, PodReadBounds, Span
from tests.lengths import LONG

PARTITIONS = 3
CLAIM = "SELECT term FROM tube.tube_lease_claim('a', $1, $2, 'me', '1 hour', '{}')"


@pytest.fixture
async def indexed(db: Database, tube_url: str) -> AsyncIterator[Database]:
    """A pool as the daemon's for pods: its sessions read by index."""
    await db.execute(f"SELECT tube.tube_ensure_exists('a', {PARTITIONS})")
    async with open_database(tube_url, size=2, application_name="replicad tubes", by_index=True) as opened:
        yield opened


async def in_two_steps(
    book: PodBook, part: Part, term: int, after: Cursor, bounds: PodReadBounds
) -> tuple[CursorAt, bytes]:
    planned = await book.plan("a", part, term, after, bounds)
    read: list[bytes] = []

    async def keep(lines: bytes) -> None:
        read.append(lines)

    if planned.cursor != after:
        await book.lines("a", part, term, Span(after, planned.cursor), sink=keep, renew=trio.lowlevel.checkpoint)
    return planned, b"".join(read)


async def test_a_short_read_gives_what_a_plan_and_a_copy_give_or_nothing(db: Database, indexed: Database) -> None:
    book = PodBook(db, db, indexed, "tube")
    some = random.Random(7)
    terms = [await db.fetch_value(CLAIM, PARTITIONS, number) for number in range(PARTITIONS)]
    short = 0
    rounds = 300 if LONG else 90
    for _ in range(rounds):
        for _ in range(some.choice((0, 1, 2, 2, FEW_PODS))):
            op, ids = some.choice("IUDTB"), some.choice(("{1}", "{-1,2,3}", "{}"))
            payload = some.choice((None, '{"type":"backfill_schedule"}', '{"type":"backfill_end"}', '"\\u00e9\\n"'))
            if ids == "{}" and payload is None:
                continue
            await db.execute(
                "INSERT INTO tube.a (op, shard, ids, payload) VALUES ($1, $2, $3::text::bigint[], $4::text::jsonb)",
                op, some.randrange(9), ids, payload,
            )  # fmt: skip
        if some.random() < 0.2:
            await db.execute("DELETE FROM tube.a WHERE seq % 3 = $1 OR op = $2", some.randrange(3), some.choice("UB"))
        last = await db.fetch_value("SELECT last_value FROM tube.tube_seq")
        number = some.randrange(PARTITIONS)
        if some.random() < 0.2:
            await db.execute("SELECT tube.tube_low_raise('a', $1, $2, $3)", PARTITIONS, number, last)
        position = max(0, last - some.choice((0, 0, 1, 5)))
        after = Cursor(max(0, position - some.randrange(60)), max(0, position - some.randrange(60)))
        bounds = PodReadBounds(
            position, some.choice((1000, 1000, 3)), some.choice((None, 1, 5)), some.choice((None, None, 0, 1))
        )
        part = Part(number, PARTITIONS)
        found = await book.short("a", part, terms[number], after, bounds)
        if found is not None:
            assert found == await in_two_steps(book, part, terms[number], after, bounds)
            short += found[0].pods > 0
    assert short > rounds // 6, "this test compares"


async def test_short_reads_that_come_together_get_what_each_gets_alone(db: Database, indexed: Database) -> None:
    book = PodBook(db, db, indexed, "tube")
    terms = [await db.fetch_value(CLAIM, PARTITIONS, number) for number in range(PARTITIONS)]
    await db.execute("SELECT tube.a_touch(i % 5, ARRAY[i], (ARRAY['U','B'])[1 + i % 2]) FROM generate_series(1, 40) i")
    last = await db.fetch_value("SELECT last_value FROM tube.tube_seq")
    asked = [
        (Part(number, PARTITIONS), term, Cursor(after, after), PodReadBounds(last - back, limit))
        for number, term in enumerate([*terms[:2], terms[2] + 1])
        for after, back, limit in ((0, 0, 1000), (last - 9, 2, 1000), (0, 0, 3))
    ]
    alone = [await book.short("a", *one) for one in asked]
    together: dict[int, tuple[CursorAt, bytes] | None] = {}

    async def read(number: int) -> None:
        together[number] = await book.short("a", *asked[number])

    before = indexed.statistics().statements
    async with trio.open_nursery() as nursery:
        for number in range(len(asked)):
            nursery.start_soon(read, number)
    assert indexed.statistics().statements == before + 2, "the first one, and one for all others"
    assert [together[number] for number in range(len(asked))] == alone
    assert len({one for one in alone if one is not None}) > 3


async def test_a_short_read_is_refused_without_the_lease_or_with_another_number_of_partitions(
    db: Database, indexed: Database
) -> None:
    book = PodBook(db, db, indexed, "tube")
    part, start = Part(0, PARTITIONS), Cursor(0, 0)
    term = await db.fetch_value(CLAIM, PARTITIONS, 0)
    await db.execute("SELECT tube.a_touch(0, '{7}', 'U')")
    last = await db.fetch_value("SELECT last_value FROM tube.tube_seq")

    async def short(part: Part, term: int) -> int | None:
        found = await book.short("a", part, term, start, PodReadBounds(last, 10))
        return None if found is None else found[0].pods

    assert await short(part, term) == 1
    assert await short(part, term + 1) is None
    assert await short(Part(1, PARTITIONS), term) is None
    assert await short(Part(0, 1), term) is None
    await db.execute("SELECT tube.tube_ensure_exists('a', 2 * $1)", PARTITIONS)
    assert await short(part, term) is None


async def test_more_or_larger_pods_are_left_to_a_plan(db: Database, indexed: Database) -> None:
    book = PodBook(db, db, indexed, "tube")
    part, start = Part(0, PARTITIONS), Cursor(0, 0)
    term = await db.fetch_value(CLAIM, PARTITIONS, 0)

    async def short() -> tuple[CursorAt, bytes] | None:
        last = await db.fetch_value("SELECT last_value FROM tube.tube_seq")
        return await book.short("a", part, term, start, PodReadBounds(last, 1000))

    for number in range(FEW_PODS):
        await db.execute("SELECT tube.a_touch(0, ARRAY[$1::bigint], 'U')", number)
    found = await short()
    assert found is not None
    assert found[0].pods == FEW_PODS
    await db.execute("SELECT tube.a_touch(0, '{99}', 'U')")
    assert await short() is None
    await db.execute("DELETE FROM tube.a")
    await db.execute(
        "SELECT tube.a_touch(0, '{99}', 'U', (SELECT to_jsonb(string_agg(md5(i::text), ''))"
        " FROM generate_series(1, 4000) i))"
    )
    assert await short() is None


@pytest.mark.parametrize("many", [False, True])
async def test_a_short_read_goes_by_the_index_although_it_was_prepared_while_the_tube_was_empty(
    db: Database, indexed: Database, many: bool
) -> None:
    term = await db.fetch_value(CLAIM, PARTITIONS, 0)
    statement = await db.fetch_value("SELECT tube.tube_short_sql('a', $1, $2)", PARTITIONS, many)
    form = "'{{{}}}'" if many else "{}"
    read = f"EXECUTE short({', '.join(form.format(word) for word in (0, term, 0, 0, 100, FEW_PODS))}, 65536, NULL)"
    async with indexed.connection() as one:
        await one.execute(f"PREPARE short AS {statement}")
        for _ in range(10):
            await one.execute(read)
        await db.execute(
            "INSERT INTO tube.a (op, shard, ids) SELECT 'U', i % 9, ARRAY[i] FROM generate_series(1, 50000) i"
        )
        plan = "\n".join([row[0] for row in await one.fetch(f"EXPLAIN {read}")])
        await one.execute("DEALLOCATE short")
    assert plan.count("Index Scan using a_pods_3") == 2, plan
    assert "Seq Scan on a" not in plan
