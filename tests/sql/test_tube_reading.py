"""Reading a partition: by query, by plan and lines, with the right index, under changing numbers of partitions."""

from __future__ import annotations

import json
import random
from collections.abc import Awaitable, Callable

import pytest
import trio

from replicad.errors import CursorAhead, DatabaseError, LeaseLost, PartitionsChanged, TubeRefused, UnknownTube
from replicad.postgres.bridge import Database
from replicad.protocol.words import Side
from replicad.streams.commands import Rdata
from tests.vocabulary import parse

Explain = Callable[[str], Awaitable[str]]

FILL = """
    INSERT INTO tube.a (op, shard, ids)
    SELECT CASE WHEN i % 3 = 0 THEN 'B' ELSE 'U' END, i % 8, ARRAY[i] FROM generate_series(1, {0}) i
"""


async def claim(db: Database, tube: str = "a", partitions: int = 1, partition: int = 0) -> int:
    term: int = await db.fetch_value(
        "SELECT term FROM tube.tube_lease_claim($1, $2, $3, 'me', '1 hour', '{}')", tube, partitions, partition
    )
    return term


async def lines(db: Database, *arguments: object) -> list[str]:
    statement = await db.fetch_value("SELECT tube.tube_lines_sql($1, $2, $3, $4, $5, $6, $7, $8)", *arguments)
    chunks: list[bytes] = []

    async def keep(chunk: bytes) -> None:
        chunks.append(chunk)

    await db.copy_out(statement, sink=keep)
    return b"".join(chunks).decode().split("\n")[:-1]


@pytest.fixture
async def full(db: Database) -> int:
    """A tube `a` of 4 partitions and 100,000 pods; returns the seq of the first."""
    await db.execute("SELECT tube.tube_ensure_exists('a', 4)")
    await db.execute(FILL.format(100_000))
    first: int = await db.fetch_value("SELECT min(seq) FROM tube.a")
    return first


async def test_the_query_of_a_partition_yields_regular_pods_by_seq_and_then_backfill_pods(db: Database) -> None:
    await db.execute("SELECT tube.tube_ensure_exists('a', 2)")
    await db.execute(FILL.format(30))
    for partition in (0, 1):
        query = await db.fetch_value("SELECT tube.tube_pods_sql('a', 2, $1)", partition)
        rows = await db.fetch(query)
        assert [tuple(row.keys()) for row in rows[:1]] == [("seq", "op", "shard", "ids", "payload", "ts")]
        assert [row["ids"][0] for row in rows] == sorted(
            (i for i in range(1, 31) if i % 8 % 2 == partition), key=lambda i: (i % 3 == 0, i)
        )
        assert [r["seq"] for r in await db.fetch(query + " LIMIT 3")] == [r["seq"] for r in rows[:3]]
        regular = await db.fetch(await db.fetch_value("SELECT tube.tube_pods_sql('a', 2, $1, true)", partition))
        assert regular == [row for row in rows if row["op"] != "B"]


@pytest.mark.parametrize("analyzed", [False, True])
async def test_every_way_of_reading_and_acking_goes_by_the_index_and_sorts_nothing(
    db: Database, full: int, explain: Explain, analyzed: bool
) -> None:
    if analyzed:
        await db.execute("ANALYZE tube.a")
    term = await claim(db, partitions=4, partition=1)
    pods = await db.fetch_value("SELECT tube.tube_pods_sql('a', 4, 1)")
    everything = await db.fetch_value("SELECT tube.tube_lines_sql('a', 4, 1, $1, 0, 0, $2, $2)", term, full + 100_000)
    some = await db.fetch_value("SELECT tube.tube_lines_sql('a', 4, 1, $1, $2, 0, $3, 0)", term, full, full + 5000)
    planned = "SELECT tube.tube_range_sql(tube.tube_find('a'), $1, $2, false, $3, $4, 100)"
    own = await db.fetch_value(planned, 4, 1, full, full + 50_000)
    whole = await db.fetch_value(planned, 1, 0, full, full + 50_000)
    removal = (
        "DELETE FROM tube.a WHERE (shard % 4) = 1 AND (op = 'B')::integer = 0"
        f" AND seq > {full} AND seq <= {full + 90_000}"
    )
    for statement in (pods, pods + " LIMIT 10", everything, some, own, whole, removal):
        plan = await explain(statement)
        assert "Index Scan using a_pods_4" in plan, plan
        assert "Seq Scan" not in plan
        assert "Sort\n" not in plan
        assert "a_pkey" not in plan


