"""Browsers that read rows with a token (`--browser-key`): what they get, and where the token never stands."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest
import trio

from replicad.config.browser_tokens import Claims, sign
from replicad.config.settings import Address, ServerSettings, parse_address
from replicad.daemon.access import BROWSERS
from replicad.errors import UsageError
from replicad.postgres.bridge import Database
from tests import browser
from tests.conftest import PATIENCE
from tests.daemons import Daemon
from tests.sse import event_source

from .test_http import ANY_PORT, ask, bearer
from .test_process_bounds import Served, serving

pytest.importorskip("jwt", reason="PyJWT is not installed: pip install 'replicad[http]'")

Start = Callable[..., AbstractAsyncContextManager[Daemon]]
SECRET = "a-secret-of-enough-characters"
KEY, NEXT_KEY = "first-key-of-browsers-" * 2, "second-key-of-browsers-" * 2
ROWS, LIVE = "/streams/events/rows", "/streams/events/live"
SHOP = "https://shop.example.org"


@pytest.fixture
def key(tmp_path: Path) -> Path:
    made = tmp_path / "browser.key"
    made.touch(0o600)
    made.write_text(f"{KEY}\n")
    return made


@pytest.fixture
def settings(key: Path) -> ServerSettings:
    return ServerSettings(listen=ANY_PORT, http=ANY_PORT, server_name="example.com", token=SECRET, browser_key=key)


def token(key: Path, *streams: str, sub: str = "alice", life: float = 600) -> str:
    return sign(Claims(sub, streams or ("events",), time.time() + life), key)


def cookie(word: str) -> dict[str, str]:
    return {"Cookie": f"theme=dark; replicad_token={word}"}


async def insert(db: Database, *bodies: int) -> None:
    await db.execute("INSERT INTO events (body) SELECT to_jsonb(g) FROM unnest($1::int[]) AS g", list(bodies))


async def test_a_token_reads_its_streams_over_http_and_does_nothing_else(
    events: Database, daemon: Daemon, key: Path
) -> None:
    await insert(events, 1, 2)
    word = token(key)
    async with event_source(daemon.http, f"{LIVE}?after=EARLIEST", **cookie(word)) as source:
        assert source.headers["referrer-policy"] == "no-referrer"
        assert await source.rows(2) == [1, 2]
        [client] = json.loads((await ask(daemon.http, "/clients", **bearer(SECRET))).text)["clients"]
        assert client["access"] == "browser:alice"
    for found in (await ask(daemon.http, f"{ROWS}?access_token={word}"), await ask(daemon.http, ROWS, **cookie(word))):
        assert [json.loads(line)["row"] for line in found.text.splitlines()] == [1, 2]
        assert found.headers["referrer-policy"] == "no-referrer"
        assert found.headers["cross-origin-resource-policy"] == "same-origin"
        assert found.headers["vary"] == "Authorization, Cookie"
        assert word not in str(found.headers)
    assert found.headers["cache-control"] == "private, no-cache"
    kept = await ask(daemon.http, f"{ROWS}?limit=1&after={found.headers['replicad-next']}&access_token={word}")
    assert kept.headers["cache-control"] == "private, no-store"
    # another stream is one that does not exist
    less = token(key, "other", "event")
    unknown, hidden = [
        await ask(daemon.http, f"/streams/{name}/rows?access_token={less}") for name in ("eve", "events")
    ]
    assert (unknown.status, hidden.status) == (404, 404)
    assert unknown.text.replace("eve", "events") == hidden.text
    for path in ("/status", "/clients", "/metrics", "/events", "/parked?tube=t"):
        assert (await ask(daemon.http, path, **cookie(word))).status == 401, path
        assert (await ask(daemon.http, f"{path}{'&' if '?' in path else '?'}access_token={word}")).status == 401, path
        assert (await ask(daemon.http, path, **bearer(word))).status == 401, path
    assert (await ask(daemon.http, ROWS, **bearer(word))).status == 401, "tokens are no secrets of clients"
    async with await trio.open_tcp_stream(*_pair(daemon.addresses[0])) as stream:
        await stream.send_all(f"AUTH {word}\nREPLICATE events NOW\n".encode())
        received = b""
        with trio.fail_after(PATIENCE):
            while data := await stream.receive_some(1000):
                received += data
        assert b"ERROR not_authorised: the token is wrong" in received
    async with await trio.open_tcp_stream(*_pair(daemon.http)) as stream:
        body = b'{"tube": "t", "numbers": [1]}'
        head = f"POST /replay?access_token={word} HTTP/1.1\r\nHost: localhost\r\nCookie: replicad_token={word}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        await stream.send_all(head.encode() + body)
        with trio.fail_after(PATIENCE):
            assert (await stream.receive_some(1000)).startswith(b"HTTP/1.1 401 ")


def _pair(address: Address | None) -> tuple[str, int]:
    assert address is not None
    return address.host, address.port


async def test_what_is_no_valid_token_is_refused_with_why_and_without_the_token(
    events: Database, daemon: Daemon, key: Path, tmp_path: Path
) -> None:
    word = token(key)
    other = tmp_path / "other.key"
    other.touch(0o600)
    other.write_text(NEXT_KEY)
    for path, headers, status, why in (
        (f"{ROWS}?access_token={token(key, life=-1)}", {}, 401, "has expired"),
        (f"{ROWS}?access_token={token(key, life=9999)}", {}, 401, "longer than"),
        (f"{ROWS}?access_token={token(other)}", {}, 401, "not signed by a key of this server"),
        (f"{ROWS}?access_token=", {}, 401, "not signed by a key of this server"),
        (f"{ROWS}?access_token={word}&access_token={word}", {}, 400, "a parameter twice"),
        (f"{ROWS}?access_token={word}", bearer(SECRET), 400, "not both"),
        (ROWS, {"Cookie": f"replicad_token={word}; replicad_token={token(other)}"}, 400, "2 cookies"),
        (LIVE, cookie(token(key, life=-1)), 401, "has expired"),
        (ROWS, {"Cookie": f"replicad_tokens={word}"}, 401, "Authorization: Bearer"),
    ):
        found = await ask(daemon.http, path, **headers)
        assert found.status == status, (path, found.text)
        assert why in json.loads(found.text)["error"]
        assert word not in found.text
        assert found.headers["cache-control"] == "no-store"
        assert found.headers["referrer-policy"] == "no-referrer"
    # a secret goes before a cookie, whose token is not looked at
    assert (await ask(daemon.http, ROWS, **bearer(SECRET), **cookie("nonsense"))).status == 200


async def test_a_page_of_another_site_gets_nothing_by_a_cookie_unless_its_origin_is_named(
    events: Database, start_daemon: Start, key: Path
) -> None:
    word = cookie(token(key))
    async with start_daemon(http_origins=SHOP) as daemon:
        host = str(daemon.http)
        for headers in ({"Origin": "https://evil.example"}, {"Origin": "null"}, {"Sec-Fetch-Site": "cross-site"},
                        {"Sec-Fetch-Site": "same-site"}):  # fmt: skip
            for path in (ROWS, LIVE):
                found = await ask(daemon.http, path, **word, **headers)
                assert found.status == 403, headers
                assert "access-control-allow-origin" not in found.headers
        for headers in (
            {},
            {"Origin": f"http://{host}"},
            {"Sec-Fetch-Site": "same-origin"},
            {"Sec-Fetch-Site": "none"},
        ):
            assert (await ask(daemon.http, ROWS, **word, **headers)).status == 200, headers
        named = await ask(daemon.http, ROWS, **word, Origin=SHOP, **{"Sec-Fetch-Site": "cross-site"})
        assert named.status == 200
        assert named.headers["access-control-allow-origin"] == SHOP
        assert named.headers["access-control-allow-credentials"] == "true"
    async with start_daemon(http_origins="*") as daemon:
        everybody = await ask(daemon.http, f"{ROWS}?access_token={token(key)}", Origin=SHOP)
        assert everybody.headers["access-control-allow-origin"] == "*"
        assert "access-control-allow-credentials" not in everybody.headers
        assert (await ask(daemon.http, ROWS, **word, Origin=SHOP)).status == 403
    async with start_daemon(http_origins=SHOP, browser_key=None) as daemon:
        plain = await ask(daemon.http, ROWS, Origin=SHOP, **bearer(SECRET))
        assert plain.headers["access-control-allow-origin"] == SHOP
        assert "access-control-allow-credentials" not in plain.headers
        without = await ask(daemon.http, f"{ROWS}?access_token={token(key)}")
        assert (without.status, "takes no browser tokens" in without.text) == (401, True)


async def test_one_sub_has_a_number_of_connections_of_its_own(events: Database, daemon: Daemon, key: Path) -> None:
    word = cookie(token(key))

    async def follow(task_status: trio.TaskStatus[None]) -> None:
        async with event_source(daemon.http, LIVE, **word):
            task_status.started()
            await trio.sleep_forever()

    async with trio.open_nursery() as nursery:
        for _ in range(BROWSERS):
            await nursery.start(follow)
        refused = await ask(daemon.http, ROWS, **word)
        assert (refused.status, json.loads(refused.text)["code"]) == (429, "too_many_connections")
        assert (await ask(daemon.http, ROWS, **cookie(token(key, sub="bob")))).status == 200
        nursery.cancel_scope.cancel()


async def test_an_answer_ends_with_its_token_and_goes_on_with_the_next_one(
    events: Database, daemon: Daemon, key: Path
) -> None:
    await insert(events, 1)
    expires = time.time() + 1.5
    word = sign(Claims("alice", ("events",), expires), key)
    async with event_source(daemon.http, f"{LIVE}?after=EARLIEST&access_token={word}") as source:
        assert await source.rows(1) == [1]
        refused = await source.until("refused")
        assert time.time() >= expires
        assert refused.data["code"] == "access_expired"
        with pytest.raises(EOFError):
            await source.until("refused")
    assert not tuple(daemon.hub.cuts), "it is no end that an operator has to look at"
    await insert(events, 2)
    async with event_source(daemon.http, f"{LIVE}?access_token={word}", source.id) as again:
        assert (again.status, (await again.body())["code"]) == (401, "not_authorised")
    async with event_source(daemon.http, f"{LIVE}?access_token={token(key)}", source.id) as again:
        assert await again.rows(1) == [2]


async def test_a_token_stands_in_no_log_and_a_removed_key_ends_its_sessions(
    events: Database, daemon: Daemon, database_url: str, key: Path, tmp_path: Path
) -> None:
    secret = tmp_path / "token"
    secret.touch(0o600)
    secret.write_text(SECRET)
    words = {name: token(key, *streams) for name, streams in {"right": (), "hidden": ("none",)}.items()}
    words["expired"] = token(key, life=-1)
    options = ("--http", "127.0.0.1:0", "--token-file", str(secret), "--browser-key", str(key), "--log-level", "debug")
    with serving(Served(tmp_path, database_url, *options)) as served:

        def write(keys: str) -> None:
            key.write_text(keys)
            served.process.send_signal(signal.SIGHUP)

        await served.wait_ready()
        [ready] = served.events("ready")
        http = parse_address(ready["http"][0])  # type: ignore[index]
        async with event_source(http, f"{LIVE}?access_token={words['right']}") as source, \
                event_source(http, LIVE, **cookie(words["right"])) as other:  # fmt: skip
            for one in (source, other):
                await one.until("position")
            for word in words.values():
                for path in (ROWS, LIVE, "/status", "/clients", "/none", "/streams/none/rows", f"{ROWS}?after=bad"):
                    if word == words["right"] and path == LIVE:
                        continue
                    asked = path + ("&" if "?" in path else "?") + f"access_token={word}"
                    assert word not in (await ask(http, asked)).text
                    assert word not in (await ask(http, path, **cookie(word))).text
            for path in ("/status", "/clients", "/events", "/metrics"):
                found = await ask(http, path, **bearer(SECRET))
                assert found.status == 200
                assert not any(word in found.text for word in words.values()), path
            secret.write_text("another-" + SECRET)  # which is read at the start alone
            write("short\n")
            [kept] = await served.wait_event("access_unchanged")
            assert "32 bytes or more" in str(kept["error"])
            write(f"{NEXT_KEY}\n{KEY}\n")
            [reloaded] = await served.wait_event("reloaded")
            assert reloaded["browser_keys"] == 2
            await insert(events, 7)
            for one in (source, other):
                assert await one.rows(1) == [7]
            write(f"{NEXT_KEY}\n")
            for one in (source, other):
                refused = await one.until("refused")
                assert refused.data["code"] == "not_authorised"
            assert (await ask(http, ROWS, **cookie(words["right"]))).status == 401
            assert (await ask(http, ROWS, **cookie(token(key)))).status == 200
            assert (await ask(http, ROWS, **bearer(SECRET))).status == 200
        assert await served.end(signal.SIGTERM) == 0
        written = served.log.read_text()
    assert "browser:alice" in written
    for word in words.values():
        for part in word.split(".")[1:]:  # all tokens of one algorithm begin alike
            assert part not in written
    assert KEY not in written


def test_a_daemon_that_everybody_may_read_takes_no_keys(key: Path) -> None:
    for wrong in ({"http": ANY_PORT}, {"token": SECRET}, {}):
        with pytest.raises(UsageError, match="--browser-key needs --http"):
            ServerSettings(listen=ANY_PORT, browser_key=key, **wrong)  # type: ignore[arg-type]


@pytest.mark.skipif(bool(browser.missing()), reason=browser.missing() or "there is a browser")
async def test_an_event_source_of_a_real_browser_follows_with_a_cookie_and_with_a_parameter(
    events: Database, start_daemon: Start, key: Path
) -> None:
    await insert(events, 1, 2)
    script = """([path, cookies]) => new Promise(resolve => {
        const found = [], source = new EventSource(path, {withCredentials: cookies})
        source.onmessage = event => found.push(JSON.parse(event.data).row) == 2 && resolve(found)
        source.onerror = () => { if (source.readyState == 2) resolve("refused") }
    })"""

    def look(address: Address, word: str) -> None:
        own, site = f"http://{address}", f"http://localhost:{address.port}"
        with browser.open_browser() as chromium:
            context = chromium.new_context()
            page = context.new_page()
            page.goto(f"{own}/console")
            assert page.evaluate(script, [f"{LIVE}?after=EARLIEST", False]) == "refused"
            assert page.evaluate(script, [f"{LIVE}?after=EARLIEST&access_token={word}", False]) == [1, 2]
            context.add_cookies([{"name": "replicad_token", "value": word, "url": own, "sameSite": "Lax"}])
            assert page.evaluate(script, [f"{LIVE}?after=EARLIEST", False]) == [1, 2]
            # a page of another site does not get the cookie sent, and could not read the answer
            page.goto(f"{site}/livez")
            assert page.evaluate(script, [f"{own}{LIVE}?after=EARLIEST", True]) == "refused"

    async with start_daemon() as daemon:
        assert daemon.http is not None
        await trio.to_thread.run_sync(look, daemon.http, token(key))
