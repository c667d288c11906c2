"""docs/examples/live.html in a real Chromium, as a page of another origin: each row once, over restart and fork."""

from __future__ import annotations

import functools
import http.server
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from pathlib import Path

import pytest
import trio

from replicad.config.settings import Address, ServerSettings
from replicad.postgres.bridge import Database
from tests import browser
from tests.conftest import PATIENCE
from tests.daemons import Daemon

from .test_http import ANY_PORT

Start = Callable[..., AbstractAsyncContextManager[Daemon]]
EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
pytestmark = pytest.mark.skipif(bool(browser.missing()), reason=browser.missing() or "there is a browser")


@pytest.fixture
def settings() -> ServerSettings:
    return ServerSettings(listen=ANY_PORT, http=ANY_PORT, server_name="example.com")


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


@contextmanager
def pages() -> Iterator[str]:
    """The origin of a server with the examples."""
    handler = functools.partial(_Quiet, directory=str(EXAMPLES))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


async def test_a_page_has_each_row_once_through_a_restart_and_a_fork(events: Database, start_daemon: Start) -> None:
    steps = [trio.Event() for _ in range(3)]

    async def insert(*rows: str) -> None:
        await events.execute("INSERT INTO events (body) SELECT to_jsonb(r) FROM unnest($1::text[]) AS r", list(rows))

    def look(origin: str, address: Address) -> None:
        from playwright.sync_api import expect

        expect.set_options(timeout=PATIENCE * 1000)
        with browser.open_browser() as chromium:
            page = chromium.new_page()
            page.goto(f"{origin}/live.html?daemon=http://{address}")
            rows = page.locator("#rows li")
            for step, texts in zip(
                steps,
                (['"a"', '"<b>b</b>"'], ['"a"', '"<b>b</b>"', '"c"', '"d"'], ['"a"', '"e"']),
                strict=True,
            ):
                expect(rows).to_have_text(texts)
                trio.from_thread.run_sync(step.set)
            assert page.locator("#rows b").count() == 0

    with pages() as origin:
        async with trio.open_nursery() as nursery:
            async with start_daemon(http_origins=origin) as daemon:
                address = daemon.http
                assert address is not None
                await insert("a", "<b>b</b>")
                nursery.start_soon(trio.to_thread.run_sync, look, origin, address)
                await steps[0].wait()
            await insert("c")
            async with start_daemon(http_origins=origin, http=address):
                await insert("d")
                await steps[1].wait()
                await events.execute("DELETE FROM events WHERE id > 1; SELECT setval('events_id_seq', 1)")
                await insert("e")
                await steps[2].wait()