async def test_finding_control_pods_reads_no_others(db: Database, full: int, explain: Explain) -> None:
    plan = await explain("SELECT FROM tube.a WHERE cardinality(ids) = 0 AND shard = 3")
    assert "a_control" in plan
    plan = await explain("SELECT count(*) FROM tube.a WHERE cardinality(ids) = 0 AND shard % 4 = 3")
    assert "a_control" in plan


async def test_a_stale_number_of_partitions_is_refused_at_every_turn(db: Database) -> None:
    await db.execute("SELECT tube.tube_ensure_exists('a', 2)")
    query = await db.fetch_value("SELECT tube.tube_pods_sql('a', 2, 1)")
    await db.execute("SELECT tube.a_touch(1, '{1}', 'T'); SELECT tube.tube_ensure_exists('a', 3)")
    for statement in (
        query,
        "SELECT tube.tube_pods_sql('a', 2, 1)",
        "SELECT tube.tube_pods_delete('a', 2, 1, ARRAY(SELECT seq FROM tube.a))",
        "SELECT tube.tube_lease_claim('a', 2, 1, 'me', '1s', '{}')",
    ):  # fmt: skip
        with pytest.raises(PartitionsChanged, match="has 3 partitions and not 2"):
            await db.fetch(statement)
    for statement in ("tube_pods_sql('b', 1, 0)", "tube_pods_delete('b', 1, 0, '{}')", "tube_find('b')"):
        with pytest.raises(UnknownTube):
            await db.execute(f"SELECT tube.{statement}")
    for partition in (-1, 3):
        with pytest.raises(TubeRefused, match="is no partition"):
            await db.execute("SELECT tube.tube_pods_sql('a', 3, $1)", partition)


async def test_deleting_pods_of_a_partition_leaves_those_of_others(db: Database) -> None:
    await db.execute("SELECT tube.tube_ensure_exists('a', 2)")
    await db.execute(FILL.format(20))
    every = "ARRAY(SELECT seq FROM tube.a)"
    assert await db.fetch_value(f"SELECT tube.tube_pods_delete('a', 2, 0, {every})") == 10
    assert await db.fetch_value(f"SELECT tube.tube_pods_delete('a', 2, 0, {every})") == 0
    assert await db.fetch_value("SELECT count(*) FROM tube.a WHERE shard % 2 = 1") == 10


async def test_changing_the_number_of_partitions_under_load_loses_nothing_and_acks_nothing_twice(db: Database) -> None:
    await db.execute("CREATE TABLE t1 (id bigint, v integer); SELECT tube.tube_ensure_exists('a', 1)")
    await db.execute("SELECT tube.tube_table_ensure_attached('a', 't1', 0, NULL, '(id % 12)::integer')")
    seen: list[int] = []
    written = 0
    finished = trio.Event()

    async def write(number: int) -> None:
        nonlocal written
        for batch in range(60):
            low = number * 1_000_000 + batch * 20
            await db.execute("INSERT INTO t1 SELECT i, 0 FROM generate_series($1::bigint, $1 + 19) i", low)
            written += 20

    async def read(worker: int) -> None:
        """Reads and deletes, without a lease, the partitions `worker`, `worker + 3`, ... of as many as there are."""
        idle = False
        while not (finished.is_set() and idle):
            partitions = await db.fetch_value("SELECT partitions FROM tube.tube_registry")
            idle = True
            for partition in range(worker, partitions, 3):
                try:
                    query = await db.fetch_value("SELECT tube.tube_pods_sql('a', $1, $2)", partitions, partition)
                    rows = await db.fetch(query + " LIMIT 50")
                    seqs = [row["seq"] for row in rows]
                    gone = await db.fetch_value(
                        "SELECT tube.tube_pods_delete('a', $1, $2, $3)", partitions, partition, seqs
                    )
                except PartitionsChanged:
                    idle = False
                    break
                assert gone == len(seqs)
                idle = idle and not rows
                seen.extend(i for row in rows for i in row["ids"])
            await trio.lowlevel.checkpoint()

    async def alter() -> None:
        for partitions in (3, 2, 5, 1, 4, 8, 3):
            await trio.sleep(0.1)
            await db.execute("SELECT tube.tube_ensure_exists('a', $1)", partitions)

    async def run_writers() -> None:
        async with trio.open_nursery() as writers:
            for number in range(4):
                writers.start_soon(write, number)
            writers.start_soon(alter)
        finished.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(run_writers)
        for worker in range(3):
            nursery.start_soon(read, worker)
    assert len(seen) == len(set(seen)) == written == 4800
    assert await db.fetch_value("SELECT count(*) FROM tube.a") == 0


