"""The JSON that feeds the console, and putting parked ids back: who may, and from where."""

from __future__ import annotations

import http.client
import json
import os
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
import trio
from structlog.testing import capture_logs

from replicad.config.logs import RECENT
from replicad.config.settings import Address, ServerSettings
from replicad.operations.http.console import BODY, FILES, MOST_PARKED
from replicad.postgres.bridge import Database
from replicad.streams.daemons import DaemonReports, Row
from tests.conftest import PATIENCE
from tests.console_scene import PACES
from tests.daemons import Daemon, Paces

from .test_http import ANY_PORT, SECRET, Answer, ask, ask_until, bearer, tokens

Start = Callable[..., AbstractAsyncContextManager[Daemon]]


@pytest.fixture
def settings() -> ServerSettings:
    return ServerSettings(listen=ANY_PORT, http=ANY_PORT, server_name="example.com")


@pytest.fixture
def paces() -> Paces:
    return PACES


async def post(address: Address | None, body: Any, path: str = "/replay", **headers: str) -> Answer:
    """POST as a page of the console does; `headers` with _ for -; None leaves one out."""
    assert address is not None
    own = {"content-type": "application/json", "origin": f"http://{address}", "host": str(address)}
    wanted = {**own, **{name.replace("_", "-"): value for name, value in headers.items()}}
    text = body if isinstance(body, str) else json.dumps(body)

    def send() -> Answer:
        connection = http.client.HTTPConnection(address.host, address.port, timeout=PATIENCE)
        try:
            connection.request("POST", path, text, {name: value for name, value in wanted.items() if value})
            found = connection.getresponse()
            return Answer(found.status, dict(found.getheaders()), found.read().decode())
        finally:
            connection.close()

    return await trio.to_thread.run_sync(send)


async def make_tube(db: Database, name: str, parked: int) -> list[int]:
    """A tube with parked entries; returns their numbers."""
    await db.execute(f"SELECT tube.tube_ensure_exists('{name}', partitions => 2)")
    rows = await db.fetch(
        "INSERT INTO tube.tube_parked (tube, seq, op, shard, ids, ts, tries, error)"
        " SELECT $1, g, 'U', 1, ARRAY(SELECT generate_series(g, g + 29)), now(), 3, 'refused: <b>' || g || '</b>'"
        " FROM generate_series(1, $2::int) AS g RETURNING parked",
        name,
        parked,
    )
    return [row["parked"] for row in rows]


def listed(answer: Answer) -> list[int]:
    assert answer.status == 200, answer.text
    return [one["number"] for one in json.loads(answer.text)["parked"]]


async def test_parked_entries_are_shown_and_put_back_by_who_may_do_it(
    start_daemon: Start, database: Database, tmp_path: Path
) -> None:
    few = await make_tube(database, "few", 3)
    await make_tube(database, "secret", 1)
    word = bearer(f"ops.{SECRET}")
    pods = "SELECT count(*) FROM tube.few"
    async with start_daemon(access_file=tokens(tmp_path, '["status", "list few"]')) as daemon:
        refused = await post(daemon.http, "no JSON at all", **word)
        assert (refused.status, "may not replay anything" in refused) == (403, True), "before the body is read"
    async with start_daemon(access_file=tokens(tmp_path, '["status", "list few", "replay other"]')) as daemon:
        shown = json.loads((await ask(daemon.http, "/parked?tube=few", **word)).text)
        assert [one["number"] for one in shown["parked"]] == few
        assert shown["parked"][0]["error"] == "refused: <b>1</b>"
        assert (len(shown["parked"][0]["ids"]), shown["parked"][0]["id_count"], shown["more"]) == (20, 30, False)
        hidden, unknown = [await ask(daemon.http, f"/parked?tube={name}", **word) for name in ("secret", "absent")]
        assert (hidden.status, hidden.text) == (unknown.status, unknown.text.replace("absent", "secret"))
        assert hidden.status == 404
        assert (await ask(daemon.http, "/parked?tube=few")).status == 401
        refused = await post(daemon.http, {"tube": "few", "numbers": few}, **word)
        assert refused.status == 403
        assert 'the operator can add "replay few" to [client.ops]' in refused
        assert (await post(daemon.http, {"tube": "few", "numbers": few})).status == 401
        hidden, unknown = [await post(daemon.http, {"tube": n, "numbers": [1]}, **word) for n in ("secret", "absent")]
        assert (hidden.status, hidden.text) == (404, unknown.text.replace("absent", "secret"))
        assert await database.fetch_value(pods) == 0
    async with start_daemon(access_file=tokens(tmp_path, '["status", "replay few"]')) as daemon:
        done = await post(daemon.http, {"tube": "few", "numbers": [*few[:2], 999_999]}, **word)
        assert json.loads(done.text) == {"tube": "few", "replayed": 2}
        assert listed(await ask(daemon.http, "/parked?tube=few", **word)) == few[2:]
        assert await database.fetch_value(pods) == 2
        again = await post(daemon.http, {"tube": "few", "numbers": few[:2]}, **word)
        assert json.loads(again.text)["replayed"] == 0, "they are gone"


