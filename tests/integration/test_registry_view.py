"""A daemon with many streams loads only those whose entry has changed, and finds each change as if it loaded all."""

from __future__ import annotations

import pytest

from replicad.postgres import schema
from replicad.postgres.bridge import Database
from replicad.streams import daemon_registry
from replicad.streams.daemon_registry import RegistryView
from replicad.streams.registry import Registry, Stream

STREAMS = 12


@pytest.fixture
async def db(database: Database) -> Database:
    await schema.install(database, "stream", "replicad")
    for n in range(STREAMS):
        await database.execute(f"CREATE TABLE t{n} (id bigserial PRIMARY KEY, writer text, body text)")
        await Registry(database).add(f"s{n:02}", f"t{n}", "id", instance_column="writer")
    return database


@pytest.fixture
def marks_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look loads only the streams of which a mark has changed."""
    monkeypatch.setattr(daemon_registry, "IN_TURN", 1_000_000)


CHANGES = (
    "ALTER TABLE t3 RENAME TO other",
    "ALTER TABLE t3 RENAME COLUMN id TO number",
    "ALTER TABLE t3 DROP CONSTRAINT t3_pkey",
    "ALTER TABLE t3 ALTER COLUMN id SET DEFAULT nextval('t4_id_seq')",
    "ALTER SEQUENCE t3_id_seq CACHE 10",
    "ALTER SEQUENCE t3_id_seq AS bigint MAXVALUE 1000000",
    "CREATE TABLE child () INHERITS (t3)",
    "DROP TABLE t3",
    "TRUNCATE t3 RESTART IDENTITY",
    "CREATE SCHEMA elsewhere; ALTER TABLE t3 SET SCHEMA elsewhere",
    "SELECT replicad.stream_remove('s03')",
    "SELECT replicad.stream_remove('s03'), replicad.stream_add('s03', 't3', 'id')",
    "SELECT replicad.stream_skip_id('s03', 7, 'unreadable')",
    "SELECT replicad.stream_max_row('s03', 1000000)",
    "SELECT replicad.stream_writers_ensure(4, ARRAY['w1', 'w2'])",
    "SELECT replicad.stream_fork(4, (SELECT id FROM replicad.stream_generation WHERE stream = 4), 'ids_went_back')",
    "INSERT INTO replicad.stream_position (stream, writer, position, published_at) VALUES (4, 0, 3, now())",
    "CREATE TABLE t99 (id bigserial PRIMARY KEY); SELECT replicad.stream_add('s99', 't99', 'id')",
)


@pytest.mark.parametrize("change", CHANGES)
async def test_each_change_is_found_at_the_next_look(db: Database, marks_alone: None, change: str) -> None:
    view = RegistryView(Registry(db), db)
    before = await settled(view, db)
    await db.execute(change)
    found, truth = await view.look(), await Registry(db).load_streams()
    assert found == truth
    assert found != before
    untouched = {name for name in before.keys() & found.keys() if before[name] == truth[name]}
    assert len(untouched) >= STREAMS - 2
    assert all(found[name] is before[name] for name in untouched), "a stream that has not changed is the same object"


async def settled(view: RegistryView, db: Database) -> dict[str, Stream]:
    """Look until all marks are known."""
    for _ in range(3):
        found = await view.look()
    assert found == await Registry(db).load_streams()
    return found


async def test_a_change_without_a_mark_is_found_where_the_stream_is_suspected_or_in_turn(
    db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(daemon_registry, "IN_TURN", 1_000_000)
    view = RegistryView(Registry(db), db)
    await settled(view, db)
    stale = view._streams["s03"] = view._streams["s04"]
    assert (await view.look())["s03"] is stale
    assert (await view.look({"s03"}))["s03"] == await Registry(db).load_stream("s03")
    stale = view._streams["s03"] = view._streams["s04"]
    monkeypatch.setattr(daemon_registry, "IN_TURN", 1)
    for _ in range(STREAMS):
        found = await view.look()
    assert found["s03"] == await Registry(db).load_stream("s03")


async def test_a_failed_look_hides_no_change_from_the_next_one(
    db: Database, marks_alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    view = RegistryView(Registry(db), db)
    await settled(view, db)
    await db.execute("ALTER TABLE t3 RENAME TO other")

    async def fail(*_: object, **__: object) -> dict[str, Stream]:
        raise RuntimeError("the connection was lost between the two statements")

    with monkeypatch.context() as broken:
        broken.setattr(Registry, "load_streams", fail)
        with pytest.raises(RuntimeError):
            await view.look()
    assert (await view.look())["s03"].table == "public.other"
