"""Rows over HTTP, page by page: what is in a page, what may be kept of it, who may read it, what is refused."""

from __future__ import annotations

import json
import ssl
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import trio

from replicad.config.settings import ServerSettings
from replicad.operations.http.streams import MOST_ROWS
from replicad.postgres.bridge import Database
from replicad.streams.registry import Registry
from replicad.streams.serving import row_pages
from replicad.streams.serving.catchups import Catchups
from tests.conftest import PATIENCE
from tests.daemons import Daemon

from .test_access_reload import Authority
from .test_http import ANY_PORT, Answer, ask

Start = Callable[..., AbstractAsyncContextManager[Daemon]]
SECRET = "a-secret-of-enough-characters"


@pytest.fixture
def settings() -> ServerSettings:
    return ServerSettings(listen=ANY_PORT, http=ANY_PORT, server_name="example.com")


async def page(
    daemon: Daemon, after: str | None = None, limit: int | None = None, live: str | None = None, **more: Any
) -> Answer:
    named = {"after": after, "limit": limit, "live": live}
    query = "&".join(f"{name}={quote(str(value), safe='')}" for name, value in named.items() if value is not None)
    stream = more.pop("stream", "events")
    return await ask(daemon.http, f"/streams/{stream}/rows" + (f"?{query}" if query else ""), **more)


def rows(answer: Answer) -> list[dict[str, Any]]:
    assert answer.status == 200, answer.text
    return [json.loads(line) for line in answer.text.splitlines()]


def refused(answer: Answer) -> tuple[int, str]:
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["cache-control"] == "no-store"
    body = json.loads(answer.text)
    assert body["error"]
    return answer.status, body["code"]


async def walk(daemon: Daemon, after: str | None, limit: int) -> list[Answer]:
    """All pages from a token to the open one."""
    found = [await page(daemon, after, limit)]
    while found[-1].text:
        found.append(await page(daemon, found[-1].headers["replicad-next"], limit))
    return found


async def insert(db: Database, count: int) -> None:
    await db.execute("INSERT INTO events (body) SELECT to_jsonb(g) FROM generate_series(1, $1::int) AS g", count)