CHANGES = {  # what the console can change: the right, what is sent beside the tube's name, and the event
    "/replay": ("replay", {"numbers": [1]}, "parked_replayed"),
    "/drop": ("drop", {"numbers": [1]}, "parked_dropped"),
    "/pause": ("pause", {}, "tube_paused"),
    "/resume": ("pause", {}, "tube_resumed"),
    "/cancel": ("cancel", {}, "backfills_cancelled"),
}


@pytest.mark.parametrize("path", CHANGES)
async def test_each_change_needs_its_own_right_on_the_tube_and_is_in_the_log(
    start_daemon: Start, database: Database, tmp_path: Path, path: str
) -> None:
    verb, more, event = CHANGES[path]
    (number,) = await make_tube(database, "few", 1)
    body = {"tube": "few", **({"numbers": [number]} if more else {})}
    word = bearer(f"ops.{SECRET}")
    others = ", ".join(f'"{one} few"' for one in {verb for verb, *_ in CHANGES.values()} - {verb})
    async with start_daemon(access_file=tokens(tmp_path, f'["status", "list *", {others}, "{verb} other"]')) as daemon:
        refused = await post(daemon.http, body, path, **word)
        assert (refused.status, f'"{verb} few"' in refused) == (403, True)
        assert (await post(daemon.http, body, path)).status == 401
    async with start_daemon(access_file=tokens(tmp_path, f'["status", "{verb} few"]')) as daemon:
        assert (await post(daemon.http, {**body, "tube": "secret"}, path, **word)).status == 404
        assert (await post(daemon.http, {"tubes": "few"}, path, **word)).status == 400
        assert (await post(daemon.http, body, path, origin="https://evil.example", **word)).status == 403
        with capture_logs() as logged:
            assert (await post(daemon.http, body, path, **word)).status == 200
        assert (await ask(daemon.http, path, **word)).status == 405
    (noted,) = [one for one in logged if one["event"] == event]
    assert (noted["tube"], noted["client"]) == ("few", "ops")


async def test_parked_entries_are_dropped_and_a_tube_is_paused_resumed_and_its_backfills_cancelled(
    database: Database, daemon: Daemon
) -> None:
    first, second = await make_tube(database, "orders", 2)
    await database.execute("CREATE TABLE orders (id bigint PRIMARY KEY)")
    await database.execute("SELECT tube.tube_table_ensure_attached('orders', 'orders', 1)")
    await database.execute("INSERT INTO orders SELECT generate_series(1, 10); DELETE FROM tube.orders")
    await database.execute(
        "INSERT INTO tube.tube_backfill (tube, tbl, shard, start_seq, order_col, shards, ids, approx_ids)"
        " VALUES ('orders', 'orders'::regclass, 1, '1', 'id', '{1}', 4, 10)"
    )
    done = await post(daemon.http, {"tube": "orders", "numbers": [first, 999_999]}, "/drop")
    assert json.loads(done.text) == {"tube": "orders", "dropped": 1}
    assert listed(await ask(daemon.http, "/parked?tube=orders")) == [second]
    assert (await post(daemon.http, {"tube": "orders"}, "/pause")).status == 200
    paused = "SELECT paused_at IS NOT NULL FROM tube.tube_registry"
    assert await database.fetch_value(paused) is True
    done = await post(daemon.http, {"tube": "orders"}, "/resume")
    assert json.loads(done.text) == {"tube": "orders", "was_paused": 1}
    assert await database.fetch_value(paused) is False
    done = await post(daemon.http, {"tube": "orders"}, "/cancel")
    assert json.loads(done.text) == {"tube": "orders", "cancelled": 1}
    assert await database.fetch_value("SELECT count(*) FROM tube.tube_backfill") == 0


