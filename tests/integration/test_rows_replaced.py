"""A reading statement reads the table that the stream was made for, whatever table has its name at the moment."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest
import trio

from replicad.errors import DatabaseError, ReplicadError, TableReplaced
from replicad.postgres import schema
from replicad.postgres.bridge import Database, open_database
from replicad.streams.chunks import Chunk
from replicad.streams.registry import Registry, row_source
from replicad.streams.rows import RowSource
from replicad.streams.table_rows import is_of_a_row
from tests.lengths import first

SWAPS = 150


@pytest.fixture
async def source(database: Database) -> RowSource:
    """The stream of a table `mine`; `other` is a table of the same columns."""
    await schema.install(database, "stream", "replicad")
    await database.execute(
        # the default says in which table a row is, whatever name it was inserted by
        "CREATE TABLE mine (id bigserial PRIMARY KEY, what text DEFAULT 'mine'); "
        "CREATE TABLE other (id bigserial PRIMARY KEY, what text DEFAULT 'other'); "
        "INSERT INTO mine SELECT FROM generate_series(1, 500); "
        "INSERT INTO other SELECT FROM generate_series(1, 900)"
    )
    return row_source((await Registry(database).add("mine", "public.mine", "id")).stream)


async def read(db: Database, source: RowSource) -> list[str]:
    found: list[str] = []

    async def keep(chunk: Chunk) -> None:
        found.extend(json.loads(line.split(b" ", 4)[4])["what"] for line in chunk.data.splitlines())

    await source.copy_range(db, 0, 1 << 40, keep)
    return found


async def test_every_statement_refuses_another_table_of_the_name(database: Database, source: RowSource) -> None:
    async def look() -> list[Any]:
        """By every statement; each answer, or the error."""
        answers: list[Any] = []
        for ask in (
            read(database, source),
            source.count(database, 0, 1 << 40),
            source.earliest(database),
            source.last_tokens(database, 0, 1 << 40),
            source.ends(database, 0, 1 << 40),
        ):
            try:
                answers.append(await ask)
            except ReplicadError as error:
                answers.append(type(error))
        return answers

    fine = [["mine"] * 500, 500, 0, {"master": 500}, (1, 500)]
    assert await look() == fine
    await database.execute("ALTER TABLE mine RENAME TO away; ALTER TABLE other RENAME TO mine")
    assert await look() == [TableReplaced] * 5
    await database.execute("ALTER TABLE mine RENAME TO other; CREATE TABLE mine (LIKE other)")
    assert await look() == [TableReplaced] * 5, "an empty one too"
    await database.execute("DROP TABLE mine; ALTER TABLE away RENAME TO mine")
    assert await look() == fine


@pytest.mark.parametrize("how", first(1, ["rename", "schema"]))
async def test_no_row_of_another_table_is_read_while_tables_change_names_all_the_time(
    database: Database, database_url: str, source: RowSource, how: str
) -> None:
    """A writer writes to both; another session puts one in the place of the other and back, in a loop."""
    if how == "rename":
        there = "BEGIN; ALTER TABLE mine RENAME TO away; ALTER TABLE other RENAME TO mine; COMMIT"
        back = "BEGIN; ALTER TABLE mine RENAME TO other; ALTER TABLE away RENAME TO mine; COMMIT"
    else:
        await database.execute("CREATE SCHEMA away; CREATE SCHEMA besides; ALTER TABLE other SET SCHEMA besides")
        await database.execute("ALTER TABLE besides.other RENAME TO mine")
        there = "BEGIN; ALTER TABLE mine SET SCHEMA away; ALTER TABLE besides.mine SET SCHEMA public; COMMIT"
        back = "BEGIN; ALTER TABLE mine SET SCHEMA besides; ALTER TABLE away.mine SET SCHEMA public; COMMIT"
    reads = refused = 0
    done = False

    async def swap() -> None:
        nonlocal done
        async with open_database(database_url, size=1, application_name="swapper") as db:
            for _ in range(SWAPS):
                await db.execute(there)
                await db.execute(back)
        done = True

    async def write() -> None:
        async with open_database(database_url, size=1, application_name="writer") as db:
            while not done:
                for name in ("mine", "other") if how == "rename" else ("mine", "besides.mine"):
                    with suppress(DatabaseError):  # no table has the name just now
                        await db.execute(f"INSERT INTO {name} DEFAULT VALUES")

    async def look() -> None:
        nonlocal reads, refused
        async with open_database(database_url, size=1, application_name="reader") as db:
            while not done:
                try:
                    found = await read(db, source)
                    assert set(found) == {"mine"}, "rows of the other table"
                    assert len(found) >= 500
                    assert (await source.last_tokens(db, 0, 500)) == {"master": 500}
                    reads += 1
                except TableReplaced:
                    refused += 1
                except DatabaseError as error:  # no table had the name
                    if is_of_a_row(error):
                        raise
                    refused += 1

    with trio.fail_after(120):
        async with trio.open_nursery() as nursery:
            for job in (swap, write, look, look):
                nursery.start_soon(job)
    assert reads > 0
    assert refused > 0, "the reader never met the other table, so nothing was proven"