async def test_a_plan_counts_regular_pods_first_and_backfill_pods_only_when_none_is_left(db: Database) -> None:
    await db.execute("SELECT tube.tube_ensure_exists('a', 1)")
    await db.execute(
        "INSERT INTO tube.a (op, shard, ids) SELECT CASE WHEN i <= 4 THEN 'U' ELSE 'B' END, 0, array_fill(i, ARRAY[10])"
        " FROM generate_series(1, 8) i"
    )
    first = await db.fetch_value("SELECT min(seq) - 1 FROM tube.a")
    term = await claim(db)

    async def plan(after: tuple[int, int], upto: int, *limits: int | None) -> tuple[int, int, int, int | None]:
        row = await db.fetch_row(
            "SELECT * FROM tube.tube_plan('a', 1, 0, $1, $2, $3, $4, $5, $6, $7)", term,
            after[0] and after[0] + first, after[1] and after[1] + first, upto + first, *limits,
        )  # fmt: skip
        assert row is not None
        return (
            row["regular"] and row["regular"] - first,
            row["backfill"] and row["backfill"] - first,
            row["pods"],
            row["ids"],
        )

    assert await plan((0, 0), 8, 100, None, None) == (4, 8, 8, None)
    assert await plan((0, 0), 8, 3, None, None) == (3, 0, 3, None)
    assert await plan((0, 0), 8, 4, None, None) == (4, 0, 4, None)
    assert await plan((0, 0), 8, 6, None, None) == (4, 6, 6, None)
    assert await plan((0, 0), 8, 100, None, 1) == (4, 5, 5, None)
    assert await plan((0, 0), 8, 100, None, 0) == (4, 0, 4, None)
    assert await plan((0, 0), 6, 100, None, None) == (4, 6, 6, None)
    assert await plan((0, 0), 3, 100, None, None) == (3, 0, 3, None)
    assert await plan((2, 6), 8, 100, None, None) == (4, 8, 4, None)
    assert await plan((4, 8), 8, 100, None, None) == (4, 8, 0, None)
    assert await plan((0, 0), 8, 100, 25, None) == (2, 0, 2, 20)
    assert await plan((0, 0), 8, 100, 5, None) == (1, 0, 1, 10)  # one pod at least
    assert await plan((0, 0), 8, 100, 40, None) == (4, 0, 4, 40)
    assert await plan((0, 0), 8, 100, 65, None) == (4, 6, 6, 60)
    assert await plan((4, 0), 8, 100, 5, None) == (4, 5, 1, 10)
    for after in ((9, 0), (0, 9)):
        with pytest.raises(CursorAhead, match="lies beyond position"):
            await plan(after, 8, 100, None, None)