async def test_the_last_hour_has_what_the_client_may_see(start_daemon: Start, events: Database, tmp_path: Path) -> None:
    word = bearer(f"ops.{SECRET}")
    async with start_daemon(access_file=tokens(tmp_path, '["status", "list events"]')) as daemon:
        await events.execute("CREATE TABLE others (id bigserial PRIMARY KEY, body text)")
        await events.execute("SELECT replicad.stream_add('others', 'others', 'id')")
        await daemon.publisher.find("others")
        assert (await ask(daemon.http, "/history")).status == 401
        found = json.loads((await ask(daemon.http, "/history", **word)).text)
    assert {one["name"] for one in found["series"]} <= {"events"}
    assert all(len(one["lag"]) * found["step"] == 3600 for one in found["series"])


FOREIGN = {
    "a form": ({"content_type": "text/plain"}, 415),
    "another site": ({"origin": "https://evil.example"}, 403),
    "another port": ({"origin": "http://127.0.0.1:1"}, 403),
    "an opaque page": ({"origin": "null"}, 403),
    "no origin at all": ({"origin": "http://["}, 403),
    "no host at all": ({"origin": "http://[", "host": "["}, 400),
    "a frame": ({"origin": "", "sec_fetch_site": "cross-site"}, 403),
    "a name that was made to lead here": ({"origin": "http://evil.example", "host": "evil.example"}, 403),
}


async def test_pages_of_other_sites_and_odd_requests_change_nothing(database: Database, daemon: Daemon) -> None:
    numbers = await make_tube(database, "orders", MOST_PARKED + 1)
    await ask_until(daemon.http, "/parked?tube=orders", lambda one: one.status == 200)
    wanted = {"tube": "orders", "numbers": numbers[:1]}
    for name, (headers, status) in FOREIGN.items():
        assert (await post(daemon.http, wanted, **headers)).status == status, name
    for body, status in (
        ("{", 400), ([], 400), ({"tube": "orders"}, 400), ({"tube": "orders", "numbers": []}, 400),
        ({"tube": "orders", "numbers": numbers}, 400), ({"tube": "orders", "numbers": [True]}, 400),
        ({"tube": "orders", "numbers": [1 << 64]}, 400), (" " * (BODY + 1), 413),
        ("[" * 8000, 400), ('{"a":' * 3000, 400), ("[" * 8000 + "]" * 8000, 400), ("9" * 5000, 400), ("1e999", 400),
        ('{"tube": "\\ud800", "numbers": [1]}', 400), ('{"tube": "a\\u0000", "numbers": [1]}', 400),
        ('{"\\udc00": 1, "tube": "orders", "numbers": [1]}', 400), ('{"tube": "a", "tube": "b", "numbers": [1]}', 400),
        ("\xff", 400), ("NaN", 400), ({"tube": "o" * 9000, "numbers": [1]}, 404),
    ):  # fmt: skip
        assert (await post(daemon.http, body)).status == status, str(body)[:80]
    for path in ("/parked?tube=a%00b", "/parked?tube=%ff", "/parked?tube=%ed%a0%80", "/events?after=0&after=1",
                 "/a%00", "/events?after=%00", "/streams/a%00/rows", "/streams/events/live?after=%0a",
                 "/livez?%00"):  # fmt: skip
        refused = await ask(daemon.http, path)
        assert refused.status in (400, 404), (path, refused.text)
        assert not any(word in refused for word in ("Postgres", "replicad_", "/tmp", ".s.PGSQL")), path
    shown = await ask(daemon.http, "/events")
    assert shown.status == 200, "and whatever was sent, the console has its events"
    assert not any(one["event"] == "unexpected_failure" for one in json.loads(shown.text)["events"])
    assert (await ask(daemon.http, "/replay")).status == 405
    shown = json.loads((await ask(daemon.http, "/parked?tube=orders")).text)
    assert [one["number"] for one in shown["parked"]] == numbers[:MOST_PARKED]
    assert shown["more"] is True
    done = await post(daemon.http, wanted, origin="", host="localhost:1")
    assert json.loads(done.text)["replayed"] == 1, "curl has no origin"