async def test_pages_have_each_row_once_and_what_is_closed_is_kept_for_ever(
    events: Database, daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    await insert(events, 1000)
    feed = await daemon.publisher.find("events")
    while feed.sent_upto < 1000:
        await feed.channel.wait_sealed()
    found = await walk(daemon, None, 64)
    seen = [row["token"] for one in found for row in rows(one)]
    assert seen == list(range(1, 1001))
    assert all(row["instance"] == "master" for one in found for row in rows(one))
    kinds = [one.headers["cache-control"] for one in found]
    assert kinds[0] == "public, no-cache", "its address does not name the generation"
    assert set(kinds[1:-2]) == {"public, max-age=31536000, immutable"}
    assert kinds[-1] == "public, no-cache"
    assert all(32 <= len(rows(one)) <= 64 for one in found[:-2])
    # readers that begin elsewhere soon come to the same pages
    tokens = [one.headers["replicad-next"] for one in found]
    others = [one.headers["replicad-next"] for one in await walk(daemon, "77", 64)]
    assert set(others[1:]) <= set(tokens)
    # a page's ETag stays, and is answered by 304
    again = await page(daemon, tokens[2], 64, **{"If-None-Match": f'"x", {found[3].headers["etag"]}'})
    assert (again.status, again.text, again.headers["etag"]) == (304, "", found[3].headers["etag"])
    await insert(events, 100)
    while feed.sent_upto < 1100:
        await feed.channel.wait_sealed()
    assert (await page(daemon, tokens[2], 64)).headers["etag"] == found[3].headers["etag"]
    assert (await page(daemon, tokens[2], 64)).text == found[3].text
    assert [row["token"] for row in rows(await page(daemon, tokens[-1], 500))] == list(range(1001, 1101))
    # many readers of a page: Postgres is read once
    reads: list[int] = []
    ask_piece = Catchups.ask

    def counted(self: Catchups, *wanted: Any) -> Any:
        reading = ask_piece(self, *wanted)
        reads.append(reading is not None)
        return reading

    monkeypatch.setattr(Catchups, "ask", counted)
    builds: list[str] = []
    build = row_pages.RowPages._build

    async def built(self: row_pages.RowPages, feed: Any, wanted: Any) -> Any:
        builds.append(wanted.token)
        return await build(self, feed, wanted)

    monkeypatch.setattr(row_pages.RowPages, "_build", built)
    answers: list[Answer] = []

    async def read() -> None:
        answers.append(await page(daemon, tokens[4], 100))

    async with trio.open_nursery() as nursery:
        for _ in range(20):
            nursery.start_soon(read)
    assert len({one.text for one in answers}) == 1
    assert len(builds) < 5, "20 readers, within a second or a few"
    assert sum(reads) <= 1


async def test_writers_batches_and_large_rows_are_whole(database: Database, start_daemon: Start) -> None:
    await database.execute("CREATE TABLE events (id bigserial, instance_name text, body json)")
    await database.execute("CREATE INDEX ON events (id)")
    await Registry(database).add("events", "public.events", "id", instance_column="instance_name", row="body")
    async with start_daemon() as daemon:
        feed = await daemon.publisher.find("events")
        await database.execute(
            "INSERT INTO events SELECT g / 3, 'w ' || g / 3 % 2, to_json(g) FROM generate_series(3, 62) AS g;"
            "INSERT INTO events SELECT 21, 'w 1', to_json(repeat('x', 1000000)) FROM generate_series(1, 3);"
            "INSERT INTO events VALUES (22, 'w 0', E'{\"a\":\\r1}');"
            "SELECT setval('events_id_seq', 22)"
        )
        while feed.sent_upto < 22:
            await feed.channel.wait_sealed()
        found = await walk(daemon, None, 10)
        everything = [row for one in found for row in rows(one)]
        assert [row["row"] for row in everything[:60]] == list(range(3, 63))
        assert [row["token"] for row in everything[:6]] == [None, None, 1, None, None, 2]
        assert {row["instance"] for row in everything} == {"w_0", "w_1"}
        assert [len(row["row"]) for row in everything[60:63]] == [1_000_000] * 3, "rows of one id are never divided"
        assert everything[63]["row"] == {"a": 1}
        for one in found[:-1]:
            assert json.loads(one.text.splitlines()[-1])["token"] is not None
        # a vector token: of the writer that is ahead come only rows above its position
        numbers = feed.numbers
        mixed = await page(daemon, f"{feed.stream.epoch}!3~{numbers['w_1']}.9", 9)
        assert [(row["instance"], row["token"]) for row in rows(mixed) if row["token"]] == [
            ("w_0", 4), ("w_0", 6), ("w_0", 8),
        ]  # fmt: skip
        assert mixed.headers["replicad-next"] == f"{feed.stream.epoch}!8~{numbers['w_1']}.9"


async def test_rows_for_which_a_certificate_is_needed_are_kept_by_no_shared_cache(
    events: Database, start_daemon: Start, tmp_path: Path
) -> None:
    authority = Authority(tmp_path, "authority")
    certificate, key = authority.certify("server", "IP:127.0.0.1")
    trusting = ssl.create_default_context(cafile=authority.certificate)
    trusting.load_cert_chain(*authority.certify("ops", "URI:spiffe://corp/ops"))
    await insert(events, 20)
    for needed in (authority.certificate, None):
        async with start_daemon(tls_cert=certificate, tls_key=key, tls_client_ca=needed) as daemon:
            feed = await daemon.publisher.find("events")
            while feed.sent_upto < 20:
                await feed.channel.wait_sealed()
            for after in ("EARLIEST", f"{feed.stream.epoch}!5"):
                found = await page(daemon, after, 5, tls=trusting)
                whose, _, how = found.headers["cache-control"].partition(", ")
                assert whose == ("private" if needed else "public")
                assert how.startswith("max-age" if after != "EARLIEST" else "no-cache")


async def test_what_tcp_refuses_is_refused_with_a_status_and_its_code(events: Database, daemon: Daemon) -> None:
    await insert(events, 20)
    feed = await daemon.publisher.find("events")
    while feed.sent_upto < 20:
        await feed.channel.wait_sealed()
    before = (await page(daemon)).headers["replicad-next"]
    for wanted, status, code in [
        ({"stream": "nothing"}, 404, "unknown_stream"),
        ({"stream": "a%20b"}, 404, "unknown_stream"),
        ({"after": "nonsense"}, 400, "bad_token"),
        ({"after": "NOW"}, 400, "bad_token"),
        ({"after": "abcdefabcdef!5"}, 400, "bad_token"),
        ({"limit": 0}, 400, "bad_request"),
        ({"limit": MOST_ROWS + 1}, 400, "bad_request"),
    ]:
        assert refused(await page(daemon, **wanted)) == (status, code), wanted  # type: ignore[arg-type]
    # a fork: the token to go on with, as a client of TCP gets it
    epoch = feed.stream.epoch
    await events.execute("DELETE FROM events WHERE id > 10; SELECT setval('events_id_seq', 10)")
    while feed.lane(linear=False).epoch == epoch:
        await feed.channel.wait_sealed()
    forked = await page(daemon, before)
    assert refused(forked) == (409, "bad_token")
    body = json.loads(forked.text)
    assert body["token"] == f"{feed.stream.epoch}!{body['discard_after']}"
    await insert(events, 3)
    while feed.sent_upto < 13:
        await feed.channel.wait_sealed()
    again = rows(await page(daemon, body["token"]))
    assert [row["token"] for row in again] == list(range(int(body["discard_after"]) + 1, 14))
    # trimmed rows: only what the daemon has noted as published may be trimmed
    with trio.fail_after(PATIENCE):
        while (noted := (await Registry(events).published()).get("events")) is None or noted.position < 13:
            await trio.sleep(0.05)
    await Registry(events).trim("events", before=5)
    expired = await page(daemon, f"{feed.stream.epoch}!3")
    assert refused(expired) == (410, "token_expired")
    assert json.loads(expired.text)["token"] == "EARLIEST"
    assert [row["token"] for row in rows(await page(daemon, "EARLIEST"))] == list(range(6, 14))


@pytest.fixture
def waiting(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The tokens of pages that wait for rows now."""
    found: list[str] = []
    wait = row_pages.RowPages.wait_beyond

    async def noted(self: row_pages.RowPages, wanted: Any, token: str, meanwhile: Any) -> None:
        found.append(token)
        try:
            await wait(self, wanted, token, meanwhile)
        finally:
            found.remove(token)

    monkeypatch.setattr(row_pages.RowPages, "wait_beyond", noted)
    return found


async def until_there_are(count: int, waiting: list[str]) -> None:
    with trio.fail_after(PATIENCE):
        while len(waiting) != count:
            await trio.sleep(0.02)


def next_of(answer: Answer) -> str:
    address, _, rest = answer.headers["link"].partition(">")
    assert rest == '; rel="next"'
    return "/streams/events/rows" + address.removeprefix("<")


async def test_readers_at_one_token_wait_for_its_rows_without_places_and_have_one_answer(
    events: Database, daemon: Daemon, waiting: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    token = (await page(daemon)).headers["replicad-next"]
    answers: list[Answer] = []
    builds: list[str] = []
    build = row_pages.RowPages._build

    async def built(self: row_pages.RowPages, feed: Any, wanted: Any) -> Any:
        builds.append(wanted.token)
        return await build(self, feed, wanted)

    monkeypatch.setattr(row_pages.RowPages, "_build", built)

    async def read() -> None:
        answers.append(await page(daemon, token, live="60s"))

    readers = 39  # more than there are places for requests
    async with trio.open_nursery() as nursery:
        for _ in range(readers):
            nursery.start_soon(read)
        await until_there_are(readers, waiting)
        assert not answers
        assert (await ask(daemon.http, "/status")).status == 200, "the places are free"
        builds.clear()
        await insert(events, 2)
    assert len({(one.text, one.headers["etag"], one.headers["link"]) for one in answers}) == 1
    assert [row["token"] for row in rows(answers[0])] in ([1, 2], [1]), "a poll may come between two ids"
    assert answers[0].headers["cache-control"] == "public, max-age=1"
    assert len(builds) <= 2, "readers that wake together share a page"
    again = await page(daemon, token, live="60s")
    assert rows(again)[-1]["token"] == 2, "rows that are there are answered at once"
    # a page without rows that was built for another reader while this one waited is no answer to it
    last: list[Answer] = []
    end = again.headers["replicad-next"]

    async def read_more() -> None:
        last.append(await page(daemon, end, live="60s"))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(read_more)
        await until_there_are(1, waiting)
        assert rows(await page(daemon, end)) == []
        await insert(events, 1)
    assert [row["token"] for row in rows(last[0])] == [3]
    # kept is only a page whose address names the generation, also where it was waited for
    plain: list[Answer] = []

    async def read_plain() -> None:
        plain.append(await page(daemon, "3", 4, live="60s"))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(read_plain)
        await until_there_are(1, waiting)
        await insert(events, 50)
    assert rows(plain[0])
    assert plain[0].headers["cache-control"] == "public, no-cache"


async def test_a_page_without_rows_is_answered_in_time_and_leads_to_another_address(
    events: Database, daemon: Daemon, waiting: list[str]
) -> None:
    token = (await page(daemon)).headers["replicad-next"]
    empty = await page(daemon, token, live="1s")
    assert rows(empty) == []
    assert empty.headers["replicad-next"] == token
    assert empty.headers["cache-control"] == "public, max-age=1"
    assert "&live=1s&cursor=" in next_of(empty), "a cache has the empty answer under the address of this request"
    for wrong in ("0s", "61s", "soon", ""):
        assert refused(await page(daemon, token, live=wrong)) == (400, "bad_request"), wrong
    # a reader that has gone is noticed, although nothing is sent to it
    assert daemon.http is not None
    stream = await trio.open_tcp_stream(daemon.http.host, daemon.http.port)
    await stream.send_all(
        f"GET /streams/events/rows?after={token}&live=60s HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
    )
    await until_there_are(1, waiting)
    await stream.aclose()
    await until_there_are(0, waiting)


async def test_a_page_that_waits_is_told_of_a_fork(events: Database, daemon: Daemon, waiting: list[str]) -> None:
    await insert(events, 20)
    feed = await daemon.publisher.find("events")
    while feed.sent_upto < 20:
        await feed.channel.wait_sealed()
    token = (await page(daemon)).headers["replicad-next"]
    answers: list[Answer] = []

    async def read() -> None:
        answers.append(await page(daemon, token, live="60s"))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(read)
        await until_there_are(1, waiting)
        await events.execute("DELETE FROM events WHERE id > 10; SELECT setval('events_id_seq', 10)")
    assert refused(answers[0]) == (409, "bad_token")
