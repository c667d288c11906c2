"""FEDERATION_ACK: what all senders of a stream have may go, and nothing more; who holds it back is named."""

from __future__ import annotations

import re

import pytest
import trio

from replicad.cli import app
from replicad.postgres import schema
from replicad.postgres.bridge import Database
from replicad.sender.intake import Upstream, client_upstream
from replicad.streams.registry import Registry
from replicad.streams.serving.intervals import StreamIntervals
from tests.conftest import psql
from tests.daemons import Daemon, Paces

from .conftest import PATIENCE, Connect

HELLO = ("SERVER .*",)


@pytest.fixture
def paces() -> Paces:
    return Paces(streams=StreamIntervals(acks=0.05))


async def known(database: Database, stream: str, **wanted: int | None) -> None:
    """Wait until the senders of a stream are these."""
    with trio.fail_after(PATIENCE):
        while {one.instance: one.token for one in await Registry(database).acks(stream)} != wanted:
            await trio.sleep(0.02)


async def published(database: Database, position: int) -> None:
    with trio.fail_after(PATIENCE):
        while "events" not in (found := await Registry(database).published()) or found["events"].position < position:
            await trio.sleep(0.02)


@pytest.fixture
async def filled(events: Database, netcat: Connect) -> Database:
    await events.execute("INSERT INTO events (body) SELECT '1' FROM generate_series(1, 100)")
    async with netcat() as nc:
        await nc.send("REPLICATE events EARLIEST")
        await nc.until("RDATA events master 100 1")
    await published(events, 100)
    return events


async def test_an_ack_is_of_the_stream_that_it_names_or_that_its_connection_follows(
    filled: Database, daemon: Daemon, netcat: Connect
) -> None:
    await filled.execute("CREATE TABLE federation (id bigserial PRIMARY KEY)")
    await Registry(filled).add("federation", "public.federation", "id")
    await daemon.publisher.find("federation")
    await filled.execute("INSERT INTO federation SELECT FROM generate_series(1, 9)")
    async with netcat() as one, netcat() as two, netcat() as all_streams:
        for nc in (one, two, all_streams):
            await nc.expect(*HELLO)
        await one.send("FEDERATION_ACK nobody 5")  # follows nothing, names nothing: of no stream
        await one.send("REPLICATE events 50 linear")
        await one.until("RDATA events master 100 1")
        await one.send("FEDERATION_ACK one 90", "FEDERATION_ACK one 60")
        await two.send("REPLICATE federation EARLIEST", "FEDERATION_ACK two 40 events")
        await all_streams.send("REPLICATE")
        await all_streams.until("POSITION federation .*")
        await two.until("RDATA federation master 9 .*")
        await all_streams.send("FEDERATION_ACK all 7")
        await known(filled, "events", one=90, two=40)
        await known(filled, "federation", all=7)
        await two.send("REPLICATE events", "FEDERATION_ACK two 8")  # of which of the two?
        await two.send("FEDERATION_ACK two 101 events", "FEDERATION_ACK two 1 nowhere", "STREAMS")
        await two.until("ERROR token_ahead: FEDERATION_ACK 101 is ahead of stream events, whose position is 100")
        await two.expect("ERROR stream_refused: stream nowhere is not served, .*")
        await two.until("STREAMS.*")
        await one.send("FEDERATION_ACK one 95")
        await known(filled, "events", one=95, two=40)


