"""Rows that turn up at or below a position are found by their ids, named, counted, and shown with their cause."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
import trio

from replicad.daemon.troubles import Troubles
from replicad.errors import DatabaseError
from replicad.postgres import schema
from replicad.postgres.bridge import Database
from replicad.streams.lineage import Lineage
from replicad.streams.registry import Registry, Stream
from replicad.streams.serving.audit import Audit
from replicad.streams.serving.counts import Tally
from replicad.streams.serving.intervals import StreamIntervals
from replicad.streams.serving.lane import Lane
from replicad.streams.serving.windows import CountedRange, Windows
from tests.conftest import PATIENCE

PLAIN = "CREATE TABLE events (id bigserial PRIMARY KEY, body text)"
PARTITIONED = (
    "CREATE TABLE events (id bigserial, body text) PARTITION BY LIST (body);"
    "CREATE TABLE events_a PARTITION OF events FOR VALUES IN ('a'); CREATE INDEX ON events (id)"
)


@dataclass
class Feed:
    """Stands in for a feed that has told everything up to `sent_upto`."""

    stream: Stream
    lineage: Lineage
    sent_upto: int = 0
    late_rows: int = 0
    lanes: dict[str, Lane] = field(default_factory=dict)
    tally: Tally = field(default_factory=Tally)


class Watch:
    """A stream `events`, looked at when the test says so."""

    def __init__(self, db: Database, feed: Feed, pace: StreamIntervals) -> None:
        self.db, self.feed, self.troubles = db, feed, Troubles()
        self.late = Audit(Windows(db, pace.late_rows, "replicad"), {"events": feed}, self.troubles, pace)

    @property
    def said(self) -> str:
        """What is shown of the stream."""
        return self.troubles.why("stream", "events") or ""

    async def counted(self, told: int) -> None:
        """Look until each range was counted at least once from now on."""
        with trio.fail_after(PATIENCE):
            await self.look(told)
            while any(one.rows is None for one in self.ranges):
                await self.look(told)
            for _ in self.ranges:  # each look counts one of them at least
                await self.look(told)

    @property
    def ranges(self) -> list[CountedRange]:
        """What the audit knows of the rows far below the position."""
        return list(self.late._seen["events"].ranges.ranges)

    async def look(self, told: int) -> str | None:
        """A look after everything up to `told` was sent; what is shown of the stream."""
        self.feed.sent_upto = told
        await self.late.look("events", self.feed)
        return self.troubles.why("stream", "events")


async def watch(db: Database, sql: str, method: str = "lock_watch", pace: StreamIntervals = StreamIntervals()) -> Watch:
    await schema.install(db, "stream")
    await db.execute(sql)
    stream = (await Registry(db).add("events", "events", "id", method=method)).stream
    return Watch(db, Feed(stream, (await Registry(db).lineages())["events"]), pace)


async def test_deletions_hide_no_late_row(database: Database) -> None:
    events = await watch(database, PLAIN)
    await database.execute("INSERT INTO events SELECT g FROM generate_series(1, 100) AS g WHERE g NOT IN (40, 41, 60)")
    assert await events.look(100) is None
    await database.execute("DELETE FROM events WHERE id BETWEEN 1 AND 30; INSERT INTO events VALUES (60), (41)")
    why = await events.look(100)
    assert why is not None
    assert "2 rows" in why
    assert "ids 41, 60:" in why
    assert "--method reservation" in why
    assert "token 40" in why
    assert events.feed.late_rows == 2
    await events.look(100)
    assert events.feed.late_rows == 2  # each once


async def test_a_late_row_whose_id_has_rows_already_is_found(database: Database) -> None:
    events = await watch(database, "CREATE TABLE events (id bigserial, body text); CREATE INDEX ON events (id)")
    await database.execute("INSERT INTO events SELECT g / 3 FROM generate_series(3, 302) AS g")
    assert await events.look(100) is None
    await database.execute("DELETE FROM events WHERE id < 10; INSERT INTO events VALUES (50), (50), (70)")
    why = await events.look(100)
    assert why is not None
    assert "3 rows" in why
    assert "ids 50, 70:" in why


async def test_the_window_is_narrower_where_ids_have_many_rows(database: Database) -> None:
    sql = "CREATE TABLE events (id bigserial, body text); CREATE INDEX ON events (id)"
    events = await watch(database, sql, pace=StreamIntervals(late_rows=100))
    await database.execute("INSERT INTO events SELECT g / 30 FROM generate_series(30, 3029) AS g")
    assert await events.look(100) is None
    assert events.late._seen["events"].window.after == 97
    assert await events.look(100) is None
    await database.execute("INSERT INTO events VALUES (99), (50)")
    why = await events.look(100)
    assert why is not None
    assert "ids 50, 99:" in why, "the one is in the window, the other in a range below it"


async def test_rows_that_come_in_order_or_are_changed_are_none(database: Database) -> None:
    events = await watch(database, PLAIN)
    for n in range(1, 6):
        await database.execute("INSERT INTO events SELECT nextval('events_id_seq') FROM generate_series(1, 6000)")
        await database.execute(
            "UPDATE events SET body = 'changed' WHERE id % 7 = 0; DELETE FROM events WHERE id % 11 = 0"
        )
        assert await events.look(6000 * n) is None
    events.feed.stream = replace(events.feed.stream, epoch="another")
    await database.execute("INSERT INTO events VALUES (22) ON CONFLICT DO NOTHING; DELETE FROM events WHERE id > 22")
    assert await events.look(22) is None


async def test_a_partition_that_is_attached_with_rows_in_it_has_words_of_its_own(database: Database) -> None:
    events = await watch(database, PARTITIONED)
    await database.execute("INSERT INTO events (body) SELECT 'a' FROM generate_series(1, 20000)")
    assert await events.look(20000) is None
    await database.execute(
        "CREATE TABLE archive (LIKE events); INSERT INTO archive SELECT g, 'old' FROM generate_series(5, 14) AS g;"
        "INSERT INTO archive VALUES (19999, 'old')"
    )
    await database.execute("ALTER TABLE events ATTACH PARTITION archive FOR VALUES IN ('old')")
    await database.execute("INSERT INTO events VALUES (15000, 'a')")
    why = await events.look(20000)
    assert why is not None
    assert (
        "public.archive was attached to the table of stream events with 11 rows at or below its position 20000" in why
    )
    assert "ids 5 to 19999" in why
    assert "token 4" in why
    assert "detach public.archive" in why
    assert "ids 15000:" in why  # and the late row elsewhere is not hidden by it
    assert events.feed.late_rows == 12


@pytest.mark.parametrize("kind", ["partition", "heir"])
async def test_rows_that_were_written_in_the_transaction_that_attached_their_table_are_late_rows(
    database: Database, kind: str
) -> None:
    events = await watch(database, PARTITIONED if kind == "partition" else PLAIN)
    await database.execute("INSERT INTO events (body) SELECT 'a' FROM generate_series(1, 20000)")
    assert await events.look(20000) is None
    await database.execute(
        "CREATE TABLE new (LIKE events); INSERT INTO new VALUES (7, 'new'), (19999, 'new');"
        "ALTER TABLE events ATTACH PARTITION new FOR VALUES IN ('new')"
        if kind == "partition"
        else "CREATE TABLE new () INHERITS (events); INSERT INTO new VALUES (7, 'new'), (19999, 'new')"
    )
    why = await events.look(20000)
    assert why is not None
    assert "2 rows turned up at or below position 20000 of stream events, among the ids 7 to 19999" in why
    assert "was attached" not in why
    await events.counted(20000)
    assert events.feed.late_rows == 2, "each once"


FAR = 100_000  # the position in the tests of rows far below it
GAP = "INSERT INTO events SELECT g FROM generate_series(1, 100000) AS g WHERE g NOT BETWEEN 20001 AND 50000"


async def far_below(database: Database) -> Watch:
    """A stream whose rows were all counted, with a gap far below its position."""
    events = await watch(database, PLAIN)
    await database.execute(GAP)
    await events.counted(FAR)
    assert events.troubles.why("stream", "events") is None
    return events


async def test_a_row_far_below_the_position_is_found_named_and_reported_once(database: Database) -> None:
    events = await far_below(database)
    await database.execute("INSERT INTO events VALUES (50000)")
    await events.counted(FAR)
    assert "1 row turned up at or below position 100000 of stream events, with the ids 50000:" in events.said
    assert "token 49999" in events.said
    await events.counted(FAR)
    assert events.feed.late_rows == 1
    await database.execute("INSERT INTO events VALUES (20001), (20002)")
    await events.counted(FAR)
    assert "with the ids 20001, 20002:" in events.said
    assert events.feed.late_rows == 3


@pytest.mark.parametrize("rows", [30_000, 29_999])
async def test_rows_that_are_inserted_in_bulk_far_below_the_position_are_found(database: Database, rows: int) -> None:
    events = await far_below(database)
    await database.execute("UPDATE events SET body = 'x' WHERE id <= $1", 30_000 - rows)
    await database.execute("INSERT INTO events SELECT g FROM generate_series(50000 - $1 + 1, 50000) AS g", rows)
    await events.counted(FAR)
    assert events.feed.late_rows == rows
    assert f"{rows:,} rows turned up" in events.said


@pytest.mark.long
async def test_more_rows_than_can_be_named_are_found_far_below_the_position(database: Database) -> None:
    events = await watch(database, "CREATE TABLE events (id bigserial, body text); CREATE INDEX ON events (id)")
    await database.execute(GAP)
    await events.counted(FAR)
    await database.execute("INSERT INTO events SELECT 20001 + g % 30000 FROM generate_series(0, 299999) AS g")
    await events.counted(FAR)
    assert events.feed.late_rows >= 100_000
    await events.counted(FAR)
    before = events.feed.late_rows
    await database.execute("INSERT INTO events VALUES (3)")
    await events.counted(FAR)
    assert events.feed.late_rows == before + 1


async def test_what_is_removed_or_changed_far_below_the_position_is_no_late_row_and_hides_none(
    database: Database,
) -> None:
    events = await far_below(database)
    await database.execute("DELETE FROM events WHERE id <= 15000; UPDATE events SET body = 'x' WHERE id % 3 = 0")
    await events.counted(FAR)
    assert events.troubles.why("stream", "events") is None
    await database.execute("UPDATE events SET body = 'y' WHERE id > 15000; INSERT INTO events VALUES (3), (30000)")
    await events.counted(FAR)
    assert events.feed.late_rows == 2
    assert "turned up at or below position 100000" in events.said


async def test_rows_that_were_looked_at_in_another_history_are_counted_anew(database: Database) -> None:
    events = await far_below(database)
    stream = events.feed.stream
    await database.execute("INSERT INTO events VALUES (30000), (40000)")
    events.feed.stream = await Registry(database).fork(stream, "restarted")  # it shares nothing: nothing was noted
    events.feed.lineage = (await Registry(database).lineages())["events"]
    await events.counted(FAR)
    assert events.feed.late_rows == 0
    await database.execute("INSERT INTO events VALUES (30001)")
    await events.counted(FAR)
    assert "with the ids 30001:" in events.said


async def test_a_child_that_inherits_with_rows_in_it_is_told_and_a_new_empty_partition_is_not(
    database: Database,
) -> None:
    events = await watch(database, PLAIN)
    await database.execute("INSERT INTO events (body) VALUES ('a'), ('b')")
    assert await events.look(2) is None
    await database.execute("CREATE TABLE empty () INHERITS (events); INSERT INTO empty (body) VALUES ('c')")
    assert await events.look(3) is None
    await database.execute("CREATE TABLE full_one (LIKE events); INSERT INTO full_one VALUES (1, 'x')")
    await database.execute("ALTER TABLE full_one INHERIT events")
    why = await events.look(3)
    assert why is not None
    assert "public.full_one was attached" in why
    assert "empty" not in why


@pytest.mark.parametrize(
    ("method", "words"), [("reservation", "had not reserved"), ("lock_watch", "--method reservation")]
)
async def test_the_remedy_fits_the_method(database: Database, method: str, words: str) -> None:
    events = await watch(database, PLAIN, method)
    await events.look(10)
    await database.execute("ALTER TABLE events DISABLE TRIGGER ALL; INSERT INTO events VALUES (4)")
    assert words in (await events.look(10) or "")


async def test_a_locked_table_delays_a_look_by_little_and_hides_nothing(database: Database) -> None:
    events = await watch(database, PLAIN)
    await database.execute("INSERT INTO events VALUES (1), (3)")
    assert await events.look(3) is None
    async with database.connection() as connection, connection.transaction():
        await connection.execute("LOCK TABLE events; INSERT INTO events VALUES (2)")
        with trio.fail_after(60):
            assert await events.look(3) is None
    assert "ids 2:" in (await events.look(3) or "")


async def test_what_one_stream_fails_of_is_its_trouble_and_the_others_are_looked_at(database: Database) -> None:
    events = await watch(database, PLAIN, pace=StreamIntervals(late_look=0.05, late_lasts=1.0))
    broken = replace(events.feed, stream=replace(events.feed.stream, name="broken", id_column="gone"))
    events.late._served = {"broken": broken, "events": events.feed}
    events.feed.sent_upto = 5
    async with trio.open_nursery() as nursery:
        nursery.start_soon(events.late.run)
        with trio.fail_after(60):
            while "events" not in events.late._seen:
                await trio.sleep(0.02)
            assert "does not exist" in (events.troubles.why("stream", "broken") or "")
            await database.execute("INSERT INTO events VALUES (4)")
            while events.troubles.why("stream", "events") is None:
                await trio.sleep(0.02)
            while events.troubles.why("stream", "events") is not None:  # shown for a second, and over
                await trio.sleep(0.02)
        nursery.cancel_scope.cancel()


async def test_a_failure_of_postgres_leaves_a_look_with_an_error(database: Database) -> None:
    events = await watch(database, PLAIN)
    events.feed.stream = replace(events.feed.stream, id_column="gone")
    with pytest.raises(DatabaseError):
        await events.look(1)


async def test_a_child_that_is_attached_below_a_position_that_has_moved_since_the_last_look_is_told(
    database: Database,
) -> None:
    events = await watch(database, PLAIN)
    assert await events.look(0) is None
    await database.execute("SELECT setval('events_id_seq', 10)")
    await database.execute("INSERT INTO events (body) SELECT 'x' FROM generate_series(1, 1000)")
    await database.execute("CREATE TABLE old (LIKE events); INSERT INTO old VALUES (5, 'x'), (6, 'x')")
    await database.execute("ALTER TABLE old INHERIT events")
    why = await events.look(1010)
    assert why is not None
    assert "public.old was attached to the table of stream events with 2 rows" in why


async def test_late_rows_with_negative_ids_are_told(database: Database) -> None:
    events = await watch(database, PLAIN)
    await database.execute("INSERT INTO events VALUES (-1000, 'x'), (-990, 'x')")
    assert await events.look(-989) is None
    await database.execute("INSERT INTO events VALUES (-995, 'late')")
    assert "-995" in (await events.look(-980) or "")
