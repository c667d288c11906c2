"""The pages of `replicad demo --web`: each has the orders of its customer, live, through a restart of the daemon."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
import trio

from replicad.config.settings import Address, ServerSettings
from replicad.demo.web import CUSTOMERS, change_orders, make_secret, serving_pages
from replicad.postgres.bridge import Database, load_sql
from replicad.streams.registry import RecordedChanges, Registry
from tests import browser
from tests.conftest import PATIENCE
from tests.daemons import Daemon
from tests.sse import event_source

from .test_http import ANY_PORT

pytest.importorskip("jwt", reason="PyJWT is not installed: pip install 'replicad[http]'")

Start = Callable[..., AbstractAsyncContextManager[Daemon]]


@pytest.fixture
def key(tmp_path: Path) -> Path:
    return make_secret(tmp_path / "browser.key")


@pytest.fixture
def place() -> Address:
    """Where the daemon answers over HTTP, also after a restart."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return Address("127.0.0.1", int(one.getsockname()[1]))


@pytest.fixture
def settings(key: Path, place: Address) -> ServerSettings:
    secret = "a-secret-of-enough-characters"
    return ServerSettings(listen=ANY_PORT, http=place, server_name="example.com", token=secret, browser_key=key)


@pytest.fixture
async def orders(database: Database) -> Database:
    await database.execute(load_sql("demo_shop"))
    registry = Registry(database)
    await registry.add_changes("orders", "public.orders", RecordedChanges(filters=("customer_id",)))
    await registry.request_snapshot("orders")
    return database


@pytest.mark.long  # it starts a Postgres and a daemon
def test_the_command_serves_both_pages_and_ends_on_an_interrupt() -> None:
    with tempfile.TemporaryDirectory(prefix="replicad-demo-web-") as place:
        Path(place).chmod(0o711)  # the account of the Postgres can enter it
        command = [sys.executable, "-m", "replicad", "demo", "--web"]
        with subprocess.Popen(
            command, cwd=place, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process:
            assert process.stdout is not None
            said = []
            try:
                for line in process.stdout:
                    said.append(line)
                    if "The daemon serves" in line:
                        break
                addresses = re.findall(r"http://127\.0\.0\.1:\d+/\d+", "".join(said))
                assert [int(one.rpartition("/")[2]) for one in addresses] == list(CUSTOMERS), "".join(said)
                for address in addresses:
                    with urlopen(address, timeout=PATIENCE) as answer:
                        assert b"Orders of customer" in answer.read()
            finally:
                process.send_signal(signal.SIGINT)
                process.stdout.read()
            assert process.wait(PATIENCE) == 130


async def ids_of(db: Database, customer: int) -> list[int]:
    rows = await db.fetch("SELECT id FROM orders WHERE customer_id = $1 ORDER BY id", customer)
    return [row["id"] for row in rows]


async def test_the_token_of_a_page_reads_the_orders_of_its_customer_alone(
    orders: Database, start_daemon: Start, key: Path, place: Address
) -> None:
    copies: dict[int, dict[int, Any]] = {customer: {} for customer in CUSTOMERS}
    after = dict.fromkeys(CUSTOMERS, "EARLIEST")
    with serving_pages(f"http://{place}", key) as port:
        for turn in range(2):  # the daemon is another one in the second turn
            async with start_daemon():
                for _ in range(5):
                    await change_orders(orders)
                await orders.execute("INSERT INTO orders (customer_id, item) VALUES (42, $1), (43, $1)", f"end {turn}")
                for customer in CUSTOMERS:
                    token = await trio.to_thread.run_sync(fetch, port, f"token/{customer}")
                    path = f"/streams/orders/live?after={after[customer]}&access_token={token}"
                    async with event_source(place, path) as source:
                        take(await source.next(), copies[customer], customer)
                        wanted = await ids_of(orders, customer)
                        while sorted(copies[customer]) != wanted:  # the snapshot may come behind the last change
                            take(await source.next(), copies[customer], customer)
                        after[customer] = source.id
                    assert any(row["item"] == f"end {turn}" for row in copies[customer].values())


def take(event: Any, copy: dict[int, Any], customer: int) -> None:
    change = event.data.get("row", {})
    if change.get("op") == "d":
        copy.pop(change["key"], None)
    elif change.get("key") is not None:
        assert change["row"]["customer_id"] == customer
        copy[change["key"]] = change["row"]


def fetch(port: int, path: str) -> str:
    with urlopen(f"http://127.0.0.1:{port}/{path}", timeout=PATIENCE) as answer:
        return str(answer.read().decode())


@pytest.mark.skipif(bool(browser.missing()), reason=browser.missing() or "there is a browser")
async def test_two_pages_in_a_browser_show_their_orders_through_a_restart_of_the_daemon(
    orders: Database, start_daemon: Start, key: Path, place: Address
) -> None:
    begun, restarted, ended = trio.Event(), trio.Event(), trio.Event()
    portal = trio.lowlevel.current_trio_token()
    wanted: dict[int, list[int]] = {}

    def look(port: int) -> None:
        with browser.open_browser() as chromium:
            pages = {customer: chromium.new_context().new_page() for customer in CUSTOMERS}
            for customer, page in pages.items():
                page.goto(f"http://127.0.0.1:{port}/{customer}")
                page.get_by_text("before").wait_for(timeout=1000 * PATIENCE)
            portal.run_sync_soon(begun.set)
            trio.from_thread.run(restarted.wait)
            for customer, page in pages.items():
                page.get_by_text("after").wait_for(timeout=1000 * PATIENCE)
                text = page.locator("#orders").inner_text()
                found = [tuple(map(int, re.findall(r"\d+", line)[:2])) for line in text.splitlines() if line.strip()]
                assert found == [(id, customer) for id in wanted[customer]], text
        portal.run_sync_soon(ended.set)

    with serving_pages(f"http://{place}", key) as port:
        origins = f"http://127.0.0.1:{port}"
        async with trio.open_nursery() as nursery:
            async with start_daemon(http_origins=origins):
                await orders.execute("INSERT INTO orders (customer_id, item) VALUES (42, 'before'), (43, 'before')")
                nursery.start_soon(trio.to_thread.run_sync, look, port)
                with trio.fail_after(3 * PATIENCE):
                    await begun.wait()
            for _ in range(5):  # no daemon runs
                await change_orders(orders)
            async with start_daemon(http_origins=origins):
                for _ in range(5):
                    await change_orders(orders)
                await orders.execute("INSERT INTO orders (customer_id, item) VALUES (42, 'after'), (43, 'after')")
                wanted.update({customer: await ids_of(orders, customer) for customer in CUSTOMERS})
                restarted.set()
                with trio.fail_after(3 * PATIENCE):
                    await ended.wait()
