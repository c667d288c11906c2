"""The audit alone finds rows that were not sent, whatever lost them, and readers end complete."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Any

import pytest
import trio

from replicad.daemon.journal import Channel
from replicad.postgres.bridge import Database
from replicad.streams.registry import Registry, RetentionChange, Rewound
from replicad.streams.row_pieces import Piece
from replicad.streams.row_text import RowText
from replicad.streams.rows import RowSource
from replicad.streams.serving import audit
from replicad.streams.serving.intervals import StreamIntervals
from replicad.streams.serving.served_stream import ServedStream
from tests.conftest import PATIENCE
from tests.daemons import Daemon, Paces
from tests.integration.conftest import Connect, Netcat

QUICK = Paces(streams=StreamIntervals(late_look=0.1, audit_after=0.2, look=0.1))
_ROW = re.compile(r"RDATA events \S+ (\S+) (.*)")

Start = Callable[..., AbstractAsyncContextManager[Daemon]]


@pytest.fixture
def paces() -> Paces:
    return QUICK


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long a look takes on a busy machine."""
    monkeypatch.setattr(audit, "IDLE_SHARE", 10.0)


class Reader:
    """Keeps the rows that it is sent, as a client does: after a POSITION that goes back, those above it come again."""

    def __init__(self, nc: Netcat) -> None:
        self.nc = nc
        self.bodies: Counter[str] = Counter()
        self.rows = 0
        self._batch: list[str] = []
        self.ids: dict[int, list[str]] = {}

    async def read_until(self, done: Callable[[set[int]], bool]) -> None:
        """Read until the ids that it has are those that it should have."""
        while not done(set(self.ids)):
            self.take(await self.nc.line())

    async def read_both(self, first: int, last: int) -> None:
        """Read until it has these two ids."""
        while not (first in self.ids and last in self.ids):
            self.take(await self.nc.line())

    def take(self, line: str) -> None:
        if row := _ROW.fullmatch(line):
            self.rows += 1
            self._batch.append(row.group(2))
            if row.group(1) != "batch":
                self.ids[int(row.group(1))] = self._batch
                self._batch = []
        elif line.startswith("POSITION events"):
            _, _, _, before, now = line.split()
            self.ids = {id: rows for id, rows in self.ids.items() if int(now) >= int(before) or id <= int(now)}


async def write(events: Database, rows: int) -> None:
    await events.execute("INSERT INTO events (body) SELECT to_jsonb(g) FROM generate_series(1, $1) AS g", rows)


async def settled(daemon: Daemon, rows: int) -> None:
    """Wait until so many rows were compared."""
    with trio.fail_after(PATIENCE):
        while daemon.publisher.served["events"].tally.audited_rows < rows:
            await trio.sleep(0.05)


def reads_empty(monkeypatch: pytest.MonkeyPatch, feed: ServedStream) -> None:
    """A read whose snapshot is older than its lock, on a table that was rewritten meanwhile: it has no rows."""
    copied = RowSource.copy_vector

    async def copy(self: RowSource, db: Any, ranges: Any, sink: Any, *args: Any, **others: Any) -> int:
        if min(low for low, _ in ranges.values()) >= 5:
            monkeypatch.setattr(RowSource, "copy_vector", copied)
            return 0
        return await copied(self, db, ranges, sink, *args, **others)

    monkeypatch.setattr(RowSource, "copy_vector", copy)


def position_runs_ahead(monkeypatch: pytest.MonkeyPatch, feed: ServedStream) -> None:
    """A value of the sequence that was never given out here is published as a position."""
    taken, epoch = ServedStream.follow, feed.stream.epoch

    def take(self: ServedStream, reading: Any) -> None:
        if reading.position is not None and self.stream.epoch == epoch:
            reading = replace(reading, position=max(8, reading.position))
        taken(self, reading)

    monkeypatch.setattr(ServedStream, "follow", take)
    feed.follow(feed.followed)


def rows_are_filtered(monkeypatch: pytest.MonkeyPatch, feed: ServedStream) -> None:
    """Row security hides rows from what reads them, until it is mended."""
    text = RowText.vector_sql
    copies = Counter[str]()

    def filtered(self: RowText, ranges: Any, *others: Any) -> str:
        copies["of rows"] += any(high > 5 for _, high in ranges.values())
        found = text(self, ranges, *others)
        return found.replace("WHERE", "WHERE t.body <> '2'::jsonb AND") if copies["of rows"] <= 1 else found

    async def never(*_: object) -> None:
        return None

    monkeypatch.setattr(RowText, "vector_sql", filtered)
    monkeypatch.setattr(RowSource, "_copy_few", never)