async def test_lines_are_what_the_protocol_says_byte_for_byte(db: Database) -> None:
    tube = "a\"%s\\'ü"
    await db.execute("SELECT tube.tube_ensure_exists($1, 2)", tube)
    payload = {"text": 'quote " backslash \\ newline \n tab \t é 😀 \u2028', "n": [1, None]}
    quoted = '"' + tube.replace('"', '""') + '"'
    await db.execute(
        f"INSERT INTO tube.{quoted} (op, shard, ids, payload, ts) VALUES ('U', 3, '{{1,-2,9223372036854775807}}', NULL,"
        " '2026-01-01 00:00:00+00'), ('B', 1, '{}', $1::text::jsonb, '2026-01-02"
        " 03:04:05.000678+02'), ('D', 2, '{7}', NULL, now()),"
        " ('T', 5, '{4}', NULL, '2026-01-01 00:00:00.5+00')",
        json.dumps(payload),
    )
    first = await db.fetch_value(f"SELECT min(seq) FROM tube.{quoted}")
    term = await claim(db, tube, 2, 1)
    got = await lines(db, tube, 2, 1, term, 0, 0, first + 100, first + 100)
    head = f"RDATA tube:{tube} 1/2"
    assert got[:2] == [
        f'{head} {first} {{"seq":{first},"op":"U","shard":3,"ids":[1,-2,9223372036854775807],'
        '"ts":"2026-01-01T00:00:00.000000+00:00"}',
        f'{head} {first + 3} {{"seq":{first + 3},"op":"T","shard":5,"ids":[4],'
        '"ts":"2026-01-01T00:00:00.500000+00:00"}',
    ]
    assert got[2].startswith(
        f'{head} {first + 1} {{"seq":{first + 1},"op":"B","shard":1,"ids":[],'
        '"ts":"2026-01-02T01:04:05.000678+00:00","payload":{'
    )
    assert len(got) == 3
    for line in got:
        command = parse(line, Side.SERVER)
        assert isinstance(command, Rdata)
        assert json.loads(command.row)["seq"] == command.token
    assert json.loads(got[2].split(" ", 4)[4])["payload"] == payload


async def test_lines_and_plan_refuse_a_term_that_does_not_hold_the_partition(db: Database) -> None:
    await db.execute("SELECT tube.tube_ensure_exists('a', 4); SELECT tube.a_touch(1, '{1}', 'T')")
    term = await claim(db, partitions=4, partition=1)
    for partitions, partition, wrong in ((4, 1, term + 1), (4, 2, term), (2, 1, term), (1, 0, term)):
        for cursor in (10**9, 0):  # with pods in the range, and with none
            with pytest.raises(LeaseLost, match=f"term {wrong} does not hold partition {partition}/{partitions}"):
                await lines(db, "a", partitions, partition, wrong, 0, 0, cursor, cursor)
        with pytest.raises(LeaseLost):
            await db.execute("SELECT tube.tube_plan('a', $1, $2, $3, 0, 0, 1000, 10)", partitions, partition, wrong)
    assert await lines(db, "a", 8, 5, term, 0, 0, 10**9, 10**9) == []
    assert len(await lines(db, "a", 8, 1, term, 0, 0, 10**9, 10**9)) == 1
    assert await lines(db, "a", 4, 1, term, 5, 5, 5, 5) == []
    statement = await db.fetch_value("SELECT tube.tube_lines_sql('a', 4, 1, $1, 0, 0, 1000, 1000)", term)
    await db.execute("SELECT tube.tube_lease_release('a', 4, 1, $1)", term)
    with pytest.raises(LeaseLost, match="claim the partition anew"):
        await db.fetch(statement)


async def test_a_batch_planned_under_another_number_of_partitions_can_be_read_and_acked_under_it(db: Database) -> None:
    await db.execute("SELECT tube.tube_ensure_exists('a', 3)")
    await db.execute(FILL.format(60))
    term = await claim(db, partitions=3, partition=2)
    before = await lines(db, "a", 3, 2, term, 0, 0, 10**9, 10**9)
    await db.execute("SELECT tube.tube_ensure_exists('a', 4)")
    with pytest.raises(PartitionsChanged):
        await db.execute("SELECT tube.tube_plan('a', 3, 2, $1, 0, 0, 1000, 10)", term)
    assert await lines(db, "a", 3, 2, term, 0, 0, 10**9, 10**9) == before
    assert await db.fetch_value("SELECT pods FROM tube.tube_ack_upto('a', 3, 2, $1, 0, 0, $2, $2)", term, 10**9) == len(
        before
    )
    assert await db.fetch_value("SELECT count(*) FROM tube.a") == 60 - len(before)


