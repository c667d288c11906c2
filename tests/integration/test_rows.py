"""Rows leave Postgres as finished lines: whatever is in them, one row is one line, in order, of the right writers."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from replicad.errors import DatabaseError
from replicad.postgres import schema
from replicad.postgres.bridge import Database
from replicad.protocol.words import Side
from replicad.streams.chunks import CHUNK, Chunk, chunk_of
from replicad.streams.commands import Rdata
from replicad.streams.registry import Registry, row_source
from replicad.streams.row_pieces import RowSizes, copy_all
from replicad.streams.row_text import wire_instance
from replicad.streams.rows import RowSource
from replicad.streams.table_rows import TableRows
from tests.vocabulary import parse

NASTY = [
    "plain",
    "",
    "two\nlines\r\nand a \t tab",
    "quotes \" ' and \\ backslash \\n",
    "".join(map(chr, range(1, 32))) + "\x7f",
    "\u0085 \u2028 \u2029 \u00a0 \ufeff",
    "Zoë 漢字 \U0001f600",
    "x" * 300_000,
]


@pytest.fixture
async def db(database: Database) -> Database:
    await schema.install(database, "stream", "replicad")
    return database


async def lines(db: Database, source: RowSource, *args: Any) -> list[Rdata]:
    """What a range or a map of ranges gives, parsed as a client would, chunk by chunk."""
    chunks: list[Chunk] = []

    async def keep(chunk: Chunk) -> None:
        chunks.append(chunk)

    count = await (source.copy_vector if isinstance(args[0], dict) else source.copy_range)(db, *args, keep)
    parsed = []
    for chunk in chunks:
        assert chunk.data.endswith(b"\n")
        rows = [parse(line.decode(), Side.SERVER) for line in chunk.data[:-1].split(b"\n")]
        assert isinstance(rows[-1], Rdata)
        assert (chunk.instance, chunk.token, chunk.rows) == (rows[-1].instance, rows[-1].token, len(rows))
        parsed += rows
    assert len(parsed) == count
    if source.unique_ids and not isinstance(args[0], dict):
        await check_blocks(db, source, *args, b"".join(chunk.data for chunk in chunks))
    assert all(isinstance(row, Rdata) and row.stream == source.stream for row in parsed)
    return parsed  # type: ignore[return-value]


async def check_blocks(db: Database, source: RowSource, after: int, upto: int, data: bytes) -> None:
    """Blocks have the same bytes."""
    blocks: list[Chunk] = []

    async def keep(chunk: Chunk) -> None:
        blocks.append(chunk)

    step = (upto - after) // 7 + 1
    count = await source.copy_blocks(db, after, upto, keep, step=step, max_line=1 << 30)
    assert b"".join(block.data for block in blocks) == data
    assert count == sum(block.rows for block in blocks) == data.count(b"\n")
    assert len(blocks) <= 7
    assert blocks == [chunk_of(block.data) for block in blocks]


@pytest.mark.parametrize("row", [None, "jsonb_build_array(t.body)", "pretty", "t.body", "t.pretty::text || E' \\n'"])
async def test_a_row_is_one_valid_line_whatever_it_holds(db: Database, row: str | None) -> None:
    await db.execute("CREATE TABLE events (id bigserial PRIMARY KEY, body text, pretty json)")
    await db.execute("INSERT INTO events (body, pretty) VALUES ('1', '[]')")
    source = row_source((await Registry(db).add("events", "events", "id", row=row)).stream)
    for text in NASTY:
        pretty = json.dumps({"a": [text, "\0"]}, indent=2).replace("\n", "\r\n")  # U+0000 may stand in json, escaped
        await db.execute("INSERT INTO events (body, pretty) VALUES ($1, $2)", text, pretty)
    await db.execute("INSERT INTO events (body, pretty) VALUES (NULL, NULL)")
    found = [json.loads(line.row) for line in await lines(db, source, 1, 1000)]
    expected: list[Any] = {
        None: [{"id": i, "body": text, "pretty": {"a": [text, "\0"]}} for i, text in enumerate(NASTY, 2)],
        "jsonb_build_array(t.body)": [[text] for text in NASTY],
        "t.body": list(NASTY),  # no JSON: sent as strings
    }.get(row, [{"a": [text, "\0"]} for text in NASTY])
    nothing = {None: {"id": len(NASTY) + 2, "body": None, "pretty": None}, "jsonb_build_array(t.body)": [None]}
    if row == "t.body":  # control characters are escaped when a text becomes a JSON string, line ends too
        assert found == [*expected, None]
    else:
        assert found == [*expected, nothing.get(row)]


async def test_expressions_are_taken_as_they_are_written(db: Database) -> None:
    await db.execute('CREATE TABLE events (id bigserial PRIMARY KEY, "t" text)')
    await db.execute("INSERT INTO events VALUES (1, 'x')")
    expression = """jsonb_build_object('$1 {id} %s \\', t, E'\\n', (SELECT max(id) FROM events)) -- the end"""
    source = row_source((await Registry(db).add("100%_it's", "events", "id", row=expression)).stream)
    [line] = await lines(db, source, 0, 1)
    assert json.loads(line.row) == {"$1 {id} %s \\": "x", "\n": 1}
    whole = row_source((await Registry(db).add("whole", "events", "id")).stream)
    assert [line.row for line in await lines(db, whole, 0, 1)] == ['{"id":1,"t":"x"}'], "a column t hides no row"


async def test_rows_with_one_id_are_a_batch_and_batches_of_two_writers_do_not_mix(db: Database) -> None:
    await db.execute("CREATE TABLE events (id bigserial, who text, n serial); CREATE INDEX ON events (id)")
    ids = [1, 1, 1, 2, 3, 3, 4, 4, 4, 4, 6]
    who = ["a", "a", "a", "b", "a", "a", "a", "b", "a", "a", None]
    await db.execute("INSERT INTO events SELECT * FROM unnest($1::bigint[], $2::text[])", ids, who)
    stream = (await Registry(db).add("events", "events", "id", instance_column="who", row="to_jsonb(n)")).stream
    source = row_source(stream)
    found = [(line.instance, line.token) for line in await lines(db, source, 0, 6)]
    assert found[:6] == [("a", None), ("a", None), ("a", 1), ("b", 2), ("a", None), ("a", 3)]
    assert found[6:10] == [("a", 4), ("b", 4), ("a", None), ("a", 4)], "a batch is consecutive and of one writer"
    assert found[10:] == [("master", 6)]
    only_a = [line.token for line in await lines(db, source, {"a": (1, 4)})]
    assert only_a == [None, 3, None, None, 4]
    assert [(line.instance, line.token) for line in await lines(db, source, {"a": (0, 1), "b": (2, 9)})] == [
        ("a", None), ("a", None), ("a", 1), ("b", 4),
    ]  # fmt: skip


@pytest.mark.parametrize("writers", [3, 40])
async def test_a_vector_of_ranges_gives_just_the_rows_in_them_in_order(db: Database, writers: int) -> None:
    chance = random.Random(writers)
    names = [None, "", "with blank", "with\ttab", "ünïcode", "it's \\", "W1", "w1", *(f"w{n}" for n in range(writers))]
    await db.execute(
        # a collation that is blind to capitals, where this Postgres has such ones
        """DO $$ BEGIN CREATE COLLATION blind (provider = icu, locale = 'und-u-ks-level2', deterministic = false);
        EXCEPTION WHEN feature_not_supported THEN CREATE COLLATION blind FROM "C"; END $$;
        CREATE TABLE events (id serial PRIMARY KEY, who text COLLATE blind)"""
    )
    written = [chance.choice(names) for _ in range(2000)]
    await db.execute("INSERT INTO events (who) SELECT unnest($1::text[])", written)
    stream = (await Registry(db).add("events", "events", "id", instance_column="who")).stream
    assert set(stream.writers) == {wire_instance(name) for name in written}, (
        "W1 and w1 are two, whatever they compare as"
    )
    source = row_source(stream)
    for _ in range(6):
        ranges = {}
        for name in chance.sample([*stream.writers, "never wrote"], chance.randint(1, len(stream.writers))):
            low = chance.randint(-5, 2005)
            ranges[name] = (low, low + chance.randint(0, 900))
        expected = []
        for number, name in enumerate(written, 1):
            low, high = ranges.get(wire_instance(name), (0, 0))
            if low < number <= high:
                expected.append((wire_instance(name), number))
        assert [(line.instance, line.token) for line in await lines(db, source, ranges)] == expected
    every = [(line.instance, line.token) for line in await lines(db, source, 0, 2000)]
    assert every == [(wire_instance(name), number) for number, name in enumerate(written, 1)]
    last = dict(every[600:1200])
    assert await source.last_tokens(db, 600, 1200) == last


async def test_looks_at_a_range_are_answered_from_its_ends(db: Database) -> None:
    await db.execute("CREATE TABLE events (id bigint GENERATED ALWAYS AS IDENTITY (START 100) PRIMARY KEY)")
    source = row_source((await Registry(db).add("events", "events", "id")).stream)
    assert await source.earliest(db) == 99
    assert await source.last_tokens(db, 0, 1 << 62) == {}
    await db.execute("INSERT INTO events SELECT FROM generate_series(1, 500)")
    await db.execute("INSERT INTO events OVERRIDING SYSTEM VALUE VALUES (-7)")
    assert await source.earliest(db) == -8, "rows from before there was a sequence count too"
    assert await source.last_tokens(db, 0, 300) == {"master": 300}
    assert await source.count(db, 99, 1 << 62) == 500
    assert await source.count(db, 99, 1 << 62, limit=20) == 20
    assert [line.token for line in await lines(db, source, {"master": (597, 700)})] == [598, 599]
    assert await lines(db, source, {"nobody": (0, 700)}) == []
    assert await lines(db, source, {}) == []
    await Registry(db).remove("events")
    assert await source.earliest(db) is None


async def test_a_range_is_read_along_the_index_and_nothing_is_sorted(db: Database) -> None:
    await db.execute(
        "CREATE TABLE one (id bigserial PRIMARY KEY, who text);"
        "CREATE TABLE many (id bigserial, who text) PARTITION BY RANGE (id); CREATE INDEX ON many (id);"
        "CREATE TABLE many_1 PARTITION OF many FOR VALUES FROM (0) TO (20000);"
        "CREATE TABLE many_2 PARTITION OF many FOR VALUES FROM (20000) TO (90000)"
    )
    for table in ("one", "many"):
        await db.execute(f"INSERT INTO {table} (who) SELECT 'w' || n % 3 FROM generate_series(1, 40000) n")
        await db.execute(f"ANALYZE {table}")
        stream = (await Registry(db).add(table, table, "id", instance_column="who")).stream
        source = row_source(stream)
        queries = [source.range_sql(15000, 25000), source.vector_sql({"w1": (15000, 25000), "w2": (14000, 24000)})]
        if source.unique_ids:
            queries.append(source.blocks_sql(15000, 25000, 1000, 5000))
        for query in queries:
            plan = "\n".join(row[0] for row in await db.fetch(f"EXPLAIN {query}"))
            assert "Index" in plan, plan
            assert "Sort " not in plan, plan
            assert "Seq Scan on" not in plan, plan
            assert ("WindowAgg" in plan) == (table == "many"), "only where an id may occur twice"
        assert [line.token for line in await lines(db, source, 19_000, 21_000)] == list(range(19_001, 21_001))


async def test_long_ranges_come_in_chunks_and_a_sink_that_fails_ends_the_reading(db: Database) -> None:
    await db.execute("CREATE TABLE events (id bigserial PRIMARY KEY, body jsonb)")
    await db.execute("INSERT INTO events (body) SELECT '[\"0123456789\"]' FROM generate_series(1, 50000)")
    source = row_source((await Registry(db).add("events", "events", "id", row="body")).stream)
    sizes: list[int] = []
    tokens: list[int | None] = []

    async def keep(chunk: Chunk) -> None:
        sizes.append(len(chunk.data))
        tokens.append(chunk.token)

    assert await source.copy_range(db, 0, 50000, keep) == 50000
    assert all(CHUNK <= size < CHUNK + 100 for size in sizes[:-1])
    assert len(sizes) == sum(sizes) // CHUNK + 1
    assert tokens[-1] == 50000
    assert tokens == sorted(tokens)  # type: ignore[type-var]

    async def fail(chunk: Chunk) -> None:
        raise ConnectionResetError

    with pytest.raises(ConnectionResetError):
        await source.copy_range(db, 0, 50000, fail)
    assert await source.copy_range(db, 49_999, 50_000, keep) == 1


async def test_many_rows_come_in_blocks_with_the_same_bytes_up_to_the_row_that_fails(
    db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    await db.execute("CREATE TABLE events (id bigserial PRIMARY KEY, body json, n int NOT NULL DEFAULT 1)")
    await db.execute(
        "INSERT INTO events SELECT n, (CASE n % 1000 WHEN 0 THEN E'[\\n1,\\r\\n2]' ELSE '[\"0123456789012345678901\"]'"
        " END)::json FROM generate_series(1, 40000) n;"
        "INSERT INTO events SELECT n + 10000000, '1' FROM generate_series(1, 20) n;"
        "UPDATE events SET body = to_json(repeat('x', 400000)) WHERE id = 30000"
    )
    row = "CASE WHEN 1 / t.n > 0 THEN t.body END"
    source = row_source((await Registry(db).add("events", "events", "id", row=row)).stream)
    rows, blocks = TableRows(source, db, db), list[bytes]()
    read = RowSource.copy_blocks

    async def copy_blocks(self: RowSource, db: Any, after: int, upto: int, sink: Any, *rest: Any, **named: Any) -> int:
        async def note(chunk: Chunk) -> None:
            blocks.append(chunk.data)
            await sink(chunk)

        return await read(self, db, after, upto, note, *rest, **named)

    monkeypatch.setattr(RowSource, "copy_blocks", copy_blocks)

    async def found(copy: Any) -> bytes:
        chunks: list[Chunk] = []

        async def keep(chunk: Chunk) -> None:
            assert chunk.rows == chunk.data.count(b"\n")
            chunks.append(chunk)

        try:
            assert await copy(keep) == sum(chunk.rows for chunk in chunks)
        except DatabaseError:
            chunks.append(chunk_of(b"RDATA events failed 0 \n"))
        return b"".join(chunk.data for chunk in chunks)

    expected = await found(lambda sink: rows.copy_range(0, 20_000_000, sink))
    assert len(expected.splitlines()) == 40_020
    assert await found(lambda sink: copy_all(rows, RowSizes(), 0, 20_000_000, sink)) == expected
    assert 0 < len(b"".join(blocks).splitlines()) < 30_000, "a line that is too long for a block ends the blocks"
    await db.execute("UPDATE events SET n = 0 WHERE id = 25000")
    blocks.clear()
    *sent, last = (await found(lambda sink: copy_all(rows, RowSizes(), 0, 20_000_000, sink))).splitlines()
    assert last == b"RDATA events failed 0 "
    assert 4096 < len(sent) < 25_000
    assert sent == expected.splitlines()[: len(sent)]
    assert blocks


async def test_a_row_whose_expression_fails_is_an_error_and_not_a_gap(db: Database) -> None:
    await db.execute("CREATE TABLE events (id bigserial PRIMARY KEY, n integer)")
    await db.execute("INSERT INTO events (n) VALUES (1), (2)")
    source = row_source((await Registry(db).add("events", "events", "id", row="to_jsonb(1 / n)")).stream)
    await db.execute("INSERT INTO events (n) VALUES (0), (4)")
    with pytest.raises(DatabaseError, match="division by zero"):
        await lines(db, source, 0, 4)


@pytest.mark.parametrize("level", ["NOTICE", "WARNING"])
async def test_no_row_is_lost_where_the_expression_of_a_row_raises_notices(db: Database, level: str) -> None:
    await db.execute(
        f"CREATE FUNCTION told(n int) RETURNS json LANGUAGE plpgsql AS $$ BEGIN RAISE {level} '%', n; RETURN n; END $$;"
        "CREATE TABLE events (id bigserial PRIMARY KEY, n int);"
        "INSERT INTO events (n) SELECT * FROM generate_series(1, 1000)"
    )
    added = await Registry(db).add("events", "public.events", "id", row="told(t.n)")
    found = await lines(db, row_source(added.stream), 0, 1000)
    assert [row.row for row in found] == [str(n) for n in range(1, 1001)]