def lane_drops_a_chunk(monkeypatch: pytest.MonkeyPatch, feed: ServedStream) -> None:
    """A chunk does not get into the journal."""
    appended = Channel.append

    async def append(self: Channel, data: bytes, **how: Any) -> None:
        if data.startswith(b"RDATA events master 6 "):
            monkeypatch.setattr(Channel, "append", appended)
            return
        await appended(self, data, **how)

    monkeypatch.setattr(Channel, "append", append)


LOSSES = [reads_empty, position_runs_ahead, rows_are_filtered, lane_drops_a_chunk]
# another table has the name, and the sequence of the old one feeds it; nothing stops the stream for it
UNSTOPPED = (
    "CREATE OR REPLACE FUNCTION replicad.stream_name_fault(s replicad.stream, OUT problem text, OUT remedy text)"
    " LANGUAGE sql STABLE AS 'SELECT NULL, NULL'"
)
SWAP = (
    "CREATE TABLE new (LIKE events INCLUDING ALL); INSERT INTO new SELECT * FROM events;"
    "BEGIN; ALTER TABLE events RENAME TO old; ALTER TABLE new RENAME TO events; COMMIT"
)


async def test_the_audit_alone_finds_the_rows_of_a_swapped_table_and_readers_are_told_and_end_complete(
    events: Database, daemon: Daemon, netcat: Connect
) -> None:
    await write(events, 5)
    await settled(daemon, 5)
    async with netcat() as nc:
        reader = Reader(nc)
        await nc.send("REPLICATE events EARLIEST")
        await reader.read_until(lambda ids: len(ids) == 5)
        await events.execute(UNSTOPPED)
        await events.execute(SWAP)
        await write(events, 3)
        lines = await nc.until("ERROR .*stream events does not move: .*")
        assert "POSITION events master 5 8" in lines, "the rows were passed"
        assert "3 rows at or below its position 8 that were not sent, with the ids 6, 7, 8" in lines[-1]
        remedy = re.search(r"run: replicad streams alter events --table (\S+);", lines[-1])
        assert remedy is not None
        await write(events, 1)  # waits
        await Registry(events).alter_table("events", remedy[1])
        reader.take("POSITION events master 8 0")
        await reader.read_until(lambda ids: ids == set(range(1, 10)))
    assert (await Registry(events).lineages())["events"].present.reason == "table_changed"


async def test_a_table_that_was_swapped_and_swapped_back_is_no_loss(events: Database, daemon: Daemon) -> None:
    await write(events, 5)
    await settled(daemon, 5)
    await events.execute(UNSTOPPED)
    await events.execute(f"{SWAP}; DELETE FROM events; INSERT INTO events SELECT g FROM generate_series(1, 3) g")
    feed = daemon.publisher.served["events"]
    before = feed.tally.auditing
    with trio.fail_after(PATIENCE):
        while feed.tally.auditing < before + 0.001:
            await trio.sleep(0.05)
    await trio.sleep(0.3)  # that look has ended, and another one
    await events.execute("ALTER TABLE events RENAME TO new; ALTER TABLE old RENAME TO events")
    await write(events, 3)
    await settled(daemon, 8)
    assert (feed.tally.skipped, feed.strayed) == (0, None)