async def test_trimming_removes_what_all_senders_have_and_nothing_more(filled: Database, daemon: Daemon) -> None:
    async def removed() -> int:
        return (await Registry(filled).trim("events", acked=True)).rows

    assert await removed() == 0, "nobody is known"
    address = daemon.addresses[0]

    async def follow(upstream: Upstream) -> None:
        async for _ in upstream.follow():
            pass

    async with (
        client_upstream(address.host, address.port, name="s1")({"events": "50"}) as upstream,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(follow, upstream)  # acks go over the connection that follows
        upstream.acknowledge("s1", "events", 70)
        upstream.acknowledge("s1", "events", 80)
        await known(filled, "events", s1=80)
        assert await removed() == 80
        await schema.install(filled, "federation", "replicad")
        await filled.execute(
            "INSERT INTO replicad.federation_sender VALUES ('events', 's2', 'events', NULL, '{s1,s2}')"
        )
        upstream.acknowledge("s1", "events", 100)
        await known(filled, "events", s1=100, s2=None)
        assert await removed() == 0, "a sender that has said nothing needs all of it"
        upstream.acknowledge("s2", "events", 85)
        await known(filled, "events", s1=100, s2=85)
        nursery.cancel_scope.cancel()
    assert await removed() == 5
    await filled.execute("DELETE FROM replicad.federation_sender")  # s2 is gone for good, and still in the way
    assert await removed() == 0
    assert not await Registry(filled).forget_acks("events", "s3")
    assert await Registry(filled).forget_acks("events", "s2")
    assert await removed() == 15


def test_the_command_names_who_holds_rows_back_until_it_is_forgotten(
    database_url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REPLICAD_DATABASE", database_url)

    def run(*words: str, status: int = 0) -> str:
        assert app.run(["streams", *words]) == status
        out, err = capsys.readouterr()
        return err.splitlines()[-1] if status else out

    psql(database_url, "CREATE TABLE events (id bigserial PRIMARY KEY)")
    run("add", "events", "--table", "public.events", "--id", "id")
    psql(database_url, "INSERT INTO events SELECT FROM generate_series(1, 100)")
    psql(
        database_url,
        "SELECT replicad.stream_note(number, replicad.stream_epoch(s), 90, '{}', '{}') FROM replicad.stream s",
    )
    assert run("trim", "events", "--acked") == "0 rows removed\nno sender has acknowledged events yet\n"
    assert run("acks", "events") == "no sender has acknowledged events\n"
    psql(
        database_url,
        "SELECT replicad.stream_ack_note('{events,events}', ARRAY[e, e], '{s1,s2}', '{100,60}')"
        " FROM replicad.stream s, replicad.stream_epoch(s) e",
    )
    said = run("trim", "events", "--acked").splitlines()
    assert said[0] == "60 rows removed; the stream begins after 60"
    assert re.fullmatch(r"s2 is the furthest behind: it has acknowledged 60, at 20[-0-9]+ [:0-9]+ UTC", said[1])
    assert [line.split()[:2] for line in run("acks", "events").splitlines()[1:]] == [["s2", "60"], ["s1", "100"]]
    assert "s2" in run("acks", "events", "--forget", "s3")
    assert "s2" not in run("acks", "events", "--forget", "s2")
    assert run("trim", "events", "--acked").startswith("30 rows removed; the stream begins after 90\n"), "published"
    assert "--acked" in run("trim", "events", "--acked", "--before", "9", status=2)


async def test_a_restart_of_the_ids_takes_back_what_was_acknowledged(filled: Database, netcat: Connect) -> None:
    async with netcat() as nc:
        await nc.send("REPLICATE events 50")
        await nc.until("RDATA events master 100 1")
        await nc.send("FEDERATION_ACK s1 90")
        await known(filled, "events", s1=90)
        await filled.execute("DELETE FROM events; ALTER SEQUENCE events_id_seq RESTART")
        await nc.until("POSITION events master 100 \\d")
        await known(filled, "events", s1=0)
        await filled.execute("INSERT INTO events (body) SELECT '2' FROM generate_series(1, 30)")
        await nc.until("RDATA events master 30 2")
        assert (await Registry(filled).trim("events", acked=True)).rows == 0
        await nc.send("FEDERATION_ACK s1 10")
        await known(filled, "events", s1=10)
        await published(filled, 30)
    assert (await Registry(filled).trim("events", acked=True)).rows == 10


async def test_an_ack_of_the_history_before_a_fork_removes_no_row_of_the_one_after(
    filled: Database, daemon: Daemon, netcat: Connect
) -> None:
    """Another daemon, or the primary before a failover, had published ids that are other rows now."""
    async with netcat() as reader, netcat() as other:
        await reader.send("REPLICATE events EARLIEST")
        await reader.until("RDATA events master 100 1")
        await filled.execute(
            "SELECT replicad.stream_fork(s.number, replicad.stream_epoch(s), 'promoted') FROM replicad.stream s"
        )
        with trio.fail_after(PATIENCE):
            while daemon.publisher.served["events"].lineage.shared_by_all is None:
                await trio.sleep(0.02)
        await filled.execute("INSERT INTO events (body) SELECT '2' FROM generate_series(1, 30)")
        await reader.until("RDATA events master 130 2")
        await other.send("FEDERATION_ACK s1 120 events", "FEDERATION_ACK s1 131 events", "FEDERATION_ACK s1 90 events")
        await other.until(
            "ERROR token_ahead: FEDERATION_ACK 120 is ahead of 100, where the history .* follows the stream"
        )
        await other.until("ERROR token_ahead: FEDERATION_ACK 131 is ahead of stream events, whose position is 130")
        await known(filled, "events", s1=90)
        await published(filled, 130)
        assert (await Registry(filled).trim("events", acked=True)).rows == 90
        await reader.send("FEDERATION_ACK s1 131", "FEDERATION_ACK s1 120")  # it was sent these rows
        await reader.until("ERROR token_ahead: FEDERATION_ACK 131 .*")
        await known(filled, "events", s1=120)
        assert (await Registry(filled).trim("events", acked=True)).rows == 30


async def test_a_fork_leaves_all_rows_before_it_to_readers_that_come_later(
    filled: Database, daemon: Daemon, netcat: Connect
) -> None:
    """Rows that nobody has trimmed are not taken for trimmed, whether the daemon has noticed the fork or not."""
    await filled.execute(
        "SELECT replicad.stream_fork(s.number, replicad.stream_epoch(s), 'promoted') FROM replicad.stream s"
    )
    async with netcat() as early:
        await early.send("REPLICATE events EARLIEST")
        await early.until("RDATA events master 1 1")
        await early.until("RDATA events master 100 1")
    with trio.fail_after(PATIENCE):
        while daemon.publisher.served["events"].lineage.shared_by_all is None:
            await trio.sleep(0.02)
    for token in ("EARLIEST", "0"):
        async with netcat() as late:
            await late.send(f"REPLICATE events {token}")
            await late.until("RDATA events master 1 1")
            await late.until("RDATA events master 100 1")
    assert await filled.fetch_value("SELECT trimmed_upto FROM replicad.stream") is None
    await filled.execute("UPDATE replicad.stream SET trimmed_upto = 40")
    await filled.execute(
        "SELECT replicad.stream_fork(s.number, replicad.stream_epoch(s), 'promoted') FROM replicad.stream s"
    )
    assert await filled.fetch_value("SELECT trimmed_upto FROM replicad.stream") == 40