@pytest.mark.parametrize("partitions", [1, 4, 65])
async def test_the_whole_tube_can_be_read_as_one_partition_whatever_their_number(db: Database, partitions: int) -> None:
    await db.execute("SELECT tube.tube_ensure_exists('a', $1)", partitions)
    await db.execute(FILL.format(200).replace("i % 8", "i % 130"))
    term = await claim(db)
    rows = await db.fetch("SELECT seq FROM tube.a ORDER BY op = 'B', seq")
    expected = [row["seq"] for row in rows]
    after = [0, 0]
    got: list[int] = []
    while True:
        plan = await db.fetch_row("SELECT * FROM tube.tube_plan('a', 1, 0, $1, $2, $3, $4, 37)", term, *after, 10**9)
        assert plan is not None
        if not plan["pods"]:
            break
        upto = [plan["regular"], plan["backfill"]]
        page = await lines(db, "a", 1, 0, term, *after, *upto)
        assert len(page) == plan["pods"]
        got += [int(line.split(" ")[3]) for line in page]
        after = upto
    assert got == expected
    assert await db.fetch_value("SELECT pods FROM tube.tube_ack_upto('a', 1, 0, $1, 0, 0, $2, $3)", term, *after) == 200


async def test_statistics_are_exact_for_small_tubes_and_say_so_when_they_are_not(db: Database) -> None:
    await db.execute("SELECT tube.tube_ensure_exists('a', 2, 'id > 0'), tube.tube_ensure_exists('empty')")
    await db.execute(
        "CREATE SCHEMA sh5; CREATE TABLE sh5.t (id bigint); SELECT tube.tube_table_ensure_attached('a', 'sh5.t')"
    )
    await db.execute(
        "INSERT INTO tube.a (op, shard, ids) SELECT CASE WHEN i % 2 = 0 THEN 'B' ELSE 'U' END, 5,"
        " array_fill(i, ARRAY[3])"
        " FROM generate_series(1, 60000) i; SELECT tube.a_touch(5, '{}', 'T', '{}')"
    )
    low, high = await db.fetch_value("SELECT ARRAY[min(seq), max(seq)] FROM tube.a")
    exact = {
        row["partition"]: dict(row)
        for row in await db.fetch("SELECT * FROM tube.tube_stats(100000)")
        if row["tube"] == "a"
    }
    assert exact[0]["inc_count"] == exact[0]["backfill_count"] == exact[0]["control_count"] == 0
    assert exact[0]["inc_min_seq"] is None
    one = exact[1]
    assert (one["predicate"], one["shards"], one["estimated"]) == ("id > 0", [5], False)
    assert (one["inc_count"], one["backfill_count"], one["control_count"]) == (30001, 30000, 1)
    assert (one["inc_ids"], one["backfill_ids"]) == (90000, 90000)
    assert (one["inc_min_seq"], one["inc_max_seq"], one["backfill_min_seq"], one["backfill_max_seq"]) == (
        low, high, low + 1, high - 1,
    )  # fmt: skip
    assert one["inc_min_ts"] <= one["inc_max_ts"]
    assert one["backfill_min_ts"] <= one["backfill_max_ts"]
    none, some = await db.fetch("SELECT * FROM tube.tube_stats_of('a', 1000)")
    assert (none["inc_count"], none["estimated"]) == (0, False)
    assert some["estimated"]
    assert 15000 < some["inc_count"] < 60000
    assert 15000 < some["backfill_count"] < 60000
    assert 45000 < some["backfill_ids"] < 180000
    guessed = {"inc_count", "inc_ids", "backfill_count", "backfill_ids", "estimated"}
    assert {name: value for name, value in some.items() if name not in guessed} == {
        name: value for name, value in one.items() if name not in guessed
    }