@pytest.mark.parametrize("loss", LOSSES)
async def test_the_audit_alone_finds_a_loss_and_readers_end_complete(
    loss: Callable[[pytest.MonkeyPatch, ServedStream], None],
    events: Database,
    daemon: Daemon,
    netcat: Connect,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    await write(events, 5)
    async with netcat() as nc, netcat() as plain:
        reader = Reader(nc)
        await nc.send("REPLICATE events EARLIEST")
        await plain.send("REPLICATE")
        await reader.read_until(lambda ids: len(ids) == 5)
        loss(monkeypatch, daemon.publisher.served["events"])
        await trio.sleep(0.3)
        await write(events, 3)
        await reader.read_until(lambda ids: ids == set(range(1, 9)))
        await plain.until("RDATA events master 8 .*")
        await write(events, 1)  # the stream goes on
        await reader.read_until(lambda ids: ids == set(range(1, 10)))
    why = daemon.troubles.why("stream", "events") or ""
    assert "readers that are past these ids were not sent them" in why
    assert "Readers are sent back to token" in why
    lineage = (await Registry(events).lineages())["events"]
    assert [one.reason for one in lineage.generations] == ["added", "rows_skipped"]
    assert daemon.publisher.served["events"].tally.skipped in {1, 2, 3}


@pytest.mark.parametrize("paces", [QUICK])
async def test_a_piece_of_a_catch_up_that_is_cut_is_found(
    events: Database, daemon: Daemon, netcat: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = Piece.lines

    def cut(self: Piece, after: int, upto: int) -> Any:
        monkeypatch.setattr(Piece, "lines", lines)
        return list(lines(self, after, upto))[:-1]

    await write(events, 3000)
    await settled(daemon, 3000)
    monkeypatch.setattr(Piece, "lines", cut)
    async with netcat() as nc:
        reader = Reader(nc)
        await nc.send("REPLICATE events EARLIEST")
        await reader.read_until(lambda ids: ids == set(range(1, 3001)))
    assert "were not sent" in (daemon.troubles.why("stream", "events") or "")


async def test_what_is_skipped_trimmed_removed_changed_or_shares_an_id_is_no_loss(
    database: Database, daemon: Daemon, netcat: Connect
) -> None:
    await database.execute(
        "CREATE TABLE events (id bigserial, instance_name text, body jsonb); CREATE INDEX ON events (id)"
    )
    await Registry(database).add("events", "public.events", "id", instance_column="instance_name", row="body")
    await daemon.publisher.find("events")
    async with netcat() as nc:
        await nc.send("REPLICATE events NOW")
        for name in ("a", "", None, "b c"):
            await database.execute("INSERT INTO events (instance_name, body) VALUES ($1, '1'), ($1, '2')", name)
        await database.execute(
            "INSERT INTO events (id, body) SELECT currval('events_id_seq'), '3' FROM generate_series(1, 5)"
        )
        await database.execute("INSERT INTO events (body) VALUES ('4'), ('5'), ('6'), ('7')")
        await nc.until("RDATA events master 12 .*")  # what is removed below was sent
        await database.execute("SELECT replicad.stream_skip_id('events', 2, 'in the way')")
        await database.execute("DELETE FROM events WHERE id IN (3, 9); UPDATE events SET body = '0' WHERE id = 4")
        await settled(daemon, 15)
        await database.execute("SELECT replicad.stream_trim('events', 4)")
        await database.execute("INSERT INTO events (body) SELECT '8' FROM generate_series(1, 300)")
        await settled(daemon, 315)
    assert daemon.troubles.of("stream", "events") == []
    assert daemon.publisher.served["events"].tally.skipped == 0


async def test_a_fork_makes_what_was_sent_above_the_shared_position_void(
    events: Database, daemon: Daemon, netcat: Connect
) -> None:
    async with netcat() as nc:
        await nc.send("REPLICATE events NOW")
        await nc.until("POSITION .*")
        await write(events, 5)
        await nc.until("RDATA events master 5 .*")
        await events.execute("TRUNCATE events RESTART IDENTITY")
        await write(events, 20)
        await nc.until("RDATA events master 20 .*")
        await settled(daemon, 20)
    assert daemon.publisher.served["events"].tally.skipped == 0


@pytest.mark.parametrize("rows", [1, 20_000])
async def test_rows_that_turn_up_far_below_the_position_are_delivered(
    events: Database, daemon: Daemon, netcat: Connect, rows: int
) -> None:
    """The ids there were compared with what was sent long ago. A row has an id of its own, or many come in bulk."""
    await events.execute(  # one transaction
        "INSERT INTO events (body) SELECT '1' FROM generate_series(1, 60000);"
        f"DELETE FROM events WHERE id BETWEEN 5000 AND {5000 + rows - 1}"
    )
    async with netcat() as nc:
        reader = Reader(nc)
        await nc.send("REPLICATE events EARLIEST")
        with trio.fail_after(PATIENCE):
            await reader.read_both(1, 60_000)
            while not far_counted(daemon, 50_000):
                await trio.sleep(0.05)
        await events.execute("INSERT INTO events SELECT 5000 + g, '2' FROM generate_series(0, $1 - 1) AS g", rows)
        with trio.fail_after(PATIENCE):
            await reader.read_both(5000, 60_000)
        assert len(reader.ids) == 60_000
    assert daemon.publisher.served["events"].tally.skipped == rows
    assert "Readers are sent back to token 4999" in (daemon.troubles.why("stream", "events") or "")


def far_counted(daemon: Daemon, upto: int) -> bool:
    """Whether the audit has counted the rows up to an id."""
    seen = daemon.publisher.audit._seen.get("events")
    return seen is not None and seen.ranges.upto >= upto and all(one.rows is not None for one in seen.ranges.ranges)


@pytest.mark.parametrize("paces", [Paces(streams=replace(QUICK.streams, kept_look=0.0))])
@pytest.mark.parametrize("emptied", [False, True])
async def test_a_reader_that_comes_back_after_rows_were_removed_is_told(
    events: Database, daemon: Daemon, netcat: Connect, *, emptied: bool
) -> None:
    await write(events, 20)
    with trio.fail_after(PATIENCE):
        while await events.fetch_value("SELECT lowest FROM replicad.stream_kept") != 1:
            await trio.sleep(0.05)
    await settled(daemon, 20)
    await events.execute("DELETE FROM events" if emptied else "DELETE FROM events WHERE id <= 10")
    first = 20 if emptied else 10
    with trio.fail_after(PATIENCE):
        while (await Registry(events).load_stream("events")).trimmed_upto != first:
            await trio.sleep(0.05)
    async with netcat() as nc:
        await nc.send(f"REPLICATE events {first - 1}")
        await nc.until(f"ERROR token_expired: no rows of events up to {first} are left, .*")
        await nc.send(f"REPLICATE events {first}")
        await nc.until("POSITION events .*")
    async with events.connection() as slow, slow.transaction():  # a low id that commits late is not taken for removed
        await slow.execute("INSERT INTO events (body) VALUES ('1')")
        await write(events, 3)
        await trio.sleep(0.5)
    await write(events, 1)
    await settled(daemon, 25)
    assert (await Registry(events).load_stream("events")).trimmed_upto == first


@pytest.mark.parametrize("paces", [Paces(streams=replace(QUICK.streams, kept_look=0.0))])
async def test_rows_that_were_removed_and_come_back_reach_old_and_new_readers(
    events: Database, daemon: Daemon, netcat: Connect
) -> None:
    """A table that is emptied and loaded again from a copy, and a row in it that readers never had."""
    everything = set(range(1, 31))
    await write(events, 30)
    await settled(daemon, 30)
    await events.execute("CREATE TABLE copy AS TABLE events; TRUNCATE events")
    with trio.fail_after(PATIENCE):
        while (await Registry(events).load_stream("events")).trimmed_upto != 30:
            await trio.sleep(0.05)
    async with netcat() as follower:
        old = Reader(follower)
        await follower.send("REPLICATE events 30")
        await follower.until("POSITION events .*")
        await events.execute("INSERT INTO events TABLE copy")
        with trio.fail_after(PATIENCE):
            await old.read_until(lambda ids: ids == everything)
    async with netcat() as newcomer:
        new = Reader(newcomer)
        await newcomer.send("REPLICATE events EARLIEST")
        with trio.fail_after(PATIENCE):
            await new.read_until(lambda ids: ids == everything)


@pytest.mark.parametrize("paces", [Paces(streams=replace(QUICK.streams, kept_look=0.0))])
async def test_a_partition_that_was_detached_and_comes_back_is_read_from_the_beginning(
    database: Database, daemon: Daemon, netcat: Connect
) -> None:
    await database.execute(
        "CREATE TABLE events (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, body jsonb) PARTITION BY RANGE (id);"
        "CREATE TABLE low PARTITION OF events FOR VALUES FROM (1) TO (11);"
        "CREATE TABLE high PARTITION OF events FOR VALUES FROM (11) TO (1000)"
    )
    await Registry(database).add("events", "public.events", "id", row="body")
    await daemon.publisher.find("events")
    await write(database, 20)
    await settled(daemon, 20)
    with trio.fail_after(PATIENCE):
        while await database.fetch_value("SELECT lowest FROM replicad.stream_kept") != 1:
            await trio.sleep(0.05)
    await database.execute("ALTER TABLE events DETACH PARTITION low")
    with trio.fail_after(PATIENCE):
        while (await Registry(database).load_stream("events")).trimmed_upto != 10:
            await trio.sleep(0.05)
    await database.execute("ALTER TABLE events ATTACH PARTITION low FOR VALUES FROM (1) TO (11)")
    with trio.fail_after(PATIENCE):
        while (await Registry(database).load_stream("events")).trimmed_upto != 0:
            await trio.sleep(0.05)
        async with netcat() as nc:
            reader = Reader(nc)
            await nc.send("REPLICATE events EARLIEST")
            await reader.read_until(lambda ids: ids == set(range(1, 21)))


async def test_a_trim_that_comes_after_the_look_at_the_lowest_id_stays(events: Database, daemon: Daemon) -> None:
    await write(events, 20)
    await settled(daemon, 20)
    with trio.fail_after(PATIENCE):
        while not await events.fetch_value("SELECT count(*) FROM replicad.stream_position WHERE position = 20"):
            await trio.sleep(0.05)
    before = await Registry(events).load_stream("events")
    await events.execute("SELECT replicad.stream_trim('events', 5); SELECT replicad.stream_trim('events', 5)")
    assert await Registry(events).keep(before, 1, 20, before.trimmed_upto) == RetentionChange(None, None)
    assert (await Registry(events).load_stream("events")).trimmed_upto == 5


async def test_a_temporary_child_of_another_session_disturbs_nothing(events: Database, daemon: Daemon) -> None:
    async with events.connection() as other:
        await other.execute("CREATE TEMPORARY TABLE child () INHERITS (events)")
        await other.execute("INSERT INTO child (body) VALUES ('1')")
        await write(events, 20)
        await settled(daemon, 20)
        assert daemon.troubles.of("stream", "events") == []
        assert daemon.publisher.served["events"].tally.skipped == 0


async def test_rows_are_only_reported_where_the_setting_says_so(start_daemon: Start, database: Database) -> None:
    async with start_daemon(late_rows="report") as daemon:
        await database.execute("CREATE TABLE events (id bigserial PRIMARY KEY, body jsonb)")
        await Registry(database).add("events", "public.events", "id", row="body")
        feed = await daemon.publisher.find("events")
        early = await database.fetch_value("SELECT nextval('events_id_seq')")
        await write(database, 3)
        await settled(daemon, 3)
        await database.execute("INSERT INTO events VALUES ($1, '0')", early)
        with trio.fail_after(PATIENCE):
            while not feed.late_rows:
                await trio.sleep(0.05)
        assert "begin again at token 0" in (daemon.troubles.why("stream", "events") or "")
        assert len((await Registry(database).lineages())["events"].generations) == 1


async def test_rows_that_are_never_read_are_delivered_once_and_reported(
    events: Database, daemon: Daemon, netcat: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = RowText.vector_sql

    def filtered(self: RowText, *args: Any) -> str:
        return text(self, *args).replace("WHERE", "WHERE t.body <> '2'::jsonb AND")

    async def never(*_: object) -> None:
        return None

    monkeypatch.setattr(RowText, "vector_sql", filtered)
    monkeypatch.setattr(RowSource, "_copy_few", never)
    async with netcat() as nc:
        await nc.send("REPLICATE events NOW")
        await write(events, 3)
        with trio.fail_after(PATIENCE):
            while "did not get them" not in (daemon.troubles.why("stream", "events") or ""):
                await trio.sleep(0.05)
        await trio.sleep(1)
        await write(events, 1)
        await nc.until("RDATA events master 4 .*")
    reasons = [one.reason for one in (await Registry(events).lineages())["events"].generations]
    assert reasons == ["added", "rows_skipped"]


async def test_a_writer_that_breaks_its_rule_again_and_again_takes_readers_back_less_and_less_often(
    events: Database, daemon: Daemon
) -> None:
    await write(events, 100)
    await settled(daemon, 100)
    stream = await Registry(events).load_stream("events")
    first = await Registry(events).rewind(stream, 50)
    assert first.generation is not None
    assert await Registry(events).rewind(stream, 40) == Rewound(None, None), "another daemon did it"
    stream = await Registry(events).load_stream("events")
    second = await Registry(events).rewind(stream, 40)
    assert second.generation is None
    assert second.wait is not None
    assert 5 < second.wait <= 10
    await events.execute("UPDATE replicad.stream_generation SET created_at = created_at - interval '11 s'")
    assert (await Registry(events).rewind(stream, 40)).generation is not None
    stream = await Registry(events).load_stream("events")
    third = await Registry(events).rewind(stream, 30)
    assert third.wait is not None
    assert 15 < third.wait <= 20
