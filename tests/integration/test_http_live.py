"""Streams as server-sent events: nothing is lost or sent twice, and all bounds are those of TCP."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import trio

from replicad.config.access import AccessFile, read_access
from replicad.config.settings import ServerSettings
from replicad.postgres.bridge import Database
from replicad.streams.registry import Registry
from tests.conftest import PATIENCE
from tests.daemons import Daemon
from tests.sse import Event, EventSource, event_source

from .test_http import ANY_PORT, ask, bearer

Start = Callable[..., AbstractAsyncContextManager[Daemon]]
LIVE = "/streams/events/live"
SECRET = "a-secret-of-enough-characters"


@pytest.fixture
def settings() -> ServerSettings:
    return ServerSettings(listen=ANY_PORT, http=ANY_PORT, server_name="example.com")


async def insert(db: Database, *bodies: int) -> None:
    await db.execute("INSERT INTO events (body) SELECT to_jsonb(g) FROM unnest($1::int[]) AS g", list(bodies))


async def test_a_reader_resumes_by_ids_through_restarts_and_has_each_row_once(
    events: Database, start_daemon: Start
) -> None:
    seen: list[Event] = []

    async def read(source: EventSource, turn: int) -> None:
        assert (source.status, source.headers["content-type"]) == (200, "text/event-stream")
        first = await source.next()
        assert (first.name, first.data["instance"], first.data["new"]) == ("position", "master", first.data["prev"])
        while len(seen) < 300 * turn - 150:
            seen.append(await source.until("message"))
        await insert(events, *range(300 * turn, 300 * turn + 300))
        while len(seen) < 300 * turn:
            seen.append(await source.until("message"))

    token = "EARLIEST"
    await insert(events, *range(300))
    for turn in range(1, 4):
        async with AsyncExitStack() as stack:
            async with start_daemon() as daemon:
                source = await stack.enter_async_context(event_source(daemon.http, LIVE, token))
                await read(source, turn)
            refused = await source.until("refused")
            assert refused.data["code"] == "server_stopping"
            token = source.id
    assert [event.data["row"] for event in seen] == list(range(900))
    assert [event.data["token"] for event in seen] == list(range(1, 901))
    assert all(event.id.partition("!")[2] == str(event.data["token"]) for event in seen)
    # what /rows gives is a token too
    async with start_daemon() as daemon:
        page = await ask(daemon.http, "/streams/events/rows?after=899&limit=300")
        async with event_source(daemon.http, f"{LIVE}?after={page.headers['replicad-next']}") as source:
            await insert(events, -1)
            have = len(page.text.splitlines())
            assert (await source.rows(302 - have))[-1] == -1


async def test_two_writers_and_batches_have_ids_that_name_both(database: Database, start_daemon: Start) -> None:
    await database.execute(
        "CREATE TABLE events (id bigserial, instance_name text, body json); CREATE INDEX ON events (id);"
        "CREATE TABLE at (stream_name text, instance_name text, stream_id bigint); GRANT SELECT ON at TO PUBLIC;"
        "INSERT INTO at VALUES ('events', 'a', 0), ('events', 'b', 0)"
    )
    await Registry(database).add(
        "events", "public.events", "id", instance_column="instance_name", row="body",
        method="positions_table", positions_table="at",
    )  # fmt: skip
    positions = "UPDATE at SET stream_id = CASE instance_name WHEN 'a' THEN {} ELSE {} END"
    async with start_daemon() as daemon, event_source(daemon.http, LIVE, "EARLIEST") as source:
        await database.execute(f"INSERT INTO events VALUES (1, 'a', '1'), (2, 'b', '2');{positions.format(2, 2)}")
        assert await source.rows(2) == [1, 2]
        await database.execute(
            f"INSERT INTO events SELECT 4, 'b', to_json(g) FROM generate_series(4, 6) AS g;{positions.format(2, 4)}"
        )
        ahead = [await source.until("message") for _ in range(3)]
        assert [event.data["token"] for event in ahead] == [None, None, 4]
        assert ahead[0].id == ahead[1].id, "a batch that is not complete moves nothing"
        number = (await daemon.publisher.find("events")).numbers["b"]
        assert ahead[2].id.partition("!")[2] == f"2~{number}.4"
        await database.execute(f"INSERT INTO events VALUES (3, 'a', '3');{positions.format(4, 4)}")
        assert await source.rows(1) == [3]
        served = await daemon.publisher.find("events")
        with trio.fail_after(PATIENCE):  # a page ends where all writers are, and idle ones are told once a second
            while served.sent_upto < 4:
                await served.channel.wait_sealed()
        for token, rows in [(ahead[2].id, [3]), (ahead[1].id, [3, 4, 5, 6]), (source.id, [])]:
            async with event_source(daemon.http, LIVE, token) as again:
                assert await again.rows(len(rows)) == rows
                page = await ask(daemon.http, f"/streams/events/rows?after={token}")
                assert [json.loads(line)["row"] for line in page.text.splitlines()] == rows


async def test_a_fork_is_a_reset_for_who_is_connected_and_for_who_comes_back(events: Database, daemon: Daemon) -> None:
    await insert(events, *range(1, 21))
    async with event_source(daemon.http, LIVE, "EARLIEST") as source:
        assert await source.rows(20) == list(range(1, 21))
        before = source.id
        await events.execute("DELETE FROM events WHERE id > 10; SELECT setval('events_id_seq', 10)")
        reset = await source.until("reset")
        back = reset.data["discard_after"]
        assert back <= 10
        await insert(events, 100, 101)
        present = [*range(back + 1, 11), 100, 101]
        assert await source.rows(len(present)) == present
        assert source.id.split("!")[0] != before.split("!")[0]
    async with event_source(daemon.http, LIVE, before) as source:
        reset = await source.next()
        assert (reset.name, reset.data["instance"], reset.data["discard_after"]) == ("reset", None, back)
        assert reset.data["token"] == reset.id
        assert await source.rows(len(present)) == present


async def test_a_reader_that_takes_nothing_is_cut_as_on_tcp_and_delays_nobody(
    events: Database, start_daemon: Start
) -> None:
    limits = {"journal_bytes": 1 << 20, "journal_patience": 0.3, "ping_interval": 0.2}
    async with start_daemon(**limits) as daemon, event_source(daemon.http, LIVE) as reads:
        assert daemon.http is not None
        await reads.until("position")
        with trio.socket.socket() as link:
            link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            await link.connect((daemon.http.host, daemon.http.port))
            await link.send(f"GET {LIVE} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode())
            assert await link.recv(4096)
            with trio.fail_after(PATIENCE):
                while not any(cut.reason == "slow_reader" for cut in daemon.hub.cuts):
                    await events.execute(
                        "INSERT INTO events (body) SELECT to_jsonb(repeat('x', 10000)) FROM generate_series(1, 100)"
                    )
                    assert len(await reads.rows(100)) == 100
            [cut, *_] = daemon.hub.cuts
            assert cut.name == "http"
            assert "slow_reader" in cut.why
        with trio.fail_after(PATIENCE):
            while not reads.comments:
                with trio.move_on_after(0.1):
                    await reads.next()
        shown = json.loads((await ask(daemon.http, "/clients")).text)["clients"]
        assert [one["following"][0]["stream"] for one in shown] == ["events"]


async def test_two_tenants_read_their_own_streams_and_a_right_that_is_withdrawn_ends_the_events(
    events: Database, start_daemon: Start, tmp_path: Path
) -> None:
    await events.execute("CREATE TABLE secret (id bigserial PRIMARY KEY, body text)")
    await Registry(events).add("secret", "public.secret", "id")
    file = tmp_path / "access.toml"
    digests = [sha256(word.encode()).hexdigest() for word in (SECRET, SECRET[::-1])]

    def write(theirs: str) -> None:
        file.write_text(
            f'[client.ours]\ntoken_sha256 = ["{digests[0]}"]\nallow = ["read secret"]\nconnections = 1\n'
            f'[client.theirs]\ntoken_sha256 = ["{digests[1]}"]\nallow = ["{theirs}"]\n'
        )
        file.chmod(0o600)

    write("read events")
    ours, theirs = bearer(f"ours.{SECRET}"), bearer(f"theirs.{SECRET[::-1]}")
    async with start_daemon(access_file=file) as daemon, AsyncExitStack() as stack:
        for path in ("/streams/secret/rows", "/streams/secret/live"):
            for headers, status, code in [
                ({}, 401, "not_authorised"),
                (bearer("theirs.wrong"), 401, "not_authorised"),
                (theirs, 404, "unknown_stream"),
            ]:
                async with event_source(daemon.http, path, **headers) as refused:
                    assert (refused.status, (await refused.body())["code"]) == (status, code), (path, headers)
        for path in ("/streams/{}/rows", "/streams/{}/live"):
            denied, missing = [await ask(daemon.http, path.format(name), **theirs) for name in ("secret", "absent")]
            assert denied.text == missing.text.replace("absent", "secret")
            assert "the streams are: events" in denied
        page = await ask(daemon.http, "/streams/secret/rows", **ours)
        assert (page.status, page.headers["cache-control"], page.headers["vary"]) == (
            200, "private, no-cache", "Authorization",
        )  # fmt: skip
        mine = await stack.enter_async_context(event_source(daemon.http, "/streams/secret/live", **ours))
        assert (await mine.next()).name == "position"
        async with event_source(daemon.http, "/streams/secret/live", **ours) as second:
            assert (second.status, (await second.body())["code"]) == (429, "too_many_connections")
        other = await stack.enter_async_context(event_source(daemon.http, LIVE, **theirs))
        assert (await other.next()).name == "position"
        write("read nothing")
        assert await daemon.reload()
        refusal = await other.until("refused")
        assert refusal.data["code"] == "forbidden"
        with pytest.raises(EOFError):
            await other.next()


async def test_clients_are_served_while_an_access_file_is_read_again(
    events: Database, start_daemon: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "access.toml"
    file.write_text(f'[client.ours]\ntoken_sha256 = "{sha256(SECRET.encode()).hexdigest()}"\nallow = "read events"\n')
    file.chmod(0o600)
    begun, goes_on = threading.Event(), threading.Event()

    def read_slowly(*args: Any) -> AccessFile:
        begun.set()
        goes_on.wait(PATIENCE)
        return read_access(*args)

    async with start_daemon(access_file=file) as daemon, trio.open_nursery() as nursery:
        monkeypatch.setattr("replicad.daemon.access.read_access", read_slowly)
        nursery.start_soon(daemon.reload)
        with trio.fail_after(PATIENCE):
            while not begun.is_set():
                await trio.sleep(0.01)
        page = await ask(daemon.http, "/streams/events/rows", **bearer(f"ours.{SECRET}"))
        assert (page.status, goes_on.is_set()) == (200, False)
        goes_on.set()


async def test_readers_count_as_clients_and_not_as_requests(events: Database, start_daemon: Start) -> None:
    async with (
        start_daemon(http_connections=2, max_connections=4, max_newcomers=1) as daemon,
        AsyncExitStack() as stack,
    ):
        for _ in range(4):
            source = await stack.enter_async_context(event_source(daemon.http, LIVE))
            assert (await source.next()).name == "position"
        assert len(daemon.hub) == 4
        async with event_source(daemon.http, LIVE) as refused:
            assert (refused.status, (await refused.body())["code"]) == (503, "too_many_connections")
            assert refused.headers["retry-after"] == "5"
        assert (await ask(daemon.http, "/livez")).status == 200
    for name, status, code in [("nothing", 404, "unknown_stream"), ("a%20b", 404, "unknown_stream")]:
        async with start_daemon() as daemon, event_source(daemon.http, f"/streams/{name}/live") as refused:
            assert (refused.status, (await refused.body())["code"]) == (status, code)
            async with event_source(daemon.http, LIVE, "nonsense") as wrong:
                assert (wrong.status, (await wrong.body())["code"]) == (400, "bad_token")


async def test_readers_that_come_back_at_once_wait_for_room_in_place_of_being_refused(
    events: Database, start_daemon: Start
) -> None:
    async with start_daemon(http_connections=2) as daemon, AsyncExitStack() as stack:
        assert daemon.http is not None
        some = [
            await stack.enter_async_context(await trio.open_tcp_stream(daemon.http.host, daemon.http.port))
            for _ in range(50)
        ]
        for one in some:
            await one.send_all(f"GET {LIVE} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode())
        with trio.fail_after(PATIENCE):
            for one in some:
                found = b""
                while b"event: position" not in found:
                    data = await one.receive_some(4096)
                    assert data, found
                    found += data
        assert len(daemon.hub) == 50


async def test_pages_of_other_origins_read_only_where_the_operator_allows_it(
    events: Database, start_daemon: Start
) -> None:
    theirs = "https://shop.example.org"
    async with start_daemon() as daemon:
        found = await ask(daemon.http, "/streams/events/rows", Origin=theirs)
        assert "access-control-allow-origin" not in found.headers
    async with start_daemon(http_origins=f"{theirs},http://localhost:3000") as daemon:
        for origin, allowed in [(theirs, theirs), ("https://other.example.org", None)]:
            for path in ("/streams/events/rows", "/streams/nothing/rows"):
                found = await ask(daemon.http, path, Origin=origin)
                assert found.headers.get("access-control-allow-origin") == allowed
                assert found.headers["vary"] == "Origin"
            async with event_source(daemon.http, LIVE, origin=origin) as source:
                assert source.headers.get("access-control-allow-origin") == allowed