async def test_few_pods_in_a_table_that_is_large_with_dead_ones_are_counted(db: Database) -> None:
    await db.execute("SELECT tube.tube_ensure_exists('a', 2)")
    await db.execute(
        "INSERT INTO tube.a (op, shard, ids) SELECT 'U', i, ARRAY[i, i] FROM generate_series(1, 60000) i;"
        " DELETE FROM tube.a WHERE seq <= (SELECT max(seq) - 100 FROM tube.a)"
    )
    for row in await db.fetch("SELECT * FROM tube.tube_stats_of('a', 1000)"):
        assert (row["inc_count"], row["inc_ids"], row["backfill_count"], row["estimated"]) == (50, 100, 0, False)


async def test_statistics_read_a_bounded_part_of_a_tube_whatever_its_number_of_partitions(db: Database) -> None:
    await db.execute("SELECT tube.tube_ensure_exists('a', 500)")
    await db.execute("INSERT INTO tube.a (op, shard, ids) SELECT 'U', i, '{1}' FROM generate_series(1, 60000) i")
    async with db.connection() as connection, connection.transaction():
        rows = await connection.fetch("SELECT * FROM tube.tube_stats(1000)")
        read = await connection.fetch_value(
            "SELECT seq_tup_read + coalesce(idx_tup_fetch, 0) FROM pg_stat_xact_user_tables"
            " WHERE relid = 'tube.a'::regclass"
        )
    assert [row["estimated"] for row in rows] == [True] * 500
    assert 30_000 < sum(row["inc_count"] for row in rows) < 120_000
    assert min(row["inc_count"] for row in rows) >= 1
    assert read < 40_000, "a sample, and few pods of each partition"


async def test_inserting_a_query_keeps_its_order_tells_of_progress_and_serves_several_tubes(
    db: Database, tube_url: str, psql_script: Callable[[str, str], str]
) -> None:
    await db.execute(
        "SELECT tube.tube_ensure_exists('a'), tube.tube_ensure_exists('b,c'), tube.tube_ensure_exists('d')"
    )
    ids = random.Random(5).sample(range(10**12), 1001)
    await db.execute("CREATE SCHEMA mine; CREATE TABLE mine.source (id bigint, place integer)")
    await db.execute(
        "INSERT INTO mine.source SELECT * FROM unnest($1::bigint[], $2::int[])", ids, [n * 7 for n in range(1001)]
    )
    await db.execute("INSERT INTO mine.source VALUES (NULL, 1)")
    text = psql_script(
        tube_url,
        "SET search_path = mine; SELECT tube.tube_pods_insert('a, d', 'SELECT id, place AS"
        " row_number FROM source -- all', 4,"
        " approx_size => 1000, fetch_chunk_size => 300, insert_chunk_size => 100); "
        "CREATE TEMP TABLE few AS SELECT 1 AS id, 1 AS row_number;"
        "SELECT tube.tube_pods_insert('b,c', 'TABLE few', 9, 'U')",
    )
    assert text.splitlines()[:2] == ["1001", "1"]
    assert [line.partition("NOTICE:")[2].strip() for line in text.splitlines()[2:]] == [
        "300 ids of about 1000 (30 %)", "600 ids of about 1000 (60 %)", "900 ids of about 1000 (90 %)",
    ]  # fmt: skip
    for tube in ("a", "d"):
        rows = await db.fetch(f"SELECT op, shard, ids FROM tube.{tube} ORDER BY seq")
        assert [i for row in rows for i in row["ids"]] == ids
        assert [len(row["ids"]) for row in rows] == [100] * 10 + [1]
        assert {(row["op"], row["shard"]) for row in rows} == {("B", 4)}
    assert await db.fetch_value('SELECT ids FROM tube."b,c"') == [1]
    insert = "SELECT tube.tube_pods_insert($1, $2, 1)"
    for tube, query, error in [
        ("a", "SELECT 1 AS id", "id and row_number"),
        ("a", "SELECT 1 AS nr, 1 AS row_number", "id and row_number"),
        ("a,nope", "SELECT 1 AS id, 1 AS row_number", "no tube 'nope'"),
        ("a", "SELECT 1; DROP TABLE mine.source", "syntax"),
    ]:
        with pytest.raises((TubeRefused, UnknownTube, DatabaseError), match=error):
            await db.execute(insert, tube, query)
