"""The store in memory does what the one in Postgres does."""

from __future__ import annotations

from typing import cast

from replicad.streams.daemon_registry import DaemonRegistry
from tests.store_suite import check_store

from .memory_streams import MemoryStore


async def test_the_store_in_memory_keeps_the_claims_of_every_store() -> None:
    store = MemoryStore()
    store.add("s", by_writer=True)

    async def insert(id: int, writer: str, body: str) -> None:
        store.insert("s", id, writer=writer)
        if body == "poison":
            store.tables["s"].poison.add(id)

    await check_store(cast(DaemonRegistry, store), insert)
