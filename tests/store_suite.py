"""What every store of streams does, the one in Postgres and the one in memory that unit tests use."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from replicad.errors import DatabaseError
from replicad.streams.chunks import Chunk
from replicad.streams.daemon_registry import DaemonRegistry

Insert = Callable[[int, str, str], Awaitable[None]]  # id, writer, JSON; "poison" is JSON that cannot be read


async def check_store(store: DaemonRegistry, insert: Insert) -> None:
    """The claims, about a new stream `s` by writer whose table is empty."""
    stream = (await store.look())["s"]
    rows = store.rows(stream)
    assert rows.names_writers
    assert await rows.earliest() == 0
    assert await rows.last_tokens(0, 100) == {}
    for id, writer in enumerate(("a", "b", "a", "c", "b"), 1):
        await insert(id, writer, "1")
    sent: list[bytes] = []

    async def sink(chunk: Chunk) -> None:
        sent.append(chunk.data)

    def tokens() -> list[str]:
        found = [" ".join(line.split()[2:4]) for line in b"".join(sent).decode().splitlines()]
        sent.clear()
        return found

    assert await rows.copy_range(1, 4, sink) == 3
    assert tokens() == ["b 2", "a 3", "c 4"]
    await rows.copy_vector({"a": (0, 1), "b": (2, 5)}, sink)
    assert tokens() == ["a 1", "b 5"]
    await rows.copy_vector({"a": (3, 3), "b": (5, 5)}, sink, others=(0, 5))
    assert tokens() == ["c 4"], "writers with nothing to read are none of the others"
    assert await rows.last_tokens(1, 4) == {"a": 3, "b": 2, "c": 4}
    assert await store.taken(stream, 0) == 5

    await insert(6, "a", "poison")
    await insert(7, "b", "1")
    with pytest.raises(DatabaseError):
        await store.catchup_rows(stream).copy_range(4, 7, sink)
    assert tokens() in ([], ["b 5"]), "nothing behind the row was sent, and before it what Postgres had ready"
    for found in (await rows.find_unreadable((4, 7)), await rows.try_row(6)):
        assert found is not None
        assert (found.stream, found.row_id) == ("s", 6)
    assert await rows.find_unreadable({"b": (4, 7)}) is None
    assert await rows.try_row(7) is None

    numbers = await store.ensure_writers(stream, ["a", "b"])
    assert await store.ensure_writers(stream, ["b"]) == {"b": numbers["b"]}
    assert [one.name for one in await store.writers_numbered(stream, [numbers["a"], 999])] == ["a"]
    stream = (await store.look())["s"]
    assert await store.publish(stream, 5, {"a": 7})
    assert ((await store.published())["s"].position, (await store.published())["s"].per_writer) == (5, {"a": 7})
    again = await store.fork(stream, "ids_went_back")
    assert again.epoch != stream.epoch
    assert again.noted is not None
    assert 0 <= again.noted <= 5, "what can be proven to be the same is shared, and never more than was noted"
    same = await store.fork(stream, "restored")
    assert same.epoch == again.epoch, "daemons that see the same begin one generation"
    lineage = (await store.lineages("s"))["s"]
    assert (lineage.present.id, lineage.present.reason) == (again.epoch, "ids_went_back")
    shared = lineage.shared(stream.epoch)
    assert shared is not None
    assert shared.minimum == again.noted
    assert not await store.publish(stream, 9, {}), "of an epoch that is over"