async def test_status_has_what_the_console_shows(events: Database, daemon: Daemon) -> None:
    await make_tube(events, "orders", 1)
    await events.execute("CREATE TABLE orders (id bigint PRIMARY KEY)")
    await events.execute("SELECT tube.tube_table_ensure_attached('orders', 'orders', 1)")
    row = Row("stream", "events", "rows", "row_unreadable", "row 7 cannot be read", 60.0)
    await DaemonReports(events).write_troubles("other.example pid 7 0a0b0c0d", [row])
    async with events.connection() as writer, writer.transaction():
        await events.execute("INSERT INTO tube.orders (op, shard, ids) VALUES ('B', 1, '{1}'), ('B', 1, '{2}')")
        await events.execute(
            "INSERT INTO tube.tube_backfill (tube, tbl, shard, start_seq, order_col, shards, ids, approx_ids)"
            " VALUES ('orders', 'orders'::regclass, 1, '1', 'id', '{1}', 40, 100)"
        )
        await writer.execute("INSERT INTO events (body) VALUES ('{}')")
        pid = await writer.fetch_value("SELECT pg_backend_pid()")
        found = await ask_until(
            daemon.http,
            "/status",
            lambda one: (
                (body := json.loads(one.text))["streams"][0]["held_back"] is not None
                and bool(body["server"])
                and body.keys() >= {"backfills", "reports"}
            ),
        )
    body = json.loads(found.text)
    assert body["streams"][0]["held_back"]["sql"] == f"SELECT pg_terminate_backend({pid})"
    assert (body["server"]["daemons"], body["server"]["standby"]) == (1, False)
    (one,) = body["daemons"]
    assert (one["name"], one["pid"], one["own"], one["state"]) == ("example.com", os.getpid(), True, "alive")
    assert one["addresses"] == [str(daemon.addresses[0])]
    (report,) = body["reports"]
    assert (report["daemon"], report["name"]) == ("other.example pid 7 0a0b0c0d", "events")
    assert 60 <= report["lasting_seconds"] < 60 + PATIENCE
    (backfill,) = body["backfills"]
    assert {name: backfill[name] for name in ("name", "table", "ids", "of")} == {
        "name": "orders", "table": "orders", "ids": 40, "of": 100
    }  # fmt: skip


async def test_events_are_those_that_the_client_may_know_and_only_later_ones_when_asked(
    start_daemon: Start, events: Database, tmp_path: Path
) -> None:
    word = bearer(f"ops.{SECRET}")
    said: list[dict[str, Any]] = [
        {"event": "trouble_began", "level": "warning", "kind": "stream", "name": "secret", "reason": "broken"},
        {"event": "trouble_began", "level": "warning", "kind": "tube", "name": "orders", "reason": "<i>broken</i>"},
        {"event": "parked", "level": "warning", "tube": "orders", "seq": 7},
        {"event": "session_closed", "level": "info", "error": "forbidden: stream secret"},
    ]

    async def shown(daemon: Daemon, after: int = 0) -> dict[str, Any]:
        found = await ask(daemon.http, f"/events?after={after}", **word)
        assert found.status == 200, found.text
        return dict(json.loads(found.text))

    for allow, expected in (
        ('["status", "list orders"]', [1, 2]),
        ('["status", "list *"]', [0, 1, 2, 3]),
        ('["status", "list *"]\ndeny = ["list event*", "list secret"]', [1, 2]),
    ):
        async with start_daemon(access_file=tokens(tmp_path, allow)) as daemon:
            before = (await shown(daemon))["last"]
            for one in said:
                RECENT.note(None, "", dict(one))
            found = await shown(daemon, before)
            assert [one["event"] for one in found["events"]] == [said[number]["event"] for number in expected], allow
            assert found["last"] == before + len(said), "also past those that are hidden"
            assert (await shown(daemon, found["last"]))["events"] == []
            assert (await ask(daemon.http, "/events?after=x", **word)).status == 400
            assert (await ask(daemon.http, "/events")).status == 401


async def test_the_page_is_open_to_all_and_lets_no_foreign_code_run(start_daemon: Start, database: Database) -> None:
    async with start_daemon(token=SECRET) as daemon:
        for path, (_, kind) in FILES.items():
            found = await ask(daemon.http, path)
            assert found.status == 200
            assert found.headers["content-type"].startswith(kind)
            assert found.headers["x-content-type-options"] == "nosniff"
            policy = found.headers["content-security-policy"]
            assert "default-src 'none'; script-src 'self'" in policy
            assert "unsafe" not in policy
            assert "require-trusted-types-for 'script'" in policy
            assert "frame-ancestors 'none'" in policy
            assert "http://" not in found.text, "it needs no other host"
            assert "https://" not in found.text
