"""The store in Postgres does what the one in memory, which unit tests use, does too."""

from __future__ import annotations

from replicad.postgres.bridge import Database
from replicad.streams.daemon_registry import DaemonRegistry
from replicad.streams.registry import Registry
from tests.store_suite import check_store


async def test_the_store_in_postgres_keeps_the_claims_of_every_store(database: Database) -> None:
    await database.execute("CREATE TABLE s (id bigserial PRIMARY KEY, writer text, body text)")
    await Registry(database).add("s", "public.s", "id", instance_column="writer", row="body::json")

    async def insert(id: int, writer: str, body: str) -> None:
        await database.execute("INSERT INTO s VALUES ($1, $2, $3)", id, writer, "{" if body == "poison" else body)
        await database.fetch_value("SELECT setval('s_id_seq', $1)", id)

    await check_store(DaemonRegistry(database, database, "replicad"), insert)
